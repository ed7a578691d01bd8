"""Models that read images: their text part is exported, and nothing of it is lost in silence."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3TextConfig, MistralConfig

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from tests.exporter import checkpoints
from tests.exporter.configs import read

WEIGHTS = "model.safetensors"
OPTIONS = ExportOptions(precision="fp32", threads=1)

# What is known of published files: no hub is at hand.
LINEAR = {"factor": 8.0, "rope_type": "linear"}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
TEXT: dict[str, Any] = {"model_type": "gemma3_text", "rope_scaling": LINEAR, "sliding_window": 1024}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma-3-4b-it": {
        **GEMMA,
        "text_config": {
            **TEXT,
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "num_hidden_layers": 34,
        },
    },
    "gemma-3-12b-it": {
        **GEMMA,
        "text_config": {
            **TEXT,
            "hidden_size": 3840,
            "intermediate_size": 15360,
            "num_attention_heads": 16,
            "num_hidden_layers": 48,
            "num_key_value_heads": 8,
        },
    },
    "gemma-3-27b-it": {
        **GEMMA,
        "text_config": {
            **TEXT,
            "head_dim": 128,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168,
        },
    },
}
MISTRAL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
    "vision_feature_layer": -1,
}


def with_text(values: Mapping[str, Any], **changes: Any) -> dict[str, Any]:
    return {**values, "text_config": {**values["text_config"], **changes}}


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_gemmas_files_leave_out_is_as_in_transformers(name: str) -> None:
    values = PUBLISHED[name]
    spec = read(values)
    peer = Gemma3TextConfig(**values["text_config"])
    assert (spec.family, spec.num_layers) == ("gemma3_text", peer.num_hidden_layers)
    assert (spec.hidden_size, spec.intermediate_size) == (peer.hidden_size, peer.intermediate_size)
    heads = (peer.num_attention_heads, peer.num_key_value_heads, peer.head_dim)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == heads
    assert (spec.vocab_size, spec.context_length) == (peer.vocab_size, 131_072)
    assert (spec.inner_eps, spec.scale) == (peer.rms_norm_eps, peer.query_pre_attn_scalar**-0.5)
    assert spec.tie_word_embeddings
    windows = {"sliding_attention": 1024, "full_attention": None}
    assert spec.sliding_window == tuple(windows[kind] for kind in peer.layer_types)
    for layer, kind in enumerate(peer.layer_types):
        given, rope = peer.rope_parameters[kind], spec.rope_of(layer)
        found = (rope.type, rope.theta, rope.factor)
        assert found == (given["rope_type"], given["rope_theta"], given.get("factor"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_gemmas_files_as_transformers_writes_them_again(name: str) -> None:
    values = PUBLISHED[name]
    config = Gemma3Config(**{key: one for key, one in values.items() if key != "architectures"})
    config.architectures = values["architectures"]
    assert read(json.loads(config.to_json_string())) == read(values)
    assert read(json.loads(config.to_json_string(use_diff=False))) == read(values)


def test_mistral_small() -> None:
    spec = read(MISTRAL)
    peer = MistralConfig(**MISTRAL["text_config"])
    assert (spec.family, spec.rope.theta) == ("mistral", 1e9)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size) == (32, 8, peer.head_dim)
    assert spec.sliding_window == (None,) * 40


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**MISTRAL, "quantization_config": {"quant_method": "fp8"}}, "unquantized"),
        ({**MISTRAL, "mm_tokens_per_image": 256}, "mm_tokens_per_image = 256"),
        ({**PUBLISHED["gemma-3-4b-it"], "rope_theta": 1e4}, "rope_theta = 10000.0"),
        (with_text(MISTRAL, model_type="mistral9"), "'mistral9'; supported"),
        (with_text(MISTRAL, residual_multiplier=0.3), "text_config has 1 key"),
        (with_text(PUBLISHED["gemma-3-4b-it"], attn_logit_softcapping=50.0), "softcapping is 50"),
        (
            {
                "architectures": ["Qwen2_5_VLForConditionalGeneration"],
                "model_type": "qwen2_5_vl",
                "text_config": {},
            },
            "Mistral3ForConditionalGeneration",
        ),
    ],
)
def test_what_is_not_understood_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read(values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**MISTRAL, "text_config": None}, "lacks the key 'text_config'"),
        ({**MISTRAL, "text_config": "mistral"}, "'text_config' is 'mistral'"),
        (with_text(MISTRAL, hidden_size=None), "text_config lacks the key 'hidden_size'"),
        (with_text(PUBLISHED["gemma-3-4b-it"], vocab_size=None), "lacks the key 'vocab_size'"),
    ],
)
def test_a_configuration_that_makes_no_sense(values: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read(values)
    assert message in str(caught.value)


def exported(source: Path) -> Artifact:
    return Artifact.read(export_model(source, source.with_name("artifact"), OPTIONS))


@pytest.mark.parametrize("name", ["gemma3-images", "mistral3"])
def test_both_layouts_make_the_same_artifact(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = []
    for layout, original in (("older", True), ("newer", False)):
        source = tmp_path / layout / "checkpoint"
        case = checkpoints.CASES[name]
        checkpoints.make(case, source, save_original_format=original)
        with caplog.at_level(logging.WARNING):
            made.append(exported(source).manifest)
        told = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
        assert "that reads images" in told[-1]
        assert ("model.vision_tower" in told[-1] or "model.multi" in told[-1]) != original
        caplog.clear()
    older, newer = made
    assert older.model == newer.model
    for file in ("model.onnx", "model.onnx.data", "golden.npz"):
        assert older.files[file] == newer.files[file]


def edit(source: Path, prefix: str | tuple[str, ...], **keys: Any) -> dict[str, torch.Tensor]:
    """Change the configuration, and leave what begins with `prefix` out of the weights."""
    checkpoints.edit_config(source, **keys)
    tensors = load_file(source / WEIGHTS)
    left = {name: one for name, one in tensors.items() if not name.startswith(prefix)}
    save_file(left, source / WEIGHTS)
    return left


@pytest.mark.parametrize("tied", [True, False])
def test_without_a_key_the_head_tells_whether_it_is_tied(tied: bool, tmp_path: Path) -> None:
    """Mistral Small has a head of its own, and no key that says so."""
    case = checkpoints.CASES["mistral3"]
    source = tmp_path / "checkpoint"
    changed = checkpoints.Case(
        case.family, {**case.config, "tie_word_embeddings": tied}, inside=case.inside
    )
    checkpoints.make(changed, source)
    edit(source, "vision_tower", tie_word_embeddings=None)
    assert exported(source).manifest.model.tie_word_embeddings == tied


def test_a_text_model_in_a_wrapper_without_the_rest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.CASES["gemma3-images"], source)
    edit(source, ("vision_tower.", "multi_modal_projector."))
    with caplog.at_level(logging.WARNING):
        exported(source)
    assert not [one for one in caplog.records if "left out" in one.getMessage()]


def test_a_tensor_that_is_of_no_known_part(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.CASES["gemma3-images"], source)
    tensors = load_file(source / WEIGHTS)
    save_file(tensors | {"audio_tower.weight": torch.zeros(3)}, source / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"does not use: audio_tower\.weight"):
        exported(source)


def test_end_tokens_may_be_the_text_models(tmp_path: Path) -> None:
    source = tmp_path / "checkpoint"
    checkpoints.make(checkpoints.CASES["gemma3-images"], source)
    (source / "generation_config.json").unlink()
    checkpoints.edit_config(source, eos_token_id=None)
    assert exported(source).manifest.eos_token_ids == (2,)
