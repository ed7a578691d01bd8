"""How a checkpoint is quantized, from `quantization_config`: what is read, and what is refused.

Weights in FP8 and in MXFP4 are read as the numbers that they stand for. What such a configuration
says of activations and of a KV cache is about how others compute, and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config

KEY: Final = "quantization_config"
_FP8: Final = "fp8"
_MXFP4: Final = "mxfp4"
_COMPRESSED: Final = "compressed-tensors"
_SCALES_OF_ACTIVATIONS: Final = (
    *("activation_scale", ".input_scale", ".k_scale", ".v_scale", ".q_scale"),
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """What there is to know of a checkpoint's weights; of one that is not quantized nothing."""

    weight_block: tuple[int, int] | None = None  # rows and columns that share a scale, in FP8
    ignored: tuple[str, ...] = ()  # suffixes of tensors that are about activations


def read_quantization(config: Config) -> Quantization:
    """How the weights are quantized.

    Raises:
        UnsupportedModelError: In a way that is not read.
        CheckpointError: A value is of a wrong type.
    """
    found = config.get(KEY, dict, None)
    if found is None:
        return Quantization()
    method = found.get("quant_method")
    if method == _MXFP4:
        return Quantization()
    if method == _FP8:
        return Quantization(_block(config, found.get("weight_block_size")), _SCALES_OF_ACTIVATIONS)
    if method == _COMPRESSED:
        return Quantization(_block_of_groups(config, found), _SCALES_OF_ACTIVATIONS)
    raise _unsupported(config, f"with {method!r}")


def _block_of_groups(config: Config, found: Mapping[str, Any]) -> tuple[int, int] | None:
    """The block of compressed-tensors' FP8, the same in all groups of layers."""
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unsupported(config, f"with {_COMPRESSED!r} without config_groups")
    blocks = set()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        kind = {} if not isinstance(weights, dict) else weights
        is_fp8 = kind.get("type") == "float" and kind.get("num_bits") == 8
        if not is_fp8 or kind.get("symmetric") is False:
            raise _unsupported(config, f"with {_COMPRESSED!r}, whose group {name!r} is {weights}")
        blocks.add(_block(config, kind.get("block_structure")))
    if len(blocks) > 1:
        raise _unsupported(config, f"with {_COMPRESSED!r} in blocks of several sizes, {blocks}")
    return blocks.pop()


def _block(config: Config, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not (
        isinstance(value, list)
        and len(value) == 2
        and all(type(one) is int and one > 0 for one in value)
    ):
        raise CheckpointError(
            f"{config.path}: the block of weights that share a scale is {value!r}; it must be two "
            "positive integers, rows and columns."
        )
    return value[0], value[1]


def _unsupported(config: Config, how: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{config.path}: the weights are quantized {how}; read are {_FP8!r}, {_COMPRESSED!r} with "
        f"weights in FP8, and {_MXFP4!r}. Export the original, unquantized checkpoint instead."
    )
