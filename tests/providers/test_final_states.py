"""What the final norm makes of each token, of which embeddings are made, told by models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from onnxport.errors import ArtifactError, ProviderError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.embedding_spec import EmbeddingSpec
from onnxport.graphs.passes.hidden_states import tell_hidden_states, tell_when_asked
from onnxport.providers.base import LoadOptions
from onnxport.providers.hidden_states import refuse_hidden_states
from onnxport.providers.registry import get_provider
from tests.conformance.models import step
from tests.exporter import checkpoints
from tests.providers.test_hidden_states import FLOAT32, WAYS, opened, rows_of, told
from tests.tiers import crossed

# Granite's final norm is stored times what its logits are divided by, and the others' kinds differ.
FAMILIES = (
    *("llama", "qwen3", "gemma3", "gemma4", "gemma4-shared", "gemma2", "granite", "olmo2"),
    *("qwen3-moe", "gpt-oss", "cohere", "cohere2", "exaone4", "deepseek-v2", "gpt-neox"),
    *("qwen3.5", "qwen3.5-tied", "granite-4-dense", "bamba", "nemotron-h-biases"),
    *("falcon-h1", "gpt2", "opt", "opt-plain"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """By themselves, and behind what layers read; whatever rows need logits."""
    case = {**checkpoints.CASES, **checkpoints.HYBRID, **checkpoints.SPACES}[family]
    torch_model = checkpoints.make(case, tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", context_length=case.context_length)
    artifact = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    ids = checkpoints.tokens()
    with torch.no_grad():
        expected = torch_model(torch.from_numpy(ids)[None], output_hidden_states=True).hidden_states
    for way, layers in (("cpu", ()), ("cpu", (1, 0)), ("cpu decomposed", (1,))):
        # A layer of a Nemotron-H is two of transformers' where it has a feed-forward layer.
        blocks = {1: 2} if family == "nemotron-h-biases" else {}
        parts = [expected[blocks.get(number, number)][0].numpy() for number in (*layers, -1)]
        with opened(artifact, way, hidden_layers=layers, final_states=True) as model:
            limits = model.capabilities
            size = limits.final_features
            assert limits.features == size * len(parts)
            found = []
            for slot, (first, end) in enumerate(((0, 19), (19, 20), (20, len(ids)))):
                inputs = step([(ids[first:end].tolist(), first, [2, 5])], limits)
                if limits.windows != (None,):
                    table = inputs.block_table
                    others = tuple(table + 3 * n for n in range(1, len(limits.windows)))
                    inputs = replace(inputs, more_block_tables=others)
                if limits.state_slots:
                    slots = np.array([slot, slot + 1], np.int32)
                    inputs = replace(inputs, state_reads=slots[:1], state_writes=slots[1:])
                inputs = replace(inputs, logits_indices=inputs.logits_indices[-1:])
                found.append(told(model, inputs)[1])
        for number, want in enumerate(parts):
            own = np.concatenate(found)[:, number * size : (number + 1) * size]
            np.testing.assert_allclose(own, want, rtol=1e-3, atol=2e-4 * np.abs(want).max())


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, by precision."""
    folder = tmp_path_factory.mktemp("model")
    checkpoints.make(checkpoints.CASES["qwen3"], folder / "checkpoint")
    return {
        precision: export_model(
            folder / "checkpoint",
            folder / precision,
            ExportOptions(precision=precision, group_size=32),
        )
        for precision in ("int4", "fp16")
    }


@pytest.mark.parametrize(("way", "precision"), crossed(2, list(WAYS), ["int4", "fp16"]))
def test_logits_stay_as_they_are(way: str, precision: str, artifacts: dict[str, Path]) -> None:
    path = artifacts[precision]
    with opened(path, way) as plain, opened(path, way, final_states=True) as telling:
        assert plain.capabilities.final_features == 0
        inputs = step(rows_of(40), plain.capabilities)
        inputs = replace(inputs, logits_indices=np.array([10, 39], np.int32))
        expected = plain.run(inputs).copy()
        logits, states = told(telling, inputs)
        # Emulated devices have ONNX Runtime's products, which give a row other bits beside others.
        rough = 0.0 if way == "cpu" else 1e-2 if precision == "fp16" else 1e-4
        np.testing.assert_allclose(logits, expected, rtol=rough, atol=rough)
        assert states.shape == (40, telling.capabilities.final_features)
        np.testing.assert_array_equal(telling.run(inputs), logits)  # nobody wants to know
    with opened(path, "cpu decomposed", **FLOAT32, final_states=True) as reference:
        _, want = told(reference, inputs)
    with opened(path, way, **FLOAT32, final_states=True) as exact:
        _, found = told(exact, inputs)
    rough = 0.02 if exact.capabilities.compute_dtype == "float16" else 1e-4
    np.testing.assert_allclose(found, want, rtol=rough, atol=rough * np.abs(want).max())


@pytest.mark.parametrize("family", ["cohere", "exaone4"])
def test_logits_of_other_ends_keep_their_bits(family: str, tmp_path: Path) -> None:
    """Where the final norm is a plain one behind a sum, and where a norm is ahead of it."""
    case = checkpoints.CASES[family]
    checkpoints.make(case, tmp_path / "checkpoint")
    path = export_model(
        tmp_path / "checkpoint",
        tmp_path / "artifact",
        ExportOptions(precision="int4", group_size=32, context_length=case.context_length),
    )
    with opened(path, "cpu") as plain, opened(path, "cpu", final_states=True) as telling:
        inputs = step(rows_of(40), plain.capabilities)
        inputs = replace(inputs, logits_indices=np.array([10, 39], np.int32))
        np.testing.assert_array_equal(told(telling, inputs)[0], plain.run(inputs))


def test_a_token_has_the_same_bits_in_every_step(artifacts: dict[str, Path]) -> None:
    """Whole or in chunks, alone or beside others."""
    ids = checkpoints.tokens(count=40).tolist()
    with opened(artifacts["int4"], "cpu", final_states=True) as model:
        limits = model.capabilities
        _, whole = told(model, step([(ids, 0, [2, 5, 7])], limits))
        chunks = [
            told(model, step([(ids[first:end], first, [3, 4, 6])], limits))[1]
            for first, end in ((0, 17), (17, 18), (18, 40))
        ]
        np.testing.assert_array_equal(np.concatenate(chunks), whole)
        others = [(ids[3:9], 0, [8]), (ids, 0, [2, 5, 7]), (ids[5:6], 0, [9])]
        np.testing.assert_array_equal(told(model, step(others, limits))[1][6:46], whole)


@pytest.mark.parametrize("way", ["cpu", "cpu decomposed", "cuda"])
def test_slots_for_adapters_change_nothing(way: str, artifacts: dict[str, Path]) -> None:
    path = artifacts["fp16"]
    with opened(path, way, final_states=True, max_adapters=2) as model:
        inputs = step(rows_of(40), model.capabilities)
        inputs = replace(inputs, logits_indices=np.array([39], np.int32))
        logits, states = told(model, inputs)
    with opened(path, way, final_states=True) as model:
        want = told(model, inputs)
    np.testing.assert_allclose(logits, want[0], rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(states, want[1], rtol=2e-3, atol=2e-3)


def test_who_cannot_tell_them_says_so(artifacts: dict[str, Path]) -> None:
    with (
        pytest.raises(ProviderError, match="of which embeddings are made"),
        opened(artifacts["fp16"], "cuda", final_states=True, capture_graphs=True),
    ):
        pass
    bad: Any = 1
    with pytest.raises(ProviderError, match="final_states is 1; give true or false"):
        LoadOptions(final_states=bad)
    pytest.importorskip("openvino")
    with pytest.raises(ProviderError, match="embeddings are made; cpu, cuda"):
        get_provider("openvino").load(
            Artifact.read(artifacts["int4"]), LoadOptions(final_states=True)
        )


@pytest.mark.parametrize(
    ("spec", "ends"),
    [
        (None, "directml do$"),
        (EmbeddingSpec(only=True), "directml do$"),
        (
            EmbeddingSpec(),
            r"give --no-embeddings \(LLM\(.*False\)\) and, where mtp guesses, another method$",
        ),
    ],
)
def test_who_embeds_unasked_is_told_how_not_to(
    artifacts: dict[str, Path], spec: EmbeddingSpec | None, ends: str
) -> None:
    artifact = Artifact.read(artifacts["int4"])
    artifact = replace(artifact, manifest=replace(artifact.manifest, embedding=spec))
    with pytest.raises(ProviderError, match=ends):
        refuse_hidden_states(artifact, LoadOptions(final_states=True), "openvino")
    with pytest.raises(ProviderError, match=r"does not tell hidden states; .*directml do$"):
        refuse_hidden_states(artifact, LoadOptions(hidden_layers=(0,)), "openvino")


def test_graphs_that_are_not_the_exporters_are_refused(artifacts: dict[str, Path]) -> None:
    artifact = Artifact.read(artifacts["int4"])
    graph, spec = artifact.load_graph("paged"), artifact.manifest.model
    asking = tell_when_asked(tell_hidden_states(graph, (), spec, final=True).model).model
    assert contract.TELLS_STATES in {one.name for one in asking.graph.input}
    # Nothing is said of the stream, so nothing has to be known of its scale.
    scaled = replace(spec, residual_scale=0.5)
    assert tell_hidden_states(graph, (), scaled, final=True).changes == {"final norms that tell": 1}
    (norm,) = [node for node in graph.graph.node if node.name == "final_norm"]
    norm.name = "last_norm"
    with pytest.raises(ArtifactError, match="the end of the last layer is not in the graph"):
        tell_hidden_states(graph, (), spec, final=True)
