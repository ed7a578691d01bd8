"""A.X K1: how its configurations read, what of them is refused, and what its files may lack."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.families.axk1 import FAMILY
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.plan import plan_weights
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.spec import ArchSpec
from tests.exporter import checkpoints
from tests.exporter.configs import read, respelled

# As transformers writes its own defaults, of four layers.
CONFIG: dict[str, Any] = {
    "architectures": ["AXK1ForCausalLM"],
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 32768,
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "model_type": "axk1",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 192,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "routed_scaling_factor": 2.5,
    "topk_group": 4,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
CASE = checkpoints.CASES["axk1"]
OPTIONS = ExportOptions(precision="fp32", threads=1)


def test_the_configuration() -> None:
    spec = read(CONFIG)
    assert spec.latent is not None
    assert (spec.latent.query_rank, spec.latent.kv_rank, spec.rope.interleaved) == (1536, 512, True)
    experts = spec.experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.groups) == (192, 8, 8)
    assert (experts.groups_per_token, experts.group_best, experts.scale) == (4, 2, 2.5)
    assert (experts.sum_normed, experts.layers) == (True, (False, True, True, True))
    assert ArchSpec.from_json(spec.to_json()) == spec
    assert read(respelled(CONFIG)) == spec


def test_what_a_file_may_leave_out() -> None:
    keys = ("mlp_layer_types", "n_group", "topk_group", "n_routed_experts", "kv_lora_rank")
    more = ("num_experts_per_tok", "moe_intermediate_size", "q_lora_rank", "routed_scaling_factor")
    short = {key: one for key, one in CONFIG.items() if key not in (*keys, *more)}
    assert read(short) == read(CONFIG)
    older = {"first_k_dense_replace": 1, "moe_layer_freq": 1, "topk_method": "greedy"}
    assert read(short | older) == read(CONFIG)


def test_norms_of_sums() -> None:
    plan = plan_weights(read(CONFIG), FAMILY.tensors)
    assert plan.vectors["layers.1.sum_norm"].tensor == "model.layers.1.post_mlp_layernorm.weight"
    assert "layers.0.sum_norm" not in plan.vectors
    assert "model.layers.0.post_mlp_layernorm.weight" in plan.left


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias = true"),
        ({"first_k_dense_replace": 2}, "they contradict each other"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"q_lora_rank": None}, "q_lora_rank is null; supported is a number"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(CONFIG | changes)


def test_experts_apart_have_norms_of_their_own() -> None:
    experts = read(CONFIG).experts
    assert experts is not None
    with pytest.raises(ValueError, match="experts apart have norms of their own"):
        replace(experts, apart=True)


def test_a_file_as_published(tmp_path: Path) -> None:
    """Without what corrects scores, as if that were 0, and with a norm that nothing reads."""
    source = tmp_path / "checkpoint"
    checkpoints.make(CASE, source)
    tensors = load_file(source / "model.safetensors")
    zero = {name: one * ("correction" not in name) for name, one in tensors.items()}
    save_file(zero, source / "model.safetensors")
    expected = Artifact.read(export_model(source, tmp_path / "with", OPTIONS))
    kept = {name: one for name, one in zero.items() if "correction" not in name}
    assert len(kept) == len(zero) - 2
    kept["model.layers.0.post_mlp_layernorm.weight"] = torch.ones(64)
    save_file(kept, source / "model.safetensors")
    found = Artifact.read(export_model(source, tmp_path / "without", OPTIONS))
    for artifact, corrected in ((expected, True), (found, None)):
        experts = artifact.manifest.model.experts
        assert experts is not None
        assert experts.corrected is corrected
    with np.load(expected.path / "golden.npz") as one, np.load(found.path / "golden.npz") as other:
        np.testing.assert_array_equal(one["logits"], other["logits"])
