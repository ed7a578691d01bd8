"""Dense models in GGUF files, as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from tests.exporter import checkpoints
from tests.exporter.run_graphs import Graph
from tests.published.converted import Model, check
from tests.published.converting import convert
from tests.published.places import needs_llama_cpp
from tests.published.tokenizers import write_tokenizer
from tests.tiers import every

pytestmark = needs_llama_cpp

FP32 = ExportOptions(precision="fp32", threads=1)
# As OLMo 3 has it, whose configuration tells the magnitude that is yarn's anyway.
YARN = {
    **{
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 8.0,
        "attention_factor": 1.2079441541679836,
    },
    **{"original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0},
}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10_000.0, "alpha": 1000.0, "factor": 1.0}
NEOX = {"rotary_pct": 0.5}
MODELS: Mapping[str, Model] = {
    **{name: Model(name) for name in ("apertus", "arcee", "cohere", "ernie", "ernie-biases")},
    **{
        name: Model(name)
        for name in ("exaone4", "exaone4-full", "glm4", "granite", "granite-biases")
    },
    **{name: Model(name) for name in ("hunyuan-biases", "internlm3", "internlm3-biases", "llama")},
    **{name: Model(name) for name in ("llama-linear", "llama-llama3", "llama-mha", "llama-yarn")},
    **{name: Model(name) for name in ("llama-mqa-biases", "llama-tied", "mistral", "mistral3")},
    **{name: Model(name) for name in ("nemotron-biases", "olmo", "olmo2")},
    **{name: Model(name) for name in ("olmo2-biases", "olmo3", "phi3", "qwen2")},
    **{
        name: Model(name)
        for name in ("qwen2-ragged", "qwen3", "qwen3-biases", "seed-oss", "stablelm")
    },
    **{name: Model(name) for name in ("phi3-window", "starcoder2-plain")},
    **{name: Model(name) for name in ("ministral3", "ministral3-text")},
    **{name: Model(name) for name in ("iquestcoder", "jais2")},
    "granite-swa": Model(  # the converter does not read bases of layers
        "granite-swa",
        {
            "layer_rope_theta": [500.0] * 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "phi3-longrope": Model("phi3-longrope", context_length=64),
    "arcee-biases": Model("arcee-biases", {"hidden_act": "relu2"}),
    "cohere-norms": Model("cohere-norms", {"tie_word_embeddings": True}),
    "cohere2": Model(
        "cohere2",
        {
            "tie_word_embeddings": True,
            "num_hidden_layers": 4,
            "layer_types": [*["sliding_attention"] * 3, "full_attention"],
        },
        {"rotary_pct": 1.0},
    ),
    "gemma": Model("gemma"),
    "gemma2": Model("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma3": Model(
        "gemma3", {"query_pre_attn_scalar": 32, "num_hidden_layers": 7, "layer_types": None}
    ),
    "gemma3-images": Model(
        "gemma3-images", {"query_pre_attn_scalar": 16, "num_hidden_layers": 6, "layer_types": None}
    ),
    "glm": Model(  # of whose context the converter knows nothing
        "glm", {"head_dim": 16, "rms_norm_eps": 1e-5}, context_length=64
    ),
    "glm-fused": Model(
        "glm",
        {"head_dim": 16, "rms_norm_eps": 1e-5},
        options={"fuse_qkv": True},
        context_length=64,
    ),
    "falcon": Model("falcon", {}, {"num_kv_heads": 1}),
    "falcon-new": Model("falcon-new", {"bias": False}),
    "gpt-bigcode": Model("gpt-bigcode"),
    "gpt2": Model("gpt2", {}, {"n_ctx": 128}),  # which newer files lack
    "gpt-neox": Model("gpt-neox", {}, NEOX),
    "gpt-neox-turns": Model("gpt-neox-turns", {"hidden_act": "gelu"}, {"rotary_pct": 1.0}),
    "hunyuan": Model(
        "hunyuan",
        {
            **{"head_dim": 128, "max_position_embeddings": 32_768},
            "rope_parameters": ALPHA,
        },
        {"num_experts": 1},
    ),
    "ministral3-fused": Model("ministral3", options={"fuse_qkv": True}),
    "llama-fused": Model("llama", options={"fuse_qkv": True}),
    "llama-fused-biases": Model("llama-mqa-biases", options={"fuse_qkv": True}),
    "qwen2-fused": Model("qwen2", options={"fuse_qkv": True}),
    "nemotron": Model("nemotron", {"head_dim": 16}),
    "olmo3-told": Model(
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
    ),
    "phi": Model("phi", {"num_key_value_heads": 4, "intermediate_size": 512}),
    "phi-fused": Model(
        "phi", {"num_key_value_heads": 4, "intermediate_size": 512}, options={"fuse_qkv": True}
    ),
    "phi-mha": Model("phi-mha", {"intermediate_size": 256, "hidden_act": "gelu_new"}),
    "smollm3": Model("smollm3", {"no_rope_layer_interval": 4, "num_hidden_layers": 5}),
    "starcoder2": Model("starcoder2", {"sliding_window": None}),
}


@pytest.mark.parametrize("name", every(3, sorted(MODELS)))
def test_logits(tmp_path: Path, name: str) -> None:
    if name.startswith("gemma3"):  # whose embedding is cut to as many rows as there are tokens
        write_tokenizer(tmp_path / "checkpoint", checkpoints.VOCAB)
    check(MODELS[name], tmp_path)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_texts_of_models_that_read_images(tmp_path: Path, family: str) -> None:
    """Qwen's, whose tokens of images have several positions."""
    rope = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [3, 3, 2]}
    config = {"head_dim": 16, "rope_parameters": rope}
    case = checkpoints.Case(f"{family}_text", config, inside=family)
    model = checkpoints.make(case, tmp_path / "checkpoint")
    path = convert(tmp_path / "checkpoint", tmp_path / "model.gguf")
    check_logits(path, tmp_path / "artifact", model, 1e-4)


def check_logits(path: Path, destination: Path, model: PreTrainedModel, atol: float) -> None:
    artifact = Artifact.read(export_model(path, destination, FP32))
    token_ids = checkpoints.tokens()
    found = Graph(artifact, "decomposed").logits(token_ids)
    np.testing.assert_allclose(found, checkpoints.logits(model, token_ids), atol=atol)


@pytest.mark.parametrize(
    ("outtype", "dtype", "tolerance"),
    [("bf16", torch.bfloat16, 1e-4), ("f16", torch.float16, 1e-4), ("q8_0", torch.float32, 0.3)],
)
def test_types(tmp_path: Path, outtype: str, dtype: torch.dtype, tolerance: float) -> None:
    """16 bits are those of the checkpoint; what is in blocks of 8 is off by as much as it is."""
    case = replace(checkpoints.CASES["qwen3"], dtype=dtype)
    model = checkpoints.make(case, tmp_path / "checkpoint")
    path = convert(tmp_path / "checkpoint", tmp_path / "model.gguf", outtype)
    check_logits(path, tmp_path / "artifact", model, tolerance)


def test_files_of_a_split_model(tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES["llama"], tmp_path / "checkpoint")
    whole = convert(tmp_path / "checkpoint", tmp_path / "whole.gguf")
    convert(tmp_path / "checkpoint", tmp_path / "split.gguf", split_max_tensors=6)
    paths = sorted(tmp_path.glob("split-*.gguf"))
    assert len(paths) == 4
    artifacts = [export_model(one, tmp_path / one.stem, FP32) for one in (whole, paths[0])]
    one, other = ((artifact / "model.onnx.data").read_bytes() for artifact in artifacts)
    assert one == other
