"""Types of tensors are those of llama.cpp's newest package."""

from __future__ import annotations

from onnxport.exporter.gguf import blocks
from tests.published.converting import package
from tests.published.places import needs_llama_cpp

pytestmark = needs_llama_cpp


def test_all_are_known() -> None:
    newest = package()
    sizes = newest.GGML_QUANT_SIZES
    theirs = {(kind.value, kind.name, *sizes[kind]) for kind in newest.GGMLQuantizationType}
    ours = {(number, one.name, one.size, one.num_bytes) for number, one in blocks.TYPES.items()}
    assert ours == theirs
