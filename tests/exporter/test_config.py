"""Configurations: every key is used, known to be irrelevant, or refused."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.families import FAMILIES, find_family
from onnxport.graphs.spec import ArchSpec
from tests.exporter import configs
from tests.exporter.checkpoints import CASES, configuration

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


def read(**changes: Any) -> ArchSpec:
    return configs.read({**LLAMA, **changes})


def qwen2(**changes: Any) -> ArchSpec:
    given = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_key_value_heads": 2}
    return read(**given | changes)


def test_both_spellings_of_rope_may_say_the_same() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    whole = {**yarn, "original_max_position_embeddings": 256, "rope_theta": 1e6}
    given = read(rope_theta=1e6, rope_scaling=yarn, rope_parameters=whole)
    assert given == read(rope_theta=1e6, rope_scaling=yarn)
    assert read(rope_parameters={"rope_type": "default", "truncate": None}) == read()


def test_null_is_not_what_is_absent() -> None:
    """As transformers reads them."""
    assert qwen2(num_key_value_heads=None).num_kv_heads == 4
    window = {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}
    assert qwen2(**window).sliding_window == (None, None, None)
    with pytest.raises(UnsupportedModelError, match="and a sliding_window"):
        qwen2(**window, layer_types=["sliding_attention"] * 3)
    yarn = {"type": "yarn", "factor": 4.0}
    assert not read(rope_scaling={**yarn, "truncate": None}).rope.truncate
    assert read(rope_scaling=yarn).rope.truncate


def test_defaults() -> None:
    spec = read()
    assert (spec.num_kv_heads, spec.head_size, spec.rope.rotary_dim) == (4, 16, 16)
    assert spec.rope.theta == 10_000.0
    assert spec.rope.type == "default"
    assert spec.sliding_window == (None, None, None)
    assert spec.context_length == 256
    biases = (spec.qkv_bias, spec.o_bias, spec.mlp_bias)
    assert not any((spec.tie_word_embeddings, *biases))


@pytest.mark.parametrize("name", CASES)
def test_transformers_own_files_are_understood(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    peer = configuration(case)
    name = case.inside or case.family
    peer.architectures = [one.architecture for one in FAMILIES if one.name == name]
    peer.save_pretrained(tmp_path)
    spec = configs.spec_of(Config.read(tmp_path))
    assert spec.family == case.family
    peer = peer.get_text_config()
    if spec.latent is not None:
        assert spec.latent.query_size == peer.qk_head_dim
        assert spec.attended_size == peer.num_attention_heads * peer.v_head_dim
        return
    if spec.global_heads is not None:
        peer = peer.per_layer_config["sliding_attention"]
    kv_heads = getattr(peer, "num_key_value_heads", peer.num_attention_heads)
    if name == "mimo_v2_flash" and any(spec.sliding_window):  # these have twice as many
        kv_heads *= 2
    if name == "falcon":  # which has a name of its own, and means it with one of two keys
        many = peer.new_decoder_architecture or not peer.multi_query
        kv_heads = peer.num_kv_heads if many else 1
    assert spec.num_kv_heads == kv_heads
    width = peer.hidden_size // peer.num_attention_heads
    assert spec.head_size == (getattr(peer, "head_dim", None) or width)


PUBLISHED: dict[str, dict[str, Any]] = {
    "Phi-4-mini-instruct": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "attention_bias": False,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        "embd_pdrop": 0.0,
        "full_attn_mod": 1,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "interpolate_factor": 1,
        "lm_head_bias": False,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"long_factor": [2] * 48, "short_factor": [1] * 48, "type": "longrope"},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "attention_bias": False,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "pretraining_tp": 2,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "granite-3.3-2b-instruct": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "attention_bias": False,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "logits_scaling": 8.0,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000000.0,
        "tie_word_embeddings": True,
        "vocab_size": 49159,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_understood(name: str) -> None:
    """By what is known of them: no hub is at hand."""
    spec = configs.read(PUBLISHED[name])
    assert spec.tie_word_embeddings
    assert spec.head_size == {"phi3": 128, "smollm3": 128, "granite": 64}[spec.family]
    assert spec.rope.rotary_dim == (96 if spec.family == "phi3" else spec.head_size)
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


CODER: dict[str, Any] = {  # Qwen3-Coder-30B-A3B-Instruct
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5472,
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "qkv_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.3",
    "use_cache": True,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_what_qwen3_coder_says_of_itself() -> None:
    spec = configs.read(CODER)
    assert (spec.qk_norm, spec.qkv_bias, spec.sliding_window) == (True, False, (None,) * 48)
    assert spec.experts is not None
    assert (spec.experts.count, spec.experts.shared_size) == (128, None)


@pytest.mark.parametrize(
    ("key", "value"),
    [("qkv_bias", True), ("use_qk_norm", False), ("shared_expert_intermediate_size", 512)],
)
def test_what_no_qwen3_moe_is(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{key} is {value}"):
        configs.read({**CODER, key: value})


def test_keys_of_published_llamas_that_say_nothing_new() -> None:
    """Falcon 3 and ALLaM have them."""
    plain = configs.read(LLAMA)
    assert configs.read({**LLAMA, "activation": "swiglu", "internal_version": "7b-alpha"}) == plain
    with pytest.raises(UnsupportedModelError, match='activation = "geglu"'):
        configs.read({**LLAMA, "activation": "geglu"})


CHUNKS: dict[str, Any] = {
    **LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "max_position_embeddings": 1010000,
    "num_key_value_heads": 4,
    "dual_chunk_attention_config": {
        "chunk_size": 262144,
        "local_size": 8192,
        "original_max_position_embeddings": 262144,
    },
}


def test_dual_chunk_attention_is_plain_within_a_chunk(caplog: pytest.LogCaptureFixture) -> None:
    """As Qwen2.5-1M has it."""
    with caplog.at_level(logging.WARNING):
        assert configs.read(CHUNKS).context_length == 253952
    assert "the context is 253952 tokens, not 1010000" in caplog.text
    assert configs.read(CHUNKS, 253952).context_length == 253952
    with pytest.raises(
        UnsupportedModelError, match=r"300000 tokens .* Choose one from 1 to 253952"
    ):
        configs.read(CHUNKS, 300000)
    short = {**CHUNKS, "max_position_embeddings": 4096}
    assert configs.read(short).context_length == 4096


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ({"chunk_size": 5}, "it needs the numbers chunk_size and local_size"),
        ({"chunk_size": 5.5, "local_size": 1}, "it needs the numbers"),
        ({"chunk_size": 5, "local_size": 5}, "the first must be larger"),
    ],
)
def test_chunks_that_are_none(chunks: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        configs.read({**CHUNKS, "dual_chunk_attention_config": chunks})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_theta": 5e5, "rope_type": "default"}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0},
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True}},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        ),
        (
            {"partial_rotary_factor": 1.0, "rope_scaling": None},
            {"partial_rotary_factor": 1.0, "rope_theta": 10_000},
        ),
        (
            {
                "original_max_position_embeddings": 64,
                "rope_scaling": {"rope_type": "yarn", "factor": None},
            },
            {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64},
        ),
        ({"original_max_position_embeddings": 64}, {"rope_type": "default"}),
        (
            {
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "linear", "factor": 2},
            },
            {"rope_type": "linear", "factor": 2.0},
        ),
    ],
)
def test_old_and_new_rope_spellings_agree(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read(**old) == read(rope_parameters=new)


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 8, "max_window_layers": 1}, (None, None, None)),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            (None, 8, 8),
        ),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 0,
                "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            },
            (None, 8, None),
        ),
    ],
)
def test_sliding_windows_of_qwen2(changes: dict[str, Any], windows: tuple[Any, ...]) -> None:
    assert qwen2(**changes).sliding_window == windows


def test_sliding_window_of_mistral() -> None:
    mistral = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_key_value_heads": 2,
    }
    assert read(**mistral).sliding_window == (4096,) * 3  # as MistralConfig has it
    assert read(**mistral, sliding_window=8).sliding_window == (8, 8, 8)
    assert read(**mistral, sliding_window=None).sliding_window == (None, None, None)
    with pytest.raises(UnsupportedModelError, match="layer_types"):
        read(**mistral, sliding_window=8, layer_types=["full_attention"] * 3)


def test_sliding_window_of_smollm3() -> None:
    smollm3 = {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layers": [1, 0, 1],
        "sliding_window": 8,
    }
    sliding = {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
    assert read(**smollm3).sliding_window == (None, None, None)
    assert read(**smollm3, use_sliding_window=True).sliding_window == (None, 8, None)
    assert read(**smollm3, use_sliding_window=True, **sliding).sliding_window == (8, None, None)
    for changes in ({}, {"use_sliding_window": True, "sliding_window": None}):
        with pytest.raises(UnsupportedModelError, match="only with use_sliding_window"):
            read(**{**smollm3, **sliding, **changes})


def test_rope_of_phi3() -> None:
    """As transformers reads it: the original length at the top, 4096 where it is not there."""
    phi3 = {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"}
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    for original in (64, 4096):
        inner = {**rope, "original_max_position_embeddings": original}
        spec = read(**phi3, rope_parameters=inner, original_max_position_embeddings=original)
        assert spec.rope.original_context_length == original
    assert read(**phi3, rope_parameters=inner) == spec
    with pytest.raises(UnsupportedModelError, match="at the top"):
        read(**phi3, rope_parameters={**rope, "original_max_position_embeddings": 64})
    for kind in ("linear", "yarn"):
        with pytest.raises(UnsupportedModelError, match=f"is '{kind}'; a Phi-3"):
            read(**phi3, rope_parameters={"rope_type": kind, "factor": 2.0})


@pytest.mark.parametrize("key", ["embedding_multiplier", "residual_multiplier", "logits_scaling"])
@pytest.mark.parametrize("value", [0, -1.0, math.inf])
def test_multipliers_of_granite_are_positive(key: str, value: float) -> None:
    granite = {"architectures": ["GraniteForCausalLM"], "model_type": "granite"}
    assert read(**granite).residual_scale == 1
    with pytest.raises(CheckpointError, match=key):
        read(**granite, **{key: value})


def test_an_unsupported_architecture_lists_the_supported() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(architectures=["MambaForCausalLM"])
    assert "MambaForCausalLM" in str(caught.value)
    for family in FAMILIES:
        assert family.architecture in str(caught.value)


def test_the_model_type_serves_where_no_architecture_is_named() -> None:
    assert read(architectures=None).family == "llama"
    named = {"model_type": "kimi_k2", "architectures": None}
    assert find_family(Config(named, Path("config.json"))).name == "deepseek_v3"
    with pytest.raises(UnsupportedModelError, match="no architecture"):
        read(architectures=None, model_type=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": {"quant_method": "gptq"}},
        {"attn_logit_softcapping": 50.0},
        {"sliding_window": 128},  # Llama has none
        {"logits_scaling": 2.0},
        {"is_decoder": True},
        {"rope_interleaved": True},
        {"hidden_act": "gelu"},
        {"partial_rotary_factor": 0.5},  # transformers ignores it
        {"model_type": "qwen2"},  # with Llama's architecture
        {
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 4.0},
        },
        {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
        },
        {"rope_scaling": {"type": "proportional", "factor": 2.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0, "beta": 1}},
        {"rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        {
            "rope_scaling": {
                "type": "dynamic",
                "factor": 2.0,
                "original_max_position_embeddings": 128,
            }
        },
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(**changes)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_cache": False, "torch_dtype": "bfloat16", "transformers_version": "4.40"},
        {"quantization_config": None, "sliding_window": None, "anything": None},
        {"rope_interleaved": False, "is_decoder": False, "pretraining_tp": 2},
        {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}, "top_p": 0.9},
    ],
)
def test_what_changes_nothing_is_accepted(changes: dict[str, Any]) -> None:
    assert read(**changes) == read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "lacks the key 'hidden_size'"),
        ({"hidden_size": "64"}, "'hidden_size' is '64', expected a value of type int"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' is True"),
        ({"num_key_value_heads": 3}, "not a multiple of num_kv_heads 3"),
        ({"vocab_size": 0}, "vocab_size must be positive"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "'factor' is '2', not a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "'factor' is 0, out of range"),
        ({"rope_theta": math.inf}, "'rope_theta' is inf, out of range"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps is inf"),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 1.0,
                }
            },
            "the first must not be smaller",
        ),
        ({"partial_rotary_factor": 0.3, "head_dim": 10}, "rotary_dim 3 must be"),
    ],
)
def test_a_configuration_that_makes_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match="config") as caught:
        read(**changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_file_that_is_no_object(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match="JSON"):
        Config.read(tmp_path)


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        Config.read(tmp_path)
