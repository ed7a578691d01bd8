"""Products with LoRA adapters: as one operator, as several, and in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxport.graphs.inspect import set_input
from tests.kernels import matmul_cases
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
from tests.kernels.matmul_cases import Floats, MatMulCase
from tests.kernels.mlp_lora_cases import INPUTS, with_inputs

MAX_RANK = 20
OFFSET, RANKS_AT = 64, 2  # where the product begins in a slot, and in its ranks
COLUMNS = (70, 33, 20)  # of three projections: none is of whole panels
DEPTH = 100
ADAPTERS_INPUT = 8

# Of each projection, by slot; none in slot 0.
RANKS = ((0, 0, 0), (16, 16, 16), (20, 0, 7), (0, 3, 0), (1, 8, 5))


@dataclass(frozen=True)
class AdaptedProduct:
    """A product, its bias, the adapters in its slots, and who has which."""

    product: MatMulCase
    bias: NDArray[np.float32]
    slots: NDArray[np.int32]  # of each row
    dtype: str = "int8"  # of adapters

    def rows(self, rows: NDArray[np.int64]) -> AdaptedProduct:
        """Some of the rows alone."""
        product = self.product.replace(x=self.product.x[rows])
        return replace(self, product=product, slots=self.slots[rows])

    def stored(self, slot: int, part: int) -> tuple[StoredA, StoredB]:
        """A and B."""
        random = np.random.default_rng([slot, part])
        rank, product = RANKS[slot][part], self.product
        a = random_a(random, rank, DEPTH, product.bits, product.block_size, self.dtype)
        return a, random_b(random, rank, COLUMNS[part], self.dtype)

    def feeds(self) -> dict[str, NDArray[Any]]:
        """The inputs of the model; where nothing is to be read there is what stands out."""
        format_of = (self.product.bits, self.product.block_size, self.dtype)
        ranks = np.zeros((len(RANKS), 1, 6), np.int32)
        weights = slots_of(len(RANKS) - 1, OFFSET + room_of(DEPTH, COLUMNS, MAX_RANK, *format_of))
        scales = np.full((*ranks.shape, MAX_RANK), np.nan, np.float32)
        for slot in range(1, len(RANKS)):
            parts = [self.stored(slot, part) for part in range(3)]
            packed = [packed_a([a for a, _ in parts], DEPTH, *format_of)]
            for part, (_, b) in enumerate(parts):
                ranks[slot, 0, RANKS_AT + part] = len(b.scales)
                scales[slot, 0, RANKS_AT + part, : len(b.scales)] = b.scales
                packed.append(packed_b(b, self.dtype))
            found = np.concatenate(packed)
            weights[slot - 1, OFFSET : OFFSET + len(found)] = found
        given = (self.slots, ranks, weights, scales)
        return {"x": self.product.x, **dict(zip(INPUTS, given, strict=True))}

    def expected(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What the operator gives but for rounding in float32, and its slack, both [rows, N]."""
        found = matmul_cases.expected(self.product) + self.bias
        slack = np.zeros_like(found)
        x = rounded(self.product.x, self.product.block_size)
        for row, slot in enumerate(self.slots):
            first = 0
            for part, columns in enumerate(COLUMNS):
                a, b = self.stored(int(slot), part)
                factors, own = a.values @ x[row], slice(first, first + columns)
                found[row, own] += b.added(factors)
                slack[row, own] = b.slack(factors)
                first += columns
        return found, slack


def make_case(seed: int, rows: int, bits: int = 4, dtype: str = "int8") -> AdaptedProduct:
    """A product with an adapter drawn for each row; rows are all about as large."""
    random = np.random.default_rng(seed)
    product = matmul_cases.make_case(seed, bits, 32, DEPTH, sum(COLUMNS), rows)
    product = product.replace(x=random.standard_normal((rows, DEPTH)).astype(np.float32))
    if seed % 3 == 1:
        product = matmul_cases.with_zero_points(seed, product)
    if seed % 3 == 2:
        product = matmul_cases.with_offsets(seed, product)
    bias = random.standard_normal(sum(COLUMNS)).astype(np.float32)
    slots = random.integers(0, len(RANKS), rows, np.int32)
    return AdaptedProduct(product, bias, slots, dtype)


def attributes(dtype: str = "int8") -> dict[str, int]:
    """Those that say what the adapters are, and where."""
    columns = {f"columns{part}": n for part, n in enumerate(COLUMNS)}
    bits = 4 if dtype == "int4" else 8
    place = {"offset": OFFSET, "ranks": RANKS_AT, **columns}
    return {"max_rank": MAX_RANK, "adapter_bits": bits, **place}


def fused(case: AdaptedProduct, **changed: int | None) -> bytes:
    """A model of the one node; `changed` are other attributes, None: without one."""
    of = _with_bias(case)
    (node,) = of.graph.node
    for place, name in enumerate(INPUTS, ADAPTERS_INPUT):
        set_input(node, place, name)
    kept = {k: v for k, v in (attributes(case.dtype) | changed).items() if v is not None}
    node.attribute.extend(helper.make_attribute(k, v) for k, v in kept.items())
    return with_inputs(of, case.feeds())


def separate(case: AdaptedProduct) -> bytes:
    """A model of the product with its bias, and AddLora."""
    of = _with_bias(case)
    of.graph.node[0].output[0] = "base"
    of.graph.node.append(
        helper.make_node(
            "AddLora",
            ["base", "x", *INPUTS],
            ["y"],
            domain="onnxport",
            bits=case.product.bits,
            block_size=case.product.block_size,
            **attributes(case.dtype),
        )
    )
    return with_inputs(of, case.feeds())


def run(
    library: Path, case: AdaptedProduct, serialized: bytes | None = None, threads: int = 2
) -> Floats:
    """[rows, N] of a model, of the one node unless told otherwise."""
    session = matmul_cases.session(library, serialized or fused(case), threads)
    found: Floats = session.run(["y"], case.feeds())[0]
    return found


def check(case: AdaptedProduct, found: Floats) -> None:
    """Checks the output against float64, row by row."""
    wanted, slack = case.expected()
    largest = np.maximum(np.abs(wanted).max(1, keepdims=True), 1e-30)
    off = np.abs(found - wanted) - 1e-4 * largest
    assert (off <= slack).all()
    # A factor that is next to the middle of two numbers is seldom.
    assert (off > 0).mean() < 0.03


def _with_bias(case: AdaptedProduct) -> onnx.ModelProto:
    of = onnx.load_from_string(matmul_cases.model(case.product))
    set_input(of.graph.node[0], 5, "bias")
    of.graph.initializer.append(numpy_helper.from_array(case.bias, "bias"))
    return of


def with_exact(serialized: bytes) -> bytes:
    """The one node asked for some outputs alone."""
    of = onnx.load_from_string(serialized)
    of.graph.node[0].input[6] = "exact"
    of.graph.input.append(helper.make_tensor_value_info("exact", TensorProto.INT32, ["n"]))
    asked: bytes = of.SerializeToString()
    return asked
