"""What the `cuda` provider adds to ONNX Runtime's kernels: see add_lora.cu."""
