"""onnxport.MatMulNBits with adapters: what they add, to whom, and what is refused."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from tests.kernels import matmul_cases, matmul_lora_cases, norm_cases
from tests.kernels.matmul_lora_cases import (
    RANKS,
    AdaptedProduct,
    check,
    fused,
    make_case,
    run,
    separate,
)
from tests.kernels.norm_cases import add_norm, random_norm
from tests.kernels.test_mlp import Sets, available_sets, use
from tests.tiers import crossed, every

__all__ = ["available_sets"]  # a fixture

# Both sides of what few rows are, of chunks of rows, and so few that projections are divided.
ROWS = (1, 2, 9, 16, 17, 40, 130, 300)
INTEGERS = ("int8", "int4")


@pytest.mark.parametrize("rows", every(2, ROWS))
def test_every_row_gets_its_own_adapter(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, rows: int
) -> None:
    """As AddLora behind the product, to the bit."""
    for dtype in INTEGERS:
        case = make_case(rows, rows, bits=(4, 8)[rows % 2], dtype=dtype)
        for sets in available_sets:
            use(library, sets)
            found = run(library_path, case)
            check(case, found)
            assert found.tobytes() == run(library_path, case, separate(case)).tobytes(), sets


@pytest.mark.parametrize("dtype", INTEGERS)
def test_a_row_is_the_same_alone_and_in_any_batch(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, dtype: str
) -> None:
    case = make_case(1, 300, dtype=dtype)
    serialized = fused(make_case(1, 1, dtype=dtype))
    random = np.random.default_rng(1)
    for sets in available_sets:
        use(library, sets)
        two, one = (matmul_cases.session(library_path, serialized, threads) for threads in (2, 1))
        whole = two.run(["y"], case.feeds())[0]
        assert one.run(["y"], case.feeds())[0].tobytes() == whole.tobytes()
        for count in (1, 1, 8, 16, *random.integers(2, 300, 5)):
            rows = random.permutation(300)[:count]
            part = two.run(["y"], case.rows(rows).feeds())[0]
            assert part.tobytes() == whole[rows].tobytes(), (sets, count)


@pytest.mark.parametrize(("slot", "rows"), crossed(2, range(len(RANKS)), [5, 40]))
@pytest.mark.parametrize("dtype", INTEGERS)
def test_one_adapter_for_all(
    library_path: Path, available_sets: Sets, dtype: str, slot: int, rows: int
) -> None:
    assert available_sets
    case = make_case(2, rows, dtype=dtype)
    case = replace(case, slots=np.full(rows, slot, np.int32))
    found = run(library_path, case)
    check(case, found)
    if slot == 0:
        plain = onnx.load_from_string(fused(case, **dict.fromkeys(matmul_lora_cases.attributes())))
        for place in range(4):
            plain.graph.node[0].input[matmul_lora_cases.ADAPTERS_INPUT + place] = ""
        assert found.tobytes() == run(library_path, case, plain.SerializeToString()).tobytes()


def test_they_are_int8_unless_told_otherwise(library_path: Path, available_sets: Sets) -> None:
    assert available_sets
    case = make_case(2, 5)
    unsaid = fused(case, adapter_bits=None)
    assert run(library_path, case, unsaid).tobytes() == run(library_path, case).tobytes()


@pytest.mark.parametrize("rows", [7, 40])
@pytest.mark.parametrize("is_asked", [False, True])
def test_with_a_norm(library_path: Path, available_sets: Sets, is_asked: bool, rows: int) -> None:
    """The bits of the product without one, whose input is what was normalized."""
    assert available_sets
    case = make_case(3, rows)
    norm = random_norm(3, case.product.x)
    of = onnx.load_from_string(add_norm(fused(case), norm, more=["normalized"]))
    (node,) = of.graph.node
    feeds = case.feeds() | {"skip": norm.skip}
    asked = matmul_cases.session(library_path, of.SerializeToString())
    y, residual, normalized = asked.run(None, feeds)
    np.testing.assert_allclose(
        normalized, norm_cases.normalized(case.product.x, norm), rtol=1e-5, atol=1e-6
    )
    plain = matmul_cases.session(library_path, fused(case))
    wanted = plain.run(["y"], case.feeds() | {"x": normalized})[0]
    if not is_asked:
        node.output.pop()
        of.graph.output.pop()
        y, residual = matmul_cases.session(library_path, of.SerializeToString()).run(None, feeds)
    assert y.tobytes() == wanted.tobytes()
    assert residual.tobytes() == (case.product.x + norm.skip).tobytes()


def test_all_outputs_are_exact(library_path: Path, available_sets: Sets) -> None:
    """Also where a product without adapters would make do with some."""
    assert available_sets
    case = make_case(5, 3, bits=8)
    of = onnx.load_from_string(matmul_lora_cases.with_exact(fused(case)))
    of.graph.node[0].input[5] = ""  # no bias
    session = matmul_cases.session(library_path, of.SerializeToString())
    feeds = case.feeds()
    some, every = (
        session.run(["y"], feeds | {"exact": np.full(3, count, np.int32)})[0] for count in (1, 0)
    )
    assert some.tobytes() == every.tobytes()


def test_summaries_are_refused(library_path: Path, available_sets: Sets) -> None:
    assert available_sets
    case = make_case(4, 3)
    of = onnx.load_from_string(fused(case))
    (node,) = of.graph.node
    node.input[7] = "asked"
    node.output.extend(["", "", "summaries"])
    of.graph.input.append(helper.make_tensor_value_info("asked", TensorProto.FLOAT, ["n"]))
    of.graph.output.append(helper.make_tensor_value_info("summaries", TensorProto.FLOAT, None))
    session = matmul_cases.session(library_path, of.SerializeToString())
    feeds = case.feeds() | {"asked": np.zeros(3, np.float32)}
    with pytest.raises(Exception, match="summaries of outputs that adapters add to are not made"):
        session.run(None, feeds)


@pytest.mark.parametrize("given", ["none", "no slots"])
def test_part_of_what_adapters_need_is_refused(
    library_path: Path, available_sets: Sets, given: str
) -> None:
    assert available_sets
    case = make_case(4, 5)
    message = "adapters need slots, ranks, weights, scales and max_rank; there is no"
    with pytest.raises(Exception, match=f"MatMulNBits: {message} max_rank"):
        run(library_path, case, fused(case, max_rank=None))
    of = onnx.load_from_string(fused(case))
    names = list(of.graph.node[0].input)
    del of.graph.node[0].input[:]
    of.graph.node[0].input.extend(names[:6] if given == "none" else [*names[:8], "", *names[9:]])
    with pytest.raises(Exception, match=f"MatMulNBits: {message} slots"):
        run(library_path, case, of.SerializeToString())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"slots": np.full(5, 5, np.int32)}, "slot 5; there are 0 to 4"),
        ({"slots": np.zeros(4, np.int32)}, "number of token slots must be 5, found 4"),
        ({"ranks": np.full((5, 1, 6), 21, np.int32)}, "rank 21; there are 0 to 20"),
        ({"weights": np.zeros((4, 99), np.int8)}, "the numbers of a slot, at least, must be"),
        ({"scales": np.zeros((5, 1, 6, 19), np.float32)}, "scales of a projection must be 20"),
    ],
)
def test_what_would_read_elsewhere_is_refused(
    library_path: Path, available_sets: Sets, change: dict[str, NDArray[Any]], said: str
) -> None:
    assert available_sets
    case = make_case(5, 5)
    case = AdaptedProduct(case.product, case.bias, np.ones(5, np.int32))
    session = matmul_cases.session(library_path, fused(case))
    with pytest.raises(Exception, match=f"MatMulNBits: .*{said}"):
        session.run(["y"], case.feeds() | change)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"offset": -1}, "an attribute is negative, or there are no"),
        ({"max_rank": 0}, "an attribute is negative, or there are no"),
        ({"adapter_bits": 3}, "adapter_bits must be 4 or 8, found 3"),
        ({"columns2": 21}, "adapters must add to N, 123, columns, found 124"),
    ],
)
def test_wrong_attributes_are_refused(
    library_path: Path, available_sets: Sets, change: dict[str, int], said: str
) -> None:
    assert available_sets
    with pytest.raises(Exception, match=f"MatMulNBits: {said}"):
        matmul_cases.session(library_path, fused(make_case(6, 1), **change))
