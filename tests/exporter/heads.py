"""Tiny random EAGLE-3 heads, and what PyTorch makes of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from tests.exporter.checkpoints import VOCAB, Case

Floats = NDArray[np.float32]
TARGET = Case("llama", {"num_hidden_layers": 8})
HIDDEN = 64  # of the target
HEADS, KV_HEADS, INNER = 4, 2, 96
EPSILON, THETA = 1e-5, 500.0


@dataclass(frozen=True)
class Head:
    """One head to make."""

    library: bool = False  # as speculators writes it, not as its authors do
    flags: Mapping[str, Any] = field(default_factory=dict)
    qwen3: bool = False
    layers: int = 1
    target_layers: tuple[int, ...] | None = None  # None: not told
    draft_vocab: int | None = 96  # None: all tokens
    hidden: int = HIDDEN
    own_embedding: bool = False
    stem: str = ""  # ahead of most tensors

    @property
    def features(self) -> int:
        return HIDDEN * len(self.target_layers or (2, 4, 5))

    @property
    def head_size(self) -> int:
        return 32 if self.qwen3 else self.hidden // HEADS

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        layers: dict[str, Any] = {
            "model_type": "qwen3" if self.qwen3 else "llama",
            "vocab_size": VOCAB,
            "hidden_size": self.hidden,
            "intermediate_size": INNER,
            "num_hidden_layers": self.layers,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": self.head_size,
            "rms_norm_eps": EPSILON,
            "rope_theta": THETA,
            "max_position_embeddings": 128,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }
        told: dict[str, Any] = dict(self.flags)
        if self.draft_vocab is not None:
            told["draft_vocab_size"] = self.draft_vocab
        if self.hidden != HIDDEN:
            told["target_hidden_size"] = HIDDEN
        ids = None if self.target_layers is None else list(self.target_layers)
        if self.library:
            return {
                "norm_before_residual": False,
                **told,
                "architectures": ["Eagle3Speculator"],
                "speculators_model_type": "eagle3",
                "speculators_version": "0.1",
                "speculators_config": {"algorithm": "eagle3"},
                "eagle_aux_hidden_state_layer_ids": ids,
                "transformer_layer_config": layers,
            }
        if ids is not None:
            told["eagle_config"] = {
                "eagle_aux_hidden_state_layer_ids": ids,
                "use_aux_hidden_state": True,
            }
        return {**layers, **told, "architectures": ["LlamaForCausalLMEagle3"]}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its weights, float32."""
        dice = torch.Generator().manual_seed(7)

        def matrix(rows: int, columns: int) -> torch.Tensor:
            return torch.randn(rows, columns, generator=dice) / columns**0.5

        def norm(size: int) -> torch.Tensor:
            return 1 + torch.randn(size, generator=dice) / 4

        hidden, stem = self.hidden, self.stem
        count = self.draft_vocab or VOCAB
        found = {f"{stem}fc.weight": matrix(hidden, self.features)}
        found[f"{stem}norm.weight"] = norm(hidden)
        found["lm_head.weight"] = 4 * matrix(count, hidden)
        for layer in range(self.layers):
            first = self.layers == 1 and not self.library
            prefix = f"{stem}midlayer." if first else f"{stem}layers.{layer}."
            inputs = hidden if layer else 2 * hidden
            found[f"{prefix}input_layernorm.weight"] = norm(hidden)
            found[f"{prefix}post_attention_layernorm.weight"] = norm(hidden)
            if not layer:
                found[f"{prefix}hidden_norm.weight"] = norm(hidden)
            for name, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                rows = heads * self.head_size
                found[f"{prefix}self_attn.{name}_proj.weight"] = 2 * matrix(rows, inputs)
            found[f"{prefix}self_attn.o_proj.weight"] = matrix(hidden, HEADS * self.head_size)
            for name in ("gate", "up"):
                found[f"{prefix}mlp.{name}_proj.weight"] = matrix(INNER, hidden)
            found[f"{prefix}mlp.down_proj.weight"] = matrix(hidden, INNER)
            if self.qwen3:
                found[f"{prefix}self_attn.q_norm.weight"] = norm(self.head_size)
                found[f"{prefix}self_attn.k_norm.weight"] = norm(self.head_size)
        if self.flags.get("norm_before_fc"):
            found[f"{stem}input_norm.weight"] = norm(self.features)
        if self.flags.get("fc_norm"):
            for place in range(self.features // HIDDEN):
                found[f"{stem}fc_norm.{place}.weight"] = norm(HIDDEN)
        if self.own_embedding or self.hidden != HIDDEN:
            found[f"{stem}embed_tokens.weight"] = torch.randn(VOCAB, hidden, generator=dice)
        if self.draft_vocab is not None:
            chosen = torch.randperm(VOCAB, generator=dice)[:count].sort().values
            found["d2t"] = chosen - torch.arange(count)
            found["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
            found["t2d"][chosen] = True
        return found

    def make(self, folder: Path, changes: Mapping[str, torch.Tensor | None] | None = None) -> Path:
        """Write the checkpoint; `changes` replace tensors, or leave them out."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        tensors: dict[str, torch.Tensor | None] = {**self.tensors(), **(changes or {})}
        kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
        save_file(kept, folder / "model.safetensors")
        return folder


def torch_head(
    head: Head, embedding: torch.Tensor, ids: NDArray[np.int64], given: Floats, own: Floats
) -> tuple[Floats, Floats]:
    """Logits, [tokens, draft vocab], and the head's states, [tokens, hidden], of one sequence."""
    weights = {name.removeprefix(head.stem): one for name, one in head.tensors().items()}
    weights = {name.replace("midlayer.", "layers.0."): one for name, one in weights.items()}
    flags, hidden, count = head.flags, head.hidden, len(ids)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, (x.shape[-1],), weights[f"{name}.weight"], EPSILON)

    features = torch.from_numpy(given)
    if flags.get("norm_before_fc"):
        features = norm(features, "input_norm")
    if flags.get("fc_norm"):
        parts = features.split(HIDDEN, dim=-1)
        features = torch.cat([norm(one, f"fc_norm.{i}") for i, one in enumerate(parts)], -1)
    stream = features @ weights["fc.weight"].T + torch.from_numpy(own)
    config = LlamaConfig(
        hidden_size=hidden,
        num_attention_heads=HEADS,
        head_dim=head.head_size,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )
    cos, sin = LlamaRotaryEmbedding(config)(stream, torch.arange(count)[None])
    for layer in range(head.layers):
        name = f"layers.{layer}"
        read = stream if layer else embedding[torch.from_numpy(ids)]
        read = norm(read, f"{name}.input_layernorm")
        if not layer:
            state = norm(stream, f"{name}.hidden_norm")
            read = torch.cat([read, state], -1)
            stream = state if flags.get("norm_before_residual") else stream

        def heads(kind: str, read: torch.Tensor = read, name: str = name) -> torch.Tensor:
            x = read @ weights[f"{name}.self_attn.{kind}_proj.weight"].T
            x = x.view(1, count, -1, head.head_size)
            if head.qwen3 and kind != "v":
                x = norm(x, f"{name}.self_attn.{kind}_norm")
            return x.transpose(1, 2)

        q, k = apply_rotary_pos_emb(heads("q"), heads("k"), cos, sin)
        attended = scaled_dot_product_attention(q, k, heads("v"), is_causal=True, enable_gqa=True)
        attended = attended.transpose(1, 2).reshape(count, -1)
        stream = stream + attended @ weights[f"{name}.self_attn.o_proj.weight"].T
        read = norm(stream, f"{name}.post_attention_layernorm")
        gate, up = (read @ weights[f"{name}.mlp.{kind}_proj.weight"].T for kind in ("gate", "up"))
        stream = stream + (silu(gate) * up) @ weights[f"{name}.mlp.down_proj.weight"].T
    normed = norm(stream, "norm")
    logits = normed @ weights["lm_head.weight"].T
    last = normed if flags.get("norm_output") else stream
    return logits.numpy(), last.numpy()
