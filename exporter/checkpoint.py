"""Safetensors checkpoints, read lazily: one file or many, a tensor or a few rows at a time.

Bytes are read into an array that the caller owns, not mapped, so that the memory of an export is
that of the arrays alive and never that of the checkpoint. Reads are thread-safe.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, a JSON
header, then the tensors' bytes, little-endian, row-major).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CheckpointError
from onnxport.exporter import fp8, mxfp4, packed
from onnxport.exporter.shard import DTYPES, INTEGERS, Shard

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"

_BYTES: Final = "U8"
_EXPONENTS: Final = "F8_E8M0"  # bytes of scales that are powers of two
MXFP4: Final = "MXFP4"  # of two tensors of bytes, see `mxfp4`


class Checkpoint:
    """Every tensor of a model folder by name. Use as a context manager."""

    def __init__(
        self,
        shards: Iterable[Shard],
        weight_block: tuple[int, int] | None = None,
        packing: packed.Packing | None = None,
    ) -> None:
        """Join `shards`, and quantized tensors with their scales.

        Args:
            shards: The files.
            weight_block: Rows and columns that share a scale, of tensors in FP8 that have blocks.
            packing: How matrices are stored in integers; None: none is.

        Raises:
            CheckpointError: Two of the files hold the same tensor, or what a matrix in integers
                consists of contradicts itself.
        """
        self._shards = tuple(shards)
        self._owners: dict[str, Shard] = {}
        for shard in self._shards:
            for name in shard.tensors:
                if name in self._owners:
                    raise CheckpointError(
                        f"the tensor {name} is in {self._owners[name].path} and in {shard.path}; "
                        "a checkpoint holds each tensor once. Remove the file that does not belong."
                    )
                self._owners[name] = shard
        self._tensors = {name: one.tensors[name] for name, one in self._owners.items()}
        self._scales: dict[str, str] = {}  # by tensor
        self._blocks: dict[str, tuple[int, int]] = {}  # of those in FP8
        self._packing = packing
        self._packed: dict[str, packed.PackedMatrix] = {}
        self._integers = lru_cache(maxsize=1)(self._load_integers)  # panels come one by one
        for name in tuple(self._tensors):
            if name.endswith(mxfp4.BLOCKS):
                self._join_mxfp4(name, name.removesuffix(mxfp4.BLOCKS) + mxfp4.SCALES)
            for suffix in fp8.SUFFIXES:
                self._join_fp8(name, name + suffix, weight_block)
        if packing is not None:
            self._join_packed(packing)

    def _join_mxfp4(self, blocks: str, scales: str) -> None:
        """Make one tensor of numbers of two of bytes, if that is what they are."""
        first, second = self._tensors[blocks], self._tensors.get(scales)
        if (
            second is not None
            and {first.dtype, second.dtype} == {_BYTES}
            and len(first.shape) > 2
            and first.shape == (*second.shape, mxfp4.BLOCK_BYTES)
        ):
            *heights, count = second.shape
            shape = (*heights, count * mxfp4.BLOCK_SIZE)
            self._tensors[blocks] = replace(first, dtype=MXFP4, shape=shape)
            self._scales[blocks] = scales
            del self._tensors[scales]

    def _join_fp8(self, values: str, scales: str, block: tuple[int, int] | None) -> None:
        """Take the scales of a tensor in FP8 for a part of it, if that is what they are."""
        first, second = self._tensors.get(values), self._tensors.get(scales)
        if first is None or second is None or first.dtype != fp8.DTYPE:
            return
        shared = fp8.block_of(first.shape, second.shape, block)
        if shared is not None and second.dtype in (*DTYPES, _EXPONENTS):
            self._blocks[values] = shared
            self._scales[values] = scales
            del self._tensors[scales]

    def _join_packed(self, packing: packed.Packing) -> None:
        """Make one tensor of numbers of those that a matrix in integers consists of."""
        found = dict(packed.find_matrices(self._tensors, packing, self._read_stored))
        for name, matrix in found.items():
            stored = self._tensors[matrix.levels]
            for part in matrix.tensors:
                self._tensors.pop(part, None)
            if name in self._tensors:
                raise CheckpointError(
                    f"the checkpoint holds {name} and {matrix.levels}, which stands for it; "
                    "a checkpoint holds each matrix once."
                )
            self._tensors[name] = replace(stored, name=name, shape=matrix.shape)
            self._owners[name] = self._owners[matrix.levels]
            self._packed[name] = matrix

    @classmethod
    def open(
        cls,
        folder: Path,
        weight_block: tuple[int, int] | None = None,
        packing: packed.Packing | None = None,
    ) -> Checkpoint:
        """Open the checkpoint in `folder`: the single file, or else those of its index.

        That is transformers' order: where there are both, one may be older than the other.
        `weight_block` and `packing` are as with the constructor.

        Raises:
            CheckpointError: no safetensors weights, a shard missing, truncated or corrupt, or a
                tensor that the index names and its shard does not hold.
        """
        names, weight_map = [SINGLE_FILE], {}
        if not (folder / SINGLE_FILE).is_file():
            if not (folder / INDEX_FILE).is_file():
                raise CheckpointError(_no_weights(folder))
            weight_map = _read_index(folder / INDEX_FILE)
            names = sorted(set(weight_map.values()))
        shards: list[Shard] = []
        try:
            for name in names:
                shards.append(Shard(folder / name))
            checkpoint = cls(shards, weight_block, packing)
            for tensor, file in weight_map.items():
                owner = checkpoint._owners.get(tensor)
                if owner is None or owner.path.name != file:
                    raise CheckpointError(
                        f"{folder / INDEX_FILE} says that {file} holds the tensor {tensor}, and it "
                        "does not. Download the checkpoint again."
                    )
        except BaseException:
            for shard in shards:
                shard.close()
            raise
        return checkpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close every shard. Idempotent."""
        for shard in self._shards:
            shard.close()

    def adopt(self, other: Checkpoint, name: str, own: str) -> None:
        """Take a tensor of another checkpoint, under a name of its own; that must stay open."""
        if name in other._scales or name in other._packed:
            raise CheckpointError(
                f"{name} in {other._owners[name].path} is quantized, and a draft head reads it "
                "as it is; export from the original checkpoint."
            )
        self._tensors[own], self._owners[own] = other._tensors[name], other._owners[name]

    def read_plain(self, name: str, dtype: str) -> NDArray[Any]:
        """Read a tensor of integers or bools whole.

        Args:
            name: of the tensor.
            dtype: what it has to be, as safetensors calls it: I64 or BOOL.

        Raises:
            CheckpointError: it is stored in something else.
        """
        stored = self._tensors[name]
        if stored.dtype != dtype:
            raise CheckpointError(f"the tensor {name} is {stored.dtype}, expected {dtype}.")
        return self._read_stored(name)

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._tensors)

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that each tensor in `shapes` is there, floating-point, and has that shape.

        Raises CheckpointError that lists every violation, so that one run shows them all.
        """
        missing = [name for name in shapes if name not in self._tensors]
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks {len(missing)} of {len(shapes)} tensors that its config "
                f"calls for: {_some(missing)}. It holds {len(self._tensors)}, such as "
                f"{_some(sorted(self._tensors), 3)}. Check that config.json belongs to these "
                "weights and that every shard was downloaded."
            )
        wrong = [
            f"{name} is {list(found.shape)}, expected {list(shape)}"
            for name, shape in shapes.items()
            if (found := self._tensors[name]).shape != shape
        ]
        if wrong:
            raise CheckpointError(
                f"{len(wrong)} tensors do not have the shape that config.json calls for: "
                f"{_some(wrong)}. Check that config.json belongs to these weights."
            )
        untyped = [
            f"{name} is {self._tensors[name].dtype} in {self._owners[name].path.name}"
            for name in shapes
            if not self.is_readable(name)
        ]
        if untyped:
            raise CheckpointError(
                f"{len(untyped)} tensors have a type that cannot be exported: {_some(untyped)}. "
                f"Allowed are {', '.join(DTYPES)}: export the original, unquantized checkpoint."
            )

    def is_readable(self, name: str) -> bool:
        """Whether a tensor is read as floats."""
        is_quantized = name in self._scales or name in self._packed
        return is_quantized or self._tensors[name].dtype in DTYPES

    def size_bytes(self, name: str) -> int:
        """Bytes of one tensor as it is read."""
        stored = self._tensors[name]
        if name in self._scales or name in self._packed:
            return math.prod(stored.shape) * np.dtype(np.float32).itemsize
        return stored.size_bytes

    def dtype(self, name: str) -> str:
        """What a tensor is stored in, as safetensors calls it, or MXFP4 for two of bytes."""
        return self._tensors[name].dtype

    def read(self, name: str) -> NDArray[Any]:
        """Read one tensor whole, in its shape; see `read_rows`."""
        shape = self._tensors[name].shape
        if len(shape) > 1:
            return self.read_rows(name, 0, math.prod(shape[:-1])).reshape(shape)
        return self._read_rows(name, 0, 1, math.prod(shape)).reshape(shape)

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Read rows `start` to `stop`, [rows, columns].

        In their own dtype, bfloat16, float16 or float32; quantized ones in float32. The rows of
        more matrices in one tensor are counted on from one to the next.
        """
        *heights, columns = self._tensors[name].shape
        assert 0 <= start <= stop <= math.prod(heights)
        if name in self._packed:
            return self._integers(name).decode(start, stop)
        if name not in self._scales:
            return self._read_rows(name, start, stop, columns)
        if name in self._blocks:
            values = self._read_rows(name, start, stop, columns)
            return fp8.decode(values, self._all_scales(name), self._blocks[name], start)
        return mxfp4.decode(*self.read_blocks(name, start, stop))

    def read_blocks(
        self, name: str, start: int, stop: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Read rows of a tensor in MXFP4 as they are stored: blocks and scales, see `mxfp4`."""
        count = self._tensors[name].shape[-1] // mxfp4.BLOCK_SIZE
        blocks = self._read_rows(name, start, stop, count * mxfp4.BLOCK_BYTES)
        scales = self._read_rows(self._scales[name], start, stop, count)
        return blocks.reshape(stop - start, count, mxfp4.BLOCK_BYTES), scales

    def read_steps(
        self, name: str, start: int, stop: int, block_size: int
    ) -> NDArray[np.float32] | None:
        """What the numbers of a block are multiples of, in a tensor that is stored in integers.

        Args:
            name: of the tensor, one of `packed_matrices`.
            start: the first of its rows.
            stop: the one behind the last.
            block_size: columns of a block.

        Returns:
            float32 [rows, blocks]; None: a block has more than one step.
        """
        return self._integers(name).steps(start, stop, block_size)

    def read_minima(
        self, name: str, start: int, stop: int, block_size: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """What a block's numbers are less its minimum multiples of, and that minimum.

        Args:
            name: of the tensor, one of `with_minima`.
            start: the first of its rows.
            stop: the one behind the last.
            block_size: columns of a block.

        Returns:
            float32 [rows, blocks] of each; None: a block has more than one of them.
        """
        raise NotImplementedError("no tensor of safetensors has minima")

    @property
    def with_minima(self) -> frozenset[str]:
        """The tensors whose blocks have levels of four bits, a step and a minimum."""
        return frozenset()

    def wanted_bits(self, name: str) -> int | None:
        """The bits of blocks that change a tensor by nothing or little; None: it is in floats."""
        return None

    @property
    def group_widths(self) -> frozenset[int]:
        """Columns of groups that share a scale, of matrices in integers."""
        widths = {one.group_size for one in self._packed.values() if one.num_groups > 1}
        return frozenset(width for width in widths if width is not None)

    @property
    def requantized(self) -> Mapping[str, str]:
        """The type of each matrix that is quantized, but not in integers as artifacts have them."""
        return {}

    @property
    def packed_matrices(self) -> Mapping[str, packed.PackedMatrix]:
        """The tensors that are stored in integers."""
        return self._packed

    def _load_integers(self, name: str) -> packed.Integers:
        assert self._packing is not None
        return packed.load(self._packed[name], self._packing, self._read_stored)

    def _read_stored(self, name: str) -> NDArray[Any]:
        """A tensor whole, as it is stored."""
        owner = self._owners[name]
        stored = owner.tensors[name]
        dtype = DTYPES.get(stored.dtype) or INTEGERS[stored.dtype]
        return owner.read(stored, 0, stored.size_bytes).view(dtype).reshape(stored.shape)

    def _all_scales(self, name: str) -> NDArray[np.float32]:
        """The scales of a tensor in FP8, [row blocks, column blocks]."""
        rows, columns = self._tensors[name].shape
        height, width = self._blocks[name]
        counts = (-(-rows // height), -(-columns // width))
        scales = self._read_rows(self._scales[name], 0, 1, math.prod(counts)).reshape(counts)
        return mxfp4.POWERS[scales] if scales.dtype == np.uint8 else to_float32(scales)

    def _read_rows(self, name: str, start: int, stop: int, columns: int) -> NDArray[Any]:
        """Rows of so many numbers of a tensor as it is stored."""
        owner = self._owners[name]
        known = self._tensors.get(name)  # not what belongs to another tensor
        stored = owner.tensors[name if known is None else known.name]
        dtype = DTYPES.get(stored.dtype, np.dtype(np.uint8))
        row_bytes = columns * dtype.itemsize
        data = owner.read(stored, start * row_bytes, (stop - start) * row_bytes)
        return data.view(dtype).reshape(stop - start, columns)


def to_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """Widen to float32; bfloat16 by moving its bits up, several times faster than a cast."""
    if values.dtype == ml_dtypes.bfloat16:
        bits = values.view(np.uint16).astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return values.astype(np.float32, copy=False)


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        pairs = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the index {path} is not readable ({error}). Download it again."
        ) from error
    for file in pairs.values():
        if Path(file).name != file:
            raise CheckpointError(
                f"the index {path} names the shard {file!r}, which is outside the folder."
            )
    return pairs


def _no_weights(folder: Path) -> str:
    files = sorted(path.name for path in folder.glob("*"))
    ggufs = [name for name in files if name.endswith(".gguf")]
    others = [name for name in files if name.endswith((".bin", ".pt", ".pth"))]
    hint = ""
    if ggufs:
        hint = f" It holds {_some(ggufs)}: give a GGUF file itself, such as {folder / ggufs[0]}."
    elif others:
        hint = (
            f" It holds {_some(others)}: convert them to safetensors first, as transformers does: "
            "AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(FOLDER)."
        )
    return f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}.{hint}"


def _some(names: Iterable[str], limit: int = 5) -> str:
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
