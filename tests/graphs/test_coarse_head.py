"""The output head that computes no more than is asked for: where, and where not."""

from __future__ import annotations

from collections.abc import Callable

import onnx
import pytest
from onnx import TensorProto, helper

from onnxport.graphs import contract
from onnxport.graphs.passes.coarse_head import LEAST_OUTPUTS, coarse_head_bytes, use_coarse_head
from tests.kernels import matmul_cases, norm_cases

K, N = 96, LEAST_OUTPUTS
ASKED = [contract.EXACT_LOGITS, *[""] * 5, contract.ALLOWED_TOKENS, contract.RACES]
FIRED = {"heads that compute no more than is asked for": 1}


def head(n: int = N, bits: int = 8) -> matmul_cases.MatMulCase:
    return matmul_cases.make_case(5, bits, 32, K, n, 3)


def model(case: matmul_cases.MatMulCase | None = None) -> onnx.ModelProto:
    """A product that makes the logits."""
    return named(onnx.load_from_string(matmul_cases.model(case or head())))


def named(of: onnx.ModelProto) -> onnx.ModelProto:
    """The same, by the contract's names."""
    of.graph.node[0].output[0] = contract.LOGITS
    info = helper.make_tensor_value_info(
        contract.LOGITS, TensorProto.FLOAT, [contract.NUM_LOGITS, N]
    )
    of.graph.output[0].CopyFrom(info)
    return of


def test_it_gets_an_input_for_each_row_of_logits() -> None:
    before = model()
    untouched = before.SerializeToString()
    result = use_coarse_head(before)
    assert result.changes == FIRED
    assert before.SerializeToString() == untouched
    (node,) = result.model.graph.node
    assert list(node.input) == ["x", "w", "s", "", "", "", *ASKED]
    info, kind = helper.make_tensor_value_info, TensorProto.INT32
    wanted = [
        info(contract.EXACT_LOGITS, kind, [contract.NUM_LOGITS]),
        info(contract.ALLOWED_TOKENS, kind, [contract.NUM_ALLOWED, N // 32]),
        info(contract.RACES, TensorProto.DOUBLE, [contract.NUM_RACES, 2]),
    ]
    assert list(result.model.graph.input[-3:]) == wanted
    assert not use_coarse_head(result.model).changes


def test_behind_a_norm() -> None:
    norm = norm_cases.random_norm(1, head().x)
    before = named(onnx.load_from_string(norm_cases.add_norm(matmul_cases.model(head()), norm)))
    result = use_coarse_head(before)
    assert result.changes == FIRED
    (node,) = result.model.graph.node
    assert list(node.input) == ["x", "w", "s", "skip", "gamma", "", *ASKED]
    assert node.output == before.graph.node[0].output


def test_inputs_that_are_left_out_are_no_bias() -> None:
    before = model()
    before.graph.node[0].input.extend([""] * 4)
    result = use_coarse_head(before)
    assert list(result.model.graph.node[0].input[3:]) == ["", "", "", *ASKED]


def test_what_it_keeps_is_half_a_byte_a_weight() -> None:
    before = model()
    assert coarse_head_bytes(before) == 0
    assert coarse_head_bytes(use_coarse_head(before).model) == K * N // 2


Change = Callable[[onnx.ModelProto], None]


def _bias(of: onnx.ModelProto) -> None:
    of.graph.node[0].input.extend(["", "", "bias"])
    of.graph.input.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, [N]))


def _read(of: onnx.ModelProto) -> None:
    of.graph.node.append(helper.make_node("Neg", [contract.LOGITS], ["other"]))


def _changed_first(of: onnx.ModelProto) -> None:
    of.graph.node[0].output[0] = "product"
    of.graph.node.append(helper.make_node("Tanh", ["product"], [contract.LOGITS]))


def _is_the_residual(of: onnx.ModelProto) -> None:
    of.graph.node[0].output[0] = "product"
    of.graph.node[0].output.append(contract.LOGITS)


def _asked_already(of: onnx.ModelProto) -> None:
    info = helper.make_tensor_value_info(contract.EXACT_LOGITS, TensorProto.INT32, ["some"])
    of.graph.input.append(info)


def _output(name: str, dims: list[str | int]) -> Change:
    def change(of: onnx.ModelProto) -> None:
        info = helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)
        of.graph.output[0].CopyFrom(info)
        of.graph.node[0].output[0] = name

    return change


def _node(attribute: str, value: str) -> Change:
    return lambda of: setattr(of.graph.node[0], attribute, value)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_bias, id="a bias"),
        pytest.param(_read, id="another reader"),
        pytest.param(_changed_first, id="something between them"),
        pytest.param(_is_the_residual, id="another output of the product"),
        pytest.param(_asked_already, id="asked already"),
        pytest.param(_output("hidden", [contract.NUM_LOGITS, N]), id="no logits"),
        pytest.param(_output(contract.LOGITS, ["batch", "seq", N]), id="the GQA graph's"),
        pytest.param(_output(contract.LOGITS, [3, N]), id="a fixed number of rows"),
        pytest.param(_node("op_type", "GatedMlp"), id="no product"),
        pytest.param(_node("domain", contract.MICROSOFT), id="ONNX Runtime's product"),
    ],
)
def test_where_it_does_not(change: Change) -> None:
    check_untouched(model(), change)


def check_untouched(before: onnx.ModelProto, change: Change = lambda of: None) -> None:
    change(before)
    result = use_coarse_head(before)
    assert not result.changes
    assert result.model == before
    assert coarse_head_bytes(result.model) == 0


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(head(bits=4), id="four bits"),
        pytest.param(head(N - 1), id="few outputs"),
    ],
)
def test_where_nothing_is_gained(case: matmul_cases.MatMulCase) -> None:
    check_untouched(model(case))
