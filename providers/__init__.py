"""Providers: a graph on a device, one file each."""
