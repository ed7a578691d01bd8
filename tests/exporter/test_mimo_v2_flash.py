"""MiMo V2 Flash: how its configurations read, and what of them is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.families.mimo_v2_flash import FAMILY
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.plan import plan_weights
from onnxport.graphs.heads_spec import HeadsSpec
from onnxport.graphs.spec import ArchSpec
from tests.exporter import checkpoints
from tests.exporter.configs import read

FULL, SLIDING = "full_attention", "sliding_attention"
# Of what is known of the published file, seven layers.
CONFIG: dict[str, Any] = {
    "add_full_attention_sink_bias": False,
    "add_swa_attention_sink_bias": True,
    "architectures": ["MiMoV2FlashForCausalLM"],
    "attention_bias": False,
    "attention_chunk_size": 128,
    "attention_value_scale": 0.707,
    "head_dim": 192,
    "hidden_size": 4096,
    "hybrid_block_size": None,
    "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0, 1],
    "intermediate_size": 16384,
    "layernorm_epsilon": 1e-05,
    "max_position_embeddings": 262144,
    "model_type": "mimo_v2_flash",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": [0, 1, 1, 1, 1, 1, 1],
    "n_group": 1,
    "n_routed_experts": 256,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 7,
    "num_key_value_heads": 4,
    "partial_rotary_factor": 0.334,
    "rope_theta": 5000000,
    "routed_scaling_factor": None,
    "scoring_func": "sigmoid",
    "sliding_window": 128,
    "sliding_window_size": 128,
    "swa_head_dim": 192,
    "swa_num_attention_heads": 64,
    "swa_num_key_value_heads": 8,
    "swa_rope_theta": 10000,
    "swa_v_head_dim": 128,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 152576,
}


def test_the_published_model() -> None:
    spec = read(CONFIG)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.value_size) == (64, 8, 192, 128)
    assert spec.global_heads == HeadsSpec(head_size=192, num_kv_heads=4, keys_are_values=False)
    assert spec.sliding_window == (None, 129, 129, 129, 129, None, 129)
    assert [spec.has_sinks(layer) for layer in (0, 1, 5, 6)] == [False, True, False, True]
    assert (spec.rope.theta, spec.rope.rotary_dim, spec.rms_norm_eps) == (5e6, 64, 1e-5)
    assert spec.local_rope is not None
    assert (spec.local_rope.theta, spec.local_rope.rotary_dim) == (1e4, 64)
    assert (spec.value_scale, spec.scale, spec.qk_norm) == (0.707, 192**-0.5, False)
    experts = spec.experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size, experts.shared_size) == (
        256,
        8,
        2048,
        None,
    )
    assert (experts.sigmoid, experts.corrected, experts.scale, experts.groups) == (
        True,
        True,
        1.0,
        None,
    )
    assert experts.layers == (False, *[True] * 6)
    assert not spec.has_gqa_graph
    assert ArchSpec.from_json(spec.to_json()) == spec


def test_sizes_of_layers() -> None:
    plan = plan_weights(read(CONFIG), FAMILY.tensors)
    for layer, kv_heads in ((0, 4), (1, 8)):
        role = f"layers.{layer}."
        rows = [part.rows for part in plan.matrices[role + "qkv"].parts]
        assert rows == [64 * 192, kv_heads * 192, kv_heads * 128]
        assert (plan.matrices[role + "o"].columns, plan.matrices[role + "o"].scale) == (8192, 0.707)
    assert plan.vectors["layers.1.sinks"].tensor == "model.layers.1.self_attn.attention_sink_bias"
    assert "layers.0.sinks" not in plan.vectors


def test_what_a_file_may_leave_out() -> None:
    keys = ("architectures", "model_type", "hidden_size", "intermediate_size", "vocab_size")
    needed = (*keys, "max_position_embeddings", "num_attention_heads", "num_hidden_layers")
    assert read({key: CONFIG[key] for key in needed}) == read(CONFIG)
    assert read({**CONFIG, "sliding_window_size": None}).sliding_window[1] == 128
    plain = read(
        {**CONFIG, "attention_value_scale": None, "v_head_dim": 192, "swa_v_head_dim": None}
    )
    assert (plain.value_scale, plain.value_size) == (None, None)


def test_layers_of_one_kind() -> None:
    whole = read({**CONFIG, "layer_types": [FULL] * 7, "hybrid_layer_pattern": [0] * 7})
    assert (whole.num_kv_heads, whole.global_heads, whole.attention_sinks) == (4, None, None)
    local = read({**CONFIG, "layer_types": [SLIDING] * 7, "hybrid_layer_pattern": None})
    assert (local.num_kv_heads, local.global_heads, local.local_rope) == (8, None, None)
    assert (local.attention_sinks, local.window_sinks, local.rope.theta) == (True, None, 1e4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias is True"),
        ({"add_swa_attention_sink_bias": False}, "add_swa_attention_sink_bias is False"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"attention_value_scale": 0.0}, "attention_value_scale is 0.0"),
        ({"hybrid_layer_pattern": [0] * 7}, "hybrid_layer_pattern is .* transformers does not"),
        ({"layernorm_epsilon": 1e-6}, "layernorm_epsilon is 1e-06, which transformers does not"),
        ({"moe_layer_freq": [1] * 7}, "moe_layer_freq is .* transformers does not read here"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which transformers"),
        ({"rope_theta": 1e6}, "rope_theta is 1000000.0, which transformers does not read"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"swa_head_dim": 128}, "swa_head_dim is 128; supported is 192"),
        ({"swa_num_attention_heads": 32}, "swa_num_attention_heads is 32; supported is 64"),
        ({"swa_num_key_value_heads": 7}, "num_heads 64 is not a multiple of num_kv_heads 7"),
        ({"swa_rope_theta": 1e5}, "swa_rope_theta is 100000.0, which transformers does not read"),
        ({"swa_v_head_dim": 192}, "swa_v_head_dim is 192; supported is 128"),
        ({"v_head_dim": 256, "swa_v_head_dim": 256}, "value_size is 256; it must be below"),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read(CONFIG | changes)


def test_what_values_of_another_size_do_not_go_with() -> None:
    spec = read(CONFIG)
    with pytest.raises(ValueError, match="value_size does not go with value_norm"):
        replace(spec, value_norm=True, global_heads=None, qk_norm=True, output_norms=True)
    with pytest.raises(ValueError, match="window_sinks needs attention_sinks"):
        replace(spec, attention_sinks=None)


def test_layers_that_guess_further_tokens_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.CASES["mimo-v2-flash-windows"], source)
    tensors = load_file(source / "model.safetensors")
    extra = {"model.mtp.layers.0.eh_proj.weight": torch.ones(64, 128)}
    save_file(tensors | extra, source / "model.safetensors")
    export_model(source, tmp_path / "artifact", ExportOptions(precision="fp32", threads=1))
    assert "what guesses tokens behind the next one" in caplog.text
