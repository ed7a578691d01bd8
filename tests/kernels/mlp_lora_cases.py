"""Feed-forward layers with LoRA adapters: as one operator, as five, and in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxport.graphs.inspect import set_input
from onnxport.graphs.passes.gated_mlp import ADAPTERS_INPUT
from tests.kernels import matmul_cases, mlp_cases
from tests.kernels.integer_adapters import (
    StoredA,
    StoredB,
    packed_a,
    packed_b,
    random_a,
    random_b,
    room_of,
    rounded,
    slots_of,
)
from tests.kernels.matmul_cases import Floats
from tests.kernels.mlp_cases import MlpCase

MAX_RANK = 20
GATE_UP, DOWN = 64, 128  # offsets in a slot: bytes before the first, and between the products
RANKS_AT = (1, 4)  # of gate and of down, in a slot's ranks
INPUTS = ("slots", "ranks", "weights", "scales")

# Of gate, up and down, by slot; none in slot 0. Slot 3 adds to the first product alone, slot 4 to
# the second.
RANKS = ((0, 0, 0), (16, 16, 16), (20, 1, 7), (3, 0, 0), (0, 0, 8))


@dataclass(frozen=True)
class AdaptedMlp:
    """A layer, the adapters in its slots, and who has which."""

    layer: MlpCase
    slots: NDArray[np.int32]  # of each row
    ranks: tuple[tuple[int, int, int], ...] = RANKS
    dtype: str = "int8"  # of adapters

    @property
    def widths(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of gate, up and down."""
        k, inner, n = self.layer.gate_up.k, self.layer.inner, self.layer.down.n
        return (k, inner), (k, inner), (inner, n)

    def rows(self, rows: NDArray[np.int64] | slice) -> AdaptedMlp:
        """Some of the rows alone."""
        x = self.layer.x[rows]
        layer = replace(self.layer, gate_up=self.layer.gate_up.replace(x=x))
        return replace(self, layer=layer, slots=self.slots[rows])

    def format_of(self, part: int) -> tuple[int, int]:
        """Bits and block size of the product that has the part."""
        product = self.layer.down if part == 2 else self.layer.gate_up
        return product.bits, product.block_size

    def stored(self, slot: int, part: int) -> tuple[StoredA, StoredB]:
        """A and B."""
        random = np.random.default_rng([slot, part])
        rank, (depth, columns) = self.ranks[slot][part], self.widths[part]
        a = random_a(random, rank, depth, *self.format_of(part), self.dtype)
        return a, random_b(random, rank, columns, self.dtype)

    def feeds(self) -> dict[str, NDArray[Any]]:
        """The inputs of the model; where nothing is to be read there is what stands out."""
        count = len(self.ranks)
        first, second = self.rooms()
        ranks = np.zeros((count, 1, 6), np.int32)
        weights = slots_of(count - 1, GATE_UP + first + DOWN + second)
        scales = np.full((*ranks.shape, MAX_RANK), np.nan, np.float32)
        for slot in range(1, count):
            for begin, parts in ((GATE_UP, (0, 1)), (GATE_UP + first + DOWN, (2,))):
                stored = {part: self.stored(slot, part) for part in parts}
                rows = [a for a, _ in stored.values()]
                depth = self.widths[parts[0]][0]
                packed = [packed_a(rows, depth, *self.format_of(parts[0]), self.dtype)]
                for part, (_, b) in stored.items():
                    at = RANKS_AT[part == 2] + (part == 1)
                    ranks[slot, 0, at] = len(b.scales)
                    scales[slot, 0, at, : len(b.scales)] = b.scales
                    packed.append(packed_b(b, self.dtype))
                found = np.concatenate(packed)
                weights[slot - 1, begin : begin + len(found)] = found
        given = (self.slots, ranks, weights, scales)
        return {"x": self.layer.x, **dict(zip(INPUTS, given, strict=True))}

    def rooms(self) -> tuple[int, int]:
        """Bytes of both products in a slot."""
        (k, inner), _, (_, n) = self.widths
        first = room_of(k, (inner, inner), MAX_RANK, *self.format_of(0), self.dtype)
        return first, room_of(inner, (n,), MAX_RANK, *self.format_of(2), self.dtype)

    def places(self) -> dict[str, int]:
        """The attributes of the operator."""
        first, _ = self.rooms()
        return {
            "max_rank": MAX_RANK,
            "adapter_bits": 4 if self.dtype == "int4" else 8,
            "gate_up_offset": GATE_UP,
            "gate_up_ranks": RANKS_AT[0],
            "down_offset": GATE_UP + first + DOWN,
            "down_ranks": RANKS_AT[1],
        }


def make_case(seed: int, rows: int, dtype: str = "int8") -> AdaptedMlp:
    """A layer with several groups of features, none of whose widths is one of whole panels."""
    layer = mlp_cases.make_case(seed, (4, 32), (8, 64), (100, 330, 90), rows)
    slots = np.random.default_rng(seed).integers(0, len(RANKS), rows, np.int32)
    return AdaptedMlp(layer, slots, dtype=dtype)


def fused(case: AdaptedMlp, **changed: int | None) -> bytes:
    """A model of the one node; `changed` are other attributes, None: without one."""
    of = onnx.load_from_string(mlp_cases.fused(case.layer))
    (node,) = of.graph.node
    for place, name in enumerate(INPUTS, ADAPTERS_INPUT):
        set_input(node, place, name)
    attributes = {k: v for k, v in (case.places() | changed).items() if v is not None}
    node.attribute.extend(helper.make_attribute(k, v) for k, v in attributes.items())
    return with_inputs(of, case.feeds())


def separate(case: AdaptedMlp) -> bytes:
    """A model of the operators that it is made of."""
    of = onnx.load_from_string(mlp_cases.separate(case.layer))
    first, silu, second = list(of.graph.node)
    first.output[0], second.output[0] = "base", "sum"
    k, inner, n = case.layer.gate_up.k, case.layer.inner, case.layer.down.n
    assert k != inner
    places = case.places()
    nodes = [
        first,
        _adding("base", "x", "joined", (places, "gate_up", case.format_of(0)), (inner, inner)),
        silu,
        second,
        _adding("sum", "activated", "y", (places, "down", case.format_of(2)), (n,)),
    ]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del of.graph.node[:]
    of.graph.node.extend(copies)
    return with_inputs(of, case.feeds())


def _adding(
    base: str,
    x: str,
    result: str,
    place: tuple[dict[str, int], str, tuple[int, int]],
    columns: tuple[int, ...],
) -> onnx.NodeProto:
    attributes, name, (bits, block_size) = place
    return helper.make_node(
        "AddLora",
        [base, x, *INPUTS],
        [result],
        domain="onnxport",
        offset=attributes[f"{name}_offset"],
        ranks=attributes[f"{name}_ranks"],
        max_rank=attributes["max_rank"],
        adapter_bits=attributes["adapter_bits"],
        bits=bits,
        block_size=block_size,
        **{f"columns{part}": n for part, n in enumerate((*columns, 0, 0)[:3])},
    )


def with_inputs(of: onnx.ModelProto, feeds: dict[str, NDArray[Any]]) -> bytes:
    """A model that has the adapters' inputs, too."""
    kinds = (TensorProto.INT32, TensorProto.INT32, TensorProto.INT8, TensorProto.FLOAT)
    for name, kind in zip(INPUTS, kinds, strict=True):
        dims = [f"{name}{axis}" for axis in range(feeds[name].ndim)]
        of.graph.input.append(helper.make_tensor_value_info(name, kind, dims))
    serialized: bytes = of.SerializeToString()
    return serialized


def run(library: Path, case: AdaptedMlp, serialized: bytes, threads: int = 2) -> Floats:
    """[rows, N]"""
    session = matmul_cases.session(library, serialized, threads)
    found: Floats = session.run(["y"], case.feeds())[0]
    return found


def errors(found: NDArray[Any], wanted: NDArray[Any]) -> NDArray[np.float64]:
    """How far each row is off, relative to its largest number."""
    far = np.abs(found - wanted).max(1) / np.maximum(np.abs(wanted).max(1), 1e-30)
    return np.asarray(far, np.float64)


def check(case: AdaptedMlp, found: Floats) -> None:
    """Checks the output against float64, row by row."""
    far = errors(found, expected(case))
    # A quant may round the other way where the float32 before it did.
    assert far.max() < 0.05
    assert np.median(far) < 1e-3


def expected(case: AdaptedMlp) -> NDArray[np.float64]:
    """What the operator gives but for rounding in float32, [rows, N]; products round to int8."""
    layer = case.layer
    joined = matmul_cases.expected(layer.gate_up)
    inner = layer.inner
    halves = [joined[:, :inner], joined[:, inner:]]
    for part in range(2):
        halves[part] = halves[part] + _added(case, part, layer.x)
    with np.errstate(over="ignore"):
        activated = halves[0] / (1 + np.exp(-halves[0])) * halves[1]
    base = matmul_cases.expected(layer.down.replace(x=activated.astype(np.float32)))
    return base + _added(case, 2, activated)


def _added(case: AdaptedMlp, part: int, x: NDArray[Any]) -> NDArray[np.float64]:
    """What the adapters of all rows add to gate, up or down."""
    added = np.zeros((len(x), case.widths[part][1]))
    read = rounded(x, case.format_of(part)[1])
    for row, slot in enumerate(case.slots):
        a, b = case.stored(int(slot), part)
        added[row] = b.added(a.values @ read[row])
    return added
