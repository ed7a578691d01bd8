"""Mirostat and a temperature that moves in an engine: batches, forks, preemption, guesses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.errors import RequestError
from onnxport.serving import sampling
from onnxport.serving.engine import Engine
from onnxport.serving.intake import SEED_STEP
from onnxport.serving.params import SamplingParams
from onnxport.serving.request import Request
from onnxport.serving.sampled import Sampled
from onnxport.serving.sampler import uniform
from onnxport.serving.structured.spec import StructuredOutputs
from tests.serving.helpers import alone, null_engine, reasons, run, submit, tokens
from tests.serving.prophet import Prophet
from tests.serving.slow_sampling import SLACK, changed, mirostat, possible, temperature_of
from tests.serving.structured import tokenizer
from tests.serving.test_sampling_engine import PREFIX, TOKENIZER, VOCAB, encode, null_logits
from tests.tiers import examples

NUDGE = 1e-4  # bits; what the reference and the engine make of mu may drift apart by rounding
ENDS = TOKENIZER.eos_token_ids
more = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.5, 1.3]),
        "seed": st.integers(0, 9),
        "n": st.sampled_from([1, 1, 3]),
        "max_tokens": st.integers(6, 16),
        "ignore_eos": st.just(True),
    },
    optional={
        "mirostat": st.sampled_from([1, 2]),
        "mirostat_tau": st.sampled_from([0.5, 3.0, 6.0]),
        "mirostat_eta": st.sampled_from([0.1, 1.0]),
        "dynatemp_range": st.sampled_from([0.3, 2.0]),
        "top_k": st.sampled_from([3, 100]),
        "frequency_penalty": st.sampled_from([-1.0, 2.0]),
        "repetition_penalty": st.sampled_from([0.6, 1.5]),
        "repeat_last_n": st.sampled_from([-1, 5]),
        "allowed_token_ids": st.lists(st.integers(0, VOCAB - 1), min_size=8, max_size=30),
    },
)


def check(prompt: list[int], output: list[int], params: SamplingParams, index: int) -> None:
    """Check every token of one completion, with a mu that follows the same tokens."""
    assert params.seed is not None
    logits = null_logits([*prompt, *output])
    mu = 2 * params.mirostat_tau
    for place, token_id in enumerate(output):
        own = logits[len(prompt) + place - 1]
        values = changed(own, params, prompt, output[:place], ENDS, encode)
        number = uniform(params.seed + index * SEED_STEP, len(prompt) + place)
        if not params.mirostat:
            temperature = temperature_of(values, params)
            found = set()
            for sign in (-1, 0, 1):
                at = SamplingParams(temperature * (1 + 1e-5 * sign), top_k=params.top_k)
                found |= possible(values, at, number)
            assert token_id in found, (place, params)
            continue
        surprises = []
        for sign in (-1, 0, 1):
            end = 0.0
            for each, chance in mirostat(values, params, mu + sign * NUDGE, VOCAB).items():
                start, end = end, end + chance
                if each == token_id and start - SLACK <= number < end + SLACK:
                    surprises.append(-math.log2(chance))
        assert surprises, (place, params)
        if max(surprises) - min(surprises) > 0.01:
            return  # the two go on with another mu
        mu -= params.mirostat_eta * (surprises[len(surprises) // 2] - params.mirostat_tau)


@settings(max_examples=examples(24), deadline=None)
@given(
    several=st.lists(
        st.tuples(st.integers(1, 13), st.integers(0, 60), more), min_size=1, max_size=4
    ),
    tier=st.sampled_from([{}, {"preemption": "swap", "kv_host_memory": 1 << 20}]),
    budget=st.sampled_from([5, 40]),
)
def test_every_token_is_one_that_the_reference_may_draw(
    several: list[tuple[int, int, dict[str, Any]]], tier: dict[str, Any], budget: int
) -> None:
    """Shared prefixes, chunks, forks and preemptions in a pool that is too small for all."""
    engine = null_engine(
        num_blocks=14,
        max_num_seqs=5,
        max_num_batched_tokens=budget,
        vocab_size=VOCAB,
        tokenizer=TOKENIZER,
        **tier,
    )
    accepted = {}
    for number, (length, last, mix) in enumerate(several):
        prompt, params = [*PREFIX[:length], last], SamplingParams(**mix)
        submit(engine, str(number), prompt, params)
        accepted[str(number)] = (prompt, params)
    deltas = run(engine)
    for name, (prompt, params) in accepted.items():
        for index in range(params.n):
            check(prompt, tokens(deltas[name], index), params, index)
        assert {*reasons(deltas[name])} == {"length"}
    engine.close()


def test_the_surprise_of_tokens_comes_near_the_target() -> None:
    """By the model's own probabilities, of what was left of it."""
    for version, tau in ((1, 4.0), (2, 2.0), (2, 6.0)):
        params = SamplingParams(
            mirostat=version, mirostat_tau=tau, max_tokens=400, seed=1, ignore_eos=True
        )
        engine = null_engine(num_blocks=200, max_model_len=800)
        submit(engine, "a", [5, 6], params)
        [request] = list(engine._sequences)
        heard: list[float] = []
        state = request.feedback
        assert state is not None
        before = state.mu
        while engine.has_work:
            engine.step()
            heard.append(tau - (state.mu - before) / params.mirostat_eta)
            before = state.mu
        found = np.mean(heard[100:])
        assert abs(float(found) - tau) < 0.5, (version, tau, found)


def prophesied(speculator: Prophet | None, **names: SamplingParams) -> tuple[Any, Engine]:
    engine = null_engine(num_blocks=100, speculator=speculator)
    for number, (name, params) in enumerate(names.items()):
        submit(engine, name, [7, 8, number], params)
    return run(engine), engine


def test_nobody_guesses_ahead_of_mirostat() -> None:
    """What a guess would change of what is drawn behind it is not known; others have guesses."""
    params = {
        "mirostat": SamplingParams(mirostat=2, max_tokens=20, seed=3, n=2),
        "moving": SamplingParams(dynatemp_range=0.5, max_tokens=20, seed=4),
        "plain": SamplingParams(temperature=0.0, max_tokens=20),
    }
    future = {name: alone([7, 8, number], one) for number, (name, one) in enumerate(params.items())}
    asked: set[str] = set()

    def tell(request: Request) -> list[int]:
        asked.add(request.request_id)
        return future[request.request_id]

    speculator = Prophet(tell)
    deltas, _ = prophesied(speculator, **params)
    assert asked == {"moving", "plain"}
    assert speculator.num_accepted > 20
    for number, (name, one) in enumerate(params.items()):
        for index in range(one.n):
            assert tokens(deltas[name], index) == alone([7, 8, number], one, index)


def test_a_step_that_fails_leaves_no_trace_in_mu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where the model fails, nor where sampling does, whose rows are tried one by one."""
    params = SamplingParams(mirostat=2, mirostat_eta=1.0, max_tokens=20, seed=3)
    wanted = {name: alone(prompt, params) for name, prompt in {"a": [1, 2], "b": [3]}.items()}
    engine = null_engine(fails=lambda number: number == 3)
    submit(engine, "a", [1, 2], params)
    submit(engine, "b", [3], params)
    deltas = run(engine)
    assert {name: tokens(each) for name, each in deltas.items()} == wanted
    real, calls = sampling.sample, 0

    def sample(logits: Any, rows: Any, *args: Any) -> Sampled:
        nonlocal calls
        calls += 1
        if len(rows) > 1 and calls % 3 == 0:
            raise RuntimeError("no luck")
        return real(logits, rows, *args)

    monkeypatch.setattr(sampling, "sample", sample)
    engine = null_engine()
    submit(engine, "a", [1, 2], params)
    submit(engine, "b", [3], params)
    deltas = run(engine)
    assert {name: tokens(each) for name, each in deltas.items()} == wanted
    assert calls > 25


def test_a_form_is_obeyed_and_what_it_forbids_does_not_count() -> None:
    form = StructuredOutputs(regex="[a-d]{40}")
    found = []
    for rows in (1, 3):
        engine = null_engine(tokenizer=tokenizer(), vocab_size=tokenizer().vocab_size)
        for number in range(rows):
            params = SamplingParams(
                mirostat=1 + number % 2,
                mirostat_tau=1.5,
                max_tokens=64,
                seed=number,
                structured_outputs=form,
            )
            submit(engine, str(number), [5, 6], params)
        deltas = run(engine)
        texts = ["".join(delta.text for delta in deltas[str(number)]) for number in range(rows)]
        assert all(len(text) == 40 and {*text} <= {*"abcd"} for text in texts)
        found.append(texts[0])
        engine.close()
    assert found[0] == found[1]


def test_a_window_of_penalties_that_is_too_large_is_refused() -> None:
    with pytest.raises(RequestError, match="repeat_last_n"):
        SamplingParams(repeat_last_n=1 << 21)
