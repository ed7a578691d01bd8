"""K/V blocks that leave the pool, to host memory and disk, and come back.

Blocks that are handed out anew while they still hold cached tokens are saved first, under their
content keys. Before each step, what waiting requests need of that is loaded into free blocks of
the pool, where the scheduler finds it like everything else that is cached; so neither it nor the
step knows where a block has been. Swapping is the same: a preempted request releases its blocks,
they are saved when they are overwritten, and loaded when the request is about to go on.

Content travels in canonical form, one entry a unit of tokens (`kv.prefix.UNIT_TOKENS`), so that
any provider of the same model can load it, whatever the size of its blocks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike, NDArray

from onnxport.errors import ProviderError
from onnxport.kv.disk_file import DiskFormat
from onnxport.kv.disk_tier import DiskTier
from onnxport.kv.host_tier import HostTier
from onnxport.kv.pool import BlockPool, Eviction
from onnxport.kv.prefix import BlockKeys, unit_tokens
from onnxport.kv.table import blocks_for
from onnxport.kv.tiers import TieredStore
from onnxport.providers.base import Capabilities, Model
from onnxport.serving.config import EngineConfig, Preemption
from onnxport.serving.request import Request
from onnxport.serving.scheduler import Scheduler

logger = logging.getLogger(__name__)

LOADED_BLOCKS = 64  # most blocks that one step loads, so that running requests hardly notice
PERSISTED_BLOCKS = 32  # read from the device at once when everything is saved
PERSIST_TIMEOUT_S = 20  # for writing the cache to disk at the end
CLOSE_TIMEOUT_S = 5  # for what was queued to be written before that
MEMORY = 0.8  # weight of the past in a moving average
MEASURED_TOKENS = 16  # a step of fewer says little about what computing a block costs


class Costs:
    """What it takes to compute a block again, and to save and load it: measured, in seconds."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.token_s: float | None = None  # to compute one, in a step of many
        self.move_s: float | None = None  # to save and load one block

    def note_step(self, seconds: float, num_tokens: int) -> None:
        """A step of `num_tokens` took `seconds`."""
        if num_tokens >= MEASURED_TOKENS:
            self.token_s = _average(self.token_s, seconds / num_tokens)

    def note_move(self, seconds: float, num_blocks: int) -> None:
        """Moving `num_blocks` one way took `seconds`."""
        self.move_s = _average(self.move_s, 2 * seconds / num_blocks)

    @property
    def moving_is_cheaper(self) -> bool:
        """Whether a block is moved in less time than it is computed; True until both are known."""
        if self.token_s is None or self.move_s is None:
            return True
        return self.move_s < self.token_s * self._block_size


class Offloader:
    """Moves blocks between the pool of a model and the tiers. Belongs to the engine's thread."""

    def __init__(
        self,
        model: Model,
        pool: BlockPool,
        store: TieredStore,
        preemption: Preemption,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Measure what moving a block costs; the pool must not be in use yet."""
        limits = model.capabilities
        self._model = model
        self._pool = pool
        self._store = store
        self._preemption = preemption
        self._clock = clock
        self._unit = unit_tokens(limits.block_size)
        self._dtype = np.dtype(element_type(limits.kv_format.dtype))
        self.costs = Costs(limits.block_size)
        self.num_saved = 0  # blocks
        self.num_loaded = 0
        self._num_failed = 0  # times that the device would not give or take blocks
        self._try_out()

    @property
    def store(self) -> TieredStore:
        """Where the blocks are."""
        return self._store

    @property
    def num_errors(self) -> int:
        """Times that blocks could not be moved or stored, or were not what they should be."""
        return self._num_failed + self._store.num_errors + self._store.num_dropped

    def save(self, evictions: Sequence[Eviction], scheduler: Scheduler) -> None:
        """Save blocks that are about to be overwritten, as far as they are worth it."""
        worth = [one for one in evictions if self._is_worth_saving(one.keys, scheduler)]
        if worth:
            for keys, units in self._read(worth):
                for key, content in zip(keys, units, strict=True):
                    self._store.put(key, content)
                self.num_saved += 1

    def load(self, scheduler: Scheduler) -> set[Request]:
        """Load what the next waiting requests need, at most `LOADED_BLOCKS` blocks.

        Returns:
            The requests for which there is more to load.
        """
        budget = LOADED_BLOCKS
        loading: set[Request] = set()
        kept: set[int] = set()  # free blocks that the requests in front go on from
        promised = 0  # blocks that these will take besides
        for request in scheduler.next_in_line():
            shared = scheduler.hits(request)
            keys = self._loadable(request, len(shared), budget + 1)
            if not keys:
                continue
            taken = self._free_ones(shared) - kept
            needed = blocks_for(len(request.tokens), self._pool.block_size) - len(shared)
            if self._pool.num_free - len(kept) - promised < len(taken) + needed:
                break  # it could not start, and would load the same again and again
            loaded = self._load(shared, keys[:budget], scheduler) if budget else 0
            kept |= self._free_ones(scheduler.hits(request))
            promised += needed - loaded
            if loaded == min(len(keys), budget) < len(keys):
                loading.add(request)
            budget -= loaded
        return loading

    def close(self) -> None:
        """Save what is still in the pool, as far as there is a disk, and close the store.

        No request may own blocks any more.
        """
        if not self._store.persist(PERSIST_TIMEOUT_S, self._everything()):
            logger.warning("not all cached K/V could be written to disk in %d s", PERSIST_TIMEOUT_S)
        self._store.close(CLOSE_TIMEOUT_S)

    def _try_out(self) -> None:
        """Move one block there and back, for its costs."""
        start = self._clock()
        try:
            self._model.write_blocks([0], self._model.read_blocks([0]))
        except ProviderError as error:
            self._report("trying out", error)
        else:
            self.costs.note_move((self._clock() - start) / 2, 1)

    def _free_ones(self, blocks: Iterable[int]) -> set[int]:
        return {block for block in blocks if self._pool.ref_count(block) == 0}

    def _is_worth_saving(self, keys: BlockKeys, scheduler: Scheduler) -> bool:
        if all(key in self._store for key in keys):
            return False
        if self._preemption == "auto":
            return self.costs.moving_is_cheaper
        return self._preemption == "swap" or not scheduler.is_swapped(keys[-1])

    def _loadable(self, request: Request, start: int, limit: int) -> list[BlockKeys]:
        """The keys of blocks, from number `start` of a request on, that the store has."""
        found: list[BlockKeys] = []
        if request.keys is None:
            return found
        stop = min(len(request.keys), (len(request.tokens) - 1) // self._pool.block_size)
        for index in range(start, min(stop, start + limit)):
            keys = request.keys.block(index)
            if not all(key in self._store for key in keys):
                break
            found.append(keys)
        return found

    def _load(
        self, shared: tuple[int, ...], wanted: Sequence[BlockKeys], scheduler: Scheduler
    ) -> int:
        """Load blocks and leave them free, cached and lately used; returns how many.

        The blocks that they continue, `shared`, are held meanwhile, lest they are evicted for it.
        """
        units = []
        for keys in wanted:
            entries = [self._store.get(key) for key in keys]
            found = [entry for entry in entries if entry is not None]
            if len(found) < len(keys):
                break
            units.append([self._array(entry.content, entry.dtype) for entry in found])
        if not units:
            return 0
        self._pool.share(shared)
        evictions: list[Eviction] = []
        blocks = self._pool.allocate(len(units), evictions)
        self.save(evictions, scheduler)
        start = self._clock()
        try:
            content = np.stack([np.concatenate(parts, axis=3) for parts in units])
            self._model.write_blocks(blocks, content)
        except ProviderError as error:
            self._report("loading", error)
            units = []
        else:
            self.costs.note_move(self._clock() - start, len(blocks))
            for block, keys in zip(blocks, wanted, strict=False):
                self._pool.register(block, keys)
        self._pool.release(reversed(blocks))
        self._pool.release(reversed(shared))
        self.num_loaded += len(units)
        return len(units)

    def _read(self, evictions: Sequence[Eviction]) -> Iterator[tuple[BlockKeys, list[bytes]]]:
        """Yield the keys and the canonical content of each block's units."""
        start = self._clock()
        try:
            content = self._model.read_blocks([one.block for one in evictions])
        except ProviderError as error:
            self._report("saving", error)
            return
        num, layers, two, heads, size, width = content.shape
        parts = content.reshape(num, layers, two, heads, size // self._unit, self._unit, width)
        for one, units in zip(evictions, np.moveaxis(parts, 4, 1), strict=True):
            yield one.keys, [unit.tobytes() for unit in units]
        self.costs.note_move(self._clock() - start, num)

    def _everything(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield what the pool's free blocks hold, the last used first."""
        cached = self._pool.cached_blocks()[::-1]
        for start in range(0, len(cached), PERSISTED_BLOCKS):
            for keys, units in self._read(cached[start : start + PERSISTED_BLOCKS]):
                yield from zip(keys, units, strict=True)

    def _array(self, content: bytes, dtype: str) -> NDArray[np.generic]:
        """Return a unit as an array [num_layers, 2, num_kv_heads, unit, head_size]."""
        format_ = self._model.capabilities.kv_format
        shape = (format_.num_layers, 2, format_.num_kv_heads, self._unit, format_.head_size)
        array = np.frombuffer(content, element_type(dtype)).reshape(shape)
        return array.astype(self._dtype, copy=False)

    def _report(self, what: str, error: ProviderError) -> None:
        self._num_failed += 1
        logger.warning("%s K/V blocks failed; they will be computed again: %s", what, error)


def open_offloader(
    model: Model, pool: BlockPool, config: EngineConfig, clock: Callable[[], float]
) -> Offloader | None:
    """Return what moves blocks to the tiers that `config` asks for; None if it asks for none.

    Raises:
        OnnxportError: the folder of the disk tier cannot be used.
    """
    if not config.host_memory:
        return None
    disk = None
    if config.kv_disk is not None:
        disk = DiskTier(config.kv_disk, config.kv_disk_bytes, disk_format(model.capabilities))
    dtype = model.capabilities.kv_format.dtype
    store = TieredStore(HostTier(config.host_memory), disk, dtype)
    return Offloader(model, pool, store, config.preemption, clock)


def disk_format(limits: Capabilities) -> DiskFormat:
    """Return what a model's blocks look like on disk."""
    format_ = limits.kv_format
    return DiskFormat(
        model=format_.model,
        unit_tokens=unit_tokens(limits.block_size),
        num_layers=format_.num_layers,
        num_kv_heads=format_.num_kv_heads,
        head_size=format_.head_size,
        dtype=format_.dtype,
    )


def element_type(name: str) -> DTypeLike:
    """Return NumPy's type of a K/V element."""
    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)


def _average(past: float | None, value: float) -> float:
    return value if past is None else MEMORY * past + (1 - MEMORY) * value
