"""OLMo 1 to 3: how their configurations read, and what of them is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.export import export_model
from onnxport.exporter.families import find_family
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.plan import plan_weights
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.spec import ArchSpec
from tests.exporter import checkpoints
from tests.exporter.configs import read, respelled
from tests.exporter.run_graphs import check_golden

FULL, SLIDING = "full_attention", "sliding_attention"

# What is known of published files: no hub is at hand.
YARN = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}
COMMON: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "use_cache": True,
}
OLMO: dict[str, Any] = {
    **{key: one for key, one in COMMON.items() if key not in ("rms_norm_eps", "rope_theta")},
    "architectures": ["OlmoForCausalLM"],
    "clip_qkv": 8.0,
    "max_position_embeddings": 4096,
    "model_type": "olmo",
    "pretraining_tp": 1,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "vocab_size": 50304,
}
OLMO2: dict[str, Any] = {
    **COMMON,
    "architectures": ["Olmo2ForCausalLM"],
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "rope_scaling": None,
    "vocab_size": 100352,
}
OLMO3: dict[str, Any] = {
    **COMMON,
    "architectures": ["Olmo3ForCausalLM"],
    "layer_types": ([SLIDING] * 3 + [FULL]) * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "rope_scaling": YARN,
    "sliding_window": 4096,
    "vocab_size": 100278,
}


@pytest.mark.parametrize("values", [OLMO2, OLMO3], ids=["olmo2", "olmo3"])
def test_published_files_are_understood_in_both_spellings(values: dict[str, Any]) -> None:
    spec = read(values)
    assert (spec.qk_norm, spec.whole_qk_norm) == (True, True)
    assert (spec.raw_inputs, spec.output_norms, spec.tie_word_embeddings) == (True, True, False)
    assert not any((spec.qkv_bias, spec.o_bias, spec.mlp_bias))
    assert (spec.head_size, spec.inner_eps, spec.rope.theta) == (128, 1e-6, 500_000)
    assert read(respelled(values)) == spec
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_norms_of_the_first_olmo_have_no_weights() -> None:
    spec = read(OLMO)
    assert (spec.layer_norms, spec.norm_biases, spec.rms_norm_eps) == (True, None, 1e-5)
    assert (spec.qkv_bound, spec.qk_norm, spec.raw_inputs) == (8.0, False, None)
    assert read(respelled(OLMO)) == spec
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec
    assert read({**OLMO, "clip_qkv": None}).qkv_bound is None  # as the 1B has it
    assert read({**OLMO, "layer_norm_eps": 1e-5}) == spec
    plan = plan_weights(spec, find_family(Config(OLMO, Path("config.json"))).tensors)
    assert not [name for name in plan.shapes() if "norm" in name]
    assert plan.vectors["final_norm"].shape == (4096,)


def test_layers_with_a_window_keep_the_first_rope() -> None:
    spec = read(OLMO3)
    assert spec.sliding_window[:5] == (4096, 4096, 4096, None, 4096)
    assert (spec.rope_of(3).type, spec.rope_of(3).factor) == ("yarn", 8.0)
    assert spec.rope_of(3).attention_factor == pytest.approx(1.2079, abs=1e-4)
    assert (spec.rope_of(0).type, spec.rope_of(0).theta) == ("default", 500_000)
    assert spec.context_length == 65536
    absent = {key: one for key, one in OLMO3.items() if key not in ("layer_types", "rope_theta")}
    assert read({**absent, "sliding_window": 4096}) == spec
    first = read({**OLMO3, "rope_scaling": None, "max_position_embeddings": 8192})
    assert (first.local_rope, len(first.ropes)) == (None, 1)
    all_seen = {"layer_types": [FULL] * 32, "sliding_window": None}
    assert read({**OLMO3, **all_seen}).local_rope is None


def test_yarn_may_be_asked_for_more_than_the_file_says() -> None:
    values = {**OLMO3, "max_position_embeddings": 32768}
    assert read(values, 65536).context_length == 65536
    with pytest.raises(UnsupportedModelError, match="65536"):
        read(values, 65537)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({**OLMO, "layer_norm_eps": 1e-6}, "layer_norm_eps is 1e-06"),
        ({**OLMO, "hidden_act": "gelu"}, "hidden_act"),
        ({**OLMO, "rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ({**OLMO2, "clip_qkv": 8.0}, "clip_qkv"),
        ({**OLMO2, "hidden_act": "gelu"}, "hidden_act"),
        ({**OLMO2, "rope_scaling": {"rope_type": "proportional"}}, "proportional"),
        ({**OLMO2, "sliding_window": 4096}, "sliding_window"),
        ({**OLMO3, "layer_types": [FULL] * 31}, "layer_types"),
        ({**OLMO3, "layer_types": [FULL] * 31 + ["chunked_attention"]}, "layer_types"),
        ({**OLMO3, "sliding_window": None}, "sliding_window"),
        ({**OLMO3, "rope_theta": 1e4}, "rope_theta is 10000.0"),
        ({**OLMO3, "rope_theta": 1e4, "rope_parameters": {SLIDING: 1e4}}, "rope_theta is 10000.0"),
        ({**OLMO3, "rope_parameters": {"rope_type": "default"}}, "rope_parameters"),
        ({**OLMO3, "rope_parameters": {SLIDING: {**YARN, "factor": 2.0}}}, "sliding_attention"),
        (
            {**OLMO3, "rope_parameters": {SLIDING: {"partial_rotary_factor": 0.5}}},
            "64 of 128 channels",
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_would_change_the_result_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(values)
    assert "config.json" in str(caught.value)
    assert named in str(caught.value)


def test_a_configuration_that_makes_no_sense() -> None:
    with pytest.raises(CheckpointError, match="positive or None"):
        read({**OLMO3, "sliding_window": 0})
    with pytest.raises(CheckpointError, match=r"clip_qkv is 0\.0"):
        read({**OLMO, "clip_qkv": 0.0})


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16"])
def test_precisions_of_the_first_olmo(precision: str, tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES["olmo"], tmp_path / "checkpoint")
    options = ExportOptions(precision=precision, threads=1, group_size=32)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    check_golden(Artifact.read(path))
