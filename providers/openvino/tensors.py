"""KV caches in OpenVINO's tensors, on a device or on the host, read and written by ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.providers.blocks import block_index
from onnxport.providers.memory import huge_page_zeros
from onnxport.providers.openvino.caches import DTYPES, CacheFormat

TensorPair = tuple[Any, Any]  # openvino.Tensor or RemoteTensor of one layer: key, value


def allocate_remote(
    context: Any, form: CacheFormat, num_layers: int, num_blocks: int
) -> list[TensorPair]:
    """Zeroed caches [num_blocks, kv_heads, rows, columns] in the memory of a device.

    Args:
        context: openvino.RemoteContext of the device.
        form: of floating-point caches.
        num_layers: how many pairs.
        num_blocks: of each cache.
    """
    import openvino as ov

    shapes = [(num_blocks, *shape) for shape in (form.key_shape, form.value_shape)]
    # Pages that are only read are all the same one: this takes no memory to speak of.
    zeros = huge_page_zeros(shapes[0], DTYPES[form.dtype])
    sources = [ov.Tensor(zeros.reshape(shape), shared_memory=True) for shape in shapes]
    kind = sources[0].get_element_type()
    pairs = []
    for _ in range(num_layers):
        key, value = (context.create_tensor(kind, ov.Shape(list(shape)), {}) for shape in shapes)
        for tensor, source in zip((key, value), sources, strict=True):
            tensor.copy_from(source)
        pairs.append((key, value))
    return pairs


class TensorBlocks:
    """The caches of all layers; the transfers of `providers.base.Model` on them.

    Wrong block ids, shapes and dtypes are bugs of the caller: they fail an assertion before
    anything is changed. What fails on the device is raised as OpenVINO raises it.
    """

    def __init__(self, pairs: Sequence[TensorPair], form: CacheFormat) -> None:
        """Take the caches, in floating point and of the format `form`."""
        self._pairs = pairs
        self._dtype = np.dtype(DTYPES[form.dtype])
        self._transposed = (form.transposed_keys, False)
        self._num_blocks = int(pairs[0][0].get_shape()[0])
        self._block_shape = (len(pairs), 2, *form.value_shape)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `providers.base.Model.copy_blocks`."""
        at, to = self._ids(sources), self._ids(targets, distinct=True)
        assert len(at) == len(to), f"{len(at)} sources for {len(to)} targets"
        both = np.intersect1d(at, to)
        assert not len(both), f"blocks {both.tolist()} are sources and targets"
        runs = _runs(at, to)
        for tensor in (tensor for pair in self._pairs for tensor in pair):
            for run in runs:
                _range(tensor, to[run]).copy_from(_range(tensor, at[run]))

    def read(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        """See `providers.base.Model.read_blocks`. A block may be read twice."""
        import openvino as ov

        at = self._ids(blocks)
        content = np.empty((len(at), *self._block_shape), self._dtype)
        runs = _runs(at)
        for layer, pair in enumerate(self._pairs):
            for part, (tensor, transposed) in enumerate(zip(pair, self._transposed, strict=True)):
                stored = np.empty((len(at), *list(tensor.get_shape())[1:]), self._dtype)
                for run in runs:
                    target = ov.Tensor(stored[run], shared_memory=True)
                    _range(tensor, at[run]).copy_to(target)
                content[:, layer, part] = stored.swapaxes(-1, -2) if transposed else stored
        return content

    def write(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        """See `providers.base.Model.write_blocks`."""
        import openvino as ov

        to = self._ids(blocks, distinct=True)
        wanted = (len(to), *self._block_shape)
        assert content.shape == wanted, f"content of shape {content.shape}, not {wanted}"
        assert content.dtype == self._dtype, f"content of {content.dtype}, not {self._dtype}"
        runs = _runs(to)
        for layer, pair in enumerate(self._pairs):
            for part, (tensor, transposed) in enumerate(zip(pair, self._transposed, strict=True)):
                numbers = content[:, layer, part]
                stored = np.array(numbers.swapaxes(-1, -2) if transposed else numbers, order="C")
                for run in runs:
                    source = ov.Tensor(stored[run], shared_memory=True)
                    _range(tensor, to[run]).copy_from(source)

    def _ids(self, blocks: Sequence[int], *, distinct: bool = False) -> NDArray[np.intp]:
        return block_index(blocks, self._num_blocks, distinct=distinct)


def _runs(*lists: NDArray[np.intp]) -> list[slice]:
    """Where lists of block ids, all of one length, go on block by block: fewer, larger copies."""
    length = len(lists[0])
    goes_on = np.all([np.diff(ids) == 1 for ids in lists], axis=0)
    starts = [0, *(np.flatnonzero(~goes_on) + 1).tolist()] if length else []
    return [slice(start, end) for start, end in zip(starts, [*starts[1:], length], strict=False)]


def _range(tensor: Any, blocks: NDArray[np.intp]) -> Any:
    """A view of consecutive blocks of a cache."""
    import openvino as ov

    sizes = list(tensor.get_shape())[1:]
    begin = ov.Coordinate([int(blocks[0]), *[0] * len(sizes)])
    return type(tensor)(tensor, begin, ov.Coordinate([int(blocks[-1]) + 1, *sizes]))
