"""The slots of a model for adapters, and which adapter is in which."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from onnxport.errors import AdapterError, CapacityError, DeviceLostError, ProviderError
from onnxport.graphs.lora import LoraAdapter
from onnxport.providers.base import Capabilities, Model
from onnxport.serving.adapters.adapter import Adapter

logger = logging.getLogger(__name__)


class Source(Protocol):
    """Makes the weights of an adapter that has none of its own."""

    def read(self) -> LoraAdapter:
        """Make them. Raises AdapterError where they cannot be."""
        ...


@dataclass(slots=True)
class Entry:
    """An adapter in host memory, which requests find unless it is `hidden`."""

    adapter: Adapter
    source: LoraAdapter | Source  # kept, for it may lose its slot, or another model take over
    slot: int | None = None  # of the model, from 1
    num_requests: int = 0  # unfinished ones
    num_mixes: int = 0  # that it is a part of
    num_mixed_requests: int = 0  # unfinished ones of these
    hidden: bool = False
    last_used: int = 0  # when a request came or ended, or it got its slot; larger is later

    @property
    def weights(self) -> LoraAdapter:
        """What a slot is written with. Raises AdapterError where it cannot be made."""
        return self.source if isinstance(self.source, LoraAdapter) else self.source.read()


class ModelSlots:
    """Writes adapters to slots, and knows what is there.

    Attributes:
        num_wanted: adapters of unfinished requests that have no slot.
        num_swaps: slots that one adapter has lost to another.
    """

    def __init__(self, model: Model) -> None:
        """Start with slots that are free."""
        self._model = model
        self._filled: dict[int, Entry] = {}
        self.num_wanted = 0
        self.num_swaps = 0

    @property
    def limits(self) -> Capabilities:
        """What the model can do."""
        return self._model.capabilities

    @property
    def filled(self) -> Mapping[int, Entry]:
        """The adapters that have a slot, by slot."""
        return MappingProxyType(self._filled)

    def by_last_use(self) -> list[Entry]:
        """The adapters in slots, the one that is unused for the longest first."""
        return sorted(self._filled.values(), key=lambda entry: entry.last_used)

    def unused(self) -> int | None:
        """Return a free slot, the first one."""
        for slot in range(1, self.limits.max_adapters + 1):
            if slot not in self._filled:
                return slot
        return None

    def begin_use(self, entry: Entry) -> None:
        """One more request uses an adapter."""
        entry.num_requests += 1
        self.num_wanted += entry.num_requests == 1 and entry.slot is None

    def end_use(self, entry: Entry) -> None:
        """One request less uses an adapter."""
        assert entry.num_requests > 0
        entry.num_requests -= 1
        self.num_wanted -= not entry.num_requests and entry.slot is None

    def put(self, entry: Entry, kept: Collection[int]) -> bool:
        """Put an adapter in a slot; see `AdapterRegistry.put`."""
        limits = self.limits
        if entry.adapter.rank > limits.max_adapter_rank:  # it was loaded for another model
            raise AdapterError(
                f"the adapter {entry.adapter.name} has rank {entry.adapter.rank}, and "
                f"{limits.provider}, which took over, was loaded for ranks up to "
                f"{limits.max_adapter_rank}"
            )
        slot, loser = self.unused(), None
        if slot is None:
            victims = [one for one in self.by_last_use() if one.adapter.number not in kept]
            if not victims:
                return False
            loser = victims[0]
            slot = loser.slot
            assert slot is not None
        self.fill(slot, entry.weights)
        if loser is not None:
            self.vacate(loser)
            self.num_swaps += 1
        self.occupy(slot, entry)
        return True

    def fill(self, slot: int, weights: LoraAdapter) -> None:
        """Write a slot; if that fails, what was there is there again, or the slot is free.

        Raises:
            AdapterError, CapacityError, DeviceLostError, ProviderError: it could not be written.
        """
        try:
            self._model.set_adapter(slot, weights)
        except DeviceLostError:  # the next model gets what was there before
            raise
        except BaseException:
            self._restore(slot)
            raise

    def occupy(self, slot: int, entry: Entry) -> None:
        """An adapter has a slot that it was written to."""
        entry.slot = slot
        self._filled[slot] = entry
        self.num_wanted -= entry.num_requests > 0

    def vacate(self, entry: Entry) -> None:
        """Take its slot from an adapter; what is in the slot is about to be overwritten."""
        assert entry.slot is not None
        del self._filled[entry.slot]
        entry.slot = None
        self.num_wanted += entry.num_requests > 0

    def empty(self, entry: Entry) -> None:
        """Take its slot from an adapter, if it has one, and its weights from the slot."""
        slot = entry.slot
        if slot is None:
            return
        self.vacate(entry)
        try:
            self._model.set_adapter(slot, None)
        except (ProviderError, CapacityError) as error:  # it is overwritten before it is used
            logger.warning("slot %d could not be emptied: %s", slot, error)

    def move_to(self, model: Model, num_loaded: int) -> None:
        """Put adapters in the slots of another model, which takes over; nobody's rows run now.

        Where it has fewer slots, adapters that requests use get them first, then those that were
        used last. The others have none.

        Args:
            model: the other one.
            num_loaded: adapters in host memory, in a slot or not.

        Raises:
            CapacityError: it has no slots, they are too small, or memory is short.
            ProviderError: the device fails.
        """
        most = model.capabilities.max_adapters
        if num_loaded and not most:
            raise CapacityError(
                f"{num_loaded} adapters are loaded, and {model.capabilities.provider} was loaded "
                "without slots for any"
            )
        ordered = sorted(
            self._filled.values(), key=lambda entry: (entry.num_requests == 0, -entry.last_used)
        )
        staying, leaving = ordered[:most], ordered[most:]
        taken = {entry.slot for entry in staying}
        free = iter([slot for slot in range(1, most + 1) if slot not in taken])
        moved: dict[int, Entry] = {}
        for entry in staying:
            assert entry.slot is not None
            moved[entry.slot if entry.slot <= most else next(free)] = entry
        for slot, entry in moved.items():
            model.set_adapter(slot, entry.weights)
        for entry in leaving:
            self.vacate(entry)
        for slot, entry in moved.items():
            entry.slot = slot
        self._filled, self._model = moved, model
        if leaving:
            logger.warning(
                "%s has %d slots for adapters; without one are now: %s",
                model.capabilities.provider,
                most,
                ", ".join(repr(entry.adapter.name) for entry in leaving),
            )

    def check(self, entries: Iterable[Entry]) -> None:
        """Assert the invariants (for tests), of all adapters."""
        held = list(entries)
        for entry in held:
            assert entry.slot is None or self._filled[entry.slot] is entry
        for slot, entry in self._filled.items():
            assert entry.slot == slot <= self.limits.max_adapters
            assert any(entry is one for one in held)
        wanted = [one for one in held if one.num_requests and one.slot is None]
        assert self.num_wanted == len(wanted)

    def _restore(self, slot: int) -> None:
        """Undo a `set_adapter` that failed."""
        held = self._filled.get(slot)
        try:
            self._model.set_adapter(slot, held.weights if held else None)
        except (AdapterError, CapacityError, ProviderError) as error:
            logger.error("slot %d for adapters could not be restored: %s", slot, error)
            if held is not None:  # rather no slot than one with weights that nobody knows
                self.vacate(held)
