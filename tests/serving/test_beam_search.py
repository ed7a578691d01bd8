"""Beam search in the engine: what the slow reference finds, whatever else happens."""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from onnxport.errors import CapacityError, DeviceMemoryError, RequestError
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.engine import Engine
from onnxport.serving.guesses import Guessing
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams
from onnxport.serving.request import Request
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.thoughts import Thought
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.beams import Logits, Text, beams, null_logits, search
from tests.serving.helpers import (
    GREEDY,
    Clock,
    alone,
    checked_step,
    null_engine,
    null_model,
    reasons,
    run,
    submit,
    tokens,
)
from tests.serving.prophet import Prophet
from tests.serving.tokenizers_for_tests import byte_level
from tests.serving.watch import Watch

PROMPT = list(range(100, 122))  # five blocks and a half
Found = list[tuple[tuple[int, ...], float]]


def found(deltas: Sequence[CompletionDelta]) -> Found:
    """The texts of a search, the best first."""
    ordered = sorted(deltas, key=lambda delta: delta.index)
    assert [delta.index for delta in ordered] == list(range(len(ordered)))
    return [
        (delta.token_ids, delta.cumulative_logprob)
        for delta in ordered
        if delta.cumulative_logprob is not None and not delta.is_missing
    ]


def yield_now(engine: Engine) -> None:
    """Let the last in rank yield."""
    engine._scheduler._preempt(engine._scheduler.running[-1])
    engine.check()


def expected(texts: Sequence[Text]) -> list[tuple[tuple[int, ...], Any]]:
    return [(text.tokens, pytest.approx(text.logprob, abs=1e-3)) for text in texts]


def searched(prompt: Sequence[int], params: SamplingParams, engine: Engine | None = None) -> Found:
    engine = engine or null_engine()
    submit(engine, "a", prompt, params)
    return found(run(engine)["a"])


# The rules.


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 0.7, 1.0, 3.0])
def test_it_finds_what_the_reference_finds(width: int, penalty: float) -> None:
    ends = tuple(range(0, 512, 11))
    params = beams(width, 9, stop_token_ids=ends, length_penalty=penalty)
    texts = search(null_logits, PROMPT, width, 9, ends=ends, length_penalty=penalty)
    assert searched(PROMPT, params) == expected(texts)


def test_one_beam_is_greedy() -> None:
    [(token_ids, _)] = searched(PROMPT, beams(1, 12))
    assert list(token_ids) == alone(PROMPT)


def test_end_tokens_of_the_model_end_texts_unless_they_are_ignored() -> None:
    ends = frozenset(range(0, 512, 7))
    engine = null_engine(eos_token_ids=ends)
    texts = search(null_logits, PROMPT, 3, 6, ends=tuple(ends))
    assert searched(PROMPT, beams(3, 6), engine) == expected(texts)
    submit(engine, "a", PROMPT, beams(3, 6))
    kinds = {(delta.finish_reason, delta.stop_reason) for delta in run(engine)["a"]}
    assert ("stop", None) in kinds  # as ever, the model's own end is not told
    submit(engine, "a", PROMPT, beams(3, 6, ignore_eos=True))
    deltas = run(engine)["a"]
    assert found(deltas) == expected(search(null_logits, PROMPT, 3, 6))
    assert reasons(deltas) == ["length"] * 3


def test_it_ends_early_with_what_it_would_have_found() -> None:
    ends = tuple(range(0, 512, 2))
    params = beams(3, 200, stop_token_ids=ends, length_penalty=0.0)
    engine = null_engine(num_blocks=512)
    assert searched(PROMPT[:5], params, engine) == expected(
        search(null_logits, PROMPT[:5], 3, 40, ends=ends, length_penalty=0.0)
    )
    assert engine.stats().num_steps < 20


def test_enough_tokens_are_looked_at_where_many_end_a_text() -> None:
    """Of the 6 likeliest all may end it, and three beams go on all the same."""
    logits = null_logits(tuple(PROMPT))
    likeliest = np.argsort(-logits, kind="stable").tolist()
    others = likeliest[7:9] + likeliest[30:31]
    ends = tuple(one for one in range(512) if one not in others)
    deltas_of = beams(3, 1, stop_token_ids=ends, length_penalty=-16.0)
    engine = null_engine()
    submit(engine, "a", PROMPT, deltas_of)
    submit(engine, "b", PROMPT, beams(3, 1, allowed_token_ids=others))
    submit(engine, "c", PROMPT, beams(3, 2, stop_token_ids=ends, length_penalty=16.0))
    run_deltas = run(engine)
    assert {tokens(run_deltas["c"], index)[0] for index in range(3)} <= set(others)
    assert {tokens(run_deltas["b"], index)[0] for index in range(3)} == set(others)
    best = sorted(likeliest[:6], key=lambda one: -logits[one])[:3]
    assert [delta.token_ids[0] for delta in run_deltas["a"]] == best


def test_there_may_be_fewer_texts_than_beams() -> None:
    engine = null_engine()
    watch = Watch(engine)
    submit(engine, "a", PROMPT, beams(4, 2, allowed_token_ids=(5,)))
    deltas = run(engine)["a"]
    assert [delta.token_ids for delta in deltas] == [(5, 5), (), (), ()]
    assert [delta.is_missing for delta in deltas] == [False, True, True, True]
    assert reasons(deltas) == ["length", "stop", "stop", "stop"]
    watch.check_all_ended()


def test_best_of_is_the_width() -> None:
    params = beams(2, 6, best_of=5)
    assert searched(PROMPT, params) == searched(PROMPT, beams(5, 6))
    assert params.num_sequences == 5


# What changes logits.


def test_temperature() -> None:
    texts = search(null_logits, PROMPT, 3, 6, temperature=2.5)
    params = SamplingParams(2.5, n=3, max_tokens=6, use_beam_search=True)
    assert searched(PROMPT, params) == expected(texts)
    assert searched(PROMPT, beams(3, 6)) != expected(texts)


@pytest.mark.parametrize("temperature", [1e-9, 1e-3, 100.0])
def test_no_temperature_is_too_low(temperature: float) -> None:
    params = SamplingParams(temperature, n=3, max_tokens=6, use_beam_search=True)
    [(best, _), *_] = searched(PROMPT, params)
    assert len(best) == 6
    if temperature < 1.0:
        assert list(best) == alone(PROMPT)[:6]


def test_bias_and_what_is_forbidden() -> None:
    biased = np.argsort(-null_logits(tuple(PROMPT)))[:3].tolist()

    def edit(logits: Logits, output: tuple[int, ...]) -> Logits:
        logits = logits.copy()
        logits[biased[0]] -= 50.0
        logits[40:50] += 2.0
        logits[:4] = -np.inf if len(output) < 3 else logits[:4]
        return logits

    texts = search(null_logits, PROMPT, 4, 6, edit=edit, ends=(0, 1, 2, 3))
    bias = {biased[0]: -50.0} | dict.fromkeys(range(40, 50), 2.0)
    params = beams(4, 6, logit_bias=bias, min_tokens=3, stop_token_ids=(0, 1, 2, 3))
    assert searched(PROMPT, params) == expected(texts)


def test_allowed_tokens() -> None:
    allowed = list(range(3, 512, 31))

    def edit(logits: Logits, output: tuple[int, ...]) -> Logits:
        kept = np.full(512, -np.inf)
        kept[allowed] = logits[allowed]
        return kept

    texts = search(null_logits, PROMPT, 4, 5, edit=edit)
    assert searched(PROMPT, beams(4, 5, allowed_token_ids=allowed)) == expected(texts)


@pytest.mark.parametrize("num_blocks", [64, 17])
def test_penalties_count_the_tokens_of_each_beam(num_blocks: int) -> None:
    allowed = list(range(3, 512, 60))  # few, so that they come again

    def edit(logits: Logits, output: tuple[int, ...]) -> Logits:
        kept = np.full(512, -np.inf)
        kept[allowed] = logits[allowed]
        for token_id in set(output):
            kept[token_id] -= 1.0 + 0.5 * output.count(token_id)
        return kept

    texts = search(null_logits, PROMPT, 4, 8, edit=edit)
    penalties = {"presence_penalty": 1.0, "frequency_penalty": 0.5}
    engine = null_engine(num_blocks=num_blocks)
    submit(engine, "x", [3, 1, 4], SamplingParams(temperature=0.0, max_tokens=20))
    params = beams(4, 8, allowed_token_ids=allowed, **penalties)
    assert searched(PROMPT, params, engine) == expected(texts)


# Text.


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer(byte_level(), frozenset({0}))


def text_engine(words: Tokenizer, **options: Any) -> Engine:
    return null_engine(
        tokenizer=words, vocab_size=words.vocab_size, num_blocks=options.pop("num_blocks", 128)
    )


def test_stop_strings_end_texts(words: Tokenizer) -> None:
    prompt, size = [20, 21, 22], words.vocab_size
    # Ends of two characters that beams have in common before one of them goes on with the second.
    first = searched_text(words, prompt)
    pairs = [text[at : at + 2] for text in first for at in range(len(text) - 1)]
    stops = tuple(pair for pair in pairs if pair.isascii())
    assert len(stops) > 2

    def is_whole(output: tuple[int, ...]) -> bool:
        text = words.decode(list(output))
        return any(stop in text for stop in stops)

    def logits_of(token_ids: tuple[int, ...]) -> Logits:
        return null_logits(token_ids, (None,), size)

    texts = search(logits_of, prompt, 4, 12, ends=(0,), is_whole=is_whole)
    assert any(is_whole(text.tokens) for text in texts)
    for num_blocks in (128, 16):
        engine = text_engine(words, num_blocks=num_blocks)
        submit(engine, "x", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=30))
        submit(engine, "a", prompt, beams(4, 12, stop=stops))
        for _ in range(6):  # beside others, it would yield at a time of its own
            engine.step()
        if num_blocks < 128:
            yield_now(engine)
        deltas = run(engine)["a"]
        assert found(deltas) == expected(texts)
        for delta in deltas:
            if is_whole(delta.token_ids):
                assert delta.finish_reason == "stop"
                assert delta.stop_reason in stops
                assert not any(stop in delta.text for stop in stops)
            else:
                assert delta.stop_reason is None
    submit(engine, "b", prompt, beams(4, 12, stop=stops, include_stop_str_in_output=True))
    for delta in run(engine)["b"]:
        assert is_whole(delta.token_ids) == any(stop in delta.text for stop in stops)


@pytest.mark.parametrize("steps", [5, 9, 12])
def test_stop_strings_after_beams_have_yielded(words: Tokenizer, steps: int) -> None:
    """Tokens that all beams have in common count for `min_tokens`, and for what is begun."""
    params = beams(2, 16, stop=tuple("aeionst"), min_tokens=6)
    found_of = []
    for yields in (False, True):
        engine = text_engine(words)
        submit(engine, "a", [20, 21, 22], params)
        for _ in range(steps):
            assert not engine.step(), "it is over already"
        if yields:
            yield_now(engine)
        found_of.append([(delta.text, delta.stop_reason) for delta in run(engine)["a"]])
    assert found_of[0] == found_of[1]
    assert any(reason is not None for _, reason in found_of[0])


def test_the_text_of_the_end_token(words: Tokenizer) -> None:
    ends = tuple(range(30, 80))
    engine = text_engine(words)
    submit(engine, "a", [20, 21], beams(3, 6, stop_token_ids=ends))
    submit(engine, "b", [20, 21], beams(3, 6, stop_token_ids=ends, include_stop_str_in_output=True))
    deltas = run(engine)
    ended = 0
    for without, included in zip(deltas["a"], deltas["b"], strict=True):
        assert without.token_ids == included.token_ids
        output = list(without.token_ids)
        assert included.text == words.decode(output)
        if output[-1] in ends:
            ended += 1
            assert without.stop_reason == output[-1]
            output.pop()
        assert without.text == words.decode(output)
    assert ended


def searched_text(words: Tokenizer, prompt: list[int]) -> list[str]:
    engine = text_engine(words)
    submit(engine, "a", prompt, beams(4, 12))
    return [delta.text for delta in run(engine)["a"]]


@pytest.mark.parametrize("num_blocks", [128, 22])
@pytest.mark.parametrize(
    "form",
    [
        {"regex": "[a-c]{2,4}(x|yz)"},
        {"choice": ["yes", "no", "perhaps"]},
        {"json": {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}},
    ],
)
def test_each_beam_has_its_place_in_the_grammar(
    words: Tokenizer, form: dict[str, Any], num_blocks: int
) -> None:
    engine = text_engine(words, num_blocks=num_blocks)
    compiler = engine.grammars
    assert compiler is not None
    outputs = StructuredOutputs.from_mapping(form)
    grammar = compiler.compile(outputs)
    prompt, size = [20, 21, 22], words.vocab_size

    def edit(logits: Logits, output: tuple[int, ...]) -> Logits:
        mask = grammar.sequence(0).masks(array("q", output))[0]
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[:size]
        return np.where(bits == 1, logits, -np.inf)

    def is_whole(output: tuple[int, ...]) -> bool:
        return grammar.sequence(0).is_complete(array("q", output))

    def logits_of(token_ids: tuple[int, ...]) -> Logits:
        return null_logits(token_ids, (None,), size)

    texts = search(logits_of, prompt, 3, 24, ends=(0,), edit=edit, is_whole=is_whole)
    submit(engine, "x", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=40))
    submit(engine, "a", prompt, beams(3, 24, structured_outputs=outputs))
    for _ in range(4):
        engine.step()
    if num_blocks < 128:
        yield_now(engine)
    deltas = run(engine)["a"]
    assert found(deltas) == expected(texts)
    assert len({delta.text for delta in deltas if not delta.is_missing}) > 1


def test_a_thought_is_closed_in_each_beam(words: Tokenizer) -> None:
    thought = Thought(("<t>",), ("</t>",), is_open=True)
    params = beams(3, 12, thinking_token_budget=2, thought=thought)
    for num_blocks in (128, 16):
        engine = text_engine(words, num_blocks=num_blocks)
        submit(engine, "x", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=30))
        submit(engine, "a", [20, 21, 22], params)
        deltas = run(engine)["a"]
        texts = [delta.text for delta in deltas]
        assert len(set(texts)) == 3
        assert all("</t>" in text for text in texts)


# Beside others.


def test_beams_share_the_cache_of_their_prompt() -> None:
    engine = null_engine(max_num_batched_tokens=64)
    watch = Watch(engine)
    submit(engine, "a", PROMPT, beams(4, 10))
    run(engine)
    assert watch.num_tokens == len(PROMPT) + 4 * 9
    submit(engine, "b", PROMPT, beams(4, 10))
    run(engine)
    assert watch.num_tokens == 2 * (len(PROMPT) + 4 * 9) - 20  # five blocks are cached


@pytest.mark.parametrize("windows", [(None,), (None, 5), (4,)])
@pytest.mark.parametrize("seed", range(16))
def test_in_the_smallest_pool_beside_others(seed: int, windows: tuple[int | None, ...]) -> None:
    """Chunked prompts, preemption, other beams, other requests: nothing changes what is found."""
    dice = random.Random(seed)
    width, length, max_tokens = dice.randint(1, 5), dice.randint(1, 22), dice.randint(1, 10)
    prompt, rows, block_size = PROMPT[:length], dice.randint(width, 8), dice.choice([1, 3, 4])
    params = beams(width, max_tokens)
    engine = None
    for num_blocks in range(1, 200):
        engine = null_engine(
            num_blocks=num_blocks * len(windows),
            block_size=block_size,
            windows=windows,
            max_num_seqs=rows,
            max_num_batched_tokens=rows + seed % 7,
            enable_prefix_caching=seed % 3 > 0,
        )
        try:
            request = engine.prepare("a", prompt, params)
            break
        except CapacityError:
            engine.close()
    assert engine is not None
    watch = Watch(engine)
    others: dict[str, tuple[list[int], SamplingParams]] = {}

    def submit_some() -> None:
        for _ in range(dice.randint(0, 3)):
            name, own = str(len(others)), PROMPT[dice.randint(0, 9) :][: dice.randint(1, 12)]
            how = dice.choice([GREEDY, beams(dice.randint(1, min(rows, 4)), dice.randint(1, 9))])
            try:
                submit(engine, name, own, how)
            except CapacityError:
                continue
            others[name] = (own, how)

    submit_some()
    for _ in range(dice.randint(0, 4)):
        checked_step(engine)
    begun = {name for name in others if name not in engine._sequences}  # ended already
    engine.submit(request)
    submit_some()
    deltas = run(engine)
    watch.check_all_ended()
    texts = search(lambda ids: null_logits(ids, windows), prompt, width, max_tokens)
    assert found(deltas["a"]) == expected(texts)
    for name in others.keys() - begun:
        own, how = others[name]
        if how.use_beam_search:
            wanted = search(lambda ids: null_logits(ids, windows), own, how.n, how.max_tokens or 0)
            assert found(deltas[name]) == expected(wanted)


def test_beams_yield_together_and_come_back() -> None:
    engine = null_engine(num_blocks=17)
    watch = Watch(engine)
    submit(engine, "first", PROMPT[:9], SamplingParams(temperature=0.0, max_tokens=40))
    submit(engine, "second", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=30))
    begun = [delta for _ in range(3) for delta in checked_step(engine)]
    submit(engine, "a", PROMPT, beams(3, 14))
    deltas = run(engine)
    assert found(deltas["a"]) == expected(search(null_logits, PROMPT, 3, 14))
    first = tokens([one for one in [*begun, *deltas["first"]] if one.request_id == "first"])
    assert first == alone(PROMPT[:9], SamplingParams(temperature=0.0, max_tokens=40))
    preempted = [watch.kinds(name).count("preempted") for name in ("first", "second", "a")]
    assert preempted[2]
    assert sum(preempted) == engine.stats().num_preemptions
    assert watch.kinds("a", 1) == ["scheduled", "first_token", "finished"]


def test_a_higher_priority_makes_all_beams_yield() -> None:
    engine = null_engine(scheduling_policy="priority", max_num_seqs=4)
    submit(engine, "a", PROMPT, beams(4, 12), priority=1)
    for _ in range(5):
        checked_step(engine)
    assert engine.stats().num_requests_running == 4
    submit(engine, "urgent", [1, 2, 3], GREEDY, priority=0)
    begun = checked_step(engine)
    assert (engine.stats().num_requests_running, engine.stats().num_requests_waiting) == (1, 1)
    deltas = run(engine)
    assert found(deltas["a"]) == expected(search(null_logits, PROMPT, 4, 12))
    assert tokens([*begun, *deltas["urgent"]]) == alone([1, 2, 3])


def test_others_yield_beside_beams_that_copy_blocks() -> None:
    """What beams copy in each round is taken before a prompt of their priority starts."""
    engine = null_engine(
        num_blocks=42,
        block_size=16,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        scheduling_policy="priority",
        enable_prefix_caching=False,
    )
    submit(engine, "a", PROMPT[:20], beams(8, 30, ignore_eos=True))
    for number in range(4):
        long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
        submit(engine, f"low{number}", [number] * 60, long, priority=5)
    for number in range(8):
        checked_step(engine)
        request = engine.prepare(f"x{number}", [number] * 352, GREEDY)
        engine.submit(request)
        checked_step(engine)
        assert request.running
        engine.abort(request.request_id)
    run(engine)


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
def test_with_a_tier_in_host_memory(preemption: Any) -> None:
    engine = null_engine(num_blocks=17, kv_host_memory=1 << 20, preemption=preemption)
    submit(engine, "x", PROMPT[:9], SamplingParams(temperature=0.0, max_tokens=40))
    submit(engine, "a", PROMPT, beams(3, 14))
    submit(engine, "b", PROMPT[3:], beams(2, 10))
    deltas = run(engine)
    assert engine.stats().num_preemptions
    assert found(deltas["a"]) == expected(search(null_logits, PROMPT, 3, 14))
    assert found(deltas["b"]) == expected(search(null_logits, PROMPT[3:], 2, 10))


def test_nobody_guesses_for_beams() -> None:
    asked: list[str] = []

    def future(request: Any) -> list[int]:
        asked.append(request.request_id)
        return alone(PROMPT[:5], SamplingParams(temperature=0.0, max_tokens=20))

    prophet = Prophet(future)
    prophet.length = 3
    engine = null_engine(speculator=prophet, max_num_batched_tokens=64)
    submit(engine, "a", PROMPT, beams(3, 10))
    submit(engine, "x", PROMPT[:5], SamplingParams(temperature=0.0, max_tokens=20))
    deltas = run(engine)
    assert found(deltas["a"]) == expected(search(null_logits, PROMPT, 3, 10))
    assert tokens(deltas["x"]) == alone(PROMPT[:5], SamplingParams(temperature=0.0, max_tokens=20))
    assert set(asked) == {"x"}


class Reading(Prophet):
    """Notes whose states it is told of."""

    @property
    def reader(self) -> Any:
        return self

    def note_states(self, request: Request, first: int, states: Any) -> None:
        self.read.append((request.request_id, first, states.tolist()))

    def note_decodes(self, requests: Sequence[Request], *_: Any) -> None:
        raise AssertionError(requests)


def test_nobody_is_told_of_the_states_of_beams() -> None:
    engine = null_engine(max_num_batched_tokens=64)
    submit(engine, "a", PROMPT, beams(3, 12))
    submit(engine, "x", [1, 2, 3], GREEDY)
    for _ in range(3):
        checked_step(engine)
    plan = engine._scheduler.plan()
    assert [request.request_id for request in plan.requests] == ["a", "a", "a", "x"]
    reading = Reading(lambda request: [])
    reading.read = []
    states = np.arange(4, dtype=np.float32)[:, None]
    Guessing(reading).note_states(plan, states, {})
    assert reading.read == [("x", 5, [[3.0]])]


# Ends.


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_it_can_be_aborted_at_any_time(steps: int) -> None:
    engine = null_engine()
    watch = Watch(engine)
    submit(engine, "a", PROMPT, beams(3, 12))
    for _ in range(steps):
        assert not checked_step(engine)
    deltas = engine.abort("a")
    assert [(delta.index, delta.finish_reason, delta.token_ids) for delta in deltas] == [
        (index, "abort", ()) for index in range(3)
    ]
    engine.check()
    watch.check_all_ended()
    assert not engine.has_work
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_it_is_aborted_while_it_waits_to_come_back() -> None:
    engine = null_engine(scheduling_policy="priority", max_num_seqs=4)
    watch = Watch(engine)
    submit(engine, "a", PROMPT, beams(4, 12), priority=1)
    for _ in range(5):
        checked_step(engine)
    submit(engine, "urgent", [1, 2, 3], GREEDY)
    checked_step(engine)
    assert len(engine.abort("a")) == 4
    run(engine)
    watch.check_all_ended()


def test_a_deadline_ends_all_beams() -> None:
    clock = Clock()
    engine = null_engine(clock=clock)
    submit(engine, "a", PROMPT, beams(3, 12), timeout_s=5.0)
    for _ in range(4):
        checked_step(engine)
    clock.now_s += 6.0
    assert reasons(checked_step(engine)) == ["timeout"] * 3
    assert not engine.has_work


def test_a_failing_step_is_tried_in_parts_and_loses_nothing() -> None:
    """Those that are computed in a part of the step wait for the others."""
    failing = {4, 6}
    engine = null_engine(fails=lambda number: number in failing)
    submit(engine, "a", PROMPT, beams(4, 12))
    submit(engine, "x", [1, 2, 3], GREEDY)
    deltas = run(engine)
    assert engine.stats().num_failed_steps == len(failing)
    assert found(deltas["a"]) == expected(search(null_logits, PROMPT, 4, 12))
    assert tokens(deltas["x"]) == alone([1, 2, 3])


def compute(engine: Engine, requests: Sequence[Request]) -> None:
    """Let a step be of some requests alone."""
    assert not engine._execute(engine._scheduler.plan(requests))
    engine.check()


@pytest.mark.parametrize("yields", [False, True])
def test_a_beam_that_is_ahead_waits_for_the_others(yields: bool) -> None:
    engine = null_engine(max_num_batched_tokens=64)
    submit(engine, "a", PROMPT, beams(4, 12))
    for _ in range(3):
        checked_step(engine)
    first, *others = list(engine._scheduler.running)
    compute(engine, [first])
    assert first.num_computed_tokens == len(first.tokens)
    compute(engine, others[:1])
    assert engine._scheduler.plan().requests == tuple(others[1:])
    if yields:
        yield_now(engine)
    assert found(run(engine)["a"]) == expected(search(null_logits, PROMPT, 4, 12))
    assert null_model(engine).num_runs == engine.stats().num_steps


def test_beams_that_wait_for_others_may_yield() -> None:
    engine = null_engine(
        fails=lambda number: number == 5, scheduling_policy="priority", max_num_seqs=4
    )
    submit(engine, "a", PROMPT, beams(4, 12), priority=1)
    while engine.stats().num_failed_steps == 0:
        checked_step(engine)
    checked_step(engine)  # a half
    assert any(one.num_computed_tokens == len(one.tokens) for one in engine._scheduler.running)
    submit(engine, "urgent", [1, 2, 3], GREEDY)
    deltas = run(engine)
    assert found(deltas["a"]) == expected(search(null_logits, PROMPT, 4, 12))


class FewRows(NullModel):
    """Has no memory for more than three rows at once."""

    def run(self, inputs: Any) -> Any:
        if len(inputs.past_sequence_lengths) > 3:
            raise DeviceMemoryError("no room")
        return super().run(inputs)


def test_without_memory_for_all_beams_they_are_computed_in_parts() -> None:
    engine = null_engine(model_type=FewRows)
    submit(engine, "a", PROMPT, beams(5, 12))
    submit(engine, "x", [1, 2, 3], GREEDY)
    deltas = run(engine)
    assert engine.stats().num_failed_steps < 20
    assert found(deltas["a"]) == expected(search(null_logits, PROMPT, 5, 12))
    assert tokens(deltas["x"]) == alone([1, 2, 3])


def test_one_beam_that_cannot_be_computed_ends_all() -> None:
    engine = null_engine(fails=lambda number: 5 <= number < 8)
    watch = Watch(engine)
    submit(engine, "a", PROMPT, beams(4, 12))
    submit(engine, "x", [1, 2, 3], GREEDY)
    deltas = run(engine)
    ended = {name: reasons(deltas[name]) for name in ("a", "x")}
    assert ended in ({"a": ["error"] * 4, "x": ["length"]}, {"a": ["length"] * 4, "x": ["error"]})
    watch.check_all_ended()


class NoNumbers(NullModel):
    """Gives one row no numbers, in a run of choice."""

    def run(self, inputs: Any) -> Any:
        logits = super().run(inputs)
        if self.num_runs == 5:
            logits[1] = np.nan
        return logits


def test_logits_that_are_no_numbers_end_all_beams() -> None:
    engine = null_engine(model_type=NoNumbers)
    submit(engine, "a", PROMPT, beams(3, 12))
    submit(engine, "x", [1, 2, 3], GREEDY)
    deltas = run(engine)
    assert reasons(deltas["a"]) == ["error"] * 3
    assert {delta.error for delta in deltas["a"]} == {"the model's logits are not finite numbers"}
    assert tokens(deltas["x"]) == alone([1, 2, 3])


def test_where_nothing_may_come_it_says_what_forbids_it(words: Tokenizer) -> None:
    engine = text_engine(words)
    form = StructuredOutputs.from_mapping({"choice": ["yes"]})
    submit(engine, "b", [5, 6], beams(2, 4, structured_outputs=form, allowed_token_ids=(5,)))
    deltas = run(engine)["b"]
    assert reasons(deltas) == ["error"] * 2
    assert deltas[0].failure is not None
    assert deltas[0].failure.refused
    assert "allowed_token_ids and the grammar forbid all" in deltas[0].failure.message


# A lost device.


def other_model(**options: Any) -> NullModel:
    return NullModel(NullOptions(max_model_len=512, **options))


@pytest.mark.parametrize("lost", [0, 3, 8])
def test_a_fallback_goes_on_with_the_beams(lost: int) -> None:
    engine = null_engine(
        lost_at=lambda operation: operation == lost,
        fallbacks=[other_model(block_size=3, num_blocks=80)],
    )
    submit(engine, "a", PROMPT, beams(4, 12))
    submit(engine, "x", [1, 2, 3], GREEDY)
    deltas = run(engine)
    assert len(engine.losses) == 1
    assert found(deltas["a"]) == expected(search(null_logits, PROMPT, 4, 12))
    assert tokens(deltas["x"]) == alone([1, 2, 3])


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_batch_rows": 3}, "has 4 beams, and .* runs 3 sequences at once"),
        ({"num_blocks": 8, "block_size": 4}, "has 4 beams of .* tokens, .* has 8 KV blocks of 4"),
    ],
)
@pytest.mark.parametrize("steps", [0, 6])
def test_a_fallback_that_is_too_small_for_all_beams_ends_them(
    options: dict[str, Any], why: str, steps: int
) -> None:
    lost = [False]
    engine = null_engine(lost_at=lambda operation: lost[0], fallbacks=[other_model(**options)])
    watch = Watch(engine)
    submit(engine, "a", PROMPT, beams(4, 12))
    submit(engine, "x", [1, 2, 3], GREEDY)
    for _ in range(steps):
        checked_step(engine)
    lost[0] = True
    deltas = run(engine)
    assert reasons(deltas["a"]) == ["error"] * 4
    for delta in deltas["a"]:
        assert delta.error is not None
        assert re.search(why, delta.error)
    assert tokens(deltas["x"]) == alone([1, 2, 3])[-len(tokens(deltas["x"])) :]
    watch.check_all_ended()


def test_where_nothing_takes_over_all_beams_end() -> None:
    engine = null_engine(lost_at=lambda operation: operation == 6)
    submit(engine, "a", PROMPT, beams(4, 12))
    assert reasons(run(engine)["a"]) == ["error"] * 4


# Room.


def test_what_can_never_fit_is_refused() -> None:
    engine = null_engine(num_blocks=20)
    submit(engine, "a", PROMPT[:20], beams(3, 21))  # 5 blocks and 3 times 5
    with pytest.raises(CapacityError, match=r"3 beams of 20 prompt tokens.* 22 .* need 23 KV"):
        engine.prepare("b", PROMPT[:20], beams(3, 22))
    assert found(run(engine)["a"]) == expected(search(null_logits, PROMPT[:20], 3, 21))


def test_without_max_tokens_they_get_as_long_as_there_is_room() -> None:
    engine = null_engine(num_blocks=20)
    submit(engine, "a", PROMPT[:20], beams(3, None))  # type: ignore[arg-type]
    deltas = run(engine)["a"]
    assert {len(delta.token_ids) for delta in deltas} == {21}
    engine = null_engine(num_blocks=6, max_num_seqs=32)
    submit(engine, "a", PROMPT[:20], beams(30, 1))  # whose last token takes no block
    assert len(run(engine)["a"]) == 30
    with pytest.raises(CapacityError, match=r"30 beams of 20 .* \+ 1 to generate need 120 KV"):
        null_engine(max_num_seqs=32, windows=(4, 4)).prepare("a", PROMPT[:20], beams(30, None))  # type: ignore[arg-type]


def test_more_beams_than_rows_are_refused() -> None:
    with pytest.raises(RequestError, match="n is 9, and the engine runs 8 sequences at once"):
        null_engine().prepare("a", PROMPT, beams(9))


# What is told.


def test_log_probabilities_are_those_of_each_text() -> None:
    engine = null_engine()
    submit(engine, "a", PROMPT, beams(3, 6, logprobs=2, logprob_token_ids=(9, 10)))
    for delta in run(engine)["a"]:
        assert delta.logprobs is not None
        total = 0.0
        for place, (token_id, told) in enumerate(zip(delta.token_ids, delta.logprobs, strict=True)):
            logits = null_logits((*PROMPT, *delta.token_ids[:place]))
            order = np.argsort(-logits, kind="stable").tolist()
            assert set(told) == {*order[:2], 9, 10, token_id}
            norm = logits.max() + np.log(np.exp(logits - logits.max()).sum())
            for one, entry in told.items():
                assert entry.rank == order.index(one) + 1
                assert entry.logprob == pytest.approx(logits[one] - norm, abs=1e-4)
            total += told[token_id].logprob
        assert delta.cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_ranks_of_candidates_take_no_sort_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    sort = np.sort

    def noted(values: Any, *more: Any, **named: Any) -> Any:
        sizes.append(len(values))
        return sort(values, *more, **named)

    engine = null_engine()
    submit(engine, "a", PROMPT, beams(5, 6, logprobs=2, logprob_token_ids=(9, 10, 11)))
    with monkeypatch.context() as patch:
        patch.setattr(np, "sort", noted)
        run(engine)
    assert sizes == [10] * (1 + 5 * 5)  # twice as many tokens as beams, for each beam and round


@pytest.mark.parametrize(
    "mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
)
def test_what_is_compared_is_not_what_is_reported(mode: Any) -> None:
    bias = {1: 5.0, 2: 5.0, 3: 5.0}
    engine = null_engine(logprobs_mode=mode)
    submit(engine, "a", PROMPT, beams(2, 5, logprobs=1, logit_bias=bias))
    submit(engine, "b", PROMPT, beams(2, 5, logit_bias=bias))
    deltas = run(engine)
    assert found(deltas["a"]) == found(deltas["b"])
    [delta, _] = deltas["a"]
    first, token_id = (delta.logprobs or ())[0], delta.token_ids[0]
    logits = null_logits(tuple(PROMPT)).copy()
    if mode.startswith("processed"):
        logits[list(bias)] += 5.0
    if mode.endswith("logprobs"):
        logits -= logits.max() + np.log(np.exp(logits - logits.max()).sum())
    assert first[token_id].logprob == pytest.approx(logits[token_id], abs=1e-4)


def test_log_probabilities_of_the_prompt() -> None:
    engine = null_engine()
    submit(engine, "a", PROMPT, beams(2, 4, prompt_logprobs=1))
    submit(engine, "b", PROMPT, SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1))
    deltas = run(engine)
    assert deltas["a"][0].prompt_logprobs == deltas["b"][0].prompt_logprobs is not None
    assert deltas["a"][1].prompt_logprobs is None


def test_counters() -> None:
    engine = null_engine()
    watch = Watch(engine)
    submit(engine, "a", PROMPT, beams(3, 6))
    run(engine)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (22, 18)
    assert watch.num_sampled == 18
    assert stats.finished["length"] == 3
    assert sum(len(step.inter_token_s) for step in watch.steps) == 5
    records = [watch.events["a", index][-1].finished for index in range(3)]
    assert [record.num_output_tokens for record in records if record] == [6, 6, 6]
    assert watch.kinds("a") == ["queued", "scheduled", "first_token", "finished"]
    times = [record.metrics for record in records if record]
    first = times[0].first_token_time_s
    assert [one.first_token_time_s for one in times] == [first] * 3
    assert all((one.last_token_time_s or 0.0) > (first or 0.0) for one in times)


@pytest.mark.parametrize("is_whole", [True, False])
def test_times_are_those_of_the_search_wherever_beams_part(
    is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnxport.serving import beam_candidates

    candidates = beam_candidates._candidates

    def parts_late(request: Request, *more: Any) -> Any:
        return candidates(request, *more)[: 1 if request.num_output_tokens < 5 else None]

    monkeypatch.setattr(beam_candidates, "_candidates", parts_late)
    clock = Clock()
    engine = null_engine(clock=clock)
    submit(engine, "a", PROMPT, beams(3, 9, ignore_eos=True))
    deltas = []
    for _ in range(9 if is_whole else 8):
        clock.now_s += 1.0
        deltas += checked_step(engine)
    if not is_whole:
        deltas += engine.abort("a")
    first = deltas[0].times
    assert first is not None
    assert [delta.times for delta in deltas] == [first] * 3
    assert first[2] - first[1] == (8.0 if is_whole else 7.0)


# Parameters.


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 1),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("typical_p", 0.9),
        ("top_n_sigma", 1.0),
        ("xtc_probability", 0.5),
        ("dynatemp_range", 0.5),
        ("mirostat", 2),
        ("adaptive_target", 0.5),
    ],
)
def test_nothing_is_drawn(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name} is .* with use_beam_search") as caught:
        beams(2, **{name: value})
    assert caught.value.param == name
    SamplingParams(**{name: value})


def test_neutral_values_pass() -> None:
    beams(2, top_k=-1, seed=-1, top_p=1.0, top_n_sigma=-1, repetition_detection=None)


@pytest.mark.parametrize("penalty", [17, -16.5, "1", None, float("nan"), True])
def test_length_penalties_have_a_range(penalty: Any) -> None:
    with pytest.raises(RequestError, match="length_penalty is"):
        beams(2, length_penalty=penalty)


def test_a_length_penalty_without_beams_is_refused() -> None:
    with pytest.raises(RequestError, match="without use_beam_search"):
        SamplingParams(length_penalty=0.5)
    with pytest.raises(RequestError, match="use_beam_search is 1; give true or false"):
        SamplingParams(use_beam_search=1)  # type: ignore[arg-type]


def test_a_step_with_beams_alone_that_fail_to_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    from onnxport.serving import beam_candidates

    def fail(*arguments: Any) -> Any:
        raise ZeroDivisionError("sampling")

    engine = null_engine()
    submit(engine, "a", PROMPT, beams(2, 6))
    submit(engine, "x", [1, 2, 3], GREEDY)
    for _ in range(3):
        checked_step(engine)
    with monkeypatch.context() as patch:
        patch.setattr(beam_candidates, "logprobs", fail)
        deltas = checked_step(engine)
    assert reasons(deltas) == ["error", "error"]
    assert {delta.error for delta in deltas if delta.finish_reason} == {
        "ZeroDivisionError: sampling"
    }
    assert reasons(run(engine)["x"]) == ["length"]
