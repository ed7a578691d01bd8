"""LoRA adapters in GGUF files, as llama.cpp's `convert_lora_to_gguf.py` writes them.

What the file says is what llama.cpp's `src/llama-adapter.cpp` reads of it. What an adapter adds to
a tensor lies in the order of that tensor's rows and columns, so it is brought to the order of all
other checkpoints as they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import AdapterError, CheckpointError
from onnxport.exporter.checkpoint import to_float32
from onnxport.exporter.gguf import blocks
from onnxport.exporter.gguf.adapter_modules import FAMILIES, modules_of, num_blocks
from onnxport.exporter.gguf.architectures import ARCHITECTURES
from onnxport.exporter.gguf.checkpoint import halves
from onnxport.exporter.gguf.layouts import layout
from onnxport.exporter.gguf.orders import Order, orders
from onnxport.exporter.gguf.shard import GgufShard
from onnxport.graphs.invocation import read_invocation
from onnxport.graphs.lora import LoraAdapter, LoraDelta, Projection
from onnxport.graphs.lora_module import Module
from onnxport.graphs.spec import ArchSpec

_TYPE: Final = "general.type"
_ARCHITECTURE: Final = "general.architecture"
_ADAPTER_TYPE: Final = "adapter.type"
_ALPHA: Final = "adapter.lora.alpha"
_INVOCATION: Final = "adapter.alora.invocation_tokens"
_PREFIX: Final = "adapter."
_FOR_PEOPLE: Final = ("adapter.lora.task_name", "adapter.lora.prompt_prefix")
_READ: Final = (_ADAPTER_TYPE, _ALPHA, _INVOCATION, *_FOR_PEOPLE)
_BASE: Final = ("general.base_model.0.repo_url", "general.base_model.0.name")
_SPLIT: Final = "split.count"

_NAME: Final = re.compile(r"(?P<tensor>.+)\.lora_(?P<part>[ab])")
_NUMBER: Final = re.compile(r"\d+")
_HINTS: Final[Mapping[str, str]] = {
    ".token_embd.": "; what adds to embeddings or the output head has to be merged into the model, "
    "which is exported then",
    ".output.": "; what adds to embeddings or the output head has to be merged into the model, "
    "which is exported then",
    "_exps.": "; experts cannot be adapted",
    "_shexp.": "; what is beside experts cannot be adapted",
    ".ffn_gate_inp.": "; routers of experts cannot be adapted",
}

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class GgufAdapter:
    """An adapter that was read and fits its base model."""

    adapter: LoraAdapter
    base_model: str | None  # what the file says it was trained on
    task_name: str = ""  # what it says to people
    prompt_prefix: str = ""
    invocation: tuple[int, ...] = ()  # of an aLoRA: the tokens that it begins with


def read_adapter(path: Path, base: ArchSpec) -> GgufAdapter:
    """Read the adapter in a GGUF file.

    Each tensor's scaling is the file's alpha over its rank, and 1 where alpha is 0 or missing.

    Args:
        path: the file.
        base: the model that it has to fit.

    Raises:
        AdapterError: the file is missing or malformed, is no LoRA adapter, asks for what cannot be
            served, or does not fit the model; says what was found and what fits.
    """
    try:
        if not path.is_file():
            raise AdapterError(f"{path} is not there, or is not a file")
        shard = GgufShard(path)
    except (CheckpointError, OSError) as error:
        raise AdapterError(f"the adapter cannot be read: {error}") from error
    with closing(shard):
        meta = shard.metadata
        alpha = _check_kind(path, meta)
        invocation = read_invocation(f"{path}: {_INVOCATION}", meta.get(_INVOCATION), base)
        architecture = _check_architecture(path, meta, base)
        modules = modules_of(architecture, base)
        pairs = _read_pairs(shard, modules, base)
    turned, tiled = _orders(architecture, base)
    deltas: dict[tuple[int, Projection], LoraDelta] = {}
    plain = replace(base, multipliers=None)  # which the file's numbers are times, as its weights
    for name, (a, b) in pairs.items():
        if (heads := turned.get(name.rpartition("attn_")[2])) is not None:
            b = halves(b, heads)
        if (order := tiled.get(name)) is not None:
            a, b = _ordered(order, a, b)
        scaling = alpha / len(a) if alpha else 1.0
        with np.errstate(over="ignore", invalid="ignore"):  # seen below
            scaled = b * np.float32(scaling)
        if not np.isfinite(scaled).all() or not np.isfinite(a).all():
            raise AdapterError(
                f"{path} holds values of {name} that are not finite, or are not once they are "
                f"scaled by {scaling:g}; the file is damaged, or the training diverged"
            )
        deltas |= modules[name].deltas(plain, a, scaled)
    named = next((meta[key] for key in _BASE if isinstance(meta.get(key), str)), None)
    task, prefix = (found if isinstance(found := meta.get(key), str) else "" for key in _FOR_PEOPLE)
    return GgufAdapter(LoraAdapter(deltas), named, task, prefix, invocation)


def _check_kind(path: Path, meta: Mapping[str, Any]) -> float:
    """Return alpha of what is a LoRA adapter, and nothing else."""
    kind = meta.get(_TYPE, "model")
    if kind != "adapter":
        hint = ": export it, and give the artifact" if kind == "model" else ""
        raise AdapterError(f"{path} is no adapter: {_TYPE} is {kind!r}, not 'adapter'{hint}")
    if (kind := meta.get(_ADAPTER_TYPE)) != "lora":
        raise AdapterError(f"{path}: {_ADAPTER_TYPE} is {kind!r}; 'lora' can be served")
    if meta.get(_SPLIT, 1) not in (0, 1):
        raise AdapterError(f"{path} is one of {meta[_SPLIT]} parts; an adapter has to be one file")
    if unknown := sorted(key for key in meta if key.startswith(_PREFIX) and key not in _READ):
        raise AdapterError(
            f"{path} has keys that are not known, and might change the result: {_some(unknown)}; "
            f"known are {', '.join(_READ)}"
        )
    alpha = meta.get(_ALPHA, 0.0)
    if type(alpha) not in (float, int) or not math.isfinite(alpha):
        raise AdapterError(f"{path}: {_ALPHA} is {alpha!r}, expected a finite number")
    return float(alpha)


def _check_architecture(path: Path, meta: Mapping[str, Any], base: ArchSpec) -> str:
    """Return the architecture of the model that it was made for, which is this one's."""
    found = meta.get(_ARCHITECTURE)
    fit = [name for name, families in FAMILIES.items() if base.family in families]
    if not fit:
        raise AdapterError(
            f"{path}: adapters of a {base.family} are not read from GGUF files; give the folder "
            "that PEFT wrote"
        )
    if found not in fit:
        raise AdapterError(
            f"{path} was made for another model: {_ARCHITECTURE} is {found!r}, and that of this "
            f"model, a {base.family}, is {' or '.join(map(repr, fit))}"
        )
    return str(found)


def _read_pairs(
    shard: GgufShard, modules: Mapping[str, Module], base: ArchSpec
) -> dict[str, tuple[Array, Array]]:
    """A and B of each tensor of the model, float32, as they are stored."""
    path = shard.path
    found: dict[str, dict[str, str]] = {}
    unknown = []
    for name, tensor in sorted(shard.tensors.items()):
        match = _NAME.fullmatch(name)
        if match is None or len(_matrix(tensor.shape)) != 2:
            unknown.append(f"{name} {list(tensor.shape)}")
        else:
            found.setdefault(match["tensor"], {})[match["part"]] = name
    if others := [name for name in found if name not in modules]:
        _refuse(shard, others, modules, base)
    if unknown:
        raise AdapterError(
            f"{path} holds tensors that are no matrices of LoRA: {_some(unknown)}; only "
            "<tensor of the model>.lora_a and .lora_b can be served. Norms that come with an "
            "adapter have to be merged into the model, which is exported then"
        )
    if single := [
        f"{name} has {''.join(one)} alone" for name, one in found.items() if len(one) < 2
    ]:
        raise AdapterError(f"{path} lacks the other half of a pair: {_some(single)}")
    if not found:
        raise AdapterError(f"{path} holds no tensors; convert the adapter again")
    _check_shapes(shard, found, modules)
    try:
        return {
            name: (_read(shard, parts["a"]), _read(shard, parts["b"]))
            for name, parts in found.items()
        }
    except (CheckpointError, OSError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error


def _refuse(shard: GgufShard, names: list[str], modules: Iterable[str], base: ArchSpec) -> None:
    """Say that the model has no such tensors, or that they are not adapted."""
    hints = dict.fromkeys(
        hint for part, hint in _HINTS.items() if any(part in f".{name}" for name in names)
    )
    adapted = dict.fromkeys(_NUMBER.sub("N", name, count=1) for name in modules)
    last = num_blocks(shard.metadata[_ARCHITECTURE], base) - 1
    raise AdapterError(
        f"{shard.path} adds to tensors that the model does not have, or that are not adapted: "
        f"{_some(names)}; this model is a {base.family} with blocks 0 to {last}, and adapted "
        f"are {', '.join(adapted)}{''.join(hints)}"
    )


def _check_shapes(
    shard: GgufShard, found: Mapping[str, Mapping[str, str]], modules: Mapping[str, Module]
) -> None:
    """Refuse matrices that do not fit the model, or each other."""
    wrong = []
    for name, parts in found.items():
        a, b = (_matrix(shard.tensors[parts[part]].shape) for part in "ab")
        rows, columns = modules[name].out_features, modules[name].in_features
        if (b[0], a[1]) != (rows, columns) or a[0] != b[1]:
            wrong.append(
                f"{name} has A {list(a)} and B {list(b)}, the model's takes [rank, {columns}] and "
                f"[{rows}, rank]"
            )
    if wrong:
        raise AdapterError(f"{shard.path} was made for another model: {_some(wrong, 2)}")


def _read(shard: GgufShard, name: str) -> Array:
    """A matrix as it is stored, [rows, columns]."""
    tensor = shard.tensors[name]
    blocks.check_decodable(tensor.dtype, name)
    shape = _matrix(tensor.shape)
    data = shard.read(tensor, 0, tensor.size_bytes).reshape(shape[0], -1)
    return to_float32(blocks.decode(tensor.dtype, name, data)).reshape(shape)


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A tensor's shape as ggml has it, which writes no rows where there is one, or further ones."""
    while len(shape) > 2 and shape[0] == 1:
        shape = shape[1:]
    return shape if len(shape) > 1 else (1, *shape)


def _orders(architecture: str, base: ArchSpec) -> tuple[dict[str, int], Mapping[str, Order]]:
    """Which tensors have another order: queries and keys by their heads, others by their names."""
    own = ARCHITECTURES[architecture]
    turned = {"q.weight": base.num_heads, "k.weight": base.num_kv_heads} if own.neighbours else {}
    return turned, orders(base, layout(architecture, joins_qkv=False)) if own.tiled else {}


def _ordered(order: Order, a: Array, b: Array) -> tuple[Array, Array]:
    """A with its columns, or B with its rows, as other checkpoints have those of the tensor."""
    if order.columns is None:
        return a, b[order.places]
    return to_float32(order.across(a)), b


def _some(names: Iterable[str], limit: int = 4) -> str:
    """Return a few of many, for an error."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
