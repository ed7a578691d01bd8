"""Turn a checkpoint of make_checkpoint.py into a GGUF file, for llama.cpp as a peer.

    PEER_PYTHON -m benchmarks.make_gguf CHECKPOINT MODEL.gguf --head q8_0

It needs the `gguf` package from PyPI. Qwen2, Llama, OLMoE, gpt-oss and Gemma 3 are known. Matrices
become Q4_0, gpt-oss's experts MXFP4 as they are; embedding and head Q8_0, like those of an onnxport
artifact in int4, or Q4_0 if asked for. There is no tokenizer in it: the workloads are token ids.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

TYPES = {
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
    "f16": gguf.GGMLQuantizationType.F16,
}
ARCHITECTURES = {
    "qwen2": "qwen2",
    "llama": "llama",
    "olmoe": "olmoe",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
}
EXPERT_PARTS = ("gate", "up", "down")
NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.router.weight": "ffn_gate_inp.weight",
    "mlp.router.bias": "ffn_gate_inp.bias",
    "self_attn.o_proj.bias": "attn_output.bias",
    "self_attn.sinks": "attn_sinks.weight",
    **{f"mlp.experts.{name}_proj.bias": f"ffn_{name}_exps.bias" for name in EXPERT_PARTS},
    **{f"mlp.experts.{name}_proj.weight": f"ffn_{name}_exps.weight" for name in EXPERT_PARTS},
    **{
        f"self_attn.{name}_proj.{kind}": f"attn_{name}.{kind}"
        for name in "qkv"
        for kind in ("weight", "bias")
    },
}
# What is called otherwise in some.
OWN_NAMES = {
    "gpt_oss": {"post_attention_layernorm.weight": "post_attention_norm.weight"},
    "gemma3_text": {
        "post_attention_layernorm.weight": "post_attention_norm.weight",
        "pre_feedforward_layernorm.weight": "ffn_norm.weight",
        "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
    },
}
WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
HEADS = {"token_embd.weight", "output.weight"}
EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(.*)")


Pack = Callable[[str, NDArray[np.float32]], NDArray[Any]]


def tensors(path: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the tensors of a safetensors file: bfloat16 as float32, MXFP4 as llama.cpp packs it."""
    mapped = np.memmap(path, np.uint8, "r")
    (length,) = struct.unpack("<Q", mapped[:8].tobytes())
    header = json.loads(mapped[8 : 8 + length].tobytes())
    header.pop("__metadata__", None)

    def stored(name: str) -> NDArray[Any]:
        start, end = (8 + length + offset for offset in header[name]["data_offsets"])
        raw = mapped[start:end]
        if header[name]["dtype"] == "U8":
            return raw.reshape(header[name]["shape"])
        if header[name]["dtype"] != "BF16":
            raise SystemExit(f"{name} is {header[name]['dtype']}; make_checkpoint.py writes BF16")
        bits = raw.view("<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(header[name]["shape"])

    for name in header:
        if name.endswith("_scales"):
            continue
        if name.endswith("_blocks"):
            base = name.removesuffix("_blocks")
            values = mxfp4(stored(name), stored(base + "_scales"))
            name = base + ".weight"
        else:
            values, name = stored(name), name.replace("_proj_bias", "_proj.bias")
        if ".gate_up_proj." not in name:
            yield name, values
            continue
        for at, part in enumerate(("gate", "up")):  # whose rows take turns
            yield name.replace(".gate_up_proj.", f".{part}_proj."), values[:, at::2]


def mxfp4(blocks: NDArray[np.uint8], scales: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """llama.cpp's bytes: a block's scale, and its first half in the low nibbles of 16 bytes."""
    numbers = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 2, 16)
    packed = numbers[..., 0, :] | numbers[..., 1, :] << 4
    whole = np.concatenate([scales[..., None], packed], axis=-1)
    return whole.reshape(*scales.shape[:-1], -1)


def joined(
    found: Iterator[tuple[str, NDArray[np.float32]]], experts: int, pack: Pack
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Pack matrices, and put those of all experts of a layer in one tensor, as llama.cpp does.

    Raises:
        SystemExit: experts are missing, or are not in order.
    """
    parts: dict[str, list[NDArray[Any]]] = {}
    for name, values in found:
        match = EXPERT.fullmatch(name)
        if match is None:
            yield name, pack(name, values)
            continue
        whole = match[1] + match[3]
        of = parts.setdefault(whole, [])
        if len(of) != int(match[2]):
            raise SystemExit(f"{name} does not come behind the expert before it")
        of.append(pack(whole, values))
        if len(of) == experts:
            yield whole, np.stack(parts.pop(whole))
    if parts:
        raise SystemExit(f"{next(iter(parts))} has fewer than {experts} experts")


def gguf_name(name: str, model_type: str) -> str:
    """What llama.cpp calls a tensor."""
    if name in WHOLE:
        return WHOLE[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{OWN_NAMES.get(model_type, {}).get(rest) or NAMES[rest]}"


def rotated(name: str, values: NDArray[np.float32], config: dict[str, Any]) -> NDArray[np.float32]:
    """Reorder the rows of Llama's queries and keys: llama.cpp rotates neighbours, not halves."""
    kind = name.rpartition("self_attn.")[2].partition("_proj")[0]
    if config["model_type"] != "llama" or kind not in ("q", "k"):
        return values
    heads = config["num_attention_heads" if kind == "q" else "num_key_value_heads"]
    split = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def rope_theta(config: dict[str, Any]) -> float:
    """The base of the rotation, wherever the writer of the checkpoint put it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = rope.get("full_attention", rope)  # Gemma 3's; that of the others is always the same
    kind = rope.get("rope_type", "default")
    if kind != "default" and config["model_type"] != "gpt_oss":
        raise SystemExit(f"rope_type is {kind}; only the default is supported")
    return float(rope.get("rope_theta") or config["rope_theta"])


def add_config(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """Write what llama.cpp wants to know of the model."""
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope_theta(config))
    head = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(config.get("head_dim", head))
    writer.add_vocab_size(config["vocab_size"])
    if experts := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if config["model_type"] == "gpt_oss":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_expert_feed_forward_length(config["intermediate_size"])
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config["rope_scaling"]["factor"])
        writer.add_rope_scaling_orig_ctx_len(
            config["rope_scaling"]["original_max_position_embeddings"]
        )
    if config["model_type"] == "gemma3_text":
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_sliding_window(config["sliding_window"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)


def main() -> None:
    """Parse arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--matrices", choices=TYPES, default="q4_0")
    parser.add_argument("--head", choices=TYPES, default="q8_0")
    arguments = parser.parse_args()
    config = json.loads((arguments.checkpoint / "config.json").read_text())
    if config["model_type"] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise SystemExit(f"{config['model_type']} is not supported; these are: {known}")
    writer = gguf.GGUFWriter(arguments.output, ARCHITECTURES[config["model_type"]])
    add_config(writer, config)

    model_type = config["model_type"]
    is_gpt_oss = model_type == "gpt_oss"

    def kind_of(target: str) -> gguf.GGMLQuantizationType:
        if target.endswith("ffn_gate_inp.weight"):
            return gguf.GGMLQuantizationType.F32
        if is_gpt_oss and target.endswith("_exps.weight"):
            return gguf.GGMLQuantizationType.MXFP4
        return TYPES[arguments.head if target in HEADS else arguments.matrices]

    def is_plain(name: str, values: NDArray[Any]) -> bool:
        return values.ndim == 1 or name.endswith(".bias")

    def pack(name: str, values: NDArray[Any]) -> NDArray[Any]:
        if model_type == "gemma3_text" and name.endswith("norm.weight"):
            return values + 1  # what is multiplied with
        if values.dtype == np.uint8:
            return values
        values = rotated(name, values, config)
        if is_plain(name, values):
            return values
        return gguf.quants.quantize(values, kind_of(gguf_name(name, model_type)))

    files = sorted(arguments.checkpoint.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"{arguments.checkpoint} has no safetensors; make_checkpoint.py writes it")
    found = chain.from_iterable(map(tensors, files))
    for name, packed in joined(found, config.get("num_experts", 0), pack):
        target = gguf_name(name, model_type)
        raw = None if is_plain(name, packed) else kind_of(target)
        writer.add_tensor(target, packed, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
