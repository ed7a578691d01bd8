"""Mixtures of experts and latent attention of 2026: what configurations say, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from onnx import TensorProto
from onnxruntime import InferenceSession
from transformers import AutoConfig
from transformers.models.phimoe.modeling_phimoe import sparsemixer

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.families import find_family
from onnxport.exporter.plan import plan_weights
from onnxport.exporter.reference_experts import mixed_sparsely
from onnxport.graphs import experts as experts_graph
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.latent_spec import LatentSpec
from onnxport.graphs.spec import ArchSpec
from tests.exporter.configs import read, spec_of

FULL, SLIDING = "full_attention", "sliding_attention"
# By what is known of published files: no hub is at hand.
MISTRAL_4: dict[str, Any] = {
    "model_type": "mistral4",
    "first_k_dense_replace": 0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "kv_lora_rank": 256,
    "max_position_embeddings": 1048576,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 32,
    "q_lora_rank": 1024,
    "qk_head_dim": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_interleave": True,
    "rope_parameters": {
        "type": "yarn",
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 128.0,
        "original_max_position_embeddings": 8192,
        "max_position_embeddings": 1048576,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
        "partial_rotary_factor": 0.5,
    },
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "v_head_dim": 128,
    "vocab_size": 131072,
}
MISTRAL_SMALL_4: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": 10,
    "spatial_merge_size": 2,
    "text_config": MISTRAL_4,
    "tie_word_embeddings": False,
    "vision_config": {"model_type": "pixtral"},
}
HUNYUAN_3: dict[str, Any] = {
    "architectures": ["HYV3ForCausalLM"],
    "model_type": "hy_v3",
    "enable_moe_fp32_combine": False,
    "expert_hidden_dim": 1536,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 13312,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_experts": 192,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "num_shared_experts": 1,
    "qk_norm": True,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0},
    "route_norm": True,
    "router_scaling_factor": 2.826,
    "vocab_size": 120832,
}
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 8,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
MELLUM: dict[str, Any] = {
    **SIZES,
    "architectures": ["MellumForCausalLM"],
    "model_type": "mellum",
    "layer_types": [FULL, SLIDING] * 4,
    "rms_norm_eps": 1e-6,
}
COHERE: dict[str, Any] = {
    **SIZES,
    "architectures": ["Cohere2MoeForCausalLM"],
    "model_type": "cohere2_moe",
    "first_k_dense_replace": 1,
    "layer_norm_eps": 1e-5,
}
PHI_MOE: dict[str, Any] = {
    "architectures": ["PhiMoEForCausalLM"],
    "model_type": "phimoe",
    "attention_bias": True,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "input_jitter_noise": 0.01,
    "intermediate_size": 6400,
    "lm_head_bias": True,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "long_factor": [1.0 + one for one in range(64)],
        "long_mscale": 1.25,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0] * 64,
        "short_mscale": 1.125,
        "type": "longrope",
    },
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.0,
    "router_jitter_noise": 0.01,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
YOUTU: dict[str, Any] = {
    **{**SIZES, "num_key_value_heads": 4, "embedding_initializer_range": 0.02},
    "architectures": ["YoutuForCausalLM"],
    "model_type": "youtu",
    "rms_norm_eps": 1e-6,
}


def test_mellum_may_say_that_it_slides() -> None:
    assert read(MELLUM | {"use_sliding_window": True}) == read(MELLUM)
    whole = {"layer_types": [FULL] * 8}
    assert read(MELLUM | whole | {"use_sliding_window": False}) == read(MELLUM | whole)


@pytest.mark.parametrize(
    "values",
    [{**MISTRAL_4, "architectures": ["Mistral4ForCausalLM"]}, HUNYUAN_3, MELLUM, COHERE, YOUTU],
    ids=lambda one: one["model_type"],
)
def test_absent_keys_mean_what_they_mean_to_transformers(
    values: dict[str, Any], tmp_path: Path
) -> None:
    needed = {*SIZES, "rms_norm_eps", "layer_norm_eps", "architectures", "model_type"}
    if values is MELLUM or values is COHERE:
        needed |= {"layer_types", "first_k_dense_replace"}
    written = {key: one for key, one in values.items() if key in needed - {"num_key_value_heads"}}
    (tmp_path / "config.json").write_text(json.dumps(written))
    peer = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = getattr(transformers, values["architectures"][0])(peer)
    config = Config.read(tmp_path)
    spec = spec_of(config)
    plan = plan_weights(spec, find_family(config).tensors)
    assert spec.tie_word_embeddings == peer.tie_word_embeddings
    assert spec.hidden_act == peer.hidden_act
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    expected = {name: one for name, one in expected.items() if not name.endswith("inv_freq")}
    found = sum(math.prod(shape) for shape in plan.shapes().values())
    assert found == sum(one.numel() for one in expected.values())
    if spec.experts is not None:
        assert spec.experts.per_token == peer.num_experts_per_tok
    ropes = {FULL: spec.rope, SLIDING: spec.local_rope}
    for kind, rope in ropes.items():
        if rope is not None:
            theta = peer.rope_parameters.get(kind, peer.rope_parameters)["rope_theta"]
            assert rope.theta == theta
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_mistral_small_4() -> None:
    spec = read(MISTRAL_SMALL_4)
    assert spec.latent == LatentSpec(
        kv_rank=256, nope_size=64, rope_size=64, value_size=128, query_rank=1024
    )
    assert (spec.context_length, spec.rope.factor, spec.rope.rotary_dim) == (1048576, 128.0, 64)
    growth = spec.query_growth
    assert growth is not None
    assert (growth.strength, growth.interval, growth.offset) == (0.1, 8192, 0)
    assert spec.rope.attention_factor == 1.0
    assert spec.scale == pytest.approx((0.1 * math.log(128) + 1) ** 2 / math.sqrt(128))
    experts = spec.experts
    assert experts is not None
    assert (experts.sigmoid, experts.corrected, experts.normalized) == (None, None, True)
    assert (experts.layers, experts.groups, experts.shared_size) == (None, None, 2048)
    alone = {**MISTRAL_4, "architectures": ["Mistral4ForCausalLM"], "tie_word_embeddings": False}
    assert read(alone) == spec


def test_hunyuan_3() -> None:
    spec = read(HUNYUAN_3)
    assert (spec.qk_norm, spec.qk_norm_last, spec.rope.theta) == (True, None, 11158840.0)
    experts = spec.experts
    assert experts is not None
    assert experts.layers == (False, *[True] * 79)
    assert (experts.sigmoid, experts.corrected, experts.normalized) == (True, True, True)
    assert (experts.scale, experts.shared_size) == (2.826, 1536)


def test_phi_moe() -> None:
    spec = read(PHI_MOE)
    assert (spec.layer_norms, spec.norm_biases, spec.head_bias, spec.o_bias) == (True,) * 4
    assert spec.sliding_window == (131072,) * 32
    experts = spec.experts
    assert experts is not None
    assert (experts.jitter, experts.normalized, experts.per_token) == (0.01, False, 2)
    assert (spec.rope.attention_factor, spec.rope.factors[-1]) == (1.25, 64.0)
    short = read(PHI_MOE, 4096).rope
    assert (short.attention_factor, short.factors[-1]) == (1.125, 1.0)
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    rope = {key: one for key, one in PHI_MOE["rope_scaling"].items() if key != "long_mscale"}
    with pytest.raises(CheckpointError, match="'long_mscale' is None"):
        read({**PHI_MOE, "rope_scaling": rope})
    with pytest.raises(UnsupportedModelError, match="num_experts_per_tok is 3"):
        read({**PHI_MOE, "num_experts_per_tok": 3})


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.3])
def test_experts_near_each_other_share_a_weight(jitter: float) -> None:
    """As transformers computes it, with logits that are equal, or 0."""
    logits = np.random.default_rng(0).standard_normal((64, 8)).astype(np.float32)
    logits[1:9] = logits[1:9].round()
    logits[0] = 0
    parts, chosen = sparsemixer(torch.from_numpy(logits), jitter_eps=jitter, training=False)
    expected = np.zeros_like(logits)
    np.put_along_axis(expected, chosen.numpy(), parts.numpy(), -1)
    assert (parts < 1).any()
    np.testing.assert_allclose(mixed_sparsely(jitter, logits), expected, atol=1e-6)
    g = GraphBuilder("router")
    g.input("logits", TensorProto.FLOAT, ["tokens", 8])
    g.output("parts", TensorProto.FLOAT, ["tokens", 8])
    index, found = experts_graph.mixed_sparsely(g, "logits", jitter)
    zeros = g.node("Sub", ["logits", "logits"])
    g.node("ScatterElements", [zeros, index, found], outputs=["parts"], axis=-1)
    session = InferenceSession(g.build().SerializeToString(), providers=["CPUExecutionProvider"])
    (made,) = session.run(None, {"logits": logits})
    np.testing.assert_allclose(made, expected, atol=1e-6)


def test_layers_of_cohere_with_experts() -> None:
    spec = read(COHERE)
    assert spec.sliding_window == (None, *[4096] * 3, None, *[4096] * 3)
    assert spec.rotated_layers == (*[True] * 4, False, *[True] * 3)
    experts = spec.experts
    assert experts is not None
    assert experts.layers == (False, *[True] * 7)
    assert (experts.scale, experts.shared_scale, experts.shared_size) == (None, None, None)
    windows = {"prefix_dense_sliding_window_pattern": 2, "first_k_dense_replace": 2}
    spec = read({**COHERE, **windows})
    assert spec.sliding_window == (4096, None, *[4096] * 3, None, 4096, 4096)
    assert spec.rotated_layers == (True, False, *[True] * 3, False, True, True)
    shared = read({**COHERE, "num_shared_experts": 2}).experts
    assert shared is not None
    assert (shared.scale, shared.shared_scale, shared.shared_size) == (0.5, 0.5, 192)


@pytest.mark.parametrize(
    ("values", "changes", "message"),
    [
        (HUNYUAN_3, {"route_norm": False}, "route_norm is False"),
        (HUNYUAN_3, {"qk_norm": False}, "qk_norm is False"),
        (HUNYUAN_3, {"expert_hidden_dim": 64}, "are names of one number"),
        (HUNYUAN_3, {"first_k_dense_replace": 2}, "first_k_dense_replace is 2, and"),
        (HUNYUAN_3, {"mlp_layer_types": ["sparse"]}, "for each of 80 layers"),
        (MELLUM, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_scaling is"),
        (MELLUM, {"rope_theta": 5.0}, "rope_theta"),
        (MELLUM, {"sliding_window": None}, "only with a sliding_window"),
        (MELLUM, {"use_sliding_window": False}, "use_sliding_window is false"),
        (COHERE, {"expert_selection_fn": "tanh"}, "expert_selection_fn is 'tanh'"),
        (COHERE, {"shared_expert_combination_strategy": "max"}, "combination_strategy is 'max'"),
        (COHERE, {"use_qk_norm": True}, "use_qk_norm is True"),
        (COHERE, {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        (YOUTU, {"n_routed_experts": 8}, "n_routed_experts = 8"),
        (YOUTU, {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    values: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read({**values, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 64}, "head_dim is 64 and partial_rotary_factor 0.5"),
        ({"qk_rope_head_dim": 32}, "make heads of 96 channels, 32 of which rotate"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"n_group": 3, "topk_group": 2}, "128 experts cannot be 3 equal groups"),
        ({"scoring_func": "sigmoid"}, "scoring_func"),
    ],
)
def test_what_is_refused_of_mistral_4(changes: dict[str, Any], message: str) -> None:
    text = {**MISTRAL_4, **changes}
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read({**MISTRAL_SMALL_4, "text_config": text})
