"""Falcon-H1: what its configurations mean, and where its multipliers go.

The reference is transformers' in `test_spaces`, graphs in `test_hybrid_graphs`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import AdapterError, ArtifactError, CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.families import falcon_h1
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.plan import plan_weights
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.linear_spec import StateSpaceSpec
from onnxport.graphs.spec import ArchSpec
from onnxport.serving.adapters.peft import read_adapter
from tests.exporter import checkpoints, configs
from tests.exporter.checkpoints import SPACES
from tests.serving.adapting import random_tensors, write_adapter

# Keys and sizes as published models of the family have them; multipliers are other numbers.
FALCON: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 0.75,
    "bos_token_id": 1,
    "embedding_multiplier": 4.0,
    "eos_token_id": 11,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "key_multiplier": 0.25,
    "lm_head_multiplier": 0.125,
    "mamba_chunk_size": 128,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_head": 64,
    "mamba_d_ssm": 1536,
    "mamba_d_state": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_n_heads": 24,
    "mamba_norm_before_gate": False,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_use_mlp": True,
    "max_position_embeddings": 16384,
    "mlp_bias": False,
    "mlp_expansion_factor": 8,
    "mlp_multipliers": [0.5, 0.375],
    "model_type": "falcon_h1",
    "num_attention_heads": 8,
    "num_hidden_layers": 36,
    "num_key_value_heads": 2,
    "num_logits_to_keep": 1,
    "pad_token_id": 0,
    "projectors_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 100000000000.0,
    "ssm_in_multiplier": 2.0,
    "ssm_multipliers": [0.5, 0.25, 0.125, 1.5, 0.75],
    "ssm_out_multiplier": 0.625,
    "tie_word_embeddings": False,
    "time_step_floor": 0.0001,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.52.0",
    "use_cache": True,
    "vocab_size": 32784,
}


def test_falcon_h1() -> None:
    spec = configs.read(FALCON)
    layers = tuple(range(36))
    assert (spec.linear_layers, spec.cached_layers, spec.has_both) == (layers, layers, True)
    assert isinstance(spec.linear, StateSpaceSpec)
    assert (spec.linear.conv_state, spec.linear.recurrent_state) == ((1792, 3), (24, 64, 128))
    assert spec.linear.without_norm
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (8, 2, 64)
    assert (spec.rms_norm_eps, spec.inner_eps) == (1e-5 / 16, 1e-5)
    assert (spec.stream_scale, spec.residual_scale, spec.logits_scale) == (4.0, 0.25, 0.125)
    assert spec.rope.theta == 1e11


def test_multipliers_are_in_weights() -> None:
    """Those of what products read, too, and those of queries and keys apart."""
    spec = configs.read({**FALCON, "attention_in_multiplier": 1.5})
    plan = plan_weights(spec, falcon_h1.FAMILY.tensors)

    def scales(role: str) -> list[float]:
        matrix = plan.matrices[f"layers.3.{role}"]
        return [matrix.scale * part.scale for part in matrix.parts]

    assert scales("qkv") == [1.5, 0.375, 1.5]
    assert scales("o") == [0.75 / 4]
    assert scales("gate_up") == [0.5, 1.0]
    assert scales("down") == [0.375 / 4]
    assert scales("linear.z") == [1.0]
    assert scales("linear.mixed") == [0.5, 0.25, 3.0]
    assert scales("linear.dt") == [1.5]
    assert scales("linear.o") == [0.625 / 4]


def test_without_multipliers_nothing_is_times_anything() -> None:
    plain = {key: one for key, one in FALCON.items() if "multiplier" not in key}
    spec = configs.read(plain)
    assert spec.multipliers is not None
    assert {getattr(spec.multipliers, name) for name in spec.to_json()["multipliers"]} == {1.0}
    assert (spec.stream_scale, spec.residual_scale, spec.logits_scale) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({"mamba_d_ssm": None, "mamba_d_head": "auto"}, {"mamba_d_ssm": 2048}),
        ({"layers_block_type": ["hybrid"] * 36}, {}),
        ({"layer_types": ["hybrid"] * 36}, {}),
        ({"time_step_limit": [0.0, {"__float__": "Infinity"}]}, {}),
        ({"mamba_norm_before_gate": None}, {}),  # which is of a norm that there is none of
    ],
)
def test_spellings(changes: dict[str, Any], same: dict[str, Any]) -> None:
    heads = {"mamba_n_heads": 32} if "mamba_d_ssm" in changes else {}
    assert configs.read({**FALCON, **heads, **changes}) == configs.read({**FALCON, **heads, **same})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias = true"),
        ({"mlp_bias": True}, "mlp_bias = true"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias is true; supported is false"),
        ({"projectors_bias": True}, "projectors_bias is true; supported is false"),
        ({"mamba_use_mlp": False}, "mamba_use_mlp is false"),
        ({"mamba_rms_norm": True, "mamba_norm_before_gate": True}, "are true .* false in the sec"),
        ({"mamba_d_ssm": 1024}, "24 heads .* of 64 .* are not mamba_d_ssm = 1024"),
        ({"mamba_d_ssm": None}, r"are not mamba_expand \* hidden_size = 2048"),
        ({"mamba_n_groups": 5}, "heads 24 of state spaces are no multiple of groups 5"),
        ({"layer_types": ["attention"] * 36}, "layer_types is .* each layer is 'hybrid'"),
        ({"time_step_limit": [0.001, 0.1]}, r"time_step_limit is \[0.001, 0.1\]"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"key_multiplier": 0}, "key_multiplier is 0.0; it must be above 0"),
        ({"lm_head_multiplier": -1.0}, "lm_head_multiplier is -1.0; it must be above 0"),
        ({"mlp_multipliers": [1.0]}, r"mlp_multipliers is \[1.0\]; it must have 2 numbers"),
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers is .* it must have 5 numbers"),
        ({"ssm_multipliers": [1.0] * 4 + ["1"]}, "ssm_multipliers is .* must have 5 numbers"),
        ({"ssm_multipliers": [1.0] * 4 + [0]}, "ssm_multipliers is 0.0; it must be above 0"),
        ({"sliding_window": 512}, "sliding_window = 512"),
        ({"value_multiplier": 2.0}, "value_multiplier = 2.0"),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        configs.read({**FALCON, **changes})


def test_what_is_gated_may_be_normalized() -> None:
    """Where null says that the norm is behind the gate, for transformers, and absence does not."""
    normed = {**FALCON, "mamba_rms_norm": True}
    spec = configs.read(normed)
    assert isinstance(spec.linear, StateSpaceSpec)
    assert spec.linear.without_norm is None
    assert configs.read({**normed, "mamba_norm_before_gate": None}) == spec
    del normed["mamba_norm_before_gate"]
    with pytest.raises(UnsupportedModelError, match="which the latter is where absent"):
        configs.read(normed)


def test_whose_multipliers_are_lost_has_no_adapters_of_peft(tmp_path: Path) -> None:
    """Rows of these would have to be times the same numbers as the weights are."""
    told = configs.read(FALCON)
    plain = {key: one for key, one in FALCON.items() if "multiplier" not in key}
    lost = configs.read({**plain, "multipliers_in_weights": True})
    assert lost.multipliers is None
    folder = write_adapter(
        tmp_path / "adapter",
        random_tensors(told, targets=("v_proj",), layers=[0]),
        layers_to_transform=[0],
        target_modules=["v_proj"],
    )
    assert read_adapter(folder, told).adapter.deltas
    with pytest.raises(AdapterError, match=r"of a GGUF file, .* as llama.cpp's convert_lora_to_g"):
        read_adapter(folder, lost)


def test_manifests() -> None:
    """What is new in them is in no other family's."""
    spec = configs.read(FALCON)
    written = json.loads(json.dumps(spec.to_json()))
    assert ArchSpec.from_json(written) == spec
    linear = written["linear"]
    assert (linear["beside_attention"], linear["without_norm"]) == (True, True)
    for name, value in (("keys", 0), ("keys", None), ("more", 1.0)):
        changed = {**written, "multipliers": {**written["multipliers"], name: value}}
        with pytest.raises(ArtifactError, match=name):
            ArchSpec.from_json(changed)
    apart = {**written, "linear": {**linear, "layers": [True] * 35 + [False]}}
    with pytest.raises(ArtifactError, match="beside attention all must be such"):
        ArchSpec.from_json(apart)
    alone = {**written, "linear": {**linear, "beside_attention": None}}
    with pytest.raises(ArtifactError, match="some must be such, and some not"):
        ArchSpec.from_json(alone)
    with pytest.raises(ArtifactError, match="multipliers do not go with qkv_bias"):
        ArchSpec.from_json({**written, "qkv_bias": True})


def test_a_multiplier_of_a_part_is_not_another_parts(tmp_path: Path) -> None:
    """In integers, whose steps it is in."""
    case = SPACES["falcon-h1"]
    checkpoints.make(case, tmp_path / "checkpoint")
    options = ExportOptions(precision="int8", threads=1, group_size=32)

    def scales(name: str) -> dict[str, Any]:
        folder = export_model(tmp_path / "checkpoint", tmp_path / name, options)
        artifact = Artifact.read(folder)
        found = {}
        for one in artifact.load_graph("paged").graph.initializer:
            if one.name.startswith("layers.0.") and ".scales" in one.name:
                found[one.name.partition(".scales")[0]] = artifact.read_tensor(one)
        return found

    before = scales("before")
    checkpoints.edit_config(tmp_path / "checkpoint", key_multiplier=2.0)  # 4 times as much
    behind = scales("behind")
    changed = [name for name, one in before.items() if not np.array_equal(one, behind[name])]
    assert changed == ["layers.0.qkv"]
    ratio = behind["layers.0.qkv"] / before["layers.0.qkv"]
    rows = np.flatnonzero((ratio.reshape(len(ratio), -1) != 1).any(-1))
    assert rows.tolist() == list(range(64, 96))  # keys
    np.testing.assert_allclose(ratio[64:96], 4, rtol=1e-2)
