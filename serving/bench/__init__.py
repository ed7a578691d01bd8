"""`onnxport bench`: loads, what is measured under them, and reports."""
