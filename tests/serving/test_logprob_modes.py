"""logprobs_mode: raw or processed, log probabilities or logits, in every path that draws tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport import LLM, SamplingParams
from onnxport.errors import CapacityError, RequestError
from onnxport.serving import numpy_sampler, sampling
from onnxport.serving.config import EngineConfig, LogprobsMode
from onnxport.serving.engine import Engine
from onnxport.serving.logprob_modes import processed
from onnxport.serving.outputs import CompletionDelta, TokenLogprobs
from onnxport.serving.params import RequestOptions
from onnxport.serving.prompts import TokensPrompt
from onnxport.serving.row_params import RowParams
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.thoughts import Thought
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.helpers import null_engine, run, submit, tokens
from tests.serving.prophet import Prophet
from tests.serving.samplers import ISAS, sampler_named
from tests.serving.sampling_cases import make_edits, make_logits, make_mask
from tests.serving.slow_sampling import changed, probabilities, temperature_of
from tests.serving.structured import tokenizer
from tests.serving.test_sampling_engine import null_logits
from tests.serving.tokenizers_for_tests import byte_level

TOKENIZER = Tokenizer(byte_level(), frozenset({0, 5}))
VOCAB = TOKENIZER.vocab_size
MODES: tuple[LogprobsMode, ...] = get_args(LogprobsMode)
PROMPT = TOKENIZER.encode("the sea is")
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, logprobs=-1, ignore_eos=True)
MIXES: Mapping[str, dict[str, Any]] = {
    "left out": {
        **{"temperature": 1.2, "seed": 9, "top_n_sigma": 2.0, "typical_p": 0.8, "top_p": 0.95},
        **{"xtc_probability": 1.0, "xtc_threshold": 0.02},
    },
    "moving": {"temperature": 0.9, "seed": 10, "dynatemp_range": 0.6, "top_p": 0.9},
    "greedy": {},
    "greedy, cut": {"top_k": 5, "top_p": 0.4, "min_p": 0.3},
    "one": {"temperature": 0.7, "top_k": 1, "seed": 1},
    "drawn": {"temperature": 1.3, "seed": 2},
    "top_k": {"temperature": 0.8, "top_k": 7, "seed": 3},
    "top_p": {"temperature": 1.0, "top_p": 0.6, "seed": 4},
    "min_p": {"temperature": 2.0, "min_p": 0.2, "seed": 5},
    "all": {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "min_p": 0.05, "seed": 6},
    "rules": {
        **{"temperature": 0.0, "logit_bias": {70: 9.0, 71: -5.0}, "min_tokens": 4},
        **{"bad_words": ("a", "is"), "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    },
    "penalties": {
        **{"temperature": 0.9, "presence_penalty": -0.7, "repetition_penalty": 0.8},
        **{"top_p": 0.9, "seed": 7},
    },
    "few": {"temperature": 1.0, "allowed_token_ids": [9, 70, 71, 200], "top_p": 0.9, "seed": 8},
}


def engine(mode: LogprobsMode, **options: Any) -> Engine:
    more = {"tokenizer": TOKENIZER, "vocab_size": VOCAB, "max_logprobs": -1, **options}
    return null_engine(logprobs_mode=mode, **more)


def expected(
    mode: LogprobsMode, logits: NDArray[np.float32], params: SamplingParams, output: Sequence[int]
) -> list[float]:
    """What a position tells of every token, by definition."""
    values = [float(one) for one in logits]
    if mode in ("processed_logprobs", "processed_logits"):
        values = changed(logits, params, PROMPT, output, TOKENIZER.eos_token_ids, encode)
        if params.temperature > 0.0:
            temperature = temperature_of(values, params)
            params = replace(params, temperature=temperature, dynatemp_range=0.0)
            kept = probabilities(values, replace(params, top_k=params.top_k or VOCAB))
            if params.top_k == 1:
                kept = {max(kept, key=lambda one: kept[one]): 1.0}
            values = [
                value / params.temperature if token_id in kept else -math.inf
                for token_id, value in enumerate(values)
            ]
    if mode in ("raw_logits", "processed_logits"):
        return values
    most = max(values)
    total = most + math.log(sum(math.exp(value - most) for value in values))
    return [value - total for value in values]


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def entries(deltas: Sequence[CompletionDelta], index: int = 0) -> list[TokenLogprobs]:
    own = [delta for delta in deltas if delta.index == index]
    return [one for delta in own for one in delta.logprobs or ()]


def check(
    mode: LogprobsMode,
    deltas: Sequence[CompletionDelta],
    params: SamplingParams,
    index: int = 0,
) -> None:
    output = tokens(deltas, index)
    told = entries(deltas, index)
    assert len(told) == len(output) > 0
    logits = null_logits([*PROMPT, *output], VOCAB)[len(PROMPT) - 1 :]
    for place, (token_id, entry) in enumerate(zip(output, told, strict=True)):
        values = expected(mode, logits[place], params, output[:place])
        found = [entry[one].logprob for one in range(VOCAB)]
        assert found == pytest.approx(values, rel=1e-5, abs=1e-5), (place, mode, params)
        ranks = sorted(range(VOCAB), key=lambda one: (-found[one], one))
        assert [entry[one].rank for one in ranks] == list(range(1, VOCAB + 1))
        assert math.isfinite(entry[token_id].logprob)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mix", MIXES)
def test_what_is_told(mode: LogprobsMode, mix: str) -> None:
    params = replace(PARAMS, **MIXES[mix])
    one = engine(mode)
    submit(one, "a", PROMPT, params)
    deltas = run(one)["a"]
    check(mode, deltas, params)
    raw = engine("raw_logprobs")
    submit(raw, "a", PROMPT, params)
    assert tokens(run(raw)["a"]) == tokens(deltas)  # it is told otherwise, not drawn


@pytest.mark.parametrize("mode", MODES)
def test_all_at_once(mode: LogprobsMode) -> None:
    """Beside each other, beside who asks for nothing, and several completions."""
    one = engine(mode, max_num_seqs=30, num_blocks=200)
    asked = {name: replace(PARAMS, **mix) for name, mix in MIXES.items()}
    asked["several"] = replace(PARAMS, temperature=1.2, top_p=0.9, seed=3, n=3)
    for name, params in asked.items():
        submit(one, name, PROMPT, params)
        submit(one, f"{name}, plain", PROMPT, replace(params, logprobs=None))
    deltas = run(one)
    for name, params in asked.items():
        for index in range(params.n):
            check(mode, deltas[name], params, index)
            assert tokens(deltas[f"{name}, plain"], index) == tokens(deltas[name], index)
        assert entries(deltas[f"{name}, plain"]) == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("errs", [0, 2])
def test_guesses_make_no_difference(mode: LogprobsMode, errs: int) -> None:
    for mix in ("rules", "penalties", "all"):
        params = replace(PARAMS, max_tokens=9, **MIXES[mix])
        first = engine(mode)
        submit(first, "a", PROMPT, params)
        future = tokens(run(first)["a"])
        speculator = Prophet(lambda _, known=future: known)  # type: ignore[misc]
        speculator.errs = errs
        one = engine(mode, speculator=speculator)
        submit(one, "a", PROMPT, params)
        deltas = run(one)["a"]
        assert len(deltas) < len(future)
        check(mode, deltas, params)


@pytest.mark.parametrize("mode", MODES)
def test_named_tokens_and_the_likeliest(mode: LogprobsMode) -> None:
    params = replace(PARAMS, **MIXES["all"])
    one = engine(mode)
    named = (3, 70, 200)
    submit(one, "a", PROMPT, params)
    submit(one, "b", PROMPT, replace(params, logprobs=2, logprob_token_ids=named))
    deltas = run(one)
    assert tokens(deltas["a"]) == tokens(deltas["b"])
    drawn = tokens(deltas["b"])
    for whole, few, token_id in zip(entries(deltas["a"]), entries(deltas["b"]), drawn, strict=True):
        likeliest = list(whole)[:2]
        assert list(few) == list(dict.fromkeys([*likeliest, *named, token_id]))
        for each, entry in few.items():
            assert entry.rank == whole[each].rank
            assert entry.logprob == pytest.approx(whole[each].logprob, abs=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_prompts_are_not_sampled(mode: LogprobsMode) -> None:
    params = replace(PARAMS, prompt_logprobs=3, **MIXES["all"])
    with LLM.from_engine(engine(mode)) as llm:
        [output] = llm.generate(TokensPrompt(prompt_token_ids=PROMPT), params)
    assert output.prompt_logprobs is not None
    raw: LogprobsMode = "raw_logits" if mode.endswith("logits") else "raw_logprobs"
    logits = null_logits(PROMPT, VOCAB)
    for row, entry in zip(logits, output.prompt_logprobs[1:], strict=False):
        assert entry is not None
        values = expected(raw, row, params, [])
        assert len(entry) >= 3
        for token_id, one in entry.items():
            assert one.logprob == pytest.approx(values[token_id], abs=1e-5)


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("drawn", [{"temperature": 0.0}, {"temperature": 0.5, "seed": 1}])
def test_what_a_form_forbids_is_cut(mode: LogprobsMode, drawn: dict[str, Any]) -> None:
    form = StructuredOutputs(regex="[a-f]{2}x")
    size = tokenizer().vocab_size
    one = engine(mode, tokenizer=tokenizer(), vocab_size=size, max_model_len=400)
    params = replace(PARAMS, structured_outputs=form, **drawn)
    prompt = tokenizer().encode("the sea")
    submit(one, "a", prompt, params)
    deltas = run(one)["a"]
    found = entries(deltas)
    logits = null_logits([*prompt, *tokens(deltas)], size)[len(prompt) - 1 :]
    for entry, row in zip(found, logits, strict=False):
        left = [token for token, each in entry.items() if math.isfinite(each.logprob)]
        texts = {tokenizer().token_text(token) for token in left}
        assert texts
        assert all(set(text) <= set("abcdefx") for text in texts)
        if mode == "processed_logprobs":
            assert sum(math.exp(entry[token].logprob) for token in left) == pytest.approx(1)
        else:
            by = params.temperature or 1.0
            assert [entry[token].logprob for token in left] == pytest.approx(
                (row[left] / by).tolist(), rel=1e-6
            )


def test_the_token_that_has_to_come_is_certain() -> None:
    """Where a thought has used its budget up, one token is left."""
    thought = Thought(("#",), ("</think>",), is_open=True)
    size = tokenizer().vocab_size
    one = engine("processed_logprobs", tokenizer=tokenizer(), vocab_size=size, max_model_len=400)
    params = replace(PARAMS, thinking_token_budget=0, thought=thought, max_tokens=20)
    submit(one, "a", tokenizer().encode("the sea"), params)
    deltas = run(one)["a"]
    closing = tokenizer().encode("</think>", add_special_tokens=False)
    for token_id, entry in list(zip(tokens(deltas), entries(deltas), strict=True))[: len(closing)]:
        assert entry[token_id].logprob == 0.0
        assert sum(math.isfinite(each.logprob) for each in entry.values()) == 1


CUTS = [
    RowParams(1.0, None, 0.9),
    RowParams(0.7, 50, 0.95),
    RowParams(1.0, 300),
    RowParams(1.0, min_p=0.01),
    RowParams(1.3, 70, 0.8, min_p=0.02),
    RowParams(3.0, None, 0.5, min_p=0.001),
]
LAST = 1.0 - 2.0**-53  # the random number that draws the last of what is left


@pytest.mark.parametrize("name", ["numpy", *ISAS])
@pytest.mark.parametrize("kind", ["normal", "ties", "equal", "peaks", "holes"])
def test_what_is_left_is_what_the_samplers_draw_from(name: str, kind: str) -> None:
    """They draw the likeliest first, so this random number draws the least likely that is left."""
    sampler = sampler_named(name)
    vocab = 3000
    for seed, row in enumerate(CUTS):
        for more in (
            {},
            {"edits": make_edits(vocab, seed)},
            {"mask": make_mask(vocab, seed, 0.4)},
            {"mask": make_mask(vocab, seed, 0.01), "edits": make_edits(vocab, seed + 1)},
        ):
            asked = row._replace(**more)
            logits = make_logits(kind, vocab, seed)
            kept = logits.copy()
            first, last = (
                sampler.sample(logits[None], [asked._replace(uniform=one)]).token_ids[0]
                for one in (0.0, LAST)
            )
            left = processed(logits, asked, first)
            assert (logits == kept).all()
            order = sorted(np.flatnonzero(np.isfinite(left)), key=lambda one: (-left[one], one))
            assert order[0] == first
            assert order[-1] == last, (kind, row, list(more))


def test_what_was_drawn_is_left_however_a_border_is_rounded() -> None:
    logits = np.array([3.0, 2.0, 1.0, 1.0, 0.0], np.float32)
    left = processed(logits, RowParams(1.0, 2), 3)
    assert left.tolist() == [3.0, 2.0, 1.0, 1.0, -math.inf]
    left = processed(logits, RowParams(1.0, 2), 2)
    assert left.tolist() == [3.0, 2.0, 1.0, -math.inf, -math.inf]


def test_every_field_of_a_row_is_known_here() -> None:
    """Who adds one that changes what is drawn adds it to `processed`, and then to this list."""
    assert RowParams._fields == (
        *("temperature", "top_k", "top_p", "uniform", "num_logprobs", "min_p", "edits", "mask"),
        *("thinning", "adapting"),
        "infill",  # which `infill_sampler.filled` has made tokens of that are allowed
        "target",
    )


def test_a_row_that_cannot_be_told_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(logits: Any, row: RowParams, token_id: int) -> Any:
        if row.top_k == 7:
            raise FloatingPointError("the model's logits are not finite numbers")
        return processed(logits, row, token_id)

    monkeypatch.setattr(sampling, "processed", fails)
    one = engine("processed_logprobs")
    bad, good = replace(PARAMS, **MIXES["top_k"]), replace(PARAMS, **MIXES["all"])
    submit(one, "bad", PROMPT, bad)
    submit(one, "good", PROMPT, good)
    deltas = run(one)
    assert deltas["bad"][-1].finish_reason == "error"
    check("processed_logprobs", deltas["good"], good)


def test_nothing_is_processed_for_who_does_not_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("nobody asked")

    monkeypatch.setattr(sampling, "processed", fail)
    one = engine("processed_logprobs")
    submit(one, "a", PROMPT, replace(PARAMS, logprobs=None, temperature=1.0, top_p=0.5))
    assert run(one)["a"][-1].finish_reason == "length"


@pytest.mark.parametrize("mode", MODES)
def test_the_best_are_chosen_by_log_probabilities(mode: LogprobsMode) -> None:
    params = replace(PARAMS, temperature=1.5, top_p=0.9, seed=5, best_of=4, logprobs=0)
    one = engine(mode)
    if mode.endswith("logits"):
        with pytest.raises(RequestError, match=f"logprobs_mode {mode}") as caught:
            one.prepare("a", PROMPT, params, RequestOptions())
        assert caught.value.param == "best_of"
        return
    with LLM.from_engine(one) as llm:
        [several] = llm.generate(
            TokensPrompt(prompt_token_ids=PROMPT), replace(params, n=4, best_of=None)
        )
        [best] = llm.generate(TokensPrompt(prompt_token_ids=PROMPT), params)

    def mean(output: Any) -> float:
        values = [entry[token].logprob for token, entry in zip(*output, strict=True)]
        return sum(values) / len(values)

    each = [(tuple(one.token_ids), one.logprobs) for one in several.outputs]
    assert best.outputs[0].token_ids == max(each, key=mean)[0]


def test_other_modes_are_refused() -> None:
    with pytest.raises(CapacityError, match="logprobs_mode is 'raw'; it must be one of raw_logp"):
        EngineConfig(logprobs_mode="raw")  # type: ignore[arg-type]


def test_numpy_alone_tells_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sample", "logprobs"):
        monkeypatch.setattr(sampling, name, _without_threads(getattr(numpy_sampler, name)))
    for mix in ("all", "rules"):
        params = replace(PARAMS, **MIXES[mix])
        one = engine("processed_logprobs")
        submit(one, "a", PROMPT, params)
        check("processed_logprobs", run(one)["a"], params)


def _without_threads(function: Any) -> Any:
    def call(logits: Any, rows: Any, *more: Any) -> Any:
        counts = [one for one in more if isinstance(one, list)]
        return function(logits, rows, *counts)

    return call
