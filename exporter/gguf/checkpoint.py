"""The tensors of GGUF files as a checkpoint: decoded as they are read, some rows at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CheckpointError
from onnxport.exporter.checkpoint import Checkpoint, to_float32
from onnxport.exporter.gguf import blocks, minima
from onnxport.exporter.gguf.layouts import (
    CONVS,
    CORRECTION,
    DECAYS,
    GATE_BIAS,
    GATE_UP_BIAS,
    SKIPS,
    SPACE_NORM,
    UP_BIAS,
)
from onnxport.exporter.gguf.orders import Order
from onnxport.exporter.packed import PackedMatrix
from onnxport.exporter.shard import DTYPES, Shard, StoredTensor

_BLOCK: Final = 32  # numbers that share a scale, in every type of blocks or in parts of its blocks
_VECTORS: Final = (DECAYS, SKIPS, SPACE_NORM)  # which state spaces have as matrices
_ONE_ROW: Final = "ffn_gate_inp_shexp.weight"  # a matrix of one row, whose first dimension is lost


@dataclass(frozen=True, slots=True)
class Heads:
    """The rows of a tensor that are heads' with neighbouring channels rotated together."""

    count: int
    size: int  # rows of each; what is behind the last one is not turned

    @property
    def rows(self) -> int:
        """Of all."""
        return self.count * self.size


class GgufCheckpoint(Checkpoint):
    """Every tensor of a GGUF model by the name that it has there. Use as a context manager."""

    def __init__(
        self,
        shards: Iterable[Shard],
        turned: Mapping[str, Heads],
        orders: Mapping[str, Order] | None = None,
        values: Mapping[str, NDArray[np.float32]] | None = None,
    ) -> None:
        """Join `shards`.

        Args:
            shards: The files.
            turned: Tensors with rows of heads with neighbouring channels rotated together. They are
                read in the order of all other checkpoints, in which a channel of the first half of
                a head is rotated with one of the second.
            orders: Tensors whose rows or columns are in another order; None: there are none.
            values: Tensors that are not in the files, for their metadata have them; None: none.

        Raises:
            CheckpointError: Two of the files hold the same tensor, or the type of one cannot be
                decoded.
        """
        super().__init__(shards)
        self._turned = turned
        self._orders = orders or {}
        self._last = lru_cache(maxsize=1)(self._load_rows)  # numbers and then steps of a panel
        for kind, name in {one.dtype: name for name, one in self._tensors.items()}.items():
            blocks.check_decodable(kind, name)
        for name, tensor in tuple(self._tensors.items()):
            if name.endswith(_ONE_ROW) and len(tensor.shape) == 1:
                self._tensors[name] = replace(tensor, shape=(1, *tensor.shape))
            if name.endswith(_VECTORS):
                self._tensors[name] = replace(tensor, shape=(math.prod(tensor.shape),))
            if name.endswith(CONVS):  # whose axes of 1 are there or not
                sizes = (math.prod(tensor.shape[:-1]), tensor.shape[-1])
                self._tensors[name] = replace(tensor, shape=sizes)
            if name.endswith(CORRECTION) and tensor.shape[:-1] == (1,):  # as ERNIE has it
                self._tensors[name] = replace(tensor, shape=tensor.shape[1:])
        with_minima: set[str] = set()
        cut: set[str] = set()
        for name, tensor in self._tensors.items():
            stored, shape = blocks.BY_NAME[tensor.dtype], tensor.shape
            order = self._orders.get(name)
            if order is not None and order.columns is not None and order.columns % _BLOCK:
                cut.add(name)  # its blocks have columns of several groups
                continue
            if len(shape) > 1 and stored.has_minima:
                with_minima.add(name)
            if len(shape) > 1 and stored.bits is not None:
                rows, columns = math.prod(shape[:-1]), shape[-1]
                groups = columns // _BLOCK
                self._packed[name] = PackedMatrix(
                    (rows, columns), stored.bits, groups, name, name, None, None
                )
        self._with_minima, self._cut = frozenset(with_minima), frozenset(cut)
        types = {name: one.dtype for name, one in self._tensors.items()}
        self._wanted_bits = blocks.wanted_bits(types)
        self._joined: dict[str, tuple[str, str]] = {}
        for name in tuple(self._tensors):
            if name.endswith(GATE_BIAS):
                self._join(name, name.removesuffix(GATE_BIAS))
        self._values = values or {}
        for name, one in self._values.items():
            self._tensors[name] = StoredTensor(name, "F32", one.shape, 0, one.nbytes)

    def _join(self, gate: str, prefix: str) -> None:
        """Make one vector of the biases of gate and of up, whose numbers take turns in it."""
        up, whole = prefix + UP_BIAS, prefix + GATE_UP_BIAS
        first, second = self._tensors[gate], self._tensors.get(up)
        if second is not None and (first.shape, first.dtype) == (second.shape, second.dtype):
            shape = (*first.shape[:-1], 2 * first.shape[-1])
            size = first.size_bytes + second.size_bytes
            self._tensors[whole] = replace(first, name=whole, shape=shape, size_bytes=size)
            self._owners[whole] = self._owners[gate]
            self._joined[whole] = gate, up
            del self._tensors[gate], self._tensors[up]

    @property
    def group_widths(self) -> frozenset[int]:
        """See `Checkpoint`. Blocks that are quantized again lose the least in blocks as large."""
        found = {one.dtype for one in self._tensors.values() if len(one.shape) > 1}
        return frozenset() if found <= set(DTYPES) else frozenset({_BLOCK})

    @property
    def requantized(self) -> Mapping[str, str]:
        """See `Checkpoint`."""
        return {
            name: one.dtype
            for name, one in self._tensors.items()
            if len(one.shape) > 1
            and one.dtype not in (*DTYPES, blocks.MXFP4)  # of which the expert precision tells
            and name not in self._packed
        }

    @property
    def with_minima(self) -> frozenset[str]:
        """See `Checkpoint`."""
        return self._with_minima

    def wanted_bits(self, name: str) -> int | None:
        """See `Checkpoint`."""
        wanted = self._wanted_bits[name]
        return 8 if wanted == 4 and name in self._cut else wanted  # which cannot stay

    def is_readable(self, name: str) -> bool:
        """See `Checkpoint`; the others were refused."""
        return True

    def size_bytes(self, name: str) -> int:
        """Bytes of one tensor as it is read."""
        stored = self._tensors[name]
        if stored.dtype in DTYPES:
            return stored.size_bytes
        return math.prod(stored.shape) * np.dtype(np.float32).itemsize

    def read(self, name: str) -> NDArray[Any]:
        """Read one tensor whole, in its shape; see `read_rows`."""
        shape = self._tensors[name].shape
        if name in self._values:
            return self._values[name]
        if name in self._joined:
            rows, dtype = math.prod(shape[:-1]), self._tensors[name].dtype
            both = [
                to_float32(blocks.decode(dtype, one, self._data(one, 0, rows)))
                for one in self._joined[name]
            ]
            return np.stack(both, axis=-1).reshape(shape)
        if len(shape) > 1:
            return super().read(name)
        rows = math.prod(self._owners[name].tensors[name].shape[:-1])
        values = blocks.decode(self._tensors[name].dtype, name, self._data(name, 0, rows)).ravel()
        if (order := self._orders.get(name)) is not None:
            values = values[order.places]
        if name.endswith(DECAYS):
            return self._log_of_decays(name, to_float32(values))
        heads = self._turned.get(name)
        if heads is None:
            return values
        turned = halves(values[: heads.rows], heads.count)
        return np.concatenate([turned, values[heads.rows :]])

    def _log_of_decays(self, name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """What other checkpoints have. Raises CheckpointError where that is no number."""
        if not (values < 0).all():
            raise CheckpointError(
                f"{self._owners[name].path}: {name} has numbers that are not below 0, as decays "
                "of states are. Download it again."
            )
        found: NDArray[np.float32] = np.log(-values)
        return found

    def read_rows(self, name: str, start: int, stop: int) -> NDArray[Any]:
        """Read rows `start` to `stop`, [rows, columns].

        Plain numbers are in their own dtype, others in float32.
        """
        values = blocks.decode(self._tensors[name].dtype, name, self._rows(name, start, stop))
        order = self._orders.get(name)
        if order is None or order.columns is None or name in self._packed:
            return values
        return order.across(values)

    def read_blocks(
        self, name: str, start: int, stop: int
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Read rows of a tensor in MXFP4, see `Checkpoint`."""
        return blocks.mxfp4_blocks(self._rows(name, start, stop))

    def read_steps(
        self, name: str, start: int, stop: int, block_size: int
    ) -> NDArray[np.float32] | None:
        """What the numbers of a block are multiples of, see `Checkpoint`."""
        if block_size != _BLOCK:
            return None
        return blocks.steps(self._tensors[name].dtype, self._rows(name, start, stop))

    def read_minima(
        self, name: str, start: int, stop: int, block_size: int
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """Steps and minima of blocks, see `Checkpoint`."""
        if block_size != _BLOCK:
            return None
        found = minima.read(self._tensors[name].dtype, self._rows(name, start, stop))
        order = self._orders.get(name)
        if order is None or order.columns is None:
            return found.steps, found.minima
        return order.across(found.steps), order.across(found.minima)

    def _rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows as they are stored, uint8 [rows, bytes of a row].

        They are in the order of others, and so are columns of what is in integers.
        """
        is_read_twice = name in self._packed or name in self._with_minima
        load = self._last if is_read_twice else self._load_rows
        return load(name, start, stop)

    def _load_rows(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        if (order := self._orders.get(name)) is not None:
            return self._ordered(name, order, start, stop)
        heads = self._turned.get(name)
        if heads is None or start >= heads.rows:
            return self._data(name, start, stop)
        if stop > heads.rows:
            inside = self._load_rows(name, start, heads.rows)
            return np.concatenate([inside, self._data(name, heads.rows, stop)])
        first, last = start // heads.size, -(-stop // heads.size)
        whole = self._data(name, first * heads.size, last * heads.size)
        return halves(whole, last - first)[start - first * heads.size :][: stop - start]

    def _ordered(self, name: str, order: Order, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows as they are stored, in the order of others; so are blocks that are kept."""
        if order.columns is None:
            places = order.places[start:stop]
            ends = np.flatnonzero(np.diff(places) != 1) + 1
            runs = np.split(places, ends)  # of rows that follow each other
            parts = [self._data(name, int(run[0]), int(run[-1]) + 1) for run in runs]
            return np.concatenate(parts)
        rows = self._data(name, start, stop)
        return order.across(rows).view(np.uint8) if name in self._packed else rows

    def _data(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows as they are stored, uint8 [rows, bytes of a row]; a vector is one."""
        owner = self._owners[name]
        stored = owner.tensors[name]
        row = blocks.BY_NAME[stored.dtype].row_bytes(stored.shape[-1])
        data = owner.read(stored, start * row, (stop - start) * row)
        return data.reshape(stop - start, row)


def halves(rows: NDArray[Any], heads: int) -> NDArray[Any]:
    """Rows of heads, the even ones of each and then the odd ones; [rows, …].

    So are heads in most checkpoints whose neighbouring channels are rotated together.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)
