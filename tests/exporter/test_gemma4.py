"""Gemma 4: how its configurations read, what of them is refused, and how weights are stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma4TextConfig
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter import rope
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.heads_spec import HeadsSpec
from onnxport.graphs.paged import attention_nodes
from onnxport.graphs.spec import ArchSpec
from tests.exporter import checkpoints
from tests.exporter.configs import read, respelled
from tests.exporter.run_graphs import Graph

FULL, SLIDING = "full_attention", "sliding_attention"
COMMON: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "attention_bias": False,
    "attention_k_eq_v": False,
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "num_experts": None,
    "num_global_key_value_heads": None,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        FULL: {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
        SLIDING: {"rope_theta": 1e4, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
    "top_k_experts": None,
    "use_bidirectional_attention": None,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}
# Sizes as they are told of the published models: no hub is at hand.
E2B = COMMON | {
    "hidden_size": 1536,
    "hidden_size_per_layer_input": 256,
    "intermediate_size": 6144,
    "layer_types": ([SLIDING] * 4 + [FULL]) * 7,
    "num_attention_heads": 8,
    "num_hidden_layers": 35,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "sliding_window": 512,
    "use_double_wide_mlp": True,
}
LARGE = COMMON | {
    "attention_k_eq_v": True,
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": ([SLIDING] * 5 + [FULL]) * 10,
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
}
EXPERTS = LARGE | {
    "enable_moe_block": True,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "layer_types": ([SLIDING] * 5 + [FULL]) * 5,
    "moe_intermediate_size": 704,
    "num_attention_heads": 16,
    "num_experts": 128,
    "num_global_key_value_heads": 2,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "top_k_experts": 8,
}
MODELS = {"E2B": E2B, "31B": LARGE, "26B-A4B": EXPERTS}


@pytest.mark.parametrize("name", MODELS)
def test_both_spellings_are_understood(name: str) -> None:
    spec = read(MODELS[name])
    assert read(respelled(MODELS[name])) == spec
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert (spec.qk_norm, spec.value_norm, spec.output_norms, spec.layer_scales) == (True,) * 4
    assert (spec.scale, spec.logits_softcap, spec.inner_eps) == (1.0, 30.0, 1e-6)
    assert (spec.rope.type, spec.rope.rotary_dim, spec.rope.rotated_pairs) == (
        *("proportional", 512),
        64,
    )
    assert spec.local_rope is not None
    assert (spec.local_rope.type, spec.local_rope.rotary_dim) == ("default", 256)
    assert not spec.has_gqa_graph


def test_small_models_share_keys_and_values() -> None:
    spec = read(E2B)
    assert spec.global_heads == HeadsSpec(head_size=512, num_kv_heads=1, keys_are_values=False)
    assert spec.cached_layers == tuple(range(15))
    assert {spec.kv_source(layer) for layer in range(15, 35)} == {13, 14}
    assert [spec.kv_source(layer) for layer in (12, 14, 15, 18, 19, 34)] == [12, 14, 13, 13, 14, 14]
    assert [spec.inner_size(layer) for layer in (0, 14, 15, 34)] == [6144, 6144, 12288, 12288]
    assert spec.layer_input_size == 256
    assert spec.qkv_parts(0) == (2048, 256, 256)
    assert spec.qkv_parts(4) == (4096, 512, 512)
    assert (spec.qkv_parts(15), spec.qkv_parts(34)) == ((2048,), (4096,))


def test_large_models_have_keys_that_are_values() -> None:
    spec = read(LARGE)
    assert spec.global_heads == HeadsSpec(head_size=512, num_kv_heads=4, keys_are_values=True)
    assert spec.qkv_parts(0) == (32 * 256, 16 * 256, 16 * 256)
    assert spec.qkv_parts(5) == (32 * 512, 4 * 512)
    assert (spec.shared_kv_layers, spec.layer_input_size) == (None, None)
    experts = read(EXPERTS).experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size) == (128, 8, 704)
    assert (experts.shared_size, experts.apart, experts.normalized) == (2112, True, True)


def test_what_is_absent_is_as_in_transformers() -> None:
    needed = ("architectures", "model_type", "hidden_size", "intermediate_size", "vocab_size")
    needed += ("num_attention_heads", "max_position_embeddings", "rms_norm_eps")
    spec = read({key: E2B[key] for key in needed} | {"num_hidden_layers": 7})
    peer = Gemma4TextConfig(num_hidden_layers=7)
    assert spec.sliding_window == tuple(
        {SLIDING: peer.sliding_window, FULL: None}[kind] for kind in peer.layer_types
    )
    assert spec.sliding_window[5:] == (None, None)  # the last one has no window in any case
    near, own = peer.per_layer_config[SLIDING], peer.per_layer_config[FULL]
    assert (spec.head_size, spec.num_kv_heads) == (near.head_dim, near.num_key_value_heads)
    assert spec.heads_of(6) == HeadsSpec(
        head_size=own.head_dim, num_kv_heads=own.num_key_value_heads, keys_are_values=False
    )
    assert spec.layer_input_size == peer.hidden_size_per_layer_input
    assert (spec.shared_kv_layers, spec.logits_softcap) == (None, peer.final_logit_softcapping)
    assert spec.tie_word_embeddings is peer.tie_word_embeddings


@pytest.mark.parametrize("name", ["E2B", "31B"])
def test_rope_tables_are_transformers_own(name: str) -> None:
    values = MODELS[name] | {"num_hidden_layers": 6, "layer_types": [SLIDING] * 5 + [FULL]}
    spec = read(values | {"num_kv_shared_layers": 0})
    told = {key: one for key, one in values.items() if key != "architectures"}
    peer = Gemma4TextRotaryEmbedding(Gemma4TextConfig(**told | {"num_kv_shared_layers": 0}))
    positions = torch.arange(3000)[None]
    for layer, kind in ((0, SLIDING), (5, FULL)):
        cos, sin = peer(torch.zeros(1, dtype=torch.float32), positions, kind)
        found = rope.tables(spec.rope_of(layer), spec.context_length, 3000)
        half = found[0].shape[1]
        for ours, theirs in zip(found, (cos, sin), strict=True):
            np.testing.assert_allclose(ours, theirs[0, :, :half].numpy(), atol=2e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_activation": "gelu"},
        {"attention_bias": True},
        {"use_bidirectional_attention": "all"},
        {"layer_types": [SLIDING] * 35},
        {"layer_types": [FULL] * 35},
        {"layer_types": [SLIDING, "chunked_attention"] + [FULL] * 33},
        {"sliding_window": None},
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": {FULL: {"rope_type": "default", "rope_theta": 1e6}}},
        {"rope_parameters": {FULL: {"rope_type": "default"}, SLIDING: {"rope_theta": 1e4}}},
        {"rope_parameters": {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": None}}},
        {
            "rope_parameters": {
                FULL: {"rope_theta": 1e6, "partial_rotary_factor": 0.25},
                SLIDING: {"rope_theta": 1e4},
            }
        },
        {
            "rope_parameters": {
                FULL: {"rope_theta": 1e6, "rope_type": "yarn", "factor": 2.0},
                SLIDING: {"rope_theta": 1e4},
            }
        },
        {
            "rope_parameters": {
                FULL: {"rope_theta": 1e6},
                SLIDING: {"rope_theta": 1e4, "rope_type": "proportional"},
            }
        },
        {"per_layer_config": {"3": {"head_dim": 512}}},
        {"per_layer_config": {"sliding_attention": {"head_dim": 512}}},
        {"per_layer_config": {"4": {"head_dim": 512}}},  # others without a window are not named
        {"per_layer_config": {str(i): {"intermediate_size": 8} for i in range(4, 35, 5)}},
        {"per_layer_config": {"4" * 5000: {"head_dim": 512}}},  # more digits than int() takes
        {"vocab_size_per_layer_input": 1000},
        {"enable_moe_block": True},
        {"query_pre_attn_scalar": 256},
        {"model_type": "gemma4"},
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(E2B | changes)
    assert "config.json" in str(caught.value)
    named = (next(iter(changes)), "RoPE")
    assert any(name in str(caught.value) for name in named)


def test_both_kinds_of_layers_may_rotate_alike(tmp_path: Path) -> None:
    """Where their heads have one size, whatever else differs."""
    same = {"rope_theta": 1e4, "rope_type": "default"}
    changes = {"rope_parameters": {FULL: same, SLIDING: same}}
    spec = read(LARGE | changes | {"global_head_dim": 256})
    assert spec.global_heads == HeadsSpec(head_size=256, num_kv_heads=4, keys_are_values=True)
    assert spec.ropes == (spec.rope,)
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    with pytest.raises(ValueError, match="global_heads of another size needs a local_rope"):
        replace(read(LARGE), local_rope=None)
    case = checkpoints.CASES["gemma4"]
    alike = replace(case, config={**case.config, **changes, "global_head_dim": 16})
    peer = checkpoints.make(alike, tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    token_ids = checkpoints.tokens()
    found = Graph(Artifact.read(path), "decomposed").logits(token_ids)
    np.testing.assert_allclose(found, checkpoints.logits(peer, token_ids), atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 35}, "shared_kv_layers is 35 of 35 layers"),
        ({"num_kv_shared_layers": 31}, "one of each window"),
        ({"num_kv_shared_layers": -1}, "shared_kv_layers is -1"),
        ({"global_head_dim": 0}, "head_size of global heads must be positive"),
        ({"global_head_dim": 511}, "rotary_dim 511 must be positive and even"),
        ({"final_logit_softcapping": 0}, "final_logit_softcapping is 0"),
        ({"hidden_size_per_layer_input": -1}, "layer_input_size must be positive"),
        ({"use_double_wide_mlp": 1}, "expected a value of type bool"),
    ],
)
def test_a_configuration_that_makes_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match="config") as caught:
        read(E2B | changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_global_key_value_heads": 5}, "not a multiple of the 5 KV heads"),
        ({"top_k_experts": 200}, "given to 200 experts, of 128"),
        ({"num_experts": None}, "lacks the key 'num_experts'"),
    ],
)
def test_experts_that_make_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(EXPERTS | changes)


def test_layers_without_keys_of_their_own_read_those_of_others(tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES["gemma4-shared"], tmp_path / "checkpoint")
    add_unused(tmp_path / "checkpoint")
    options = ExportOptions(precision="int4", group_size=32)
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    graph = artifact.load_graph("paged")
    nodes = attention_nodes(graph)
    assert [node.writes for node in nodes] == [True] * 3 + [False] * 3
    assert [node.inputs[3] for node in nodes[3:]] == [f"present.{layer}.key" for layer in (1, 2, 1)]
    assert [(node.inputs[1:3]) for node in nodes[3:]] == [nodes[i].inputs[1:3] for i in (1, 2, 1)]
    assert [node.head_size for node in nodes] == [16, 32] * 3
    tensors = {one.name: one for one in graph.graph.initializer}
    table = tensors["layer_inputs.rows"]  # as the embedding: in bytes, of which rows are gathered
    assert list(table.dims) == [160, 6 * 16]
    assert table.data_type == tensors["embedding.rows"].data_type
    readers = [node.op_type for node in graph.graph.node if table.name in node.input]
    assert readers == ["GatherBlockQuantized"]
    assert not {"model_gqa.onnx", "genai_config.json"} & set(artifact.manifest.files)


def add_unused(folder: Path) -> None:
    """Keys of a layer that reads another one's, which published checkpoints have."""
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.4.self_attn.k_proj.weight"] = torch.ones(16, 64)
    weights["model.layers.4.self_attn.k_norm.weight"] = torch.ones(16)
    save_file(weights, path, {"format": "pt"})


def test_a_tensor_that_nothing_reads_is_refused(tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES["gemma4-shared"], tmp_path / "checkpoint")
    path = tmp_path / "checkpoint" / "model.safetensors"
    weights = load_file(path) | {"model.layers.2.self_attn.w_proj.weight": torch.ones(1)}
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.w_proj"):
        export_model(tmp_path / "checkpoint", tmp_path / "artifact")


def test_experts_with_a_gelu_have_no_graph_that_onnx_runtime_refuses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    case = checkpoints.CASES["gemma4-moe-all"]
    even = replace(case, config={**case.config, "global_head_dim": 16})
    checkpoints.make(even, tmp_path / "checkpoint")
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact"))
    spec = artifact.manifest.model
    assert not spec.has_mixed_layers
    assert "MoE and QMoE have no gated GELU" in caplog.text
    assert not {"model_gqa.onnx", "genai_config.json"} & set(artifact.manifest.files)
    assert replace(spec, experts=None).has_gqa_graph
