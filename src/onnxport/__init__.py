"""onnxport: export an LLM once to ONNX, serve the same artifact on every vendor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from onnxport.version import __version__

if TYPE_CHECKING:
    from onnxport.serving.beam_params import BeamSearchParams
    from onnxport.serving.llm import LLM
    from onnxport.serving.params import SamplingParams
    from onnxport.serving.pooling import PoolingParams
    from onnxport.serving.structured.spec import StructuredOutputs

__all__ = [
    "LLM",
    "BeamSearchParams",
    "PoolingParams",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]

_LAZY = {
    "BeamSearchParams": "onnxport.serving.beam_params",
    "LLM": "onnxport.serving.llm",
    "PoolingParams": "onnxport.serving.pooling",
    "SamplingParams": "onnxport.serving.params",
    "StructuredOutputs": "onnxport.serving.structured.spec",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'onnxport' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
