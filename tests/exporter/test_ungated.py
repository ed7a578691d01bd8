"""Models without a gate, and those with LayerNorms: how their configurations read, what is refused.

Arcee, Nemotron, Apertus, StarCoder2, Phi, GPT-NeoX and StableLM.
"""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel
from transformers.activations import ACT2CLS

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.activations import xielu
from onnxport.exporter.export import export_model
from onnxport.exporter.families import gpt_neox
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.spec import ArchSpec
from tests.exporter import checkpoints
from tests.exporter.configs import read, respelled

# What is known of published files: no hub is at hand.
ARCEE: dict[str, Any] = {
    "architectures": ["ArceeForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "relu2",
    "hidden_size": 2560,
    "intermediate_size": 18432,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "arcee",
    "num_attention_heads": 20,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 20.0,
        "mscale": 1.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "type": "yarn",
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128004,
}
NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "relu2",
    "hidden_size": 3072,
    "intermediate_size": 9216,
    "max_position_embeddings": 4096,
    "mlp_bias": False,
    "model_type": "nemotron",
    "norm_eps": 1e-05,
    "num_attention_heads": 24,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.5,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "vocab_size": 256000,
}
APERTUS: dict[str, Any] = {
    "architectures": ["ApertusForCausalLM"],
    "attention_bias": False,
    "hidden_act": "xielu",
    "hidden_dropout": 0.0,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "max_position_embeddings": 65536,
    "mlp_bias": False,
    "model_type": "apertus",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "post_norm": False,
    "qk_norm": True,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
        "type": "llama3",
    },
    "rope_theta": 12000000,
    "tie_word_embeddings": False,
    "vocab_size": 131072,
}
STARCODER2: dict[str, Any] = {
    "activation_function": "gelu",
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_softmax_in_fp32": True,
    "embedding_dropout": 0.1,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "rope_theta": 999999.4420358813,
    "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True,
    "sliding_window": 4096,
    "use_bias": True,
    "vocab_size": 49152,
}
PHI: dict[str, Any] = {
    "architectures": ["PhiForCausalLM"],
    "hidden_act": "gelu_new",
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "phi",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.4,
    "qk_layernorm": False,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "vocab_size": 51200,
}
PYTHIA: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "attention_probs_dropout_prob": 0,
    "classifier_dropout": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout": 0.0,
    "hidden_dropout_prob": 0,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "rotary_emb_base": 20000,
    "rotary_pct": 0.5,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
STABLELM: dict[str, Any] = {
    "architectures": ["StableLmForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096,
    "model_type": "stablelm",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.25,
    "qk_layernorm": True,
    "rope_theta": 10000,
    "tie_word_embeddings": False,
    "use_parallel_residual": True,
    "use_qkv_bias": False,
    "vocab_size": 100352,
}
UNGATED = [ARCEE, NEMOTRON, APERTUS, STARCODER2, PHI, PYTHIA]


def name_of(values: dict[str, Any]) -> str:
    return str(values["model_type"])


def without(values: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A file, some keys left out."""
    return {key: one for key, one in values.items() if key not in keys}


@pytest.mark.parametrize("values", [*UNGATED, STABLELM], ids=name_of)
def test_published_files_are_understood_in_both_spellings(values: dict[str, Any]) -> None:
    spec = read(values)
    assert spec.ungated is (True if values in UNGATED else None)
    has_layer_norms = values not in (ARCEE, APERTUS)
    assert (spec.layer_norms, spec.norm_biases) == (has_layer_norms or None,) * 2
    assert read(respelled(values)) == spec
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_what_they_are() -> None:
    arcee, nemotron, apertus, starcoder, phi, pythia = map(read, UNGATED)
    assert (arcee.hidden_act, arcee.rope.type, arcee.tie_word_embeddings) == (
        "relu2",
        "yarn",
        False,
    )
    assert not any((arcee.qkv_bias, arcee.o_bias, arcee.mlp_bias))
    assert (nemotron.hidden_act, nemotron.rope.rotary_dim) == ("relu2", 64)
    assert (apertus.hidden_act, apertus.qk_norm, apertus.rope.theta) == ("xielu", True, 12e6)
    assert all((starcoder.qkv_bias, starcoder.o_bias, starcoder.mlp_bias))
    assert starcoder.sliding_window == (4096,) * 30
    assert (starcoder.hidden_act, starcoder.tie_word_embeddings) == ("gelu_tanh", True)
    assert (phi.rope.rotary_dim, phi.head_size, phi.head_bias) == (32, 80, True)
    assert (phi.parallel_layers, phi.parallel_norms) == (True, None)
    assert (pythia.parallel_layers, pythia.parallel_norms) == (True, True)
    assert (pythia.hidden_act, pythia.rope.theta, pythia.rope.rotary_dim) == ("gelu", 20_000, 32)
    stable = read(STABLELM)
    assert (stable.apart_qk_norm, stable.parallel_layers, stable.parallel_norms) == (
        True,
        True,
        None,
    )


def test_absent_keys_mean_what_they_mean_to_transformers() -> None:
    for values, keys in (
        (ARCEE, ("attention_bias", "head_dim", "hidden_act", "mlp_bias")),
        (NEMOTRON, ("head_dim", "hidden_act", "partial_rotary_factor")),
        (APERTUS, ("hidden_act", "rope_scaling", "rope_theta")),
        (STARCODER2, ("hidden_act", "num_key_value_heads", "use_bias")),
        (PHI, ("hidden_act", "num_key_value_heads", "qk_layernorm")),
        (PYTHIA, ("hidden_act", "use_parallel_residual")),
        (STABLELM, ("partial_rotary_factor", "use_qkv_bias")),
    ):
        assert read(without(values, *keys)) == read(values)
    fewer = without(PYTHIA, "rotary_pct", "rotary_emb_base")
    assert (read(fewer).rope.theta, read(fewer).rope.rotary_dim) == (10_000, 16)
    inner = {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 500.0}}
    assert (read(fewer | inner).rope.theta, read(fewer | inner).rope.rotary_dim) == (500, 32)
    assert read(without(PHI, "partial_rotary_factor")).rope.rotary_dim == 40
    assert read({**APERTUS, "rope_scaling": None}) == read({**APERTUS, "rope_scaling": {}})
    assert read({**APERTUS, "rope_scaling": None}).rope == read(APERTUS).rope
    theta = {"rope_scaling": None, "rope_theta": None, "rope_parameters": {"rope_theta": 500.0}}
    assert read(APERTUS | theta).rope.type == "default"
    turns = read({**PYTHIA, "use_parallel_residual": False})
    assert (turns.parallel_layers, turns.parallel_norms) == (None, None)
    plain = read(without(STABLELM, "qk_layernorm", "use_parallel_residual"))
    assert (plain.qk_norm, plain.apart_qk_norm, plain.parallel_layers) == (False, None, None)
    assert read(without(STARCODER2, "sliding_window")).sliding_window == (None,) * 30


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({**ARCEE, "hidden_act": "tanh"}, "hidden_act is 'tanh'; supported are gelu"),
        ({**ARCEE, "hidden_act": "xielu"}, "hidden_act is 'xielu'"),
        ({**ARCEE, "partial_rotary_factor": 0.5}, "64 of 128 channels"),
        ({**ARCEE, "sliding_window": 4096}, "sliding_window"),
        ({**APERTUS, "post_norm": True}, "post_norm is True"),
        ({**APERTUS, "qk_norm": False}, "qk_norm is False"),
        ({**APERTUS, "mlp_bias": True}, "mlp_bias"),
        ({**STARCODER2, "mlp_type": "gated"}, "mlp_type is 'gated'"),
        ({**STARCODER2, "norm_type": "rms"}, "norm_type is 'rms'"),
        ({**STARCODER2, "scale_attn_weights": False}, "scale_attn_weights is False"),
        ({**PHI, "qk_layernorm": True}, "qk_layernorm is True"),
        ({**PHI, "tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({**PYTHIA, "num_key_value_heads": 4}, "num_key_value_heads is 4"),
        ({**PYTHIA, "head_dim": 32}, "head_dim is 32"),
        ({**STABLELM, "head_dim": 64}, "head_dim is 64"),
        ({**STABLELM, "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_would_change_the_result_is_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(values)
    assert "config.json" in str(caught.value)
    assert named in str(caught.value)


def peer_rope(values: dict[str, Any]) -> tuple[str, float, float]:
    """The type, theta and part of each head that transformers makes of a file."""
    told = without(values, "architectures", "model_type")
    rope = AutoConfig.for_model(values["model_type"], **deepcopy(told)).rope_parameters
    return rope["rope_type"], rope["rope_theta"], rope.get("partial_rotary_factor", 1.0)


@pytest.mark.parametrize(
    ("values", "key", "computed"),
    [
        (without(APERTUS, "rope_scaling"), "rope_theta", 12e6),
        ({**APERTUS, "rope_scaling": None}, "rope_theta", 12e6),
        ({**APERTUS, "rope_scaling": {}}, "rope_theta", 12e6),
        (PYTHIA, "rope_theta", 20_000.0),
        (PYTHIA, "partial_rotary_factor", 0.5),
        (without(PYTHIA, "rotary_emb_base"), "rope_theta", 10_000.0),
        (without(PYTHIA, "rotary_pct"), "partial_rotary_factor", 0.25),
        (
            without(PYTHIA, "rotary_pct") | {"rope_parameters": {"partial_rotary_factor": 0.75}},
            "partial_rotary_factor",
            0.75,
        ),
    ],
)
def test_a_rope_key_that_transformers_leaves_out_may_not_say_otherwise(
    values: dict[str, Any], key: str, computed: float
) -> None:
    plain = without(values, key)
    other = 1.0 if key == "partial_rotary_factor" else 500.0
    assert peer_rope({**plain, key: other}) == peer_rope(plain)
    assert computed in peer_rope(plain)
    assert read({**plain, key: computed}) == read(plain)
    rope = read(plain).rope
    assert computed in (rope.theta, rope.rotary_dim / read(plain).head_size)
    with pytest.raises(CheckpointError, match=f"{key} is {other}, which .* with {computed}"):
        read({**plain, key: other})


def test_names_of_one_number_that_differ_make_no_sense() -> None:
    for own, found, common, other in (
        ("rotary_pct", 0.5, "partial_rotary_factor", 1.0),
        ("rotary_emb_base", 20000.0, "rope_theta", 500.0),
    ):
        with pytest.raises(CheckpointError, match=f"{own} is {found} and {common} is {other}"):
            read({**PYTHIA, "rope_parameters": {common: other}})
    assert read({**NEMOTRON, "rope_percent": 0.5}) == read(NEMOTRON)
    assert read(without({**NEMOTRON, "rope_percentage": 0.5}, "partial_rotary_factor"))
    with pytest.raises(CheckpointError, match=r"rope_percent is 1.0, and 64 of 128 channels"):
        read({**NEMOTRON, "rope_percent": 1.0})
    with pytest.raises(CheckpointError, match="lacks the key 'norm_eps'"):
        read(without(NEMOTRON, "norm_eps"))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ungated": None}, "hidden_act 'relu2' needs layers without a gate"),
        ({"norm_biases": True}, "norm_biases needs layer_norms"),
        ({"parallel_norms": True}, "parallel_norms needs parallel_layers"),
        ({"head_bias": True, "tie_word_embeddings": True}, "head_bias needs a head"),
    ],
    ids=lambda one: "" if isinstance(one, dict) else one,
)
def test_what_contradicts_itself(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(read(ARCEE), **changes)


def test_xielu_is_that_of_transformers() -> None:
    random = np.random.default_rng(0)
    x = np.concatenate([random.standard_normal(1000) * 4, [0, -0.0, -1e-7, -100, 1e4, -1e4]])
    x = x.astype(np.float32)
    activation = ACT2CLS["xielu"](dtype=torch.float32)
    numbers: list[NDArray[np.float32]] = [np.array([one], np.float32) for one in (0.3, -0.7)]
    with torch.no_grad():
        activation.alpha_p[:], activation.alpha_n[:] = (torch.from_numpy(one) for one in numbers)
        expected = activation(torch.from_numpy(x)).numpy()
    rest = [np.array([one.item()], np.float32) for one in (activation.beta, activation.eps)]
    np.testing.assert_allclose(xielu(x, *numbers, *rest), expected, rtol=2e-6, atol=5e-7)


@pytest.mark.parametrize("kind", ["old", "base"])
def test_how_tensors_of_gpt_neox_were_called(tmp_path: Path, kind: str) -> None:
    """Older files' head is another name; a model without its head has none of the prefix."""
    model = checkpoints.make(checkpoints.CASES["gpt-neox"], tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32")
    plain = export_model(tmp_path / "checkpoint", tmp_path / "plain", options)
    tensors = {name: one.contiguous() for name, one in model.state_dict().items()}
    folder = tmp_path / kind
    folder.mkdir()
    if kind == "base":
        model.base_model.save_pretrained(folder)
        assert isinstance(AutoModel.from_pretrained(folder), type(model.base_model))
    else:
        tensors["embed_out.weight"] = tensors.pop("lm_head.weight")
        tensors |= {"gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4)}
        save_file(tensors, folder / "model.safetensors")
        model.config.save_pretrained(folder)
    found = gpt_neox.FAMILY.names_in(frozenset(load_file(folder / "model.safetensors")))
    assert found.head == ("embed_out.weight" if kind == "old" else "lm_head.weight")
    assert found.layer == ("gpt_neox.layers.{}." if kind == "old" else "layers.{}.")
    path = export_model(folder, tmp_path / "artifact", options)
    if kind == "old":
        own, other = ((one / "model.onnx.data").read_bytes() for one in (plain, path))
        assert own == other
    else:
        assert Artifact.read(path).manifest.embedding is not None


def test_a_phi_without_its_head_embeds(tmp_path: Path) -> None:
    """Its head has a bias, which went with it."""
    model = checkpoints.make(checkpoints.CASES["phi"], tmp_path / "checkpoint")
    model.base_model.save_pretrained(tmp_path / "base")
    path = export_model(tmp_path / "base", tmp_path / "artifact", ExportOptions(precision="fp32"))
    manifest = Artifact.read(path).manifest
    assert manifest.embedding is not None
    assert manifest.embedding.only
    assert (manifest.model.head_bias, manifest.model.tie_word_embeddings) == (None, True)
