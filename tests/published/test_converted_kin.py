"""Models that transformers has no class for, as published and as llama.cpp's converter writes them.

By their tensors they are Llama or Granite, whose logits are compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from tests.exporter import checkpoints
from tests.exporter.run_graphs import Graph
from tests.published.converting import convert
from tests.published.places import needs_llama_cpp

pytestmark = needs_llama_cpp

Tensors = dict[str, torch.Tensor]
HEAD = 16
BASE: Mapping[str, Any] = {
    **{"vocab_size": checkpoints.VOCAB, "hidden_size": 64, "intermediate_size": 96},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    "rope_theta": 500.0,
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0},
    **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}
EXAONE = (
    (r"model\.embed_tokens", "transformer.wte"),
    (r"model\.norm", "transformer.ln_f"),
    (r"model\.layers", "transformer.h"),
    (r"input_layernorm", "ln_1"),
    (r"post_attention_layernorm", "ln_2"),
    (r"self_attn\.o_proj", "attn.attention.out_proj"),
    (r"self_attn", "attn.attention"),
    (r"mlp\.gate_proj", "mlp.c_fc_0"),
    (r"mlp\.up_proj", "mlp.c_fc_1"),
    (r"mlp\.down_proj", "mlp.c_proj"),
)
INTERNLM2 = (
    (r"embed_tokens", "tok_embeddings"),
    (r"lm_head", "output"),
    (r"input_layernorm", "attention_norm"),
    (r"post_attention_layernorm", "ffn_norm"),
    (r"self_attn\.o_proj", "attention.wo"),
    (r"mlp\.gate_proj", "feed_forward.w1"),
    (r"mlp\.up_proj", "feed_forward.w3"),
    (r"mlp\.down_proj", "feed_forward.w2"),
)


def renamed(tensors: Tensors, names: tuple[tuple[str, str], ...]) -> Tensors:
    found = {}
    for name, tensor in tensors.items():
        for pattern, other in names:
            name = re.sub(pattern, other, name)
        found[name] = tensor
    return found


def exaone(tensors: Tensors) -> Tensors:
    return renamed(tensors, EXAONE)


def internlm2(tensors: Tensors) -> Tensors:
    """With the queries that share a key ahead of it and of its value, in one tensor."""
    found = renamed(tensors, INTERNLM2)
    for name in [one for one in found if one.endswith("q_proj.weight")]:
        parts = [found.pop(name.replace("q_proj", f"{kind}_proj")) for kind in "qkv"]
        rows = [
            part.reshape(BASE["num_key_value_heads"], -1, HEAD, part.shape[1]) for part in parts
        ]
        joined = torch.cat(rows, dim=1).reshape(-1, parts[0].shape[1])
        found[name.replace("self_attn.q_proj", "attention.wqkv")] = joined
    return found


def same(tensors: Tensors) -> Tensors:
    return tensors


@pytest.mark.parametrize(
    ("architecture", "spell", "config", "own"),
    [
        (
            "ExaoneForCausalLM",
            exaone,
            {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
            {"activation_function": "silu", "num_layers": 2, "rope_scaling": LLAMA3},
        ),
        ("InternLM2ForCausalLM", internlm2, {}, {"num_hidden_layers": 2, "bias": False}),
        (
            "MiniCPMForCausalLM",
            same,
            {
                **{"embedding_multiplier": 12.0, "residual_multiplier": 1.4 / 2**0.5},
                **{"logits_scaling": 4.0, "attention_multiplier": HEAD**-0.5},
            },
            {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16, "num_hidden_layers": 2},
        ),
    ],
)
def test_logits(
    tmp_path: Path,
    architecture: str,
    spell: Callable[[Tensors], Tensors],
    config: dict[str, Any],
    own: dict[str, Any],
) -> None:
    folder = tmp_path / "checkpoint"
    family = "granite" if "logits_scaling" in config else "llama"
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}
    case = checkpoints.Case(family, {"rms_norm_eps": 0.05, **rope, **config})
    model = checkpoints.make(case, folder)
    weights = folder / "model.safetensors"
    spelled = spell(load_file(weights))
    save_file(spelled, weights)
    tied = case.config.get("tie_word_embeddings", False)
    own_type = architecture.removesuffix("ForCausalLM").lower()
    told = {"architectures": [architecture], "model_type": own_type, "rms_norm_eps": 0.05}
    values = {**BASE, **told, **own, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(values))
    path = convert(folder, tmp_path / "model.gguf")
    options = ExportOptions(precision="fp32", threads=1)
    token_ids = checkpoints.tokens()
    expected = checkpoints.logits(model, token_ids)
    for source in (path, folder):
        artifact = Artifact.read(export_model(source, tmp_path / f"of-{source.name}", options))
        found = Graph(artifact, "decomposed").logits(token_ids)
        np.testing.assert_allclose(found, expected, atol=1e-4)
