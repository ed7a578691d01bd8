"""Feed-forward layers without gates, and layers without any, in an ArchSpec."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from onnxport.errors import ArtifactError
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.spec import ArchSpec
from tests.graphs.artifacts import SPEC as PLAIN

BASE = replace(PLAIN, num_layers=3, sliding_window=(None,) * 3)
SPEC = replace(BASE, hidden_act="relu2", ungated=True, mlp_layers=(True, False, True))


def test_it_survives_json() -> None:
    stored = json.loads(json.dumps(SPEC.to_json()))
    assert stored.keys() - BASE.to_json().keys() == {"ungated", "mlp_layers"}
    assert ArchSpec.from_json(stored) == SPEC
    assert [SPEC.has_mlp(layer) for layer in range(3)] == [True, False, True]
    assert all(map(BASE.has_mlp, range(3)))


EXPERTS = ExpertsSpec(
    count=4, per_token=2, size=8, normalized=True, layers=(True, False, False), shared_size=16
)


def test_experts_are_where_feed_forward_layers_are() -> None:
    spec = replace(SPEC, experts=EXPERTS)
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert [spec.experts_of(layer) is not None for layer in range(3)] == [True, False, False]
    assert SPEC.has_gqa_graph
    assert not spec.has_gqa_graph
    assert replace(BASE, experts=EXPERTS).has_gqa_graph


@pytest.mark.parametrize(
    ("changes", "experts", "message"),
    [
        ({}, {"layers": None}, r"layers \[1\] have experts, and by mlp_layers no feed-forward"),
        ({}, {"layers": (True, True, False)}, r"layers \[1\] have experts"),
        ({"hidden_act": "silu"}, {}, "without a gate have the activation relu2.* is 'silu'"),
        ({"hidden_act": "xielu"}, {}, "without a gate have the activation relu2"),
        ({}, {"biased": True}, "no biases"),
        ({}, {"limit": 7.0}, "alpha, up_offset or limit have the activation silu"),
        ({"mlp_layers": None, "output_norms": True}, {"apart": True}, "without a gate"),
    ],
)
def test_experts_that_no_operator_computes_are_refused(
    changes: dict[str, Any], experts: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SPEC, experts=replace(EXPERTS, **experts), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mlp_layers": [True]}, "for 3 layers"),
        ({"ungated": None}, "hidden_act 'relu2' needs layers without a gate, ungated"),
        ({"mlp_layers": [True, 1, True]}, "an entry that is no bool"),
        ({"ungated": 1}, "ungated"),
        ({"parallel_layers": True}, "mlp_layers does not go with parallel_layers"),
        ({"output_norms": True}, "mlp_layers does not go with output_norms"),
        (
            {"ungated": None, "hidden_act": "silu", "parallel_layers": True},
            "mlp_layers does not go with parallel",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        ArchSpec.from_json({**SPEC.to_json(), **changes})
