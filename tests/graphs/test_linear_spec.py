"""Layers without attention in an ArchSpec: strict JSON, and no contradiction."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from onnxport.errors import ArtifactError
from onnxport.graphs import contract
from onnxport.graphs.draft_spec import DraftSpec
from onnxport.graphs.linear_spec import (
    LinearAttentionSpec,
    LinearSpec,
    ShortConvSpec,
    StateSpaceSpec,
)
from onnxport.graphs.spec import ArchSpec
from tests.graphs.artifacts import SPEC as PLAIN

LINEAR = LinearAttentionSpec(
    key_heads=2,
    value_heads=6,
    key_size=16,
    value_size=8,
    kernel=4,
    layers=(True, True, False, True),
)
BASE = replace(PLAIN, qkv_bias=False, num_layers=4, sliding_window=(None,) * 4)
SPEC = replace(BASE, linear=LINEAR, attention_gate=True)
SPACE = StateSpaceSpec(
    heads=6,
    head_size=8,
    groups=2,
    state_size=16,
    kernel=4,
    conv_bias=True,
    layers=(True, True, False, True),
)
CONV = ShortConvSpec(
    channels=BASE.hidden_size, kernel=3, bias=False, layers=(True, False, False, True)
)


def test_it_survives_json() -> None:
    stored = json.loads(json.dumps(SPEC.to_json()))
    assert stored.keys() - BASE.to_json().keys() == {"linear", "attention_gate"}
    assert stored["linear"]["layers"] == [True, True, False, True]
    assert ArchSpec.from_json(stored) == SPEC
    assert ArchSpec.from_json(BASE.to_json()) == BASE


@pytest.mark.parametrize(("linear", "kind"), [(SPACE, "state_space"), (CONV, "short_convolution")])
def test_kinds_are_told_apart(linear: LinearSpec, kind: str) -> None:
    spec = replace(BASE, linear=linear)
    stored = json.loads(json.dumps(spec.to_json()))
    assert stored["linear"]["kind"] == kind
    assert ArchSpec.from_json(stored) == spec
    assert spec.linear_layers == tuple(i for i in range(4) if linear.layers[i])
    for wrong in ({"kind": "s4"}, {"kind": 3}, {"kind": None}):
        with pytest.raises(ArtifactError, match=r"linear\.kind is .* this version of onnxport"):
            ArchSpec.from_json(stored | {"linear": stored["linear"] | wrong})
    del stored["linear"]["kind"]
    with pytest.raises(ArtifactError, match="missing 'key_heads'"):
        ArchSpec.from_json(stored)


def test_gated_delta_nets_have_no_kind() -> None:
    assert set(SPEC.to_json()["linear"]) == {
        *("key_heads", "value_heads", "key_size", "value_size", "kernel", "layers")
    }


def test_layers_have_keys_and_values_or_a_state() -> None:
    assert SPEC.cached_layers == (2,)
    assert SPEC.linear_layers == (0, 1, 3)
    assert [SPEC.is_linear(layer) for layer in range(4)] == [True, True, False, True]
    assert BASE.cached_layers == (0, 1, 2, 3)
    assert BASE.linear_layers == ()
    assert not BASE.is_linear(0)


def test_sizes_of_a_state() -> None:
    assert (LINEAR.key_width, LINEAR.value_width, LINEAR.channels) == (32, 48, 112)
    assert LINEAR.conv_state == (112, 3)
    assert LINEAR.recurrent_state == (6, 8, 16)
    assert LINEAR.projected_width == 112 + 2 * 48
    assert (SPACE.value_width, SPACE.group_width, SPACE.channels) == (48, 32, 112)
    assert (SPACE.conv_state, SPACE.recurrent_state) == ((112, 3), (6, 8, 16))
    assert SPACE.projected_width == 112 + 2 * 48
    assert (CONV.conv_state, CONV.recurrent_state) == ((BASE.hidden_size, 2), None)
    assert CONV.projected_width == 4 * BASE.hidden_size


def test_names_of_states() -> None:
    names = [
        contract.past_conv_state(3),
        contract.present_conv_state(3),
        contract.past_recurrent_state(3),
        contract.present_recurrent_state(3),
    ]
    assert names == [
        "past_conv_state.3",
        "present_conv_state.3",
        "past_recurrent_state.3",
        "present_recurrent_state.3",
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key_heads": 0}, "key_heads of linear attention must be positive, is 0"),
        ({"value_size": -8}, "value_size of linear attention must be positive, is -8"),
        ({"value_heads": 5}, "value_heads 5 of linear attention are no multiple of key_heads 2"),
        ({"kernel": 1}, "kernel of linear attention must be above 1, is 1"),
        ({"kernel": 4.5}, "kernel"),
        ({"layers": [True, True, False, 1]}, "linear.layers has an entry that is no bool"),
        ({"layers": [True] * 4}, "some must be such, and some not"),
        ({"layers": [False] * 4}, "some must be such, and some not"),
        ({"layers": [True, False]}, "for 4 layers"),
        ({"layers": None}, "layers"),
        ({"gate": True}, "gate"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    stored = SPEC.to_json()
    with pytest.raises(ArtifactError, match=message):
        ArchSpec.from_json(stored | {"linear": stored["linear"] | changes})


@pytest.mark.parametrize(
    ("linear", "changes", "message"),
    [
        (SPACE, {"heads": 0}, "heads of state spaces must be positive, is 0"),
        (SPACE, {"state_size": -1}, "state_size of state spaces must be positive, is -1"),
        (SPACE, {"groups": 4}, "heads 6 of state spaces are no multiple of groups 4"),
        (SPACE, {"kernel": 1}, "kernel of state spaces must be above 1, is 1"),
        (SPACE, {"conv_bias": 1}, "conv_bias"),
        (SPACE, {"layers": [False] * 4}, "some must be such, and some not"),
        (CONV, {"channels": 0}, "channels of short convolutions must be positive, are 0"),
        (CONV, {"channels": 7}, "a channel for each of the residual stream's"),
        (CONV, {"kernel": 1}, "kernel of short convolutions must be above 1, is 1"),
        (CONV, {"layers": [True] * 4}, "some must be such, and some not"),
    ],
)
def test_so_are_contradictions_of_other_kinds(
    linear: LinearSpec, changes: dict[str, Any], message: str
) -> None:
    stored = replace(BASE, linear=linear).to_json()
    with pytest.raises(ArtifactError, match=message):
        ArchSpec.from_json(stored | {"linear": stored["linear"] | changes})


@pytest.mark.parametrize("wrong", [{"linear": []}, {"attention_gate": 1}])
def test_other_types_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ArtifactError, match=next(iter(wrong))):
        ArchSpec.from_json(SPEC.to_json() | wrong)


def test_no_windows_and_no_draft_heads_beside_them() -> None:
    with pytest.raises(ValueError, match="has no sliding window"):
        replace(SPEC, sliding_window=(None, 8, None, None))
    draft = DraftSpec(
        vocab_size=8,
        target_hidden_size=8,
        target_num_layers=1,
        target_layers=(0,),
        norm_before_residual=False,
        joint_norm=False,
        apart_norm=False,
        norm_output=False,
    )
    with pytest.raises(ValueError, match="a draft head has attention in each layer"):
        replace(SPEC, draft=draft)


def test_gates_of_attention_that_has_no_biases() -> None:
    with pytest.raises(ValueError, match="attention_gate and qkv_bias exclude each other"):
        replace(SPEC, qkv_bias=True)
