"""What the operator AddLora reads: memory of its own for each adapter, filled once.

Adapters are kept as floats, or in integers, of which A is what packed_rows.py says, and B what
packed_columns.py does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxport.errors import AdapterError
from onnxport.graphs.lora import (
    INTEGERS,
    KINDS,
    RANKS,
    SCALES,
    WEIGHTS,
    LoraAdapter,
    LoraDelta,
    LoraProduct,
    SlotDtype,
    projections_in,
    slot_layout,
)
from onnxport.graphs.spec import ArchSpec
from onnxport.providers import memory
from onnxport.providers.adapters import Key, Place, Values, converted
from onnxport.providers.base import LoadOptions
from onnxport.providers.packed_columns import PackedColumns, in_floats, in_int4, in_int8
from onnxport.providers.packed_rows import packed

# What numbers of a slot are in NumPy. Those of int4 are bytes.
_TYPES: Final[Mapping[SlotDtype, np.dtype[Any]]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "int8": np.dtype(np.int8),
    "int4": np.dtype(np.int8),
}
# Copies numbers to where a session reads them: the name, the first number's place, the numbers.
Write = Callable[[str, int, NDArray[Any]], None]


def slots_bytes(
    products: Sequence[LoraProduct], spec: ArchSpec, options: LoadOptions, dtype: SlotDtype
) -> int:
    """Memory of the slots that AddLora reads, all filled, and of their ranks and scales."""
    _, numbers = slot_layout(products, spec, options.max_adapter_rank, dtype)
    ranks = (options.max_adapters + 1) * spec.num_layers * len(projections_in(spec))
    scales = ranks * options.max_adapter_rank if dtype in INTEGERS else 0
    return _TYPES[dtype].itemsize * numbers * options.max_adapters + 4 * (ranks + scales)


class AdapterSlots:
    """See `providers.adapters.Storage`; the layout of a slot is `slot_layout`'s."""

    def __init__(
        self,
        products: Sequence[LoraProduct],
        spec: ArchSpec,
        options: LoadOptions,
        dtype: SlotDtype,
        place: Place,
        write: Write | None = None,
    ) -> None:
        """Take address space for all slots; memory is taken by those that are filled.

        Args:
            products: of the graph, see `graphs.passes.lora.lora_products`.
            spec: the model.
            options: `max_adapters` and `max_adapter_rank` are used.
            dtype: that adapters are kept in.
            place: lets a session read arrays where they are, or makes room for the same somewhere
                else, with what ranks and scales there are.
            write: copies to that room; None: there is none.
        """
        self._projections = projections_in(spec)
        self._dtype = dtype
        self._places, numbers = slot_layout(products, spec, options.max_adapter_rank, dtype)
        self._weights = memory.huge_page_zeros((options.max_adapters, numbers), _TYPES[dtype])
        ranks = (options.max_adapters + 1, spec.num_layers, len(self._projections))
        self._ranks = np.zeros(ranks, np.int32)
        self._scales = np.zeros((*ranks, options.max_adapter_rank), np.float32)
        values: dict[str, NDArray[Any]] = {RANKS: self._ranks, WEIGHTS: self._weights}
        if dtype in INTEGERS:
            values[SCALES] = self._scales
        self._place = place  # may hold what the session reads
        self._write = write
        self._values = place(values)

    def put(self, slot: int, adapter: LoraAdapter) -> None:
        """See `Storage`. Raises AdapterError where a number is none that the type can hold."""
        rows = self._rows(adapter)
        of_products = {product: self._of(product, rows) for product in self._places}
        joined = {
            product: packed(product, np.concatenate([one.a for one in found.values()]), self._dtype)
            for product, found in of_products.items()
            if self._dtype in INTEGERS and found
        }
        self.remove(slot)
        # What is copied at once needs no more than one slot here.
        at = self._weights[slot - 1 if self._write is None else 0]
        if self._write is not None:
            at[:] = 0
        ranks = np.zeros_like(self._ranks[slot])
        for product, begin in self._places.items():
            if product in joined:
                begin = _write(at, begin, joined[product])
            for (layer, projection), own in of_products[product].items():
                key = (layer, self._projections.index(projection))
                ranks[key] = len(own.a)
                self._scales[(slot, *key)][: len(own.a)] = own.b.scales
                if product not in joined:
                    begin = _write(at, begin, in_floats(own.a).stored)
                begin = _write(at, begin, own.b.stored)
        if self._write is not None:
            self._write(WEIGHTS, (slot - 1) * at.size, at)
        self._ranks[slot] = ranks
        if self._write is not None:
            self._write(RANKS, 0, self._ranks)

    def remove(self, slot: int) -> None:
        """See `Storage`."""
        self._ranks[slot] = 0
        self._scales[slot] = 0
        if self._write is not None:
            self._write(RANKS, 0, self._ranks)

    def values(self, used: Collection[int]) -> Values:
        """See `Storage`."""
        return self._values

    @staticmethod
    def _of(product: LoraProduct, rows: Mapping[Key, _Rows]) -> dict[Key, _Rows]:
        """The projections of a product that an adapter changes, in order."""
        keys = [(product.layer, projection) for projection in KINDS[product.kind]]
        return {key: rows[key] for key in keys if key in rows}

    def _rows(self, adapter: LoraAdapter) -> dict[Key, _Rows]:
        """All of an adapter as it is kept, so that nothing is written if it cannot be."""
        if self._dtype in INTEGERS:
            for key, delta in adapter.deltas.items():
                _check_finite(key, delta, self._dtype)
            return {key: self._integers(key, delta) for key, delta in adapter.deltas.items()}
        try:
            deltas = converted(adapter, self._weights.dtype)
        except AdapterError as error:  # which advises another type for the model
            raise AdapterError(
                "the LoRA adapter does not fit: it holds numbers that are too large for "
                f"{self._dtype}; keep adapters in another type"
            ) from error
        return {key: _Rows(delta.a, in_floats(delta.b.T)) for key, delta in deltas.items()}

    def _integers(self, key: Key, delta: LoraDelta) -> _Rows:
        if self._dtype == "int8":
            return _Rows(delta.a, in_int8(delta.b.T))
        try:
            return _Rows(delta.a, in_int4(delta.b.T, delta.a))
        except OverflowError:
            layer, projection = key
            raise AdapterError(
                f"the LoRA adapter does not fit: A and B of {projection} of layer {layer} are too "
                "large, or too far apart, for int4; keep adapters in another type"
            ) from None


@dataclass(frozen=True, slots=True)
class _Rows:
    """One projection of an adapter, as it is kept."""

    a: NDArray[Any]  # [rank, in_features]; of integers as it was given
    b: PackedColumns


def _check_finite(key: Key, delta: LoraDelta, dtype: SlotDtype) -> None:
    layer, projection = key
    for name, numbers in (("A", delta.a), ("B", delta.b)):
        if not np.isfinite(numbers).all():
            raise AdapterError(
                f"the LoRA adapter does not fit: {name} of {projection} of layer {layer} holds "
                f"numbers that are not finite, and it is to be kept in {dtype}; its file is "
                "damaged, or its training went wrong"
            )


def _write(slot: NDArray[Any], begin: int, stored: NDArray[Any]) -> int:
    """Write numbers from a place on; returns the place behind them."""
    end: int = begin + len(stored)
    slot[begin:end] = stored
    return end
