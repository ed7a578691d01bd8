"""Rewriting passes: one file each, from a model to a model."""
