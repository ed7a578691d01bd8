"""onnxport.AddLora against NumPy, on every instruction set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from onnxport.graphs.passes.gated_silu import DOMAIN

MAX_RANK = 20
A_AT, LAYER = 7, 3  # where A begins in a slot, and the layer's first rank


@dataclass(frozen=True)
class Case:
    """One product of some tokens, with adapters in three slots."""

    depth: int
    columns: tuple[int, ...]
    slots: NDArray[np.int32]
    dtype: Any = np.float32

    @property
    def b_at(self) -> int:
        return A_AT + len(self.columns) * MAX_RANK * self.depth

    def numbers(self) -> dict[str, NDArray[Any]]:
        """The node's inputs. Slots are filled with NaN where no rank reaches."""
        random = np.random.default_rng(0)
        width, parts = sum(self.columns), len(self.columns)
        ranks = np.zeros((4, 2, 3), np.int32)
        ranks.reshape(4, 6)[1:, LAYER : LAYER + parts] = [[1, 16, 20][:parts]] * 3
        ranks.reshape(4, 6)[2, LAYER] = 0
        ranks.reshape(4, 6)[3, LAYER : LAYER + parts] = 5
        weights = np.full((3, self.b_at + MAX_RANK * width + 3), np.nan, self.dtype)
        for slot in range(3):
            first = 0
            a = weights[slot, A_AT : self.b_at].reshape(parts, MAX_RANK, self.depth)
            b = weights[slot, self.b_at : -3].reshape(MAX_RANK, width)
            for part, columns in enumerate(self.columns):
                rank = ranks.reshape(4, 6)[slot + 1, LAYER + part]
                a[part, :rank] = random.standard_normal((rank, self.depth))
                b[:rank, first : first + columns] = random.standard_normal((rank, columns))
                first += columns
        tokens = len(self.slots)
        # a row of its own for each token, whatever the others are
        rows = [np.random.default_rng(token) for token in range(tokens)]
        return {
            "product": np.array([r.standard_normal(width) for r in rows], np.float32),
            "activations": np.array([r.standard_normal(self.depth) for r in rows], np.float32),
            "slots": self.slots,
            "ranks": ranks,
            "weights": weights,
        }


def wanted_sums(case: Case, given: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    found = given["product"].astype(np.float64)
    parts, width = len(case.columns), sum(case.columns)
    for token, slot in enumerate(case.slots):
        first = 0
        for part, columns in enumerate(case.columns):
            rank = given["ranks"].reshape(4, 6)[slot, LAYER + part]
            if slot and rank:
                own = given["weights"][slot - 1].astype(np.float64)
                a = own[A_AT : case.b_at].reshape(parts, MAX_RANK, case.depth)[part, :rank]
                b = own[case.b_at : -3].reshape(MAX_RANK, width)[:rank, first : first + columns]
                found[token, first : first + columns] += a @ given["activations"][token] @ b
            first += columns
    return found


def run(
    case: Case, library: Path, given: dict[str, NDArray[Any]], **attributes: int
) -> NDArray[np.float32]:
    kinds = {"slots": TensorProto.INT32, "ranks": TensorProto.INT32}
    kinds["weights"] = {4: TensorProto.FLOAT, 2: TensorProto.FLOAT16}[given["weights"].itemsize]
    inputs = [
        helper.make_tensor_value_info(
            name,
            kinds.get(name, TensorProto.FLOAT),
            [f"{name}{axis}" for axis in range(value.ndim)],
        )
        for name, value in given.items()
    ]
    settings = {"a": A_AT, "b": case.b_at, "max_rank": MAX_RANK, "ranks": LAYER}
    settings |= {f"columns{i}": c for i, c in enumerate((*case.columns, 0, 0)[:3])}
    nodes = [
        helper.make_node("Neg", ["product"], ["opposite"]),
        helper.make_node("Neg", ["opposite"], ["copy"]),  # which the operator may change
        helper.make_node(
            "AddLora",
            ["copy", "activations", "slots", "ranks", "weights"],
            ["sum"],
            domain=DOMAIN,
            **(settings | attributes),
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
    found: NDArray[np.float32] = session.run(None, given)[0]
    return found


MIXED = np.array([1, 1, 1, 1, 1, 1, 2, 0, 0, 3, 1, 2, 2, 3, 3, 3, 3, 3, 3, 3], np.int32)
CASES = [
    Case(64, (96, 32, 32), MIXED),
    Case(67, (53, 17, 18), MIXED),  # no width is a multiple of a vector
    Case(5, (3,), MIXED),
    Case(896, (4864, 4864), MIXED),
    Case(80, (112, 112), MIXED, np.float16),
    Case(67, (53, 17, 18), MIXED, np.float16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_token_gets_its_own_adapter(
    case: Case, library: Any, library_path: Path, available_isas: list[str]
) -> None:
    given = case.numbers()
    wanted = wanted_sums(case, given)
    for isa in available_isas:
        assert library.onnxport_cpu_set_isa(isa.encode())
        found = run(case, library_path, given)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-4, err_msg=isa)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_token_has_the_same_bits_in_any_company(
    dtype: Any, library: Any, library_path: Path, available_isas: list[str]
) -> None:
    case = Case(67, (53, 17, 18), MIXED, dtype)
    given = case.numbers()
    for isa in available_isas:
        assert library.onnxport_cpu_set_isa(isa.encode())
        together = run(case, library_path, given)
        for token in range(len(MIXED)):
            one = slice(token, token + 1)
            alone = given | {name: given[name][one] for name in ("product", "activations", "slots")}
            own = run(replace(case, slots=MIXED[one]), library_path, alone)
            assert own[0].tobytes() == together[token].tobytes(), (isa, token)


def test_nothing_is_done_where_no_token_has_an_adapter(library_path: Path) -> None:
    case = Case(64, (96, 32, 32), np.zeros(5, np.int32))
    given = case.numbers()
    np.testing.assert_array_equal(run(case, library_path, given), given["product"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"slots": np.full(20, 4, np.int32)}, "slot 4; there are 0 to 3"),
        ({"slots": np.full(20, -1, np.int32)}, "slot -1; there are 0 to 3"),
        ({"ranks": np.full((4, 2, 3), 21, np.int32)}, "rank 21; there are 0 to 20"),
        ({"ranks": np.zeros((3, 2, 3), np.int32)}, "slots with ranks must be 4, found 3"),
        ({"ranks": np.zeros((4, 1, 3), np.int32)}, "ranks of a slot, at least, must be 6"),
        ({"weights": np.zeros((3, 99), np.float32)}, "numbers of a slot, at least, must be"),
        ({"slots": np.zeros(19, np.int32)}, "number of token slots must be 20, found 19"),
        ({"activations": np.zeros((1, 64), np.float32)}, "activations' rows must be 20, found 1"),
        ({"product": np.zeros((20, 161), np.float32)}, "product's columns must be 160, found 161"),
        ({"slots": np.zeros((20, 1), np.int32)}, "inputs have 2, 2, 1, 3 and 2 dimensions"),
    ],
)
def test_what_would_read_elsewhere_is_refused(
    library_path: Path, change: dict[str, NDArray[Any]], said: str
) -> None:
    case = Case(64, (96, 32, 32), MIXED)
    with pytest.raises(Exception, match=said):
        run(case, library_path, case.numbers() | change)


def test_wrong_attributes_are_refused(library_path: Path) -> None:
    case = Case(64, (96, 32, 32), MIXED)
    with pytest.raises(Exception, match="attribute is negative"):
        run(case, library_path, case.numbers(), a=-1)
