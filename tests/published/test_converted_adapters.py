"""Adapters in GGUF files, as llama.cpp's converter writes them of PEFT's folders."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from onnxport.cli.adapter_files import read_adapter
from onnxport.exporter.config import Config
from onnxport.exporter.families import find_family
from onnxport.exporter.gguf.model import GgufModel
from onnxport.graphs.lora import LoraAdapter
from onnxport.graphs.spec import ArchSpec
from onnxport.serving.adapters.peft import AdapterContent
from tests.exporter import checkpoints
from tests.providers.state_adapters import saved, trained
from tests.published.converted import ALL, Model, add_further_layer
from tests.published.converting import convert, convert_adapter
from tests.published.places import needs_llama_cpp
from tests.published.test_converted_dense import MODELS as DENSE
from tests.published.test_converted_states import MODELS as STATES
from tests.tiers import every

pytestmark = needs_llama_cpp


MODELS: Mapping[str, Model] = {  # one of each way in which tensors are made of modules first
    "llama": Model("llama"),
    "qwen3.5": STATES["qwen3.5"],
    "phi3": Model("phi3"),
    "lfm2": STATES["lfm2"],
    "granite-4": STATES["granite-4"],
    "gemma3": Model("gemma3"),
    "granite": Model("granite"),
    "mistral": Model("mistral"),
    "internlm3": Model("internlm3"),
    "mixtral": Model("mixtral"),
    "qwen2": Model("qwen2"),
    "qwen3": Model("qwen3"),
    "gemma2": Model("gemma2"),
    "smollm3": Model("smollm3"),
    "arcee": Model("arcee"),
    "gpt-neox": Model("gpt-neox"),
    # Of GPT-2 the converter makes B of A, for it takes both for the weight, which lies otherwise.
    **{name: DENSE[name] for name in ("falcon-new", "gpt-bigcode")},
    "phi": Model("phi"),
    "starcoder2": Model("starcoder2"),
    "stablelm": Model("stablelm"),
    "nemotron": Model("nemotron"),
    "olmo": Model("olmo"),
    "olmo2": Model("olmo2"),
    "olmo3": Model("olmo3"),
    "afmoe": Model("afmoe-dense"),
    "cohere2": Model("cohere2"),
    "exaone4": Model("exaone4"),
    "granite-4-attention": STATES["granite-4-attention"],
    "granite-4-dense": STATES["granite-4-dense"],
    "bamba": STATES["bamba"],
    "falcon-h1": STATES["falcon-h1"],
    "lfm2-moe": STATES["lfm2-moe"],
    "nemotron-h": STATES["nemotron-h"],
    "nemotron-3": STATES["nemotron-3"],
    "qwen3-next": STATES["qwen3-next"],
    "qwen3.5-moe": STATES["qwen3.5-moe"],
    "glm4": DENSE["glm4"],
    "apertus": DENSE["apertus"],
}

LEFT_OUT = ("in_proj_qkvz",)  # which the converter cannot split
# What it cannot multiply with several numbers, and how exact it is where it multiplies with one.
LEFT_OUT_OF: Mapping[str, tuple[str, ...]] = {"falcon-h1": ("mamba.in_proj",)}
ERRORS: Mapping[str, float] = {"falcon-h1": 1e-6}


def written(model: Model, folder: Path) -> tuple[ArchSpec, AdapterContent]:
    """A checkpoint, and an adapter of all its linear modules as PEFT writes it."""
    case, base = ALL[model.case], folder / "checkpoint"
    made = checkpoints.make(replace(case, config={**case.config, **model.config}), base)
    config = Config.read(base)
    spec = find_family(config).spec(config, case.context_length)
    tensors = {
        name: one
        for name, one in trained(made, spec, seed=0).items()
        if not any(part in name for part in (*LEFT_OUT, *LEFT_OUT_OF.get(model.case, ())))
    }
    content = saved(folder / "peft", made, spec, tensors)
    if model.without:
        checkpoints.edit_config(base, model_type="unknown", **dict.fromkeys(model.without))
    if model.further is not None:
        add_further_layer(base, model.further)
    return spec, content


@pytest.mark.parametrize("name", every(6, MODELS))
def test_content(tmp_path: Path, name: str) -> None:
    """What is read of the file is what is read of the folder, bit for bit."""
    spec, expected = written(MODELS[name], tmp_path)
    folder, base = tmp_path / "peft", tmp_path / "checkpoint"
    hparams = MODELS[name].published
    path = convert_adapter(folder, base, tmp_path / "adapter.gguf", hparams=hparams)
    found = read_adapter(path, spec)
    check_same(found.adapter, expected.adapter, ERRORS.get(name, 0.0))
    assert (found.fingerprint == expected.fingerprint) is (name not in ERRORS)


def test_weights_lie_as_what_is_added_to_them(tmp_path: Path) -> None:
    """In blocks whose numbers are larger than those of layers, too."""
    states = STATES["nemotron-h"]
    kinds = ["linear_attention", "mlp", "linear_attention", "mlp", "full_attention", "mlp"]
    model = replace(
        states,
        config={**states.config, "layers_block_type": kinds},
        published={"hybrid_override_pattern": "M-M-*-", "num_hidden_layers": len(kinds)},
    )
    spec, _ = written(model, tmp_path)
    assert spec.num_layers == 3
    base = tmp_path / "checkpoint"
    path = convert(base, tmp_path / "model.gguf", hparams=model.published)
    wanted = load_file(base / "model.safetensors")
    with closing(GgufModel(path)) as read:
        weights = read.open(spec)
        for name in ("q", "k", "v"):
            (of_layer,) = (one for one in wanted if one.endswith(f".4.mixer.{name}_proj.weight"))
            found = weights.read(f"blk.4.attn_{name}.weight")
            np.testing.assert_array_equal(found, wanted[of_layer].float().numpy())


@pytest.mark.parametrize(("outtype", "error"), [("f16", 1e-3), ("bf16", 4e-3), ("q8_0", 5e-3)])
def test_types(tmp_path: Path, outtype: str, error: float) -> None:
    spec, expected = written(MODELS["llama"], tmp_path)
    path = tmp_path / "adapter.gguf"
    convert_adapter(tmp_path / "peft", tmp_path / "checkpoint", path, outtype)
    with pytest.raises(AssertionError):
        check_same(read_adapter(path, spec).adapter, expected.adapter)
    check_same(read_adapter(path, spec).adapter, expected.adapter, error)


def check_same(found: LoraAdapter, expected: LoraAdapter, error: float = 0.0) -> None:
    """The deltas are the same; `error` is of the largest number of each matrix."""
    assert found.deltas.keys() == expected.deltas.keys()
    for key, delta in found.deltas.items():
        for one, other in ((delta.a, expected.deltas[key].a), (delta.b, expected.deltas[key].b)):
            assert one.dtype == np.float32
            np.testing.assert_allclose(
                one, other, rtol=0, atol=error * np.abs(other).max(), err_msg=str(key)
            )


def test_invocation_tokens(tmp_path: Path) -> None:
    """Of an aLoRA, which the converter writes as numbers."""
    spec, expected = written(MODELS["llama"], tmp_path)
    config = tmp_path / "peft" / "adapter_config.json"
    told = {**json.loads(config.read_text()), "alora_invocation_tokens": [7, 3, 7]}
    config.write_text(json.dumps(told))
    path = convert_adapter(tmp_path / "peft", tmp_path / "checkpoint", tmp_path / "a.gguf")
    found = read_adapter(path, spec)
    assert found.invocation == read_adapter(tmp_path / "peft", spec).invocation == (7, 3, 7)
    assert found.fingerprint == expected.fingerprint
