"""Gemma 4."""

from onnxport.exporter.gguf.common import Values
from onnxport.exporter.gguf.facts import Facts


def gemma4(facts: Facts) -> Values:
    raise NotImplementedError
