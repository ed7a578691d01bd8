"""onnxruntime-genai, which no one here wrote, opens the folder and generates the same tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime_genai as genai
import pytest
from numpy.typing import NDArray

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from tests.exporter import checkpoints
from tests.tiers import crossed

PROMPT = checkpoints.tokens(seed=3, count=9)


def generate(folder: Path, prompt: NDArray[np.int64], count: int) -> list[int]:
    model = genai.Model(str(folder))
    parameters = genai.GeneratorParams(model)
    parameters.set_search_options(max_length=len(prompt) + count, do_sample=False)
    generator = genai.Generator(model, parameters)
    generator.append_tokens(prompt.astype(np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    return [int(token) for token in generator.get_sequence(0)[len(prompt) :]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "llama-tied", "mistral-window", "qwen2", "qwen2-window", "qwen3"),
        *("phi3", "granite", "smollm3", "ernie", "glm", "helium", "seed-oss"),
        *("gemma", "gemma2", "gemma3", "gemma3-linear", "gemma3-images", "olmo2", "olmo3"),
        *("granitemoe", "mixtral", "olmoe", "qwen3-moe"),
        *("granitemoeshared", "qwen2-moe", "ernie-moe", "glm4-moe", "dots1", "solar-open"),
        *("exaone4", "exaone4-full", "exaone-moe", "minimax-m2-tied"),
        *("hunyuan-biases", "hunyuan-moe", "cohere", "cohere2", "afmoe"),
        *("laguna", "laguna-full", "mimo-v2-flash-whole"),
        *("hy-v3", "mellum", "cohere2-moe", "cohere2-moe-softmax"),
        *("gpt-oss", "gpt-oss-16bit", "ministral3", "ministral3-text"),
        *("apertus", "arcee", "cohere-norms", "gpt-neox", "nemotron-biases", "phi-mha", "stablelm"),
        *("cwm", "granite-swa", "granitemoe-swa", "hyperclovax", "iquestcoder", "jais2"),
        *("falcon-new", "gpt-bigcode", "gpt2", "gptj", "opt", "opt-350m"),
        *("starcoder2", "vaultgemma"),
    ],
)
def test_generates_transformers_tokens(name: str, tmp_path: Path) -> None:
    case = checkpoints.CASES[name]
    end = checkpoints.VOCAB - (
        2 if name == "ministral3" else 1
    )  # whose greedy tokens have the last
    quiet = replace(case, config={**case.config, "eos_token_id": end})  # so the length is known
    model = checkpoints.make(quiet, tmp_path / "checkpoint")
    path = export_model(
        tmp_path / "checkpoint", tmp_path / "artifact", ExportOptions(precision="fp32")
    )
    expected = checkpoints.greedy(model, PROMPT, 16)
    assert end not in expected
    assert generate(path, PROMPT, 16) == expected


@pytest.mark.parametrize(
    ("name", "precision"),
    crossed(3, ["gemma3", "llama", "olmoe", "qwen2", "qwen3"], ["int4", "int8", "fp16"]),
)
def test_opens_other_precisions(name: str, precision: str, tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES[name], tmp_path / "checkpoint")
    options = ExportOptions(precision=precision, group_size=32)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    found = generate(path, PROMPT, 8)
    assert found
    assert all(0 <= token < checkpoints.VOCAB for token in found)


def test_settings_come_from_the_checkpoint(tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES["qwen3"], tmp_path / "checkpoint")
    generation = {"eos_token_id": [5, 6], "do_sample": True, "top_p": 0.8, "top_k": 20}
    (tmp_path / "checkpoint" / "generation_config.json").write_text(json.dumps(generation))
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact")
    config = json.loads((path / "genai_config.json").read_text())
    assert config["model"]["eos_token_id"] == [5, 6]
    assert config["model"]["pad_token_id"] == 5
    assert config["model"]["bos_token_id"] == 1
    assert config["model"]["decoder"]["head_size"] == 32
    assert config["search"]["do_sample"] is True
    assert (config["search"]["top_p"], config["search"]["top_k"]) == (0.8, 20)
    assert genai.Model(str(path)).type == "qwen3"
