"""logprob_token_ids: exact whatever is sampled, allowed, guessed, cut, cached or told of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport import LLM, SamplingParams
from onnxport.errors import RequestError
from onnxport.serving import numpy_sampler, sampling
from onnxport.serving.engine import Engine
from onnxport.serving.named_logprobs import with_named
from onnxport.serving.outputs import CompletionDelta, TokenLogprobs
from onnxport.serving.param_ranges import MAX_LOGPROB_TOKEN_IDS
from onnxport.serving.prompts import TokensPrompt
from onnxport.serving.structured.spec import StructuredOutputs
from tests.serving.helpers import alone, null_engine, reasons, run, submit, tokens
from tests.serving.prophet import Prophet
from tests.serving.sampling_cases import KINDS, make_logits
from tests.serving.structured import tokenizer, vocabulary
from tests.serving.test_sampling_engine import null_logits

VOCAB = 512
PROMPT = [7, 3, 3, 9, 300, 4, 12, 8, 1, 0, 5, 77]
NAMED = (400, 3, 9, 511, 0)
PARAMS = SamplingParams(temperature=0.0, max_tokens=9, logprob_token_ids=NAMED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampled", ["likeliest", "any"])
def test_they_are_those_that_the_sampler_would_report(kind: str, sampled: str) -> None:
    vocab = 5000
    for seed in range(4):
        logits = make_logits(kind, vocab, seed)
        rng = np.random.default_rng(seed)
        finite = np.flatnonzero(np.isfinite(logits))
        token_id = int(logits.argmax() if sampled == "likeliest" else rng.choice(finite))
        named = rng.permutation(vocab)[:40].tolist()
        named[3] = int(logits.argmax())
        named = list(dict.fromkeys(named))
        row = numpy_sampler.row_logprobs(logits, token_id, 2)
        found = with_named(row, logits, named)
        assert found[:5] == row[:5]
        assert [one.token_id for one in found.named] == named
        least = float(np.abs(logits[finite]).max()) * 1e-14  # of double precision
        for one in found.named:
            wanted = numpy_sampler.row_logprobs(logits, one.token_id, 0)
            assert one.rank == wanted.rank
            assert one.logprob == pytest.approx(wanted.logprob, rel=1e-12, abs=least + 1e-6)
            assert one.logprob <= 0.0


def entries(deltas: Sequence[CompletionDelta], index: int = 0) -> list[TokenLogprobs]:
    own = [delta for delta in deltas if delta.index == index]
    return [one for delta in own for one in delta.logprobs or ()]


def check(
    deltas: Sequence[CompletionDelta],
    prompt: Sequence[int] = PROMPT,
    index: int = 0,
    *,
    logits: NDArray[np.float32] | None = None,
    top: int = 0,
    named: Sequence[int] = NAMED,
) -> None:
    """Each position tells the named tokens, the sampled one and so many likeliest, exactly."""
    output = tokens(deltas, index)
    told = entries(deltas, index)
    assert len(told) == len(output) > 0
    rows = null_logits([*prompt, *output], VOCAB) if logits is None else logits
    for place, (token_id, entry) in enumerate(zip(output, told, strict=True)):
        values = rows[len(prompt) - 1 + place].astype(np.float64)
        logprobs = values - values.max() - np.log(np.exp(values - values.max()).sum())
        likeliest = np.argsort(-values, kind="stable").tolist()
        assert list(entry) == list(dict.fromkeys([*likeliest[:top], *named, token_id]))
        for one, found in entry.items():
            assert found.logprob == pytest.approx(logprobs[one], abs=1e-5)
            assert found.rank == likeliest.index(one) + 1


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"logprobs": 0},
        {"temperature": 1.3, "top_k": 4, "seed": 1},
        {"temperature": 1.0, "seed": 2},
        {"logit_bias": {400: 30.0, 3: -9.0}, "repetition_penalty": 1.5, "bad_words": ()},
        {"allowed_token_ids": [5, 6, 9], "temperature": 1.0, "seed": 3},
        {"presence_penalty": 1.0, "min_p": 0.2, "temperature": 2.0, "seed": 4},
    ],
)
def test_of_the_models_own_logits_whatever_changes_them(more: dict[str, Any]) -> None:
    params = replace(PARAMS, **more)
    engine = null_engine()
    submit(engine, "a", PROMPT, params)
    deltas = run(engine)["a"]
    check(deltas)
    plain = replace(params, logprob_token_ids=None, logprobs=None)
    assert tokens(deltas) == alone(PROMPT, plain)


def test_the_likeliest_are_told_with_them_each_token_once() -> None:
    engine = null_engine()
    submit(engine, "a", PROMPT, replace(PARAMS, logprobs=3))
    deltas = run(engine)["a"]
    check(deltas, top=3)
    best = [next(iter(entry)) for entry in entries(deltas)]
    assert best == tokens(deltas)
    again = replace(PARAMS, logprob_token_ids=(best[0], NAMED[0]), logprobs=3)
    submit(engine, "b", PROMPT, again)
    check(run(engine)["b"], top=3, named=(best[0], NAMED[0]))


def test_who_asks_and_who_does_not_share_a_batch() -> None:
    engine = null_engine()
    plain = SamplingParams(temperature=0.0, max_tokens=9)
    submit(engine, "plain", PROMPT, plain)
    submit(engine, "a", PROMPT, PARAMS)
    submit(engine, "counted", PROMPT, replace(plain, logprobs=1))
    deltas = run(engine)
    check(deltas["a"])
    assert entries(deltas["plain"]) == []
    check(deltas["counted"], top=1, named=())


def test_nothing_is_looked_for_unless_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("nobody named a token")

    monkeypatch.setattr(sampling, "with_named", fail)
    engine = null_engine()
    submit(engine, "a", PROMPT, SamplingParams(temperature=0.0, max_tokens=4, logprobs=2))
    assert reasons(run(engine)["a"]) == ["length"]


def test_several_completions() -> None:
    engine = null_engine()
    drawn = replace(PARAMS, temperature=1.0, seed=5, n=3)
    submit(engine, "a", PROMPT, drawn)
    deltas = run(engine)["a"]
    for index in range(3):
        check(deltas, index=index)


def test_the_best_of_several() -> None:
    params = replace(PARAMS, temperature=1.0, seed=5, best_of=3)
    with LLM.from_engine(null_engine()) as llm:
        [output] = llm.generate(TokensPrompt(prompt_token_ids=PROMPT), params)
    [best] = output.outputs
    assert best.logprobs is not None
    assert all(set(NAMED) <= entry.keys() for entry in best.logprobs)


def prophet(length: int, errs: int = 0) -> Engine:
    speculator = Prophet(lambda request: alone(PROMPT, request.params), length)
    speculator.errs = errs
    return null_engine(speculator=speculator)


@pytest.mark.parametrize("errs", [0, 2])
def test_guesses_make_no_difference(errs: int) -> None:
    engine = prophet(4, errs)
    submit(engine, "a", PROMPT, PARAMS)
    deltas = run(engine)["a"]
    check(deltas)
    assert len(deltas) < PARAMS.max_tokens  # several tokens of a step
    assert engine.stats().speculation is not None


def test_preemption_makes_no_difference() -> None:
    engine = null_engine(num_blocks=8, max_num_batched_tokens=9, scheduling_policy="priority")
    submit(engine, "a", PROMPT, PARAMS, priority=1)
    early = engine.step() + engine.step() + engine.step()
    urgent = SamplingParams(temperature=0.0, max_tokens=4)
    submit(engine, "urgent", list(range(20)), urgent, priority=0)
    deltas = run(engine)
    assert engine.stats().num_preemptions == 1
    check([*early, *deltas["a"]])


def test_what_a_form_allows_changes_none() -> None:
    """The head would compute what may come alone; the others' log probabilities are asked for."""
    size, named = vocabulary().vocab_size, (300, 3, 9)
    engine = null_engine(tokenizer=tokenizer(), vocab_size=size, max_model_len=400)
    prompt = tokenizer().encode("the sea")
    form = StructuredOutputs(regex="[a-f]{3,40}x")
    asked = replace(PARAMS, logprob_token_ids=named, structured_outputs=form)
    submit(engine, "greedy", prompt, asked)
    submit(engine, "drawn", prompt, replace(asked, temperature=1.0, seed=1))
    submit(engine, "beside", prompt, SamplingParams(temperature=0.0, structured_outputs=form))
    deltas = run(engine)
    for name in ("greedy", "drawn"):
        logits = null_logits([*prompt, *tokens(deltas[name])], size)
        check(deltas[name], prompt, logits=logits, named=named)


def test_a_step_that_fails_in_the_sampler_goes_on_row_by_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = sampling.sample

    def fails(logits: Any, rows: Any, *rest: Any) -> Any:
        if len(rows) > 1:
            raise MemoryError("of several rows")
        return draw(logits, rows, *rest)

    monkeypatch.setattr(sampling, "sample", fails)
    engine = null_engine()
    submit(engine, "a", PROMPT, PARAMS)
    submit(engine, "b", PROMPT[:5], PARAMS)
    deltas = run(engine)
    check(deltas["a"])
    check(deltas["b"], PROMPT[:5])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (list(range(MAX_LOGPROB_TOKEN_IDS + 1)), "has 129 tokens; give at most 128"),
        ([-1], "-1"),
        ([1.5], "1.5"),
        ([True], "True"),
        (5, "give a list of token ids"),
        (0, "give a list of token ids"),
        ("5", "give a list of token ids"),
    ],
)
def test_what_is_no_list_of_tokens_is_refused(given: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        SamplingParams(logprob_token_ids=given)
    assert caught.value.param == "logprob_token_ids"


def test_what_it_asks_for() -> None:
    params = SamplingParams(logprob_token_ids=[5, 4, 5])  # type: ignore[arg-type]
    assert params.logprob_token_ids == (5, 4)
    assert params.logprobs == 0
    assert SamplingParams(logprob_token_ids=(4,), logprobs=3).logprobs == 3
    none = SamplingParams(logprob_token_ids=())
    assert none == SamplingParams()
    assert SamplingParams(logprob_token_ids=tuple(range(MAX_LOGPROB_TOKEN_IDS))).logprobs == 0


def test_a_token_that_the_model_lacks_is_refused_before_it_waits() -> None:
    engine = null_engine()
    with pytest.raises(RequestError, match="token 512; the model's tokens are 0 to 511") as caught:
        engine.prepare("a", PROMPT, replace(PARAMS, logprob_token_ids=(3, 512)))
    assert caught.value.param == "logprob_token_ids"
    assert not engine.has_work
