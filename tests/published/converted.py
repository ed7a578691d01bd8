"""Checkpoints that llama.cpp's converter made GGUF files of, and what becomes of these."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from tests.exporter import checkpoints
from tests.exporter.run_graphs import Graph
from tests.published.converting import convert

CONTEXT = 128  # of the checkpoints, where the converter writes what it knows of published ones
_LAYER = re.compile(r"model\.(language_model\.)?layers\.\d+\.")
_QUERIES = ("q_proj.weight", "q_b_proj.weight")
# Sizes in widths of the model.
_OF_GLM = {
    **{"enorm.weight": (1,), "hnorm.weight": (1,), "shared_head.norm.weight": (1,)},
    "eh_proj.weight": (1, 2),
}
_OF_QWEN = {
    **{"pre_fc_norm_embedding.weight": (1,), "pre_fc_norm_hidden.weight": (1,)},
    **{"norm.weight": (1,), "fc.weight": (1, 2)},
}
ALL: Mapping[str, checkpoints.Case] = {
    **checkpoints.CASES,
    **checkpoints.HYBRID,
    **checkpoints.KIMI,
    **checkpoints.SPACES,
    **checkpoints.SHORT_CONV,
    **checkpoints.UNGATED_EXPERTS,
}


@dataclass(frozen=True)
class Model:
    """A checkpoint, as a published one of its family is.

    Attributes:
        case: Of the parity tests, see `checkpoints`.
        config: What its configuration says otherwise, which GGUF has no key for, as llama.cpp knows
            the published models.
        published: Keys that published configurations have, and transformers neither needs nor
            writes.
        without: Keys that transformers writes and published configurations lack. The converter
            reads the file by itself then, without transformers.
        further: What the names of a layer's tensors begin with that guesses a token behind the next
            one; None: the checkpoint has no such layer.
        options: Of the converter.
        context_length: Of the export.
        names: Parts of tensors' names, and what published checkpoints have for them.
    """

    case: str
    config: Mapping[str, Any] = field(default_factory=dict)
    published: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    further: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    context_length: int = CONTEXT
    names: Mapping[str, str] = field(default_factory=dict)


def add_further_layer(folder: Path, prefix: str) -> None:
    """Add a layer behind the last one to a checkpoint: the first one with attention once more.

    It comes with what reads an embedding and the last layer's output, as Qwen3.5 and GLM 4.5 call
    this.
    """
    path = folder / "model.safetensors"
    tensors = load_file(path)
    with_attention = [name for name in tensors if name.endswith(_QUERIES)]
    like = min(map(_prefix, with_attention), key=_number)
    copied = {
        prefix + name.removeprefix(like): one.clone()
        for name, one in tensors.items()
        if name.startswith(like)
    }
    (size,) = tensors[like + "input_layernorm.weight"].shape
    parts = _OF_QWEN if prefix.startswith("mtp.") else _OF_GLM
    root = "mtp." if prefix.startswith("mtp.") else prefix
    for name, shape in parts.items():
        copied[root + name] = torch.ones([size * one for one in shape])
    save_file(tensors | copied, path)


def rename(folder: Path, names: Mapping[str, str]) -> None:
    """Give tensors of a checkpoint other names: parts of them become others."""
    path = folder / "model.safetensors"
    renamed = {}
    for name, one in load_file(path).items():
        for part, other in names.items():
            name = name.replace(part, other)
        renamed[name] = one
    save_file(renamed, path)


def _prefix(name: str) -> str:
    found = _LAYER.match(name)
    assert found is not None, name
    return found[0]


def _number(prefix: str) -> int:
    return int(prefix.split(".")[-2])


def check(model: Model, folder: Path) -> None:
    """Logits of the GGUF file's artifact are those of transformers."""
    case = ALL[model.case]
    case = replace(case, config={**case.config, **model.config})
    expected = checkpoints.make(case, folder / "checkpoint")
    if model.without:
        unknown = {"model_type": "unknown", **dict.fromkeys(model.without)}
        checkpoints.edit_config(folder / "checkpoint", **unknown)
    if model.names:
        rename(folder / "checkpoint", model.names)
    if model.further is not None:
        add_further_layer(folder / "checkpoint", model.further)
    path = convert(
        folder / "checkpoint", folder / "model.gguf", hparams=model.published, **model.options
    )
    options = ExportOptions(precision="fp32", threads=1, context_length=model.context_length)
    artifact = Artifact.read(export_model(path, folder / "artifact", options))
    token_ids = checkpoints.tokens()
    logits = checkpoints.logits(expected, token_ids)
    assert np.ptp(logits) > 2  # that say something
    has_experts = artifact.manifest.model.experts is not None
    graph = Graph(artifact, "split" if has_experts else "decomposed")
    np.testing.assert_allclose(graph.logits(token_ids), logits, atol=1e-4)
