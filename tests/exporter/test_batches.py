"""Batches that the parity tests do not make: padding, and steps that need no logits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.providers.cpu.library import find_library
from tests.exporter import checkpoints
from tests.exporter.run_graphs import Graph, Kind, PagedRunner, start
from tests.tiers import crossed

KERNEL = find_library()


def export(folder: Path, name: str, precision: str) -> Artifact:
    checkpoints.make(checkpoints.CASES[name], folder / "checkpoint")
    options = ExportOptions(precision=precision, group_size=32)
    return Artifact.read(export_model(folder / "checkpoint", folder / "artifact", options))


def test_the_gqa_graph_takes_a_padded_batch(tmp_path: Path) -> None:
    artifact = export(tmp_path, "qwen3", "fp32")
    long, short = checkpoints.tokens(1, 9), checkpoints.tokens(2, 5)
    session = start(artifact, "gqa")
    spec = artifact.manifest.model
    empty = np.zeros((2, spec.num_kv_heads, 0, spec.head_size), np.float32)
    feeds = {
        contract.INPUT_IDS: np.stack([long, np.pad(short, (0, 4))]),
        contract.ATTENTION_MASK: np.stack([np.ones(9, np.int64), np.repeat([1, 0], [5, 4])]),
    }
    for layer in range(spec.num_layers):
        feeds[contract.past_key(layer)] = feeds[contract.past_value(layer)] = empty
    (logits,) = session.run([contract.LOGITS], feeds)
    assert logits.shape == (2, 9, spec.vocab_size)
    graph = Graph(artifact, "gqa")
    np.testing.assert_allclose(logits[0], graph.logits(long), atol=1e-5)
    np.testing.assert_allclose(logits[1, :5], graph.logits(short), atol=1e-5)


@pytest.mark.parametrize("kind", ["decomposed", "custom"])
@pytest.mark.parametrize(
    ("name", "precision"),
    crossed(3, ["llama-mqa-biases", "llama-tied", "qwen3"], ["fp32", "fp16", "int4"]),
)
def test_a_step_may_need_no_logits(name: str, precision: str, kind: Kind, tmp_path: Path) -> None:
    if kind == "custom" and KERNEL is None:
        pytest.skip("the C++ kernel was not built")
    artifact = export(tmp_path, name, precision)
    graph = Graph(artifact, kind, KERNEL)
    token_ids = checkpoints.tokens(count=12)
    sequence = graph.sequence()
    assert isinstance(sequence, PagedRunner)
    assert sequence.step(token_ids[:7], rows=0).shape == (0, checkpoints.VOCAB)
    rest = sequence.step(token_ids[7:], rows=2)
    np.testing.assert_allclose(rest, graph.logits(token_ids)[-2:], atol=1e-5)
