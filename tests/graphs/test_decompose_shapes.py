"""bounds="shapes": shapes follow from the inputs' shapes, and padding changes no result."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto

from onnxport.errors import ArtifactError
from onnxport.graphs import contract as c
from onnxport.graphs.passes.decompose import Bounds, decompose
from tests.graphs.paged_models import feeds, paged_case, paged_model, run
from tests.graphs.test_decompose import Ragged, agrees, varied
from tests.kernels.reference import Case
from tests.tiers import every

SEEDS = [seed for seed in range(160) if seed % 4 != 3]
SEEDS = [seed for seed in SEEDS if paged_case(seed).slot_mapping is None]


@pytest.mark.parametrize("seed", every(6, SEEDS[::2]))
def test_equals_the_reference_and_the_other_bounds(seed: int) -> None:
    case, tile_tokens = varied(seed)
    model = paged_model(case)
    by_shapes = decompose(model, tile_tokens=tile_tokens, bounds="shapes").model
    found = run(by_shapes, feeds(case, by_shapes))
    agrees(case, found)
    by_metadata = decompose(model, tile_tokens=tile_tokens).model
    expected = run(by_metadata, feeds(case, by_metadata))
    np.testing.assert_allclose(found["out0"], expected["out0"], atol=2e-5)
    for name in (c.present_key(0), c.present_value(0)):
        np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize("tile", [1, 2, 5, 64])
def test_any_tile_gives_the_same_results(tile: int) -> None:
    case = Ragged().case([9, 1, 0, 4], [3, 11, 2, 0])
    model = decompose(paged_model(case), bounds="shapes").model
    agrees(case, run(model, feeds(case, model, query_tile=tile)))


def test_the_inputs_are_the_shapes_alone() -> None:
    metadata = np.array([1, 1, 0], np.int32)
    model = paged_model(paged_case(4, metadata=metadata), layers=2)
    before = [info.name for info in model.graph.input]
    inputs = decompose(model, bounds="shapes").model.graph.input
    expected = [name for name in before if name != c.ATTENTION_METADATA] + [c.QUERY_TILE]
    assert [info.name for info in inputs] == expected
    kind = inputs[-1].type.tensor_type
    assert kind.elem_type == TensorProto.INT8
    assert [dim.dim_param for dim in kind.shape.dim] == [c.QUERY_TILE]
    kept = decompose(model).model.graph.input
    assert [info.name for info in kept] == before


def test_a_graph_without_paged_attention_gets_no_input() -> None:
    model = decompose(paged_model(paged_case(4))).model
    assert decompose(model, bounds="shapes").model == model


def test_a_slot_mapping_is_refused() -> None:
    case = next(case for case in map(paged_case, range(0, 160, 4)) if case.slot_mapping is not None)
    with pytest.raises(ArtifactError, match="a slot mapping, with fixed shapes"):
        decompose(paged_model(case), bounds="shapes")


def folded(model: onnx.ModelProto, dims: Mapping[str, int], path: Path) -> onnx.ModelProto:
    """What ONNX Runtime makes of a graph whose input dimensions are known."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    for name, size in dims.items():
        options.add_free_dimension_override_by_name(name, size)
    providers = ["CPUExecutionProvider"]
    ort.InferenceSession(model.SerializeToString(), options, providers=providers)
    return onnx.shape_inference.infer_shapes(onnx.load(path), check_type=True, strict_mode=True)


def dynamic_values(case: Case, bounds: Bounds, path: Path) -> set[str]:
    """The values whose shapes are not known even when every input's shape is."""
    model = decompose(paged_model(case, layers=2), bounds=bounds).model
    inputs = feeds(case, model)
    dims = {
        dim.dim_param: size
        for info in model.graph.input
        for dim, size in zip(info.type.tensor_type.shape.dim, inputs[info.name].shape, strict=True)
        if dim.dim_param
    }
    graph = folded(model, dims, path).graph
    known = {
        info.name
        for info in (*graph.value_info, *graph.output)
        if all(dim.HasField("dim_value") for dim in info.type.tensor_type.shape.dim)
        and info.type.tensor_type.HasField("shape")
    }
    return {name for node in graph.node for name in node.output if name} - known


METADATA = np.array([1, 1, 0], np.int32)


@pytest.mark.parametrize("seed", every(4, SEEDS[:24]))
def test_every_shape_is_known_before_a_run(seed: int, tmp_path: Path) -> None:
    case = paged_case(seed, metadata=METADATA)
    assert not dynamic_values(case, "shapes", tmp_path / "folded.onnx")


def test_with_metadata_shapes_are_known_in_a_run_only(tmp_path: Path) -> None:
    """The near miss of the test above."""
    case = paged_case(4, metadata=METADATA)
    assert len(dynamic_values(case, "metadata", tmp_path / "folded.onnx")) > 10


def padded(case: Case, r: np.random.Generator) -> Case:
    """More tokens, rows and columns: an extra sequence over spare blocks of garbage."""
    tokens, rows, columns = (int(r.integers(1, 9)) for _ in range(3))
    size = case.block_size
    spare = len(case.key_cache)
    blocks = np.arange(-(-tokens // size), dtype=np.int32)
    width = max(case.block_table.shape[1] + columns, len(blocks))
    table = np.zeros((len(case.new_lengths) + 1 + rows, width), np.int32)
    table[: len(case.new_lengths), : case.block_table.shape[1]] = np.where(
        case.block_table < spare, np.maximum(case.block_table, 0), 0
    )
    table[len(case.new_lengths), : len(blocks)] = spare + blocks

    def more(x: np.ndarray, count: int) -> np.ndarray:
        garbage = r.standard_normal((count, *x.shape[1:])) * 50
        return np.concatenate([x, garbage.astype(x.dtype)])

    return case.replace(
        query=more(case.query, tokens),
        key=more(case.key, tokens),
        value=more(case.value, tokens),
        key_cache=more(case.key_cache, len(blocks)),
        value_cache=more(case.value_cache, len(blocks)),
        new_lengths=[*case.new_lengths, tokens, *[0] * rows],
        past_lengths=[*case.past_lengths, *[0] * (rows + 1)],
        block_table=table,
    )


@pytest.mark.parametrize("seed", every(6, SEEDS[1::3]))
def test_padding_changes_nothing(seed: int) -> None:
    case = paged_case(seed)
    if case.cosine is not None:  # the padding's positions need their angles
        case = case.replace(
            cosine=np.pad(case.cosine, ((0, 9), (0, 0))), sine=np.pad(case.sine, ((0, 9), (0, 0)))
        )
    more = padded(case, np.random.default_rng(seed))
    model = decompose(paged_model(case), bounds="shapes").model
    tile = max(case.new_lengths)
    expected = run(model, feeds(case, model, tile))
    found = run(model, feeds(more, model, tile))
    rows, blocks = len(case.query), len(case.key_cache)
    np.testing.assert_allclose(found["out0"][:rows], expected["out0"], atol=1e-5)
    for name in (c.present_key(0), c.present_value(0)):
        np.testing.assert_array_equal(found[name][:blocks], expected[name])
        assert (found[name][blocks:] != 0).any(), "padding writes its own blocks"
