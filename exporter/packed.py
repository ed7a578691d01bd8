"""Weights in integers of 2, 4 or 8 bits, read as floats: GPTQ, AWQ and compressed-tensors.

A matrix `NAME.weight` [rows, columns] = [N, K] is `(level - zero) * scale`, where K is cut into
groups that have a scale, and a zero, for each row. Integers lie in words of 32 bits, the first one
in the lowest bits:

- GPTQ has `NAME.qweight` [K / in a word, N], `NAME.scales` [groups, N], `NAME.qzeros` [groups,
  N / in a word], from which its first format took 1, and most have `NAME.g_idx` [K], the group of
  a column;
- AWQ has `NAME.qweight` [K, N / 8], `NAME.scales` and `NAME.qzeros` alike, where a word holds rows
  0, 2, 4, 6, 1, 3, 5 and 7 of eight;
- compressed-tensors has `NAME.weight_packed` [N, K / in a word] or, in bytes, `NAME.weight` [N, K],
  `NAME.weight_scale` [N, groups], where it is asymmetric `NAME.weight_zero_point` [N / in a word,
  groups] or [N, groups], `NAME.weight_shape`, and `NAME.weight_g_idx` [K] where columns changed
  places. Its integers have signs: what is packed is them plus half of their range.

Formats: AutoGPTQ's and GPTQModel's `QuantLinear.pack`, AutoAWQ's `WQLinear_GEMM`, and
`compressed_tensors.compressors` (`pack_quantized`, `naive_quantized`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CheckpointError
from onnxport.exporter.shard import DTYPES, StoredTensor

GPTQ: Final = "gptq"
AWQ: Final = "awq"
COMPRESSED: Final = "compressed-tensors"
BITS: Final = (2, 4, 8)

_WORD_BITS: Final = 32
_WORDS: Final = ".qweight"  # of GPTQ and AWQ
_PACKED: Final = ".weight_packed"
_BYTES: Final = ".weight"
_AWQ_ROWS: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight, in the order in which a word has them

Read = Callable[[str], NDArray[Any]]  # a tensor as it is stored
Tensors = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint stores matrices in integers, from its configuration."""

    layout: str  # GPTQ, AWQ or COMPRESSED
    bits: int | None = None  # of GPTQ, where a matrix has no g_idx, which tells
    zero_offset: int = 0  # what zeros are to be raised by


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """The tensors that one matrix is stored in."""

    shape: tuple[int, int]  # of the matrix, [rows, columns]
    bits: int
    num_groups: int  # of columns
    levels: str
    scales: str
    zeros: str | None
    order: str | None  # the group of each column
    others: tuple[str, ...] = ()  # what says nothing more

    @property
    def group_size(self) -> int | None:
        """Columns of a group; None: groups differ in size."""
        columns = self.shape[1]
        return None if columns % self.num_groups else columns // self.num_groups

    @property
    def tensors(self) -> tuple[str, ...]:
        """All of them."""
        some = (self.levels, self.scales, self.zeros, self.order, *self.others)
        return tuple(name for name in some if name is not None)


@dataclass(frozen=True, slots=True)
class Integers:
    """A matrix in memory."""

    levels: NDArray[np.uint8]  # [rows, columns]
    scales: NDArray[np.float32]  # [rows, groups]
    zeros: NDArray[np.float32]  # [rows, groups]
    width: int  # columns of a group, of which the last one may have fewer
    order: NDArray[np.int64] | None  # [columns], the group of each; None: they lie side by side

    def decode(self, start: int, stop: int) -> NDArray[np.float32]:
        """The numbers of rows `start` to `stop`, float32 [rows, columns].

        They are exact where scales have no more than 16 bits.
        """
        numbers = self.levels[start:stop].astype(np.float32)
        scales, zeros = self.scales[start:stop], self.zeros[start:stop]
        rows, columns = numbers.shape
        if self.order is None and columns == self.width * scales.shape[1]:
            grouped = numbers.reshape(rows, -1, self.width)  # a view
            grouped -= zeros[..., None]
            grouped *= scales[..., None]
            return numbers
        order = np.arange(columns) // self.width if self.order is None else self.order
        numbers -= zeros[:, order]
        numbers *= scales[:, order]
        return numbers

    def steps(self, start: int, stop: int, block_size: int) -> NDArray[np.float32] | None:
        """What numbers of a block of so many columns are multiples of.

        Returns:
            float32 [rows, blocks]; None: a block has columns of more than one group.
        """
        columns, groups = self.levels.shape[1], self.scales.shape[1]
        if self.order is not None or (groups > 1 and self.width % block_size):
            return None
        group = np.arange(0, columns, block_size) // self.width
        return self.scales[start:stop, group]


def find_matrices(
    tensors: Tensors, packing: Packing, read: Read
) -> Iterator[tuple[str, PackedMatrix]]:
    """Each matrix that is stored in integers, with the name that it has where it is not.

    Args:
        tensors: All of a checkpoint.
        packing: How it stores them.
        read: Reads one.

    Raises:
        CheckpointError: Tensors of a matrix are missing or contradict each other.
    """
    for name in tensors:
        if packing.layout == COMPRESSED:
            if name.endswith(_PACKED):
                prefix = name.removesuffix(_PACKED)
                yield prefix + _BYTES, _compressed(tensors, prefix, read)
            elif name.endswith(_BYTES) and tensors[name].dtype == "I8":
                yield name, _compressed_bytes(tensors, name.removesuffix(_BYTES))
        elif name.endswith(_WORDS):
            prefix = name.removesuffix(_WORDS)
            find = _awq if packing.layout == AWQ else _gptq
            yield prefix + _BYTES, find(tensors, prefix, packing)


def load(matrix: PackedMatrix, packing: Packing, read: Read) -> Integers:
    """Read a matrix whole.

    Raises:
        CheckpointError: A column is in a group that there is not.
    """
    levels = _levels(matrix, packing, read(matrix.levels))
    scales = read(matrix.scales).astype(np.float32)
    zeros = _zeros(matrix, packing, None if matrix.zeros is None else read(matrix.zeros))
    rows, groups = matrix.shape[0], matrix.num_groups
    scales = scales.reshape(-1, groups) if packing.layout == COMPRESSED else scales.T
    width, order = _order(matrix, None if matrix.order is None else read(matrix.order))
    return Integers(
        levels,
        np.ascontiguousarray(np.broadcast_to(scales, (rows, groups))),
        np.ascontiguousarray(np.broadcast_to(zeros, (rows, groups)), np.float32),
        width,
        order,
    )


def unpack(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """The integers of words of 32 bits, side by side.

    Args:
        words: int32 [..., words], little-endian.
        bits: Of each, which divide 8.

    Returns:
        uint8 [..., words * 32 / bits].
    """
    data = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return data
    many = 8 // bits
    levels = np.empty((*data.shape, many), np.uint8)
    for place in range(many):
        levels[..., place] = data >> (place * bits)
    levels &= (1 << bits) - 1
    return levels.reshape(*data.shape[:-1], -1)


def _gptq(tensors: Tensors, prefix: str, packing: Packing) -> PackedMatrix:
    levels, scales, zeros = (prefix + one for one in (_WORDS, ".scales", ".qzeros"))
    words, rows = _dims(tensors, levels, 2, "I32")
    order = prefix + ".g_idx" if prefix + ".g_idx" in tensors else None
    bits = packing.bits
    if order is not None:
        (columns,) = _dims(tensors, order, 1, "I32")
        bits = words * _WORD_BITS // columns if columns else 0
    if bits not in BITS:
        raise CheckpointError(
            f"{levels} has integers of {bits} bits; read are those of {', '.join(map(str, BITS))}. "
            "Export the original, unquantized checkpoint instead."
        )
    many = _WORD_BITS // bits
    groups, _ = _dims(tensors, scales, 2)
    _check(tensors, scales, (groups, rows))
    _check(tensors, zeros, (groups, -(-rows // many)), "I32")
    matrix = PackedMatrix((rows, words * many), bits, groups, levels, scales, zeros, order)
    if order is None:
        _check_even(matrix)
    else:
        _check(tensors, order, (words * many,), "I32")
    return matrix


def _awq(tensors: Tensors, prefix: str, packing: Packing) -> PackedMatrix:
    levels, scales, zeros = (prefix + one for one in (_WORDS, ".scales", ".qzeros"))
    columns, words = _dims(tensors, levels, 2, "I32")
    groups, _ = _dims(tensors, scales, 2)
    rows = words * len(_AWQ_ROWS)
    _check(tensors, scales, (groups, rows))
    _check(tensors, zeros, (groups, words), "I32")
    matrix = PackedMatrix((rows, columns), 4, groups, levels, scales, zeros, None)
    _check_even(matrix)
    return matrix


def _compressed(tensors: Tensors, prefix: str, read: Read) -> PackedMatrix:
    levels, shape = prefix + _PACKED, prefix + ".weight_shape"
    rows, words = _dims(tensors, levels, 2, "I32")
    if _dims(tensors, shape, 1) != (2,) or tensors[shape].dtype not in {"I32", "I64"}:
        raise CheckpointError(f"{shape} is not two numbers, rows and columns; download it again.")
    told, columns = map(int, read(shape))
    fitting = [bits for bits in BITS if words == -(-columns * bits // _WORD_BITS)]
    if told != rows or len(fitting) != 1:
        raise CheckpointError(
            f"{shape} is {[told, columns]}, and {levels} is {[rows, words]}, which is not that "
            f"many integers of {', '.join(map(str, BITS))} bits. Download the checkpoint again, or "
            "export the original, unquantized one."
        )
    (bits,) = fitting
    return _of_scales(tensors, prefix, (rows, columns), bits, levels, (shape,))


def _compressed_bytes(tensors: Tensors, prefix: str) -> PackedMatrix:
    rows, columns = _dims(tensors, prefix + _BYTES, 2)
    return _of_scales(tensors, prefix, (rows, columns), 8, prefix + _BYTES, ())


def _of_scales(
    tensors: Tensors,
    prefix: str,
    shape: tuple[int, int],
    bits: int,
    levels: str,
    others: tuple[str, ...],
) -> PackedMatrix:
    scales = prefix + ".weight_scale"
    found = _dims(tensors, scales, None)
    _check(tensors, scales, found)
    rows, columns = shape
    if found in {(), (1,), (1, 1), (rows,)}:
        groups = 1
    elif len(found) == 2 and found[0] == rows:
        groups = found[1]
    else:
        raise CheckpointError(
            f"{scales} is {list(found)}, and the matrix is {list(shape)}; read are scales of the "
            "matrix, of rows, and of groups in them. Export the original, unquantized checkpoint."
        )
    optional = (prefix + ".weight_zero_point", prefix + ".weight_g_idx")
    zeros, order = (name if name in tensors else None for name in optional)
    if zeros is not None:
        is_packed = tensors[zeros].dtype == "I32"
        height = -(-rows * bits // _WORD_BITS) if is_packed else rows
        dims = _dims(tensors, zeros, None, "I32" if is_packed else "I8")
        wanted = {(height, groups)} | (set() if is_packed else {found})
        if dims not in wanted:
            raise CheckpointError(f"{zeros} is {list(dims)}, expected {[height, groups]}.")
    if order is not None:
        _check(tensors, order, (columns,), "I32")
    matrix = PackedMatrix(shape, bits, groups, levels, scales, zeros, order, others)
    if order is None:
        _check_even(matrix)
    return matrix


def _check_even(matrix: PackedMatrix) -> None:
    """Refuse groups that differ in size where nothing says which column is in which."""
    if matrix.group_size is None:
        raise CheckpointError(
            f"{matrix.scales} has scales of {matrix.num_groups} groups, which do not divide the "
            f"{matrix.shape[1]} columns of the matrix. Download the checkpoint again."
        )


def _dims(
    tensors: Tensors, name: str, count: int | None, dtype: str | None = None
) -> tuple[int, ...]:
    """A tensor's shape, of `count` dimensions, or of any; of the type `dtype`, or of any."""
    found = tensors.get(name)
    if found is None:
        raise CheckpointError(
            f"the checkpoint lacks {name}, which belongs to a matrix in integers. Check that every "
            "shard was downloaded."
        )
    is_other = count is not None and len(found.shape) != count
    if is_other or 0 in found.shape or (dtype or found.dtype) != found.dtype:
        dims = "" if count is None else f" with {count} dimensions"
        raise CheckpointError(
            f"{name} is {found.dtype} {list(found.shape)}, expected {dtype or 'numbers'}{dims}. "
            "Export the original, unquantized checkpoint instead."
        )
    return found.shape


def _check(tensors: Tensors, name: str, shape: tuple[int, ...], dtype: str | None = None) -> None:
    found = _dims(tensors, name, len(shape), dtype)
    if found != shape or (dtype is None and tensors[name].dtype not in DTYPES):
        kind = dtype or " or ".join(DTYPES)
        raise CheckpointError(
            f"{name} is {tensors[name].dtype} {list(found)}, expected {kind} {list(shape)}, as the "
            "matrix has it that it belongs to. Download the checkpoint again."
        )


def _levels(matrix: PackedMatrix, packing: Packing, stored: NDArray[Any]) -> NDArray[np.uint8]:
    """All integers, without signs, uint8 [rows, columns]."""
    if stored.dtype == np.int8:
        return stored.view(np.uint8) ^ np.uint8(1 << 7)
    if packing.layout == AWQ:
        return np.ascontiguousarray(_in_order(unpack(stored, matrix.bits)).T)
    if packing.layout == GPTQ:
        stored = stored.T
    return unpack(stored, matrix.bits)[:, : matrix.shape[1]]


def _zeros(matrix: PackedMatrix, packing: Packing, stored: NDArray[Any] | None) -> NDArray[Any]:
    """The zeros, which levels have no signs beside; what [rows, groups] is broadcast from."""
    half = 1 << (matrix.bits - 1)
    if stored is None:
        return np.full((1, 1), half)
    if packing.layout == COMPRESSED:
        if stored.dtype == np.int8:
            return stored.reshape(-1, matrix.num_groups).astype(np.int16) + half
        return unpack(stored.T, matrix.bits)[:, : matrix.shape[0]].T
    zeros = unpack(raised(stored, packing.zero_offset, matrix.bits), matrix.bits)
    if packing.layout == AWQ:
        zeros = _in_order(zeros)
    return zeros[:, : matrix.shape[0]].T.astype(np.int16)


def raised(words: NDArray[Any], offset: int, bits: int) -> NDArray[Any]:
    """Words whose integers are raised by `offset`.

    They are added to as a whole, as they were lowered: a 0 that was lowered has borrowed from the
    integer above it.
    """
    if not offset:
        return words
    all_offsets = sum(offset << place for place in range(0, 32, bits))
    return (words.view(np.uint32) + np.uint32(all_offsets)).view(words.dtype)


def _in_order(levels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The rows of AWQ's words in their order, [..., rows]."""
    words = levels.reshape(*levels.shape[:-1], -1, len(_AWQ_ROWS))
    ordered = np.empty_like(words)
    ordered[..., list(_AWQ_ROWS)] = words
    return ordered.reshape(levels.shape)


def _order(
    matrix: PackedMatrix, stored: NDArray[Any] | None
) -> tuple[int, NDArray[np.int64] | None]:
    """The columns of a group, and the group of each column unless they lie side by side."""
    columns, groups = matrix.shape[1], matrix.num_groups
    width = -(-columns // groups)
    # compressed-tensors may store -1 for each where they do.
    if stored is None or (stored == -1).all():
        _check_even(matrix)
        return width, None
    if stored.min() < 0 or stored.max() >= groups:
        raise CheckpointError(
            f"{matrix.order} names the groups {stored.min()} to {stored.max()}, of {groups}. "
            "Download the checkpoint again."
        )
    first = int((stored == 0).sum())
    if first and np.array_equal(stored, np.arange(columns) // first):
        return first, None
    return width, stored.astype(np.int64)
