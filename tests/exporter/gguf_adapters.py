"""Adapters in GGUF files, written by the package gguf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from onnxport.exporter.gguf.adapter_modules import modules_of
from onnxport.graphs.spec import ArchSpec

Tensors = dict[str, NDArray[Any]]
META: Mapping[str, Any] = {
    "general.architecture": "llama",
    "general.type": "adapter",
    "adapter.type": "lora",
    "adapter.lora.alpha": 8.0,
}


def tensors_of(base: ArchSpec, rank: int = 4, architecture: str = "llama") -> Tensors:
    """Random ones, of everything that can be adapted."""
    rng, found = np.random.default_rng(0), Tensors()
    for name, module in modules_of(architecture, base).items():
        a = rng.standard_normal((rank, module.in_features), np.float32)
        found[f"{name}.lora_a"] = a / np.float32(module.in_features**0.5)
        found[f"{name}.lora_b"] = rng.standard_normal((module.out_features, rank), np.float32)
    return found


_NAMES: Mapping[str, str] = {  # of projections, in files
    **{"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output"},
    **{"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"},
}


def of_llama(tensors: Mapping[str, NDArray[Any]], base: ArchSpec) -> Tensors:
    """What PEFT's tensors of a Llama are in a file: neighbouring channels are rotated together."""
    found = Tensors()
    for name, tensor in tensors.items():
        *_, layer, _, projection, part, _ = name.split(".")
        heads = {"q_proj": base.num_heads, "k_proj": base.num_kv_heads}.get(projection)
        if heads is not None and part == "lora_B":
            halves = tensor.reshape(heads, 2, -1, tensor.shape[1])
            tensor = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)
        found[f"blk.{layer}.{_NAMES[projection]}.weight.{part.lower()}"] = tensor
    return found


def write(
    path: Path, tensors: Tensors, kinds: Mapping[str, Kind] | None = None, **meta: Any
) -> Path:
    """Write an adapter.

    Args:
        path: The file.
        tensors: By their names in the file.
        kinds: In what those are stored that are no floats, by name.
        meta: Keys that differ from `META`, with `__` for each dot; None: it is not there.
    """
    changed = {key.replace("__", "."): value for key, value in meta.items()}
    keys = {**META, **changed}
    writer = gguf.GGUFWriter(path, "")
    for key, value in keys.items():
        writer.kv_data[0].pop(key, None)  # which the writer has by itself
        if value is not None:
            _add(writer, key, value)
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: str | float | Sequence[int]) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    else:
        writer.add_array(key, value)
