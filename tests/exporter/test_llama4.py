"""Llama 4: what its configurations say, what is refused, and experts of one tensor or many."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto
from safetensors.torch import load_file, save_file

from onnxport.errors import ArtifactError, CheckpointError, ProviderError, UnsupportedModelError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.exporter.rope import inverse_frequencies
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.growth_spec import GrowthSpec
from onnxport.graphs.passes.flat_paged import flatten_paged
from onnxport.graphs.passes.native import NativeLimits, keep_native
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.cpu.lowering import KERNEL_LIMITS
from tests.exporter import checkpoints
from tests.exporter.configs import read

# By what is known of published files: no hub is at hand.
ROPE: dict[str, Any] = {
    "factor": 16.0,
    "high_freq_factor": 1.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
TEXT: dict[str, Any] = {
    "model_type": "llama4_text",
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attention_dropout": 0.0,
    "attn_scale": 0.1,
    "attn_temperature_tuning": 4,
    "floor_scale": 8192,
    "for_llm_compressor": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 10485760,
    "no_rope_layers": [],
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": ROPE,
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "use_qk_norm": True,
    "vocab_size": 202048,
}
SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "boi_token_index": 200080,
    "eoi_token_index": 200081,
    "image_token_index": 200092,
    "model_type": "llama4",
    "text_config": TEXT,
    "vision_config": {"model_type": "llama4_vision_model"},
}
MAVERICK: dict[str, Any] = {
    **TEXT,
    "architectures": ["Llama4ForCausalLM"],
    "interleave_moe_layer_step": 2,
    "max_position_embeddings": 1048576,
    "num_local_experts": 128,
    "rope_scaling": None,
    "use_qk_norm": False,
}
MOBILE: dict[str, Any] = {
    **TEXT,
    "architectures": ["Llama4ForCausalLM"],
    "attn_temperature_tuning": False,
    "interleave_moe_layer_step": 0,
    "layer_types": ["full_attention"] * 4,
    "max_position_embeddings": 32768,
    "moe_layers": [],
    "no_rope_layers": [1] * 4,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 4,
    "num_local_experts": 0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}


def test_scout(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        spec = read(SCOUT)
    assert "the context is 8192 tokens, not 10485760" in caplog.text
    assert (spec.family, spec.context_length, spec.chunked_windows) == ("llama4_text", 8192, None)
    assert spec.sliding_window == (None,) * 48
    assert (spec.rope.type, spec.rope.interleaved) == ("llama3", True)
    assert spec.rotated_layers == (True, True, True, False) * 12
    assert (spec.qk_norm, spec.unweighted_qk_norm) == (True, True)
    assert [spec.norms_heads(layer) for layer in range(4)] == [True, True, True, False]
    assert [spec.grows(layer) for layer in range(4)] == [False, False, False, True]
    assert spec.query_growth == GrowthSpec(strength=0.1, interval=8192, offset=1, without_rope=True)
    experts = spec.experts
    assert experts is not None
    assert (experts.count, experts.per_token, experts.size, experts.layers) == (16, 1, 8192, None)
    assert (experts.scaled_inputs, experts.shared_size) == (True, 8192)
    assert spec.has_gqa_graph
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_a_context_of_many_chunks() -> None:
    spec = read(SCOUT, 65536)
    assert (spec.context_length, spec.chunked_windows) == (65536, True)
    assert spec.sliding_window == (8192, 8192, 8192, None) * 12
    assert not spec.has_gqa_graph
    assert ArchSpec.from_json(json.loads(json.dumps(spec.to_json()))) == spec


def test_maverick_and_mobilellm() -> None:
    spec = read(MAVERICK, 8192)
    assert (spec.qk_norm, spec.unweighted_qk_norm, spec.rope.type) == (False, None, "default")
    assert spec.intermediate_size == 16384
    assert spec.experts is not None
    assert spec.experts.layers == (False, True) * 24
    small = read(MOBILE)
    assert (small.experts, small.rotated_layers, small.query_growth) == (None, None, None)
    assert (small.context_length, small.sliding_window) == (32768, (None,) * 4)
    assert (small.tie_word_embeddings, small.qk_norm) == (True, True)


def test_tuning_that_is_null_is_none() -> None:
    """As transformers and others take it, which ask whether it is true."""
    for value in (None, False, 0):
        spec = read({**SCOUT, "text_config": {**TEXT, "attn_temperature_tuning": value}})
        assert spec.query_growth is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2; supported is 1"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0; it must be above 0"),
        ({"layer_types": ["full_attention"]}, "48 entries"),
        ({"layer_types": ["sliding_attention"] * 48}, "from .'chunked_attention', 'full_attent"),
        ({"moe_layers": [48]}, "moe_layers is .48.; its entries must be from 0 to 47"),
        ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0, and there is no moe_l"),
        ({"floor_scale": 0}, "floor_scale 0: interval of growing queries must be positive"),
        ({"attn_temperature_tuning": "yes"}, "attn_temperature_tuning is 'yes'"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is .1, 0. "),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "norms behind it .use_qk_norm. take back",
        ),
    ],
)
def test_what_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        read({**SCOUT, "text_config": {**TEXT, **changes}})


def test_a_low_and_a_high_factor_that_are_equal() -> None:
    """Which Scout has: what turns more often than once within the original context stays."""
    rope = read(SCOUT).rope
    found = inverse_frequencies(rope, 8192)
    base = 1 / (500_000.0 ** (np.arange(0, 128, 2) / 128))
    wanted = np.where(8192 * base / (2 * np.pi) < 1, base / 16, base)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert 0 < np.count_nonzero(found < base / 8) < 64


def _apart(folder: Path) -> None:
    """Store experts as quantizers do: two tensors of gate and up, and one of down, each its own."""
    path = folder / "model.safetensors"
    found: dict[str, torch.Tensor] = {}
    for name, one in load_file(path).items():
        prefix = name.rpartition(".")[0]
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(one):
                for kind, part in zip(("gate", "up"), both.T.chunk(2), strict=True):
                    found[f"{prefix}.{expert}.{kind}_proj.weight"] = part.contiguous()
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(one):
                found[f"{prefix}.{expert}.down_proj.weight"] = down.T.contiguous()
        else:
            found[name] = one
    save_file(found, path)


@pytest.mark.parametrize("precision", ["int4", pytest.param("int8", marks=pytest.mark.slow)])
def test_experts_of_one_tensor_or_each_of_its_own(tmp_path: Path, precision: Any) -> None:
    options = ExportOptions(precision=precision, threads=1, group_size=32)
    checkpoints.make(checkpoints.CASES["llama4"], tmp_path / "checkpoint")
    one = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "one", options))
    _apart(tmp_path / "checkpoint")
    other = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "other", options))
    name = "model.onnx.data"
    assert (one.path / name).read_bytes() == (other.path / name).read_bytes()


def _chunked(folder: Path, precision: Any = "fp32") -> Artifact:
    """An artifact whose context is of many chunks."""
    case = checkpoints.CASES["llama4-chunks"]
    checkpoints.make(case, folder / "checkpoint")
    options = ExportOptions(precision=precision, threads=1, context_length=case.context_length)
    return Artifact.read(export_model(folder / "checkpoint", folder / "artifact", options))


def test_factors_of_queries_are_not_rounded(tmp_path: Path) -> None:
    """Where activations are float16, for a provider may compute in float32."""
    graph = _chunked(tmp_path, "fp16").load_graph("paged").graph
    assert {one.data_type for one in graph.initializer if ".growth" in one.name} == {
        TensorProto.FLOAT
    }


def test_the_kernel_takes_chunks(tmp_path: Path) -> None:
    """On cpu, whose own PagedAttention it is."""
    model = _chunked(tmp_path).load_graph("paged")
    assert keep_native(model, KERNEL_LIMITS).changes == {"PagedAttention kept": 4}


def test_providers_without_chunks_refuse_them(tmp_path: Path) -> None:
    model = _chunked(tmp_path).load_graph("paged")
    types = frozenset({"float32"})
    limits = NativeLimits(activation_dtypes=types, cache_dtypes=types, max_head_size=256)
    with pytest.raises(ProviderError, match="does not take the model: attention in chunks"):
        keep_native(model, limits)
    with pytest.raises(ArtifactError, match="uses attention in chunks"):
        flatten_paged(model)
