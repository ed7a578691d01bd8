"""Checkpoint to artifact, without torch."""
