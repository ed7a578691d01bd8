"""Sampling in native code: what `numpy_sampler` does, in one call a step."""
