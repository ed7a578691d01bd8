"""How GGUF files store numbers: plain, or in blocks of a row that share scales.

What is decoded here are plain numbers, and blocks whose numbers are whole multiples of one scale
(see `BlockType.bits`), or these and a minimum (see `minima`), for such blocks can stay as they are.
All others the package `gguf` decodes, the reference implementation in NumPy of ggml's authors,
whose sizes and ids these are, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CheckpointError
from onnxport.exporter import mxfp4
from onnxport.exporter.gguf import minima

MXFP4: Final = "MXFP4"
STEP_BLOCK: Final = 32  # numbers that share a scale, in every type that has `BlockType.bits`

_EXPERTS: Final = "_exps.weight"  # what names of experts' matrices end in
_SCALE_BYTES: Final = 2  # float16, ahead of a block's numbers
_PLAIN: Final[Mapping[str, np.dtype[Any]]] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


@dataclass(frozen=True, slots=True)
class BlockType:
    """One of ggml's types of tensors."""

    name: str
    size: int  # numbers of a block
    num_bytes: int  # of a block
    bits: int | None = None  # that hold the multiples of its one scale; None: it is not so made

    @property
    def has_minima(self) -> bool:
        """Whether its numbers are those of `minima`."""
        return self.name in minima.NAMES

    @property
    def wanted_bits(self) -> int | None:
        """The bits of blocks that change its numbers by nothing or little; None: it is plain."""
        if self.name in _PLAIN:
            return None
        return 4 if self.bits == 4 or self.has_minima else 8

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of so many numbers, which are whole blocks."""
        assert columns % self.size == 0
        return columns // self.size * self.num_bytes


TYPES: Final[Mapping[int, BlockType]] = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18, bits=4),
    3: BlockType("Q4_1", 32, 20),
    6: BlockType("Q5_0", 32, 22, bits=5),
    7: BlockType("Q5_1", 32, 24),
    8: BlockType("Q8_0", 32, 34, bits=8),
    9: BlockType("Q8_1", 32, 36),
    10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110),
    12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176),
    14: BlockType("Q6_K", 256, 210),
    15: BlockType("Q8_K", 256, 292),
    16: BlockType("IQ2_XXS", 256, 66),
    17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98),
    19: BlockType("IQ1_S", 256, 50),
    20: BlockType("IQ4_NL", 32, 18, bits=8),
    21: BlockType("IQ3_S", 256, 110),
    22: BlockType("IQ2_S", 256, 82),
    23: BlockType("IQ4_XS", 256, 136),
    24: BlockType("I8", 1, 1),
    25: BlockType("I16", 1, 2),
    26: BlockType("I32", 1, 4),
    27: BlockType("I64", 1, 8),
    28: BlockType("F64", 1, 8),
    29: BlockType("IQ1_M", 256, 56),
    30: BlockType("BF16", 1, 2),
    34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66),
    39: BlockType(MXFP4, 32, 17, bits=5),  # twice a number is an integer up to 12
    40: BlockType("NVFP4", 64, 36),
    41: BlockType("Q1_0", 128, 18, bits=4),
    42: BlockType("Q2_0", 64, 18, bits=4),
}
BY_NAME: Final[Mapping[str, BlockType]] = {one.name: one for one in TYPES.values()}

# What those of IQ4_NL's sixteen levels are, which are denser near zero.
_UNEVEN: Final = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8
)
_OWN: Final = frozenset(
    {*_PLAIN, *minima.NAMES, "Q1_0", "Q2_0", "Q4_0", "Q5_0", "Q8_0", "IQ4_NL", MXFP4}
)


def wanted_bits(types: Mapping[str, str]) -> dict[str, int | None]:
    """The bits that each tensor needs, see `BlockType.wanted_bits`.

    Experts that all are in MXFP4 have four, as they do where they stay so (`--expert-precision`).

    Args:
        types: Names of types by names of tensors, of all that a file has.
    """
    experts = {name for name in types if name.endswith(_EXPERTS)}
    loose = experts if {types[name] for name in experts} == {MXFP4} else set()
    return {name: 4 if name in loose else BY_NAME[one].wanted_bits for name, one in types.items()}


def check_decodable(name: str, tensor: str) -> None:
    """Refuse a type whose numbers cannot be read.

    Raises:
        CheckpointError: names the tensor and its type, and what to do.
    """
    if name in _OWN:
        return
    quants = _library(name, tensor)
    try:
        quants.dequantize(np.zeros((1, BY_NAME[name].num_bytes), np.uint8), _types()[name])
    except (KeyError, NotImplementedError) as error:
        raise CheckpointError(
            f"the tensor {tensor} is {name}, which the package gguf cannot decode. Give a file in "
            "another type, such as Q8_0 or Q4_K_M."
        ) from error


def decode(name: str, tensor: str, data: NDArray[np.uint8]) -> NDArray[Any]:
    """The numbers of rows.

    Args:
        name: The type.
        tensor: What they are of, for errors.
        data: uint8 [rows, bytes of a row].

    Returns:
        [rows, columns]: plain numbers in their own dtype, others as float32.

    Raises:
        CheckpointError: See `check_decodable`.
    """
    if name in _PLAIN:
        return np.ascontiguousarray(data).view(_PLAIN[name])
    if name == MXFP4:
        return mxfp4.decode(*mxfp4_blocks(data))
    with np.errstate(over="ignore", invalid="ignore"):  # seen as numbers that are not finite
        if name not in _OWN:
            found: NDArray[np.float32] = _library(name, tensor).dequantize(data, _types()[name])
            return found
        if name in minima.NAMES:
            return minima.read(name, data).decode()
        blocks = data.reshape(len(data), -1, BY_NAME[name].num_bytes)
        numbers = _levels(name, blocks[..., _SCALE_BYTES:]).astype(np.float32)
        numbers = numbers.reshape(len(data), -1, STEP_BLOCK)
        numbers *= steps(name, data)[..., None]
    return numbers.reshape(len(data), -1)


def steps(name: str, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    """What the numbers of each 32 of a row are multiples of; of a type that has `bits`.

    Args:
        name: The type.
        data: uint8 [rows, bytes of a row].

    Returns:
        float32 [rows, columns / 32].
    """
    kind = BY_NAME[name]
    blocks = data.reshape(len(data), -1, kind.num_bytes)
    if name == MXFP4:
        return np.float32(0.5) * mxfp4.POWERS[blocks[..., 0]]
    scales = np.ascontiguousarray(blocks[..., :_SCALE_BYTES]).view("<f2")[..., 0]
    return np.repeat(scales.astype(np.float32), kind.size // STEP_BLOCK, axis=1)


def mxfp4_blocks(data: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Rows in MXFP4 as `mxfp4` has them: blocks [rows, blocks, 16] and scales [rows, blocks].

    Here a block's scale is ahead of its numbers, and a byte has one of its first half and one of
    its second.
    """
    blocks = data.reshape(len(data), -1, BY_NAME[MXFP4].num_bytes)
    halves = np.concatenate([blocks[..., 1:] & 15, blocks[..., 1:] >> 4], axis=-1)
    return halves[..., 0::2] | halves[..., 1::2] << 4, np.ascontiguousarray(blocks[..., 0])


def _levels(name: str, blocks: NDArray[np.uint8]) -> NDArray[np.int8]:
    """The multiples of a block's scale, int8 [rows, blocks, numbers]."""
    signed: NDArray[np.int8]
    if name == "Q8_0":
        signed = blocks.view(np.int8)
        return signed
    if name == "Q1_0":
        signed = np.unpackbits(blocks, axis=-1, bitorder="little").view(np.int8)
        return 2 * signed - np.int8(1)
    if name == "Q2_0":
        signed = (blocks[..., None] >> np.arange(0, 8, 2, dtype=np.uint8) & 3).view(np.int8)
        return signed.reshape(*blocks.shape[:-1], -1) - np.int8(1)
    packed = blocks[..., -16:]
    levels = np.concatenate([packed & 15, packed >> 4], axis=-1)
    if name == "IQ4_NL":
        return np.take(_UNEVEN, levels)
    if name == "Q5_0":
        levels |= np.unpackbits(blocks[..., :4], axis=-1, bitorder="little") << 4
    signed = levels.view(np.int8)
    signed -= np.int8(16 if name == "Q5_0" else 8)
    return signed


def _types() -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType


def _library(name: str, tensor: str) -> Any:
    try:
        from gguf import quants
    except ImportError as error:
        raise CheckpointError(
            f"the tensor {tensor} is {name}, which the package gguf decodes, and that is not "
            "installed: pip install 'onnxport[gguf]'."
        ) from error
    return quants
