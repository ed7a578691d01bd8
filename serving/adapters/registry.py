"""The adapters that are loaded: which name is which slot of the model, and who uses it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
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
    slot: int  # of the model, from 1
    fingerprint: str  # of its content; K/V are shared by it
    rank: int  # the largest of its modules
    path: Path  # where it was read
    base_model: str | None  # what it says it was trained on


@dataclass(slots=True)
class _Slot:
    """A slot that is taken, by an adapter that requests find unless `hidden`."""

    adapter: Adapter
    weights: LoraAdapter  # kept, for another model may take over
    num_requests: int = 0  # unfinished ones
    hidden: bool = False


class AdapterRegistry:
    """Puts adapters in the slots of a model, by name.

    An adapter that is unloaded, or replaced, is hidden at once, and leaves its slot when the last
    request that uses it has ended.

    `loaded`, `find` and `read` are for any thread; all else belongs to the engine's, between steps.
    """

    def __init__(self, model: Model, base: ArchSpec | None = None) -> None:
        """Start without adapters.

        Args:
            model: has the slots.
            base: the model that adapters have to fit; None where none can be read.
        """
        self._model = model
        self._base = base
        self._slots: dict[int, _Slot] = {}
        self._loaded: Mapping[str, Adapter] = MappingProxyType({})  # replaced as a whole

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """The adapters that requests may pick, in the order of loading."""
        return tuple(self._loaded.values())

    @property
    def num_requests(self) -> dict[str, int]:
        """Unfinished requests of each adapter that requests may pick."""
        return {
            slot.adapter.name: slot.num_requests for slot in self._slots.values() if not slot.hidden
        }

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
        """Put an adapter in a free slot, under a name.

        Args:
            name: what requests call it.
            content: what was read.
            in_place: replace the one of that name, which its requests go on with.

        Raises:
            AdapterError: the name is not usable, or taken and not to be replaced.
            CapacityError: no slot is free, its rank is too large, or memory is short.
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
        slot = self._free_slot(previous)
        try:
            self._model.set_adapter(slot, content.adapter)
        except DeviceLostError:  # the next model gets what was there before
            raise
        except BaseException:
            self._restore(slot)
            raise
        adapter = Adapter(
            name, slot, content.fingerprint, content.adapter.rank, content.path, content.base_model
        )
        if previous is not None and previous.slot != slot:
            self._hide(previous)
        self._slots[slot] = _Slot(adapter, content.adapter)
        self._loaded = MappingProxyType({**self._loaded, name: adapter})
        logger.info(
            "loaded the adapter %s, rank %d, from %s into slot %d; it was trained on %s",
            *(name, adapter.rank, adapter.path, slot, adapter.base_model or "an unnamed model"),
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
        slot = self._slots[adapter.slot]
        assert slot.adapter == adapter
        assert not slot.hidden
        slot.num_requests += 1

    def release(self, adapter: Adapter) -> None:
        """A request that held an adapter has ended."""
        slot = self._slots[adapter.slot]
        assert slot.adapter == adapter
        assert slot.num_requests > 0
        slot.num_requests -= 1
        self._tidy(slot)

    def move_to(self, model: Model) -> None:
        """Put everything in the slots of another model, which takes over.

        Raises:
            CapacityError: it has too few slots, they are too small, or memory is short.
            ProviderError: the device fails.
        """
        limits = model.capabilities
        highest = max(self._slots, default=0)
        if highest > limits.max_adapters:
            raise CapacityError(
                f"slot {highest} holds an adapter, and {limits.provider} was loaded with "
                f"{limits.max_adapters} slots"
            )
        for number, slot in self._slots.items():
            model.set_adapter(number, slot.weights)
        self._model = model

    def check(self) -> None:
        """Assert the invariants (for tests)."""
        visible = {
            slot.adapter.name: slot.adapter for slot in self._slots.values() if not slot.hidden
        }
        assert visible == self._loaded
        for number, slot in self._slots.items():
            assert slot.adapter.slot == number
            assert slot.num_requests > 0 or not slot.hidden

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

    def _free_slot(self, previous: Adapter | None) -> int:
        """Return a slot for an adapter that may replace one."""
        limits = self._model.capabilities
        for slot in range(1, limits.max_adapters + 1):
            if slot not in self._slots:
                return slot
        if previous is not None and not self._slots[previous.slot].num_requests:
            return previous.slot
        listed = ", ".join(
            f"{slot.adapter.name!r}{' (unloaded, in use)' if slot.hidden else ''}"
            for slot in self._slots.values()
        )
        raise CapacityError(
            f"all {limits.max_adapters} slots for adapters are taken: {listed}. Unload one, wait "
            "for the requests of one that was unloaded, or raise max_adapters (--max-loras)"
        )

    def _restore(self, slot: int) -> None:
        """Undo a `set_adapter` that failed."""
        held = self._slots.get(slot)
        try:
            self._model.set_adapter(slot, held.weights if held else None)
        except (ProviderError, CapacityError) as error:
            logger.error("slot %d for adapters could not be restored: %s", slot, error)
            if held is not None:
                self.unload(held.adapter.name)

    def _hide(self, adapter: Adapter) -> None:
        slot = self._slots[adapter.slot]
        slot.hidden = True
        self._tidy(slot)

    def _tidy(self, slot: _Slot) -> None:
        """Empty a slot that nobody needs any more."""
        if not slot.hidden or slot.num_requests:
            return
        del self._slots[slot.adapter.slot]
        try:
            self._model.set_adapter(slot.adapter.slot, None)
        except (ProviderError, CapacityError) as error:  # it is overwritten before it is used
            logger.warning("slot %d could not be emptied: %s", slot.adapter.slot, error)
