"""Models with gated delta nets give transformers' logits and greedy tokens in graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers import PreTrainedModel

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.providers.cpu.library import find_library
from tests.exporter import checkpoints
from tests.exporter.checkpoints import HYBRID
from tests.exporter.run_graphs import Graph, Kind, check_golden, greedy, start
from tests.exporter.test_genai import PROMPT, generate

Exported = tuple[PreTrainedModel, Artifact]
KERNEL = find_library()
KINDS: list[Kind] = ["gqa", "decomposed", "custom"]


@pytest.fixture(scope="module", params=HYBRID)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp(request.param)
    model = checkpoints.make(HYBRID[request.param], folder / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    path = export_model(folder / "checkpoint", folder / "artifact", options)
    return model, Artifact.read(path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_graph_agrees(exported: Exported, kind: Kind) -> None:
    if kind == "custom" and KERNEL is None:
        pytest.skip("the C++ kernel was not built")
    model, artifact = exported
    token_ids = checkpoints.tokens()
    expected = checkpoints.logits(model, token_ids)
    graph = Graph(artifact, kind, KERNEL)
    np.testing.assert_allclose(graph.logits(token_ids), expected, atol=1e-4)
    sequence = graph.sequence()
    chunked = [sequence.step(part) for part in np.split(token_ids, [9, 10, 23])]
    np.testing.assert_allclose(np.concatenate(chunked), expected, atol=1e-4)
    prompt = token_ids[:11]
    assert greedy(graph.sequence(), prompt, 12) == checkpoints.greedy(model, prompt, 12)


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRID)
def test_onnxruntime_genai_generates_transformers_tokens(name: str, tmp_path: Path) -> None:
    case = HYBRID[name]
    quiet = replace(  # no end token, so that the length is known
        case, config={**case.config, "eos_token_id": checkpoints.VOCAB - 1}
    )
    model = checkpoints.make(quiet, tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    assert generate(path, PROMPT, 12) == checkpoints.greedy(model, PROMPT, 12)


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(("qwen3.5", "int4"), ("qwen3.5", "int8"), ("qwen3.5-tied", "fp16")),
        *(("qwen3-next", "int4"), ("qwen3.5-moe", "fp16")),
    ],
)
def test_other_precisions(name: str, precision: str, tmp_path: Path) -> None:
    checkpoints.make(HYBRID[name], tmp_path / "checkpoint")
    options = ExportOptions(precision=precision, threads=1, group_size=32)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    check_golden(Artifact.read(path))


def test_each_row_of_a_batch_has_a_state_of_its_own(exported: Exported) -> None:
    model, artifact = exported
    rows = np.stack([checkpoints.tokens(seed) for seed in (1, 2)])
    spec = artifact.manifest.model
    assert spec.linear is not None
    heads, value_size, key_size = spec.linear.recurrent_state
    cache = np.zeros((2, spec.num_kv_heads, 0, spec.head_size), np.float32)
    feeds: dict[str, NDArray[Any]] = {
        contract.INPUT_IDS: rows,
        contract.ATTENTION_MASK: np.ones(rows.shape, np.int64),
    }
    for layer in spec.cached_layers:
        feeds |= {contract.past_key(layer): cache, contract.past_value(layer): cache}
    for layer in spec.linear_layers:
        conv = np.zeros((2, *spec.linear.conv_state), np.float32)
        feeds[contract.gqa_past_conv_state(layer)] = conv
        recurrent = np.zeros((2, heads, key_size, value_size), np.float32)
        feeds[contract.gqa_past_recurrent_state(layer)] = recurrent
    (logits,) = start(artifact, "gqa").run([contract.LOGITS], feeds)
    for row, found in zip(rows, logits, strict=True):
        np.testing.assert_allclose(found, checkpoints.logits(model, row), atol=1e-4)
