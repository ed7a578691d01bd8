"""The `cpu` provider and its kernels."""
