"""The output head that summarizes the logits: where, and where not."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from onnxport.graphs import contract
from onnxport.graphs.passes.coarse_head import LEAST_OUTPUTS, use_coarse_head
from onnxport.graphs.passes.logits_summaries import summarize_logits
from tests.graphs.test_coarse_head import head, model, named
from tests.kernels import matmul_cases, norm_cases

FIRED = {"heads that summarize the logits": 1}


@pytest.mark.parametrize("bits", [4, 8])
def test_it_gets_an_input_and_an_output_for_each_row_of_logits(bits: int) -> None:
    before = model(head(bits=bits))
    untouched = before.SerializeToString()
    result = summarize_logits(before)
    assert result.changes == FIRED
    assert before.SerializeToString() == untouched
    graph = result.model.graph
    (node,) = graph.node
    assert list(node.input) == ["x", "w", "s", "", "", "", "", contract.SUMMARY_SCALES]
    assert list(node.output) == [contract.LOGITS, "", "", contract.LOGITS_SUMMARIES]
    rows, kind = contract.NUM_LOGITS, TensorProto.FLOAT
    info = helper.make_tensor_value_info
    assert graph.input[-1] == info(contract.SUMMARY_SCALES, kind, [rows])
    floats = 19 * -(-LEAST_OUTPUTS // 1024) + 1
    assert graph.output[-1] == info(contract.LOGITS_SUMMARIES, kind, [rows, floats])
    assert not summarize_logits(result.model).changes


def test_beside_other_inputs_and_outputs() -> None:
    norm = norm_cases.random_norm(1, head().x)
    before = named(onnx.load_from_string(norm_cases.add_norm(matmul_cases.model(head()), norm)))
    (had,) = use_coarse_head(before).model.graph.node
    result = summarize_logits(use_coarse_head(before).model)
    (node,) = result.model.graph.node
    places = dict(enumerate(had.input)) | {7: contract.SUMMARY_SCALES}
    assert dict(enumerate(node.input)) == places
    assert list(node.output[:3]) == [*had.output, ""][:3]
    assert node.output[3] == contract.LOGITS_SUMMARIES
    assert result.changes == FIRED


def test_others_are_left_alone() -> None:
    small = model(head(LEAST_OUTPUTS - 32))
    foreign = model()
    foreign.graph.node[0].domain = contract.MICROSOFT
    other = model()
    other.graph.node[0].output[0] = "hidden"
    unshaped = model()
    unshaped.graph.output[0].type.tensor_type.shape.dim[0].dim_value = 3
    for one in (small, foreign, other, unshaped):
        result = summarize_logits(one)
        assert not result.changes
        assert result.model == one
