"""A head that is not read whole gives the tokens of one that is, whatever else happens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport import LLM, SamplingParams
from onnxport.providers.base import LoadOptions, Model, StepInputs
from onnxport.providers.cpu.library import matmul_isa
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.registry import open_model
from onnxport.serving.beside import Beside
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.prompts import TokensPrompt
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.draft_model import ModelDrafter
from onnxport.serving.speculation.ngram import NgramDrafter
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.thoughts import Thought
from tests.providers.conftest import WIDE_VOCAB
from tests.serving.speculating import Eager
from tests.serving.structured import tokenizer

pytestmark = pytest.mark.skipif(
    matmul_isa() is None, reason="the kernel was not built, or this processor lacks what it needs"
)
_random = np.random.default_rng(4)
SYSTEM = _random.integers(3, WIDE_VOCAB, 35).tolist()
PROMPTS = [
    SYSTEM,
    [*SYSTEM, 9, 8, 7],
    [*SYSTEM[:20], 5],
    [7, 8, 9] * 6,
    _random.integers(3, WIDE_VOCAB, 25).tolist(),
    [4],
]
FEW: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "n": 2},
    {"temperature": 1.3, "top_k": 3, "seed": 1, "presence_penalty": 0.4},
    {"temperature": 0.0, "repetition_penalty": 1.4, "min_tokens": 4},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01, "seed": 2, "n": 3},
    {"temperature": 0.7, "top_k": 1, "frequency_penalty": 0.5, "logit_bias": {9: -100.0}},
]
DRAWN: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.3, "seed": 2, "n": 2},
    {"temperature": 2.0, "seed": 3, "presence_penalty": 0.4},
    {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.4, "min_tokens": 4, "n": 3},
    {"temperature": 40.0, "seed": 5, "logit_bias": {9: -100.0}},
    {"temperature": 0.0},
]
LETTERS = StructuredOutputs(regex="[a-f]{3,40}(-[a-f]{1,3})*")
WORDS = StructuredOutputs(json={"type": "array", "items": {"type": "string"}, "minItems": 1})
FORMS: list[dict[str, Any]] = [
    {"temperature": 0.0, "structured_outputs": LETTERS},
    {"temperature": 0.0, "structured_outputs": WORDS, "n": 2, "repetition_penalty": 1.2},
    {"temperature": 1.0, "structured_outputs": LETTERS, "seed": 1},
    {"temperature": 1.5, "top_k": 5, "structured_outputs": WORDS, "seed": 2},
    {"temperature": 0.0, "allowed_token_ids": list(range(7, 9000, 7)), "min_tokens": 3},
    {"temperature": 1.0, "allowed_token_ids": [5, 700, 9000], "seed": 3, "n": 2},
]
THOUGHT = Thought(("#",), ("</think>",), is_open=True)
BUDGETED: list[dict[str, Any]] = [
    {"temperature": 0.0, "thinking_token_budget": 2},
    {"temperature": 1.0, "thinking_token_budget": 3, "seed": 1, "n": 2},
    {"temperature": 1.5, "thinking_token_budget": 1, "seed": 2, "top_k": 5},
    {"temperature": 0.0, "thinking_token_budget": 2, "repetition_penalty": 1.4},
    {"temperature": 0.0, "thinking_token_budget": 0, "min_tokens": 9},
    {"temperature": 0.0, "thinking_token_budget": 2, "structured_outputs": LETTERS},
]
LEFT_OUT: list[dict[str, Any]] = [  # by what llama.cpp has
    {"seed": 1, "top_n_sigma": 1.5},
    {"seed": 2, "typical_p": 0.8, "top_k": 20},
    {"seed": 3, "xtc_probability": 0.5, "xtc_threshold": 0.01},
    {"seed": 4, "dry_multiplier": 3.0, "dry_sequence_breakers": (), "min_p": 0.01, "n": 2},
    {"seed": 5, "typical_p": 0.9, "top_k": 9, "xtc_probability": 1.0, "n": 3},
    {"temperature": 0.0, "dry_multiplier": 3.0, "dry_sequence_breakers": ()},
]
ADAPTING: list[dict[str, Any]] = [  # to the row, or to what came before
    {"seed": 6, "dynatemp_range": 0.8, "top_k": 9},
    {"seed": 7, "mirostat": 2, "mirostat_tau": 2.0, "n": 2},
    {"seed": 8, "mirostat": 1, "allowed_token_ids": [5, 700, 9000, 9001]},
    {"temperature": 0.0, "repetition_penalty": 1.4, "repeat_last_n": 20},
    {"seed": 9, "dynatemp_range": 1.0},
    {"seed": 10, "mirostat": 1, "temperature": 0.6},
    {"seed": 11, "adaptive_target": 0.3, "top_k": 9, "n": 2},
]
MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2, "logprob_token_ids": (9, 5000, 77)},
    {"temperature": 1.0, "top_k": 20, "seed": 1, "prompt_logprobs": 1},
    {"temperature": 0.0, "repetition_penalty": 1.4},
    {"temperature": 1.0, "seed": 2},
    {"temperature": 1.0, "top_k": 5, "seed": 3, "best_of": 2},
]


class Told:
    """Counts rows of steps by whether only some of their logits had to be exact."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.few = self.all = 0
        run = OrtModel.run

        def listen(model: OrtModel, inputs: StepInputs) -> Any:
            exact = inputs.exact_logits
            few = 0 if exact is None else int(np.count_nonzero(exact))
            self.few += few
            self.all += len(inputs.logits_indices) - few
            return run(model, inputs)

        monkeypatch.setattr(OrtModel, "run", listen)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Told:
    return Told(monkeypatch)


def completions(artifact: Path, mixes: list[dict[str, Any]], **options: Any) -> tuple[Any, Any]:
    """All tokens and log probabilities, and the engine's counters; see `generated`."""
    chosen = {"threads": 2, "kv_cache_tokens": 1024, "max_num_seqs": 4, **options}
    with LLM(artifact, provider="cpu", **chosen) as llm:
        return generated(llm, mixes), llm.stats()


def structured(artifact: Path, mixes: list[dict[str, Any]], **options: Any) -> list[Any]:
    """The same of an engine that has a tokenizer."""
    loading = LoadOptions(threads=2, kv_cache_tokens=1024, **options)
    engine = Engine(open_model(artifact, "cpu", loading), tokenizer(), EngineConfig(4, 64))
    with LLM.from_engine(engine) as llm:
        return generated(llm, mixes)


def generated(llm: LLM, mixes: list[dict[str, Any]]) -> list[Any]:
    """What is generated, twice, the second time with what the first has left in the cache."""
    chosen = [*PROMPTS, *PROMPTS][: len(mixes)]
    prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in chosen]
    params = [SamplingParams(max_tokens=14, ignore_eos=True, **mix) for mix in mixes]
    found: list[Any] = []
    for _ in range(2):
        outputs = llm.generate(prompts, params)
        found += [[(one.token_ids, one.logprobs) for one in each.outputs] for each in outputs]
        found += [each.prompt_logprobs for each in outputs]
    return found


@pytest.fixture(scope="module", params=["few", "drawn", "mixed", "left out", "adapting"])
def mixes(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return {"few": FEW, "drawn": DRAWN, "mixed": MIXED, "left out": LEFT_OUT, "adapting": ADAPTING}[
        request.param
    ]


@pytest.fixture(scope="module")
def expected(wide_artifact: Path, mixes: list[dict[str, Any]]) -> Any:
    found, _ = completions(
        wide_artifact, mixes, coarse_head=False, enable_prefix_caching=False, threads=1
    )
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"threads": 1, "max_num_batched_tokens": 11}, id="chunks"),
        pytest.param({"max_num_seqs": 16}, id="many rows"),
        pytest.param({"kv_cache_tokens": 112}, id="preemption"),
        pytest.param(
            {"kv_cache_tokens": 112, "preemption": "swap", "kv_host_memory": 1 << 22}, id="swap"
        ),
    ],
)
def test_the_tokens_are_the_same(
    wide_artifact: Path,
    mixes: list[dict[str, Any]],
    expected: Any,
    told: Told,
    options: dict[str, Any],
) -> None:
    found, stats = completions(wide_artifact, mixes, **options)
    assert found == expected
    assert told.few > 50
    assert (told.all > 50) == any(mixes is one for one in (MIXED, LEFT_OUT, ADAPTING))
    assert (stats.num_preemptions > 0) == ("kv_cache_tokens" in options)
    assert stats.prefix_cache_hits > 0


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_speculation_changes_none(
    wide_artifact: Path, mixes: list[dict[str, Any]], expected: Any, told: Told, method: str
) -> None:
    """The draft model is the same one, so it guesses right where its own head does."""
    model, draft = (loaded(wide_artifact) for _ in range(2))
    drafter = ModelDrafter(draft, 64, WIDE_VOCAB) if method == "draft_model" else NgramDrafter(3, 1)
    config = SpeculationConfig("ngram", num_speculative_tokens=3)
    engine = Engine(model, None, EngineConfig(4, 64), speculator=Eager(drafter, config))
    with LLM.from_engine(engine) as llm:
        assert generated(llm, mixes) == expected
        counters = llm.stats().speculation
    assert counters is not None
    assert counters.num_draft_tokens > 0
    # What this model says repeats itself by chance alone, and not on every processor.
    assert method == "ngram" or counters.num_accepted_tokens > 0
    if method == "draft_model" and mixes is FEW:
        assert counters.num_accepted_tokens == counters.num_draft_tokens
    assert told.few > 50
    draft.close()


def test_what_tokens_were_drawn_from_is_told_exactly(wide_artifact: Path) -> None:
    """Of the same logits, some of which neither its tokens nor their ranks depend on."""
    options = {"logprobs_mode": "processed_logprobs", "max_logprobs": -1}
    mixes = [dict(mix) for mix in MIXED]
    mixes[4] |= {"logprobs": -1, "top_p": 0.9}
    wanted, _ = completions(
        wide_artifact, mixes, coarse_head=False, enable_prefix_caching=False, **options
    )
    found, _ = completions(wide_artifact, mixes, **options)
    assert found == wanted
    [(_, entries)] = found[4]
    assert all(
        0 < sum(one.logprob > -np.inf for one in entry.values()) < WIDE_VOCAB for entry in entries
    )


@pytest.mark.parametrize("when", ["before", "while it runs"])
def test_what_rows_may_get_changes_none(
    wide_artifact: Path, told: Told, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Whether the model knows it before it runs, or, as it is served, while it does."""
    wanted = structured(wide_artifact, FORMS, coarse_head=False)
    assert told.few == 0
    if when == "before":
        monkeypatch.setattr(Beside, "_start", lambda beside, task: task())
    assert structured(wide_artifact, FORMS) == wanted
    assert told.few > (150 if when == "before" else 20)


def test_what_closes_a_thought_need_not_be_exact(wide_artifact: Path, told: Told) -> None:
    """The one token that may come is drawn, whatever its logit is; all others are the same."""
    mixes = [{**mix, "thought": THOUGHT} for mix in BUDGETED]
    mixes[-1]["structured_outputs"] = replace(LETTERS, thought=THOUGHT)
    wanted = structured(wide_artifact, mixes, coarse_head=False)
    assert told.few == 0
    assert structured(wide_artifact, mixes) == wanted
    assert told.few > 100
    closing = tokenizer().encode("</think>", add_special_tokens=False)
    for mix, outputs in zip(mixes, wanted, strict=False):
        for ids, _ in outputs:
            at = ids.index(closing[0], mix["thinking_token_budget"])
            assert at - mix["thinking_token_budget"] <= 3  # by which a character is ended
            assert list(ids[at : at + len(closing)]) == closing


def loaded(artifact: Path) -> Model:
    return open_model(artifact, "cpu", LoadOptions(threads=2, kv_cache_tokens=1024))
