"""OLMo Hybrid: how its configuration reads, what is refused, and what its tensors are called."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.linear_spec import LinearAttentionSpec
from onnxport.graphs.spec import ArchSpec
from tests.exporter import checkpoints
from tests.exporter.configs import read, respelled

LINEAR, FULL = "linear_attention", "full_attention"
Tensors = dict[str, torch.Tensor]

VALUES: dict[str, Any] = {
    "architectures": ["OlmoHybridForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "layer_types": ([LINEAR] * 3 + [FULL]) * 2,
    "linear_a_log_max": 16.0,
    "linear_a_log_min": 0.0,
    "linear_allow_neg_eigval": True,
    "linear_conv_kernel_dim": 4,
    "linear_dt_init_floor": 0.0001,
    "linear_dt_max": 0.1,
    "linear_dt_min": 0.001,
    "linear_key_head_dim": 96,
    "linear_num_key_heads": 30,
    "linear_num_value_heads": 30,
    "linear_value_head_dim": 192,
    "max_position_embeddings": 65536,
    "model_type": "olmo_hybrid",
    "num_attention_heads": 30,
    "num_hidden_layers": 8,
    "num_key_value_heads": 30,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}


def test_the_configuration_is_understood() -> None:
    spec = read(VALUES)
    assert isinstance(spec.linear, LinearAttentionSpec)
    assert (spec.linear.doubled_beta, spec.linear.norm_eps) == (True, 1e-5)
    assert (spec.linear.key_size, spec.linear.value_size) == (96, 192)
    assert spec.linear_layers == (0, 1, 2, 4, 5, 6)
    assert (spec.ropes, spec.rotated_layers) == ((), (False,) * 8)
    assert [spec.norms_inputs(layer) for layer in (2, 3)] == [True, False]
    assert [spec.norms_outputs(layer) for layer in (2, 3)] == [False, True]
    assert read(respelled(VALUES)) == spec
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_what_is_left_out_is_of_the_model() -> None:
    told = ("layer_types", "rope_parameters")
    absent = {key: one for key, one in VALUES.items() if not key.startswith(("linear_", *told))}
    assert read({**absent, "rope_theta": None}) == read(VALUES)
    assert read({**absent, "num_hidden_layers": 2}).linear_layers == (0,)
    rotating = read(absent)
    assert (rotating.rotated_layers, rotating.rope.theta) == (None, 10_000.0)
    assert read({**absent, "rope_theta": 500}).rope.theta == 500


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": None}, "rope_parameters is null"),
        ({"layer_types": [LINEAR] * 8}, "and some of each"),
        ({"layer_types": [FULL] * 8}, "and some of each"),
        ({"layer_types": [FULL, LINEAR]}, "supported are 8 entries"),
        ({"head_dim": 64}, "head_dim is 64"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"linear_num_value_heads": 31}, "contradicts itself"),
        ({"linear_use_gate": False}, "linear_use_gate"),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read({**VALUES, **changes})


def _in_modules(tensors: Tensors) -> Tensors:
    """As transformers' modules are called, whose convolutions are one."""
    found = {}
    for name, one in tensors.items():
        behind = "post_attention_layernorm"
        renamed = name.replace("attention_layer_norm", "input_layernorm")
        found[renamed.replace("feedforward_layer_norm", behind)] = one
    for name in [each for each in found if each.endswith("q_conv1d.weight")]:
        parts = [found.pop(name.replace("q_conv1d", f"{one}_conv1d")) for one in "qkv"]
        found[name.replace("q_conv1d", "conv1d")] = torch.cat(parts)
    return found


def _apart(tensors: Tensors) -> Tensors:
    """Likewise, with a convolution each, as large as what it is over."""
    found = _in_modules(tensors)
    for name in [each for each in found if each.endswith(".conv1d.weight")]:
        widths = [len(found[name.replace("conv1d", f"{one}_proj")]) for one in "qkv"]
        for one, part in zip("qkv", torch.split(found.pop(name), widths), strict=True):
            found[name.replace("conv1d", f"{one}_conv1d")] = part.contiguous()
    return found


def _with_other_norms(tensors: Tensors) -> Tensors:
    """And with names of their own for norms of layers that keep a state."""
    states = tuple(name.split("linear_attn")[0] for name in tensors if name.endswith("A_log"))
    found = {}
    for name, one in _apart(tensors).items():
        if name.startswith(states):
            name = name.replace("input_layernorm", "attention_layer_norm")
            name = name.replace("post_attention_layernorm", "feedforward_layer_norm")
        found[name] = one
    return found


@pytest.mark.parametrize("named", [_in_modules, _apart, _with_other_norms])
def test_names_of_its_tensors(named: Callable[[Tensors], Tensors], tmp_path: Path) -> None:
    """Of those that transformers writes the parity tests tell."""
    checkpoints.make(checkpoints.HYBRID["olmo-hybrid"], tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    expected = export_model(tmp_path / "checkpoint", tmp_path / "expected", options)
    path = tmp_path / "checkpoint" / "model.safetensors"
    tensors = load_file(path)
    renamed = named(tensors)
    assert renamed.keys() != tensors.keys()
    save_file(renamed, path)
    found = export_model(tmp_path / "checkpoint", tmp_path / "found", options)
    for file in ("model.onnx", "model.onnx.data"):
        assert (found / file).read_bytes() == (expected / file).read_bytes()
