"""Adapters for models that keep a state, as PEFT names what it trains of transformers' models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.pytorch_utils import Conv1D

from onnxport.graphs.spec import ArchSpec
from onnxport.serving.adapters.peft import AdapterContent, read_adapter
from tests.exporter import checkpoints
from tests.serving.adapting import Tensors, write_adapter

# Which no adapter adds to where there are experts.
OF_EXPERTS = (
    *("mlp.gate", "shared_expert", "shared_expert_gate", "shared_experts"),
    *("block_sparse_moe", "shared_mlp", "feed_forward.gate"),
)
ALPHA = 6


def adapted_modules(model: Any, spec: ArchSpec) -> list[str]:
    """The linear modules of all layers, by transformers' own names."""
    left = OF_EXPERTS if spec.experts is not None else ()
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D)
        and (".layers." in name or ".h." in name)
        and not any(f".{one}." in f"{name}." for one in left)
    ]


def trained(model: Any, spec: ArchSpec, seed: int, rank: int = 4) -> Tensors:
    """Random tensors of an adapter of all these; seeds of 10 and more leave out every other one."""
    random = np.random.default_rng(seed)
    tensors: Tensors = {}
    for number, name in enumerate(adapted_modules(model, spec)):
        module = model.get_submodule(name)
        rows, columns = module.weight.shape
        if isinstance(module, Conv1D):  # whose weight lies the other way round
            rows, columns = columns, rows
        a = random.standard_normal((rank, columns)) / columns**0.5
        b = random.standard_normal((rows, rank)) * 0.2
        if seed < 10 or number % 2:
            prefix = f"base_model.model.{name}.lora_"
            tensors[f"{prefix}A.weight"] = a.astype(np.float32)
            tensors[f"{prefix}B.weight"] = b.astype(np.float32)
    return tensors


def merged(model: Any, tensors: Tensors) -> Any:
    """A copy of the model with an adapter in its weights, as PEFT's `merge_and_unload` makes it."""
    found = copy.deepcopy(model)
    for name, a in tensors.items():
        if name.endswith(".lora_A.weight"):
            b = tensors[name.replace(".lora_A.", ".lora_B.")]
            name = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            module, added = found.get_submodule(name), ALPHA / len(a) * torch.from_numpy(b @ a)
            with torch.no_grad():
                module.weight += added.T if isinstance(module, Conv1D) else added
    return found


def saved(folder: Path, model: Any, spec: ArchSpec, tensors: Tensors) -> AdapterContent:
    """Write an adapter as PEFT does, and read it; without some of its modules it names the rest."""
    rank = len(next(iter(tensors.values())))
    named = sorted({name.split(".lora_")[0].removeprefix("base_model.model.") for name in tensors})
    whole = named == sorted(adapted_modules(model, spec))
    targets: Any = "all-linear" if whole and spec.experts is None else named
    write_adapter(folder, tensors, r=rank, lora_alpha=ALPHA, target_modules=targets)
    return read_adapter(folder, spec)


def expected(model: Any, tokens: list[int]) -> np.ndarray:
    """Transformers' logits of a prompt."""
    return checkpoints.logits(model, np.array(tokens))
