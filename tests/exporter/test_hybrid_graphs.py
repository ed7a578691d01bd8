"""Models with layers that have a state give transformers' logits and greedy tokens in graphs."""

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
from tests.exporter.checkpoints import HYBRID, SHORT_CONV, SPACES
from tests.exporter.run_graphs import Graph, Kind, check_golden, greedy, start
from tests.exporter.test_genai import PROMPT, generate

Exported = tuple[PreTrainedModel, Artifact]
KERNEL = find_library()
CASES = {**HYBRID, **SPACES, **SHORT_CONV}
KINDS: list[Kind] = ["gqa", "decomposed", "custom"]


@pytest.fixture(scope="module", params=CASES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp(request.param)
    model = checkpoints.make(CASES[request.param], folder / "checkpoint")
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
@pytest.mark.parametrize("name", CASES)
def test_onnxruntime_genai_generates_transformers_tokens(name: str, tmp_path: Path) -> None:
    case = CASES[name]
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
        *(("olmo-hybrid", "int4"), ("olmo-hybrid", "fp16"), ("olmo-hybrid-rope", "int8")),
        *(("qwen3-next", "int4"), ("qwen3.5-moe", "fp16")),
        *(("granite-4", "int4"), ("granite-4-dense", "fp16"), ("bamba-biases", "int8")),
        *(("nemotron-h", "int4"), ("nemotron-h-biases", "fp16")),
        *(("falcon-h1", "int4"), ("falcon-h1-norm", "int8"), ("falcon-h1", "fp16")),
        *(("lfm2", "int4"), ("lfm2-biases", "fp16"), ("lfm2-moe", "int4")),
        *(("lfm3", "int4"), ("lfm3-bare", "int8")),
    ],
)
def test_other_precisions(name: str, precision: str, tmp_path: Path) -> None:
    checkpoints.make(CASES[name], tmp_path / "checkpoint")
    options = ExportOptions(precision=precision, threads=1, group_size=32)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    check_golden(Artifact.read(path))


def test_a_padded_batch(exported: Exported) -> None:
    """As GroupQueryAttention takes it: behind the rows, in the first step alone."""
    model, artifact = exported
    long, short = checkpoints.tokens(1, 8), checkpoints.tokens(2, 6)
    spec = artifact.manifest.model
    assert spec.linear is not None
    cache = np.zeros((2, spec.num_kv_heads, 0, spec.head_size), np.float32)
    past: dict[str, NDArray[Any]] = {}
    for layer in spec.cached_layers:
        past |= {contract.past_key(layer): cache, contract.past_value(layer): cache}
    for layer in spec.linear_layers:
        conv = np.zeros((2, *spec.linear.conv_state), np.float32)
        past[contract.gqa_past_conv_state(layer)] = conv
        if spec.linear.recurrent_state is None:
            continue
        heads, value_size, key_size = spec.linear.recurrent_state
        recurrent = np.zeros((2, heads, key_size, value_size), np.float32)
        past[contract.gqa_past_recurrent_state(layer)] = recurrent
    session = start(artifact, "gqa")
    presents = [name.replace("past_key_values", "present") for name in past]

    def step(rows: list[NDArray[np.int64]], lengths: tuple[int, int]) -> NDArray[np.float32]:
        mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
        feeds = {contract.INPUT_IDS: np.stack(rows), contract.ATTENTION_MASK: mask.astype(np.int64)}
        logits, *states = session.run([contract.LOGITS, *presents], {**feeds, **past})
        past.update(zip(past, states, strict=True))
        return logits

    expected = checkpoints.logits(model, long), checkpoints.logits(model, short)
    found = step([long[:4], np.pad(short[:2], (0, 2), constant_values=7)], (4, 2))
    np.testing.assert_allclose(found[0], expected[0][:4], atol=1e-4)
    np.testing.assert_allclose(found[1, :2], expected[1][:2], atol=1e-4)
    for more in range(4):
        at = (4 + more, 2 + more)
        found = step([long[at[0]][None], short[at[1]][None]], (at[0] + 1, at[1] + 1))
        np.testing.assert_allclose(found[0, 0], expected[0][at[0]], atol=1e-4)
        np.testing.assert_allclose(found[1, 0], expected[1][at[1]], atol=1e-4)
