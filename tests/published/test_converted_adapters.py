"""Adapters in GGUF files, as llama.cpp's converter writes them of PEFT's folders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.cli.adapter_files import read_adapter
from onnxport.exporter.config import Config
from onnxport.exporter.families import find_family
from onnxport.exporter.gguf.adapter_modules import FAMILIES, modules_of
from onnxport.graphs.lora import LoraAdapter
from onnxport.graphs.spec import ArchSpec
from onnxport.serving.adapters.peft import AdapterContent
from tests.exporter import checkpoints
from tests.providers.state_adapters import saved, trained
from tests.published.converted import ALL
from tests.published.converting import convert_adapter
from tests.published.places import needs_llama_cpp
from tests.published.test_converted_states import HEADS, SQUARE, WIDE
from tests.serving.adapting import Tensors
from tests.tiers import every

pytestmark = needs_llama_cpp


@dataclass(frozen=True)
class Model:
    """A checkpoint that adapters are trained on; `case` and `config` as in `converted.Model`."""

    case: str
    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)


MODELS: Mapping[str, Model] = {
    "llama": Model("llama", "llama"),
    "qwen3.5": Model("qwen3.5", "qwen35", SQUARE),
    "phi3": Model("phi3", "phi3"),
    "lfm2": Model("lfm2", "lfm2", HEADS),
    "gemma3": Model("gemma3", "gemma3"),
    "granite": Model("granite", "granite"),
    "granite-4": Model("granite-4", "granitehybrid", WIDE),
    "mistral": Model("mistral", "llama"),
    "internlm3": Model("internlm3", "llama"),
    "mixtral": Model("mixtral", "llama"),
    "qwen2": Model("qwen2", "qwen2"),
    "qwen3": Model("qwen3", "qwen3"),
    "gemma2": Model("gemma2", "gemma2"),
    "smollm3": Model("smollm3", "smollm3"),
    "gpt-neox": Model("gpt-neox", "gptneox"),
    "qwen3-next": Model("qwen3-next", "qwen3next", SQUARE),
    "bamba": Model("bamba", "granitehybrid", WIDE),
}


def written(model: Model, folder: Path) -> tuple[ArchSpec, Tensors, AdapterContent]:
    """A checkpoint, and an adapter of all its linear modules as PEFT writes it."""
    case = ALL[model.case]
    made = checkpoints.make(
        replace(case, config={**case.config, **model.config}), folder / "checkpoint"
    )
    config = Config.read(folder / "checkpoint")
    spec = find_family(config).spec(config, case.context_length)
    tensors = trained(made, spec, seed=0)
    return spec, tensors, saved(folder / "peft", made, spec, tensors)


@pytest.mark.parametrize("name", every(5, MODELS))
def test_content(tmp_path: Path, name: str) -> None:
    """What is read of the file is what is read of the folder, bit for bit."""
    model = MODELS[name]
    spec, _, expected = written(model, tmp_path)
    path = convert_adapter(tmp_path / "peft", tmp_path / "checkpoint", tmp_path / "adapter.gguf")
    found = read_adapter(path, spec)
    check_same(found.adapter, expected.adapter)
    assert found.fingerprint == expected.fingerprint
    assert spec.family in FAMILIES[model.architecture]
    # every module of the model was in it
    named = {one.layer for one in modules_of(model.architecture, spec).values()}
    assert named == {layer for layer, _ in found.adapter.deltas}


def check_same(found: LoraAdapter, expected: LoraAdapter, error: float = 0.0) -> None:
    """The deltas are the same; `error` is of the largest number of each matrix."""
    assert found.deltas.keys() == expected.deltas.keys()
    for key, delta in found.deltas.items():
        for one, other in ((delta.a, expected.deltas[key].a), (delta.b, expected.deltas[key].b)):
            assert one.dtype == np.float32
            np.testing.assert_allclose(
                one, other, rtol=0, atol=error * np.abs(other).max(), err_msg=str(key)
            )
