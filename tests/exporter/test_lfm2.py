"""LFM2: the reference is transformers', and configurations are what its files say.

Graphs run in `test_hybrid_graphs`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Lfm2Config
from transformers.models.lfm2.modeling_lfm2 import Lfm2MLP

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.linear_spec import ShortConvSpec
from tests.exporter import checkpoints, configs
from tests.exporter.checkpoints import SHORT_CONV

WEIGHTS = "model.safetensors"
OPTIONS = ExportOptions(precision="fp32", threads=1)
CONV, FULL = "conv", "full_attention"
# As LFM2 1.2B is published.
DENSE: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}
SPARSE: dict[str, Any] = {
    "architectures": ["Lfm2MoeForCausalLM"],
    "conv_L_cache": 3,
    "conv_bias": False,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "layer_types": [CONV, CONV, FULL, CONV],
    "max_position_embeddings": 128000,
    "model_type": "lfm2_moe",
    "moe_intermediate_size": 1792,
    "norm_eps": 1e-05,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "rope_theta": 1000000.0,
    "routed_scaling_factor": 1.0,
    "tie_embedding": True,
    "use_expert_bias": True,
    "vocab_size": 65536,
}


def exported(folder: Path, options: ExportOptions = OPTIONS) -> Artifact:
    return Artifact.read(export_model(folder, folder.with_name("artifact"), options))


@pytest.mark.parametrize("name", SHORT_CONV)
def test_the_numpy_reference_agrees(name: str, tmp_path: Path) -> None:
    model = checkpoints.make(SHORT_CONV[name], tmp_path / "checkpoint")
    artifact = exported(tmp_path / "checkpoint")
    with np.load(artifact.path / "golden.npz") as golden:
        expected = checkpoints.logits(model, golden["token_ids"])[golden["logits_indices"]]
        assert np.ptp(expected) > 2  # logits that say something
        np.testing.assert_allclose(golden["logits"], expected, atol=1e-4)
    manifest = json.loads((artifact.path / "manifest.json").read_text())
    assert manifest["model"]["linear"]["kind"] == "short_convolution"


def test_the_published_dense_model() -> None:
    spec = configs.read(DENSE)
    assert (spec.family, spec.intermediate_size) == ("lfm2", 8192)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (32, 8, 64)
    assert (spec.rms_norm_eps, spec.rope.theta, spec.context_length) == (1e-5, 1e6, 128_000)
    assert spec.tie_word_embeddings
    assert spec.qk_norm
    assert spec.cached_layers == (2, 5, 8, 10, 12, 14)
    layers = tuple(layer not in spec.cached_layers for layer in range(16))
    assert spec.linear == ShortConvSpec(channels=2048, kernel=3, bias=False, layers=layers)
    newer = {key: one for key, one in DENSE.items() if key not in ("full_attn_idxs", "theta")}
    newer |= {
        "layer_types": [CONV if one else FULL for one in layers],
        "full_attn_idxs": None,
        "intermediate_size": 12288,
        "tie_embedding": True,
        "tie_word_embeddings": True,
        "theta": 1000000.0,
    }
    assert configs.read(newer) == spec


def test_the_published_model_with_experts() -> None:
    spec = configs.read(SPARSE)
    assert (spec.family, spec.intermediate_size) == ("lfm2_moe", 7168)
    experts = spec.experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size) == (32, 4, 1792)
    assert (experts.sigmoid, experts.corrected, experts.normalized) == (True, True, True)
    assert experts.layers == (False, False, True, True)
    assert spec.tie_word_embeddings
    assert spec.linear_layers == (0, 1, 3)
    assert configs.read(SPARSE | {"num_dense_layers": 4}).experts is None
    plain = configs.read(SPARSE | {"use_expert_bias": False, "routed_scaling_factor": 2.0}).experts
    assert plain is not None
    assert (plain.corrected, plain.scale) == (None, 2.0)


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"block_ffn_dim_multiplier": 1.3},
        {"block_multiple_of": 100},
        {"intermediate_size": 500, "block_ff_dim": None},
        {"block_auto_adjust_ff_dim": False},
    ],
)
def test_features_between_are_those_of_transformers(sizes: dict[str, Any]) -> None:
    config = {**DENSE, **sizes}
    known = {key: one for key, one in config.items() if one is not None and key != "architectures"}
    with torch.device("meta"):
        layer = Lfm2MLP(Lfm2Config(**known))
    assert configs.read(config).intermediate_size == layer.w1.out_features


@pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_transformers_own_files_are_understood(config: dict[str, Any]) -> None:
    assert configs.read(configs.respelled(config)) == configs.read(config)


def test_attention_in_each_layer() -> None:
    spec = configs.read({key: one for key, one in DENSE.items() if key != "full_attn_idxs"})
    assert spec.linear is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_use_swiglu": False}, "block_use_swiglu is False"),
        ({"use_pos_enc": False}, "use_pos_enc is False"),
        ({"block_dim": 1024}, "hidden_size is 2048 and block_dim, another name of it, is 1024"),
        ({"num_heads": 16}, "num_attention_heads is 32 and num_heads"),
        ({"intermediate_size": 8192}, "intermediate_size is 8192 and block_ff_dim"),
        ({"tie_embedding": False, "tie_word_embeddings": True}, "tie_word_embeddings is True and"),
        ({"theta": 10000.0}, "theta is 10000.0 and RoPE's is 1000000.0"),
        ({"block_multiple_of": 0}, "block_multiple_of is 0; it must be above 0"),
        ({"conv_L_cache": 1}, "kernel of short convolutions must be above 1, is 1"),
        ({"conv_bias": 1}, "'conv_bias' is 1"),
        ({"full_attn_idxs": []}, "none of the 16 layers has attention"),
        ({"layer_types": [CONV] * 15 + [FULL]}, "full_attn_idxs is .* which differ"),
        (
            {"full_attn_idxs": None, "layer_types": ["mamba"] * 16},
            "supported are 16 entries",
        ),
        ({"full_attn_idxs": None, "layer_types": [FULL]}, "supported are 16 entries"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"conv_activation": "silu"}, "conv_activation = "),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        configs.read(DENSE | changes)


def test_with_experts_the_layers_are_told() -> None:
    told = {key: one for key, one in SPARSE.items() if key != "layer_types"}
    with pytest.raises(CheckpointError, match="lacks the key 'layer_types'"):
        configs.read(told | {"full_attn_idxs": [2]})


def test_inputs_and_outputs(tmp_path: Path) -> None:
    checkpoints.make(SHORT_CONV["lfm2"], tmp_path / "checkpoint")
    options = ExportOptions(precision="int4", threads=1, group_size=32)
    artifact = exported(tmp_path / "checkpoint", options)
    paged, rows = (
        {
            one.name: [d.dim_param or d.dim_value for d in one.type.tensor_type.shape.dim]
            for one in artifact.load_graph(kind).graph.input
        }
        for kind in ("paged", "gqa")
    )
    for layer in (0, 1, 3):
        assert paged[contract.past_conv_state(layer)] == ["num_states", 64, 2]
        assert contract.past_recurrent_state(layer) not in paged
        assert rows[contract.gqa_past_conv_state(layer)] == ["batch", 64, 2]
        assert contract.gqa_past_recurrent_state(layer) not in rows
    assert contract.past_key(2) in paged
    assert contract.past_key(0) not in paged
    config = json.loads((artifact.path / "genai_config.json").read_text())["model"]
    assert config["type"] == "lfm2"
    assert config["decoder"]["layer_types"] == [CONV, CONV, FULL, CONV]
    initializers = {one.name for one in artifact.load_graph("paged").graph.initializer}
    assert "layers.0.linear.in.scales" in initializers  # which is quantized


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("lfm2", "model.layers.0.conv.in_proj.weight"),
        ("lfm2", "model.layers.3.conv.conv.weight"),
        ("lfm2-moe", "model.layers.1.feed_forward.expert_bias"),
    ],
)
def test_tensors_that_are_missing_or_more(name: str, tensor: str, tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    checkpoints.make(SHORT_CONV[name], source)
    tensors = load_file(source / WEIGHTS)
    kept = tensors.pop(tensor)
    save_file(tensors, source / WEIGHTS)
    with pytest.raises(CheckpointError, match=tensor):
        exported(source)
    other = "model.layers.0.conv.conv.bias"
    save_file(tensors | {tensor: kept, other: torch.zeros(64)}, source / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"does not use: {other}"):
        exported(source)
