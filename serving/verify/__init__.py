"""`onnxport verify`: do all providers give the same answers from the same files, and how fast?"""
