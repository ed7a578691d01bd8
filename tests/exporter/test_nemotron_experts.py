"""Nemotron-H with experts, which have no gate: Nemotron 3 Nano."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import attribute_text
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu.library import find_library
from onnxport.providers.cpu.lowering import lower
from onnxport.providers.layer_groups import LayerGroups
from tests.exporter import checkpoints, configs
from tests.exporter.checkpoints import UNGATED_EXPERTS
from tests.exporter.run_graphs import Graph, Kind, greedy

KERNEL = find_library()
KINDS: list[Kind] = ["split", *(["custom"] if KERNEL else [])]  # type: ignore[list-item]
Exported = tuple[PreTrainedModel, Artifact]

NANO: dict[str, Any] = {  # what is known of the published file of Nemotron 3 Nano 30B-A3B
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "chunk_size": 128,
    "conv_kernel": 4,
    "eos_token_id": 2,
    "expand": 2,
    "head_dim": 128,
    "hidden_dropout": 0.0,
    "hidden_size": 2688,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "initializer_range": 0.02,
    "intermediate_size": 1856,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 64,
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_bias": False,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1,
    "n_groups": 8,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 52,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 1.0,
    "rescale_prenorm_residual": True,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
    "ssm_state_size": 128,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "topk_group": 1,
    "torch_dtype": "bfloat16",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "use_mamba_kernels": True,
    "vocab_size": 131072,
}


@pytest.fixture(scope="module", params=UNGATED_EXPERTS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp(request.param)
    model = checkpoints.make(UNGATED_EXPERTS[request.param], folder / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    return model, Artifact.read(export_model(folder / "checkpoint", folder / "artifact", options))


def test_the_numpy_reference_agrees(exported: Exported) -> None:
    model, artifact = exported
    with np.load(artifact.path / "golden.npz") as golden:
        expected = checkpoints.logits(model, golden["token_ids"])[golden["logits_indices"]]
        assert np.ptp(expected) > 2  # logits that say something
        np.testing.assert_allclose(golden["logits"], expected, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_agrees(exported: Exported, kind: Kind) -> None:
    model, artifact = exported
    token_ids = checkpoints.tokens()
    expected = checkpoints.logits(model, token_ids)
    graph = Graph(artifact, kind, KERNEL)
    np.testing.assert_allclose(graph.logits(token_ids), expected, atol=1e-4)
    sequence = graph.sequence()
    chunked = [sequence.step(part) for part in np.split(token_ids, [9, 10, 23])]
    np.testing.assert_allclose(np.concatenate(chunked), expected, atol=1e-4)
    prompt = token_ids[:11]
    assert greedy(graph.sequence(), prompt, 12) == checkpoints.greedy(model, prompt, 12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [("nemotron-3", "int4"), ("nemotron-3-groups", "int8"), ("nemotron-3", "fp16")],
)
def test_other_precisions(name: str, precision: str, tmp_path: Path) -> None:
    checkpoints.make(UNGATED_EXPERTS[name], tmp_path / "checkpoint")
    options = ExportOptions(precision=precision, threads=1, group_size=32)
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    with np.load(artifact.path / "golden.npz") as golden:
        found = Graph(artifact, "split").logits(golden["token_ids"])[golden["logits_indices"]]
        np.testing.assert_allclose(found, golden["logits"], atol=1e-4)


def test_there_is_no_graph_for_runtimes_that_have_no_such_experts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.make(UNGATED_EXPERTS["nemotron-3"], tmp_path / "checkpoint")
    with caplog.at_level(logging.WARNING):
        path = export_model(tmp_path / "checkpoint", tmp_path / "artifact")
    assert "ONNX Runtime knows no experts without a gate" in caplog.text
    artifact = Artifact.read(path)
    assert not {"model_gqa.onnx", "genai_config.json"} & artifact.manifest.files.keys()
    nodes = [node for node in artifact.load_graph("paged").graph.node if node.op_type == "QMoE"]
    assert [attribute_text(node, "activation_type") for node in nodes] == ["relu2"] * 3


@pytest.mark.skipif(KERNEL is None, reason="the C++ kernels were not built")
@pytest.mark.parametrize(
    ("precision", "operator"),
    [("int4", "GatedExperts"), ("fp16", "FloatExperts")],
)
def test_cpu_has_an_operator_for_them(precision: str, operator: str, tmp_path: Path) -> None:
    checkpoints.make(UNGATED_EXPERTS["nemotron-3"], tmp_path / "checkpoint")
    options = ExportOptions(precision=precision, threads=1, group_size=32)
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    chosen = (artifact.load_graph("paged"), artifact, LoadOptions(), ("float32", "tiled"), None)
    groups = LayerGroups.single(artifact.manifest.model.num_layers)
    *_, last = lower(*chosen, groups=groups, int8=True, summaries=False)  # type: ignore[arg-type]
    kinds = [node.op_type for node in last.model.graph.node]
    assert kinds.count(operator) == 3
    assert not {"MoE", "QMoE"} & set(kinds)


def test_names_of_transformers_5(exported: Exported, tmp_path: Path) -> None:
    """As `save_pretrained` may write them: all names begin with "model."."""
    model, _ = exported
    model.save_pretrained(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    assert any(".mixer.experts.0.up_proj.weight" in name for name in tensors)
    renamed = {name.replace("backbone.", "model."): one for name, one in tensors.items()}
    save_file(renamed, path, {"format": "pt"})
    options = ExportOptions(precision="fp32", threads=1)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    with np.load(path / "golden.npz") as golden:
        expected = checkpoints.logits(model, golden["token_ids"])[golden["logits_indices"]]
        np.testing.assert_allclose(golden["logits"], expected, atol=1e-4)


@pytest.mark.parametrize("name", UNGATED_EXPERTS)
def test_transformers_own_files_are_understood(name: str, tmp_path: Path) -> None:
    config = checkpoints.configuration(UNGATED_EXPERTS[name])
    config.architectures = ["NemotronHForCausalLM"]
    config.save_pretrained(tmp_path)
    spec = configs.spec_of(Config.read(tmp_path))
    written = json.loads(config.to_json_string(use_diff=False))
    again = configs.read({key: one for key, one in written.items() if key != "_name_or_path"})
    assert again == spec
    assert spec.experts is not None
    assert spec.experts.count == config.n_routed_experts


def test_nemotron_3_nano() -> None:
    spec = configs.read(NANO)
    assert (spec.num_layers, len(spec.cached_layers)) == (29, 6)
    assert (spec.ungated, spec.hidden_act) == (True, "relu2")
    experts = spec.experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size) == (128, 6, 1856)
    assert (experts.sigmoid, experts.corrected, experts.normalized) == (True, True, True)
    assert (experts.scale, experts.shared_size, experts.groups) == (2.5, 3712, None)
    assert experts.layers is not None
    assert spec.mlp_layers == experts.layers
    assert [i for i in range(29) if not experts.layers[i]] == [2, 6, 10, 14, 18, 23]
    assert not spec.has_gqa_graph
    absent = {key: one for key, one in NANO.items() if key not in ("n_group", "topk_group")}
    assert configs.read(absent) == spec
    both = configs.read({**NANO, "hybrid_override_pattern": "MEM-*E" * 8 + "ME*E"})
    assert both.experts is not None
    assert both.mlp_layers is None
    assert both.experts.layers == (True, False, True) * 8 + (True, True)


def test_what_is_absent_is_as_in_transformers() -> None:
    keys = ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    keys += ("moe_shared_expert_intermediate_size", "routed_scaling_factor", "n_shared_experts")
    spec = configs.read({key: one for key, one in NANO.items() if key not in keys})
    peer = type(checkpoints.configuration(UNGATED_EXPERTS["nemotron-3"]))()
    assert spec.experts is not None
    assert (spec.experts.count, spec.experts.per_token) == (
        peer.n_routed_experts,
        peer.num_experts_per_tok,
    )
    assert spec.experts.size == peer.moe_intermediate_size
    assert spec.experts.shared_size == peer.moe_shared_expert_intermediate_size
    assert (spec.experts.normalized, spec.experts.scale) == (
        peer.norm_topk_prob,
        peer.routed_scaling_factor,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_latent_size": 1024}, "moe_latent_size is 1024.*supported is null"),
        ({"n_shared_experts": 2}, "n_shared_experts is 2; supported is 1"),
        ({"n_shared_experts": 0}, "n_shared_experts is 0; supported is 1"),
        ({"moe_shared_expert_intermediate_size": 0}, "is 0; it must be above 0"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu'; supported is 'relu2'"),
        ({"norm_eps": 1e-6}, "norm_eps is 1e-06, and what transformers reads for it is 1e-05"),
        ({"num_experts_per_tok": 200}, "given to 200 experts, of 128"),
        ({"n_group": 3, "topk_group": 1}, "128 experts cannot be 3 equal groups"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"hybrid_override_pattern": "E" + "M*" * 25 + "M"}, "each E .experts. is behind an M"),
        ({"hybrid_override_pattern": "M-E*" * 13}, "each E .experts. is behind an M"),
        ({"router_norm": True}, "router_norm = true"),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        configs.read({**NANO, **changes})


def test_a_tensor_that_nothing_reads_is_refused(exported: Exported, tmp_path: Path) -> None:
    model, _ = exported
    model.save_pretrained(tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    name = "backbone.layers.1.mixer.experts.0.gate_proj.weight"
    save_file(load_file(path) | {name: torch.ones(32, 64)}, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mixer\.experts\.0\.gate_proj"):
        export_model(tmp_path / "checkpoint", tmp_path / "artifact")
