"""What the operator AddLora reads: memory of its own for each adapter, filled once.

Adapters are kept as floats, or in int8: each rank's row of B over a projection's outputs is divided
by a scale, its largest magnitude over 127, and A is what packed_rows.py says. No number is further
from the float it stands for than half a scale.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import AdapterError
from onnxport.graphs.lora import (
    KINDS,
    PANEL,
    PROJECTIONS,
    RANKS,
    SCALES,
    WEIGHTS,
    LoraAdapter,
    LoraDelta,
    LoraProduct,
    in_panels,
    slot_layout,
)
from onnxport.graphs.spec import ArchSpec
from onnxport.providers import memory
from onnxport.providers.adapters import Key, Place, Values, converted
from onnxport.providers.base import LoadOptions
from onnxport.providers.packed_rows import LARGEST, packed

INT8: Final = np.dtype(np.int8)


def slots_bytes(
    products: Sequence[LoraProduct], spec: ArchSpec, options: LoadOptions, dtype: np.dtype[Any]
) -> int:
    """Memory of the slots that AddLora reads, all filled, and of their ranks and scales."""
    _, numbers = slot_layout(products, spec, options.max_adapter_rank, dtype.name)
    ranks = (options.max_adapters + 1) * spec.num_layers * len(PROJECTIONS)
    scales = ranks * options.max_adapter_rank if dtype == INT8 else 0
    return dtype.itemsize * numbers * options.max_adapters + 4 * (ranks + scales)


def quantized(name: str, rows: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float64]]:
    """Rows in int8, and the scale of each, float64 [len(rows)]; 0 where a row is 0.

    Raises:
        AdapterError: a number is not finite.
    """
    _check_finite(name, rows)
    largest = np.abs(rows).max(axis=1, initial=0).astype(np.float64)
    inverse = np.divide(LARGEST, largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(rows * inverse[:, None]).astype(np.int8), largest / LARGEST


class AdapterSlots:
    """See `providers.adapters.Storage`; the layout of a slot is `slot_layout`'s."""

    def __init__(
        self,
        products: Sequence[LoraProduct],
        spec: ArchSpec,
        options: LoadOptions,
        dtype: np.dtype[Any],
        place: Place,
    ) -> None:
        """Take address space for all slots; memory is taken by those that are filled.

        Args:
            products: of the graph, see `graphs.passes.lora.lora_products`.
            spec: the model.
            options: `max_adapters` and `max_adapter_rank` are used.
            dtype: that adapters are kept in, float32, float16 or int8.
            place: lets a session read arrays where they are.
        """
        self._spec = spec
        self._is_int8 = dtype == INT8
        self._places, numbers = slot_layout(products, spec, options.max_adapter_rank, dtype.name)
        self._weights = memory.huge_page_zeros((options.max_adapters, numbers), dtype)
        ranks = (options.max_adapters + 1, spec.num_layers, len(PROJECTIONS))
        self._ranks = np.zeros(ranks, np.int32)
        self._scales = np.zeros((*ranks, options.max_adapter_rank), np.float32)
        values: dict[str, NDArray[Any]] = {RANKS: self._ranks, WEIGHTS: self._weights}
        if self._is_int8:
            values[SCALES] = self._scales
        self._place = place  # may hold what the session reads
        self._values = place(values)

    def put(self, slot: int, adapter: LoraAdapter) -> None:
        """See `Storage`. Raises AdapterError where a number is none that the type can hold."""
        rows = self._rows(adapter)
        of_products = {product: self._of(product, rows) for product in self._places}
        joined = {
            product: packed(product, np.concatenate([own.a for own in found.values()]))
            for product, found in of_products.items()
            if self._is_int8 and found
        }
        self.remove(slot)
        at = self._weights[slot - 1]
        for product, begin in self._places.items():
            if product in joined:
                begin = _write(at, begin, joined[product])
            for (layer, projection), own in of_products[product].items():
                key = (slot, layer, PROJECTIONS.index(projection))
                self._ranks[key] = len(own.a)
                self._scales[key][: len(own.a)] = own.scales
                if not self._is_int8:
                    begin = _fill(at, begin, own.a)
                begin = _fill(at, begin, own.b)

    def remove(self, slot: int) -> None:
        """See `Storage`."""
        self._ranks[slot] = 0
        self._scales[slot] = 0

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
        if self._is_int8:
            return {key: _quantize(key, delta) for key, delta in adapter.deltas.items()}
        deltas = converted(adapter, self._weights.dtype)
        return {key: _Rows(delta.a, delta.b.T, 1) for key, delta in deltas.items()}


@dataclass(frozen=True, slots=True)
class _Rows:
    """One projection of an adapter, as it is kept."""

    a: NDArray[Any]  # [rank, in_features]; of int8 as it was given
    b: NDArray[Any]  # [rank, out_features]
    scales: NDArray[np.float32] | float  # [rank], of B


def _quantize(key: Key, delta: LoraDelta) -> _Rows:
    layer, projection = key
    _check_finite(f"A of {projection} of layer {layer}", delta.a)
    b, scales = quantized(f"B of {projection} of layer {layer}", delta.b.T)
    return _Rows(delta.a, b, scales.astype(np.float32))


def _check_finite(name: str, rows: NDArray[np.float32]) -> None:
    if not np.isfinite(rows).all():
        raise AdapterError(
            f"the LoRA adapter does not fit: {name} holds numbers that are not finite, and it is "
            "to be kept in int8; its file is damaged, or its training went wrong"
        )


def _write(slot: NDArray[Any], begin: int, stored: NDArray[Any]) -> int:
    """Write bytes from a place on; returns the place behind them."""
    end: int = begin + len(stored)
    slot[begin:end] = stored
    return end


def _fill(slot: NDArray[Any], begin: int, rows: NDArray[Any]) -> int:
    """Write rows in panels from a place on; returns the place behind them."""
    rank, features = rows.shape
    end: int = begin + rank * in_panels(features)
    panels = slot[begin:end].reshape(-1, rank, PANEL)
    whole = features // PANEL
    cut = rows[:, : whole * PANEL].reshape(rank, whole, PANEL)
    panels[:whole] = cut.swapaxes(0, 1)
    panels[whole:, :, : features % PANEL] = rows[:, whole * PANEL :]
    return end
