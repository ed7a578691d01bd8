"""Experts and latent attention in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from tests.exporter import bailing, checkpoints
from tests.exporter.run_graphs import Graph
from tests.published.converted import Model, check
from tests.published.converting import convert
from tests.published.places import needs_llama_cpp
from tests.tiers import every

pytestmark = needs_llama_cpp

SIGMOID = {"scoring_func": "sigmoid"}
YARN = {
    **{"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
    **{"original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"mscale": 0.707, "mscale_all_dim": 0.707},
}
GROWING = {
    **{**YARN, "original_max_position_embeddings": 10, "factor": 2.0},
    **{"llama_4_scaling_beta": 0.1, "partial_rotary_factor": 1 / 3},
}
LLAMA4 = {
    **{"num_hidden_layers": 4, "no_rope_layers": None, "moe_layers": None},
    **{"attn_scale": 0.1, "floor_scale": 8192, "attention_chunk_size": 8192},
}
HUNYUAN = {
    **{"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128},
    "rope_parameters": {
        "rope_type": "dynamic",
        "rope_theta": 10_000.0,
        "alpha": 1000.0,
        "factor": 1.0,
    },
    "max_position_embeddings": 32_768,
}
WHOLE = {  # heads rotate, as is told of Solar Open
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}
}
HUNYUAN_MOE = {"moe_intermediate_size": [64] * 2, "num_shared_expert": [1] * 2, "moe_topk": [3] * 2}
FURTHER = {"num_nextn_predict_layers": 1}
MIMO = {"routed_scaling_factor": 1.0}
MIMO_KEYS = {  # which published files have, and transformers leaves out
    **{"hybrid_layer_pattern": [0, 1, 1], "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    **{"swa_head_dim": 32, "swa_num_attention_heads": 8, "swa_num_key_value_heads": 4},
    **{"swa_v_head_dim": 16, "layernorm_epsilon": 0.05},
    **{"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
    "swa_rope_theta": 300.0,
}
MODELS: Mapping[str, Model] = {
    "afmoe": Model(
        "afmoe",
        {"num_hidden_layers": 4, "layer_types": None},
        {"score_func": "sigmoid", "route_norm": True},
    ),
    "deepseek-v2": Model("deepseek-v2", {"rope_parameters": YARN}, {"scoring_func": "softmax"}),
    "deepseek-v2-lite": Model(
        "deepseek-v2-lite", {"n_group": 1, "topk_group": 1}, {"scoring_func": "softmax"}
    ),
    "deepseek-v3": Model("deepseek-v3", {"rope_parameters": YARN}, SIGMOID),
    "dots1": Model("dots1", {"sliding_window": None, "layer_types": None}, SIGMOID),
    "ernie-moe": Model("ernie-moe"),
    "exaone-moe": Model("exaone-moe", {}, SIGMOID),
    "glm4-moe": Model("glm4-moe"),
    "glm4-moe-lite": Model("glm4-moe-lite", {}, {"first_k_dense_replace": 1}),
    "gpt-oss": Model("gpt-oss", {"swiglu_limit": 7.0}),
    "gpt-oss-16bit": Model("gpt-oss-16bit", {"swiglu_limit": 7.0, "layer_types": None}),
    "exaone-moe-further": Model("exaone-moe", {}, SIGMOID | FURTHER, further="mtp.layers.0."),
    "glm4-moe-further": Model("glm4-moe", {}, FURTHER, further="model.layers.3."),
    "glm4-moe-lite-further": Model(
        "glm4-moe-lite", {}, FURTHER | {"first_k_dense_replace": 1}, further="model.layers.3."
    ),
    "granitemoe": Model("granitemoe"),
    "granitemoeshared": Model("granitemoeshared"),
    "hunyuan-moe": Model("hunyuan-moe", HUNYUAN, HUNYUAN_MOE),
    "minimax-m2": Model("minimax-m2", {}, SIGMOID),
    "mixtral": Model("mixtral", {"sliding_window": None}),
    "moonlight": Model(
        "deepseek-v3-halves", {"rope_interleave": True, "norm_topk_prob": True}, SIGMOID
    ),
    "olmoe": Model("olmoe"),
    "cohere2-moe": Model("cohere2-moe"),
    "cohere2-moe-further": Model("cohere2-moe", {}, FURTHER, further="model.layers.3."),
    "hy-v3": Model("hy-v3"),
    "hy-v3-further": Model("hy-v3", {}, FURTHER, further="model.layers.3."),
    "laguna": Model(  # the first of every four layers sees all, as llama.cpp knows
        "laguna", {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]}
    ),
    "laguna-full": Model(
        "laguna-full", {"mlp_layer_types": ["dense", "sparse"], "sliding_window": 0}
    ),
    "mellum": Model("mellum", {"mlp_layer_types": None}),
    "llama4": Model("llama4", LLAMA4),
    "llama4-text": Model("llama4-plain", LLAMA4 | {"use_qk_norm": True}),
    "mimo-v2-flash": Model("mimo-v2-flash", MIMO, MIMO_KEYS),
    "mistral4": Model("mistral4", {"rope_parameters": GROWING}),
    "youtu": Model("youtu"),
    "youtu-yarn": Model("youtu-halves", {"rope_interleave": True, "rope_parameters": YARN}),
    "qwen2-moe": Model("qwen2-moe"),
    "qwen3-moe": Model("qwen3-moe", {"mlp_only_layers": []}),
    "solar-open": Model("solar-open", WHOLE),
    "solar-open-groups": Model("solar-open-groups", WHOLE),
}


def test_bailing(tmp_path: Path) -> None:
    """Ling and Ring 2.0, for which transformers has no class: GLM 4.5 by other names."""
    model = checkpoints.make(bailing.CASE, tmp_path / "checkpoint")
    bailing.publish(tmp_path / "checkpoint", **bailing.CONFIG)
    path = convert(tmp_path / "checkpoint", tmp_path / "model.gguf")
    options = ExportOptions(precision="fp32", threads=1)
    artifact = Artifact.read(export_model(path, tmp_path / "artifact", options))
    token_ids = checkpoints.tokens()
    found = Graph(artifact, "split").logits(token_ids)
    np.testing.assert_allclose(found, checkpoints.logits(model, token_ids), atol=1e-4)


@pytest.mark.parametrize("name", every(4, MODELS))
def test_logits(tmp_path: Path, name: str) -> None:
    check(MODELS[name], tmp_path)
