"""A draft head over models that tell what they make of tokens: each state reaches its place.

The head guesses right where it gets the token and the state of the one before, and nothing else
does; it fails where these do not belong together.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from onnxport.serving.request import Request
from onnxport.serving.speculation import head as head_module
from onnxport.serving.speculation import states as states_module
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.head import HeadDrafter
from onnxport.serving.speculation.states import (
    MOST_STEPS,
    MOST_WAITING,
    DecodeStates,
    HeadSequence,
)
from onnxport.serving.stats import SpeculationCounters
from tests.serving.heads import SEEN, VOCAB, HeadModel, TellingModel, head_drafter
from tests.serving.helpers import (
    check_completions,
    null_engine,
    run,
    submit,
    tokens,
)
from tests.serving.speculating import Dozing, Eager, request
from tests.serving.test_speculation_engine import MIXES
from tests.tiers import examples

CONFIG = SpeculationConfig("ngram", num_speculative_tokens=4)
LONG = SamplingParams(temperature=0.0, max_tokens=40)
SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=3, max_tokens=40)


def eager(drafter: HeadDrafter) -> Eager:
    return Eager(drafter, CONFIG, reader=drafter)


def telling_engine(
    drafter: HeadDrafter | None, *, dozes: int | None = None, **options: Any
) -> Engine:
    """An engine whose guesser has all states told, or those that the seed `dozes` says."""
    speculator = None if drafter is None else eager(drafter)
    if drafter is not None and dozes is not None:
        speculator = Dozing(drafter, CONFIG, reader=drafter, seed=dozes)
    chosen: dict[str, Any] = {"num_blocks": 256, "max_num_batched_tokens": 64} | options
    return null_engine(
        model_type=TellingModel,
        windows=(SEEN,),
        one_table=True,
        speculator=speculator,
        **chosen,
    )


def counters(engine: Engine) -> SpeculationCounters:
    found = engine.stats().speculation
    assert found is not None
    return found


def model_of(drafter: HeadDrafter) -> HeadModel:
    assert isinstance(drafter._model, HeadModel)
    return drafter._model


def plain(
    prompt: Sequence[int], params: SamplingParams, index: int = 0, state_slots: int = 0
) -> list[int]:
    """What the model says without anybody who guesses."""
    engine = telling_engine(None, state_slots=state_slots)
    submit(engine, "plain", prompt, params)
    return tokens(run(engine)["plain"], index)


@pytest.mark.parametrize("params", [LONG, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [7, 64])
def test_what_belongs_together_is_guessed_right(params: SamplingParams, budget: int) -> None:
    drafter = head_drafter(budget=budget)
    engine = telling_engine(drafter, max_num_batched_tokens=max(budget, 32))
    prompts = {str(start): range(start, start + 9 + start) for start in range(4)}
    for name, prompt in prompts.items():
        submit(engine, name, prompt, params)
    deltas = run(engine)
    for name, prompt in prompts.items():
        assert tokens(deltas[name]) == plain(prompt, params)
    done = counters(engine)
    assert done.num_draft_tokens > 80
    assert done.num_accepted_tokens == done.num_draft_tokens
    # Each token but the first of a prompt and the last that was said came with the model's state.
    assert model_of(drafter).num_own > 0
    assert not drafter._sequences
    assert drafter._waiting.tokens == 0
    drafter.check()


@pytest.mark.parametrize("params", [LONG, SAMPLED], ids=["greedy", "sampled"])
def test_what_is_owed_comes_with_its_states_again(params: SamplingParams) -> None:
    """The model's tokens depend on its states, so the head is wrong, and it gets none twice."""
    drafter = head_drafter()
    engine = telling_engine(drafter, state_slots=16)
    prompts = {str(start): range(start, start + 9 + start) for start in range(4)}
    for name, prompt in prompts.items():
        submit(engine, name, prompt, params)
    deltas = run(engine)
    for name, prompt in prompts.items():
        assert tokens(deltas[name]) == plain(prompt, params, state_slots=16)
    done = counters(engine)
    assert done.num_draft_tokens > 80
    assert done.num_accepted_tokens < 8
    # Each token but the first of a prompt and the last that was said came with the model's state.
    given = sum(len(prompts[name]) + len(tokens(deltas[name])) - 2 for name in prompts)
    assert given - 4 * CONFIG.longest_draft <= model_of(drafter).num_given <= given
    drafter.check()


def test_tokens_without_a_logit_are_not_guessed() -> None:
    some = np.random.default_rng(0).permutation(VOCAB)[:300].astype(np.int32)
    drafter = head_drafter(some)
    assert not drafter.may_race
    engine = telling_engine(drafter)
    for name, params in (("greedy", LONG), ("sampled", SAMPLED)):
        submit(engine, name, range(20), params)
    deltas = run(engine)
    assert tokens(deltas["greedy"]) == plain(range(20), LONG)
    assert tokens(deltas["sampled"]) == plain(range(20), SAMPLED)
    done = counters(engine)
    said = set(tokens(deltas["greedy"]) + tokens(deltas["sampled"]))
    assert said - set(some.tolist())  # so that there was something to miss
    assert 0 < done.num_accepted_tokens < done.num_draft_tokens


def test_a_head_of_all_tokens_in_another_order_guesses_them_all() -> None:
    order = np.random.default_rng(1).permutation(VOCAB).astype(np.int32)
    for params in (LONG, SAMPLED):
        engine = telling_engine(head_drafter(order))
        submit(engine, "a", range(9), params)
        assert tokens(run(engine)["a"]) == plain(range(9), params)
        done = counters(engine)
        assert done.num_accepted_tokens == done.num_draft_tokens > 20


def test_a_prefix_that_was_cached_is_done_without() -> None:
    drafter = head_drafter()
    engine = telling_engine(drafter)
    submit(engine, "first", range(40), LONG)
    run(engine)
    given = model_of(drafter).num_given
    submit(engine, "second", [*range(40), 7], LONG)
    second = tokens(run(engine)["second"])
    assert second == plain([*range(40), 7], LONG)
    done = counters(engine)
    assert done.num_accepted_tokens == done.num_draft_tokens
    assert model_of(drafter).num_given - given < 45  # 39 of the first prompt's are not among them


def test_completions_of_a_prompt_all_know_it() -> None:
    drafter = head_drafter()
    engine = telling_engine(drafter)
    params = SamplingParams(temperature=1.0, seed=5, n=3, max_tokens=20)
    submit(engine, "a", range(30), params)
    deltas = run(engine)
    for index in range(3):
        assert tokens(deltas["a"], index) == plain(range(30), params, index)
    done = counters(engine)
    assert done.num_accepted_tokens == done.num_draft_tokens
    assert model_of(drafter).num_late >= 3 * 28


def test_a_cache_that_is_full_begins_anew() -> None:
    drafter = head_drafter(max_model_len=24)
    engine = telling_engine(drafter)
    params = SamplingParams(temperature=0.0, max_tokens=120)
    submit(engine, "a", range(10), params)
    assert tokens(run(engine)["a"]) == plain(range(10), params)
    done = counters(engine)
    assert done.num_accepted_tokens == done.num_draft_tokens > 80


def test_what_waits_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_module, "MOST_BYTES", 3 * 4 * 50)
    drafter = head_drafter()
    first, second = request([1] * 40), request([2] * 40)
    drafter.note_states(first, 0, np.ones((39, 3), np.float32))
    drafter.note_states(second, 0, np.ones((39, 3), np.float32))
    assert list(drafter._sequences) == [second]
    assert drafter._waiting.tokens == 39
    assert drafter.propose([first], [3]) == [()]  # it is not known any more


def test_a_request_whose_last_state_is_missing_is_not_guessed_for() -> None:
    drafter = head_drafter()
    one = request([1, 2, 3, 4])
    assert drafter.propose([one], [3]) == [()]
    drafter.note_states(one, 0, _states([1, 2]))
    assert drafter.propose([one], [3]) == [()]
    drafter.note_states(one, 2, _states([3], 2))
    assert len(drafter.propose([one], [3])[0]) == 3
    assert drafter.propose([one], [3]) == [()]  # nothing new was told


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_states_are_kept_in_order(data: st.DataObject) -> None:
    """Against all states by their tokens."""
    sequence = HeadSequence(1)
    told: dict[int, float] = {}
    end = 0
    for _ in range(data.draw(st.integers(1, 12))):
        size = data.draw(st.sampled_from([1, 2, 7, MOST_WAITING // 2, MOST_WAITING + 3]))
        first = max(0, end + data.draw(st.sampled_from([0, 0, 0, -1, -3, 2])))
        states = np.arange(first, first + size, dtype=np.float32)[:, None]
        sequence.add(first, states)
        states[:] = -1  # it is the caller's
        told.update((token, float(token)) for token in range(first, first + size))
        end = max(end, first + size)
        assert sequence.end == end
        assert sequence.total.tokens == sequence.num_waiting <= 2 * MOST_WAITING
        taken = data.draw(st.integers(0, sequence.num_waiting))
        wanted = sequence.first - 1 + sequence.num_computed
        read = np.empty((taken, 1), np.float32)
        if taken:
            sequence.read(read)
            sequence.note_computed(taken)
        assert read[:, 0].tolist() == [told[wanted + number] for number in range(taken)]
        assert sequence.end == end


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_states_of_steps_reach_their_requests(data: st.DataObject) -> None:
    """Decodes, drafts and ends in any order: against each token's state by itself."""
    drafter = head_drafter(num_blocks=256)
    running = [request([1, 2, 3 + number]) for number in range(4)]
    ends = dict.fromkeys(running, 0)  # tokens whose states are told
    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["decode", "decode", "more", "end", "read"]))
        some = tuple(data.draw(st.permutations(running)))[: data.draw(st.integers(1, 4))]
        if what == "decode" and some:
            for _ in range(data.draw(st.sampled_from([1, 3, MOST_STEPS + 2]))):
                firsts = [ends[one] for one in some]
                states = np.array([_state(*pair) for pair in zip(some, firsts, strict=True)])
                drafter.note_decodes(some, firsts, states)
                states[:] = -1  # the next step may overwrite it
                for one in some:
                    ends[one] += 1
        for one in some:
            if what == "more":
                new = range(ends[one], ends[one] + 3)
                drafter.note_states(one, new[0], np.array([_state(one, token) for token in new]))
                ends[one] += 3
            elif what == "end":
                drafter.forget(one)
                running.remove(one)
            elif what == "read" and ends[one]:
                drafter.num_behind(one)
                sequence = drafter._sequences[one]
                wait = np.empty((sequence.num_waiting, 3), np.float32)
                sequence.read(wait)
                first = ends[one] - len(wait)
                assert wait.tolist() == [
                    _state(one, first + at).tolist() for at in range(len(wait))
                ]
                assert first == 0 or len(wait) >= MOST_WAITING
    for one in running:
        drafter.forget(one)
    assert not drafter._sequences
    assert drafter._waiting.tokens == 0


def _state(one: Request, token: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.array([one.tokens[2], token, 1], np.float32)


def test_few_states_of_steps_are_kept_where_they_are_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(states_module, "MOST_STEPS_BYTES", 2 * 3 * 4)
    steps, one = DecodeStates(), request([1, 2, 3])
    requests = (one,)
    steps.begin(requests, [7], 3)
    assert steps.add(requests, [7], _states([1], 7))
    assert not steps.add(requests, [9], _states([1], 9))  # one was left out
    assert not steps.add((one,), [8], _states([1], 8))  # another tuple: who knows
    assert steps.add(requests, [8], _states([2], 8))
    assert not steps.add(requests, [9], _states([3], 9))  # there is no room
    [(found, first, states)] = steps.take()
    assert found is one
    assert first == 7
    np.testing.assert_array_equal(states, _states([1, 2], 7))
    assert not list(steps.take())
    steps.begin(requests * 3, [9, 9, 9], 3)
    assert steps.add(steps._requests, [9, 9, 9], _states([1, 2, 3]))  # one step, whatever it takes


@settings(max_examples=examples(60), deadline=None)
@given(
    mixes=st.lists(st.sampled_from(MIXES), min_size=4, max_size=4),
    some=st.booleans(),
    num_blocks=st.integers(16, 40),
    draft_blocks=st.integers(8, 60),
    budget=st.integers(8, 40),
    caching=st.booleans(),
    host_memory=st.booleans(),
    fail_at=st.integers(0, 40),
    lost_at=st.integers(5, 60),
    draft_fails_at=st.integers(0, 30),
    dozes=st.none() | st.integers(0, 1000),
    state_slots=st.sampled_from([0, 0, 9, 16]),
)
def test_whatever_happens_the_tokens_are_the_same(
    mixes: list[dict[str, Any]],
    some: bool,
    num_blocks: int,
    draft_blocks: int,
    budget: int,
    caching: bool,
    host_memory: bool,
    fail_at: int,
    lost_at: int,
    draft_fails_at: int,
    dozes: int | None,
    state_slots: int,
) -> None:
    shared = [7, 8, 9, 7, 8, 9, 7, 8]
    prompts = {"a": shared, "b": [*shared, 1, 2], "c": [5], "d": [*range(30, 44)]}
    params = {
        name: SamplingParams(max_tokens=16, **mix) for name, mix in zip(prompts, mixes, strict=True)
    }
    drafter = head_drafter(
        np.arange(0, VOCAB, 2, dtype=np.int32) if some else None,
        num_blocks=draft_blocks,
        fails=lambda number: number == draft_fails_at,
    )
    spare = NullOptions(
        windows=(SEEN,),
        one_table=True,
        num_blocks=num_blocks,
        block_size=8,
        state_slots=state_slots,
    )
    engine = telling_engine(
        drafter,
        dozes=dozes,
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        kv_host_memory=1 << 16 if host_memory and caching and not state_slots else 0,
        state_slots=state_slots,
        fails=lambda number: number == fail_at,
        lost_at=lambda number: number == lost_at,
        fallbacks=[NullModel(spare)],  # which tells no states
    )
    for name, prompt in prompts.items():
        submit(engine, name, prompt, params[name])
    deltas = run(engine)
    check_completions(deltas, prompts, params, partial(plain, state_slots=state_slots))
    done = counters(engine)
    if not some and not state_slots and not any("logprobs" in mix for mix in mixes):
        assert done.num_accepted_tokens == done.num_draft_tokens
    assert not drafter._sequences
    assert drafter._waiting.tokens == 0
    drafter.check()
    engine.close()


def _states(ids: Sequence[int], first: int = 0) -> np.ndarray[Any, np.dtype[np.float32]]:
    rows = [(token, first + number, 1) for number, token in enumerate(ids)]
    return np.array(rows, np.float32)


def test_a_fork_behind_a_last_chunk_of_one_token_has_all_of_the_prompt() -> None:
    """Such a step is one of decodes alone, and the fork comes with it."""
    drafter = head_drafter()
    parent, child = request([1, 2, 3]), request([1, 2, 3])
    drafter.note_states(parent, 0, _states([1, 2]))
    parent.siblings = (child,)
    drafter.note_decodes((parent,), [2], _states([3], 2))
    parent.siblings = ()
    for one in (parent, child):
        one.tokens.append(4)
    requests = (parent, child)
    drafter.note_decodes(requests, [3, 3], _states([4, 4], 3))
    for one in requests:
        assert drafter.num_behind(one) == 3  # all but the first token, which has no state before
        assert drafter._sequences[one].first == 1
    drafter.close()
    assert not drafter._sequences
    assert drafter._waiting.tokens == 0


def test_a_fork_has_the_states_that_wait() -> None:
    drafter = head_drafter()
    parent = request([1, 2, 3])
    child = Request("c", array("q", [1, 2, 3]), SAMPLED, max_total_tokens=99, seed=1)
    parent.siblings = (child,)
    drafter.note_states(parent, 0, _states([1, 2, 3]))
    parent.siblings = ()
    for one, token in ((parent, 4), (child, 5)):
        one.tokens.append(token)
    assert all(drafter.propose([parent, child], [2, 2]))
    assert drafter._waiting.tokens == 0


@pytest.mark.parametrize("seed", range(examples(20)))
def test_states_that_are_not_told_are_done_without(seed: int) -> None:
    """The head fails where it gets a token with a state that is not of the one before."""
    dice = np.random.default_rng(seed)
    drafter = head_drafter(budget=int(dice.integers(5, 64)))
    batched = int(dice.integers(8, 64))
    engine = telling_engine(drafter, dozes=seed, max_num_batched_tokens=batched)
    prompts = [range(start, start + int(dice.integers(1, 60))) for start in range(0, 400, 100)]
    for number, prompt in enumerate(prompts):
        submit(engine, str(number), prompt, (LONG, SAMPLED)[number % 2])
    deltas = run(engine)
    for number, prompt in enumerate(prompts):
        assert tokens(deltas[str(number)]) == plain(prompt, (LONG, SAMPLED)[number % 2])
    model = engine._runtime.model
    assert isinstance(model, TellingModel)
    assert 0 < model.num_untold < engine.stats().num_steps
    done = counters(engine)
    assert done.num_accepted_tokens == done.num_draft_tokens > 0
