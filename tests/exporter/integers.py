"""Checkpoints whose projections are in integers, as GPTQ, AWQ and compressed-tensors store them.

The first two are written here, number by number, after what their authors' `pack` does; the third
by its own library.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.exporter import checkpoints

FILE: Final = "model.safetensors"
AWQ_PLACES: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # in a word, of the rows of eight in their order

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Numbers:
    """A matrix: `(levels - zeros) * scales`, [rows, columns], [rows, groups] and so again."""

    levels: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    groups: torch.Tensor  # [columns], of each

    def meant(self) -> torch.Tensor:
        """What they stand for."""
        scales, zeros = self.scales.float()[:, self.groups], self.zeros[:, self.groups]
        return (self.levels - zeros).float() * scales


def quantize(
    weight: torch.Tensor, bits: int, group_size: int, *, symmetric: bool, order: bool = False
) -> Numbers:
    """Quantize a matrix, rounding to the nearest; with `order` columns are in groups anyhow."""
    rows, columns = weight.shape
    size = columns if group_size == -1 else group_size
    groups = torch.arange(columns) // size
    if order:
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    count = int(groups.max()) + 1
    scales, zeros = torch.empty(rows, count), torch.empty(rows, count, dtype=torch.int32)
    top = 2**bits - 1
    for group in range(count):
        part = weight[:, groups == group].float()
        if symmetric:
            scales[:, group] = part.abs().amax(1) / (top // 2)
            zeros[:, group] = (top + 1) // 2
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, group] = (high - low) / top
            zeros[:, group] = torch.round(-low / scales[:, group]).int()
    scales = scales.half()
    levels = torch.round(weight.float() / scales.float()[:, groups]).int() + zeros[:, groups]
    return Numbers(levels.clamp(0, top), scales, zeros, groups)


def words(levels: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack along the last axis, int32; `places` in a word are for each of its integers in turn."""
    many = 32 // bits
    found = torch.zeros(*levels.shape[:-1], levels.shape[-1] // many, dtype=torch.int64)
    for i in range(levels.shape[-1]):
        place = i % many if places is None else places[i % many]
        found[..., i // many] |= levels[..., i].long() << (place * bits)
    return torch.where(found >= 2**31, found - 2**32, found).int()


def as_gptq(one: Numbers, bits: int, offset: int) -> Tensors:
    """The tensors of GPTQ, `offset` taken from the zeros, by words as GPTQModel does."""
    offsets = sum(offset << place for place in range(0, 32, bits))
    zeros = words(one.zeros.T, bits).long() - offsets & 0xFFFFFFFF
    return {
        "qweight": words(one.levels, bits).T.contiguous(),
        "qzeros": torch.where(zeros >= 2**31, zeros - 2**32, zeros).int().contiguous(),
        "scales": one.scales.T.contiguous(),
        "g_idx": one.groups.int(),
    }


def as_awq(one: Numbers) -> Tensors:
    """The tensors of AWQ."""
    return {
        "qweight": words(one.levels.T, 4, AWQ_PLACES),
        "qzeros": words(one.zeros.T, 4, AWQ_PLACES),
        "scales": one.scales.T.contiguous(),
    }


def store(
    folder: Path, config: Mapping[str, Any], pack: Callable[[torch.Tensor], tuple[Tensors, Numbers]]
) -> Tensors:
    """Put a checkpoint's projections into integers; returns all tensors as what they stand for."""
    stored: Tensors = {}
    meant: Tensors = {}
    for name, tensor in load_file(folder / FILE).items():
        if "_proj.weight" not in name:
            stored[name] = meant[name] = tensor
            continue
        tensors, numbers = pack(tensor)
        stored |= {name.removesuffix("weight") + key: one for key, one in tensors.items()}
        meant[name] = numbers.meant()
    save_file(stored, folder / FILE)
    checkpoints.edit_config(folder, quantization_config=dict(config))
    return meant


def store_gptq(
    folder: Path,
    *,
    bits: int = 4,
    group_size: int = 32,
    symmetric: bool = True,
    order: bool = False,
    second: bool = False,
) -> Tensors:
    """GPTQ; `second`: in its second format, which stores zeros as they are."""
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group_size,
        "desc_act": order,
        "sym": symmetric,
        "checkpoint_format": "gptq_v2" if second else "gptq",
    }

    def pack(weight: torch.Tensor) -> tuple[Tensors, Numbers]:
        found = quantize(weight, bits, group_size, symmetric=symmetric, order=order)
        return as_gptq(found, bits, 0 if second else 1), found

    return store(folder, config, pack)


def store_awq(folder: Path, group_size: int = 32) -> Tensors:
    """AWQ, which is asymmetric."""
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }

    def pack(weight: torch.Tensor) -> tuple[Tensors, Numbers]:
        found = quantize(weight, 4, group_size, symmetric=False)
        return as_awq(found), found

    return store(folder, config, pack)


def store_auto_round(folder: Path, layout: str) -> Tensors:
    """AutoRound, in the tensors of GPTQ, of which it leaves out `g_idx`, or of AWQ."""
    config = {
        "quant_method": "auto-round",
        "packing_format": f"auto_round:auto_{layout}",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "data_type": "int",
    }

    def pack(weight: torch.Tensor) -> tuple[Tensors, Numbers]:
        found = quantize(weight, 4, 32, symmetric=True)
        tensors = as_awq(found) if layout == "awq" else as_gptq(found, 4, 1)
        tensors.pop("g_idx", None)
        return tensors, found

    return store(folder, config, pack)


def store_in_order(folder: Path) -> Tensors:
    """Columns in groups anyhow, as older versions of compressed-tensors stored them."""
    weights = {"num_bits": 4, "type": "int", "group_size": 32, "actorder": "group"}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }

    def pack(weight: torch.Tensor) -> tuple[Tensors, Numbers]:
        found = quantize(weight, 4, 32, symmetric=True, order=True)
        return {
            "weight_packed": words(found.levels, 4),
            "weight_scale": found.scales,
            "weight_shape": torch.tensor(weight.shape),
            "weight_g_idx": found.groups.int(),
        }, found

    return store(folder, config, pack)


def store_compressed(
    folder: Path, *, bits: int = 4, group_size: int | None = 32, symmetric: bool = True, form: str
) -> PreTrainedModel:
    """Integers of compressed-tensors, by its own library; no group size: a scale for each row.

    Returns the model with what the library makes of them, which transformers cannot load in
    version 5.23 where they have groups and zeros.
    """
    model = AutoModelForCausalLM.from_pretrained(folder)
    strategy = QuantizationStrategy.CHANNEL if group_size is None else QuantizationStrategy.GROUP
    weights = QuantizationArgs(
        num_bits=bits, group_size=group_size, symmetric=symmetric, strategy=strategy
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            grouped = module.weight.data.float()
            if group_size is not None:
                grouped = grouped.unflatten(1, (-1, group_size))
            low, high = grouped.amin(-1), grouped.amax(-1)
            if group_size is None:
                low, high = low[:, None], high[:, None]
            scale, zero = calculate_qparams(low, high, weights)
            module.weight_scale.data.copy_(scale)
            if not symmetric:
                module.weight_zero_point.data.copy_(zero)
    compressor = ModelCompressor.from_pretrained_model(model, form)
    compressor.compress_model(model)
    shutil.rmtree(folder)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(model)
    return model.eval()
