"""HyperCLOVA X, CWM, Jais 2, MiniCPM 3, nanochat, VaultGemma, …: how configurations read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.rope import tables
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.spec import ArchSpec
from tests.exporter import checkpoints
from tests.exporter.configs import read, respelled
from tests.exporter.run_graphs import check_golden

SIZES: Mapping[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 1000,
}
NORM = {"rms_norm_eps": 1e-05}
LLAMA3 = {
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_theta": 1000000.0,
    "rope_type": "llama3",
}
LONG = {
    "long_factor": [1.0 + one / 8 for one in range(16)],
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0] * 16,
    "type": "longrope",
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "hyperclovax": {
        **{"architectures": ["HyperCLOVAXForCausalLM"], "model_type": "hyperclovax"},
        **{"attention_multiplier": 0.0078125, "embedding_multiplier": 10.0, "head_dim": 128},
        **{"logits_scaling": 0.125, "residual_multiplier": 0.5, "use_post_norm": True, **NORM},
        "rope_theta": 100000000,
    },
    "iquestcoder": {
        **{"architectures": ["IQuestCoderForCausalLM"], "model_type": "iquestcoder", **NORM},
        **{"num_key_value_heads": 2, "rope_theta": 500000.0},
    },
    "cwm": {
        **{"architectures": ["CwmForCausalLM"], "model_type": "cwm", **NORM},
        **{"num_key_value_heads": 2, "sliding_window": 1024, "rope_scaling": LLAMA3},
        "max_position_embeddings": 131072,
    },
    "minicpm3": {
        **{"architectures": ["MiniCPM3ForCausalLM"], "model_type": "minicpm3", **NORM},
        **{"kv_lora_rank": 256, "q_lora_rank": 768, "num_key_value_heads": 4},
        **{"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "scale_depth": 1.4, "scale_emb": 12},
        **{"dim_model_base": 256, "rope_scaling": LONG, "tie_word_embeddings": True},
    },
    "jais2": {
        **{"architectures": ["Jais2ForCausalLM"], "model_type": "jais2"},
        **{"hidden_act": "relu2", "layer_norm_eps": 1e-05, "rope_theta": 500000.0},
        **{"attention_bias": True, "mlp_bias": True},
    },
    "nanochat": {
        **{"architectures": ["NanoChatForCausalLM"], "model_type": "nanochat"},
        **{"rms_norm_eps": 1e-06, "rope_theta": 10000.0, "hidden_act": "relu2"},
        **{"final_logit_softcapping": 15.0, "num_key_value_heads": 2},
    },
    "gemma": {
        **{"architectures": ["GemmaForCausalLM"], "model_type": "gemma", **NORM},
        **{"head_dim": 256, "num_key_value_heads": 1, "hidden_act": "gelu"},
        **{"hidden_activation": None, "rope_theta": 10000.0, "attention_bias": False},
    },
    "vaultgemma": {
        **{"architectures": ["VaultGemmaForCausalLM"], "model_type": "vaultgemma", **NORM},
        **{"head_dim": 256, "num_key_value_heads": 4, "query_pre_attn_scalar": 256},
        **{"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        **{"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 512},
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


def config(family: str, **changes: Any) -> dict[str, Any]:
    """The published model's file in small; None leaves a key out."""
    values = {**SIZES, **CONFIGS[family], **changes}
    return {key: one for key, one in values.items() if one is not None}


@pytest.mark.parametrize("family", CONFIGS)
def test_both_spellings_are_understood(family: str) -> None:
    spec = read(config(family))
    assert spec.family == family
    assert read(respelled(config(family))) == spec
    assert ArchSpec.from_json(spec.to_json()) == spec


def test_hyperclovax() -> None:
    spec = read(config("hyperclovax"))
    assert (spec.attention_scale, spec.logits_scale, spec.stream_scale) == (1 / 128, 0.125, 10.0)
    assert (spec.residual_scale, spec.rms_norm_eps, spec.inner_eps) == (0.05, 1e-5 / 100, 1e-5)
    assert (spec.output_norms, spec.rope.theta) == (True, 1e8)
    dropped = {"attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1}  # in training alone
    assert read(config("hyperclovax", **dropped)) == spec
    plain = read(config("hyperclovax", attention_multiplier=None, use_post_norm=False))
    assert plain.scale == pytest.approx(128**-0.5)
    assert (plain.output_norms, plain.inner_norm_eps) == (None, None)


def test_iquestcoder() -> None:
    spec = read(config("iquestcoder"))
    assert (spec.head_size, spec.num_kv_heads, spec.qkv_bias) == (128, 2, False)
    assert read(config("iquestcoder", architectures=["LlamaForCausalLM"])) == spec
    assert read(config("iquestcoder", use_sliding_window=False, attention_bias=True)).o_bias


def test_cwm() -> None:
    spec = read(config("cwm"))
    assert spec.sliding_window == (None, 1024, 1024, 1024)
    assert (spec.rope.type, spec.rope.theta, spec.head_size) == ("llama3", 1e6, 128)
    assert read(config("cwm", rope_scaling=None)) == spec
    assert read(config("cwm", rope_scaling=None, rope_theta=1e6)) == spec
    types = ["full_attention"] * 4
    assert not any(read(config("cwm", sliding_window=0, layer_types=types)).sliding_window)


def test_jais2() -> None:
    spec = read(config("jais2"))
    assert (spec.layer_norms, spec.norm_biases, spec.ungated) == (True, True, True)
    assert (spec.qkv_bias, spec.o_bias, spec.mlp_bias) == (True, True, True)
    assert (spec.hidden_act, spec.rms_norm_eps) == ("relu2", 1e-5)
    assert read(config("jais2", hidden_act=None, attention_bias=None, mlp_bias=None)) == spec


def test_minicpm3() -> None:
    spec = read(config("minicpm3"))
    latent = spec.latent
    assert latent is not None
    assert (latent.kv_rank, latent.query_rank, latent.value_size) == (256, 768, 128)
    assert (spec.experts, spec.stream_scale, spec.logits_scale) == (None, 12.0, 0.5)
    assert spec.residual_scale == pytest.approx(1.4 / 2 / 12)
    assert (spec.attention_scale, spec.inner_eps) == (pytest.approx(96**-0.5), 1e-6)
    assert (spec.rope.type, spec.rope.interleaved, spec.tie_word_embeddings) == (
        *("longrope", False),
        True,
    )
    keys = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "scale_depth")
    absent = dict.fromkeys((*keys, "scale_emb", "dim_model_base", "tie_word_embeddings"))
    assert read(config("minicpm3", **absent)) == spec
    null = read(config("minicpm3") | {"scale_depth": None, "dim_model_base": None})
    assert (null.residual_scale, null.logits_scale) == (pytest.approx(1 / 12), 1.0)


def test_nanochat() -> None:
    spec = read(config("nanochat"))
    assert (spec.qk_norm, spec.qk_norm_last, spec.embedding_norm) == (True, True, True)
    assert (spec.ungated, spec.hidden_act, spec.logits_softcap) == (True, "relu2", 15.0)
    assert (spec.rope.turns_back, spec.rope.type) == (True, "default")
    assert read(config("nanochat", final_logit_softcapping=None)) == spec
    assert read({**config("nanochat"), "final_logit_softcapping": None}).logits_softcap is None
    cos, sin = tables(spec.rope, 8)
    forth = tables(replace(spec.rope, turns_back=None), 8)
    np.testing.assert_array_equal(cos, forth[0])
    np.testing.assert_array_equal(sin, -forth[1])


def test_gemma() -> None:
    """What published files call "gelu" is the approximation by tanh."""
    spec = read(config("gemma"))
    assert (spec.hidden_act, spec.head_size, spec.num_kv_heads) == ("gelu_tanh", 256, 1)
    assert spec.stream_scale == pytest.approx(512**0.5)
    assert spec.residual_scale == pytest.approx(512**-0.5)
    assert (spec.output_norms, spec.attention_scale) == (None, None)
    assert spec.tie_word_embeddings
    assert read(config("gemma", hidden_activation="gelu_pytorch_tanh", hidden_act=None)) == spec


def test_vaultgemma() -> None:
    spec = read(config("vaultgemma"))
    assert (spec.output_norms, spec.inner_norm_eps) == (None, None)
    assert spec.output_scale == spec.residual_scale == pytest.approx(512**-0.5)
    assert spec.sliding_window == (512, None, 512, None)
    assert (spec.attention_softcap, spec.logits_softcap) == (50.0, 30.0)
    assert spec.tie_word_embeddings


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("hyperclovax", {"logits_scaling": 0.0}, "logits_scaling is 0.0"),
        ("hyperclovax", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("iquestcoder", {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        ("iquestcoder", {"use_sliding_window": True}, "use_sliding_window = true"),
        ("cwm", {"attention_bias": True}, "attention_bias = true"),
        ("cwm", {"rope_scaling": None, "rope_theta": 5e5}, "rope_theta is 500000.0, which tran"),
        ("cwm", {"sliding_window": 0}, "the window None"),
        ("jais2", {"hidden_act": "tanh"}, "hidden_act is 'tanh'"),
        ("jais2", {"rms_norm_eps": 1e-5}, "rms_norm_eps = "),
        ("minicpm3", {"scale_emb": 0}, "scale_emb is 0.0"),
        ("minicpm3", {"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ("minicpm3", {"attention_bias": True}, "attention_bias = true"),
        ("nanochat", {"final_logit_softcapping": 0.0}, "final_logit_softcapping is 0.0"),
        ("nanochat", {"partial_rotary_factor": 0.5}, "64 of 128 channels rotate"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("gemma", {"hidden_activation": "relu"}, "hidden_activation is 'relu'"),
        ("gemma", {"query_pre_attn_scalar": 256}, "query_pre_attn_scalar = 256"),
        ("vaultgemma", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("vaultgemma", {"use_bidirectional_attention": True}, "see those behind them"),
    ],
)
def test_what_would_change_the_result_is_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read({**config(family), **changes})


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        *(("granite-swa", "int4"), ("granitemoe-swa", "int4"), ("hyperclovax", "int8")),
        *(("iquestcoder", "fp16"), ("cwm", "int4"), ("jais2", "int4"), ("vaultgemma", "int8")),
        *(("gemma", "int4"), ("gemma", "fp16")),
        *(("minicpm3", "int4"), ("nanochat", "int4"), ("nanochat", "fp16")),
    ],
)
def test_precisions(case: str, precision: str, tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES[case], tmp_path / "checkpoint")
    options = ExportOptions(precision=precision, threads=1, group_size=32)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    check_golden(Artifact.read(path))
