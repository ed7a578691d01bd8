"""Drafts: checked several tokens at a time, they change how soon tokens come and nothing else."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving import draft
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from onnxport.serving.request import Request
from tests.serving.bench import Bench, names, rows, saying
from tests.serving.helpers import (
    alone,
    check_completions,
    null_engine,
    null_model,
    reasons,
    run,
    submit,
    tokens,
)
from tests.serving.prophet import Prophet
from tests.tiers import examples

PROMPTS: dict[str, list[int]] = {
    "a": [1, 2, 3, 4, 5, 6, 7],
    "b": [1, 2, 3, 4, 9],
    "c": [5],
    "d": list(range(30, 53)),
}
MIXES: Sequence[dict[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.7, "repetition_penalty": 1.4},
    {"temperature": 0.0, "frequency_penalty": 2.0, "presence_penalty": 1.0},
    {"temperature": 0.0, "allowed_token_ids": range(9, 400, 11), "frequency_penalty": 2.0},
    {"temperature": 1.0, "seed": 8, "logprobs": 2, "min_p": 0.01, "n": 2},
)


def guessing_engine(params: dict[str, SamplingParams], **options: Any) -> tuple[Engine, Prophet]:
    has_states = options.get("state_slots", 0) > 0

    def future(one: Request) -> list[int]:
        name = one.request_id
        return alone(PROMPTS[name], params[name], one.index, has_states=has_states)

    prophet = Prophet(future)
    return null_engine(speculator=prophet, **options), prophet


# The scheduler.


def bench_with_drafts(num_blocks: int = 8, budget: int = 16) -> Bench:
    bench = Bench(num_blocks, budget=budget)
    bench.submit("a", 3, cached=True)
    bench.step()
    return bench


def test_a_draft_takes_blocks_and_gives_back_what_was_wrong() -> None:
    bench = bench_with_drafts()
    request = bench.requests["a"]
    plan = bench.scheduler.plan(guess=saying({request: [7, 7, 7, 8, 9, 9]}))
    assert rows(plan) == [("a", 3, 7)]
    assert plan.num_logits == (7,)
    assert plan.sampled == (0,)
    assert plan.drafts == {0: (7, 7, 7, 8, 9, 9)}
    reservation = bench.scheduler.reserve(plan)
    assert bench.blocks("a") == [0, 1, 2]
    bench.scheduler.commit(plan, reservation, {0: (7, 7)})
    request.tokens.extend([7, 7, 5])
    bench.scheduler.check()
    assert bench.blocks("a") == [0, 1]
    assert request.num_computed_tokens == 6
    assert bench.pool.num_cached == 0  # the first block is used, and was full at 4 tokens
    assert request.keys is not None
    assert bench.pool.find(request.keys.key(0)) == 0


def test_blocks_that_a_draft_fills_are_known_by_its_tokens() -> None:
    bench = bench_with_drafts()
    request = bench.requests["a"]
    plan = bench.scheduler.plan(guess=saying({request: [7, 8, 9, 10, 11]}))
    bench.scheduler.commit(plan, bench.scheduler.reserve(plan), {0: (7, 8, 9, 10)})
    request.tokens.extend([7, 8, 9, 10, 12])
    bench.scheduler.check()
    bench.finish("a")
    bench.submit("b", [0, 1, 2, 7, 7, 8, 9, 10, 13], cached=True)
    assert rows(bench.step()) == [("b", 8, 1)]


def test_a_step_that_fails_forgets_its_draft() -> None:
    bench = bench_with_drafts()
    plan = bench.scheduler.plan(guess=saying({bench.requests["a"]: [7] * 6}))
    bench.scheduler.rollback(plan, bench.scheduler.reserve(plan))
    bench.scheduler.check()
    assert bench.blocks("a") == [0]
    assert rows(bench.step()) == [("a", 3, 1)]


def test_drafts_get_what_prompts_leave_of_the_budget() -> None:
    bench = bench_with_drafts(num_blocks=20, budget=8)
    bench.submit("b", 5)
    plan = bench.scheduler.plan(guess=saying({bench.requests["a"]: [7] * 6}))
    assert rows(plan) == [("a", 3, 3), ("b", 0, 5)]
    bench.submit("c", 30)
    plan = bench.scheduler.plan(guess=saying({bench.requests["a"]: [7] * 6}))
    assert rows(plan) == [("a", 3, 1), ("b", 0, 5), ("c", 0, 2)]
    assert not plan.drafts


@pytest.mark.parametrize(("num_blocks", "drafted"), [(1, 0), (2, 4), (3, 6)])
def test_drafts_get_what_others_leave_of_the_blocks(num_blocks: int, drafted: int) -> None:
    bench = Bench(num_blocks=2 + num_blocks, budget=8)
    bench.submit("a", 3)
    bench.submit("b", 7)  # two blocks, of which it takes one in the first step
    bench.step()
    plan = bench.scheduler.plan(guess=saying({bench.requests["a"]: [7] * 6}))
    # a has room for one more token in its block; b takes its second one with its last two tokens.
    assert [one[2] for one in rows(plan)] == [1 + min(drafted, 5), 2]
    assert plan.num_new_columns[0] == -(-(3 + 1 + min(drafted, 5)) // 4) - 1


def test_drafts_share_the_budget() -> None:
    bench = Bench(num_blocks=20, budget=8)
    bench.submit("a", 3)
    bench.submit("b", 3)
    bench.step()
    plan = bench.scheduler.plan(guess=saying(dict.fromkeys(bench.requests.values(), [7] * 5)))
    assert rows(plan) == [("a", 3, 6), ("b", 3, 2)]
    assert plan.drafts == {0: (7,) * 5, 1: (7,)}


def test_drafts_leave_blocks_to_a_prompt_that_needs_them_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft, "MOST_SCORED", 4)
    bench = Bench(num_blocks=5, budget=32)
    bench.submit("a", 3)
    bench.step()
    bench.submit("b", 11)
    bench.requests["b"].scores = []
    bench.requests["b"].params = SamplingParams(prompt_logprobs=0)
    plan = bench.step()
    assert rows(plan) == [("a", 3, 1), ("b", 0, 4)]
    # Both take their second block; the last one that is free is b's third.
    plan = bench.scheduler.plan(guess=saying({bench.requests["a"]: [7] * 6}))
    assert plan.num_new == (4, 4)
    assert plan.num_new_columns == (1, 1)


def test_a_draft_never_preempts() -> None:
    bench = Bench(num_blocks=2, budget=8)
    bench.submit("a", 3)
    bench.submit("b", 3)
    bench.step()
    plan = bench.scheduler.plan(guess=saying(dict.fromkeys(bench.requests.values(), [7] * 3)))
    assert rows(plan) == [("a", 3, 1), ("b", 3, 1)]
    assert not plan.preempted


def test_who_guesses_is_asked_when_it_is_known_what_is_left() -> None:
    asked: list[tuple[list[str], int]] = []

    def nothing(requests: Sequence[Request], budget: int) -> dict[Request, Sequence[int]]:
        asked.append((names(requests), budget))
        return {}

    bench = Bench(num_blocks=20, budget=8)
    for name in "ab":
        bench.submit(name, 3)
    bench.step()
    bench.step()
    plan = bench.scheduler.plan()
    assert bench.scheduler.plan(guess=nothing) is not None  # it follows from the last one
    bench.submit("c", 4)
    bench.scheduler.plan(guess=nothing)
    bench.scheduler.plan(guess=nothing, budget_tokens=7)
    assert asked == [(["a", "b"], 6), (["a", "b"], 2), (["a", "b"], 1)]
    bench.submit("d", 9)  # whose prompt takes all that is left
    plan = bench.scheduler.plan(guess=nothing)
    assert rows(plan)[-1] == ("d", 0, 2)
    bench.scheduler.plan([bench.requests["c"]], guess=nothing)
    assert len(asked) == 3
    bench = Bench(num_blocks=2, budget=8)
    for name in "ab":
        bench.submit(name, 3)
    while not bench.scheduler.plan().preempted:
        bench.step()
    bench.scheduler.plan(guess=nothing)
    assert asked[3:] == [(["a"], 7)]  # who yields is not guessed for


def test_a_step_that_follows_another_is_planned_anew_where_there_are_guesses() -> None:
    bench = bench_with_drafts()
    bench.step()
    assert bench.scheduler.plan(guess=saying({})).drafts == {}
    plan = bench.scheduler.plan(guess=saying({bench.requests["a"]: [7, 8]}))
    assert plan.drafts == {0: (7, 8)}
    assert plan.num_drafted == 2


def test_logits_of_guesses_keep_to_a_part_of_memory() -> None:
    assert draft.most_drafted(152_000) == 441
    assert draft.most_drafted(262_144) == 256
    assert draft.most_drafted(1 << 30) == 1


# The engine.


def test_nobody_is_asked_while_prompts_take_all_that_a_step_computes() -> None:
    params = dict.fromkeys("ad", SamplingParams(temperature=0.0, max_tokens=12))
    engine, prophet = guessing_engine(params, max_num_batched_tokens=8)
    submit(engine, "a", PROMPTS["a"], params["a"])
    for _ in range(2):
        engine.step()
    assert prophet.budgets == [7]
    submit(engine, "d", PROMPTS["d"], params["d"])  # of 23 tokens, of which three steps take 7
    for _ in range(3):
        engine.step()
    assert prophet.budgets == [7]
    engine.step()
    assert prophet.budgets == [7, 8 - 1 - 2]
    run(engine)
    assert not prophet.num_dropped


def test_who_guesses_is_told_what_was_not_planned() -> None:
    params = dict.fromkeys("ab", SamplingParams(temperature=0.0, max_tokens=12))
    engine, prophet = guessing_engine(params, num_blocks=6)
    for name in params:
        submit(engine, name, PROMPTS[name], params[name])
    run(engine)
    assert prophet.num_dropped > 0


def test_a_step_checks_so_many_guesses_that_their_logits_find_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(draft, "MOST_DRAFTED_BYTES", 3 * 512 * 4)
    params = dict.fromkeys("ab", SamplingParams(temperature=0.0, max_tokens=12))
    engine, prophet = guessing_engine(params)
    for name in params:
        submit(engine, name, PROMPTS[name], params[name])
    deltas = run(engine)
    check_completions(deltas, {name: PROMPTS[name] for name in params}, params, alone)
    assert set(prophet.budgets) == {3}
    assert max(num_tokens - num_rows for num_rows, num_tokens in prophet.steps) == 3


def test_guesses_are_no_tokens_of_prompts_for_those_who_move_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = {"a": SamplingParams(temperature=0.0, max_tokens=40)}
    engine, prophet = guessing_engine(params, kv_host_memory=1 << 20)
    prophet.length = 20
    noted: list[int] = []
    assert engine._runtime.offloader is not None
    monkeypatch.setattr(
        engine._runtime.offloader.costs,
        "note_step",
        lambda seconds, num_tokens, num_decodes: noted.append(num_tokens - num_decodes),
    )
    submit(engine, "a", PROMPTS["a"], params["a"])
    run(engine)
    assert prophet.num_accepted > 20
    assert noted == [len(PROMPTS["a"])] + [0] * (len(noted) - 1)


@pytest.mark.parametrize("state_slots", [0, 16])
def test_right_guesses_come_at_once(state_slots: int) -> None:
    params = {"a": SamplingParams(temperature=0.0, max_tokens=11)}
    engine, prophet = guessing_engine(params, state_slots=state_slots)
    submit(engine, "a", PROMPTS["a"], params["a"])
    deltas = run(engine)["a"]
    assert tokens(deltas) == alone(PROMPTS["a"], params["a"], has_states=state_slots > 0)
    assert [len(delta.token_ids) for delta in deltas] == [1, 5, 5]
    assert (prophet.num_drafted, prophet.num_accepted) == (8, 8)
    assert prophet.steps == [(1, 5), (1, 5)]
    assert prophet.forgotten == [("a", 0)]
    assert engine.stats().generation_tokens == 11
    engine.close()
    assert prophet.closed


def test_wrong_guesses_cost_nothing_but_time() -> None:
    params = {"a": SamplingParams(temperature=0.0, max_tokens=11)}
    engine, prophet = guessing_engine(params)
    prophet.errs = 1
    submit(engine, "a", PROMPTS["a"], params["a"])
    deltas = run(engine)["a"]
    assert tokens(deltas) == alone(PROMPTS["a"], params["a"])
    assert [len(delta.token_ids) for delta in deltas] == [1] * 11
    assert prophet.num_accepted == 0
    # The last token needs no guess, and the one before can use none after it.
    assert prophet.num_drafted == 4 * 6 + 3 + 2 + 1


def test_no_guess_goes_beyond_max_tokens() -> None:
    params = {"a": SamplingParams(temperature=0.0, max_tokens=3)}
    engine, prophet = guessing_engine(params, max_model_len=10)
    submit(engine, "a", PROMPTS["a"], params["a"])
    deltas = run(engine)["a"]
    assert [len(delta.token_ids) for delta in deltas] == [1, 2]
    assert prophet.num_drafted == 1


@settings(max_examples=examples(60), deadline=None)
@given(
    mixes=st.lists(st.sampled_from(MIXES), min_size=4, max_size=4),
    length=st.integers(1, 9),
    errs=st.sampled_from([0, 1, 2, 3]),
    num_blocks=st.integers(12, 40),
    block_size=st.sampled_from([1, 3, 4]),
    budget=st.integers(8, 40),
    caching=st.booleans(),
    fail_at=st.integers(0, 40),
    state_slots=st.sampled_from([0, 9, 16]),
    host_states=st.booleans(),
)
def test_every_request_gets_its_own_tokens(
    mixes: list[dict[str, Any]],
    length: int,
    errs: int,
    num_blocks: int,
    block_size: int,
    budget: int,
    caching: bool,
    fail_at: int,
    state_slots: int,
    host_states: bool,
) -> None:
    params = {
        name: SamplingParams(max_tokens=13, **mix) for name, mix in zip(PROMPTS, mixes, strict=True)
    }
    engine, prophet = guessing_engine(
        params,
        num_blocks=-(-4 * num_blocks // block_size),
        block_size=block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        fails=lambda number: number == fail_at,
        state_slots=state_slots,
        host_states=host_states,
    )
    prophet.length, prophet.errs = length, errs
    for name, prompt in PROMPTS.items():
        submit(engine, name, prompt, params[name])
    deltas = run(engine)
    own = partial(alone, has_states=state_slots > 0)
    check_completions(deltas, PROMPTS, params, own)
    if errs == 1:
        assert prophet.num_accepted == 0


@pytest.mark.parametrize("state_slots", [0, 16])
def test_logprobs_are_those_of_one_token_at_a_time(state_slots: int) -> None:
    params = {"b": SamplingParams(temperature=1.0, seed=5, logprobs=3, max_tokens=9)}
    plain = null_engine(state_slots=state_slots)
    submit(plain, "b", PROMPTS["b"], params["b"])
    expected = [one for delta in run(plain)["b"] for one in delta.logprobs or ()]
    engine, prophet = guessing_engine(params, state_slots=state_slots)
    prophet.errs = 3
    submit(engine, "b", PROMPTS["b"], params["b"])
    deltas = run(engine)["b"]
    assert [one for delta in deltas for one in delta.logprobs or ()] == expected
    assert prophet.num_accepted > 0
    assert all(len(delta.logprobs or ()) == len(delta.token_ids) for delta in deltas)


@pytest.mark.parametrize("state_slots", [0, 16])
def test_a_stop_token_within_a_draft_ends_the_sequence_there(state_slots: int) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    expected = alone(PROMPTS["a"], greedy, has_states=state_slots > 0)
    stop = expected[3]
    assert stop not in expected[:3]
    params = {"a": SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(stop,))}
    prophet = Prophet(lambda one: expected, length=8)
    engine = null_engine(speculator=prophet, state_slots=state_slots)
    submit(engine, "a", PROMPTS["a"], params["a"])
    deltas = run(engine)["a"]
    assert tokens(deltas) == expected[:4]
    assert reasons(deltas) == ["stop"]
    assert deltas[-1].stop_reason == stop
    assert engine.stats().generation_tokens == 4


class NotFinite:
    """Logits after a token that are not numbers."""

    def __init__(self, engine: Engine, after: int) -> None:
        self.model, self.after = null_model(engine), after
        self.run, self.model.run = self.model.run, self  # type: ignore[method-assign]

    def __call__(self, inputs: Any) -> NDArray[np.float32]:
        logits = self.run(inputs).copy()
        logits[inputs.input_ids[inputs.logits_indices] == self.after] = np.nan
        return logits


def test_logits_that_are_no_numbers_end_a_sequence_after_its_good_tokens() -> None:
    params = {"a": SamplingParams(temperature=0.0, max_tokens=12)}
    expected = alone(PROMPTS["a"], params["a"])
    engine, prophet = guessing_engine(params)
    NotFinite(engine, expected[3])
    submit(engine, "a", PROMPTS["a"], params["a"])
    deltas = run(engine)["a"]
    assert tokens(deltas) == expected[:4]
    assert reasons(deltas) == ["error"]
    assert "not finite" in (deltas[-1].error or "")
    void = Prophet(lambda one: [*expected[:4], 0, 0, 0])  # the first of NaNs is token 0
    engine = null_engine(speculator=void)
    NotFinite(engine, expected[3])
    submit(engine, "a", PROMPTS["a"], params["a"])
    assert tokens(run(engine)["a"]) == expected[:4]
    engine, prophet = guessing_engine(params)
    prophet.errs = 2
    NotFinite(engine, expected[3] + 1)  # which is only guessed
    submit(engine, "a", PROMPTS["a"], params["a"])
    assert tokens(run(engine)["a"]) == expected


def test_a_failed_step_is_tried_again_without_its_draft() -> None:
    params = {"a": SamplingParams(temperature=0.0, max_tokens=11)}
    engine, prophet = guessing_engine(params, fails=lambda number: number == 1)
    submit(engine, "a", PROMPTS["a"], params["a"])
    deltas = run(engine)["a"]
    assert tokens(deltas) == alone(PROMPTS["a"], params["a"])
    assert [len(delta.token_ids) for delta in deltas] == [1, 1, 5, 4]
    assert prophet.steps == [(1, 5), (1, 4)]  # the one of which nobody was asked is not compared


def test_it_is_told_where_wrong_guesses_leave_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    rounding, plain = (NullModel(NullOptions(rounds_anew=rounds)) for rounds in (True, False))
    Engine(plain, speculator=Prophet(lambda one: []))
    Engine(rounding)
    assert "anew" not in caplog.text
    Engine(rounding, speculator=Prophet(lambda one: []))
    assert caplog.text.count("rounds keys in its") == 1
    params = {"a": SamplingParams(temperature=0.0, max_tokens=20)}
    engine, _ = guessing_engine(params, lost_at=lambda number: number == 3, fallbacks=[rounding])
    submit(engine, "a", PROMPTS["a"], params["a"])
    assert tokens(run(engine)["a"]) == alone(PROMPTS["a"], params["a"])
    assert caplog.text.count("rounds keys in its") == 2


# Grammars.


class EveryThird:
    """A grammar: token number i of the output is i modulo 3, and there are `length` of them."""

    def __init__(self, num_prompt: int, length: int = 100, fails_at: int = 1000) -> None:
        self.num_prompt, self.length, self.fails_at = num_prompt, length, fails_at
        self.threads: set[int] = set()

    def masks(self, tokens: array[int], draft: Sequence[int] = ()) -> NDArray[np.uint32]:
        place = len(tokens) - self.num_prompt
        if place >= self.fails_at:
            raise ZeroDivisionError("grammar")
        assert self.num_possible(tokens, draft) == len(draft)
        bits = np.zeros((1 + len(draft), 512), np.uint8)
        for number, line in enumerate(bits):
            line[(place + number) % 3 :: 3] = 1
        return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)

    def num_possible(self, tokens: array[int], draft: Sequence[int]) -> int:
        place = len(tokens) - self.num_prompt
        for number, token_id in enumerate(draft):
            if token_id % 3 != (place + number) % 3 or place + number >= self.length:
                return number
        return len(draft)

    def forced(self, tokens: array[int], most: int) -> Sequence[int]:
        raise NotImplementedError

    def is_complete(self, tokens: array[int]) -> bool:
        return len(tokens) - self.num_prompt >= self.length


def submit_with_grammar(
    engine: Engine, name: str, params: SamplingParams, **options: Any
) -> list[Request]:
    request = engine.prepare(name, PROMPTS[name], params)
    group = [request, *request.siblings]
    for one in group:
        one.grammar = EveryThird(one.num_prompt_tokens, **options)
        one.plain = False
    engine.submit(request)
    return group


@settings(max_examples=examples(30), deadline=None)
@given(
    mix=st.sampled_from(MIXES[:4]),
    length=st.integers(0, 6),
    errs=st.sampled_from([0, 2, 3]),
    num_blocks=st.integers(6, 40),
    state_slots=st.sampled_from([0, 16]),
)
def test_grammars_hold_with_drafts_in_small_pools(
    mix: dict[str, Any], length: int, errs: int, num_blocks: int, state_slots: int
) -> None:
    params = SamplingParams(max_tokens=13, **mix)
    expected = {}
    for name in ("a", "b"):
        plain = null_engine(state_slots=state_slots)
        submit_with_grammar(plain, name, params)
        expected[name] = tokens(run(plain)[name])
        assert [one % 3 for one in expected[name]] == [place % 3 for place in range(13)]
    expected["c"] = alone([9, 9], has_states=state_slots > 0)
    prophet = Prophet(lambda one: expected[one.request_id], length)
    prophet.errs = errs
    engine = null_engine(speculator=prophet, num_blocks=num_blocks, state_slots=state_slots)
    for name in ("a", "b"):
        submit_with_grammar(engine, name, params)
    submit(engine, "c", [9, 9])
    deltas = run(engine)
    assert {name: tokens(deltas[name]) for name in expected} == expected


def test_a_grammar_that_is_complete_ends_its_sequence() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=13, n=2)
    engine = null_engine()
    submit_with_grammar(engine, "a", params, length=5)
    deltas = run(engine)["a"]
    assert len(tokens(deltas, 0)) == len(tokens(deltas, 1)) == 5
    assert reasons(deltas) == ["stop", "stop"]


def test_a_grammar_that_fails_ends_its_request_alone() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=13)
    engine = null_engine()
    submit_with_grammar(engine, "a", params, fails_at=3)
    submit(engine, "b", PROMPTS["b"], params)
    deltas = run(engine)
    assert reasons(deltas["a"]) == ["error"]
    assert "ZeroDivisionError: grammar" in (deltas["a"][-1].error or "")
    assert len(tokens(deltas["a"])) == 3
    assert tokens(deltas["b"]) == alone(PROMPTS["b"], params)


def test_a_grammar_that_leaves_nothing_is_named() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=13, allowed_token_ids=(3, 6, 9))
    engine = null_engine()
    submit_with_grammar(engine, "a", params)
    deltas = run(engine)["a"]
    assert len(tokens(deltas)) == 1
    assert "allowed_token_ids and the grammar forbid all" in (deltas[-1].error or "")
