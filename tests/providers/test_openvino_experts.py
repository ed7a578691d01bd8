"""Experts on OpenVINO: what they compute, and that the plugin computes those chosen alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, external_data_helper, numpy_helper

from onnxport.exporter.export import export_model
from onnxport.graphs.experts import FP4, GELU
from onnxport.graphs.inspect import set_attribute
from onnxport.graphs.passes.int8_experts import write_int8_experts
from onnxport.graphs.passes.retype import retype
from onnxport.providers.base import Model
from onnxport.providers.openvino import convert, cpu, experts
from onnxport.providers.openvino.core import new_core
from onnxport.providers.openvino.model import OpenVinoModel
from onnxport.providers.registry import get_provider
from tests.conformance.make import export_options
from tests.exporter import checkpoints
from tests.graphs.expert_models import COUNT, TYPES, Layer, inputs, layer
from tests.providers import models
from tests.providers.conftest import ArtifactMaker

ov = pytest.importorskip("openvino", reason="openvino is not installed: pip install '.[openvino]'")
gathers = pytest.mark.skipif(
    not cpu.CpuPlugin.gathers_experts,
    reason="OpenVINO's CPU plugin has products of the chosen experts alone on x86-64",
)
FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}


def compiled(made: Layer) -> Any:
    """The layer as the CPU plugin compiles it, in float32."""

    def read(stored: TensorProto) -> NDArray[Any]:
        tensor = TensorProto.FromString(stored.SerializeToString())
        external_data_helper.load_external_data_for_tensor(tensor, str(made.folder))
        return numpy_helper.to_array(tensor)

    int8 = write_int8_experts(made.model, read, "float32")
    lowered = retype(int8.model, read)
    attached = {**int8.attached, **lowered.attached}
    weights = {
        tensor.name: attached[tensor.name]
        if tensor.name in attached
        else read(tensor)
        if tensor.data_location == TensorProto.EXTERNAL
        else numpy_helper.to_array(tensor)
        for tensor in lowered.model.graph.initializer
    }
    converted = convert.convert(lowered.model, weights)
    return new_core().compile_model(converted.model, "CPU", FLOAT32)


def run(graph: Any, x: NDArray[np.float32], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.array(graph([x, logits])[0])


@gathers
@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("dtype", sorted(TYPES))
@pytest.mark.parametrize("bits", [None, 4, 8, FP4])
def test_the_experts_chosen_are_computed_alone(
    tmp_path: Path, bits: int | str | None, dtype: str, normalized: bool
) -> None:
    made = layer(tmp_path, bits, TYPES[dtype], normalized=normalized)
    graph = compiled(made)
    assert experts.count_gathers(graph) == experts.PRODUCTS
    for tokens in (1, 2, 9):
        x, logits = inputs(tokens)
        expected = made.expected(x, logits)
        assert np.ptp(expected) > 0.2
        np.testing.assert_allclose(run(graph, x, logits), expected, atol=2e-5)


@gathers
@pytest.mark.parametrize("bits", [4, 8, FP4])
def test_weights_stay_integers(tmp_path: Path, bits: int | str) -> None:
    nodes = compiled(layer(tmp_path, bits, TYPES["float16"])).get_runtime_model().get_ops()
    products = [n for n in nodes if n.get_rt_info()["layerType"].astype(str) == experts.GATHERS]
    kinds = {node.input(1).get_element_type() for node in products}
    assert kinds == {{4: ov.Type.u4, 8: ov.Type.u8, FP4: ov.Type.u8}[bits]}


@gathers
@pytest.mark.parametrize("bits", [(4, 4), (4, 8)])
def test_blocks_with_offsets(tmp_path: Path, bits: tuple[int, int]) -> None:
    """They are zero points that are no integers; weights stay what they are."""
    made = layer(tmp_path, bits[0], TYPES["float16"], down_bits=bits[1], offsets=True)
    graph = compiled(made)
    nodes = graph.get_runtime_model().get_ops()
    products = [n for n in nodes if n.get_rt_info()["layerType"].astype(str) == experts.GATHERS]
    kinds = {node.input(1).get_element_type() for node in products}
    assert kinds == {{4: ov.Type.u4, 8: ov.Type.u8}[one] for one in bits}
    for tokens in (1, 9):
        x, logits = inputs(tokens)
        expected = made.expected(x, logits)
        off = np.abs(run(graph, x, logits) - expected).max()
        assert off < 1e-5 * np.ptp(expected)


def test_blocks_without_a_step_are_their_offset() -> None:
    scales, offsets = np.array([[0, 0.5]], np.float32), np.array([[0.75, -1]], np.float32)
    scales, middles = convert._middles(scales[..., None], offsets, 8)
    np.testing.assert_array_equal((8 - middles) * scales, offsets[..., None])


@gathers
def test_a_row_has_the_same_bits_in_any_batch(tmp_path: Path) -> None:
    graph = compiled(layer(tmp_path, 4, TYPES["float32"]))
    x, logits = inputs(9)
    alone = [run(graph, x[at : at + 1], logits[at : at + 1]) for at in range(9)]
    np.testing.assert_array_equal(run(graph, x, logits), np.concatenate(alone))


@gathers
def test_of_equal_logits_the_first_are_chosen(tmp_path: Path) -> None:
    made = layer(tmp_path, 8, TYPES["float32"])
    x, _ = inputs(3)
    logits = np.zeros((3, COUNT), np.float32)
    logits[1, [2, 4, 5]] = 1
    np.testing.assert_allclose(run(compiled(made), x, logits), made.expected(x, logits), atol=2e-5)


@gathers
def test_what_is_not_finite_stays_where_it_is(tmp_path: Path) -> None:
    graph = compiled(layer(tmp_path, 4, TYPES["float32"]))
    x, logits = inputs(4)
    clean = run(graph, x, logits)
    x[1], x[2], logits[2] = 1e30, np.nan, np.nan
    found = run(graph, x, logits)
    assert np.isnan(found[2]).all()
    np.testing.assert_array_equal(found[[0, 3]], clean[[0, 3]])


def test_another_pattern_computes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = layer(tmp_path, 4, TYPES["float32"])
    monkeypatch.setattr(experts, "NOTHING", 0.0)  # such sums are removed
    graph = compiled(made)
    assert experts.count_gathers(graph) == 0
    x, logits = inputs(9)
    np.testing.assert_allclose(run(graph, x, logits), made.expected(x, logits), atol=2e-5)


def graphs_of(model: Model) -> list[Any]:
    assert isinstance(model, OpenVinoModel)
    return [graph.compiled for graph, _ in model._requests]


@gathers
@pytest.mark.parametrize("precision", ["fp16", "int4", "int8"])
def test_artifacts_have_them_too(
    tiny_artifact: ArtifactMaker, precision: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_artifact("olmoe", precision)
    caplog.clear()
    with models.opened(path, None, provider="openvino") as model:
        num_layers = 2
        counts = {experts.count_gathers(graph) for graph in graphs_of(model)}
        assert counts == {experts.PRODUCTS * num_layers}
    assert "layers of experts" not in caplog.text


def test_a_pattern_that_is_not_known_is_said(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(experts, "NOTHING", 0.0)
    monkeypatch.setattr(cpu.CpuPlugin, "gathers_experts", True)
    with models.opened(tiny_artifact("olmoe", "int4"), None, provider="openvino"):
        pass
    assert "OpenVINO did not recognize all of 2 layers of experts" in caplog.text


def test_a_plugin_without_them_gets_standard_operators(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_artifact("qwen3-moe", "int4")
    exact = {"kv_cache_dtype": "float32", "matmul_accuracy_level": 1}
    found = []
    for able in (True, False):
        monkeypatch.setattr(cpu.CpuPlugin, "gathers_experts", able)
        features = get_provider("openvino").probe().features
        assert features is not None
        assert features.has_experts == able
        with models.opened(path, None, provider="openvino", **exact) as model:
            found.append(models.run_rows(model, [(list(range(3, 20)), 0, [0])]))
            count = experts.count_gathers(graphs_of(model)[0])
        assert able or count == 0
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_experts_with_a_gelu_are_written_out(tmp_path: Path, precision: str) -> None:
    """The plugin's pattern has a SiLU in its place."""
    case = checkpoints.CASES["gemma4-moe-all"]
    even = replace(case, config={**case.config, "global_head_dim": 16})
    checkpoints.make(even, tmp_path / "checkpoint")
    options = export_options(precision)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    exact = {"kv_cache_dtype": "float32", "matmul_accuracy_level": 1}
    rows: list[models.Row] = [(list(range(3, 17)), 0, [0]), ([40], 0, [1])]
    with models.opened(path, "decomposed", **exact) as model:
        expected = models.run_rows(model, rows)
    with models.opened(path, None, provider="openvino", **exact) as model:
        found = models.run_rows(model, rows)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        assert not any(experts.count_gathers(graph) for graph in graphs_of(model))


@pytest.mark.parametrize("bits", [None, 8])
def test_an_activation_that_is_not_known_is_refused(tmp_path: Path, bits: int | None) -> None:
    made = layer(tmp_path, bits, TYPES["float32"])
    (node,) = (node for node in made.model.graph.node if node.op_type in ("MoE", "QMoE"))
    set_attribute(node, "activation_type", GELU)
    with pytest.raises(Exception, match="another activation than swiglu"):
        compiled(made)
