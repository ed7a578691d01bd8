"""States of rows in place of pools: what changes, and what is refused."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from onnxport.errors import ArtifactError
from onnxport.graphs import contract as c
from onnxport.graphs.passes.chunk_linear import chunk_linear
from onnxport.graphs.passes.decompose_linear import decompose_linear
from onnxport.graphs.passes.result import PassResult
from onnxport.graphs.passes.row_states import take_row_states
from tests.graphs.linear_models import feeds, linear_model
from tests.graphs.paged_models import op_types, paged_case, paged_model, start
from tests.kernels import linear_cases
from tests.kernels.linear_cases import Case

CONV, DELTA = (
    linear_cases.make_conv(1, 20, 4, (3, 1)),
    linear_cases.make_delta(2, (2, 4), (16, 6), (3, 1)),
)


def in_chunks(model: onnx.ModelProto) -> PassResult:
    return chunk_linear(model, takes_tile=True)


@pytest.mark.parametrize("lower", [decompose_linear, in_chunks])
@pytest.mark.parametrize("case", [CONV, DELTA], ids=["convolution", "delta"])
def test_a_graph_of_rows(case: Case, lower: type[PassResult]) -> None:
    model = linear_model(case)
    before = model.SerializeToString()
    result = take_row_states(model)
    assert model.SerializeToString() == before
    assert result.changes == {"states of rows": 1}
    (node,) = result.model.graph.node
    assert c.past_conv_state(0) in node.input
    assert c.present_conv_state(0) in node.output
    inputs = {info.name: info for info in result.model.graph.input}
    assert not {c.STATE_READS, c.STATE_WRITES} & inputs.keys()
    assert inputs[c.past_conv_state(0)].type.tensor_type.shape.dim[0].dim_param == "batch"
    lowered = lower(result.model).model  # type: ignore[arg-type]
    given = {name: value for name, value in feeds(case).items() if name in inputs}
    given[c.past_conv_state(0)] = case.pool[list(case.slots.reads)]
    if c.QUERY_TILE in {info.name for info in lowered.graph.input}:
        given[c.QUERY_TILE] = np.zeros(max(case.slots.lengths), np.int8)
    output, states = start(lowered).run(["y", c.present_conv_state(0)], given)
    pool = case.pool.copy()
    pool[list(case.slots.writes)] = states
    linear_cases.check(case, (output, pool))


def test_other_graphs_stay_as_they_are() -> None:
    model = paged_model(paged_case(0))
    result = take_row_states(model)
    assert not result.changes
    assert result.model.SerializeToString() == model.SerializeToString()
    tiled = in_chunks(model)
    assert tiled.model.SerializeToString() == model.SerializeToString()


def test_a_pool_that_is_read_otherwise_is_refused() -> None:
    model = linear_model(DELTA)
    gather = next(node for node in model.graph.node if node.op_type == "Gather")
    gather.input[1] = c.STATE_WRITES
    with pytest.raises(ArtifactError, match="'layer' must be gathered from a pool"):
        take_row_states(model)
    assert "Gather" in op_types(model)
