"""Mixtures of experts: what configurations say, what is refused, and how weights are stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import CheckpointError, ExportError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.export import export_model
from onnxport.exporter.families import find_family
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.spec import ArchSpec
from tests.exporter import checkpoints


def spec_of(folder: Path, case: str, **values: Any) -> ArchSpec:
    """What a case's configuration is read as, with some keys changed; None removes one."""
    checkpoints.configuration(checkpoints.CASES[case]).save_pretrained(folder)
    named = json.loads((folder / "config.json").read_text())
    classes = {
        "olmoe": "OlmoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "mixtral": "MixtralForCausalLM",
    }
    checkpoints.edit_config(folder, architectures=[classes[named["model_type"]]], **values)
    config = Config.read(folder)
    family = find_family(config)
    spec = family.spec(config, None)
    config.check_all_used(family.name)
    return spec


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
