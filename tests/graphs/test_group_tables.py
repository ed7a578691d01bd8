"""Block tables of groups: which layer reads which, and which graphs do not fit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxport.errors import ArtifactError
from onnxport.graphs import contract as c
from onnxport.graphs.cache_groups import LayerGroups, group_layers
from onnxport.graphs.inspect import set_attribute
from onnxport.graphs.paged import PagedInput, attention_nodes
from onnxport.graphs.passes.decompose import Bounds, decompose
from onnxport.graphs.passes.group_tables import group_tables
from onnxport.providers.cpu.library import find_library
from tests.graphs.paged_models import feeds, op_types, paged_case, paged_model, run
from tests.kernels.reference import Case

FLOAT_CASE = 28  # a float32 cache, six rows, and no window of its own
WINDOWS = (4, None, 4, None)
# Of what decomposed attention plans: block ids of new tokens, and those that tiles read.
TABLE_OPS = {"Cast", "GatherND", "Unsqueeze", "Concat", "Min", "Max", "Sub", "Slice", "Gather"}


def case() -> Case:
    return paged_case(FLOAT_CASE)


def windowed_model(windows: Sequence[int | None] = WINDOWS) -> onnx.ModelProto:
    model = paged_model(case(), layers=len(windows))
    for node, window in zip(model.graph.node, windows, strict=True):
        set_attribute(node, "local_window_size", window or -1)
    return model


def tables(model: onnx.ModelProto) -> list[str]:
    return [layer.input(PagedInput.BLOCK_TABLE) for layer in attention_nodes(model)]


def test_each_layer_reads_the_table_of_its_group() -> None:
    model = windowed_model()
    groups = group_layers(WINDOWS, 100)
    assert groups.windows == (None, 4)
    result = group_tables(model, groups)
    assert tables(result.model) == ["block_table.1", "block_table"] * 2
    assert result.changes == {"layers with a block table of their group": 2}
    assert tables(model) == ["block_table"] * 4, "the model that was passed in has changed"
    (first, other) = (
        next(info for info in result.model.graph.input if info.name == name)
        for name in (c.BLOCK_TABLE, "block_table.1")
    )
    assert other.type == first.type
    assert other.type.tensor_type.elem_type == TensorProto.INT32
    onnx.checker.check_model(result.model)


def test_three_groups_have_three_tables() -> None:
    windows = (4, 4, None, 4, 4, None)
    result = group_tables(windowed_model(windows), group_layers(windows, 100))
    names = ["block_table.1", "block_table.1", "block_table", "block_table.2", "block_table.2"]
    assert tables(result.model) == [*names, "block_table"]
    added = [info.name for info in result.model.graph.input][-2:]
    assert added == ["block_table.1", "block_table.2"]


def test_between_the_layers_there_may_be_others() -> None:
    """Without a cache, as those that keep a state; numbers count as numbers, 10 behind 9."""
    windows = (4, 4, None, 4)
    model = windowed_model(windows)
    moved = {
        name(old): name(new)
        for old, new in enumerate((2, 5, 9, 10))
        for name in (c.past_key, c.past_value, c.present_key, c.present_value)
    }
    for node in model.graph.node:
        for names in (node.input, node.output):
            names[:] = [moved.get(name, name) for name in names]
    for info in (*model.graph.input, *model.graph.output):
        info.name = moved.get(info.name, info.name)
    result = group_tables(model, LayerGroups((None, 4), ((1, 0), (1, 1), (0, 0), (1, 2)), 3))
    assert tables(result.model) == [*["block_table.1"] * 2, "block_table", "block_table.1"]


@pytest.mark.parametrize("way", ["kernel", "metadata", "shapes"])
def test_a_group_reads_and_writes_by_its_own_table(way: str) -> None:
    """Its blocks lie elsewhere here, and it gives what it gave by the table of all."""
    library = find_library()
    if way == "kernel" and library is None:
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")
    made, model = case(), windowed_model()
    grouped = group_tables(model, group_layers(WINDOWS, 100)).model
    if way != "kernel":
        library = None
        model, grouped = (decompose(one, bounds=way).model for one in (model, grouped))  # type: ignore[arg-type]
    inputs = feeds(made, model)
    expected = run(model, inputs, library)
    places = np.random.default_rng(0).permutation(len(made.key_cache)).astype(np.int32)
    used = made.block_table < len(places)  # other entries are never looked at
    inputs["block_table.1"] = np.where(used, places[made.block_table * used], made.block_table)
    for layer in (0, 2):
        for name in (c.past_key(layer), c.past_value(layer)):
            inputs[name] = np.ascontiguousarray(inputs[name][np.argsort(places)])
    found = run(grouped, inputs, library)
    for layer in range(4):
        for name in (f"out{layer}", c.present_key(layer), c.present_value(layer)):
            moved = layer in (0, 2) and name != f"out{layer}"
            value = found[name][places] if moved else found[name]
            assert value.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("bounds", ["metadata", "shapes"])
def test_what_does_not_depend_on_a_table_is_planned_once(bounds: Bounds) -> None:
    model = windowed_model()
    one = op_types(decompose(model, bounds=bounds).model)
    grouped = group_tables(model, group_layers(WINDOWS, 100)).model
    two = op_types(decompose(grouped, bounds=bounds).model)
    assert {op for op in two if two.count(op) != one.count(op)} <= TABLE_OPS
    assert two.count("GatherND") == 2
    assert one.count("GatherND") == 1


@pytest.mark.parametrize("window", [None, 4])
def test_a_single_group_changes_nothing(window: int | None) -> None:
    model = windowed_model((4, 4))
    result = group_tables(model, LayerGroups.single(2, window))
    assert result.model == model
    assert str(result) == "group_tables: nothing to do"


@pytest.mark.parametrize(
    ("windows", "words"),
    [
        ((4, None), r"groups are of 4 layers, .* the graph's read \['past_key_values.0.key', "),
        ((4, None, 5, None), "sees 5 tokens, and its group keeps 4"),
        ((4, None, None, None), "sees all tokens, and its group keeps 4"),
    ],
)
def test_other_layers_are_refused(windows: Sequence[int | None], words: str) -> None:
    with pytest.raises(ArtifactError, match=words):
        group_tables(windowed_model(windows), group_layers(WINDOWS, 100))


def test_a_window_of_all_layers_is_checked_too() -> None:
    with pytest.raises(ArtifactError, match="sees all tokens, and its group keeps 4"):
        group_tables(windowed_model((4, None)), LayerGroups.single(2, 4))


def test_layers_that_see_less_than_their_group_keeps_fit() -> None:
    groups = group_layers(WINDOWS, 100)
    assert group_tables(windowed_model((2, 9, 4, None)), groups).changes


def test_graphs_that_are_lowered_already_are_refused() -> None:
    groups = group_layers(WINDOWS, 100)
    with pytest.raises(ArtifactError, match=r"it reads 'block_table\.1'"):
        group_tables(group_tables(windowed_model(), groups).model, groups)
    with pytest.raises(ArtifactError, match=r"the graph's read \[\]"):
        group_tables(decompose(windowed_model()).model, groups)


def test_slots_that_are_given_are_refused() -> None:
    made = case()
    slots = np.arange(len(made.query), dtype=np.int32)
    model = paged_model(made.replace(slot_mapping=slots, window=4), layers=2)
    with pytest.raises(ArtifactError, match=r"by block_table alone; .* the slots slot_mapping"):
        group_tables(model, group_layers((4, None), 100))
