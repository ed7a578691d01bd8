"""The LoRA adapters of a loaded model: who is in which slot, and what a graph is given of them.

Two graphs want two storages (graphs.passes.lora). Standard operators read a stack: the rows of the
adapters that steps use, rebuilt when a step uses another one. Our own operator reads slots, which
have a place each and are filled once (providers.adapter_slots).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import AdapterError, ArtifactError, CapacityError, ProviderError
from onnxport.graphs.lora import (
    KINDS,
    OF_FEED_FORWARD,
    Kind,
    LoraAdapter,
    LoraDelta,
    LoraProduct,
    Projection,
    owners_name,
    projection_shapes,
    projections_in,
)
from onnxport.graphs.spec import ArchSpec
from onnxport.graphs.tensors import convert
from onnxport.providers.base import LoadOptions, StepInputs

Arrays = Mapping[str, NDArray[Any]]  # by the name of the graph's input
Values = Mapping[str, Any]  # the same where a session reads it; not to be changed
Key = tuple[int, Projection]  # layer, projection
Place = Callable[[Arrays], Values]

IDLE_STEPS: Final = 256  # after which an adapter that no step used leaves the stack
# As much memory as so many: the stack that steps have read is there until they read the new one;
# and on the host are the adapters themselves, on a device what is on its way there.
STACKS: Final = 3
SMALLEST_STACK: Final = 8  # rows, on devices that compile a graph for each shape


class Storage(Protocol):
    """The weights of the adapters in their slots."""

    def put(self, slot: int, adapter: LoraAdapter) -> None:
        """Fill a slot with an adapter that fits the model, in place of what is there.

        Where it is refused, the slot stays as it was.
        """
        ...

    def remove(self, slot: int) -> None:
        """Empty a slot that is filled."""
        ...

    def values(self, used: Collection[int]) -> Values:
        """What the graph reads where a step uses these slots: the same object if nothing changed.

        Raises whatever the runtime raises where its memory is short.
        """
        ...


@dataclass(frozen=True, slots=True)
class AdapterStep:
    """What a step reads of the adapters."""

    values: Values  # the weights; the same object as in the last step if nothing changed
    token_slots: NDArray[np.int32]  # [num_tokens], host; for the input TOKEN_SLOTS


class Adapters:
    """The slots of a model, numbered from 1."""

    def __init__(self, spec: ArchSpec, options: LoadOptions, storage: Storage) -> None:
        """Let all slots be empty.

        Args:
            spec: the model.
            options: `max_adapters` and `max_adapter_rank` are used.
            storage: where the weights go.
        """
        self._spec = spec
        self._max_adapters = options.max_adapters
        self._max_rank = options.max_adapter_rank
        self._storage = storage
        self._filled: set[int] = set()

    def put(self, slot: int, adapter: LoraAdapter | None) -> None:
        """See `providers.base.Model.set_adapter`."""
        if not 1 <= slot <= self._max_adapters:
            raise ProviderError(
                f"slot {slot} for a LoRA adapter was asked for; the model was loaded with slots 1 "
                f"to {self._max_adapters}, load it with a higher max_adapters for more"
            )
        if adapter is not None:
            check_adapter(adapter, self._spec, self._max_rank)
            try:
                self._storage.put(slot, adapter)
            except AdapterError:
                raise
            except Exception:  # a device that failed half way
                self._filled.discard(slot)
                raise
            self._filled.add(slot)
        elif slot in self._filled:
            self._filled.remove(slot)
            self._storage.remove(slot)

    def step(self, inputs: StepInputs) -> AdapterStep:
        """What a step reads. Raises ProviderError where a row's slot is not filled."""
        slots = inputs.adapter_slots
        if slots is None:
            tokens = np.zeros(len(inputs.input_ids), np.int32)
            return AdapterStep(self._storage.values(()), tokens)
        used = set(slots.tolist()) - {0}
        if empty := sorted(used - self._filled):
            raise ProviderError(
                f"rows of a step use the LoRA adapters in slots {', '.join(map(str, empty))}, and "
                f"there is none; filled are {', '.join(map(str, sorted(self._filled))) or 'none'}"
            )
        tokens = np.repeat(slots.astype(np.int32), np.diff(inputs.cumulative_sequence_lengths))
        return AdapterStep(self._storage.values(used), tokens)


def refuse_slots(inputs: StepInputs) -> None:
    """Refuse a step that uses adapters on a model that has no slots."""
    if inputs.adapter_slots is not None and inputs.adapter_slots.any():
        raise ProviderError(
            f"rows of a step use the LoRA adapters in slots {set(inputs.adapter_slots.tolist())}, "
            "and this model was loaded without any; load it with max_adapters"
        )


def check_adapter(adapter: LoraAdapter, spec: ArchSpec, max_rank: int) -> None:
    """Refuse an adapter that is not of the model, as ProviderError, or too large for a slot.

    Raises:
        ProviderError: a shape or a layer is not the model's; says which.
        CapacityError: its rank is above `max_rank`.
    """
    known = projections_in(spec)
    for (layer, projection), delta in adapter.deltas.items():
        if not 0 <= layer < spec.num_layers or projection not in known:
            raise ProviderError(
                f"the LoRA adapter changes {projection} of layer {layer}; the model has layers 0 "
                f"to {spec.num_layers - 1} with {', '.join(known)}"
            )
        if projection not in (shapes := projection_shapes(spec, layer)):
            is_of_experts = projection in OF_FEED_FORWARD and spec.experts_of(layer) is not None
            what = "has experts" if is_of_experts else "has none"
            raise ProviderError(
                f"the LoRA adapter changes {projection} of layer {layer}, which {what}; "
                f"{', '.join(shapes)} can be changed there"
            )
        rows, columns = shapes[projection]
        wanted = ((delta.rank, columns), (rows, delta.rank))
        if (delta.a.shape, delta.b.shape) != wanted:
            raise ProviderError(
                f"the LoRA adapter has A {delta.a.shape} and B {delta.b.shape} for {projection} of "
                f"layer {layer}; with its rank the model takes A {wanted[0]} and B {wanted[1]}, so "
                "it was made for another model"
            )
    if adapter.rank > max_rank:
        raise CapacityError(
            f"the LoRA adapter has rank {adapter.rank}; the model was loaded for ranks up to "
            f"{max_rank}, load it with max_adapter_rank {adapter.rank}"
        )


def stack_bytes(
    products: Sequence[LoraProduct],
    spec: ArchSpec,
    options: LoadOptions,
    item_bytes: int,
    *,
    few_shapes: bool = False,
) -> int:
    """Memory of stacks of all adapters at their largest rank, while one takes another's place.

    Args:
        products: of the graph.
        spec: the model.
        options: `max_adapters` and `max_adapter_rank` are used.
        item_bytes: of a number.
        few_shapes: see `AdapterStacks`; so it is where that is steady, too.
    """
    rows = options.max_adapters * options.max_adapter_rank
    numbers = sum(
        stack_height(rows * len(parts), few_shapes=few_shapes)
        * (product.in_features(spec) + sum(parts))
        for product in products
        for parts in [product.out_features(spec)]
    )
    return STACKS * numbers * item_bytes


def stack_height(rows: int, *, few_shapes: bool) -> int:
    """Rows of a stack that has to hold so many; a product of none is not what every device can do.

    Args:
        rows: of the adapters in it.
        few_shapes: whether it is a power of two.
    """
    if not few_shapes:
        return max(1, rows)
    return max(SMALLEST_STACK, 1 << max(0, rows - 1).bit_length())


def check_stack_dtype(options: LoadOptions, dtype: str) -> None:
    """Refuse an `adapter_dtype` that is not the type of the activations.

    Args:
        options: of the load.
        dtype: of the activations, which adapters have there.

    Raises:
        ProviderError: it is another one.
    """
    if options.adapter_dtype not in ("auto", dtype):
        raise ProviderError(
            f"adapter_dtype is {options.adapter_dtype!r}; here adapters have the type of the "
            f"activations, {dtype}: ask for that, or for auto"
        )


def converted(adapter: LoraAdapter, dtype: np.dtype[Any]) -> Mapping[Key, LoraDelta]:
    """An adapter in another type. Raises AdapterError where a number is too large for it."""
    try:
        return {
            key: LoraDelta(
                convert(f"A of {key[1]}", delta.a, dtype), convert(f"B of {key[1]}", delta.b, dtype)
            )
            for key, delta in adapter.deltas.items()
        }
    except ArtifactError as error:
        raise AdapterError(f"the LoRA adapter does not fit: {error}") from error


@dataclass(frozen=True, slots=True)
class _Stack:
    """Stacked rows of some adapters."""

    slots: frozenset[int]
    values: Values


class AdapterStacks:
    """What standard operators read: the adapters in use, one below the other.

    A stack keeps the adapters of earlier steps for a while, so that it is built anew only when a
    step uses one that it has not, or when it has had one for long that none uses. Steps without any
    adapter read an empty one, which is kept beside it; a steady one, if it is the only one.
    """

    def __init__(
        self,
        products: Sequence[LoraProduct],
        spec: ArchSpec,
        dtype: np.dtype[Any],
        place: Place,
        *,
        few_shapes: bool = False,
        steady: bool = False,
    ) -> None:
        """Stack nothing.

        Args:
            products: of the graph, see `graphs.passes.lora.lora_products`.
            spec: the model.
            dtype: of the activations.
            place: puts arrays where a session reads them; called for each new stack.
            few_shapes: let the number of rows be a power of two.
            steady: and never fewer than they were, so that `place` can put all stacks in the same
                memory; there is only one then, whether a step uses adapters or not.
        """
        self._products = products
        self._spec = spec
        self._dtype = dtype
        self._place = place
        self._few_shapes = few_shapes or steady
        self._steady = steady
        self._heights: dict[Kind, int] = {}  # the largest yet
        self._adapters: dict[int, Mapping[Key, LoraDelta]] = {}
        self._step = 0  # of those with adapters
        self._last_used: dict[int, int] = {}  # slot -> step
        self._empty = self._build(frozenset())
        self._stack = self._empty

    def put(self, slot: int, adapter: LoraAdapter) -> None:
        """See `Storage`. Raises AdapterError where a number is too large for the type."""
        deltas = converted(adapter, self._dtype)
        if slot in self._adapters:
            self.remove(slot)
        self._adapters[slot] = deltas

    def remove(self, slot: int) -> None:
        """See `Storage`."""
        del self._adapters[slot]
        if slot in self._stack.slots:
            self._stack = self._none()

    def values(self, used: Collection[int]) -> Values:
        """See `Storage`."""
        if not used:
            return (self._stack if self._steady else self._empty).values
        self._step += 1
        self._last_used.update(dict.fromkeys(used, self._step))
        recent = self._step - IDLE_STEPS
        kept = {slot for slot in self._stack.slots if self._last_used[slot] > recent}
        if not self._stack.slots.issuperset(used) or len(kept) < len(self._stack.slots):
            if self._steady:
                self._stack = self._none()  # what is there goes, be it for half a stack
            self._stack = self._build(frozenset(kept.union(used)))
        return self._stack.values

    def _none(self) -> _Stack:
        """A stack of which no slot is used. A steady one has the rows of the last, for nobody."""
        return _Stack(frozenset(), self._stack.values) if self._steady else self._empty

    def _build(self, slots: frozenset[int]) -> _Stack:
        arrays: dict[str, NDArray[Any]] = {}
        rows_of = {kind: self._rows(kind, slots) for kind in {p.kind for p in self._products}}
        for kind, rows in rows_of.items():
            owners = np.zeros(self._height(kind, rows), np.int32)
            for row in rows:
                owners[row.first : row.first + row.count] = row.slot
            arrays[owners_name(kind)] = owners
        for product in self._products:
            parts = product.out_features(self._spec)
            rows = rows_of[product.kind]
            height = self._height(product.kind, rows)
            all_a = np.zeros((height, product.in_features(self._spec)), self._dtype)
            all_b = np.zeros((height, sum(parts)), self._dtype)
            for row in rows:
                delta = self._adapters[row.slot].get((product.layer, row.projection))
                if delta is None:
                    continue
                number = KINDS[product.kind].index(row.projection)
                begin, end = sum(parts[:number]), sum(parts[: number + 1])
                all_a[row.first : row.first + delta.rank] = delta.a
                all_b[row.first : row.first + delta.rank, begin:end] = delta.b.T
            arrays[product.a], arrays[product.b] = all_a, all_b
        return _Stack(slots, self._place(arrays))

    def _rows(self, kind: Kind, slots: frozenset[int]) -> list[_Rows]:
        """The rows of a kind of product; they are the same in all layers."""
        return list(self._count_rows(kind, slots))

    def _count_rows(self, kind: Kind, slots: frozenset[int]) -> Iterator[_Rows]:
        first = 0
        for slot in sorted(slots):
            for projection in KINDS[kind]:
                ranks = [
                    delta.rank
                    for (_, name), delta in self._adapters[slot].items()
                    if name == projection
                ]
                count = max(ranks, default=0)
                yield _Rows(slot, projection, first, count)
                first += count

    def _height(self, kind: Kind, rows: Sequence[_Rows]) -> int:
        """Rows of a stack."""
        height = stack_height(sum(row.count for row in rows), few_shapes=self._few_shapes)
        if self._steady:
            height = self._heights[kind] = max(height, self._heights.get(kind, 0))
        return height


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a stack that belong to one projection of one adapter."""

    slot: int
    projection: Projection
    first: int
    count: int
