"""Onnxport held against what others have published; see `scripts/published.py`."""
