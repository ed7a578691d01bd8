"""Linear attention in standard operators and in ours: what changes, and what it gives."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper

from onnxport.errors import ArtifactError
from onnxport.graphs import contract as c
from onnxport.graphs.inspect import set_attribute
from onnxport.graphs.passes.decompose_linear import decompose_linear
from onnxport.graphs.passes.result import PassResult
from onnxport.graphs.passes.retype import retype
from onnxport.graphs.passes.state_slots import use_state_slots
from onnxport.providers.cpu.library import find_library
from tests.graphs import linear_models
from tests.graphs.linear_models import linear_model
from tests.graphs.paged_models import op_types, paged_case, paged_model
from tests.kernels import linear_cases
from tests.kernels.linear_cases import Case

Edit = Callable[[onnx.ModelProto], None]

KERNEL = pytest.mark.skipif(find_library() is None, reason="the C++ kernels were not built")
CASES = [
    case(seed)
    for seed in range(16)
    for case in (linear_cases.random_conv, linear_cases.random_delta)
]
CONV, DELTA, GATED, STEPS = (
    linear_cases.make_conv(1, 20, 4, (3, 1)),
    linear_cases.make_delta(2, (2, 4), (16, 6), (3, 1)),
    linear_cases.make_gated(2, (2, 4), (16, 6), (3, 1)),
    linear_cases.make_steps(2, (2, 4), (16, 6), (3, 1)),
)


@pytest.mark.parametrize("case", [case for case in CASES if sum(case.slots.lengths)])
def test_standard_operators(case: Case) -> None:
    model = linear_model(case)
    before = model.SerializeToString()
    result = decompose_linear(model)
    assert model.SerializeToString() == before
    assert sum(result.changes.values()) == 1
    assert not any(node.domain for node in result.model.graph.node)
    linear_cases.check(case, linear_models.run(result.model, case))


@KERNEL
@pytest.mark.parametrize("case", CASES)
def test_operators_on_slots(case: Case) -> None:
    """One node, with the bits of the kernel's own tests."""
    library = find_library()
    assert library is not None
    model = linear_model(case)
    before = model.SerializeToString()
    result = use_state_slots(model)
    assert model.SerializeToString() == before
    assert result.changes == {"operators on states in their slots": 1}
    assert len(result.model.graph.node) == 1
    found = linear_models.run(result.model, case, library)
    for one, wanted in zip(found, linear_cases.run(library, case, threads=1), strict=True):
        assert one.tobytes() == wanted.tobytes()


def test_the_nodes() -> None:
    (conv,) = use_state_slots(linear_model(CONV.replace(has_silu=True))).model.graph.node
    assert (conv.op_type, conv.domain, conv.name) == ("CausalConv", "onnxport", "layer")
    slots = [c.past_conv_state(0), c.CUMULATIVE_SEQUENCE_LENGTHS, c.STATE_READS, c.STATE_WRITES]
    assert list(conv.input) == ["x", "weight", "bias", *slots]
    assert list(conv.output) == ["y", c.present_conv_state(0)]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in conv.attribute}
    assert attributes == {"channels": 20, "taps": 4, "activation": b"silu"}
    (delta,) = use_state_slots(linear_model(DELTA)).model.graph.node
    assert (delta.op_type, delta.domain, delta.name) == ("GatedDeltaNet", "onnxport", "layer")
    given = ["query", "", "", "decay", "beta", "a_log", "dt_bias"]
    assert list(delta.input) == [*given, *slots]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in delta.attribute}
    assert attributes == {"scale": 0.0, "qk_l2_norm": 1, "beta_activation": b"sigmoid"} | {
        "update_rule": b"gated_delta",
        "steps": 0,
    }
    (gated,) = use_state_slots(linear_model(GATED)).model.graph.node
    assert list(gated.input) == ["query", "key", "value", "decay", "", "", "", *slots]
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in gated.attribute}
    assert (attributes["update_rule"], attributes["scale"]) == (b"gated", 1.0)
    assert attributes["steps"] == 0
    (stepped,) = use_state_slots(linear_model(STEPS)).model.graph.node
    gate = ["decay", "", "a_log", "dt_bias"]
    assert list(stepped.input) == ["query", "key", "value", *gate, *slots]
    assert onnx.helper.get_node_attr_value(stepped, "steps") == 1


def by_type(model: onnx.ModelProto, kind: str) -> onnx.NodeProto:
    return next(node for node in model.graph.node if node.op_type == kind)


def other_decay(model: onnx.ModelProto) -> None:
    by_type(model, "Add").input[0] = "other"
    info = onnx.helper.make_tensor_value_info("other", TensorProto.FLOAT, ["n", "heads"])
    model.graph.input.append(info)


def other_column(model: onnx.ModelProto) -> None:
    """Unsqueezed in front: a number for each head of the token with the head's number."""
    axis = next(
        i for i in model.graph.initializer if i.name == by_type(model, "Unsqueeze").input[1]
    )
    axis.CopyFrom(numpy_helper.from_array(np.array([0], np.int64), axis.name))


def other_activation(model: onnx.ModelProto) -> None:
    by_type(model, "Softplus").op_type = "Sigmoid"


def other_sum(model: onnx.ModelProto) -> None:
    by_type(model, "Add").op_type = "Sub"


def read_by_others(model: onnx.ModelProto) -> None:
    steps = by_type(model, "Softplus").output[0]
    model.graph.output.append(onnx.helper.make_tensor_value_info(steps, TensorProto.FLOAT, None))


def with_the_delta_rule(model: onnx.ModelProto) -> None:
    node = by_type(model, "GatedDeltaNet")
    set_attribute(node, "update_rule", "gated_delta")
    node.input[5] = node.input[4]


@pytest.mark.parametrize(
    "edit",
    [
        *(other_decay, other_column, other_activation, other_sum, read_by_others),
        with_the_delta_rule,
    ],
)
def test_other_steps_stay_products(edit: Edit) -> None:
    model = linear_model(STEPS)
    edit(model)
    nodes = use_state_slots(model).model.graph.node
    (node,) = [node for node in nodes if node.domain]
    assert onnx.helper.get_node_attr_value(node, "steps") == 0
    assert node.input[2] == by_type(model, "Mul").output[0]
    assert len(nodes) == 5  # and all that makes the product


@pytest.mark.parametrize("fire", [use_state_slots, decompose_linear])
def test_other_graphs_stay_as_they_are(fire: Callable[[onnx.ModelProto], PassResult]) -> None:
    model = paged_model(paged_case(0))
    result = fire(model)
    assert not result.changes
    assert result.model.SerializeToString() == model.SerializeToString()


def other_reads(model: onnx.ModelProto) -> None:
    by_type(model, "Gather").input[1] = c.STATE_WRITES


def other_axis(model: onnx.ModelProto) -> None:
    set_attribute(by_type(model, "Gather"), "axis", 1)


def other_writes(model: onnx.ModelProto) -> None:
    by_type(model, "Cast").input[0] = c.STATE_READS


def added_up(model: onnx.ModelProto) -> None:
    set_attribute(by_type(model, "ScatterND"), "reduction", "add")


def other_pool(model: onnx.ModelProto) -> None:
    info = onnx.ValueInfoProto()
    info.CopyFrom(next(i for i in model.graph.input if i.name == c.past_conv_state(0)))
    info.name = by_type(model, "ScatterND").input[0] = "another"
    model.graph.input.append(info)


def read_twice(model: onnx.ModelProto) -> None:
    state = by_type(model, "Gather").output[0]
    model.graph.node.append(onnx.helper.make_node("Identity", [state], ["copy"]))


def given_out(model: onnx.ModelProto) -> None:
    model.graph.output.append(onnx.helper.make_tensor_value_info("states", TensorProto.FLOAT, None))


def not_gathered(model: onnx.ModelProto) -> None:
    gather = by_type(model, "Gather")
    reader = next(n for n in model.graph.node if n.domain)
    place = list(reader.input).index(gather.output[0])
    reader.input[place] = gather.input[0]
    model.graph.node.remove(gather)


@pytest.mark.parametrize("case", [CONV, DELTA], ids=["convolution", "delta"])
@pytest.mark.parametrize(
    "edit",
    [
        other_reads,
        other_axis,
        other_writes,
        added_up,
        other_pool,
        read_twice,
        given_out,
        not_gathered,
    ],
)
def test_states_that_do_not_stay_in_a_pool_are_refused(case: Case, edit: Edit) -> None:
    model = linear_model(case)
    edit(model)
    with pytest.raises(ArtifactError, match=r"state_slots: .*'layer' must be gathered from a pool"):
        use_state_slots(model)


@pytest.mark.parametrize(
    ("case", "attributes", "message"),
    [
        (CONV, {"dilation": 2}, "dilation 2; 1 alone is understood"),
        (CONV, {"state_update_capacity": 1}, "state_update_capacity 1; 0 alone"),
        (CONV, {"activation": "gelu"}, r"activation 'gelu'; it must be one of \('none', 'silu'"),
        (CONV, {"padding": 1}, r"not understood: \['padding'\]"),
        (DELTA, {"update_rule": "delta"}, "update_rule 'delta'; it must be one of"),
        (DELTA, {"update_rule": "gated"}, "'gated' and the beta 'beta'; beta is understood with"),
        (GATED, {"update_rule": "gated_delta"}, r"inputs \[0, 3, 4, 5, 6\] are needed"),
        (DELTA, {"gate_activation": "mamba"}, "gate_activation 'mamba'; it must be one of"),
        (DELTA, {"gate_activation": "none"}, "a_log and dt_bias with the gate qwen alone"),
        (DELTA, {"beta_activation": "tanh"}, "beta_activation 'tanh'; it must be one of"),
        (DELTA, {"state_update_capacity": 8}, "state_update_capacity 8; 0 alone"),
        (DELTA, {"head_first": 1}, r"not understood: \['head_first'\]"),
    ],
)
@pytest.mark.parametrize("fire", [use_state_slots, decompose_linear])
def test_what_is_not_understood_is_refused(
    fire: Callable[[onnx.ModelProto], PassResult],
    case: Case,
    attributes: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(ArtifactError, match=f"'layer' .*{message}"):
        fire(linear_model(case, **attributes))


def without(name: str) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        node = next(n for n in model.graph.node if n.domain)
        node.input[list(node.input).index(name)] = ""

    return edit


@pytest.mark.parametrize("fire", [use_state_slots, decompose_linear])
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (c.CUMULATIVE_SEQUENCE_LENGTHS, r"inputs \[0, 3, 4, 5, 6\] are needed, of at most 9"),
        ("decay", r"inputs \[0, 3, 4, 5, 6\] are needed"),
        ("value", "must have a key and a value or neither"),
        ("dt_bias", "a_log and dt_bias with the gate qwen alone"),
    ],
)
def test_inputs_that_are_missing(
    fire: Callable[[onnx.ModelProto], PassResult], name: str, message: str
) -> None:
    model = linear_model(DELTA.replace(is_packed=False))
    without(name)(model)
    with pytest.raises(ArtifactError, match=message):
        fire(model)


@pytest.mark.parametrize("fire", [use_state_slots, decompose_linear])
def test_weights_that_may_change_are_refused(
    fire: Callable[[onnx.ModelProto], PassResult],
) -> None:
    model = linear_model(CONV)
    for tensor in [t for t in model.graph.initializer if t.name == "weight"]:
        model.graph.initializer.remove(tensor)
        info = onnx.helper.make_tensor_value_info("weight", TensorProto.FLOAT, tensor.dims)
        model.graph.input.append(info)
    with pytest.raises(ArtifactError, match="the weights of 'layer' must be"):
        fire(model)


def test_sizes_that_are_not_known_are_refused() -> None:
    model = linear_model(DELTA)
    info = next(i for i in model.graph.input if i.name == c.past_conv_state(0))
    info.type.tensor_type.shape.dim[3].Clear()
    with pytest.raises(ArtifactError, match="the states of 'layer' must be a graph input"):
        decompose_linear(model)


@pytest.mark.parametrize("case", [CONV, DELTA], ids=["convolution", "delta"])
def test_float16_becomes_float32(case: Case) -> None:
    """Pools of the activations' type, too; then both give what they give."""
    model = linear_model(case, TensorProto.FLOAT16)
    wide = retype(model, numpy_helper.to_array).model
    (pool,) = [info for info in wide.graph.input if info.name == c.past_conv_state(0)]
    assert pool.type.tensor_type.elem_type == TensorProto.FLOAT
    assert "Cast" not in op_types(wide)[:-3]
    found = linear_models.run(decompose_linear(wide).model, case)
    rounded = case
    if isinstance(case, linear_cases.ConvCase):
        assert case.bias is not None
        weights = {name: getattr(case, name).astype(np.float16) for name in ("weight", "bias")}
        rounded = case.replace(**{k: v.astype(np.float32) for k, v in weights.items()})
    linear_cases.check(rounded, found)


@pytest.mark.parametrize("case", [CONV, DELTA], ids=["convolution", "delta"])
def test_16_bits_stay_around_what_is_computed(case: Case) -> None:
    """Standard operators of a graph in float16 are in float32, between Casts."""
    model = decompose_linear(linear_model(case, TensorProto.FLOAT16)).model
    session = linear_models.start(model)
    types = {info.name: info.type for info in session.get_outputs()}
    assert types["y"] == "tensor(float16)"
