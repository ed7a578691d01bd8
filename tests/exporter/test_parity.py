"""Every family and variation gives transformers' logits and greedy tokens, in every graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.providers.cpu.library import find_library
from tests.exporter import checkpoints
from tests.exporter.run_graphs import Graph, Kind, greedy

KERNEL = find_library()
KINDS: list[Kind] = ["gqa", "decomposed", "custom"]

Exported = tuple[PreTrainedModel, Artifact]


FAST = {
    "afmoe",
    "apertus",
    "arcee",
    "axk1",
    "cohere-norms",
    "cohere2",
    "cohere2-moe",
    "cwm",
    "deepseek-v2",
    "deepseek-v3",
    "exaone-moe",
    "exaone4",
    "falcon-new",
    "flex-olmo",
    "gemma",
    "gemma-biases",
    "gemma2",
    "gemma3",
    "gemma3-images",
    "gemma3n",
    "gemma4",
    "gemma4-images",
    "gemma4-moe",
    "gemma4-shared",
    "glm4",
    "glm4-moe",
    "gpt-bigcode",
    "gpt-neox",
    "gpt2",
    "granite",
    "granite-swa",
    "granitemoe",
    "granitemoe-swa",
    "hunyuan",
    "hunyuan-moe",
    "hyperclovax",
    "hy-v3",
    "internlm3-biases",
    "iquestcoder",
    "jais2",
    "laguna",
    "llama",
    "llama-mqa-biases",
    "llama4",
    "llama4-chunks",
    "mellum",
    "mimo-v2-flash",
    "minicpm3",
    "minimax-m2",
    "mistral-window",
    "mistral4",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "opt-350m",
    "phi",
    "phi3-longrope",
    "phimoe",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "smollm3",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "youtu",
}
PARAMS = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
    for name in checkpoints.CASES
]


@pytest.fixture(scope="module", params=PARAMS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp(request.param)
    case = checkpoints.CASES[request.param]
    model = checkpoints.make(case, folder / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1, context_length=case.context_length)
    path = export_model(folder / "checkpoint", folder / "artifact", options)
    return model, Artifact.read(path, verify="sha256")


def test_the_numpy_reference_agrees(exported: Exported) -> None:
    model, artifact = exported
    with np.load(artifact.path / "golden.npz") as golden:
        expected = checkpoints.logits(model, golden["token_ids"])[golden["logits_indices"]]
        assert len(golden["logits"]) == 4
        np.testing.assert_allclose(golden["logits"], expected, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_agrees(exported: Exported, kind: Kind) -> None:
    if kind == "custom" and KERNEL is None:
        pytest.skip("the C++ kernel was not built")
    model, artifact = exported
    if kind == "gqa" and not artifact.has_gqa:
        pytest.skip(
            "GroupQueryAttention has no latents or chunks, genai no layers that differ, MoE no GELU"
        )
    token_ids = checkpoints.tokens()
    expected = checkpoints.logits(model, token_ids)
    assert np.ptp(expected) > 2  # logits that say something
    if kind == "decomposed" and artifact.manifest.model.experts is not None:
        split = Graph(artifact, "split")
        np.testing.assert_allclose(split.logits(token_ids), expected, atol=1e-4)
    graph = Graph(artifact, kind, KERNEL)
    np.testing.assert_allclose(graph.logits(token_ids), expected, atol=1e-4)
    sequence = graph.sequence()
    chunked = [sequence.step(part) for part in np.split(token_ids, [9, 10, 23])]
    np.testing.assert_allclose(np.concatenate(chunked), expected, atol=1e-4)
    prompt = token_ids[:11]
    assert greedy(graph.sequence(), prompt, 12) == checkpoints.greedy(model, prompt, 12)


def test_the_artifact_is_whole(exported: Exported, tmp_path: Path) -> None:
    _, artifact = exported
    files = set(artifact.manifest.files)
    assert {"model.onnx", "model.onnx.data", "golden.npz", "generation_config.json"} <= files
    others = {"model_gqa.onnx", "genai_config.json"}
    assert files & others == (others if artifact.manifest.model.has_gqa_graph else set())
    assert artifact.manifest.eos_token_ids == (2,)
    assert artifact.manifest.precision == artifact.manifest.head_precision == "fp32"
    for name in files:
        assert (artifact.path / name).stat().st_size == artifact.manifest.files[name].size
