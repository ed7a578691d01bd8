"""An EAGLE-3 head in PyTorch: one layer that reads what a demo model's layers read.

Its tensors and its config.json are as the authors of EAGLE-3 publish them (arXiv:2503.01840).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import embedding, silu
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

LAYERS = [2, 3, 4]  # of the model, whose input the head reads


class Head(nn.Module):
    """The head, which has logits of some tokens only."""

    def __init__(self, config: LlamaConfig, tokens: Tensor, layers: list[int]) -> None:
        """Make one at random.

        Args:
            config: of the model.
            tokens: those that have a logit, int64 [logits], ascending.
            layers: of the model, whose input the head reads.
        """
        super().__init__()
        hidden = config.hidden_size
        self.config, self.layers = config, layers
        self.register_buffer("tokens", tokens, persistent=False)
        self.fc = nn.Linear(len(layers) * hidden, hidden, bias=False)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, len(tokens), bias=False)

    def logits(self, stream: Tensor) -> Tensor:
        """Logits [..., logits] of the head's states [..., hidden]."""
        return self.lm_head(self.norm(stream))

    def save(self, folder: Path) -> None:
        """Write a checkpoint in bfloat16."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: one.to(torch.bfloat16) for name, one in self.state_dict().items()}
        vocab, count = self.config.vocab_size, len(self.tokens)
        have_logits = torch.zeros(vocab, dtype=torch.bool)
        have_logits[self.tokens] = True
        tensors |= {"d2t": self.tokens - torch.arange(count), "t2d": have_logits}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self._config(), indent=2) + "\n")

    def _config(self) -> dict[str, Any]:
        keys = (
            "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings",
            "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_parameters",
            "vocab_size",
        )  # fmt: skip
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": len(self.tokens),
            "dtype": "bfloat16",
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": self.layers,
                "use_aux_hidden_state": True,
            },
            "model_type": "llama",
            "num_hidden_layers": 1,
            "tie_word_embeddings": False,
            **{key: getattr(self.config, key) for key in keys},
        }

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read what `save` wrote, in float32."""
        config = LlamaConfig.from_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        offsets, _ = tensors.pop("d2t"), tensors.pop("t2d")
        head = cls(
            config,
            offsets + torch.arange(len(offsets)),
            config.eagle_config["eagle_aux_hidden_state_layer_ids"],
        )
        head.load_state_dict({name: one.float() for name, one in tensors.items()})
        return head.eval()


class _Layer(nn.Module):
    """A layer of a Llama whose attention reads twice as much: token and state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        self.hidden_norm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(hidden, config.rms_norm_eps)
        self.self_attn = _matrices(
            q_proj=(2 * hidden, config.num_attention_heads * size),
            k_proj=(2 * hidden, config.num_key_value_heads * size),
            v_proj=(2 * hidden, config.num_key_value_heads * size),
            o_proj=(config.num_attention_heads * size, hidden),
        )
        self.mlp = _matrices(
            gate_proj=(hidden, config.intermediate_size),
            up_proj=(hidden, config.intermediate_size),
            down_proj=(config.intermediate_size, hidden),
        )
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.size = size

    def project(self, tokens: Tensor, stream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [rows, heads, length, size], of embeddings and states."""
        read = torch.cat([self.input_layernorm(tokens), self.hidden_norm(stream)], -1)
        q, k, v = (
            self.self_attn[f"{name}_proj"](read).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for name in "qkv"
        )
        return q, k.repeat_interleave(self.groups, 1), v.repeat_interleave(self.groups, 1)

    def finish(self, stream: Tensor, attended: Tensor) -> Tensor:
        """The layer's output of what attention found, [rows, heads, length, size]."""
        stream = stream + self.self_attn["o_proj"](attended.transpose(1, 2).flatten(2))
        read = self.post_attention_layernorm(stream)
        gate, up = self.mlp["gate_proj"](read), self.mlp["up_proj"](read)
        return stream + self.mlp["down_proj"](silu(gate) * up)


def _matrices(**sizes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


@torch.no_grad()
def states_and_logits(
    model: LlamaForCausalLM, ids: Tensor, layers: list[int]
) -> tuple[Tensor, Tensor]:
    """What a model tells the head, [rows, length, features], and its logits, [..., vocab]."""
    output = model(ids, use_cache=False, output_hidden_states=True)
    return torch.cat([output.hidden_states[layer] for layer in layers], -1), output.logits


def drafts(
    model: LlamaForCausalLM, head: Head, ids: Tensor, states: Tensor, places: int
) -> Iterator[Tensor]:
    """Yield the head's logits at each place of a draft, as if one began at every token.

    A draft's first place reads the model's state, each further one what the head made of the place
    before. So a token at place `p` attends to `p` tokens as drafts see them, itself included, and
    to all before them as the model's states show them: EAGLE-3's "training-time test".

    Args:
        model: whose embedding the head reads.
        head: the head.
        ids: int64 [rows, length].
        states: [rows, length, features], of these tokens.
        places: of a draft.

    Yields:
        float32 [rows, length - 1, logits], which says of token i + 1 what follows it. The first
        `place` columns are of no draft, for it would begin before the text.
    """
    tokens = embedding(ids[:, 1:], model.model.embed_tokens.weight)
    length = tokens.shape[1]
    angles = model.model.rotary_emb(tokens, torch.arange(length)[None])
    stream = head.fc(states[:, :-1])
    columns = torch.arange(length)
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for place in range(places):
        q, k, v = head.midlayer.project(tokens, stream)
        q, k = apply_rotary_pos_emb(q, k, *angles)
        keys.append(k)
        values.append(v)
        scores = q @ keys[0].transpose(2, 3)
        seen = columns[None] <= (columns[:, None] - place).clamp_min(0)
        scores = scores.masked_fill(~seen, -torch.inf)
        behind = range(place - 1, -1, -1)  # how far back the draft's own tokens are
        own = [(q * key.roll(n, 2)).sum(-1) for n, key in zip(behind, keys[1:], strict=True)]
        scores = torch.cat([scores, *(one[..., None] for one in own)], -1)
        weights = (scores / head.midlayer.size**0.5).softmax(-1)
        attended = weights[..., :length] @ values[0]
        for number, (n, value) in enumerate(zip(behind, values[1:], strict=True)):
            attended = attended + weights[..., length + number, None] * value.roll(n, 2)
        stream = head.midlayer.finish(stream, attended)
        yield head.logits(stream)
        stream = stream.roll(1, 1)
