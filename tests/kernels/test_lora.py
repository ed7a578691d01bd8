"""onnxport.AddLora against NumPy, on every instruction set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxport.graphs.passes.gated_silu import DOMAIN
from tests.kernels import integer_adapters
from tests.kernels.integer_adapters import (
    StoredA,
    StoredB,
    packed_a,
    packed_b,
    random_a,
    random_b,
    rounded,
    slots_of,
)
from tests.kernels.test_matmul import ISAS as MATMUL_ISAS

MAX_RANK = 70  # more than the kernel holds factors of at once
OFFSET, LAYER = 64, 3  # where the product begins in a slot, and the layer's first rank
SIDE = 64  # numbers of a row that lie side by side
KINDS = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int8": TensorProto.INT8,
    "int32": TensorProto.INT32,
}
# By slot and projection; none in slot 0.
RANKS = ((0, 0, 0), (1, 16, 20), (0, 16, 20), (5, 5, 5))


@dataclass(frozen=True)
class Case:
    """One product of some tokens, with an adapter in each slot."""

    depth: int
    columns: tuple[int, ...]
    slots: NDArray[np.int32]
    dtype: str = "float32"
    ranks: tuple[tuple[int, ...], ...] = field(default=RANKS, repr=False)
    bits: int = 4  # of integers, as activations are rounded
    block_size: int = 32

    @property
    def is_integer(self) -> bool:
        """Whether adapters have scales."""
        return self.dtype in INTEGERS

    def rank(self, slot: int, part: int) -> int:
        return self.ranks[slot][part]

    def stored(self, slot: int, part: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """A [rank, depth] and B [rank, columns] in floats: its own for each projection."""
        random = np.random.default_rng([slot, part])
        rank = self.rank(slot, part)
        rows = [random.standard_normal((rank, n)) for n in (self.depth, self.columns[part])]
        return rows[0].astype(self.dtype), rows[1].astype(self.dtype)

    def stored_integers(self, slot: int, part: int) -> tuple[StoredA, StoredB]:
        """A and B."""
        random = np.random.default_rng([slot, part])
        rank = self.rank(slot, part)
        a = random_a(random, rank, self.depth, self.bits, self.block_size, self.dtype)
        b = random_b(random, rank, self.columns[part], self.dtype)
        return a, replace(b, scales=b.scales / np.float32(3))

    def added(
        self, slot: int, part: int, x: NDArray[Any]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """What a projection gets of an input [depth], and how far that may be off, in float64."""
        if not self.is_integer:
            a, b = (numbers.astype(np.float64) for numbers in self.stored(slot, part))
            return (a @ x) @ b, np.zeros(self.columns[part])
        quantized, packed = self.stored_integers(slot, part)
        factors = quantized.values @ x
        return packed.added(factors), packed.slack(factors)

    def numbers(self) -> dict[str, NDArray[Any]]:
        """The node's inputs. Where nothing is to be read there is NaN, or what stands out."""
        width, parts, count = sum(self.columns), len(self.columns), len(self.ranks)
        ranks = np.zeros((count, 2, 3), np.int32)
        ranks.reshape(count, 6)[:, LAYER : LAYER + parts] = [own[:parts] for own in self.ranks]
        scales = np.full((count, 2, 3, MAX_RANK), np.nan, np.float32)
        weights = self.weights(scales.reshape(count, 6, MAX_RANK))
        # a row of its own for each token, whatever the others are
        rows = [np.random.default_rng(token) for token in range(len(self.slots))]
        given = {
            "product": np.array([r.standard_normal(width) for r in rows], np.float32),
            "activations": np.array([r.standard_normal(self.depth) for r in rows], np.float32),
            "slots": self.slots,
            "ranks": ranks,
            "weights": weights,
        }
        return given | ({"scales": scales} if self.is_integer else {})

    def weights(self, scales: NDArray[np.float32]) -> NDArray[Any]:
        """The slots; fills in the scales of integers."""
        count, parts = len(self.ranks), range(len(self.columns))
        if not self.is_integer:
            room = sum(MAX_RANK * (whole(self.depth) + whole(n)) for n in self.columns)
            weights = np.full((count - 1, OFFSET + room), np.nan, self.dtype)
        else:
            size = (self.depth, self.columns, MAX_RANK, self.bits, self.block_size, self.dtype)
            weights = slots_of(count - 1, OFFSET + integer_adapters.room_of(*size))
        for slot in range(1, count):
            if not self.is_integer:
                rows = [in_panels(x, np.nan) for part in parts for x in self.stored(slot, part)]
            else:
                stored = [self.stored_integers(slot, part) for part in parts]
                a = [of_part for of_part, _ in stored]
                rows = [packed_a(a, self.depth, self.bits, self.block_size, self.dtype)]
                rows += [packed_b(b, self.dtype) for _, b in stored]
                for part, (_, b) in enumerate(stored):
                    scales[slot, LAYER + part, : len(b.scales)] = b.scales
            joined = np.concatenate(rows)
            weights[slot - 1, OFFSET : OFFSET + len(joined)] = joined
        return weights

    def check(
        self, given: dict[str, NDArray[Any]], found: NDArray[np.float32], atol: float, what: str
    ) -> None:
        """Checks what the operator returned against float64."""
        wanted, x = given["product"].astype(np.float64), given["activations"]
        read = rounded(x, self.block_size) if self.is_integer else x.astype(np.float64)
        slack = np.zeros_like(wanted)
        for token, slot in enumerate(self.slots):
            first = 0
            for part, columns in enumerate(self.columns):
                own = slice(first, first + columns)
                added, slack[token, own] = self.added(slot, part, read[token])
                wanted[token, own] += added
                first += columns
        off = np.abs(found - wanted) - (atol + 1e-4 * np.abs(wanted))
        assert (off <= slack).all(), what
        # A factor that is next to the middle of two numbers is seldom.
        assert (off > 0).mean() < 0.02, what


def in_turn(library: Any, isas: list[str], dtype: str) -> Iterator[str]:
    """Use each instruction set, with those of products where adapters are in integers."""
    products = [n for n in MATMUL_ISAS if library.onnxport_cpu_set_matmul_isa(n.encode())]
    if dtype not in INTEGERS:
        products = [""]
    elif not products:
        pytest.skip("this processor has none of the sets that the products need")
    for i in range(max(len(isas), len(products))):
        isa, product = isas[i % len(isas)], products[i % len(products)]
        assert library.onnxport_cpu_set_isa(isa.encode())
        assert not product or library.onnxport_cpu_set_matmul_isa(product.encode())
        yield f"{isa} {product}"
    library.onnxport_cpu_set_matmul_isa(None)


def whole(features: int) -> int:
    return -(-features // SIDE) * SIDE


def in_panels(rows: NDArray[Any], nothing: float) -> NDArray[Any]:
    """Rows as they lie in a slot: so many numbers of each, then the next of each."""
    wide = np.full((len(rows), whole(rows.shape[1])), nothing, rows.dtype)
    wide[:, : rows.shape[1]] = rows
    panels = [wide[:, first : first + SIDE] for first in range(0, wide.shape[1], SIDE)]
    return np.concatenate([panel.ravel() for panel in panels])


def run(library: Path, given: dict[str, NDArray[Any]], case: Case, **changed: int) -> Any:
    inputs = [
        helper.make_tensor_value_info(
            name, KINDS[value.dtype.name], [f"{name}{axis}" for axis in range(value.ndim)]
        )
        for name, value in given.items()
    ]
    settings = {"offset": OFFSET, "max_rank": MAX_RANK, "ranks": LAYER}
    settings |= {f"columns{i}": c for i, c in enumerate((*case.columns, 0, 0)[:3])}
    if case.is_integer:
        settings |= {"bits": case.bits, "block_size": case.block_size}
    if case.dtype == "int4":
        settings["adapter_bits"] = 4
    nodes = [
        helper.make_node("Neg", ["product"], ["opposite"]),
        helper.make_node("Neg", ["opposite"], ["copy"]),  # which the operator may change
        helper.make_node(
            "AddLora", ["copy", *list(given)[1:]], ["sum"], domain=DOMAIN, **(settings | changed)
        ),
        helper.make_node("Relu", ["sum"], ["positive"]),
        helper.make_node("Neg", ["sum"], ["minus"]),
        helper.make_node("Relu", ["minus"], ["negative"]),
        helper.make_node("Sub", ["positive", "negative"], ["result"]),
    ]
    result = helper.make_tensor_value_info("result", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "lora", inputs, [result])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library))
    options.intra_op_num_threads = 2
    options.log_severity_level = 4
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, given)[0]


MIXED = np.array([1, 1, 1, 1, 1, 1, 2, 0, 0, 3, 1, 2, 2, 3, 3, 3, 3, 3, 3, 3], np.int32)
INTEGERS = ("int8", "int4")
DTYPES = ("float32", "float16", *INTEGERS)
CASES = [
    Case(64, (96, 32, 32), MIXED),
    Case(67, (53, 17, 18), MIXED),  # no width is a multiple of a vector
    Case(5, (3,), MIXED),
    Case(896, (4864, 4864), MIXED),
    Case(80, (112, 112), MIXED, "float16"),
    Case(67, (53, 17, 18), MIXED, "float16"),
    Case(64, (96, 32, 32), MIXED, "int8"),
    Case(67, (53, 17, 18), MIXED, "int8"),
    Case(5, (3,), MIXED, "int8"),
    Case(335, (277, 130, 129), MIXED, "int8", bits=8, block_size=128),
    Case(896, (130, 129), MIXED, "int8", block_size=256),
    # as many as are divided by tokens alone, and one that is divided by projections
    Case(128, (256, 256), np.tile(np.arange(4, dtype=np.int32), 4), "int8"),
    Case(896, (896, 128, 128), np.full(1, 1, np.int32), "int8"),
    Case(64, (96, 32, 32), MIXED, "int4"),
    Case(67, (53, 17, 18), MIXED, "int4"),
    Case(5, (3,), MIXED, "int4"),
    Case(335, (277, 130, 129), MIXED, "int4", bits=8, block_size=128),
    Case(896, (130, 129), MIXED, "int4", block_size=256),
    Case(128, (256, 256), np.tile(np.arange(4, dtype=np.int32), 4), "int4"),
    Case(896, (896, 128, 128), np.full(1, 1, np.int32), "int4"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_gets_its_own_adapter(
    case: Case, library: Any, library_path: Path, available_isas: list[str]
) -> None:
    given = case.numbers()
    for isa in in_turn(library, available_isas, case.dtype):
        case.check(given, run(library_path, given, case), 2e-4, isa)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rank(
    dtype: str, library: Any, library_path: Path, available_isas: list[str]
) -> None:
    """Slot n has rank n; five tokens of each: four together and one alone."""
    slots = np.repeat(np.arange(MAX_RANK + 1, dtype=np.int32), 5)
    case = Case(67, (133,), slots, dtype, tuple((rank,) for rank in range(MAX_RANK + 1)))
    given = case.numbers()
    for isa in in_turn(library, available_isas, dtype):
        case.check(given, run(library_path, given, case), 5e-4, isa)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_in_any_company(
    dtype: str, library: Any, library_path: Path, available_isas: list[str]
) -> None:
    case = Case(67, (53, 17, 258), MIXED, dtype, ((0, 0, 0), (1, 16, 70), (0, 9, 24), (5, 5, 5)))
    given = case.numbers()
    for isa in in_turn(library, available_isas, dtype):
        together = run(library_path, given, case)
        for token in range(len(MIXED)):
            one = slice(token, token + 1)
            alone = given | {name: given[name][one] for name in ("product", "activations", "slots")}
            own = run(library_path, alone, replace(case, slots=MIXED[one]))
            assert own[0].tobytes() == together[token].tobytes(), (isa, token)


def test_nothing_is_done_where_no_token_has_an_adapter(library_path: Path) -> None:
    case = Case(64, (96, 32, 32), np.zeros(5, np.int32))
    given = case.numbers()
    np.testing.assert_array_equal(run(library_path, given, case), given["product"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"slots": np.full(20, 4, np.int32)}, "slot 4; there are 0 to 3"),
        ({"slots": np.full(20, -1, np.int32)}, "slot -1; there are 0 to 3"),
        ({"ranks": np.full((4, 2, 3), 71, np.int32)}, "rank 71; there are 0 to 70"),
        ({"ranks": np.zeros((3, 2, 3), np.int32)}, "slots with ranks must be 4, found 3"),
        ({"ranks": np.zeros((4, 1, 3), np.int32)}, "ranks of a slot, at least, must be 6"),
        ({"weights": np.zeros((3, 99), np.int8)}, "slot, at least, must be 35264, found 99"),
        ({"weights": np.zeros((3, 31424), np.float16)}, "int4 alone have scales, found others"),
        ({"scales": np.zeros((4, 2, 3), np.float32)}, "scales have 4 dimensions, found 3"),
        ({"scales": np.zeros((4, 2, 3, 71), np.float32)}, "scales of a projection must be 70"),
        ({"scales": np.zeros((4, 1, 3, 70), np.float32)}, "as those of ranks, must be 2, found 1"),
        ({"slots": np.zeros(19, np.int32)}, "number of token slots must be 20, found 19"),
        ({"activations": np.zeros((1, 64), np.float32)}, "activations' rows must be 20, found 1"),
        ({"product": np.zeros((20, 161), np.float32)}, "product's columns must be 160, found 161"),
        ({"product": np.zeros((20, 160, 1), np.float32)}, "must have 2 dimensions, found 3 and 2"),
        ({"slots": np.zeros((20, 1), np.int32)}, "1, 3 and 2 dimensions, found 2, 3 and 2"),
    ],
)
def test_what_would_read_elsewhere_is_refused(
    library_path: Path, change: dict[str, NDArray[Any]], said: str
) -> None:
    case = Case(64, (96, 32, 32), MIXED, "int8")
    with pytest.raises(Exception, match=said):
        run(library_path, case.numbers() | change, case)


@pytest.mark.parametrize(
    ("offset", "size", "said"),
    [
        (60, 35904, "the slots are so, of 35904 bytes each, and the place in a slot is 60"),
        (64, 35905, "the slots are so, of 35905 bytes each"),
        (64, -35904, "the slots are not, of 35904 bytes each"),
    ],
)
def test_int8_lies_at_lines(library_path: Path, offset: int, size: int, said: str) -> None:
    case = Case(64, (96, 32, 32), MIXED, "int8")
    weights = slots_of(3, abs(size))
    if size < 0:  # between two lines
        room = slots_of(1, 4 * 35904)[0]
        weights = room[1 : 1 + 3 * 35904].reshape(3, 35904)
    with pytest.raises(Exception, match=f"must lie at multiples of 64 bytes; {said}"):
        run(library_path, case.numbers() | {"weights": weights}, case, offset=offset)


@pytest.mark.parametrize("change", [{"bits": 3}, {"block_size": 48}])
def test_int8_in_unknown_blocks_is_refused(library_path: Path, change: dict[str, int]) -> None:
    case = Case(64, (96, 32, 32), MIXED, "int8")
    with pytest.raises(Exception, match="AddLora takes 4 or 8 bits in blocks of 16, 32, 64"):
        run(library_path, case.numbers(), case, **change)


def test_int8_of_no_activations_is_refused(library_path: Path) -> None:
    case = Case(64, (96, 32, 32), MIXED, "int8")
    nothing = {"activations": np.zeros((20, 0), np.float32)}
    with pytest.raises(Exception, match="need activations of a number or more, found none"):
        run(library_path, case.numbers() | nothing, case)


def test_int8_without_scales_is_refused(library_path: Path) -> None:
    case = Case(64, (96, 32, 32), MIXED, "int8")
    given = {name: value for name, value in case.numbers().items() if name != "scales"}
    with pytest.raises(Exception, match="int8 and int4 need scales, found none"):
        run(library_path, given, case)


def test_integers_of_other_bits_are_refused(library_path: Path) -> None:
    case = Case(64, (96, 32, 32), MIXED, "int8")
    with pytest.raises(Exception, match="AddLora: adapter_bits must be 4 or 8, found 2"):
        run(library_path, case.numbers(), case, adapter_bits=2)


@pytest.mark.parametrize("size", [np.inf, np.nan])
def test_factors_that_int8_cannot_hold_are_not_rounded_to_numbers(
    library: Any, library_path: Path, available_isas: list[str], size: float
) -> None:
    """Rows of tokens with other adapters, and with none, stay as they are."""
    case = Case(64, (96, 32, 32), MIXED, "int4")
    given = case.numbers()
    for isa in in_turn(library, available_isas, "int4"):
        plain = run(library_path, given, case)
        scales = given["scales"].copy()
        scales[3, 1, 0, 0] = size  # of tokens 9 and 13 to 19
        found = run(library_path, given | {"scales": scales}, case)
        assert np.isnan(found[MIXED == 3, :96]).all(), isa
        assert found[MIXED != 3].tobytes() == plain[MIXED != 3].tobytes(), isa
        assert found[:, 96:].tobytes() == plain[:, 96:].tobytes(), isa


@pytest.mark.parametrize("change", [{"offset": -1}, {"columns1": -32}, {"max_rank": 0}])
def test_wrong_attributes_are_refused(library_path: Path, change: dict[str, int]) -> None:
    case = Case(64, (96, 32, 32), MIXED)
    with pytest.raises(Exception, match="attribute is negative, or there are no columns or no r"):
        run(library_path, case.numbers(), case, **change)
