"""LFM3: how its configurations read, and what of them is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.linear_spec import ShortConvSpec
from onnxport.graphs.rope_spec import RopeSpec
from onnxport.graphs.spec import ArchSpec
from tests.exporter import checkpoints, configs

CONV, FULL, SLIDING = "conv", "full_attention", "sliding_attention"
ROPES: dict[str, Any] = {
    FULL: {"partial_rotary_factor": 0.5, "rope_theta": 1000000.0, "rope_type": "proportional"},
    SLIDING: {"rope_theta": 10000.0, "rope_type": "default"},
}
# As transformers writes its own defaults, of eight layers.
CONFIG: dict[str, Any] = {
    "architectures": ["Lfm3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 124894,
    "conv_L_cache": 7,
    "conv_bias": False,
    "eos_token_id": 124900,
    "head_dim": 128,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 7680,
    "layer_types": [CONV, CONV, FULL, CONV, SLIDING, CONV, FULL, CONV],
    "max_position_embeddings": 128000,
    "model_type": "lfm3",
    "norm_eps": 1e-05,
    "num_attention_heads": 16,
    "num_hidden_layers": 8,
    "num_key_value_heads": 4,
    "pad_token_id": 124893,
    "rope_parameters": ROPES,
    "sliding_window": 256,
    "tie_word_embeddings": True,
    "use_attention_gate": True,
    "use_cache": True,
    "use_sandwich_norm": True,
    "vocab_size": 128000,
}
# What a file may leave out.
DEFAULTS = (
    *("conv_L_cache", "conv_bias", "head_dim", "intermediate_size", "layer_types"),
    *("num_key_value_heads", "rope_parameters", "sliding_window", "tie_word_embeddings"),
    *("use_attention_gate", "use_sandwich_norm", "attention_bias"),
)


def test_the_published_model() -> None:
    spec = configs.read(CONFIG)
    assert (spec.family, spec.intermediate_size, spec.head_size) == ("lfm3", 7680, 128)
    assert (spec.num_heads, spec.num_kv_heads, spec.rms_norm_eps) == (16, 4, 1e-5)
    assert spec.cached_layers == (2, 4, 6)
    assert spec.sliding_window == (None, None, None, None, 256, None, None, None)
    layers = tuple(layer not in (2, 4, 6) for layer in range(8))
    assert spec.linear == ShortConvSpec(channels=2048, kernel=7, bias=False, layers=layers)
    full = RopeSpec(type="proportional", theta=1e6, rotary_dim=128, rotated_pairs=32, factor=1.0)
    local = RopeSpec(type="default", theta=10000.0, rotary_dim=128)
    assert (spec.rope, spec.local_rope) == (full, local)
    assert spec.qk_norm
    assert spec.output_norms
    assert spec.attention_gate
    assert spec.gate_size(2) == 16
    assert spec.tie_word_embeddings
    assert ArchSpec.from_json(spec.to_json()) == spec


def test_what_a_file_may_leave_out() -> None:
    short = {key: one for key, one in CONFIG.items() if key not in DEFAULTS}
    assert configs.read(short) == configs.read(CONFIG)
    assert configs.read(configs.respelled(short)) == configs.read(CONFIG)


def test_other_models() -> None:
    bare = configs.read(CONFIG | {"use_attention_gate": False, "use_sandwich_norm": False})
    assert (bare.attention_gate, bare.head_gates, bare.output_norms) == (None, None, None)
    seeing_all = configs.read(
        CONFIG | {"layer_types": [FULL] * 8, "rope_parameters": {FULL: ROPES[FULL]}}
    )
    assert (seeing_all.linear, seeing_all.local_rope) == (None, None)
    assert seeing_all.rope.type == "proportional"
    scaled = ROPES | {SLIDING: {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}}
    local = configs.read(CONFIG | {"rope_parameters": scaled}).local_rope
    assert local is not None
    assert (local.type, local.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias = true"),
        ({"layer_types": [CONV] * 8}, "none of the 8 layers has attention"),
        ({"layer_types": [CONV, FULL]}, "supported are 8 entries"),
        ({"layer_types": ["chunked_attention"] * 8}, "supported are 8 entries .* conv, full_att"),
        ({"sliding_window": None}, "sliding_window is null, and layer_types has sliding_attention"),
        ({"rope_parameters": {FULL: ROPES[FULL]}}, "an object with a rope_theta for each of full_"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "an object with a rope_theta for each of full_"),
        ({"rope_theta": 1e6}, "rope_theta 1000000.0; supported is"),
        (
            {
                "rope_parameters": ROPES
                | {SLIDING: {"rope_theta": 1.5, "partial_rotary_factor": 0.5}}
            },
            "the RoPE of sliding_attention is of type 'default' with a partial_rotary_factor",
        ),
        ({"conv_L_cache": 1}, "kernel of short convolutions must be above 1, is 1"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"block_ff_dim": 12288}, "block_ff_dim = 12288"),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        configs.read(CONFIG | changes)


def test_gates_of_heads_need_gates() -> None:
    with pytest.raises(ValueError, match="head_gates needs attention_gate"):
        replace(configs.read(CONFIG), attention_gate=None)


def test_the_gate_may_have_the_name_that_transformers_gives_it(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.SHORT_CONV["lfm3"], source)
    options = ExportOptions(precision="fp32", threads=1)
    published = export_model(source, tmp_path / "published", options)
    tensors = load_file(source / "model.safetensors")
    names = {name: name.replace(".gate_proj.", ".g_proj.") for name in tensors}
    assert len({name for name, other in names.items() if name != other}) == 2
    save_file({names[name]: one for name, one in tensors.items()}, source / "model.safetensors")
    renamed = export_model(source, tmp_path / "renamed", options)
    with np.load(published / "golden.npz") as one, np.load(renamed / "golden.npz") as other:
        np.testing.assert_array_equal(one["logits"], other["logits"])
