"""The cpu provider's products with int8 activations, in whole models."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from onnxport.graphs.artifact import Artifact
from onnxport.graphs.passes.result import PassResult
from onnxport.providers.base import LoadOptions, Model, StepInputs
from onnxport.providers.cpu import library, lowering
from onnxport.providers.cpu import provider as cpu
from onnxport.providers.cpu.library import matmul_isa
from onnxport.providers.registry import open_model
from onnxport.serving.verify.comparison import COARSE, EXACT
from onnxport.serving.verify.verifier import Checks, Verifier
from tests.exporter.checkpoints import VOCAB
from tests.providers.conftest import ArtifactMaker

needs_kernel = pytest.mark.skipif(
    matmul_isa() is None, reason="the kernel was not built, or this processor lacks what it needs"
)
BLOCKS_EACH = 4  # of 16 tokens


def step(model: Model, parts: list[tuple[int, int, list[int]]]) -> np.ndarray:
    """Logits of every new token of each (sequence, past tokens, new tokens)."""
    counts = [len(ids) for _, _, ids in parts]
    starts = np.cumsum([0, *counts]).astype(np.int32)
    totals = [past + len(ids) for _, past, ids in parts]
    blocks = [np.arange(BLOCKS_EACH) + BLOCKS_EACH * sequence for sequence, _, _ in parts]
    inputs = StepInputs(
        input_ids=np.array([token for _, _, ids in parts for token in ids], np.int64),
        block_table=np.array(blocks, np.int32),
        cumulative_sequence_lengths=starts,
        past_sequence_lengths=np.array([past for _, past, _ in parts], np.int32),
        attention_metadata=np.array([max(counts), max(totals), max(totals)], np.int32),
        logits_indices=np.arange(starts[-1], dtype=np.int32),
    )
    return np.array(model.run(inputs))


def opened(path: Path, threads: int = 2, level: int | None = None) -> Model:
    options = LoadOptions(threads=threads, kv_cache_tokens=512, matmul_accuracy_level=level)
    return open_model(path, "cpu", options)


@needs_kernel
@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_a_sequence_has_the_same_logits_to_the_bit(
    tiny_artifact: ArtifactMaker, family: str, precision: str
) -> None:
    """Alone or in a batch, whole, in chunks or token by token, on one thread or two."""
    path = tiny_artifact(family, precision)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCAB, length).tolist() for length in (40, 1, 17, 33)]
    whole = opened(path)
    alone = [step(whole, [(i, 0, ids)]) for i, ids in enumerate(prompts)]
    together = step(whole, [(i, 0, ids) for i, ids in enumerate(prompts)])
    assert together.tobytes() == np.concatenate(alone).tobytes()
    whole.close()
    one_thread = opened(path, threads=1)
    assert step(one_thread, [(0, 0, prompts[0])]).tobytes() == alone[0].tobytes()
    chunks = [step(one_thread, [(1, 0, prompts[0][:19])])]
    chunks.append(step(one_thread, [(2, 0, prompts[2]), (1, 19, prompts[0][19:30])])[-11:])
    chunks += [step(one_thread, [(1, at, prompts[0][at : at + 1])]) for at in range(30, 40)]
    assert np.concatenate(chunks).tobytes() == alone[0].tobytes()
    one_thread.close()


@needs_kernel
@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_fused_feed_forward_layers_have_the_bits_of_their_parts(
    tiny_artifact: ArtifactMaker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    family: str,
    precision: str,
) -> None:
    caplog.set_level(logging.INFO)
    path = tiny_artifact(family, precision)
    rng = np.random.default_rng(1)
    parts = [(i, 0, rng.integers(3, VOCAB, length).tolist()) for i, length in enumerate((33, 1, 9))]
    fused = opened(path)
    assert "2 gated feed-forward layers fused" in caplog.text
    found = step(fused, parts), step(fused, [(0, 33, [7])])
    fused.close()
    monkeypatch.setattr(lowering, "fuse_gated_mlp", lambda model: PassResult("none", model, {}))
    apart = opened(path)
    wanted = step(apart, parts), step(apart, [(0, 33, [7])])
    apart.close()
    for one, other in zip(found, wanted, strict=True):
        assert one.tobytes() == other.tobytes()


def greedy(model: Model, prompt: list[int], count: int) -> tuple[list[int], np.ndarray]:
    """The likeliest tokens after a prompt, and the logits that they were taken from."""
    tokens, rows, past = list(prompt), [], 0
    for _ in range(count):
        rows.append(step(model, [(0, past, tokens[past:])])[-1])
        past = len(tokens)
        tokens.append(int(rows[-1].argmax()))
    return tokens[len(prompt) :], np.array(rows)


@needs_kernel
@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_fused_norms_give_the_same_tokens(
    tiny_artifact: ArtifactMaker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    family: str,
    precision: str,
) -> None:
    """Not the same bits: ONNX Runtime adds up a norm's squares in another order."""
    caplog.set_level(logging.INFO)
    path = tiny_artifact(family, precision)
    prompt = np.random.default_rng(2).integers(3, VOCAB, 33).tolist()
    fused = opened(path)
    assert "4 norms fused into what reads them" in caplog.text
    tokens, logits = greedy(fused, prompt, 16)
    fused.close()
    monkeypatch.setattr(lowering, "fuse_input_norm", lambda model: PassResult("none", model, {}))
    apart = opened(path)
    wanted, reference = greedy(apart, prompt, 16)
    apart.close()
    assert tokens == wanted
    assert np.abs(logits - reference).max() < 2e-2 * np.abs(reference).max()


@needs_kernel
@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_it_verifies(tiny_artifact: ArtifactMaker, precision: str) -> None:
    """Within today's tolerances, float32 arithmetic untouched by it."""
    artifact = Artifact.read(tiny_artifact("qwen2", precision))
    verifier = Verifier(artifact, LoadOptions(kv_cache_tokens=512), Checks(speed=False))
    report = verifier.verify("cpu")
    exact, coarse = report.modes
    assert exact.tolerance is EXACT
    assert coarse.tolerance is COARSE
    assert report.state == "passed", report
    assert coarse.bit_invariant
    assert all(one.state == "passed" and not one.divergences for one in coarse.variants)


@needs_kernel
def test_it_takes_the_products_that_may_be_rounded_and_no_others(
    tiny_artifact: ArtifactMaker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for precision, level, line in (
        ("int4", None, "products with int8 activations"),
        ("int4", 1, "int8_matmul: nothing to do"),
        ("fp32", None, "int8_matmul: nothing to do"),
    ):
        caplog.clear()
        opened(tiny_artifact("llama", precision), level=level).close()
        assert line in caplog.text


def test_without_the_kernel_onnx_runtime_computes_them(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(library, "matmul_isa", lambda: None)
    model = opened(tiny_artifact("llama", "int4"))
    assert np.isfinite(step(model, [(0, 0, [5, 6, 7])])).all()
    model.close()
    assert "int8_matmul" not in caplog.text
    assert cpu.CpuProvider().probe().versions["int8 product kernel"] == "onnxruntime's"
