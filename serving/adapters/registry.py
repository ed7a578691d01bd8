"""The adapters that are loaded: who uses them, and which of them are in a slot of the model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from onnxport.errors import (
    AdapterError,
    CapacityError,
    DeviceLostError,
    ProviderError,
    UnknownAdapterError,
)
from onnxport.graphs.lora import LoraAdapter
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.base import Model

if TYPE_CHECKING:
    from onnxport.serving.adapters.peft import AdapterContent

logger = logging.getLogger(__name__)

MAX_NAME = 256  # characters


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter. Two that are equal compute the same."""

    name: str
    number: int  # of the load, from 1; no two have the same
    fingerprint: str  # of its content; K/V are shared by it
    rank: int  # the largest of its modules
    path: Path  # where it was read
    base_model: str | None  # what it says it was trained on


@dataclass(slots=True)
class _Entry:
    """An adapter in host memory, which requests find unless it is `hidden`."""

    adapter: Adapter
    weights: LoraAdapter  # kept, for it may lose its slot, or another model take over
    slot: int | None = None  # of the model, from 1
    num_requests: int = 0  # unfinished ones
    hidden: bool = False
    last_used: int = 0  # when a request came or ended, or it got its slot; larger is later


class AdapterRegistry:
    """Keeps adapters in host memory, by name, and puts as many as fit in the slots of a model.

    An adapter that is unloaded, or replaced, is hidden at once, and forgotten when the last
    request that uses it has ended. Until then its weights are kept; its slot only while requests
    that use it run. Which of several gets a slot is decided by `serving/adapters/slots.py`.

    `loaded`, `find` and `read` are for any thread; all else belongs to the engine's, between steps.
    """

    def __init__(
        self, model: Model, base: ArchSpec | None = None, max_host_adapters: int | None = None
    ) -> None:
        """Start without adapters.

        Args:
            model: has the slots.
            base: the model that adapters have to fit; None where none can be read.
            max_host_adapters: most that are loaded, in a slot or not; None: as many as slots.

        Raises:
            CapacityError: that is fewer than there are slots.
        """
        most = model.capabilities.max_adapters
        if max_host_adapters is not None and max_host_adapters < most:
            raise CapacityError(
                f"max_host_adapters (--max-cpu-loras) is {max_host_adapters}, and the model has "
                f"{most} slots for adapters (max_adapters, --max-loras); every adapter in a slot "
                "is in host memory too: raise the first, or lower the second"
            )
        self._model = model
        self._base = base
        self._most = max(max_host_adapters or 0, most)  # that are loaded
        self._entries: dict[int, _Entry] = {}  # by number
        self._slots: dict[int, _Entry] = {}  # those that have one, by slot
        self._loaded: Mapping[str, Adapter] = MappingProxyType({})  # replaced as a whole
        self._numbers = count(1)
        self._uses = count(1)
        self._num_wanted = 0  # adapters of unfinished requests that have no slot
        self.num_swaps = 0  # slots that one adapter has lost to another

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """The adapters that requests may pick, in the order of loading."""
        return tuple(self._loaded.values())

    @property
    def num_requests(self) -> dict[str, int]:
        """Unfinished requests of each adapter that requests may pick."""
        return {
            entry.adapter.name: entry.num_requests
            for entry in self._entries.values()
            if not entry.hidden
        }

    @property
    def num_held(self) -> int:
        """Adapters in host memory: the loaded ones, and those that were unloaded and are in use."""
        return len(self._entries)

    @property
    def wants_slots(self) -> bool:
        """Whether an unfinished request uses an adapter that has no slot."""
        return self._num_wanted > 0

    @property
    def has_free_slot(self) -> bool:
        """Whether a slot holds no adapter."""
        return self._unused_slot() is not None

    def slot_of(self, adapter: Adapter | None) -> int:
        """Return the slot that the rows of a running request name; 0: it has no adapter."""
        if adapter is None:
            return 0
        slot = self._entries[adapter.number].slot
        assert slot is not None, f"{adapter.name} has no slot"
        return slot

    def find(self, name: str) -> Adapter:
        """Return the adapter of that name.

        Raises:
            UnknownAdapterError: there is none.
        """
        adapter = self._loaded.get(name)
        if adapter is None:
            listed = ", ".join(repr(one) for one in self._loaded) or "none"
            raise UnknownAdapterError(
                f"no adapter {name!r} is loaded; loaded are: {listed}", "adapter"
            )
        return adapter

    def read(self, path: Path) -> AdapterContent:
        """Read an adapter of this model; see `read_adapter`."""
        if self._base is None:
            raise AdapterError(
                "this engine does not know its model's shapes, and reads no adapters"
            )
        from onnxport.serving.adapters.peft import read_adapter

        return read_adapter(path, self._base)

    def load(self, name: str, content: AdapterContent, *, in_place: bool = False) -> Adapter:
        """Keep an adapter under a name, and put it in a slot if one is free.

        Args:
            name: what requests call it.
            content: what was read.
            in_place: replace the one of that name, which its requests go on with.

        Raises:
            AdapterError: the name is not usable, or taken and not to be replaced; or a slot cannot
                hold its numbers, which shows when it gets one.
            CapacityError: as many are loaded as may be, its rank is too large, or memory is short.
            ProviderError: the device fails.
        """
        previous = self._loaded.get(name)
        if previous is not None and not in_place:
            raise AdapterError(
                f"an adapter {name!r} is loaded already, from {previous.path}; unload it first, "
                "or load in place"
            )
        if not name or len(name) > MAX_NAME or not name.isprintable():
            raise AdapterError(
                f"{name!r} cannot name an adapter; give 1 to {MAX_NAME} printable characters"
            )
        self._check_rank(content)
        slot = self._slot_for(previous)
        if slot is not None:
            self._fill(slot, content.adapter)
        adapter = Adapter(
            *(name, next(self._numbers), content.fingerprint, content.adapter.rank),
            *(content.path, content.base_model),
        )
        entry = _Entry(adapter, content.adapter, last_used=next(self._uses))
        if previous is not None:
            replaced = self._entries[previous.number]
            if slot is not None and replaced.slot == slot:  # what was there is overwritten
                self._vacate(replaced)
            self._hide(previous)
        self._entries[adapter.number] = entry
        if slot is not None:
            self._occupy(slot, entry)
        self._loaded = MappingProxyType({**self._loaded, name: adapter})
        logger.info(
            "loaded the adapter %s, rank %d, from %s into %s; it was trained on %s",
            *(name, adapter.rank, adapter.path),
            "host memory" if slot is None else f"slot {slot}",
            adapter.base_model or "an unnamed model",
        )
        return adapter

    def unload(self, name: str) -> None:
        """Let no more requests find an adapter, and empty its slot when its last one has ended.

        Raises:
            UnknownAdapterError: none of that name is loaded.
        """
        adapter = self.find(name)
        self._loaded = MappingProxyType(
            {each: one for each, one in self._loaded.items() if each != name}
        )
        self._hide(adapter)
        logger.info("unloaded the adapter %s", name)

    def hold(self, adapter: Adapter) -> None:
        """A request uses an adapter that was found, until `release`."""
        entry = self._entries[adapter.number]
        assert not entry.hidden
        entry.num_requests += 1
        entry.last_used = next(self._uses)
        self._num_wanted += entry.num_requests == 1 and entry.slot is None

    def release(self, adapter: Adapter) -> None:
        """A request that held an adapter has ended."""
        entry = self._entries[adapter.number]
        assert entry.num_requests > 0
        entry.num_requests -= 1
        entry.last_used = next(self._uses)
        self._num_wanted -= not entry.num_requests and entry.slot is None
        self._tidy(entry)

    def by_last_use(self) -> list[int]:
        """The numbers of the adapters in slots, the one that is unused for the longest first."""
        entries = sorted(self._slots.values(), key=lambda entry: entry.last_used)
        return [entry.adapter.number for entry in entries]

    def has_slot(self, number: int) -> bool:
        """Whether the adapter of that number has a slot."""
        return number in self._entries and self._entries[number].slot is not None

    def put(self, number: int, kept: Collection[int]) -> bool:
        """Put an adapter in a slot: a free one, or that of the one that is unused for the longest.

        Args:
            number: of the adapter, which has none.
            kept: numbers of adapters that keep theirs, among them all that running requests use.

        Returns:
            Whether there was such a slot.

        Raises:
            AdapterError, CapacityError, DeviceLostError, ProviderError: it could not be written;
                what was there is there again, or if that fails too the slot is free.
        """
        entry, limits = self._entries[number], self._model.capabilities
        if entry.adapter.rank > limits.max_adapter_rank:  # it was loaded for another model
            raise AdapterError(
                f"the adapter {entry.adapter.name} has rank {entry.adapter.rank}, and "
                f"{limits.provider}, which took over, was loaded for ranks up to "
                f"{limits.max_adapter_rank}"
            )
        slot, loser = self._unused_slot(), None
        if slot is None:
            victims = [one for one in self.by_last_use() if one not in kept]
            if not victims:
                return False
            loser = self._entries[victims[0]]
            slot = loser.slot
            assert slot is not None
        self._fill(slot, entry.weights)
        if loser is not None:
            self._vacate(loser)
            self.num_swaps += 1
        entry.last_used = next(self._uses)
        self._occupy(slot, entry)
        return True

    def move_to(self, model: Model) -> None:
        """Put adapters in the slots of another model, which takes over; nobody's rows run now.

        Where it has fewer slots, adapters that requests use get them first, then those that were
        used last. The others wait in host memory, where there is room for as many as before.

        Raises:
            CapacityError: it has no slots, they are too small, or memory is short.
            ProviderError: the device fails.
        """
        limits = model.capabilities
        if self._entries and not limits.max_adapters:
            raise CapacityError(
                f"{len(self._entries)} adapters are loaded, and {limits.provider} was loaded "
                "without slots for any"
            )
        ordered = sorted(
            self._slots.items(), key=lambda item: (item[1].num_requests == 0, -item[1].last_used)
        )
        staying, leaving = ordered[: limits.max_adapters], ordered[limits.max_adapters :]
        taken = {slot for slot, _ in staying}
        free = [slot for slot in range(1, limits.max_adapters + 1) if slot not in taken]
        moved = {
            slot if slot <= limits.max_adapters else free.pop(): entry for slot, entry in staying
        }
        for slot, entry in moved.items():
            model.set_adapter(slot, entry.weights)
        for _, entry in leaving:
            self._vacate(entry)
        for slot, entry in moved.items():
            entry.slot = slot
        self._slots = moved
        self._model = model
        self._most = max(self._most, limits.max_adapters)
        if leaving:
            logger.warning(
                "%s has %d slots for adapters; without one are now: %s",
                limits.provider,
                limits.max_adapters,
                ", ".join(repr(entry.adapter.name) for _, entry in leaving),
            )

    def check(self) -> None:
        """Assert the invariants (for tests)."""
        visible = {
            entry.adapter.name: entry.adapter
            for entry in self._entries.values()
            if not entry.hidden
        }
        assert visible == self._loaded
        assert len(self._entries) <= self._most
        for number, entry in self._entries.items():
            assert entry.adapter.number == number
            assert entry.num_requests > 0 or not entry.hidden
            assert entry.slot is None or self._slots[entry.slot] is entry
        for slot, entry in self._slots.items():
            assert entry.slot == slot
            assert self._entries[entry.adapter.number] is entry
        wanted = [one for one in self._entries.values() if one.num_requests and one.slot is None]
        assert self._num_wanted == len(wanted)

    def _check_rank(self, content: AdapterContent) -> None:
        limits = self._model.capabilities
        if not limits.max_adapters:
            raise CapacityError(
                f"{limits.provider} was loaded without slots for adapters; load it with "
                "max_adapters (--max-loras)"
            )
        if content.adapter.rank > limits.max_adapter_rank:
            raise CapacityError(
                f"{content.path} has rank {content.adapter.rank}, and the model was loaded for "
                f"ranks up to {limits.max_adapter_rank}; raise max_adapter_rank "
                "(--max-lora-rank)"
            )

    def _slot_for(self, previous: Adapter | None) -> int | None:
        """Return a slot for an adapter that may replace one; None: it stays in host memory."""
        idle = previous is not None and not self._entries[previous.number].num_requests
        if len(self._entries) >= self._most and not idle:
            raise CapacityError(self._full())
        slot = self._unused_slot()
        if slot is None and previous is not None and idle:
            slot = self._entries[previous.number].slot
        return slot

    def _full(self) -> str:
        """Say that as many adapters are loaded as may be."""
        listed = ", ".join(
            f"{entry.adapter.name!r}{' (unloaded, in use)' if entry.hidden else ''}"
            for entry in self._entries.values()
        )
        slots = self._model.capabilities.max_adapters
        places = f"all {slots} slots for adapters are"
        if self._most > slots:
            places = f"all {self._most} places for adapters in host memory are"
        return (
            f"{places} taken: {listed}. Unload one, wait for the requests of one that was "
            "unloaded, or raise max_host_adapters (--max-cpu-loras) or max_adapters (--max-loras)"
        )

    def _unused_slot(self) -> int | None:
        for slot in range(1, self._model.capabilities.max_adapters + 1):
            if slot not in self._slots:
                return slot
        return None

    def _occupy(self, slot: int, entry: _Entry) -> None:
        entry.slot = slot
        self._slots[slot] = entry
        self._num_wanted -= entry.num_requests > 0

    def _vacate(self, entry: _Entry) -> None:
        """Take its slot from an adapter; what is in the slot is about to be overwritten."""
        assert entry.slot is not None
        del self._slots[entry.slot]
        entry.slot = None
        self._num_wanted += entry.num_requests > 0

    def _fill(self, slot: int, weights: LoraAdapter) -> None:
        """Write a slot; if that fails, what was there is there again, or the slot is free."""
        try:
            self._model.set_adapter(slot, weights)
        except DeviceLostError:  # the next model gets what was there before
            raise
        except BaseException:
            self._restore(slot)
            raise

    def _restore(self, slot: int) -> None:
        """Undo a `set_adapter` that failed."""
        held = self._slots.get(slot)
        try:
            self._model.set_adapter(slot, held.weights if held else None)
        except (AdapterError, CapacityError, ProviderError) as error:
            logger.error("slot %d for adapters could not be restored: %s", slot, error)
            if held is not None:  # rather no slot than one with weights that nobody knows
                self._vacate(held)

    def _hide(self, adapter: Adapter) -> None:
        entry = self._entries[adapter.number]
        entry.hidden = True
        self._tidy(entry)

    def _tidy(self, entry: _Entry) -> None:
        """Forget an adapter that nobody needs any more, and empty its slot."""
        if not entry.hidden or entry.num_requests:
            return
        del self._entries[entry.adapter.number]
        if entry.slot is None:
            return
        slot = entry.slot
        self._vacate(entry)
        try:
            self._model.set_adapter(slot, None)
        except (ProviderError, CapacityError) as error:  # it is overwritten before it is used
            logger.warning("slot %d could not be emptied: %s", slot, error)
