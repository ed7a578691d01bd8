"""Mixtures of experts: what configurations say, what is refused, and how weights are stored."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from onnxport.errors import CheckpointError, ExportError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.export import export_model
from onnxport.exporter.families.base import TensorNames
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.plan import plan_weights
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.spec import ArchSpec
from tests.exporter import checkpoints, configs


def spec_of(folder: Path, case: str, **values: Any) -> ArchSpec:
    """What a case's configuration is read as, with some keys changed; None removes one."""
    checkpoints.configuration(checkpoints.CASES[case]).save_pretrained(folder)
    checkpoints.edit_config(folder, **values)
    return configs.spec_of(Config.read(folder))


@pytest.mark.parametrize(
    "family",
    [
        *("dots1", "ernie4_5_moe", "glm4_moe", "granitemoe", "granitemoeshared", "mixtral"),
        *("olmoe", "qwen2_moe", "qwen3_moe", "solar_open"),
        *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "hy_v3"),
    ],
)
def test_absent_keys_mean_what_they_mean_to_transformers(family: str, tmp_path: Path) -> None:
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    needed = (*sizes, "max_position_embeddings", "rms_norm_eps", "intermediate_size")
    peer = AutoConfig.for_model(family)
    written = {key: getattr(peer, key) for key in needed if hasattr(peer, key)}
    written |= {  # what has no default that makes a model
        "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
        "glm4_moe": {"head_dim": 128},
        "deepseek_v2": {"num_experts_per_tok": 2},
    }.get(family, {})
    (tmp_path / "config.json").write_text(json.dumps({**written, "model_type": family}))
    peer = AutoConfig.from_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(peer)
    spec = configs.spec_of(Config.read(tmp_path))
    plan = plan_weights(spec, TensorNames())
    assert spec.rope.theta == peer.rope_parameters["rope_theta"]
    if spec.latent is None:
        assert spec.rope.rotary_dim == spec.head_size * (0.5 if family == "glm4_moe" else 1)
    else:
        assert spec.attention_scale == pytest.approx(peer.qk_head_dim**-0.5)
    assert spec.tie_word_embeddings == peer.tie_word_embeddings
    assert set(spec.sliding_window) == {None}
    assert spec.experts is not None
    assert spec.experts.per_token == peer.num_experts_per_tok
    found = {name: math.prod(shape) for name, shape in plan.shapes().items()}
    expected = dict(model.named_parameters()) | dict(model.named_buffers())
    expected = {name: one.numel() for name, one in expected.items() if "inv_freq" not in name}
    assert sum(found.values()) == sum(expected.values())


def test_gpt_oss_has_yarn_unless_told_otherwise(tmp_path: Path) -> None:
    written: dict[str, Any] = {**checkpoints.BASE, "model_type": "gpt_oss", "rms_norm_eps": 1e-5}
    for given in ({}, {"rope_theta": 500.0}, {"rope_parameters": {"rope_type": "default"}}):
        (tmp_path / "config.json").write_text(json.dumps({**written, **given}))
        peer = AutoConfig.from_pretrained(tmp_path).rope_parameters
        rope = configs.spec_of(Config.read(tmp_path)).rope
        assert (rope.type, rope.theta) == (peer["rope_type"], peer["rope_theta"])
        if rope.type == "yarn":
            assert rope.factor == peer["factor"] == 32
            assert rope.original_context_length == peer["original_max_position_embeddings"]
            assert (rope.beta_fast, rope.beta_slow) == (peer["beta_fast"], peer["beta_slow"])
            assert rope.truncate == peer["truncate"]
    assert rope.type == "default"


PUBLISHED: dict[str, dict[str, Any]] = {
    "Solar-Open-100B": {
        "architectures": ["SolarOpenForCausalLM"],
        "model_type": "solar_open",
        "first_k_dense_replace": 0,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 10240,
        "max_position_embeddings": 131072,
        "moe_intermediate_size": 1280,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 64,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 1.0,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 65536,
        },
        "rope_theta": 1000000,
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "vocab_size": 196608,
    },
    "dots.llm1.inst": {
        "architectures": ["Dots1ForCausalLM"],
        "model_type": "dots1",
        "attention_bias": False,
        "first_k_dense_replace": 1,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": None,
        "n_routed_experts": 128,
        "n_shared_experts": 2,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 62,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "noaux_tc",
        "tie_word_embeddings": False,
        "topk_group": None,
        "vocab_size": 152064,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_understood(name: str) -> None:
    """By what is known of them: no hub is at hand."""
    values = PUBLISHED[name]
    experts = configs.read(values).experts
    assert experts is not None
    assert (experts.count, experts.per_token) == (128, values["num_experts_per_tok"])
    assert experts.shared_size == values["moe_intermediate_size"] * values["n_shared_experts"]


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("dots1", {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported is 'sigmoid'"),
        ("glm4-moe", {"topk_method": "greedy"}, "topk_method is 'greedy'"),
        ("dots1", {"moe_layer_freq": 2}, "moe_layer_freq is 2; supported is 1"),
        ("solar-open", {"first_k_dense_replace": 3}, "first_k_dense_replace is 3"),
        ("qwen3-moe-window", {"max_window_layers": 1}, "max_window_layers = 1 say otherwise"),
        ("qwen3-moe-window", {"layer_types": ["full_attention"] * 2}, "say otherwise"),
        ("qwen3-moe", {"layer_types": ["sliding_attention"] * 2}, "say otherwise"),
    ],
)
def test_what_would_compute_something_else_is_refused(
    case: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(message)):
        spec_of(tmp_path, case, **changes)


def test_groups_of_experts_are_read(tmp_path: Path) -> None:
    def groups(**values: Any) -> tuple[int | None, ...]:
        experts = spec_of(tmp_path, "glm4-moe", **values).experts
        assert experts is not None
        return experts.groups, experts.groups_per_token, experts.group_best

    assert groups() == (None, None, None)
    assert groups(n_group=4, topk_group=2) == (4, 2, 2)
    assert groups(n_group=4, topk_group=4) == (None, None, None)  # all of them
    with pytest.raises(CheckpointError, match="8 experts cannot be 3 equal groups"):
        groups(n_group=3, topk_group=2)
    with pytest.raises(CheckpointError, match="a group's 1 experts 2 say so"):
        groups(n_group=8, topk_group=4)
    with pytest.raises(CheckpointError, match="given to 3 experts, of 1 groups of 2"):
        groups(n_group=4, topk_group=1)


def test_layers_of_qwen3_moe_have_a_window_all_or_none(tmp_path: Path) -> None:
    """As transformers computes it, which does not read Qwen's other keys of windows here."""
    assert spec_of(tmp_path, "qwen3-moe-window").sliding_window == (6, 6)
    full = {"use_sliding_window": False, "max_window_layers": 1}
    assert spec_of(tmp_path, "qwen3-moe-window", **full).sliding_window == (None, None)


def test_which_layers_have_experts(tmp_path: Path) -> None:
    def layers(**values: Any) -> list[bool]:
        spec = spec_of(tmp_path, "qwen3-moe", num_hidden_layers=4, **values)
        return [spec.experts_of(layer) is not None for layer in range(4)]

    assert layers() == [False, True, True, True]
    assert layers(mlp_only_layers=[]) == [True] * 4
    assert layers(mlp_only_layers=[1], decoder_sparse_step=2) == [False, False, False, True]
    assert layers(mlp_only_layers=[0, 1, 2, 3]) == [False] * 4
    with pytest.raises(CheckpointError, match="decoder_sparse_step is 0"):
        layers(decoder_sparse_step=0)


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_either_name_of_their_number_is_read(tmp_path: Path, key: str) -> None:
    both = {"num_experts": None, "num_local_experts": None}
    for case in ("olmoe", "qwen3-moe", "mixtral"):
        spec = spec_of(tmp_path, case, **{**both, key: 12})
        assert spec.experts is not None
        assert spec.experts.count == 12


def test_two_numbers_of_experts_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"num_local_experts are \[4, 12\]"):
        spec_of(tmp_path, "mixtral", num_experts=12, num_local_experts=4)


def test_a_token_cannot_be_given_to_more_experts_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="given to 9 experts, of 4"):
        spec_of(tmp_path, "mixtral", num_experts_per_tok=9)


def test_keys_that_would_change_the_result_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"clip_qkv = 8\.0"):
        spec_of(tmp_path, "olmoe", clip_qkv=8.0)


def test_groups_divide_both_sizes_or_the_precision_is_refused(tmp_path: Path) -> None:
    case = checkpoints.CASES["qwen3-moe"]
    odd = replace(case, config={**case.config, "moe_intermediate_size": 48})
    checkpoints.make(odd, tmp_path / "checkpoint")
    with pytest.raises(ExportError, match="32 or 64 or 128 inputs, which must divide 16"):
        export_model(tmp_path / "checkpoint", tmp_path / "int4")
    assert not (tmp_path / "int4").exists()
    export_model(tmp_path / "checkpoint", tmp_path / "fp16", ExportOptions(precision="fp16"))
    checkpoints.make(case, tmp_path / "even")
    artifact = Artifact.read(export_model(tmp_path / "even", tmp_path / "artifact"))
    blocks = {
        attribute.i
        for node in artifact.load_graph("paged").graph.node
        for attribute in node.attribute
        if node.op_type == "QMoE" and attribute.name == "block_size"
    }
    assert blocks == {32}  # of 128 that were asked for: experts have 64 and 32 inputs


@pytest.mark.parametrize(
    ("case", "names", "known"),
    [
        ("glm4-moe", ("model.layers.3.eh_proj.weight", "model.layers.3.mlp.gate.weight"), True),
        ("ernie-moe", ("model.mtp_block.0.up_proj.weight", "model.mtp_emb_norm.0.weight"), True),
        ("glm4-moe", ("model.layers.4.eh_proj.weight",), False),  # one layer further
    ],
)
def test_what_guesses_further_tokens_stays_behind(
    case: str,
    names: tuple[str, ...],
    known: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As in published checkpoints: tensors in any order over files, those of a layer more, too."""
    folder = tmp_path / "checkpoint"
    model = checkpoints.make(checkpoints.CASES[case], folder)
    checkpoints.edit_config(folder, num_nextn_predict_layers=1)
    tensors = load_file(folder / "model.safetensors") | dict.fromkeys(names, torch.ones(2))
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(sorted(tensors)[::-1])}
    for file in set(files.values()):
        save_file(
            {name: tensors[name].clone() for name in files if files[name] == file}, folder / file
        )
    index = json.dumps({"weight_map": files})
    (folder / "model.safetensors.index.json").write_text(index)
    options = ExportOptions(precision="fp32")
    if not known:
        with pytest.raises(CheckpointError, match=re.escape(names[0])):
            export_model(folder, tmp_path / "artifact", options)
        return
    path = export_model(folder, tmp_path / "artifact", options)
    assert f"{len(names)} tensors are left out" in caplog.text
    with np.load(path / "golden.npz") as golden:
        expected = checkpoints.logits(model, golden["token_ids"])[golden["logits_indices"]]
        np.testing.assert_allclose(golden["logits"], expected, atol=1e-4)


@pytest.mark.parametrize("name", ["granitemoe", "qwen3-moe"])
def test_rows_of_gate_and_up_take_turns(tmp_path: Path, name: str) -> None:
    model = checkpoints.make(checkpoints.CASES[name], tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", threads=2)
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    stored = {one.name: one for one in artifact.load_graph("paged").graph.initializer}
    found = artifact.read_tensor(stored["layers.1.experts.gate_up.weight"])
    (expected,) = [
        parameter.detach().numpy()
        for key, parameter in model.named_parameters()
        if "layers.1." in key and key.endswith("gate_up_proj")
    ]
    size = expected.shape[1] // 2
    np.testing.assert_array_equal(found[:, 0::2], expected[:, :size])
    np.testing.assert_array_equal(found[:, 1::2], expected[:, size:])
