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
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxport.cache_rows import DTYPES
from onnxport.errors import DeviceLostError, ProviderError
from onnxport.kv.disk_file import DiskFormat
from onnxport.kv.pool import BlockPool, Eviction
from onnxport.kv.prefix import BlockKeys, stored_keys, unit_tokens
from onnxport.kv.table import blocks_for
from onnxport.kv.tiers import TieredStore
from onnxport.providers.base import Model
from onnxport.providers.rows import convert, element_type
from onnxport.serving.config import EngineConfig
from onnxport.serving.request import Request
from onnxport.serving.scheduler import Scheduler
from onnxport.serving.stored_blocks import are_finite, disk_format, open_store
from onnxport.serving.transfer_costs import Costs

logger = logging.getLogger(__name__)

# Tokens whose blocks one step loads, or a single block, so that running requests hardly notice.
LOADED_TOKENS = 4096
REMEASURED_BLOCKS = 256  # of those that seem dearer to move than to compute, one is moved to see
PERSISTED_BLOCKS = 32  # read from the device at once when everything is saved
PERSIST_TIMEOUT_S = 20  # for writing the cache to disk at the end
CLOSE_TIMEOUT_S = 5  # for what was queued to be written before that


class Missing(NamedTuple):
    """A block that the store has and the pool has not."""

    keys: BlockKeys
    group: int


class Loading(NamedTuple):
    """What a waiting request can go on from."""

    held: tuple[int, ...]  # blocks of the pool
    missing: tuple[Missing, ...]  # what has to be loaded beside them, in the order of columns
    needed: int  # blocks that it takes besides


class Offloader:
    """Moves blocks between the pool of a model and the tiers. Belongs to the engine's thread.

    All that talks to the model raises DeviceLostError when its device is gone; every other failure
    is reported, counted, and costs no more than computing blocks again.
    """

    def __init__(
        self,
        model: Model,
        pool: BlockPool,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the tiers, and measure what moving a block costs; the pool must be unused.

        Raises:
            OnnxportError: the folder of the disk tier cannot be used.
            DeviceLostError: the device is gone.
        """
        self._config = config
        self._clock = clock
        self.num_saved = 0  # blocks
        self.num_loaded = 0
        self._num_passed_over = 0  # blocks that were not saved, as computing seems cheaper
        self._num_failed = 0  # times that the device would not give or take blocks
        self._format = disk_format(model.capabilities)
        self._store = open_store(config, self._format)
        self._serve(model, pool)

    def move_to(self, model: Model, pool: BlockPool) -> None:
        """Serve another model, whose pool must be unused, from the tiers that are there.

        Where its blocks are something else, the tiers are dropped for new ones.

        Raises:
            As the constructor.
        """
        format_ = disk_format(model.capabilities)
        if replace(format_, dtype=self._format.dtype) == self._format and self._takes(format_):
            self._store.retype(format_.dtype)
        else:
            logger.warning(
                "the K/V in host memory is dropped: it is %s, and the new model's is %s",
                self._format,
                format_,
            )
            store = open_store(self._config, format_)  # the old one stays where this fails
            self._store.close(CLOSE_TIMEOUT_S)
            self._store = store
        self._format = format_
        self._serve(model, pool)

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
        worth = [one for one in evictions if self._is_worth_saving(one, scheduler)]
        if worth:
            for keys, units in self._read(worth):
                for key, content in zip(keys, units, strict=True):
                    self._store.put(key, content)
                self.num_saved += 1

    def load(self, scheduler: Scheduler) -> set[Request]:
        """Load what the next waiting requests need, at most those of LOADED_TOKENS tokens.

        Returns:
            The requests for which there is more to load.
        """
        budget = max(1, LOADED_TOKENS // self._pool.block_size) * len(self._pool.groups)
        loading: set[Request] = set()
        kept: set[int] = set()  # free blocks that the requests in front go on from
        promised = 0  # blocks that these will take besides
        for request in scheduler.planner.next_in_line():
            plan = self._plan(request, scheduler)
            if not plan.missing:
                continue
            taken = self._free_ones(plan.held) - kept
            needed = plan.needed + len(plan.missing)
            if self._pool.num_free - len(kept) - promised < len(taken) + needed:
                break  # it could not start, and would load the same again and again
            loaded = self._load(plan.held, plan.missing[:budget], scheduler) if budget else []
            kept |= self._free_ones((*plan.held, *loaded))
            promised += needed - len(loaded)
            if len(loaded) == min(len(plan.missing), budget) < len(plan.missing):
                loading.add(request)
            budget -= len(loaded)
        return loading

    def close(self, *, lost: bool = False) -> None:
        """Save what is still in the pool, as far as there is a disk, and close the store.

        No request may own blocks any more.

        Args:
            lost: the device is gone, and the pool with it; only host memory is saved.
        """
        try:
            saved = self._store.persist(PERSIST_TIMEOUT_S, () if lost else self._everything())
        except DeviceLostError as error:
            logger.warning("the K/V cached on the device are not saved: %s", error)
            saved = self._store.persist(PERSIST_TIMEOUT_S)
        if not saved:
            logger.warning("not all cached K/V could be written to disk in %d s", PERSIST_TIMEOUT_S)
        self._store.close(CLOSE_TIMEOUT_S)

    def _takes(self, format_: DiskFormat) -> bool:
        """Whether the tiers that are there can hold blocks of another dtype beside their own.

        What is in host memory converts; on disk only floats do.
        """
        if format_.dtype in self._format.readable_dtypes:
            return True
        return self._config.kv_disk is None and {format_.dtype, self._format.dtype} <= set(DTYPES)

    def _serve(self, model: Model, pool: BlockPool) -> None:
        limits = model.capabilities
        self._model = model
        self._pool = pool
        self._unit = unit_tokens(limits.block_size)
        self._dtype = np.dtype(element_type(limits.kv_format.dtype))
        self.costs = Costs(limits.block_size, len(limits.windows))
        self._try_out()

    def _try_out(self) -> None:
        """Move a block there and back, for its costs; twice, as devices prepare at first."""
        try:
            self._model.write_blocks([0], self._model.read_blocks([0]))
            start = self._clock()
            self._model.write_blocks([0], self._model.read_blocks([0]))
        except DeviceLostError:
            raise
        except ProviderError as error:
            self._report("trying out", error)
        else:
            self.costs.note_move((self._clock() - start) / 2, 1)

    def _free_ones(self, blocks: Iterable[int]) -> set[int]:
        return {block for block in blocks if self._pool.ref_count(block) == 0}

    def _is_worth_saving(self, eviction: Eviction, scheduler: Scheduler) -> bool:
        if self._has(eviction.keys, eviction.group):
            return False
        if self._config.preemption == "auto":
            return self.costs.moving_is_cheaper or self._measures_again()
        return self._config.preemption == "swap" or not scheduler.is_swapped(eviction.keys[-1])

    def _measures_again(self) -> bool:
        """Whether a block that seems dearer to move is moved all the same, for its costs."""
        self._num_passed_over += 1
        return self._num_passed_over % REMEASURED_BLOCKS == 0

    def _has(self, keys: BlockKeys, group: int) -> bool:
        """Whether the store has a block."""
        return all(key in self._store for key in stored_keys(keys, group))

    def _plan(self, request: Request, scheduler: Scheduler) -> Loading:
        """Look how far a request could go on from what the pool and the store have."""
        keys, groups, find = request.keys, self._pool.groups, self._pool.find
        if keys is None:
            return Loading((), (), 0)

        def has(column: int, group: int) -> bool:
            block = keys.block(column)
            return find(block[-1], group) is not None or self._has(block, group)

        columns = scheduler.planner.hits.columns_ahead(request)
        end = groups.reach(columns, has)
        held, missing = [], []
        for column in range(columns.start, end):
            for group in range(len(groups)):
                if column not in groups.needed(group, columns.start, end):
                    continue
                block = find(keys.key(column), group)
                if block is None:
                    missing.append(Missing(keys.block(column), group))
                else:
                    held.append(block)
        given_up = [groups.needed(group, columns.start, end).start for group in range(len(groups))]
        total = blocks_for(len(request.tokens), self._pool.block_size)
        return Loading(tuple(held), tuple(missing), groups.pending(total, end, given_up))

    def _load(
        self, held: tuple[int, ...], wanted: Sequence[Missing], scheduler: Scheduler
    ) -> list[int]:
        """Load blocks and leave them free, cached and lately used; returns them.

        The blocks that they belong to, `held`, are kept meanwhile, lest they are evicted for it.
        """
        units = []
        start = self._clock()
        for one in wanted:
            keys = stored_keys(one.keys, one.group)
            entries = [self._store.get(key) for key in keys]
            found = [entry for entry in entries if entry is not None]
            if len(found) < len(keys):
                break
            units.append([self._array(entry.content, entry.dtype) for entry in found])
        if not units:
            return []
        read_s = self._clock() - start
        self._pool.share(held)
        evictions: list[Eviction] = []
        blocks = self._pool.allocate(len(units), evictions)
        num_loaded = 0
        try:
            self.save(evictions, scheduler)
            num_loaded = self._write(blocks, units, read_s)
            for block, one in zip(blocks[:num_loaded], wanted, strict=False):
                self._pool.register(block, one.keys, one.group)
        finally:
            self._pool.release(reversed(blocks))
            self._pool.release(reversed(held))
        self.num_loaded += num_loaded
        return blocks[:num_loaded]

    def _write(
        self, blocks: Sequence[int], units: Sequence[list[NDArray[np.generic]]], read_s: float
    ) -> int:
        """Write the units of each block to the device; returns how many blocks, all or none.

        Args:
            blocks: of the pool.
            units: of each block, [num_layers, parts, num_kv_heads, unit, elements of a row] each.
            read_s: what it took to read them.
        """
        start = self._clock()
        content = np.stack([np.concatenate(parts, axis=3) for parts in units])
        try:
            self._model.write_blocks(blocks, content)
        except DeviceLostError:
            raise
        except ProviderError as error:
            self._report("loading", error)
            return 0
        self.costs.note_move(self._clock() - start + read_s, len(blocks))
        return len(blocks)

    def _read(self, evictions: Sequence[Eviction]) -> Iterator[tuple[BlockKeys, list[bytes]]]:
        """Yield the keys, as they are stored, and the canonical content of each block's units.

        Blocks that hold what is no finite number are left out: whoever goes on from them fails. The
        pool forgets them when somebody has, and there they would be found again.
        """
        start = self._clock()
        try:
            content = self._model.read_blocks([one.block for one in evictions])
        except DeviceLostError:
            raise
        except ProviderError as error:
            self._report("saving", error)
            return
        num, layers, parts, heads, size, width = content.shape
        cut = content.reshape(num, layers, parts, heads, size // self._unit, self._unit, width)
        sound = are_finite(content).tolist()
        for one, units, is_sound in zip(evictions, np.moveaxis(cut, 4, 1), sound, strict=True):
            if is_sound:
                yield stored_keys(one.keys, one.group), [unit.tobytes() for unit in units]
        self.costs.note_move(self._clock() - start, num)

    def _everything(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield what the pool's free blocks hold, the last used first."""
        cached = self._pool.cached_blocks()[::-1]
        for start in range(0, len(cached), PERSISTED_BLOCKS):
            for keys, units in self._read(cached[start : start + PERSISTED_BLOCKS]):
                yield from zip(keys, units, strict=True)

    def _array(self, content: bytes, dtype: str) -> NDArray[np.generic]:
        """Return a unit as an array [num_layers, parts, num_kv_heads, unit, elements of a row]."""
        format_ = self._model.capabilities.kv_format
        array = np.frombuffer(content, element_type(dtype))
        shape = (format_.num_layers, format_.parts, format_.num_kv_heads, self._unit, -1)
        return convert(array.reshape(shape), self._dtype)

    def _report(self, what: str, error: ProviderError) -> None:
        self._num_failed += 1
        logger.warning("%s K/V blocks failed; they will be computed again: %s", what, error)
