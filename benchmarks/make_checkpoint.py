"""Write a random checkpoint with the shape of a published model, for benchmarks.

    python -m benchmarks.make_checkpoint --shape qwen2.5-0.5b /tmp/qwen-shaped

Weights are random bfloat16, written as they are made, so that any size fits any memory. The
tokenizer is byte-level BPE without merges: every text round-trips, one token a byte.
"""

from __future__ import annotations

import argparse
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from benchmarks.shapes import SHAPES

_CHUNK_ELEMENTS: Final = 1 << 22
DRAFT_STRIDE: Final = 4  # a head has a logit for each of so many tokens
DRAFT_VOCAB: Final = 32_000


def tensor_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor's name and shape."""
    hidden = config["hidden_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    if config["model_type"] == "lfm2":
        yield from _short_convs(config, q, kv, head)
        return
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        interval = config.get("full_attention_interval")
        if interval and (layer + 1) % interval:
            yield from _delta_net(config, prefix)
            continue
        if config["model_type"] == "granitemoehybrid":
            yield prefix + "post_attention_layernorm.weight", (hidden,)
            size = config["shared_intermediate_size"]
            yield prefix + "shared_mlp.input_linear.weight", (2 * size, hidden)
            yield prefix + "shared_mlp.output_linear.weight", (hidden, size)
            if config["layer_types"][layer] == "mamba":
                yield from _space(config, prefix + "mamba.")
                continue
        for name, size in (("q", 2 * q if interval else q), ("k", kv), ("v", kv)):
            yield f"{prefix}self_attn.{name}_proj.weight", (size, hidden)
            if config["model_type"] in ("qwen2", "gpt_oss"):
                yield f"{prefix}self_attn.{name}_proj.bias", (size,)
        yield prefix + "self_attn.o_proj.weight", (hidden, q)
        if config["model_type"] == "gpt_oss":
            yield prefix + "self_attn.o_proj.bias", (hidden,)
            yield prefix + "self_attn.sinks", (config["num_attention_heads"],)
        if config["model_type"] == "granitemoehybrid":
            continue
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        if config["model_type"] == "gemma3_text":
            yield prefix + "self_attn.q_norm.weight", (head,)
            yield prefix + "self_attn.k_norm.weight", (head,)
            yield prefix + "pre_feedforward_layernorm.weight", (hidden,)
            yield prefix + "post_feedforward_layernorm.weight", (hidden,)
        if config["model_type"] in ("olmoe", "qwen3_moe") or interval:
            whole = config["model_type"] == "olmoe"
            yield prefix + "self_attn.q_norm.weight", (q if whole else head,)
            yield prefix + "self_attn.k_norm.weight", (kv if whole else head,)
        if config["model_type"] == "granitemoe":
            yield from _joined_experts(config, prefix + "block_sparse_moe.")
            continue
        yield from _feed_forward(config, prefix + "mlp.")
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _delta_net(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a layer without attention, but for its first norm."""
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    channels = 2 * keys + values
    if config["model_type"] == "qwen3_next":
        products = {"qkvz": channels + values, "ba": 2 * heads}
    else:
        products = {"qkv": channels, "z": values, "b": heads, "a": heads}
    for name, rows in products.items():
        yield f"{prefix}linear_attn.in_proj_{name}.weight", (rows, hidden)
    kernel = (channels, 1, config["linear_conv_kernel_dim"])
    yield prefix + "linear_attn.conv1d.weight", kernel
    yield prefix + "linear_attn.A_log", (heads,)
    yield prefix + "linear_attn.dt_bias", (heads,)
    yield prefix + "linear_attn.norm.weight", (config["linear_value_head_dim"],)
    yield prefix + "linear_attn.out_proj.weight", (hidden, values)
    yield prefix + "post_attention_layernorm.weight", (hidden,)
    yield from _feed_forward(config, prefix + "mlp.")


def _space(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a state space."""
    hidden, heads = config["hidden_size"], config["mamba_n_heads"]
    width = heads * config["mamba_d_head"]
    channels = width + 2 * config["mamba_n_groups"] * config["mamba_d_state"]
    yield prefix + "in_proj.weight", (width + channels + heads, hidden)
    yield prefix + "conv1d.weight", (channels, 1, 4)
    yield prefix + "conv1d.bias", (channels,)
    for name in ("A_log", "dt_bias", "D"):
        yield prefix + name, (heads,)
    yield prefix + "norm.weight", (width,)
    yield prefix + "out_proj.weight", (hidden, width)


def _short_convs(
    config: dict[str, Any], q: int, kv: int, head: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of LFM2 behind the embedding, which is the head, too."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    for layer, kind in enumerate(config["layer_types"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "operator_norm.weight", (hidden,)
        if kind == "conv":
            yield prefix + "conv.conv.weight", (hidden, 1, config["conv_L_cache"])
            yield prefix + "conv.in_proj.weight", (3 * hidden, hidden)
            yield prefix + "conv.out_proj.weight", (hidden, hidden)
        else:
            for name, rows, columns in (
                ("q_proj", q, hidden),
                ("k_proj", kv, hidden),
                ("v_proj", kv, hidden),
                ("out_proj", hidden, q),
            ):
                yield f"{prefix}self_attn.{name}.weight", (rows, columns)
            yield prefix + "self_attn.q_layernorm.weight", (head,)
            yield prefix + "self_attn.k_layernorm.weight", (head,)
        yield prefix + "ffn_norm.weight", (hidden,)
        for name, rows, columns in (
            ("w1", inner, hidden),
            ("w3", inner, hidden),
            ("w2", hidden, inner),
        ):
            yield f"{prefix}feed_forward.{name}.weight", (rows, columns)
    yield "model.embedding_norm.weight", (hidden,)


def _joined_experts(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a router and of Granite's experts, which are stored as one."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    experts = config["num_local_experts"]
    yield prefix + "router.layer.weight", (experts, hidden)
    yield prefix + "input_linear.weight", (experts, 2 * inner, hidden)
    yield prefix + "output_linear.weight", (experts, hidden, inner)


def head_config(target: dict[str, Any], draft_vocab: int) -> dict[str, Any]:
    """An EAGLE-3 head for a model, a layer of the model's own sizes."""
    copied = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    more = ("head_dim", "vocab_size", "rms_norm_eps", "rope_theta", "max_position_embeddings")
    return {
        **{name: target[name] for name in (*copied, *more) if name in target},
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": 1,
        "draft_vocab_size": min(draft_vocab, target["vocab_size"] // DRAFT_STRIDE),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def head_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of a head as it is published first; the model's embedding is not among them."""
    hidden = config["hidden_size"]
    head = config.get("head_dim", hidden // config["num_attention_heads"])
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "fc.weight", (hidden, 3 * hidden)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        yield f"midlayer.{name}.weight", (hidden,)
    for name, size in (("q", q), ("k", kv), ("v", kv)):
        yield f"midlayer.self_attn.{name}_proj.weight", (size, 2 * hidden)
    yield "midlayer.self_attn.o_proj.weight", (hidden, q)
    yield from _feed_forward(config, "midlayer.mlp.")
    yield "norm.weight", (hidden,)
    yield "lm_head.weight", (config["draft_vocab_size"], hidden)
    yield "d2t", (config["draft_vocab_size"],)


def _feed_forward(config: dict[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tensors of a feed-forward layer, or of a router and experts."""
    hidden = config["hidden_size"]
    inner = config.get("moe_intermediate_size", config["intermediate_size"])
    if count := config.get("num_local_experts"):  # gpt-oss, whose experts are MXFP4
        yield prefix + "router.weight", (count, hidden)
        yield prefix + "router.bias", (count,)
        for name, rows, columns in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
            yield f"{prefix}experts.{name}_proj_blocks", (count, rows, columns // 32, 16)
            yield f"{prefix}experts.{name}_proj_scales", (count, rows, columns // 32)
            yield f"{prefix}experts.{name}_proj_bias", (count, rows)
        return
    experts = range(config.get("num_experts", 0))
    if experts:
        yield prefix + "gate.weight", (len(experts), hidden)
    if shared := config.get("shared_expert_intermediate_size"):
        yield prefix + "shared_expert_gate.weight", (1, hidden)
        yield prefix + "shared_expert.gate_proj.weight", (shared, hidden)
        yield prefix + "shared_expert.up_proj.weight", (shared, hidden)
        yield prefix + "shared_expert.down_proj.weight", (hidden, shared)
    for one in [f"{prefix}experts.{expert}." for expert in experts] or [prefix]:
        yield one + "gate_proj.weight", (inner, hidden)
        yield one + "up_proj.weight", (inner, hidden)
        yield one + "down_proj.weight", (hidden, inner)


def _random_bytes(
    generator: np.random.Generator, name: str, shape: tuple[int, ...]
) -> Iterator[bytes]:
    """Random bfloat16: norms near 1, matrices uniform with the usual 1 / sqrt(inputs) spread.

    Of MXFP4 any quants, with scales that spread them as far.
    """
    count = math.prod(shape)
    if name == "d2t":  # every so many tokens have a logit
        yield (np.arange(count) * (DRAFT_STRIDE - 1)).astype("<i8").tobytes()
        return
    is_matrix = len(shape) > 1 and shape[-2] > 1  # or many of them; a convolution's are rows
    width = math.sqrt(3 / shape[-1]) if is_matrix else 0.1
    for start in range(0, count, _CHUNK_ELEMENTS):
        size = min(_CHUNK_ELEMENTS, count - start)
        if name.endswith(("_blocks", "_scales")):
            low, high = (0, 256) if name.endswith("_blocks") else (118, 121)
            yield generator.integers(low, high, size, np.uint8).tobytes()
            continue
        values = generator.random(size, np.float32)
        values -= 0.5
        values *= 2 * width
        if len(shape) == 1:
            values += 1
        yield (values.view(np.uint32) >> 16).astype("<u2").tobytes()


def _stored(name: str) -> tuple[str, int]:
    """What a tensor is stored in, and the bytes of a number."""
    if name == "d2t":
        return "I64", 8
    return ("U8", 1) if name.endswith(("_blocks", "_scales")) else ("BF16", 2)


def write_weights(config: dict[str, Any], path: Path, seed: int) -> None:
    """Write one safetensors file."""
    tensors = head_shapes if "draft_vocab_size" in config else tensor_shapes
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in tensors(config):
        kind, size = _stored(name)
        end = offset + size * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    generator = np.random.Generator(np.random.SFC64(seed))
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape in tensors(config):
            for chunk in _random_bytes(generator, name, shape):
                file.write(chunk)


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer of 258 tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|begin|>",
        "eos_token": "<|end|>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def with_layers(config: dict[str, Any], count: int) -> dict[str, Any]:
    """The keys that say how many layers there are, and their types again and again.

    Of a model with state spaces a layer has attention, without which there is none: the last.
    """
    found: dict[str, Any] = {"num_hidden_layers": count}
    if types := config.get("layer_types"):
        found["layer_types"] = [types[layer % len(types)] for layer in range(count)]
        if "attention" in types and "attention" not in found["layer_types"]:
            found["layer_types"][-1] = "attention"
    return found


def main() -> None:
    """Parse arguments and write the checkpoint."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen2.5-0.5b")
    parser.add_argument("--layers", type=int, help="fewer (or more) layers than the published")
    parser.add_argument("--head", action="store_true", help="an EAGLE-3 head for such a model")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    config = dict(SHAPES[arguments.shape])
    if arguments.layers is not None:
        if arguments.layers < 1:
            parser.error(f"--layers is {arguments.layers}; it must be above 0")
        config |= with_layers(config, arguments.layers)
    arguments.folder.mkdir(parents=True)
    if arguments.head:
        config = head_config(config, DRAFT_VOCAB)
    write_tokenizer(arguments.folder)
    (arguments.folder / "config.json").write_text(json.dumps(config, indent=2))
    write_weights(config, arguments.folder / "model.safetensors", arguments.seed)


if __name__ == "__main__":
    main()
