"""How a checkpoint is quantized, from `quantization_config`: what is read, and what is refused.

Weights in FP8, in MXFP4 and in integers are read as the numbers that they stand for. What such a
configuration says of activations and of a KV cache is about how others compute, and is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter import packed
from onnxport.exporter.config import Config

KEY: Final = "quantization_config"
_FP8: Final = "fp8"
_MXFP4: Final = "mxfp4"
_AUTO_ROUND: Final = "auto-round"  # which stores tensors as GPTQ and AWQ do
_SCALES_OF_ACTIVATIONS: Final = (
    *("activation_scale", ".input_scale", ".input_zero_point", ".k_scale", ".v_scale", ".q_scale"),
)
# Of compressed-tensors; what is in another one is stored in other tensors.
_FORMATS: Final = (
    *(None, "dense", "float-quantized", "naive-quantized", "int-quantized", "pack-quantized"),
    "mixed-precision",
)
_ZERO_OFFSETS: Final = {None: 1, "gptq": 1, "gptq_v2": 0}  # by format of GPTQ: see `packed`


@dataclass(frozen=True, slots=True)
class Quantization:
    """What there is to know of a checkpoint's weights; of one that is not quantized nothing."""

    weight_block: tuple[int, int] | None = None  # rows and columns that share a scale, in FP8
    packing: packed.Packing | None = None  # of integers
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
        block = _block(config, found.get("weight_block_size"))
        return Quantization(block, ignored=_SCALES_OF_ACTIVATIONS)
    if method == packed.COMPRESSED:
        return _compressed(config, found)
    if method == packed.GPTQ:
        return Quantization(packing=_gptq(config, found))
    if method == packed.AWQ:
        return Quantization(packing=_awq(config, found))
    if method == _AUTO_ROUND:
        return Quantization(packing=_auto_round(config, found))
    raise _unsupported(config, f"with {method!r}")


def _gptq(config: Config, found: Mapping[str, Any]) -> packed.Packing:
    bits = found.get("bits")
    if type(bits) is not int:
        raise CheckpointError(f"{config.path}: the bits of {packed.GPTQ!r} are {bits!r}.")
    if bits not in packed.BITS:
        raise _unsupported(config, f"with {packed.GPTQ!r} to {bits} bits")
    form = found.get("checkpoint_format", found.get("format"))
    if form not in list(_ZERO_OFFSETS) or found.get("is_marlin_format"):  # it may be anything
        raise _unsupported(config, f"with {packed.GPTQ!r} in the format {form or 'marlin'!r}")
    return packed.Packing(packed.GPTQ, bits, _ZERO_OFFSETS[form])


def _awq(config: Config, found: Mapping[str, Any]) -> packed.Packing:
    bits, version = found.get("bits", found.get("w_bit")), found.get("version", found.get("format"))
    has_zeros = found.get("zero_point", True)
    if bits != 4 or str(version or "gemm").lower() != "gemm" or has_zeros is not True:
        raise _unsupported(
            config,
            f"with {packed.AWQ!r}, of which bits are {bits!r}, version {version!r} and zero_point "
            f"{has_zeros!r} (read are 4, 'gemm' and true)",
        )
    return packed.Packing(packed.AWQ, bits)


def _auto_round(config: Config, found: Mapping[str, Any]) -> packed.Packing:
    form, kind = found.get("packing_format", "auto_round:auto_gptq"), found.get("data_type", "int")
    rotated = sorted(key for key in ("rotation_config", "spinquant_config") if found.get(key))
    if kind == "int" and not rotated:
        if form == "auto_round:auto_gptq":
            return _gptq(config, {"bits": found.get("bits")})
        if form == "auto_round:auto_awq":
            return _awq(config, {"bits": found.get("bits")})
    raise _unsupported(
        config,
        f"with {_AUTO_ROUND!r}, of which packing_format is {form!r}, data_type {kind!r}"
        + (f", and {rotated[0]} is there" if rotated else "")
        + " (read are 'auto_round:auto_gptq' and 'auto_round:auto_awq', 'int' and no rotations)",
    )


def _compressed(config: Config, found: Mapping[str, Any]) -> Quantization:
    """What compressed-tensors says: floats in blocks of one size, or integers."""
    method = packed.COMPRESSED
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise _unsupported(config, f"with {method!r} without config_groups")
    sparsity = found.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise _unsupported(config, f"with {method!r} and sparse, {sparsity}")
    if found.get("transform_config"):
        raise _unsupported(config, f"with {method!r} and rotated by a transform_config")
    blocks = set()
    packing: packed.Packing | None = None
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        kind = {} if not isinstance(weights, dict) else weights
        form = group.get("format", found.get("format")) if isinstance(group, dict) else None
        type_and_bits = (kind.get("type"), kind.get("num_bits"))
        if form not in _FORMATS or kind.get("dynamic"):
            raise _unsupported(config, f"with {method!r}, whose group {name!r} is {group}")
        if type_and_bits == ("float", 8) and kind.get("symmetric") is not False:
            blocks.add(_block(config, kind.get("block_structure")))
        elif type_and_bits in [("int", bits) for bits in packed.BITS]:  # these may be anything
            packing = packed.Packing(method)
        else:
            raise _unsupported(config, f"with {method!r}, whose group {name!r} is {weights}")
    if len(blocks) > 1:
        raise _unsupported(config, f"with {method!r} in blocks of several sizes, {blocks}")
    return Quantization(blocks.pop() if blocks else None, packing, _SCALES_OF_ACTIVATIONS)


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
        f"{config.path}: the weights are quantized {how}; read are {_FP8!r}, {_MXFP4!r}, "
        f"{packed.GPTQ!r}, {packed.AWQ!r}, {_AUTO_ROUND!r}, and {packed.COMPRESSED!r} with weights "
        f"in FP8 or in integers, of {', '.join(map(str, packed.BITS))} bits. Export the original, "
        "unquantized checkpoint instead."
    )
