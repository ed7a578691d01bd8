"""A real model and a real head of random weights, end to end on processors and emulated devices.

A head of random weights is seldom right, so what it guesses is compared with what it says when all
of a sequence is computed anew, without a cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport import LLM, SamplingParams
from onnxport.errors import ArtifactError
from onnxport.exporter.draft_head import export_head
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.manifest import DRAFT_TOKENS
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.cpu.library import find_library
from onnxport.providers.registry import get_provider
from onnxport.serving import loading
from onnxport.serving.config import EngineConfig
from onnxport.serving.loading import open_engine
from onnxport.serving.request import Request
from onnxport.serving.speculation import build
from onnxport.serving.speculation.build import read_draft_tokens
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.head import HeadDrafter
from onnxport.serving.speculation.speculator import Speculator
from tests.conformance.models import step
from tests.exporter import checkpoints
from tests.exporter.heads import HIDDEN, TARGET, Head
from tests.serving.speculating import Eager

SLOTS = {"state_reads": 0, "state_writes": 1}  # of a row by itself
PROMPTS = [checkpoints.tokens(seed, 9 + 8 * seed).tolist() for seed in range(4)]
MIX = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=2, max_tokens=24, ignore_eos=True, top_k=9, logprobs=2),
    SamplingParams(
        temperature=0.7, seed=3, max_tokens=24, ignore_eos=True, repetition_penalty=1.3, n=2
    ),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model in int4 and its head."""
    folder = tmp_path_factory.mktemp("pair")
    checkpoints.make(TARGET, folder / "target")
    options = ExportOptions(precision="int4", group_size=32)
    model = export_model(folder / "target", folder / "model", options)
    Head().make(folder / "checkpoint")
    head = export_head(folder / "checkpoint", folder / "target", folder / "head", options)
    return model, head


def opened(path: Path, config: SpeculationConfig | None, **options: Any) -> LLM:
    given = {"provider": "cpu", "threads": 2, "kv_cache_tokens": 1024, "max_num_seqs": 8, **options}
    llm = LLM(path, **given, speculation=config)
    speculator = llm._engine._guessing._guesses
    if isinstance(speculator, Speculator):
        speculator.__class__ = Eager
    return llm


def outputs(llm: LLM) -> list[list[tuple[int, ...]]]:
    given = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    found = llm.generate(given, MIX)  # type: ignore[arg-type]
    return [[tuple(one.token_ids) for one in output.outputs] for output in found]


def drafter_of(llm: LLM) -> HeadDrafter:
    speculator = llm._engine._guessing._guesses
    assert isinstance(speculator, Speculator)
    drafter = speculator._asker.drafter
    assert isinstance(drafter, HeadDrafter)
    return drafter


@pytest.mark.parametrize("attention", ["custom", "decomposed"])
@pytest.mark.parametrize("budget", [16, 512])
def test_a_head_changes_no_token(attention: str, budget: int, pair: tuple[Path, Path]) -> None:
    if attention == "custom" and find_library() is None:
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")
    config = SpeculationConfig("eagle3", 4, model=pair[1], kv_cache_tokens=1024)
    exact = {"attention": attention, "matmul_accuracy_level": 1, "max_num_batched_tokens": budget}
    chosen = exact if attention == "decomposed" else {**exact, "matmul_accuracy_level": None}
    with opened(pair[0], None, **chosen) as llm:
        expected = outputs(llm)
    with opened(pair[0], config, **chosen) as llm:
        assert outputs(llm) == expected
        assert outputs(llm) == expected  # prefixes are cached now
        drafter_of(llm).check()
        assert drafter_of(llm)._waiting.tokens == 0
        counters = llm.stats().speculation
        assert counters is not None
        assert counters.num_draft_tokens > 100


def test_the_provider_may_be_left_open(pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = SpeculationConfig("eagle3", 4, model=pair[1], kv_cache_tokens=256)
    options = LoadOptions(threads=2, kv_cache_tokens=256)
    engine = open_engine(
        pair[0],
        options=options,
        config=EngineConfig(8, 64, speculation=config),
        needs_tokenizer=False,
        trials=tmp_path,
    )
    assert engine.capabilities.features == 3 * HIDDEN
    engine.close()


def test_guesses_are_what_the_head_says_without_a_cache(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, head_path = pair
    seen = noted_guesses(monkeypatch)
    config = SpeculationConfig("eagle3", 4, model=head_path, kv_cache_tokens=1024)
    with opened(path, config, enable_prefix_caching=False) as llm:
        outputs(llm)
    draft = Artifact.read(head_path).manifest.model.draft
    assert draft is not None
    check_guesses(seen, path, head_path, hidden_layers=draft.target_layers)


def noted_guesses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """The tokens of each greedy request that is guessed for from now on, and its guesses."""
    seen: list[tuple[list[int], list[int]]] = []
    propose = HeadDrafter.propose

    def noting(
        self: HeadDrafter, requests: Sequence[Request], lengths: Sequence[int]
    ) -> list[Sequence[int]]:
        found = propose(self, requests, lengths)
        seen.extend(
            (list(request.tokens), list(guess))
            for request, guess in zip(requests, found, strict=True)
            if guess and request.params.greedy
        )
        return found

    monkeypatch.setattr(HeadDrafter, "propose", noting)
    return seen


def check_guesses(
    seen: Sequence[tuple[list[int], list[int]]], path: Path, head_path: Path, **telling: Any
) -> None:
    """They are what the head says when all of a sequence is computed anew, without a cache.

    `telling` are options by which the model tells what the head reads.
    """
    assert len(seen) > 8
    spec = Artifact.read(head_path).manifest.model
    assert spec.draft is not None
    tokens = np.load(head_path / DRAFT_TOKENS)
    model = load(path, **telling)
    head = load(head_path)
    try:
        for ids, guess in seen:
            states = np.empty((len(ids) - 1, spec.draft.features), np.float32)
            model.run(replace(inputs_of(model, ids[:-1]), hidden_states=states))
            own = np.zeros((len(ids) - 1, spec.hidden_size), np.float32)
            given, after = states, ids[1:]
            for token in guess:
                last = np.empty((1, spec.hidden_size), np.float32)
                inputs = replace(
                    inputs_of(head, after),
                    target_hidden_states=given,
                    draft_hidden_states=own,
                    last_hidden_states=last,
                )
                logits = head.run(inputs)[0]
                assert tokens[logits.argmax()] == token
                given = np.concatenate([given, np.zeros_like(given[:1])])
                own, after = np.concatenate([own, last]), [*after, token]
    finally:
        model.close()
        head.close()


def load(path: Path, **options: Any) -> Model:
    chosen = LoadOptions(**{"threads": 2, "kv_cache_tokens": 256, **options})
    return get_provider("cpu").load(Artifact.read(path), chosen)


def inputs_of(model: Model, ids: Sequence[int]) -> Any:
    limits = model.capabilities
    blocks = list(range(1, 1 + -(-len(ids) // limits.block_size)))
    states = {}
    if limits.state_slots:
        states = {name: np.array([at], np.int32) for name, at in SLOTS.items()}
    inputs = step([(list(ids), 0, blocks)], limits, **states)
    return replace(inputs, logits_indices=np.array([len(ids) - 1], np.int32))


def test_a_provider_that_tells_no_states_may_take_over(
    pair: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("openvino")
    options = LoadOptions(threads=2, kv_cache_tokens=256, hidden_layers=(2, 4, 5))
    model = loading._fallback(Artifact.read(pair[0]), "openvino", "cpu", options).load()
    assert model.capabilities.features == 0
    model.close()
    assert "openvino is tried without a draft head's guesses" in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "cannot be read"),
        (np.arange(95, dtype=np.int32), "holds int32 .95., and the head has 96 logits"),
        (np.arange(96), "holds int64"),
        (np.zeros(96, np.int32), "names a token twice"),
        (np.arange(96, dtype=np.int32) - 1, "or none of the model's"),
    ],
)
def test_damaged_tokens_of_a_head_are_refused(
    content: Any,
    words: str,
    pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = Artifact.read(pair[1]).manifest.model  # whose reader finds some of that, too
    monkeypatch.setattr(build, "_spec", lambda path: spec)
    if content is not None:
        np.save(tmp_path / DRAFT_TOKENS, content)
    with pytest.raises(ArtifactError, match=words):
        read_draft_tokens(tmp_path)


def test_what_does_not_belong_together_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    model, head = pair
    assert SpeculationConfig.of({"model": str(head)}) == SpeculationConfig("eagle3", model=head)
    assert SpeculationConfig.of({"model": str(model)}).method == "draft_model"
    with pytest.raises(ArtifactError, match="is a draft head, and no model"):
        LLM(head, provider="cpu")
    for method, path, words in (
        ("draft_model", head, "is a draft head, which the speculation method draft_model cannot"),
        ("eagle3", model, "is a model, which the speculation method eagle3 cannot use"),
    ):
        config = SpeculationConfig(method, model=path, kv_cache_tokens=256)  # type: ignore[arg-type]
        with pytest.raises(ArtifactError, match=words):
            LLM(model, provider="cpu", speculation=config)
    other = replace(TARGET, config={"num_hidden_layers": 9})
    checkpoints.make(other, tmp_path / "checkpoint")
    deeper = export_model(tmp_path / "checkpoint", tmp_path / "model")
    config = SpeculationConfig("eagle3", model=head, kv_cache_tokens=256)
    with pytest.raises(ArtifactError, match=r"for a model of 8 layers, and .* has 9"):
        LLM(deeper, provider="cpu", speculation=config)
