"""Gemma 2: how its configurations read, and what of them is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto
from transformers import Gemma2Config

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs import ops
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.paged import attention_nodes
from onnxport.graphs.spec import ArchSpec
from tests.exporter import checkpoints
from tests.exporter.configs import read

FULL, SLIDING = "full_attention", "sliding_attention"

# What is known of published files: no hub is at hand.
COMMON: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 256000,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-2-2b-it": {
        **COMMON,
        "head_dim": 256,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
    },
    "gemma-2-9b-it": {
        **COMMON,
        "head_dim": 256,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_attention_heads": 16,
        "num_hidden_layers": 42,
        "num_key_value_heads": 8,
        "query_pre_attn_scalar": 256,
        "sliding_window_size": 4096,
    },
    "gemma-2-27b-it": {
        **COMMON,
        "head_dim": 128,
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "num_attention_heads": 32,
        "num_hidden_layers": 46,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144,
    },
}
SMALL: dict[str, Any] = {
    **COMMON,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 100,
}


def small(**changes: Any) -> ArchSpec:
    return read(SMALL | changes)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_understood_in_both_spellings(name: str) -> None:
    values = PUBLISHED[name]
    spec = read(values)
    assert spec.sliding_window[:4] == (4096, None, 4096, None)
    assert (spec.attention_softcap, spec.logits_softcap) == (50.0, 30.0)
    assert spec.scale == pytest.approx(values["query_pre_attn_scalar"] ** -0.5)
    assert (spec.qk_norm, spec.output_norms, spec.tie_word_embeddings) == (False, True, True)
    assert (spec.inner_eps, spec.hidden_act, spec.local_rope) == (1e-6, "gelu_tanh", None)
    assert spec.residual_scale == pytest.approx(spec.hidden_size**-0.5)
    config = Gemma2Config(**{key: one for key, one in values.items() if key != "architectures"})
    config.architectures = values["architectures"]
    assert read(json.loads(config.to_json_string(use_diff=False))) == spec
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_what_is_absent_is_as_in_transformers() -> None:
    peer = Gemma2Config(num_hidden_layers=3)
    absent = (
        *("attn_logit_softcapping", "final_logit_softcapping", "sliding_window"),
        *("hidden_activation", "hidden_act"),
    )
    spec = read({key: value for key, value in SMALL.items() if key not in absent})
    assert spec.attention_softcap == peer.attn_logit_softcapping
    assert spec.logits_softcap == peer.final_logit_softcapping
    windows = {SLIDING: peer.sliding_window, FULL: None}
    assert spec.sliding_window == tuple(windows[kind] for kind in peer.layer_types)
    assert (spec.head_size, spec.num_kv_heads) == (peer.head_dim, peer.num_key_value_heads)
    assert spec.scale == peer.query_pre_attn_scalar**-0.5
    assert peer.tie_word_embeddings is spec.tie_word_embeddings is True


def test_null_caps_nothing() -> None:
    spec = small(attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (spec.attention_softcap, spec.logits_softcap) == (None, None)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_bidirectional_attention": True},
        {"hidden_activation": "gelu"},
        {"hidden_act": "gelu"},
        {"sliding_window_size": 2048},
        {"layer_types": [FULL] * 2},
        {"layer_types": [FULL, FULL, "chunked_attention"]},
        {"sliding_window": None},
        {"sliding_window_pattern": 6},
        {"rope_scaling": {"rope_type": "proportional"}},
    ],
    ids=lambda changes: json.dumps(changes)[:60],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        small(**changes)
    assert next(iter(changes)).removeprefix("rope_scaling") in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 0}, "attn_logit_softcapping is 0"),
        ({"final_logit_softcapping": -1.0}, "final_logit_softcapping is -1"),
        ({"final_logit_softcapping": math.inf}, "final_logit_softcapping is inf"),
        ({"final_logit_softcapping": "30"}, "expected a value of type float"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
    ],
)
def test_a_configuration_that_makes_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        small(**changes)
    assert message in str(caught.value)


def test_caps_are_where_they_belong(tmp_path: Path) -> None:
    """In each attention, and behind the head, within what transformers' logits are in."""
    checkpoints.make(checkpoints.CASES["gemma2"], tmp_path / "checkpoint")
    options = ExportOptions(precision="int4", group_size=32)
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    model = artifact.load_graph("paged")
    assert [one.softcap for one in attention_nodes(model)] == [2.0, 2.0]
    assert [node.op_type for node in model.graph.node][-5:] == [
        "Cast",
        "Mul",
        "Tanh",
        "Mul",
        "Cast",
    ]
    with np.load(artifact.path / "golden.npz") as golden:
        assert 1.5 < np.abs(golden["logits"]).max() <= 3.0
    uncapped = tmp_path / "uncapped"
    checkpoints.make(checkpoints.CASES["gemma2-uncapped"], uncapped)
    artifact = Artifact.read(export_model(uncapped, tmp_path / "artifact-2", options))
    model = artifact.load_graph("paged")
    assert [one.softcap for one in attention_nodes(model)] == [0.0, 0.0]
    assert "Tanh" not in [node.op_type for node in model.graph.node]


def test_a_cap() -> None:
    g = GraphBuilder("one")
    x = g.input("x", TensorProto.FLOAT, ["n"])
    g.node("Identity", [ops.softcap(g, x, 30.0)], outputs=[g.output("y", TensorProto.FLOAT, ["n"])])
    session = ort.InferenceSession(g.build().SerializeToString())
    values = np.array([0, 0.1, -20, 45, 1e4, -1e9], np.float32)
    (found,) = session.run(None, {"x": values})
    np.testing.assert_allclose(found, 30 * np.tanh(values / 30), rtol=1e-5)
