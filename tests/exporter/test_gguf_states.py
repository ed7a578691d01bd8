"""What metadata of GGUF files mean of models with state spaces, and of Gemma 3n and 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.graphs.altup_spec import AltUpSpec
from onnxport.graphs.linear_spec import LinearAttentionSpec, StateSpaceSpec
from tests.exporter.test_gguf_config import facts, spec

MULTIPLIER = {"embedding_scale": 12.0}
FREQUENCIES = "rope_freqs.weight"


@pytest.mark.parametrize(
    ("keys", "family", "rotates"),
    [
        ({"rope__scaling__finetuned": True}, "bamba", True),
        ({"rope__scaling__finetuned": None}, "bamba", True),
        ({"rope__scaling__finetuned": False}, "granitemoehybrid", False),
        ({"rope__scaling__finetuned": True, **MULTIPLIER}, "granitemoehybrid", True),
    ],
)
def test_who_has_state_spaces(keys: dict[str, Any], family: str, rotates: bool) -> None:
    read = spec(facts("granitehybrid", **keys))
    assert read.family == family
    assert (read.rotated_layers is None) == rotates
    assert isinstance(read.linear, StateSpaceSpec)
    assert (read.linear.layers, read.linear.head_size) == ((True, False), 32)
    assert read.intermediate_size == 96


def test_sizes_of_state_spaces() -> None:
    with pytest.raises(UnsupportedModelError, match=r"inner_size is 96; supported is a multiple"):
        spec(facts("granitehybrid", ssm__inner_size=96))
    with pytest.raises(CheckpointError, match=r"inner_size is 90, of 4 heads"):
        spec(facts("nemotron_h", ssm__inner_size=90))


@pytest.mark.parametrize("architecture", ["granite", "granitemoe"])
def test_granite_4_without_state_spaces(architecture: str) -> None:
    """Whose files tell sizes of these all the same; it may not say that nothing rotates."""
    keys: dict[str, Any] = {
        **{"ssm__conv_kernel": 4, "ssm__inner_size": 128, "ssm__state_size": 16},
        **{"expert_count": 0, "expert_used_count": 0, "expert_shared_feed_forward_length": 96},
    }
    read = spec(facts(architecture, **keys))
    assert (read.family, read.linear, read.experts) == ("granite", None, None)
    with pytest.raises(UnsupportedModelError, match=r"finetuned is False; of the architecture"):
        spec(facts(architecture, rope__scaling__finetuned=False))


def test_blocks_of_nemotron_h() -> None:
    read = spec(facts("nemotron_h"))
    assert (read.num_layers, read.linear_layers, read.mlp_layers) == (2, (0,), (False, True))
    keys = {"block_count": 4, "nextn_predict_layers": 1, "feed_forward_length": [0, 0, 32, 32]}
    further = spec(facts("nemotron_h_moe", attention__head_count_kv=[0, 4, 0, 4], **keys))
    assert further.num_layers == 2
    assert further.experts is not None
    assert (further.experts.layers, further.experts.size) == ((False, True), 32)
    with pytest.raises(UnsupportedModelError, match="moe_latent_size is 16"):
        spec(facts("nemotron_h_moe", moe_latent_size=16))


def test_kimi_linear() -> None:
    """Layers with heads of keys have attention; norms of latents have llama.cpp's epsilon."""
    read = spec(facts("kimi-linear", attention__layer_norm_rms_epsilon=1e-5))
    assert isinstance(read.linear, LinearAttentionSpec)
    assert (read.linear.layers, read.linear.gate_rank) == ((True, False), 16)
    assert (read.linear.value_heads, read.linear.value_size) == (4, 16)
    assert (read.cached_layers, read.ropes) == ((1,), ())
    assert read.inner_eps == read.rms_norm_eps == pytest.approx(1e-5)
    assert read.experts is not None
    assert (read.experts.scale, read.experts.normalized) == (2.5, True)
    for keys, message in (
        ({"expert_gating_func": 1}, "expert_gating_func is 1"),
        ({"expert_weights_norm": False}, "expert_weights_norm is False"),
        ({"attention__key_length": 40}, "key_length is 40"),
        ({"attention__head_count_kv": [0, 0]}, "all of the 2 layers are 'linear_attention'"),
    ):
        with pytest.raises(UnsupportedModelError, match=message):
            spec(facts("kimi-linear", **keys))


def test_layers_of_qwen3_next_as_a_list_tells() -> None:
    told = [True, False, True, False]
    keys = {"block_count": 4, "nextn_predict_layers": 1, "attention__recurrent_layers": told}
    assert spec(facts("qwen3next", **keys)).linear_layers == (0, 2)


def test_frequencies_of_gemma_4() -> None:
    read = spec(facts("gemma4"))
    assert (read.rope.type, read.rope.rotated_pairs) == ("proportional", 2)
    for numbers in ([1.0, 2.0, 1e30], [1e30] * 3, [1.0, 1e30, 1.0]):
        with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight holds \[1"):
            spec(facts("gemma4", numbers={FREQUENCIES: numbers}))
    with pytest.raises(CheckpointError, match=r"lacks rope_freqs\.weight"):
        spec(facts("gemma4", numbers={"other": [1.0]}))


def test_what_layers_of_gemma_4_share() -> None:
    keys: dict[str, Any] = {
        "block_count": 4,
        "attention__sliding_window_pattern": [True, False] * 2,
        "attention__shared_kv_layers": 2,
        "attention__head_count_kv": [2, 1] * 2,
        "feed_forward_length": [96, 96, 192, 192],
    }
    read = spec(facts("gemma4", **keys))
    assert (read.shared_kv_layers, read.shared_kv_intermediate_size) == (2, 192)
    assert read.global_heads is not None
    assert (read.num_kv_heads, read.global_heads.num_kv_heads) == (2, 1)
    assert read.global_heads.keys_are_values  # for no layer has a product of values
    own = spec(facts("gemma4", "blk.1.attn_v.weight", **keys))
    assert own.global_heads is None  # as many heads, of one size
    for key, value in (
        ("attention__head_count_kv", [2, 1, 4, 1]),
        ("feed_forward_length", [96, 192, 192, 192]),
    ):
        with pytest.raises(UnsupportedModelError, match=r"is \[.*\]; supported is one number"):
            spec(facts("gemma4", **keys | {key: value}))
    for shared in (-1, 4):
        with pytest.raises(CheckpointError, match=f"shared_kv_layers is {shared}, of 4 layers"):
            spec(facts("gemma4", **keys | {"attention__shared_kv_layers": shared}))
    with pytest.raises(UnsupportedModelError, match="dimension_count_swa is 8"):
        spec(facts("gemma4", rope__dimension_count_swa=8))


def test_what_is_gated_in_falcon_h1() -> None:
    """A norm where there is one, behind the gate; and states of any width."""
    plain, normed = spec(facts("falcon-h1")), spec(facts("falcon-h1", "blk.0.ssm_norm.weight"))
    for read, without in ((plain, True), (normed, None)):
        assert read.has_both
        assert isinstance(read.linear, StateSpaceSpec)
        assert read.linear.without_norm is without
        assert read.multipliers is None
    odd = spec(facts("falcon-h1", ssm__inner_size=80)).linear
    assert isinstance(odd, StateSpaceSpec)
    assert (odd.heads, odd.head_size) == (4, 20)


def test_streams_of_gemma_3n() -> None:
    read = spec(facts("gemma3n"))
    assert read.altup == AltUpSpec(streams=4, active=0, scaled=True, laurel_rank=24)
    assert (read.layer_input_size, read.layer_input_rows) == (16, 90)
    assert read.gate_cutoffs is not None
    assert read.gate_cutoffs[1] is None
    assert read.gate_cutoffs[0] == pytest.approx(1.5, abs=1e-6)
    assert read.sliding_window == (8, None)
    for scales in ([1.5], [float("nan"), 0.0], [float("inf"), 0.0], [True, False]):
        with pytest.raises(CheckpointError, match="activation_sparsity_scale"):
            spec(facts("gemma3n", activation_sparsity_scale=scales))
    found = facts("gemma3n")
    shapes = {key: one for key, one in found.shapes.items() if "laurel" not in key}
    with pytest.raises(CheckpointError, match=r"lacks blk\.0\.laurel_l\.weight"):
        spec(replace(found, shapes=shapes))
    with pytest.raises(UnsupportedModelError, match="one number for all layers"):
        spec(facts("gemma3n", feed_forward_length=[96, 128]))
