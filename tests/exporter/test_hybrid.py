"""Models with gated delta nets: the reference is transformers', and artifacts have what they need.

Graphs run in `test_hybrid_graphs`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.export import export_model
from onnxport.exporter.families import FAMILIES
from onnxport.exporter.options import ExportOptions
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from tests.exporter import checkpoints, configs, integers
from tests.exporter.checkpoints import HYBRID

WEIGHTS = "model.safetensors"
OPTIONS = ExportOptions(precision="fp32", threads=1)

Exported = tuple[PreTrainedModel, Artifact]


def exported(folder: Path, options: ExportOptions = OPTIONS) -> Artifact:
    path = export_model(folder, folder.with_name("artifact"), options)
    return Artifact.read(path, verify="sha256")


@pytest.mark.parametrize("name", HYBRID)
def test_the_numpy_reference_agrees(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = checkpoints.make(HYBRID[name], tmp_path / "checkpoint")
    with caplog.at_level(logging.WARNING):
        artifact = exported(tmp_path / "checkpoint")
    with np.load(artifact.path / "golden.npz") as golden:
        expected = checkpoints.logits(model, golden["token_ids"])[golden["logits_indices"]]
        assert np.ptp(expected) > 2  # logits that say something
        np.testing.assert_allclose(golden["logits"], expected, atol=1e-4)
    told = [one.getMessage() for one in caplog.records]
    assert ("that reads images" in "".join(told)) == (HYBRID[name].inside is not None)


@pytest.mark.parametrize("name", HYBRID)
def test_transformers_own_files_are_understood(name: str, tmp_path: Path) -> None:
    case = HYBRID[name]
    peer = checkpoints.configuration(case)
    model_type = case.inside or case.family
    peer.architectures = [one.architecture for one in FAMILIES if one.name == model_type]
    peer.save_pretrained(tmp_path)
    spec = configs.spec_of(Config.read(tmp_path))
    text = peer.get_text_config()
    is_olmo = case.family == "olmo_hybrid"
    assert (spec.family, spec.attention_gate) == (case.family, None if is_olmo else True)
    assert spec.linear is not None
    assert spec.linear.layers == tuple(kind == "linear_attention" for kind in text.layer_types)
    sizes = (text.linear_num_key_heads, text.linear_num_value_heads)
    assert (spec.linear.key_heads, spec.linear.value_heads) == sizes
    if not is_olmo:
        part = text.rope_parameters["partial_rotary_factor"]
        assert spec.rope.rotary_dim == text.head_dim * part


# What is known of published files: no hub is at hand.
PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen3-Next-80B-A3B-Instruct": {
        "architectures": ["Qwen3NextForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "decoder_sparse_step": 1,
        "eos_token_id": 151645,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": 512,
        "norm_topk_prob": True,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "output_router_logits": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.0.dev0",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3.5-27B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": 248044,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_act": "silu",
            "hidden_size": 5120,
            "initializer_range": 0.02,
            "intermediate_size": 17408,
            "layer_types": [
                "full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(64)
            ],
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 24,
            "num_hidden_layers": 64,
            "num_key_value_heads": 4,
            "output_gate_type": "swish",
            "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "use_cache": True,
            "vocab_size": 248320,
        },
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0",
        "video_token_id": 248057,
        "vision_config": {"depth": 27, "hidden_size": 1152, "model_type": "qwen3_5"},
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    },
}
NEXT = PUBLISHED["Qwen3-Next-80B-A3B-Instruct"]
DENSE = PUBLISHED["Qwen3.5-27B"]


def of_text(**changes: Any) -> dict[str, Any]:
    return {**DENSE, "text_config": {**DENSE["text_config"], **changes}}


def test_qwen3_next() -> None:
    spec = configs.read(NEXT)
    assert spec.cached_layers == tuple(range(3, 48, 4))
    assert (spec.rope.rotary_dim, spec.rope.theta) == (64, 1e7)
    assert spec.linear is not None
    assert spec.linear.conv_state == (8192, 3)
    assert spec.linear.recurrent_state == (32, 128, 128)
    assert spec.experts is not None
    assert (spec.experts.count, spec.experts.shared_size, spec.experts.shared_gated) == (
        512,
        512,
        True,
    )


def test_qwen3_5() -> None:
    spec = configs.read(DENSE)
    assert spec.cached_layers == tuple(range(3, 64, 4))
    assert (spec.family, spec.num_heads, spec.head_size, spec.qk_norm) == (
        *("qwen3_5_text", 24, 256),
        True,
    )
    assert (spec.rope.rotary_dim, spec.rope.theta) == (64, 1e7)
    assert spec.linear is not None
    assert spec.linear.recurrent_state == (48, 128, 128)
    assert spec.experts is None
    assert not spec.tie_word_embeddings


def test_layers_by_interval_where_no_types_are_named() -> None:
    wanted = configs.read(DENSE)
    assert configs.read(of_text(layer_types=None)) == wanted
    assert configs.read(of_text(layer_types=None, full_attention_interval=None)) == wanted
    third = configs.read(of_text(layer_types=None, full_attention_interval=3))
    assert third.cached_layers == tuple(range(2, 64, 3))
    spec = configs.read(of_text(layer_types=["full_attention"] * 64, full_attention_interval=None))
    assert spec.linear is None
    assert spec.attention_gate


def test_mrope_is_plain_where_there_is_only_text() -> None:
    rope = DENSE["text_config"]["rope_parameters"]
    plain = {key: one for key, one in rope.items() if not key.startswith("mrope")}
    assert configs.read(of_text(rope_parameters=plain)) == configs.read(DENSE)
    apart = configs.read(of_text(rope_parameters={**rope, "mrope_interleaved": False}))
    assert apart == configs.read(DENSE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_output_gate": False}, "attn_output_gate is False; supported is True"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid'; supported is 'swish'"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype is 'bfloat16'; supported is 'float32'"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"mlp_only_layers": [3]}, r"mlp_only_layers is \[3\]"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"layer_types": ["sliding_attention"] * 64}, "supported are 64 entries"),
        ({"layer_types": ["full_attention"]}, "supported are 64 entries"),
        (
            {"layer_types": ["linear_attention"] * 64, "full_attention_interval": None},
            "none of the 64 layers has attention",
        ),
        ({"layer_types": ["full_attention"] * 64}, "full_attention_interval is 4 and layer_types"),
        ({"full_attention_interval": 0}, "full_attention_interval is 0; it must be above 0"),
        ({"linear_num_value_heads": 40}, "value_heads 40 of linear attention are no multiple"),
        ({"linear_conv_kernel_dim": 1}, "kernel of linear attention must be above 1"),
        ({"linear_key_head_dim": 128.5}, "'linear_key_head_dim' is 128.5"),
        ({"linear_gate": 1}, "linear_gate = 1"),
        ({"rope_parameters": {"mrope_section": 24}}, "mrope_section = 24 and mrope_interleaved"),
        ({"rope_parameters": {"mrope_interleaved": 1}}, "mrope_interleaved = 1 are not understood"),
        ({"rope_parameters": {"mrope_axes": 3}}, "mrope_axes = 3"),
    ],
)
def test_what_would_change_the_result_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        configs.read(of_text(**changes))


@pytest.mark.parametrize(
    ("key", "value"),
    [("norm_topk_prob", False), ("decoder_sparse_step", 2), ("mlp_only_layers", [0])],
)
def test_what_no_qwen3_5_moe_is(key: str, value: object) -> None:
    dropped = ("intermediate_size", "full_attention_interval")
    text = {name: one for name, one in NEXT.items() if name not in dropped}
    text |= {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
    spec = configs.read(text)
    assert spec.experts is not None
    assert spec.experts.normalized
    with pytest.raises(UnsupportedModelError, match=f"{key} is {value}".replace("[", r"\[")):
        configs.read(text | {key: value})


def test_the_manifest_says_which_layers_have_a_state(tmp_path: Path) -> None:
    checkpoints.make(HYBRID["qwen3.5"], tmp_path / "checkpoint")
    artifact = exported(tmp_path / "checkpoint")
    stored = json.loads((artifact.path / "manifest.json").read_text())["model"]
    assert stored["linear"]["layers"] == [True, True, True, False]
    assert stored["attention_gate"] is True
    assert artifact.has_gqa


@pytest.mark.parametrize("precision", ["int4", "int8", "fp16", "fp32"])
def test_inputs_and_outputs(precision: str, tmp_path: Path) -> None:
    checkpoints.make(HYBRID["qwen3.5"], tmp_path / "checkpoint")
    artifact = exported(
        tmp_path / "checkpoint", ExportOptions(precision=precision, threads=1, group_size=32)
    )
    activations, float32, int32 = (1 if precision == "fp32" else 10), 1, 6
    pool = "num_states"
    wanted = {contract.STATE_READS: (int32, ["batch"]), contract.STATE_WRITES: (int32, ["batch"])}
    for layer in (0, 1, 2):
        conv, recurrent = (activations, [pool, 112, 3]), (float32, [pool, 6, 8, 16])
        wanted[contract.past_conv_state(layer)] = conv
        wanted[contract.present_conv_state(layer)] = conv
        wanted[contract.past_recurrent_state(layer)] = recurrent
        wanted[contract.present_recurrent_state(layer)] = recurrent
    for name in (contract.past_key(3), contract.past_value(3)):
        cache = (activations, ["num_blocks", "block_size", 2, 64])
        wanted[name] = wanted[name.replace("past_key_values", "present")] = cache
    graph = artifact.load_graph("paged").graph
    found = _inputs_and_outputs(graph)
    assert {name: one for name, one in found.items() if _is_state(name)} == wanted
    types = {one.name: one.data_type for one in graph.initializer}
    assert types["layers.0.linear.a_log.weight"] == float32
    assert types["layers.0.linear.dt_bias.weight"] == float32
    assert types["layers.0.linear.ba.weight"] == activations  # in every precision
    rows = _inputs_and_outputs(artifact.load_graph("gqa").graph)
    for layer in (0, 1, 2):
        assert rows[contract.gqa_past_conv_state(layer)] == (activations, ["batch", 112, 3])
        assert rows[contract.gqa_past_recurrent_state(layer)] == (float32, ["batch", 6, 16, 8])
    assert contract.past_key(0) not in rows


def _inputs_and_outputs(graph: onnx.GraphProto) -> dict[str, tuple[int, list[int | str]]]:
    return {
        one.name: (
            one.type.tensor_type.elem_type,
            [d.dim_param or d.dim_value for d in one.type.tensor_type.shape.dim],
        )
        for one in (*graph.input, *graph.output)
    }


def _is_state(name: str) -> bool:
    return name.startswith(("past_", "present", "state_")) and "sequence_lengths" not in name


@pytest.mark.parametrize(("precision", "limit"), [("int4", 0.6), ("int8", 0.1), ("fp16", 0.02)])
def test_the_reference_of_other_precisions_is_near(
    precision: str, limit: float, tmp_path: Path
) -> None:
    model = checkpoints.make(HYBRID["qwen3.5"], tmp_path / "checkpoint")
    options = ExportOptions(precision=precision, threads=1, group_size=32)
    artifact = exported(tmp_path / "checkpoint", options)
    with np.load(artifact.path / "golden.npz") as golden:
        expected = checkpoints.logits(model, golden["token_ids"])[golden["logits_indices"]]
        error = np.abs(golden["logits"] - expected).mean() / np.abs(expected).mean()
    assert limit / 20 < error < limit


def _fused(folder: Path) -> None:
    """Experts as published: one tensor of all gates and ups, and one of all downs."""
    tensors = load_file(folder / WEIGHTS)
    for name in [one for one in tensors if one.endswith("experts.0.down_proj.weight")]:
        prefix = name.removesuffix("0.down_proj.weight")
        down, gate_up = [], []
        for expert in range(HYBRID["qwen3.5-moe"].config["num_experts"]):
            parts = [
                tensors.pop(f"{prefix}{expert}.{one}_proj.weight") for one in ("gate", "up", "down")
            ]
            gate_up.append(torch.cat(parts[:2]))
            down.append(parts[2])
        tensors[f"{prefix}gate_up_proj"] = torch.stack(gate_up)
        tensors[f"{prefix}down_proj"] = torch.stack(down)
    save_file(tensors, folder / WEIGHTS)


def test_experts_as_they_are_published(tmp_path: Path) -> None:
    case = checkpoints.Case("qwen3_5_moe_text", HYBRID["qwen3.5-moe"].config, inside="qwen3_5_moe")
    made = []
    for layout in ("apart", "fused"):
        source = tmp_path / layout / "checkpoint"
        checkpoints.make(case, source)
        if layout == "fused":
            _fused(source)
        made.append(exported(source).manifest.files)
    for file in ("model.onnx", "model.onnx.data", "golden.npz"):
        assert made[0][file] == made[1][file]


def test_the_text_model_may_be_named_as_inside_of_the_whole(tmp_path: Path) -> None:
    """As transformers writes a text model that it read from a whole one."""
    made = []
    for moved in (False, True):
        source = tmp_path / str(moved) / "checkpoint"
        checkpoints.make(HYBRID["qwen3.5"], source)
        if moved:
            tensors = load_file(source / WEIGHTS)
            save_file(
                {
                    name.replace("model.", "model.language_model.", 1): one
                    for name, one in tensors.items()
                },
                source / WEIGHTS,
            )
        made.append(exported(source).manifest.files["model.onnx.data"])
    assert made[0] == made[1]


def test_what_guesses_further_tokens_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "checkpoint"
    checkpoints.make(HYBRID["qwen3-next"], source)
    tensors = load_file(source / WEIGHTS)
    save_file(tensors | {"mtp.fc.weight": torch.zeros(64, 128)}, source / WEIGHTS)
    with caplog.at_level(logging.WARNING):
        exported(source)
    assert "1 tensors are left out (0.00 GB, such as mtp.fc.weight)" in caplog.text


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qwen3.5", "model.layers.0.linear_attn.in_proj_z.weight"),
        ("qwen3.5", "model.layers.1.linear_attn.A_log"),
        ("qwen3-next", "model.layers.2.linear_attn.in_proj_ba.weight"),
        ("qwen3-next", "model.layers.3.self_attn.q_proj.weight"),
    ],
)
def test_tensors_that_are_missing_or_more(name: str, tensor: str, tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    checkpoints.make(HYBRID[name], source)
    tensors = load_file(source / WEIGHTS)
    kept = tensors.pop(tensor)
    save_file(tensors, source / WEIGHTS)
    with pytest.raises(CheckpointError, match=tensor):
        exported(source)
    other = tensor.replace("weight", "bias").replace("A_log", "D")
    save_file(tensors | {tensor: kept, other: torch.zeros(3)}, source / WEIGHTS)
    with pytest.raises(CheckpointError, match=f"does not use: {other}"):
        exported(source)


@pytest.mark.parametrize("store", [integers.store_gptq, integers.store_awq])
def test_integers_of_rows_that_lie_together_by_heads(
    store: Callable[[Path], integers.Tensors], tmp_path: Path
) -> None:
    source = tmp_path / "checkpoint"
    checkpoints.make(HYBRID["qwen3.5-tied"], source)
    meant = store(source)
    found = exported(source).manifest.files
    checkpoints.edit_config(source, quantization_config=None)
    save_file(meant, source / WEIGHTS)
    expected = export_model(source, tmp_path / "expected", OPTIONS)
    for file in ("model.onnx", "model.onnx.data", "golden.npz"):
        assert found[file] == Artifact.read(expected).manifest.files[file]
