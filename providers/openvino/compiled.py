"""What a plugin made of a graph: its types, its caches, where it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from onnxport.errors import ProviderError
from onnxport.graphs import contract
from onnxport.providers.openvino.caches import CacheFormat, read_format
from onnxport.providers.openvino.plugin import NAMES
from onnxport.providers.openvino.tensors import TensorPair

CACHES: Final = (contract.past_key, contract.past_value)
IDLE: Final = {"Const", "Input", "Output", "Result"}  # kinds of nodes that compute nothing


def precision(compiled: Any) -> str:
    """The type of activations."""
    return NAMES[compiled.get_property("INFERENCE_PRECISION_HINT").to_string()]


def cache_format(
    compiled: Any, heads: tuple[int, int], *, transposed_keys: bool = False, layer: int = 0
) -> CacheFormat:
    """What the plugin made of the caches of a layer.

    For the other arguments see `caches.read_format`.

    Raises:
        ProviderError: the plugin stores them in a way that is not known here.
    """
    (key_type, key), (value_type, value) = (_port(compiled.input(name(layer))) for name in CACHES)
    if key_type != value_type or key_type not in NAMES:
        raise ProviderError(
            f"OpenVINO chose {key_type} keys and {value_type} values for the KV cache; known are "
            f"{', '.join(NAMES)}, both alike. Ask for another kv_cache_dtype"
        )
    return read_format(heads, NAMES[key_type], key, value, transposed_keys=transposed_keys)


def _port(port: Any) -> tuple[str, list[int]]:
    """The element type of a cache input, and the sizes of one of its blocks."""
    dims = list(port.get_partial_shape())[1:]
    return port.get_element_type().to_string(), [dim.get_length() for dim in dims]


def bind_caches(request: Any, pairs: Sequence[TensorPair], layers: Sequence[int] = (0,)) -> None:
    """Let an inference request use the caches of each of `layers`."""
    for layer, pair in zip(layers, pairs, strict=True):
        for name, tensor in zip(CACHES, pair, strict=True):
            request.set_tensor(name(layer), tensor)


def placement(compiled: Any) -> Mapping[str, int]:
    """Device -> operators that it really runs; constants, inputs and outputs are not counted."""
    kinds = [node.get_rt_info()["layerType"] for node in compiled.get_runtime_model().get_ops()]
    count = sum(kind.astype(str) not in IDLE for kind in kinds)
    return dict.fromkeys(compiled.get_property("EXECUTION_DEVICES"), count)
