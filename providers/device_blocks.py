"""KV caches in a device's memory, read and written as canonical blocks by small graphs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxport.graphs import block_transfers as graphs
from onnxport.graphs import contract
from onnxport.graphs.block_transfers import CacheShape
from onnxport.graphs.cache_groups import LayerGroups
from onnxport.graphs.spec import ArchSpec
from onnxport.graphs.tensors import numpy_dtype
from onnxport.providers.blocks import SeveralBlocks, block_index
from onnxport.providers.layer_groups import CacheKind, cache_kinds
from onnxport.providers.ort import (
    CacheTensor,
    Target,
    ort_value,
    quiet_options,
    start_session,
)
from onnxport.providers.transfers import Blocks

MOST_BYTES: Final = 64 << 20  # of blocks that one run moves, in memory beside the caches


class DeviceBlocks:
    """The caches of what a block has room for; the transfers of `providers.base.Model` on them.

    What fails on the device is raised as ONNX Runtime raises it, see `providers.transfers`.
    """

    def __init__(
        self,
        caches: Sequence[CacheTensor],
        shape: CacheShape,
        num_blocks: int,
        target: Target,
        group: int | None = None,
    ) -> None:
        """Start the graphs.

        Args:
            caches: of each layer of a block in turn, of `num_blocks` blocks at least.
            shape: what they are.
            num_blocks: of the pool; there is a block more where `group` is given.
            target: the execution provider that holds them.
            group: move so many blocks at a time, for devices that compile a graph for each
                shape; None: as many as MOST_BYTES hold.
        """
        self._caches = caches
        self._block_shape = (
            *(shape.num_layers, shape.parts, shape.num_kv_heads),
            *(int(caches[0].value.shape()[1]), shape.head_size),
        )
        self._num_blocks = num_blocks
        self._group = group
        self._dtype = numpy_dtype(shape.dtype)
        block_bytes = math.prod(self._block_shape) * self._dtype.itemsize
        self._most_blocks = max(1, MOST_BYTES // block_bytes)
        self._read, self._write, self._copy = (
            start_session(model.SerializeToString(), None, quiet_options(), target)
            for model in (
                graphs.read_graph(shape),
                graphs.write_graph(shape),
                graphs.copy_graph(shape),
            )
        )

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `providers.base.Model.copy_blocks`."""
        at, to = self._ids(sources), self._ids(targets, distinct=True)
        assert len(at) == len(to), f"{len(at)} sources for {len(to)} targets"
        both = np.intersect1d(at, to)
        assert not len(both), f"blocks {both.tolist()} are sources and targets"
        for start, count in self._groups(len(at)):
            ids = slice(start, start + count)
            named = {graphs.SOURCES: at[ids], graphs.TARGETS: to[ids]}
            padded = {name: self._padded(value) for name, value in named.items()}
            self._run(self._copy, padded, writes=True)

    def read(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        """See `providers.base.Model.read_blocks`. A block may be read twice."""
        at = self._ids(blocks)
        content = np.empty((len(at), *self._block_shape), self._dtype)
        flat = content.reshape(len(at), len(self._caches), *self._block_shape[2:])
        for start, count in self._groups(len(at)):
            ids = self._padded(at[start : start + count])
            outputs = {
                graphs.CONTENT + cache.input_name: np.empty(
                    (len(ids), *flat.shape[2:]), self._dtype
                )
                for cache in self._caches
            }
            self._run(self._read, {graphs.BLOCKS: ids}, outputs=outputs)
            for number, output in enumerate(outputs.values()):
                flat[start : start + count, number] = output[:count]
        return content

    def write(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        """See `providers.base.Model.write_blocks`."""
        to = self._ids(blocks, distinct=True)
        wanted = (len(to), *self._block_shape)
        assert content.shape == wanted, f"content of shape {content.shape}, not {wanted}"
        assert content.dtype == self._dtype, f"content of {content.dtype}, not {self._dtype}"
        flat = content.reshape(len(to), len(self._caches), *self._block_shape[2:])
        for start, count in self._groups(len(to)):
            ids = self._padded(to[start : start + count])
            inputs: dict[str, NDArray[Any]] = {graphs.BLOCKS: ids}
            for number, cache in enumerate(self._caches):
                part = np.zeros((len(ids), *flat.shape[2:]), self._dtype)
                part[:count] = flat[start : start + count, number]
                inputs[graphs.CONTENT + cache.input_name] = part
            self._run(self._write, inputs, writes=True)

    def _ids(self, blocks: Sequence[int], *, distinct: bool = False) -> NDArray[np.int64]:
        return block_index(blocks, self._num_blocks, distinct=distinct).astype(np.int64)

    def _groups(self, count: int) -> list[tuple[int, int]]:
        """First block and number of blocks of each run."""
        size = self._group or self._most_blocks
        return [(start, min(size, count - start)) for start in range(0, count, size)]

    def _padded(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Block ids of a full group; the block behind the pool stands in for none."""
        if self._group is None:
            return ids
        spare = np.full(self._group - len(ids), self._num_blocks, np.int64)
        return np.concatenate([ids, spare])

    def _run(
        self,
        session: Any,
        inputs: Mapping[str, NDArray[Any]],
        *,
        outputs: Mapping[str, NDArray[Any]] | None = None,
        writes: bool = False,
    ) -> None:
        """Run a graph on the caches, from and to host memory."""
        binding = session.io_binding()
        for cache in self._caches:
            binding.bind_ortvalue_input(cache.input_name, cache.value)
            if writes:
                binding.bind_ortvalue_output(cache.output_name, cache.value)
        for name, value in inputs.items():
            binding.bind_ortvalue_input(name, ort_value(value))
        for name, value in (outputs or {}).items():
            binding.bind_ortvalue_output(name, ort_value(value))
        session.run_with_iobinding(binding)


def device_caches(
    shape: CacheShape, num_blocks: int, block_size: int, target: Target
) -> list[CacheTensor]:
    """Zeroed caches in the memory of a device, under the names of the paged graph."""
    session = start_session(
        graphs.zeros_graph(shape.dtype).SerializeToString(), None, quiet_options(), target
    )
    dims = np.array([num_blocks, block_size, shape.num_kv_heads, shape.head_size], np.int64)
    caches = []
    for past, present in graphs.cache_names(shape.num_layers, shape.parts):
        binding = session.io_binding()
        binding.bind_cpu_input(graphs.SHAPE, dims)
        binding.bind_output(graphs.ZEROS, target.memory, target.device_id)
        session.run_with_iobinding(binding)
        caches.append(CacheTensor(past, present, binding.get_outputs()[0]))
    return caches


@dataclass(frozen=True, slots=True)
class BlockRoom:
    """What blocks caches have."""

    num_blocks: int  # of the pool
    spare_blocks: int  # behind it, where what pads a step is written
    block_size: int  # tokens
    group: int | None  # blocks moved at a time, see DeviceBlocks


def allocate(
    model: onnx.ModelProto, spec: ArchSpec, groups: LayerGroups, room: BlockRoom, target: Target
) -> tuple[list[CacheTensor], Blocks]:
    """Zeroed caches of all layers in the memory of a device, and what moves their blocks.

    Layers that have the same place in a block, and the same heads, share theirs: see LayerGroups.

    Args:
        model: the paged graph, which declares what its caches are.
        spec: of the model.
        groups: of its layers.
        room: how many blocks there are, and how large.
        target: the execution provider that holds them.
    """
    kinds = cache_kinds(spec, groups)
    made: dict[CacheKind, list[CacheTensor]] = {}
    moved: list[Blocks] = []
    for heads in dict.fromkeys(kind[1:] for kind in kinds):
        own = sorted({kind for kind in kinds if kind[1:] == heads})
        shape = cache_shape(model, len(own), spec.cached_layers[kinds.index(own[0])])
        num_blocks = room.num_blocks + room.spare_blocks
        caches = device_caches(shape, num_blocks, room.block_size, target)
        moved.append(DeviceBlocks(caches, shape, room.num_blocks, target, room.group))
        for number, kind in enumerate(own):
            made[kind] = caches[shape.parts * number : shape.parts * (number + 1)]
    tensors = [
        CacheTensor(*names, cache.value)
        for layer, kind in zip(spec.cached_layers, kinds, strict=True)
        for names, cache in zip(
            contract.cache_names(layer, len(made[kind])), made[kind], strict=True
        )
    ]
    return tensors, moved[0] if len(moved) == 1 else SeveralBlocks(moved)


def cache_shape(model: onnx.ModelProto, num_layers: int, layer: int) -> CacheShape:
    """What the caches of layers of a paged graph are, by its own declaration.

    Args:
        model: the graph.
        num_layers: of this shape that a block has room for.
        layer: one of them.
    """
    infos = {info.name: info for info in model.graph.input}
    info = infos[contract.past_key(layer)]
    kv_heads, head_size = (dim.dim_value for dim in info.type.tensor_type.shape.dim[2:])
    parts = 2 if contract.past_value(layer) in infos else 1
    return CacheShape(num_layers, kv_heads, head_size, info.type.tensor_type.elem_type, parts)
