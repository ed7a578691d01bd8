"""Linear attention in standard operators without control flow: what changes, and what it gives."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

from onnxport.errors import ArtifactError
from onnxport.graphs import contract as c
from onnxport.graphs.passes.chunk_linear import CHUNK_TOKENS, chunk_linear
from onnxport.graphs.passes.decompose_linear import decompose_linear
from tests.graphs.linear_models import feeds, linear_model
from tests.graphs.paged_models import op_types, paged_case, paged_model, start
from tests.kernels import linear_cases
from tests.kernels.linear_cases import Case, DeltaCase, Floats

CASES = [
    case(seed)
    for seed in range(24)
    for case in (linear_cases.random_conv, linear_cases.random_delta)
]
DELTA = linear_cases.make_delta(2, (2, 4), (16, 6), (CHUNK_TOKENS, 33, 1))
CHANNELS = linear_cases.make_channels(2, (2, 4), (16, 6), (CHUNK_TOKENS, 33, 1))
BOUNDS = {
    c.ATTENTION_METADATA: helper.make_tensor_value_info(
        c.ATTENTION_METADATA, TensorProto.INT32, [3]
    ),
    c.QUERY_TILE: helper.make_tensor_value_info(c.QUERY_TILE, TensorProto.INT8, [c.QUERY_TILE]),
}


def bounded_model(case: Case, bound: str, dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    model = linear_model(case, dtype)
    model.graph.input.append(BOUNDS[bound])
    return model


def run(model: onnx.ModelProto, case: Case, longest: int | None = None) -> tuple[Floats, Floats]:
    """The output, and the pool, which is bound in place."""
    session, states = start(model), case.pool.copy()
    held = ort.OrtValue.ortvalue_from_numpy(states)
    binding = session.io_binding()
    binding.bind_output("y", "cpu")
    width = longest or max(1, *case.slots.lengths)
    given = feeds(case) | {
        c.ATTENTION_METADATA: np.array([width, 1, 1], np.int32),
        c.QUERY_TILE: np.zeros(width, np.int8),
    }
    for name in {info.name for info in session.get_inputs()} & given.keys():
        binding.bind_cpu_input(name, np.ascontiguousarray(given[name]))
    binding.bind_ortvalue_input(c.past_conv_state(0), held)
    binding.bind_ortvalue_output(c.present_conv_state(0), held)
    session.run_with_iobinding(binding)
    output: Floats = binding.get_outputs()[0].numpy()
    return output, states


@pytest.mark.parametrize("bound", list(BOUNDS))
@pytest.mark.parametrize("case", [case for case in CASES if sum(case.slots.lengths)])
def test_standard_operators(case: Case, bound: str) -> None:
    model = bounded_model(case, bound)
    before = model.SerializeToString()
    result = chunk_linear(model)
    assert model.SerializeToString() == before
    assert sum(result.changes.values()) == 1
    assert not any(node.domain for node in result.model.graph.node)
    assert not {"Loop", "Scan", "If"} & set(op_types(result.model))
    linear_cases.check(case, run(result.model, case))


@pytest.mark.parametrize("case", [DELTA, CHANNELS], ids=["heads", "channels"])
def test_rows_of_all_lengths(case: DeltaCase) -> None:
    """A row is as right beside longer ones, and where C is more than any has."""
    model = chunk_linear(bounded_model(case, c.QUERY_TILE)).model
    linear_cases.check(case, run(model, case))
    make = linear_cases.make_channels if case.has_channels else linear_cases.make_delta
    short = make(3, (2, 4), (16, 6), (7, 1))
    for longest in (7, 8, 13, CHUNK_TOKENS):
        linear_cases.check(short, run(model, short, longest))


def test_channels_that_forget_at_once_beside_others() -> None:
    """Sums of decays of some channels are of thousands, whose exponentials are no floats."""
    decay = -np.abs(CHANNELS.decay)
    decay[:, ::3] *= 1000
    decay[:, 1::3] = 0
    plain = {"a_log": None, "dt_bias": None}
    case = CHANNELS.replace(decay=decay, **plain)
    for bound in BOUNDS:
        found = run(chunk_linear(bounded_model(case, bound)).model, case)
        linear_cases.check(case, found)
        assert all(np.isfinite(part).all() for part in found)


def alike(keep: float, fresh: float) -> DeltaCase:
    """Tokens whose keys are one; what is kept of a state, and how much of a value is new."""
    beta, decay = (np.full_like(DELTA.beta, number) for number in (fresh, np.log(keep)))
    key = np.repeat(DELTA.key[:1], len(DELTA.key), axis=0)
    plain = {"a_log": None, "dt_bias": None, "has_sigmoid": False}
    return DELTA.replace(key=key, beta=beta, decay=decay, **plain)


@pytest.mark.parametrize(
    "case",
    [alike(1.0, 1.0), alike(0.999, 0.9), alike(0.9, 0.5), alike(1e-30, 1.0), alike(1e-3, 0.01)],
)
def test_tokens_that_repeat_and_gates_that_forget(case: DeltaCase) -> None:
    """Powers of what keys have in common would be 10^17 here, and exponentials no float."""
    for bound in BOUNDS:
        linear_cases.check(case, run(chunk_linear(bounded_model(case, bound)).model, case))


def test_a_row_has_nothing_of_the_next_one() -> None:
    """Not even what is no number."""
    value = DELTA.value.copy()
    value[CHUNK_TOKENS + 33 :] = np.nan  # of the last row
    model = chunk_linear(bounded_model(DELTA, c.QUERY_TILE)).model
    found, pool = run(model, DELTA.replace(value=value))
    wanted, states = run(model, DELTA)
    assert np.isnan(found[-1]).all()
    assert found[:-1].tobytes() == wanted[:-1].tobytes()
    others = [slot for slot in range(len(pool)) if slot != DELTA.slots.writes[-1]]
    assert pool[others].tobytes() == states[others].tobytes()


def test_other_graphs_stay_as_they_are() -> None:
    model = paged_model(paged_case(0))
    result = chunk_linear(model)
    assert not result.changes
    assert result.model.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize("case", [DELTA, CHANNELS], ids=["heads", "channels"])
def test_layers_share_what_does_not_depend_on_them(case: DeltaCase) -> None:
    """Of a second layer there are no more ranges, and no patterns."""
    model = bounded_model(case, c.ATTENTION_METADATA)
    (one,) = [node for node in model.graph.node if node.op_type == "GatedDeltaNet"]
    again = onnx.NodeProto()
    again.CopyFrom(one)
    again.name, again.output[:] = "again", ["y2", "states2"]
    model.graph.node.append(again)
    found = chunk_linear(model).model
    alone = chunk_linear(bounded_model(case, c.ATTENTION_METADATA)).model
    assert op_types(found).count("Range") == op_types(alone).count("Range") == 2
    assert len(found.graph.initializer) == len(alone.graph.initializer)


def test_a_graph_that_says_no_length_is_refused() -> None:
    with pytest.raises(ArtifactError, match="neither 'query_tile' nor 'attention_metadata'"):
        chunk_linear(linear_model(DELTA))
    conv = linear_cases.make_conv(1, 20, 4, (3, 1))
    assert chunk_linear(linear_model(conv)).changes


@pytest.mark.parametrize("bound", list(BOUNDS))
def test_16_bits_stay_around_what_is_computed(bound: str) -> None:
    case = linear_cases.make_delta(5, (2, 4), (16, 6), (5, 2))
    model = chunk_linear(bounded_model(case, bound, TensorProto.FLOAT16)).model
    types = {info.name: info.type for info in start(model).get_outputs()}
    assert types["y"] == "tensor(float16)"


def test_what_the_reference_refuses_is_refused() -> None:
    model = linear_model(DELTA, update_rule="delta")
    model.graph.input.append(BOUNDS[c.QUERY_TILE])
    for fire in (decompose_linear, chunk_linear):
        with pytest.raises(ArtifactError, match="update_rule 'delta'"):
            fire(model)


def test_channels_without_the_delta_rule_are_refused() -> None:
    gated = linear_cases.make_gated(2, (2, 4), (16, 6), (3, 1))
    model = bounded_model(gated, c.QUERY_TILE)
    (node,) = [node for node in model.graph.node if node.op_type == "GatedDeltaNet"]
    node.attribute.append(helper.make_attribute("channel_decay", 1))
    for fire in (decompose_linear, chunk_linear):
        with pytest.raises(ArtifactError, match="'gated' and channel_decay, which is understood"):
            fire(model)
