"""Families that are others with a difference: GLM 4 of 2025, FlexOlmo and InternLM3."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from onnxport.errors import UnsupportedModelError
from onnxport.graphs.spec import ArchSpec
from tests.exporter.configs import read, respelled

# What is known of published files: no hub is at hand.
GLM4: dict[str, Any] = {
    "architectures": ["Glm4ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 23040,
    "max_position_embeddings": 32768,
    "model_type": "glm4",
    "num_attention_heads": 48,
    "num_hidden_layers": 61,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 151552,
}
FLEX_OLMO: dict[str, Any] = {
    "architectures": ["FlexOlmoForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "flex_olmo",
    "norm_topk_prob": False,
    "num_attention_heads": 32,
    "num_experts": 7,
    "num_experts_per_tok": 5,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_theta": 500000,
    "router_aux_loss_coef": 0.01,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
INTERNLM3: dict[str, Any] = {
    "architectures": ["InternLM3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_internlm3.InternLM3Config"},
    "bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10240,
    "max_position_embeddings": 32768,
    "model_type": "internlm3",
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "qkv_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
    "rope_theta": 50000000,
    "tie_word_embeddings": False,
    "vocab_size": 128512,
}


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A file, some keys left out."""
    return {key: one for key, one in values.items() if key not in keys}


@pytest.mark.parametrize(
    "values", [GLM4, FLEX_OLMO, INTERNLM3], ids=["glm4", "flex_olmo", "internlm3"]
)
def test_published_files_are_understood_in_both_spellings(values: dict[str, Any]) -> None:
    spec = read(values)
    assert spec.family == values["model_type"]
    assert read(respelled(values)) == spec
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_what_they_are() -> None:
    glm, olmo, intern = map(read, (GLM4, FLEX_OLMO, INTERNLM3))
    assert (glm.output_norms, glm.raw_inputs, glm.qkv_bias) == (True, None, False)
    assert (glm.rope.rotary_dim, glm.rope.interleaved) == (64, True)
    assert read(without(GLM4, "attention_bias")).qkv_bias
    assert (olmo.output_norms, olmo.raw_inputs, olmo.whole_qk_norm) == (True, True, True)
    assert olmo.experts is not None
    assert (olmo.experts.count, olmo.experts.per_token, olmo.experts.size) == (7, 5, 11008)
    assert not olmo.experts.normalized
    absent = ("num_experts", "num_experts_per_tok", "rope_theta", "norm_topk_prob")
    assert read(without(FLEX_OLMO, *absent)) == olmo
    assert (intern.rope.type, intern.num_kv_heads, intern.head_size) == ("dynamic", 2, 128)
    assert read(without(INTERNLM3, "head_dim", "num_key_value_heads", "bias")) == intern
    assert not any((intern.qkv_bias, intern.o_bias, intern.mlp_bias))


def test_biases_of_internlm3_are_everywhere_or_nowhere() -> None:
    biased = replace(read(INTERNLM3), qkv_bias=True, o_bias=True, mlp_bias=True)
    assert read({**INTERNLM3, "qkv_bias": True, "bias": True}) == biased
    plain = without(INTERNLM3, "qkv_bias", "bias")
    assert read({**plain, "attention_bias": True, "mlp_bias": True}) == biased
    for told in (
        {"qkv_bias": True},
        {"bias": True},
        {"qkv_bias": True, "attention_bias": False, "bias": True},
    ):
        with pytest.raises(UnsupportedModelError, match="supported are all or none"):
            read({**plain, **told})


def test_internlm3_as_transformers_writes_it_is_no_llama() -> None:
    """Transformers has no class of its own for it."""
    assert read({**INTERNLM3, "architectures": ["LlamaForCausalLM"]}) == read(INTERNLM3)
    with pytest.raises(UnsupportedModelError, match="which is another model's"):
        read({**INTERNLM3, "architectures": ["LlamaForCausalLM"], "model_type": "glm4"})


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({**GLM4, "sliding_window": 4096}, "sliding_window"),
        ({**GLM4, "hidden_act": "gelu"}, "hidden_act"),
        ({**FLEX_OLMO, "num_shared_experts": 1}, "num_shared_experts"),
        ({**INTERNLM3, "partial_rotary_factor": 0.5}, "64 of 128 channels"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_would_change_the_result_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        read(values)
