"""Benchmarks: each states its machine and its command, and gives ratios to a peer."""
