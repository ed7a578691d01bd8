"""The demo pair, and draft models of other providers, end to end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from onnxport import LLM, SamplingParams
from onnxport.errors import ArtifactError, ProviderError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.registry import open_model
from onnxport.serving.chat import Message
from onnxport.serving.speculation import build
from onnxport.serving.speculation.build import build_speculator, check_same_tokens
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.draft_model import ModelDrafter
from onnxport.serving.stats import SpeculationCounters
from tests.serving.speculating import Eager

ROOT = Path(__file__).parents[2]
PROMPTS = [
    one["messages"] for one in json.loads((ROOT / "demo" / "prompts.json").read_text())[::11]
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
MIX = [
    SamplingParams(temperature=1.0, seed=number, max_tokens=48, repetition_penalty=1.05, logprobs=1)
    for number in range(len(PROMPTS))
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The artifacts of the demo's model and draft."""
    folder = tmp_path_factory.mktemp("pair")
    model, draft = (
        export_model(ROOT / "demo" / name, folder / name, ExportOptions(precision="int4"))
        for name in ("model", "draft")
    )
    return model, draft


@contextmanager
def opened(model: Path, config: SpeculationConfig | None, **options: Any) -> Iterator[LLM]:
    """A model with a drafter, which guesses whenever it may."""
    given = {"threads": 2, "kv_cache_tokens": 4096, "max_model_len": 512, **options}
    with LLM(model, **given, speculation=config) as llm:
        speculator = llm._engine._guessing._guesses
        if speculator is not None:
            speculator.__class__ = Eager  # type: ignore[assignment]
        yield llm


def answers(llm: LLM, params: Sequence[SamplingParams] | SamplingParams) -> list[tuple[int, ...]]:
    chats: list[list[Message]] = PROMPTS
    return [tuple(one.outputs[0].token_ids) for one in llm.chat(chats, params)]


def counters(llm: LLM) -> SpeculationCounters:
    found = llm.stats().speculation
    assert found is not None
    return found


# The same bits in every batch, which is what makes tokens the same: our own kernels have them by
# themselves, OpenVINO in float32.
EXACT: dict[str, dict[str, Any]] = {
    "cpu": {},
    "openvino": {"kv_cache_dtype": "float32", "matmul_accuracy_level": 1},
}


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("cpu", "cpu"),
        ("cpu", "openvino"),
        pytest.param("openvino", "cpu", marks=pytest.mark.slow),
    ],
)
def test_a_draft_model_changes_no_token(pair: tuple[Path, Path], target: str, draft: str) -> None:
    if "openvino" in (target, draft):
        pytest.importorskip("openvino")
    config = SpeculationConfig("draft_model", model=pair[1], provider=draft, kv_cache_tokens=4096)
    with opened(pair[0], None, provider=target, **EXACT[target]) as llm:
        expected = [answers(llm, params) for params in (GREEDY, MIX)]
    with opened(pair[0], config, provider=target, **EXACT[target]) as llm:
        assert answers(llm, GREEDY) == expected[0]
        greedy = counters(llm)
        assert greedy.num_accepted_tokens > 0.7 * greedy.num_draft_tokens
        assert answers(llm, MIX) == expected[1]
        mixed = counters(llm)
        accepted = mixed.num_accepted_tokens - greedy.num_accepted_tokens
        # It draws with the random numbers of the requests, so it agrees nearly as often.
        assert accepted > 0.6 * (mixed.num_draft_tokens - greedy.num_draft_tokens)
        drafter = llm._engine._guessing._guesses._asker.drafter  # type: ignore[union-attr]
        assert isinstance(drafter, ModelDrafter)
        assert drafter._limits.provider == draft
        drafter.check()


def test_ngrams_change_no_token(pair: tuple[Path, Path]) -> None:
    with opened(pair[0], None, provider="cpu") as llm:
        expected = [answers(llm, params) for params in (GREEDY, MIX)]
    config = SpeculationConfig("ngram", num_speculative_tokens=8, prompt_lookup_min=1)
    with opened(pair[0], config, provider="cpu") as llm:
        assert [answers(llm, params) for params in (GREEDY, MIX)] == expected
        assert 0 < counters(llm).num_accepted_tokens < counters(llm).num_draft_tokens


def test_the_policy_speculates_on_a_real_model(pair: tuple[Path, Path]) -> None:
    config = SpeculationConfig("draft_model", model=pair[1], kv_cache_tokens=4096)
    params = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    with LLM(pair[0], provider="cpu", threads=1, speculation=config) as llm:
        for chat in PROMPTS[:2]:
            llm.chat([chat], params)
        done = counters(llm)
        # How many there are is a matter of this machine's times.
        assert done.num_drafts > 0
        assert llm.stats().num_steps == 600 - done.num_accepted_tokens
        assert llm.stats().generation_tokens == 600


def test_another_tokenizer_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for file in (ROOT / "demo" / "draft").iterdir():
        (checkpoint / file.name).write_bytes(file.read_bytes())
    text = (checkpoint / "tokenizer.json").read_text()
    values = json.loads(text)
    vocabulary = values["model"]["vocab"]
    first, second = (token for token, number in vocabulary.items() if number in (700, 900))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (checkpoint / "tokenizer.json").write_text(json.dumps(values))
    other = export_model(checkpoint, tmp_path / "other", ExportOptions(precision="int4"))
    words = re.escape("of which the first to differ is") + ".*number 700; take a draft model"
    with pytest.raises(ArtifactError, match=words):
        check_same_tokens(pair[0], other)
    with pytest.raises(ArtifactError, match="has another tokenizer than"):
        LLM(pair[0], provider="cpu", speculation=SpeculationConfig("draft_model", model=other))
    check_same_tokens(*pair)
    (checkpoint / "tokenizer.json").write_text(json.dumps(json.loads(text), indent=7))
    same = export_model(checkpoint, tmp_path / "same", ExportOptions(precision="int4"))
    check_same_tokens(pair[0], same)


def test_what_cannot_be_loaded_is_said_at_the_start(pair: tuple[Path, Path]) -> None:
    for config, kind, words in [
        (SpeculationConfig("draft_model", model=pair[0] / "no"), ArtifactError, "not an artifact"),
        (
            SpeculationConfig("draft_model", model=pair[1], provider="abacus"),
            ProviderError,
            "there is no provider 'abacus'",
        ),
    ]:
        with pytest.raises(kind, match=words):
            LLM(pair[0], provider="cpu", speculation=config)


def test_the_draft_model_runs_where_the_model_does(pair: tuple[Path, Path]) -> None:
    config = SpeculationConfig("draft_model", model=pair[1], kv_cache_tokens=512)
    speculator = build_speculator(config, pair[0], "cpu", 64)
    assert isinstance(speculator._asker.drafter, ModelDrafter)
    limits = speculator._asker.drafter._limits
    assert limits.provider == "cpu"
    assert limits.num_blocks * limits.block_size == 512
    speculator.close()


def test_the_draft_model_may_keep_what_the_model_may(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what suits any device; threads and memory are its own."""
    asked: list[LoadOptions] = []

    def listen(path: Path, provider: str, options: LoadOptions, trials: Path | None) -> Model:
        asked.append(options)
        return open_model(path, provider, options, trials)

    monkeypatch.setattr(build, "open_model", listen)
    config = SpeculationConfig("draft_model", model=pair[1], kv_cache_tokens=512)
    shared = LoadOptions(threads=3, max_adapters=1, graph_cache=tmp_path, coarse_head=False)
    build_speculator(config, pair[0], "cpu", 64, shared=shared).close()
    wanted = LoadOptions(
        threads=1,
        kv_cache_tokens=512,
        kv_share=build.DRAFT_KV_SHARE,
        graph_cache=tmp_path,
        coarse_head=False,
        hybrid_kv_cache=False,
    )
    assert asked == [wanted]


def test_a_tiny_draft_model_has_one_thread_unless_told(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int | None] = []

    def noting(path: Path, provider: str, options: LoadOptions, trials: Path | None) -> Model:
        asked.append(options.threads)
        return open_model(path, provider, options, trials)

    monkeypatch.setattr(build, "open_model", noting)
    for threads in (None, 2):
        given = SpeculationConfig(
            "draft_model", model=pair[1], kv_cache_tokens=512, threads=threads
        )
        build_speculator(given, pair[0], "cpu", 64).close()
    monkeypatch.setattr(build, "FEW_BYTES", 1000)
    given = SpeculationConfig("draft_model", model=pair[1], kv_cache_tokens=512)
    build_speculator(given, pair[0], "cpu", 64).close()
    assert asked == [1, 2, None]
