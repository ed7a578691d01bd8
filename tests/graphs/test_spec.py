"""ArchSpec and RopeSpec: strict JSON, and no contradiction."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxport.errors import ArtifactError
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.heads_spec import HeadsSpec
from onnxport.graphs.rope_spec import ROPE_PARAMETERS, RopeSpec
from onnxport.graphs.spec import ArchSpec
from tests.graphs.artifacts import LATENT, OF_LATENTS, SPEC

PARAMETERS: dict[str, Any] = {
    "factor": 4.0,
    "original_context_length": 32,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": True,
    "factors": (1.0,) * 16,
    "rotated_pairs": 4,
}


def rope(kind: str, **changes: Any) -> RopeSpec:
    fields = {name: PARAMETERS[name] for name in ROPE_PARAMETERS[kind]} | changes
    return RopeSpec(type=kind, theta=1e4, rotary_dim=32, **fields)


@pytest.mark.parametrize("kind", sorted(ROPE_PARAMETERS))
def test_every_rope_type_survives_json(kind: str) -> None:
    spec = replace(SPEC, rope=rope(kind))
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_what_artifacts_of_before_lack_is_written_where_it_is_something() -> None:
    new = {"output_norms": True, "inner_norm_eps": 1e-6, "hidden_act": "gelu_tanh"}
    newest = {"raw_inputs": True, "whole_qk_norm": True}
    newest |= {"attention_softcap": 50.0, "logits_softcap": 30.0}
    spec = replace(SPEC, local_rope=rope("linear"), **new, **newest)
    stored = json.loads(json.dumps(spec.to_json()))
    assert ArchSpec.from_json(stored) == spec
    later = {"output_norms", "inner_norm_eps", "local_rope", *newest}
    assert stored.keys() - SPEC.to_json().keys() == later
    for key in later:
        del stored[key]
    assert ArchSpec.from_json(stored) == replace(SPEC, hidden_act="gelu_tanh")
    wrongs = {"local_rope": [], "output_norms": 1, "inner_norm_eps": "1", "raw_inputs": 1}
    for key, wrong in wrongs.items():
        with pytest.raises(ArtifactError, match=key):
            ArchSpec.from_json(SPEC.to_json() | {key: wrong})


def test_layers_with_a_window_may_have_a_rotary_embedding_of_their_own() -> None:
    assert SPEC.sliding_window == (None, 8)
    local = rope("linear")
    spec = replace(SPEC, local_rope=local)
    assert (spec.rope_of(0), spec.rope_of(1)) == spec.ropes == (SPEC.rope, local)
    assert SPEC.ropes == (SPEC.rope,)
    assert replace(spec, sliding_window=(None, None)).ropes == (SPEC.rope,)
    assert replace(spec, rotated_layers=(False, True)).ropes == (local,)
    assert replace(spec, rotated_layers=(False, False)).ropes == ()
    with pytest.raises(ValueError, match="local_rope"):
        replace(SPEC, local_rope=replace(local, rotary_dim=34))


EXPERTS = ExpertsSpec(count=8, per_token=2, size=48, normalized=True)


def test_biases_and_activations_of_experts_are_written_where_there_are_some() -> None:
    new = {"biased": True, "alpha": 1.702, "up_offset": 1.0, "limit": 7.0}
    assert not new.keys() & EXPERTS.to_json().keys()
    spec = replace(SPEC, experts=replace(EXPERTS, **new))
    stored = json.loads(json.dumps(spec.to_json()))
    assert stored["experts"] == EXPERTS.to_json() | new
    assert ArchSpec.from_json(stored) == spec


@pytest.mark.parametrize("experts", [EXPERTS, replace(EXPERTS, layers=(False, True))])
def test_experts_survive_json(experts: ExpertsSpec) -> None:
    spec = replace(SPEC, experts=experts)
    stored = json.loads(json.dumps(spec.to_json()))
    assert stored.keys() - SPEC.to_json().keys() == {"experts"}
    assert ArchSpec.from_json(stored) == spec
    assert ("layers" in stored["experts"]) == (experts.layers is not None)
    of_layers = [spec.experts_of(layer) for layer in range(2)]
    assert of_layers == ([experts] * 2 if experts.layers is None else [None, experts])
    assert SPEC.experts_of(1) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": 0}, "count"),
        ({"per_token": 9}, "given to 9 experts, of 8"),
        ({"size": -1}, "size"),
        ({"normalized": 1}, "normalized"),
        ({"count": 2.5}, "count"),
        ({"layers": [True, 1]}, "layers"),
        ({"layers": [True]}, "for 2 layers"),
        ({"shared": 1}, "shared"),
        ({"biased": 1}, "biased"),
        ({"alpha": 0.0}, "alpha of the experts must be positive: 0.0"),
        ({"limit": -7.0}, "limit of the experts must be positive: -7.0"),
        ({"limit": True}, "limit"),
        ({"up_offset": "1"}, "up_offset"),
    ],
)
def test_experts_that_are_wrong_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        ArchSpec.from_json(SPEC.to_json() | {"experts": EXPERTS.to_json() | changes})


GROUPS = {"groups": 4, "groups_per_token": 2, "group_best": 2}


def test_groups_of_experts_survive_json() -> None:
    spec = replace(SPEC, experts=replace(EXPERTS, **GROUPS))
    stored = json.loads(json.dumps(spec.to_json()))
    assert stored["experts"] == EXPERTS.to_json() | GROUPS
    assert ArchSpec.from_json(stored) == spec


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"groups_per_token": None}, "need each other"),
        ({"groups": None}, "need each other"),
        ({"group_best": True}, "group_best"),
        ({"groups": 3}, "8 experts cannot be 3 equal groups"),
        ({"groups": 1}, "8 experts cannot be 1 equal groups"),
        ({"groups_per_token": 5}, "of 4 groups a token is given to 5"),
        ({"group_best": 3}, "of a group's 2 experts 3 say so"),
        ({"groups_per_token": 1, "per_token": 3}, "to 3 experts, of 1 groups of 2"),
    ],
)
def test_groups_that_are_wrong_are_refused(changes: dict[str, Any], message: str) -> None:
    experts = EXPERTS.to_json() | GROUPS | changes
    with pytest.raises(ArtifactError, match=message):
        ArchSpec.from_json(SPEC.to_json() | {"experts": experts})


@pytest.mark.parametrize("rank", [None, 48])
def test_latent_attention_survives_json_and_has_one_cache_a_layer(rank: int | None) -> None:
    spec = replace(OF_LATENTS, latent=replace(LATENT, query_rank=rank))
    stored = json.loads(json.dumps(spec.to_json()))
    assert ArchSpec.from_json(stored) == spec
    assert (spec.cache_parts, SPEC.cache_parts) == (1, 2)
    assert (LATENT.row_size, LATENT.query_size) == (40, 24)
    assert spec.attended_size == spec.num_heads * 24
    assert SPEC.attended_size == SPEC.q_size
    assert "latent" not in SPEC.to_json()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 2}, "one row of 40 channels"),
        ({"head_size": 48}, "one row of 40 channels"),
        ({"rope": RopeSpec(type="default", theta=1e4, rotary_dim=16)}, "rotary_dim is 16"),
        ({"rotated_layers": (True, False)}, "rotated_layers are"),
        ({"attention_scale": None}, "needs an attention_scale"),
        ({"qkv_bias": True, "qk_norm": True}, "does not go with qkv_bias and qk_norm"),
        ({"attention_sinks": True}, "attention_sinks"),
        ({"attention_softcap": 1.0}, "attention_softcap"),
        ({"sliding_window": (None, 8)}, "sliding_window"),
    ],
)
def test_what_does_not_go_with_latent_attention_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(OF_LATENTS, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"kv_rank": 0}, "kv_rank"), ({"query_rank": -1}, "query_rank"), ({"v": 1}, "unknown 'v'")],
)
def test_latent_attention_that_is_wrong_is_refused(changes: dict[str, Any], message: str) -> None:
    value = OF_LATENTS.to_json()
    with pytest.raises(ArtifactError, match=message):
        ArchSpec.from_json(value | {"latent": value["latent"] | changes})


def test_experts_whose_activation_is_bounded_have_a_silu() -> None:
    assert replace(SPEC, experts=EXPERTS, hidden_act="gelu_tanh").experts == EXPERTS
    for name in ("alpha", "up_offset", "limit"):
        with pytest.raises(ValueError, match="activation silu"):
            replace(SPEC, experts=replace(EXPERTS, **{name: 2.0}), hidden_act="gelu_tanh")


def test_scales_and_epsilons_with_norms_on_outputs() -> None:
    scaled = replace(SPEC, residual_scale=0.5)
    assert (SPEC.output_scale, scaled.output_scale) == (1, 0.5)
    assert replace(scaled, output_norms=True).output_scale == 1  # then the norms are
    assert SPEC.inner_eps == SPEC.rms_norm_eps
    assert replace(SPEC, inner_norm_eps=0.5).inner_eps == 0.5


@pytest.mark.parametrize("kind", sorted(ROPE_PARAMETERS))
def test_rope_parameters_are_those_of_the_type(kind: str) -> None:
    for name, value in PARAMETERS.items():
        if name in ROPE_PARAMETERS[kind]:
            with pytest.raises(ValueError, match=f"{name} is missing"):
                rope(kind, **{name: None})
        else:
            with pytest.raises(ValueError, match=f"{name} is not a parameter"):
                rope(kind, **{name: value})


@pytest.mark.parametrize("key", sorted(SPEC.to_json()))
def test_every_key_of_the_model_is_needed(key: str) -> None:
    value = SPEC.to_json()
    del value[key]
    with pytest.raises(ArtifactError, match=f"missing '{key}'"):
        ArchSpec.from_json(value)


@pytest.mark.parametrize("key", sorted(SPEC.rope.to_json()))
def test_every_key_of_rope_is_needed(key: str) -> None:
    value = SPEC.to_json()
    del value["rope"][key]
    with pytest.raises(ArtifactError, match=f"missing '{key}'"):
        ArchSpec.from_json(value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_layers", True),
        ("num_layers", 2.0),
        ("num_layers", "2"),
        ("qkv_bias", 1),
        ("rms_norm_eps", float("nan")),
        ("rms_norm_eps", None),
        ("family", None),
        ("sliding_window", None),
        ("sliding_window", [None, "8"]),
        ("sliding_window", [None, True]),
        ("rope", None),
        ("rope", []),
    ],
)
def test_wrong_types_are_refused(key: str, value: Any) -> None:
    with pytest.raises(ArtifactError, match=key):
        ArchSpec.from_json(SPEC.to_json() | {key: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "multiple"),
        ({"num_layers": 0}, "num_layers"),
        ({"head_size": -1}, "head_size"),
        ({"sliding_window": (None,)}, "1 entries for 2 layers"),
        ({"sliding_window": (None, 0)}, "positive or None"),
        ({"hidden_act": "tanh"}, "hidden_act"),
        ({"head_size": 16}, "rotary_dim 32 exceeds"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"inner_norm_eps": 0.0}, "inner_norm_eps"),
        ({"rotated_layers": (True,)}, "for 2 layers"),
        ({"attention_softcap": 0.0}, "attention_softcap"),
        ({"logits_softcap": -30.0}, "logits_softcap"),
        ({"raw_inputs": True, "residual_scale": 0.5}, "residual_scale needs norms"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, **changes)
    value = SPEC.to_json() | {k: list(v) if isinstance(v, tuple) else v for k, v in changes.items()}
    with pytest.raises(ArtifactError, match=message):
        ArchSpec.from_json(value)


def test_an_odd_rotary_dim_and_an_unknown_type_are_refused() -> None:
    with pytest.raises(ValueError, match="even"):
        RopeSpec(type="default", theta=1e4, rotary_dim=31)
    with pytest.raises(ValueError, match="longrope"):
        RopeSpec(type="longrope", theta=1e4, rotary_dim=32)


def test_sizes_and_scale() -> None:
    assert (SPEC.q_size, SPEC.kv_size, SPEC.qkv_size) == (128, 64, 256)
    assert SPEC.scale == pytest.approx(32**-0.5)
    assert replace(SPEC, attention_scale=0.25).scale == 0.25


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    )
)
def test_anything_else_is_an_artifact_error(value: Any) -> None:
    with pytest.raises(ArtifactError):
        ArchSpec.from_json(value)
    with pytest.raises(ArtifactError):
        ArchSpec.from_json(SPEC.to_json() | {"rope": value})


MIXED = replace(
    SPEC,
    qk_norm=True,
    qkv_bias=False,
    output_norms=True,
    num_layers=4,
    sliding_window=(8, None, 8, None),
    local_rope=rope("linear"),
    attention_scale=1.0,
    global_heads=HeadsSpec(head_size=64, num_kv_heads=1, keys_are_values=True),
    value_norm=True,
    shared_kv_layers=2,
    shared_kv_intermediate_size=8,
    layer_scales=True,
    layer_input_size=4,
)


def test_layers_that_differ_survive_json() -> None:
    assert ArchSpec.from_json(json.loads(json.dumps(MIXED.to_json()))) == MIXED
    assert [MIXED.kv_source(layer) for layer in range(4)] == [0, 1, 0, 1]
    assert MIXED.cached_layers == (0, 1)
    assert not MIXED.has_even_caches
    assert [len(MIXED.qkv_parts(layer)) for layer in range(4)] == [3, 2, 1, 1]
    assert not {"global_heads", "layer_scales", "value_norm"} & set(SPEC.to_json())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv_bias": True}, "does not go with qkv_bias"),
        ({"qk_norm": False}, "does not go with qk_norm = false"),
        ({"output_norms": None}, "does not go with output_norms = false"),
        ({"local_rope": None}, "needs a local_rope"),
        ({"attention_scale": None}, "needs an attention_scale"),
        ({"sliding_window": (8,) * 4}, "with and without a window"),
        ({"sliding_window": (None,) * 4}, "with and without a window"),
        ({"shared_kv_layers": 4}, "shared_kv_layers is 4 of 4 layers"),
        ({"shared_kv_layers": 3}, "one of each window"),
        ({"shared_kv_layers": 0}, "shared_kv_layers is 0"),
        ({"shared_kv_layers": None}, "needs shared_kv_layers"),
        ({"layer_input_size": 0}, "layer_input_size must be positive"),
        ({"global_heads": {"head_size": 64}}, "missing 'num_kv_heads'"),
        (
            {"global_heads": {"head_size": 64, "num_kv_heads": 0, "keys_are_values": False}},
            "num_kv_heads of global heads must be positive, is 0",
        ),
        (
            {"global_heads": {"head_size": 64, "num_kv_heads": 3, "keys_are_values": False}},
            "not a multiple of the 3 KV heads",
        ),
        (
            {"global_heads": {"head_size": 16, "num_kv_heads": 1, "keys_are_values": False}},
            "rotary_dim 32 exceeds head_size 16",
        ),
    ],
)
def test_layers_that_differ_and_are_wrong_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArtifactError, match=message):
        ArchSpec.from_json(json.loads(json.dumps(MIXED.to_json() | changes)))


@pytest.mark.parametrize("pairs", [0, -1, 17])
def test_pairs_that_turn_are_some_of_all(pairs: int) -> None:
    with pytest.raises(ValueError, match="from 1 to the 16 pairs"):
        rope("proportional", rotated_pairs=pairs)


def test_experts_apart_need_a_shared_layer_and_norms_of_what_they_add() -> None:
    apart = replace(EXPERTS, shared_size=8, shared_gated=None, apart=True)
    spec = replace(SPEC, experts=apart, output_norms=True)
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    for changes in ({"shared_size": None}, {"shared_gated": True}):
        with pytest.raises(ValueError, match="need a shared layer without a gate"):
            replace(apart, **changes)
    with pytest.raises(ValueError, match="experts apart need output_norms"):
        replace(spec, output_norms=None)
