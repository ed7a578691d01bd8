"""The files that benchmarks/make_gguf.py makes for llama.cpp are the checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from tests.exporter import checkpoints
from tests.published.places import FOLDER, needs_llama_cpp
from tests.tiers import every
from tests.waiting import PATIENCE_S

pytestmark = needs_llama_cpp
ROOT = Path(__file__).parents[2]
CASES = {**checkpoints.CASES, **checkpoints.HYBRID, **checkpoints.SHORT_CONV}
NAMES = ("qwen2", "llama-mha", "olmoe", "granitemoe", "lfm2", "qwen3.5")


def run(folder: Path) -> str:
    """Make the file in a process of its own, and return what it complains of."""
    command = [sys.executable, "-m", "benchmarks.make_gguf"]
    command += [str(folder / "checkpoint"), str(folder / "model.gguf"), "--matrices", "f16"]
    command += ["--published", str(FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE_S)
    return done.stderr if done.returncode else ""


@pytest.mark.parametrize("name", every(4, NAMES))
def test_answers_as_its_checkpoint(tmp_path: Path, name: str) -> None:
    checkpoints.make(replace(CASES[name], dtype=torch.bfloat16), tmp_path / "checkpoint")
    assert not run(tmp_path)
    options = ExportOptions(precision="fp32", threads=2)
    logits = []
    for source in ("checkpoint", "model.gguf"):
        artifact = export_model(tmp_path / source, tmp_path / f"{source}-artifact", options)
        with np.load(artifact / "golden.npz") as golden:
            logits.append(golden["logits"])
    # Numbers of bfloat16 below float16's range have fewer digits there.
    np.testing.assert_allclose(*logits, atol=1e-4)


def test_rows_that_no_token_of_the_tokenizer_has_are_kept(tmp_path: Path) -> None:
    case = CASES["gemma3"]
    model = checkpoints.make(replace(case, dtype=torch.bfloat16), tmp_path / "checkpoint")
    tokenizer = {"model": {"vocab": {"a": 0}, "merges": []}, "added_tokens": []}
    (tmp_path / "checkpoint" / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert not run(tmp_path)
    [embedding] = (
        one
        for one in gguf.GGUFReader(tmp_path / "model.gguf").tensors
        if one.name == "token_embd.weight"
    )
    assert embedding.shape[1] == model.config.vocab_size


def test_checkpoints_that_it_cannot_turn(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    assert "has no safetensors" in run(tmp_path)
    (tmp_path / "checkpoint" / "model.safetensors").touch()
    config = {"architectures": ["NobodysForCausalLM"], "model_type": "nobodys"}
    (tmp_path / "checkpoint" / "config.json").write_text(json.dumps(config))
    assert "does not know NobodysForCausalLM" in run(tmp_path)
