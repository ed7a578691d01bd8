"""Experts with biases and clamped activations, GPT-OSS's, in a model that is otherwise another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from torch import nn
from transformers import GptOssConfig, PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from onnxport.errors import CheckpointError
from onnxport.exporter import export
from onnxport.exporter.families import find_family
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.providers.cpu.library import find_library, matmul_isa
from tests.conformance.reference import Reference
from tests.exporter import checkpoints
from tests.exporter.run_graphs import Graph, Kind
from tests.providers.models import Row, opened, run_rows

KERNEL = find_library()
LAYERS, COUNT, HIDDEN, SIZE = 2, 8, 64, 32
LIMIT = 0.5  # of gates and ups whose deviation is about 2
CLAMPED = {"biased": True, "alpha": 1.702, "up_offset": 1.0, "limit": LIMIT}


class Mixture(nn.Module):
    """Transformers' layer of experts, without their scores."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": HIDDEN, "intermediate_size": SIZE, "num_local_experts": COUNT}
        config = GptOssConfig(**sizes, num_experts_per_tok=2, swiglu_limit=LIMIT)
        config._experts_implementation = "eager"
        self.inner = GptOssMLP(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layer adds."""
        y: torch.Tensor = self.inner(x)[0]
        return y


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """Qwen3 MoE with other layers of experts, and its checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint")
    case = checkpoints.CASES["qwen3-moe"]
    config = {**case.config, "mlp_only_layers": [], "num_experts": COUNT}
    made = checkpoints.make(replace(case, config=config), folder)
    tensors = load_file(folder / "model.safetensors")
    for layer, block in enumerate(made.model.layers):
        old, block.mlp = block.mlp, Mixture().eval()
        prefix, inner = f"model.layers.{layer}.mlp", block.mlp.inner
        gate, up = old.experts.gate_up_proj.chunk(2, 1)
        turns = torch.stack([gate, up], 2).flatten(1, 2)
        with torch.no_grad():
            inner.router.weight.copy_(old.gate.weight)
            inner.experts.gate_up_proj.copy_(turns.transpose(1, 2))
            inner.experts.down_proj.copy_(old.experts.down_proj.transpose(1, 2))
            for name, bias in (
                ("gate.bias", inner.router.bias),
                ("experts.gate_up_proj_bias", inner.experts.gate_up_proj_bias),
                ("experts.down_proj_bias", inner.experts.down_proj_bias),
            ):
                bias.copy_(torch.randn_like(bias))
                tensors[f"{prefix}.{name}"] = bias.numpy()
    save_file(tensors, folder / "model.safetensors")
    return made, folder


def exported(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    destination: Path,
    precision: str,
    **changes: object,
) -> Artifact:
    """An artifact of what the checkpoint's family would be, had it such experts."""

    def find(config):  # type: ignore[no-untyped-def]
        family = find_family(config)

        def read(found, length):  # type: ignore[no-untyped-def]
            spec = family.spec(found, length)
            assert spec.experts is not None
            return replace(spec, experts=replace(spec.experts, **{**CLAMPED, **changes}))

        return replace(family, spec=read)

    monkeypatch.setattr(export, "find_family", find)
    options = ExportOptions(precision=precision, threads=1, group_size=32)
    return Artifact.read(export.export_model(folder, destination, options))


Made = tuple[PreTrainedModel, Path]


def test_transformers_computes_the_same(
    monkeypatch: pytest.MonkeyPatch, model: Made, tmp_path: Path
) -> None:
    made, folder = model
    artifact = exported(monkeypatch, folder, tmp_path / "artifact", "fp32")
    assert isinstance(artifact.manifest.model.experts, ExpertsSpec)
    assert artifact.manifest.model.experts.limit == LIMIT
    token_ids = checkpoints.tokens()
    expected = checkpoints.logits(made, token_ids)
    assert np.ptp(expected) > 2
    with np.load(artifact.path / "golden.npz") as golden:
        found = checkpoints.logits(made, golden["token_ids"])[golden["logits_indices"]]
        np.testing.assert_allclose(golden["logits"], found, atol=1e-4)
    np.testing.assert_allclose(Reference(artifact.path).logits(token_ids), expected, atol=1e-4)
    kinds: list[Kind] = ["gqa", "decomposed", "split"]
    for kind in [*kinds, "custom"] if KERNEL else kinds:
        found = Graph(artifact, kind, KERNEL).logits(token_ids)
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=kind)


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16"])
def test_what_is_stored_is_what_is_meant(
    monkeypatch: pytest.MonkeyPatch, model: Made, tmp_path: Path, precision: str
) -> None:
    artifact = exported(monkeypatch, model[1], tmp_path / "artifact", precision)
    token_ids = checkpoints.tokens()
    reference = Reference(artifact.path)
    expected = reference.logits(token_ids)
    with np.load(artifact.path / "golden.npz") as golden:
        found = reference.logits(golden["token_ids"])[golden["logits_indices"]]
        np.testing.assert_allclose(golden["logits"], found, atol=1e-4)
    found = Graph(artifact, "split").logits(token_ids)
    np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize("name", ["alpha", "up_offset", "limit"])
def test_each_of_them_tells(
    monkeypatch: pytest.MonkeyPatch, model: Made, tmp_path: Path, name: str
) -> None:
    artifact = exported(monkeypatch, model[1], tmp_path / "artifact", "fp32", **{name: None})
    token_ids = checkpoints.tokens()
    expected = Reference(artifact.path).logits(token_ids)
    assert np.abs(expected - checkpoints.logits(model[0], token_ids)).max() > 0.05
    for kind in ("decomposed", "split"):
        found = Graph(artifact, kind).logits(token_ids)  # type: ignore[arg-type]
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=kind)


def test_down_and_its_bias_have_the_same_scale(
    monkeypatch: pytest.MonkeyPatch, model: Made, tmp_path: Path
) -> None:
    plain = exported(monkeypatch, model[1], tmp_path / "plain", "fp32")
    scaled = exported(monkeypatch, model[1], tmp_path / "scaled", "fp32", scale=2.0)
    for name, factor in (("gate_up.bias", 1), ("down.bias", 2), ("down.weight", 2)):
        first, second = (
            one.read_tensor(tensor)
            for one in (plain, scaled)
            for tensor in one.load_graph("paged").graph.initializer
            if tensor.name == f"layers.0.experts.{name}"
        )
        np.testing.assert_array_equal(second, first * factor)


def test_biases_that_nothing_uses_are_refused(
    monkeypatch: pytest.MonkeyPatch, model: Made, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=r"6 tensor.*mlp\.experts\.down_proj_bias"):
        exported(monkeypatch, model[1], tmp_path / "artifact", "fp32", biased=None)
    assert not (tmp_path / "artifact").exists()


@pytest.mark.skipif(
    matmul_isa() is None, reason="the kernels are not there, or not this processor's"
)
@pytest.mark.parametrize(("precision", "level"), [("int4", None), ("int4", 1), ("fp16", None)])
def test_cpu_runs_them(
    monkeypatch: pytest.MonkeyPatch,
    model: Made,
    tmp_path: Path,
    precision: str,
    level: int | None,
) -> None:
    artifact = exported(monkeypatch, model[1], tmp_path / "artifact", precision)
    prompts = [checkpoints.tokens(seed, 20).tolist() for seed in range(4)]
    reference = Reference(artifact.path)
    expected = np.stack([reference.logits(prompt)[-1] for prompt in prompts])
    rows: list[Row] = [(prompt, 0, [2 * i, 2 * i + 1]) for i, prompt in enumerate(prompts)]
    with opened(
        artifact.path, "custom", matmul_accuracy_level=level, kv_cache_dtype="float32"
    ) as loaded:
        found = run_rows(loaded, rows)
        alone = np.concatenate([run_rows(loaded, [row]) for row in rows])
    # Int8 activations round what routers read, too.
    tolerance = 0.3 if precision == "int4" and level is None else 1e-4
    assert np.abs(found - expected).max() < tolerance * expected.std()
    if precision == "int4" and level is None:
        assert found.tobytes() == alone.tobytes()
        assert np.abs(found - expected).max() > 1e-4 * expected.std()  # our operator, then


@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_openvino_runs_them(
    monkeypatch: pytest.MonkeyPatch, model: Made, tmp_path: Path, precision: str
) -> None:
    pytest.importorskip("openvino", reason="openvino is not installed: pip install '.[openvino]'")
    artifact = exported(monkeypatch, model[1], tmp_path / "artifact", precision)
    prompts = [checkpoints.tokens(seed, 20).tolist() for seed in range(4)]
    reference = Reference(artifact.path)
    expected = np.stack([reference.logits(prompt)[-1] for prompt in prompts])
    rows: list[Row] = [(prompt, 0, [i]) for i, prompt in enumerate(prompts)]
    exact = {"kv_cache_dtype": "float32", "matmul_accuracy_level": 1}
    with opened(artifact.path, None, provider="openvino", **exact) as loaded:
        found = run_rows(loaded, rows)
    assert np.abs(found - expected).max() < 1e-3 * expected.std()
