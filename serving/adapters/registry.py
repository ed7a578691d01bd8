"""The adapters that are loaded: who uses them, and which of them are in a slot of the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from onnxport.errors import (
    AdapterError,
    CapacityError,
    PlacesTakenError,
    RequestError,
    UnknownAdapterError,
)
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.base import Model
from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.adapters.mixes import Mixes, is_spent, mix_of, parts_of
from onnxport.serving.adapters.model_slots import Entry, ModelSlots
from onnxport.serving.params import RequestOptions

if TYPE_CHECKING:
    from onnxport.serving.adapters.peft import AdapterContent

logger = logging.getLogger(__name__)

MAX_NAME = 256  # characters

# Reads an adapter of a model from where it is. Raises AdapterError.
AdapterReader = Callable[[Path, ArchSpec], "AdapterContent"]


class AdapterRegistry:
    """Keeps adapters in host memory, by name, and puts as many as fit in the slots of a model.

    An adapter that is unloaded, or replaced, is hidden at once, and forgotten when the last
    request that uses it has ended. Until then its weights are kept; its slot only while requests
    that use it run. Which of several gets a slot is decided by `serving/adapters/slots.py`; what is
    in them is known by `serving/adapters/model_slots.py`. Requests may also use a mix of adapters,
    see `serving/adapters/mixes.py`; it is forgotten when nobody uses it and it has lost its slot.

    `loaded`, `is_full`, `scales`, `find`, `pick` and `read` are for any thread; all else belongs to
    the engine's, between steps.

    Attributes:
        reader: what reads adapters; None: they are PEFT's folders.
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
        self._base = base
        self._most = max(max_host_adapters or 0, most)  # that are loaded
        self._entries: dict[int, Entry] = {}  # by number
        self._slots = ModelSlots(model)
        self._loaded: Mapping[str, Adapter] = MappingProxyType({})  # replaced as a whole
        self._scales: Mapping[str, float] = MappingProxyType({})  # likewise
        self._num_requests: Mapping[str, int] | None = None  # None: it has to be counted
        self._mixes = Mixes()
        self._places = count()
        self.reader: AdapterReader | None = None
        self._numbers = count(1)
        self._uses = count(1)

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """The adapters that requests may pick, in the order of loading."""
        return tuple(self._loaded.values())

    @property
    def num_requests(self) -> Mapping[str, int]:
        """Unfinished requests of each adapter that requests may pick; the same one till it changes.

        It is asked for after each step, and adapters may be many.
        """
        if self._num_requests is None:
            entries = [(name, self._entries[one.number]) for name, one in self._loaded.items()]
            counts = {name: one.num_requests + one.num_mixed_requests for name, one in entries}
            self._num_requests = MappingProxyType(counts)
        return self._num_requests

    @property
    def num_held(self) -> int:
        """Adapters in host memory: the loaded ones, and those that were unloaded and are in use."""
        return len(self._entries) - len(self._mixes)

    @property
    def is_full(self) -> bool:
        """Whether as many are held as may be, of a model that has slots at all."""
        return 0 < self._most <= self.num_held

    @property
    def scales(self) -> Mapping[str, float]:
        """What loaded adapters are times in requests that pick none; of all others it is 0."""
        return self._scales

    @property
    def wants_slots(self) -> bool:
        """Whether an unfinished request uses an adapter that has no slot."""
        return self._slots.num_wanted > 0

    @property
    def num_swaps(self) -> int:
        """Slots that one adapter has lost to another."""
        return self._slots.num_swaps

    @property
    def has_free_slot(self) -> bool:
        """Whether a slot holds no adapter."""
        return self._slots.unused() is not None

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

    def pick(self, options: RequestOptions) -> Adapter | None:
        """Return what a request uses: an adapter, or a mix that `hold` gives a number; None: none.

        Raises:
            UnknownAdapterError: an adapter that it names is not loaded.
            RequestError: the rank of the sum of those that it names is too large.
        """
        if options.adapter is not None:
            return self.find(options.adapter)
        if options.adapter_scales is not None:
            return self._mix(dict(options.adapter_scales))
        loaded = self._loaded  # of which one may be unloaded meanwhile
        return self._sum((loaded[name], by) for name, by in self._scales.items() if name in loaded)

    def set_scales(self, scales: Mapping[str, float]) -> None:
        """Say what adapters are times in requests that pick none; of all others it is 0.

        Raises:
            UnknownAdapterError: one is not loaded.
            RequestError: a scale is out of its range, or the rank of their sum is too large.
        """
        checked = dict(RequestOptions(adapter_scales=scales).adapter_scales or ())
        self._mix(checked)
        self._scales = MappingProxyType({name: scale for name, scale in checked.items() if scale})

    def _mix(self, scales: Mapping[str, float]) -> Adapter | None:
        return self._sum([(self.find(name), scale) for name, scale in scales.items()])

    def _sum(self, pairs: Iterable[tuple[Adapter, float]]) -> Adapter | None:
        return mix_of(pairs, self._slots.limits.max_adapter_rank)

    def read(self, path: Path, reader: AdapterReader | None = None) -> AdapterContent:
        """Read an adapter of this model.

        Args:
            path: a folder of PEFT, or what the reader reads.
            reader: what reads it; None: that of this registry, and of folders alone without one.

        Raises:
            AdapterError: it cannot be read, or does not fit.
        """
        if self._base is None:
            raise AdapterError(
                "this engine does not know its model's shapes, and reads no adapters"
            )
        from onnxport.serving.adapters.peft import read_adapter

        return (reader or self.reader or read_adapter)(path, self._base)

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
        if previous is not None:
            self._check_joint_rank(previous, content)
        for mix in self._mixes.idle():  # whose slots may be of more use
            self._forget(mix)
        slot = self._slot_for(previous)
        if slot is not None:
            self._slots.fill(slot, content.adapter)
        adapter = Adapter(
            *(name, next(self._numbers), content.fingerprint, content.adapter.rank),
            *(content.path, content.base_model),
            next(self._places) if previous is None else previous.place,
            *(content.task_name, content.prompt_prefix),
            invocation=content.invocation,
            ranks=content.adapter.ranks,
        )
        entry = Entry(adapter, content.adapter, last_used=next(self._uses))
        if previous is not None:
            replaced = self._entries[previous.number]
            if slot is not None and replaced.slot == slot:  # what was there is overwritten
                self._slots.vacate(replaced)
            self._hide(previous)
        self._entries[adapter.number] = entry
        if slot is not None:
            self._slots.occupy(slot, entry)
        self._loaded = MappingProxyType({**self._loaded, name: adapter})
        self._num_requests = None
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
        self._scales = MappingProxyType(
            {each: scale for each, scale in self._scales.items() if each != name}
        )
        self._num_requests = None
        self._hide(adapter)
        logger.info("unloaded the adapter %s", name)

    def hold(self, adapter: Adapter) -> Adapter:
        """A request uses an adapter that was picked: what is returned, until `release`."""
        if adapter.parts:
            entry = self._mixes.find(adapter)
            if entry is None:
                entry = self._mixes.add(adapter, next(self._numbers), self._entries)
                self._entries[entry.adapter.number] = entry
        else:
            entry = self._entries[adapter.number]
        assert not entry.hidden
        entry.last_used = next(self._uses)
        self._num_requests = None
        self._slots.begin_use(entry)
        if adapter.parts:
            self._mixes.note_use(entry)
        for part in parts_of(entry):
            part.num_mixed_requests += 1
        return entry.adapter

    def release(self, adapter: Adapter) -> None:
        """A request that held an adapter has ended."""
        entry = self._entries[adapter.number]
        entry.last_used = next(self._uses)
        self._num_requests = None
        self._slots.end_use(entry)
        if adapter.parts:
            self._mixes.note_use(entry)
        for part in parts_of(entry):
            part.num_mixed_requests -= 1
        self._tidy(entry)

    def by_last_use(self) -> list[int]:
        """The numbers of the adapters in slots, the one that is unused for the longest first."""
        return [entry.adapter.number for entry in self._slots.by_last_use()]

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
        entry = self._entries[number]
        try:
            if not self._slots.put(entry, kept):
                return False
        finally:
            self._tidy_mixes()
        entry.last_used = next(self._uses)
        return True

    def move_to(self, model: Model) -> None:
        """Put adapters in the slots of another model, which takes over; see `ModelSlots.move_to`.

        As many may be loaded as before, or more if it has more slots.
        """
        self._slots.move_to(model, len(self._entries))
        self._tidy_mixes()
        self._most = max(self._most, model.capabilities.max_adapters)

    def check(self) -> None:
        """Assert the invariants (for tests)."""
        visible = {
            entry.adapter.name: entry.adapter
            for entry in self._entries.values()
            if not entry.hidden and not entry.adapter.parts
        }
        assert visible == self._loaded
        assert self._scales.keys() <= visible.keys()
        told, self._num_requests = self.num_requests, None
        assert told == self.num_requests
        assert self.num_held <= self._most
        for number, entry in self._entries.items():
            assert entry.adapter.number == number
            assert entry.num_requests or entry.num_mixes or not entry.hidden
        self._mixes.check()
        self._slots.check(self._entries.values())

    def _check_rank(self, content: AdapterContent) -> None:
        limits = self._slots.limits
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

    def _check_joint_rank(self, previous: Adapter, content: AdapterContent) -> None:
        """Refuse what makes the rank of the sum too large that requests get which pick none."""
        if previous.name not in self._scales:
            return
        coming = replace(
            previous,
            rank=content.adapter.rank,
            ranks=content.adapter.ranks,
            invocation=content.invocation,
        )
        found = {name: self._loaded[name] for name in self._scales} | {previous.name: coming}
        try:
            self._sum((found[name], scale) for name, scale in self._scales.items())
        except RequestError as error:
            raise CapacityError(
                f"{content.path} cannot replace {previous.name!r}, a part of what requests get "
                f"that pick no adapter: {error}. Or set other scales first (/lora-adapters)"
            ) from None

    def _slot_for(self, previous: Adapter | None) -> int | None:
        """Return a slot for an adapter that may replace one; None: it stays in host memory."""
        held = None if previous is None else self._entries[previous.number]
        idle = held is not None and not held.num_requests and not held.num_mixes
        if self.num_held >= self._most and not idle:
            raise PlacesTakenError(self._full())
        slot = self._slots.unused()
        if slot is None and held is not None and idle:
            slot = held.slot
        return slot

    def _full(self) -> str:
        """Say that as many adapters are loaded as may be."""
        listed = ", ".join(
            f"{entry.adapter.name!r}{' (unloaded, in use)' if entry.hidden else ''}"
            for entry in self._entries.values()
            if not entry.adapter.parts
        )
        slots = self._slots.limits.max_adapters
        places = f"all {slots} slots for adapters are"
        if self._most > slots:
            places = f"all {self._most} places for adapters in host memory are"
        return (
            f"{places} taken: {listed}. Unload one, wait for the requests of one that was "
            "unloaded, or raise max_host_adapters (--max-cpu-loras) or max_adapters (--max-loras)"
        )

    def _hide(self, adapter: Adapter) -> None:
        entry = self._entries[adapter.number]
        entry.hidden = True
        self._mixes.hide(adapter)
        self._tidy_mixes()
        self._tidy(entry)

    def _tidy(self, entry: Entry) -> None:
        """Forget an adapter that nobody needs any more, and empty its slot."""
        if entry.adapter.number not in self._entries:  # with the last mix of it
            return
        if entry.adapter.parts:
            if is_spent(entry):
                self._forget(entry)
        elif entry.hidden and not entry.num_requests and not entry.num_mixes:
            del self._entries[entry.adapter.number]
            self._slots.empty(entry)

    def _tidy_mixes(self) -> None:
        """Forget the mixes that are of no more use."""
        for mix in self._mixes.spent():
            self._forget(mix)

    def _forget(self, mix: Entry) -> None:
        """Forget a mix that no request uses, and its parts, if that was all they were kept for."""
        assert not mix.num_requests
        del self._entries[mix.adapter.number]
        self._slots.empty(mix)
        for part in self._mixes.remove(mix):
            self._tidy(part)
