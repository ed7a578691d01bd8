"""Types of tensors are those of llama.cpp's newest package."""

from __future__ import annotations

import importlib

from onnxport.exporter.gguf import blocks
from tests.published.converting import own_modules
from tests.published.places import needs_llama_cpp

pytestmark = needs_llama_cpp


def test_all_are_known() -> None:
    with own_modules():
        package = importlib.import_module("gguf")
    sizes = package.GGML_QUANT_SIZES
    theirs = {(kind.value, kind.name, *sizes[kind]) for kind in package.GGMLQuantizationType}
    ours = {(number, one.name, one.size, one.num_bytes) for number, one in blocks.TYPES.items()}
    assert ours == theirs
