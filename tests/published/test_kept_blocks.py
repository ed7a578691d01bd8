"""A model that was trained, in a GGUF file of Q4_1: the artifact is the file."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport import LLM, SamplingParams
from onnxport.exporter.export import export_model
from onnxport.exporter.gguf import minima
from onnxport.exporter.gguf.shard import GgufShard
from onnxport.exporter.offsets import OffsetBlocks, keep_minima
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from tests.published.places import SMOLLM2, needs_smollm2

pytestmark = needs_smollm2

README = Path(__file__).parents[2] / "README.md"
LETTERS = 1200  # of it: some 350 tokens
PROMPTS = (
    "The capital of France is",
    "The chemical symbol for gold is",
    "def fibonacci(n):",
    "Once upon a time",
)
GREEDY = SamplingParams(temperature=0, max_tokens=12)


def test_every_tenth_matrix_is_kept() -> None:
    """To a hundredth of a step, but for blocks that are far from zero; the levels all stay."""
    shard = GgufShard(SMOLLM2)
    tensors = [one for one in shard.tensors.values() if one.dtype == "Q4_1"]
    rows = 64
    for tensor in tensors[::10]:
        size = tensor.size_bytes // tensor.shape[0] * rows
        data = shard.read(tensor, 0, size).reshape(rows, -1)
        levels, steps, least = minima.read("Q4_1", data)
        halves = (np.empty(steps.shape, np.float16) for _ in range(2))
        out = OffsetBlocks(np.empty((*steps.shape, 16), np.uint8), *halves)
        expected = gguf.quants.dequantize(data, gguf.GGMLQuantizationType.Q4_1)
        assert keep_minima(expected, steps, least, out) == steps.size, tensor.name
        found = np.stack([out.quants & 15, out.quants >> 4], axis=-1).reshape(levels.shape)
        np.testing.assert_array_equal(found[steps != 0], levels[steps != 0])
        off = np.abs(out.meant() - expected).reshape(levels.shape).max(-1)
        assert (off <= 0.01 * np.abs(steps) + 2.0**-11 * np.abs(least)).all(), tensor.name
        assert off.mean() < 0.001 * steps.mean(), tensor.name
    shard.close()


class Answers:
    """What an artifact says: likelihoods of a real text, and texts that it goes on with."""

    def __init__(self, folder: Path, level: int | None = None) -> None:
        llm = LLM(folder, provider="cpu", threads=2, matmul_accuracy_level=level)
        asked = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        (result,) = llm.generate([README.read_text()[:LETTERS]], asked)
        assert result.prompt_logprobs is not None
        told = [next(iter(one.values())) for one in result.prompt_logprobs if one]
        self.log_likelihoods: NDArray[np.float64] = np.array([one.logprob for one in told])
        self.texts = [one.outputs[0].text for one in llm.generate(list(PROMPTS), GREEDY)]


@pytest.mark.slow
def test_it_says_what_the_file_says(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = {}
    for precision in (None, "fp32"):
        options = ExportOptions(precision=precision, context_length=1024, threads=os.cpu_count())
        folders[precision] = export_model(SMOLLM2, tmp_path / f"{precision}", options)
    assert "quantized again" not in caplog.text
    manifest = Artifact.read(folders[None]).manifest
    assert (manifest.precision, manifest.offsets, manifest.int8_matrices) == ("int4", True, None)
    wanted, kept = Answers(folders["fp32"]), Answers(folders[None], level=1)
    assert kept.texts == wanted.texts
    assert np.abs(kept.log_likelihoods - wanted.log_likelihoods).max() < 0.01
    served = Answers(folders[None])  # activations in int8
    assert "Paris" in served.texts[0]
    mean = wanted.log_likelihoods.mean()
    assert served.log_likelihoods.mean() == pytest.approx(mean, rel=0.01)
    off = np.abs(served.log_likelihoods - wanted.log_likelihoods)
    assert np.median(off) < 0.1
