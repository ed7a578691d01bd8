"""Earlier answers in the engine: what they bring, and that they change no token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.forced import ForcedDrafter
from onnxport.serving.speculation.speculator import Speculator
from onnxport.serving.speculation.suffix import SuffixDrafter
from onnxport.serving.stats import SpeculationCounters
from tests.serving.adapting import adapter_engine, alone_with
from tests.serving.helpers import (
    alone,
    check_completions,
    checked_step,
    null_engine,
    reasons,
    run,
    submit,
    tokens,
)
from tests.serving.speculating import Eager
from tests.tiers import examples

CONFIG = SpeculationConfig("suffix")
PROMPT = list(range(1, 12))
LONG = SamplingParams(temperature=0.0, max_tokens=60)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=60)


def drafter(most_answers: int = 100, most_tokens: int = 1 << 12) -> SuffixDrafter:
    return SuffixDrafter(24, 1.0, 0.1, most_answers=most_answers, most_tokens=most_tokens)


def eager(chosen: SuffixDrafter | None = None) -> Eager:
    return Eager(ForcedDrafter(chosen or drafter()), CONFIG)


def counters(engine: Engine) -> SpeculationCounters:
    found = engine.stats().speculation
    assert found is not None
    return found


def answered(
    engine: Engine, prompt: Sequence[int], params: SamplingParams, **options: Any
) -> tuple[list[int], int, int, int]:
    """The answer to a request; the steps that it took, and what was guessed and right for it."""
    steps, before = engine.stats().num_steps, counters(engine)
    submit(engine, "r", prompt, params, **options)
    found = tokens(run(engine)["r"])
    after = counters(engine)
    return (
        found,
        engine.stats().num_steps - steps,
        after.num_draft_tokens - before.num_draft_tokens,
        after.num_accepted_tokens - before.num_accepted_tokens,
    )


@pytest.mark.parametrize("params", [LONG, SAMPLED], ids=["greedy", "seeded"])
def test_the_same_request_again_is_guessed(params: SamplingParams) -> None:
    engine = null_engine(speculator=eager())
    first, steps, _, _ = answered(engine, PROMPT, params)
    assert first == alone(PROMPT, params)
    assert steps > 50
    again, steps, guessed, right = answered(engine, PROMPT, params)
    assert again == first
    assert guessed == right > 45
    assert steps < 10


def test_the_policy_guesses_it_too() -> None:
    """In steps that take some time, of which guesses take next to none."""
    ticks = count()
    speculator = Speculator(
        ForcedDrafter(drafter()),
        CONFIG,
        clock=lambda: engine.stats().num_steps * 2e-3 + next(ticks) * 1e-7,
    )
    engine = null_engine(speculator=speculator, max_num_batched_tokens=64)
    for _ in range(3):
        assert answered(engine, PROMPT, LONG)[0] == alone(PROMPT, LONG)
    again, steps, guessed, right = answered(engine, PROMPT, LONG)
    assert again == alone(PROMPT, LONG)
    assert right == guessed > 20
    assert steps < 40


@pytest.mark.parametrize("is_whole", [True, False])
def test_of_a_beam_search_one_answer_is_kept(is_whole: bool) -> None:
    chosen = drafter()
    engine = null_engine(speculator=eager(chosen))
    submit(engine, "a", PROMPT, replace(LONG, max_tokens=20, n=8, use_beam_search=True))
    for _ in range(20 if is_whole else 15):
        checked_step(engine)
    assert engine.has_work != is_whole
    engine.abort("a")
    answers = chosen.answers
    assert answers is not None
    assert (len(answers), answers.num_tokens) == (1, len(PROMPT) + (20 if is_whole else 15))


def test_an_end_is_guessed_as_any_token() -> None:
    whole = alone(PROMPT, LONG)
    stopped = replace(LONG, stop_token_ids=(whole[30],))
    engine = null_engine(speculator=eager())
    first, *_ = answered(engine, PROMPT, stopped)
    assert first == whole[: whole.index(whole[30]) + 1]
    again, _, guessed, right = answered(engine, PROMPT, stopped)
    assert again == first
    assert guessed == right


def test_a_longer_answer_goes_on_where_the_first_was_cut() -> None:
    engine = null_engine(speculator=eager())
    answered(engine, PROMPT, replace(LONG, max_tokens=20))
    longer, *_ = answered(engine, PROMPT, LONG)
    assert longer == alone(PROMPT, LONG)
    assert answered(engine, PROMPT, LONG)[1] < 10


@pytest.mark.parametrize(
    "other", [{"tenant": "b"}, {"cache_salt": "b"}, {"cache_salt": "b", "tenant": "a"}]
)
def test_what_others_were_answered_is_not_guessed(other: dict[str, Any]) -> None:
    """The steps of a request are those of one that nobody has asked before."""
    fresh = null_engine(speculator=eager())
    expected = answered(fresh, PROMPT, LONG, **other)
    engine = null_engine(speculator=eager(), enable_prefix_caching=False)
    answered(engine, PROMPT, LONG, tenant="a")
    found = answered(engine, PROMPT, LONG, **other)
    # How many guesses are tried in vain depends on the time that steps took.
    assert (*found[:2], found[3]) == (*expected[:2], expected[3])
    assert answered(engine, PROMPT, LONG, tenant="a")[1] < 10


def test_an_adapter_has_its_own_answers() -> None:
    engine = adapter_engine(adapters=(0, 1), speculator=eager())
    first, *_ = answered(engine, PROMPT, LONG, adapter="0")
    assert first == alone_with(0, PROMPT, LONG)
    _, steps, _, _ = answered(engine, PROMPT, LONG, adapter="1")
    assert steps > 50
    _, steps, _, _ = answered(engine, PROMPT, LONG)
    assert steps > 50
    assert answered(engine, PROMPT, LONG, adapter="0")[1] < 10


def test_whoever_skips_the_cache_skips_answers() -> None:
    engine = null_engine(speculator=eager())
    fresh = replace(LONG, skip_reading_prefix_cache=True)
    first = answered(engine, PROMPT, fresh)
    assert answered(engine, PROMPT, fresh) == first
    assert answered(engine, PROMPT, LONG)[1] < 10


def test_all_completions_are_kept() -> None:
    several = replace(SAMPLED, n=3)
    engine = null_engine(speculator=eager())
    submit(engine, "a", PROMPT, several)
    run(engine)
    before = engine.stats().num_steps
    submit(engine, "a", PROMPT, several)
    found = run(engine)["a"]
    for index in range(3):
        assert tokens(found, index) == alone(PROMPT, several, index)
    assert engine.stats().num_steps - before < 25


def test_of_what_was_aborted_the_part_that_came_is_kept() -> None:
    engine = null_engine(speculator=eager())
    submit(engine, "a", PROMPT, LONG)
    for _ in range(30):
        checked_step(engine)
    engine.abort("a")
    _, steps, guessed, right = answered(engine, PROMPT, LONG)
    assert guessed >= right > 20
    assert steps < 45


def test_answers_outlive_the_device() -> None:
    spare = NullModel(NullOptions(block_size=8))
    engine = null_engine(speculator=eager(), lost_at=lambda number: number == 70, fallbacks=[spare])
    first, *_ = answered(engine, PROMPT, LONG)
    other = [*PROMPT, 5]
    found, *_ = answered(engine, other, LONG)
    assert spare.num_runs
    assert found == alone(other, LONG)
    again, steps, _, _ = answered(engine, PROMPT, LONG)
    assert again == first
    assert steps < 10


def test_a_drafter_that_fails_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(SuffixDrafter):
        def propose(self, *_: Any) -> Any:
            raise ValueError("broken")

    failing = Failing(24, 1.0, 0.1, most_answers=10, most_tokens=1024)
    engine = null_engine(speculator=eager(failing))
    submit(engine, "a", PROMPT, LONG)
    found = run(engine)["a"]
    assert tokens(found) == alone(PROMPT, LONG)
    assert reasons(found) == ["length"]
    assert "speculation is off" in caplog.text


MIXES: Sequence[dict[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.7, "repetition_penalty": 1.4},
    {"temperature": 0.7, "seed": 5, "top_k": 7, "frequency_penalty": 2.0, "presence_penalty": 1.0},
    {"temperature": 1.0, "seed": 8, "logprobs": 2, "min_p": 0.01, "n": 2},
    {"temperature": 0.0, "logit_bias": {5: 4.0, 6: 4.0}, "min_tokens": 5, "stop_token_ids": (5,)},
)


@settings(max_examples=examples(60), deadline=None)
@given(
    mixes=st.lists(st.sampled_from(MIXES), min_size=4, max_size=4),
    spoiled=st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 15)), max_size=6),
    num_blocks=st.integers(16, 40),
    budget=st.integers(8, 40),
    caching=st.booleans(),
    most_answers=st.integers(1, 6),
    fail_at=st.integers(0, 40),
    lost_at=st.integers(5, 90),
    order=st.permutations("abcd"),
)
def test_whatever_was_answered_before_the_tokens_are_the_same(
    mixes: list[dict[str, Any]],
    spoiled: list[tuple[str, int]],
    num_blocks: int,
    budget: int,
    caching: bool,
    most_answers: int,
    fail_at: int,
    lost_at: int,
    order: list[str],
) -> None:
    """Right answers, wrong ones, those to the same requests in another order, and none."""
    shared = [7, 8, 9, 7, 8, 9, 7, 8]
    prompts = {"a": shared, "b": [*shared, 1, 2], "c": [5], "d": [*range(30, 44)]}
    params = {
        name: SamplingParams(max_tokens=16, **mix) for name, mix in zip(prompts, mixes, strict=True)
    }
    chosen = drafter(most_answers, 1024)
    engine = null_engine(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        fails=lambda number: number == fail_at,
        lost_at=lambda number: number == lost_at,
        fallbacks=[NullModel(NullOptions(num_blocks=num_blocks, block_size=8))],
        speculator=eager(chosen),
    )
    assert chosen.answers is not None
    for name, place in spoiled:
        answer = alone(prompts[name], params[name])
        answer[place % len(answer)] ^= 1
        one = engine.prepare("spoiled", prompts[name], params[name])
        one.tokens.extend(answer)
        one.finish_reason = "stop"
        chosen.forget(one)
    for names in (list(prompts), order):
        for name in names:
            submit(engine, name, prompts[name], params[name])
        check_completions(run(engine), prompts, params, alone)
    assert not chosen._texts
    assert len(chosen.answers) <= most_answers
    engine.close()
    assert len(chosen.answers) == 0
