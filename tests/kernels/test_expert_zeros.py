"""onnxport.GatedExperts with zero points and offsets; test_experts has random cases with them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from onnxport.graphs.inspect import set_input
from onnxport.graphs.passes.gated_experts import EXPERTS_OFFSETS, EXPERTS_ZERO_POINTS
from tests.kernels import experts_cases, fp4_cases, matmul_cases
from tests.kernels.experts_cases import INT4, ExpertsCase
from tests.kernels.test_mlp import Sets, available_sets, use

__all__ = ["available_sets"]

BOTH = (True, True)


def small_case(rows: int = 3) -> ExpertsCase:
    return experts_cases.make_case(3, (INT4, INT4), (96, 96, 40), rows, (6, 2))


@pytest.mark.parametrize("has_offsets", [True, False])
@pytest.mark.parametrize("rows", [1, 40])
def test_it_is_what_it_says_for_each_row_alone(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, rows: int, has_offsets: bool
) -> None:
    given = {"has_offsets": BOTH} if has_offsets else {"has_zeros": BOTH}
    case = experts_cases.with_zeros(1, small_case(rows), **given)
    for sets in available_sets:
        use(library, sets)
        session = matmul_cases.session(library_path, experts_cases.model(case))
        found = session.run(["y"], case.feeds())[0]
        experts_cases.check(case, found)
        for row in (0, rows - 1):
            alone = {"x": case.x[row : row + 1], "logits": case.logits[row : row + 1]}
            assert session.run(["y"], alone)[0].tobytes() == found[row].tobytes()
        assert (found != experts_cases.run(library_path, small_case(rows))).any()


def test_offsets_of_zero_change_nothing(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets
) -> None:
    plain = small_case(17)
    made = experts_cases.with_zeros(1, plain, has_offsets=BOTH)
    none = [
        type(one)(
            *(of.replace(offsets=np.zeros_like(of.offsets)) for of in (one.gate_up, one.down))
        )
        for one in made.experts
    ]
    for sets in available_sets:
        use(library, sets)
        found = experts_cases.run(library_path, made.replace(experts=none))
        np.testing.assert_array_equal(found, experts_cases.run(library_path, plain))


@pytest.mark.parametrize(("which", "name"), [(0, "gate_up"), (1, "down")])
def test_what_does_not_fit_or_may_change(
    library_path: Path, available_sets: Sets, which: int, name: str
) -> None:
    assert available_sets
    case = experts_cases.with_zeros(1, small_case(), has_offsets=BOTH)
    place, other = EXPERTS_OFFSETS[which], EXPERTS_ZERO_POINTS[which]
    of = onnx.ModelProto.FromString(experts_cases.model(case))
    (node,), (tensor,) = (
        of.graph.node,
        [one for one in of.graph.initializer if one.name == f"offsets{place}"],
    )
    values = numpy_helper.to_array(tensor)
    tensor.CopyFrom(numpy_helper.from_array(values[:, :1], tensor.name))
    with pytest.raises(Exception, match=f"{name}_offsets must have {values.size} elements, found"):
        matmul_cases.session(library_path, of.SerializeToString())
    tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
    shape = (len(values), -(-values.shape[1] // 2))
    of.graph.initializer.append(numpy_helper.from_array(np.zeros(shape, np.uint8), "zeros"))
    set_input(node, other, "zeros")
    with pytest.raises(Exception, match=f"both {name}_zero_points and {name}_offsets, which excl"):
        matmul_cases.session(library_path, of.SerializeToString())
    set_input(node, other, "")
    kind = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
    of.graph.input.append(kind)
    session = matmul_cases.session(library_path, of.SerializeToString())
    with pytest.raises(Exception, match=f"{name}_offsets must be an initializer"):
        session.run(["y"], case.feeds())


def test_mxfp4_has_none(library_path: Path, available_sets: Sets) -> None:
    assert available_sets
    case = fp4_cases.make_case(8, (64, 64, 64), 3, (4, 2))
    of = onnx.ModelProto.FromString(experts_cases.model(case))
    offsets = np.zeros((4 * 128, 2), np.float16)
    of.graph.initializer.append(numpy_helper.from_array(offsets, "offsets"))
    set_input(of.graph.node[0], EXPERTS_OFFSETS[0], "offsets")
    with pytest.raises(Exception, match='"fp4" has neither gate_up_zero_points nor gate_up_offset'):
        matmul_cases.session(library_path, of.SerializeToString())
