"""Outputs that repeat themselves, against an obvious, slow reference, and how they end."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxport.errors import RequestError
from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel
from onnxport.serving.collect import OutputCollector
from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.engine import Engine
from onnxport.serving.llm import LLM
from onnxport.serving.metrics import CacheConfig, Metrics
from onnxport.serving.outputs import CompletionDelta, Logprob
from onnxport.serving.params import SamplingParams
from onnxport.serving.repetition import MAX_COUNT, MAX_PATTERN, RepetitionDetection
from onnxport.serving.request import Request
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.stuck import Repetition
from onnxport.serving.thoughts import Thought
from tests.tiers import examples

from .helpers import null_engine, reasons, run, submit, text, tokens
from .prophet import Prophet
from .structured import tokenizer, vocabulary

PROMPT = [20, 21, 22]
STUCK = ("repetition", "repetition_detected")


def is_stuck(output: Sequence[int], detection: RepetitionDetection) -> bool:
    """Whether a pattern stands often enough at the end: compared piece by piece."""
    if not detection.max_pattern_size:
        return False
    for size in range(max(1, detection.min_pattern_size), detection.max_pattern_size + 1):
        tail = list(output[-size * detection.min_count :])
        pattern = tail[:size]
        if len(tail) == size * detection.min_count and tail == pattern * detection.min_count:
            return True
    return False


def cut(output: Sequence[int], detection: RepetitionDetection, min_tokens: int = 0) -> list[int]:
    """The output up to the first token with which it is stuck, or all of it."""
    for end in range(max(1, min_tokens), len(output) + 1):
        if is_stuck(output[:end], detection):
            return list(output[:end])
    return list(output)


detections = st.builds(
    lambda most, least, count: RepetitionDetection(most, min(most, least), count),
    st.integers(1, 7),
    st.integers(0, 4),
    st.integers(2, 4),
)
outputs = st.lists(st.integers(0, 2), max_size=40)
# One begins with what repeats, and its end is the beginning of another pattern.
loops = st.builds(
    lambda before, pattern, times, behind: [*before, *pattern * times, *behind],
    outputs,
    st.lists(st.integers(0, 3), min_size=1, max_size=8),
    st.integers(0, 5),
    outputs,
)


@settings(max_examples=examples(300), deadline=None)
@given(output=loops, prompt=outputs, detection=detections, cuts=st.sets(st.integers(0, 80)))
def test_an_output_is_stuck_when_the_reference_says_so(
    output: list[int], prompt: list[int], detection: RepetitionDetection, cuts: set[int]
) -> None:
    """What the prompt repeats does not count, nor how many tokens come at once."""
    each, several = (Repetition(detection, len(prompt)) for _ in range(2))
    found = array("q", prompt)
    for end, token_id in enumerate(output, 1):
        found.append(token_id)
        wanted = is_stuck(output[:end], detection)
        assert each.is_stuck(found) == wanted
        if end in cuts or end == len(output):
            assert several.is_stuck(found) == wanted


def test_sizes_and_counts_by_hand() -> None:
    def first(output: Sequence[int], *given: int) -> int | None:
        found = Repetition(RepetitionDetection(*given), 1)
        tokens = array("q", [7])
        for token_id in output:
            tokens.append(token_id)
            if found.is_stuck(tokens):
                return len(tokens) - 1
        return None

    assert first([7, 7, 7], 1, 1, 3) == 3  # the prompt's 7 is none of them
    assert first([5, 7, 7, 7, 7], 1, 0, 4) == 5
    assert first([1, 2, 1, 2, 1, 2], 2, 2, 3) == 6
    assert first([1, 2, 1, 2, 1, 2], 1, 1, 2) is None
    assert first([1, 2, 1, 2, 1, 2], 5, 3, 2) is None
    assert first([4] * 9, 4, 4, 2) == 8  # a longer pattern that is made of shorter ones
    assert first([1, 2, 3, 1, 2, 9, 1, 2, 3, 1, 2, 3], 3, 1, 2) == 12
    for before in (247, 250, 255, 256, 257, 600):
        assert first([*range(10, 10 + before), *[1, 2, 3] * 4], 5, 0, 3) == before + 9
    pattern = list(range(MAX_PATTERN))
    assert first(pattern * 2, MAX_PATTERN, 0, 2) == 2 * MAX_PATTERN
    assert first([3] * 50, 1, 1, MAX_COUNT) is None
    assert first([3] * 50, MAX_PATTERN, 1, MAX_COUNT) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_pattern_size": MAX_PATTERN + 1, "min_count": 2}, r"max_pattern_size is 1025"),
        ({"max_pattern_size": -1}, r"max_pattern_size is -1; it must be an integer in \[0, 1024\]"),
        ({"max_pattern_size": 2.0, "min_count": 2}, "max_pattern_size is 2.0"),
        ({"max_pattern_size": "2", "min_count": 2}, "max_pattern_size is '2'"),
        ({"max_pattern_size": True, "min_count": 2}, "max_pattern_size is True"),
        ({"max_pattern_size": 4, "min_pattern_size": -1}, "min_pattern_size is -1"),
        ({"max_pattern_size": 4, "min_count": MAX_COUNT + 1}, "min_count is 1048577"),
        ({"max_pattern_size": 4, "min_count": -2}, "min_count is -2"),
        ({"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}, "min_pattern_size 5"),
        ({"min_pattern_size": 1}, "min_pattern_size 1 and the max_pattern_size 0"),
        ({"max_pattern_size": 4}, "min_count 0"),
        ({"max_pattern_size": 4, "min_count": 1}, "min_count 1, and what stands there once"),
        ({"max_pattern": 4}, "has 'max_pattern', which is not known; it takes max_pattern_size, "),
    ],
)
def test_what_is_no_rule_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        RepetitionDetection.from_mapping(given)
    assert (caught.value.param or "").startswith("repetition_detection")


def test_rules_that_are_off() -> None:
    for told in ({}, {"max_pattern_size": 0}, {"min_count": 3}, {"max_pattern_size": None}):
        assert not RepetitionDetection.from_mapping(told).is_on
    asked = SamplingParams(repetition_detection=RepetitionDetection(0, 0, 3))
    assert Request("r", array("q", [1]), asked, max_total_tokens=9).repetition is None
    with pytest.raises(RequestError, match="give a RepetitionDetection"):
        SamplingParams(repetition_detection={"max_pattern_size": 3})  # type: ignore[arg-type]


class Scripted(NullModel):
    """Says what `script` says, whatever the prompt, one token after the other."""

    script: Sequence[int] = ()

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        logits = super().run(inputs)
        bounds = inputs.cumulative_sequence_lengths
        rows = np.searchsorted(bounds[1:], inputs.logits_indices, "right")
        for index, row in enumerate(rows):
            place = inputs.past_sequence_lengths[row] + inputs.logits_indices[index] - bounds[row]
            at = int(place) + 1 - len(PROMPT)
            logits[index, self.script[max(0, at) % len(self.script)]] = 50.0
        return logits


def writer(said: str, **options: Any) -> Engine:
    """An engine that says a text, again and again."""

    class Model(Scripted):
        script = tokenizer().encode(said, add_special_tokens=False)

    size = vocabulary().vocab_size
    return null_engine(vocab_size=size, tokenizer=tokenizer(), model_type=Model, **options)


def say(said: str, *given: int, **more: Any) -> list[CompletionDelta]:
    engine = writer(said)
    asked = {"max_tokens": 60, "temperature": 0.0, **more}
    detection = RepetitionDetection(*given) if given else None
    submit(engine, "a", PROMPT, SamplingParams(**asked, repetition_detection=detection))
    deltas = run(engine)["a"]
    assert engine.stats().finished[deltas[-1].finish_reason or "error"] == 1
    return deltas


def end_of(deltas: Sequence[CompletionDelta]) -> tuple[str | None, int | str | None]:
    assert [one for one in deltas if one.finish_reason] == [deltas[-1]]
    return deltas[-1].finish_reason, deltas[-1].stop_reason


def test_a_text_ends_where_it_is_stuck() -> None:
    deltas = say("abc", 5, 0, 3)
    assert (text(deltas), end_of(deltas)) == ("abc" * 3, STUCK)
    assert len(tokens(deltas)) == 9
    deltas = say("abc", 2, 0, 3)
    assert (len(tokens(deltas)), end_of(deltas)) == (60, ("length", None))
    deltas = say("abc", 5, 0, 3, max_tokens=9)  # as in vLLM the length is the reason then
    assert (text(deltas), end_of(deltas)) == ("abc" * 3, ("length", None))
    assert len(tokens(say("abc", 0, 0, 3))) == 60


def test_text_that_was_held_is_told() -> None:
    """A beginning of a stop string, a part of a character; log probabilities are of all tokens."""
    deltas = say("ab", 5, 0, 4, stop=["bx"], logprobs=1)
    assert (text(deltas), end_of(deltas)) == ("ab" * 4, STUCK)
    assert sum(len(one.logprobs or ()) for one in deltas) == 8
    deltas = say("ab", 5, 0, 4, stop=["abababab", "zz"])  # complete with the very same token
    assert (text(deltas), end_of(deltas)) == ("", ("stop", "abababab"))
    half = tokenizer().byte_token(0xE2)
    assert half is not None
    deltas = say("a", 1, 0, 3, logit_bias={half: 100.0})
    assert (text(deltas), end_of(deltas)) == ("\N{REPLACEMENT CHARACTER}" * 3, STUCK)
    deltas = say("a", 1, 0, 3, logit_bias={half: 100.0}, stop=["zz"])
    assert (text(deltas), end_of(deltas)) == ("\N{REPLACEMENT CHARACTER}" * 3, STUCK)


@pytest.mark.parametrize("least", [0, 5, 6, 9, 10, 60])
def test_not_before_min_tokens(least: int) -> None:
    """Afterwards at once, where the output is stuck still."""
    deltas = say("ab", 4, 2, 3, min_tokens=least)
    number = max(6, least)
    assert len(tokens(deltas)) == number
    assert end_of(deltas) == (STUCK if least < 60 else ("length", None))


def test_one_that_was_stuck_and_is_no_more_goes_on() -> None:
    for least, reason in ((4, "repetition"), (5, "length")):
        deltas = say("aaaabcde", 1, 1, 4, min_tokens=least, max_tokens=8)
        assert reasons(deltas) == [reason]


def test_a_form_that_is_not_complete_is_cut_and_one_that_is_complete_is_not() -> None:
    form = StructuredOutputs(regex="(ab){3,9}!")
    deltas = say("ab", 5, 0, 3, structured_outputs=form)
    assert (text(deltas), end_of(deltas)) == ("ababab", STUCK)
    form = StructuredOutputs(regex="(ab){3}")
    deltas = say("ab", 5, 0, 3, structured_outputs=form)
    assert (text(deltas), end_of(deltas)) == ("ababab", ("stop", None))


def test_thoughts_count_and_a_budget_goes_its_way() -> None:
    thought = Thought(("<think>",), ("</think>",), is_open=True)
    more = {"thinking_token_budget": 8, "thought": thought}
    deltas = say("ab", 5, 0, 3, **more)
    assert (text(deltas), end_of(deltas)) == ("ababab", STUCK)
    deltas = say("ab", 5, 0, 5, **more)
    assert text(deltas).startswith("abababab</think>")
    assert end_of(deltas) == STUCK
    plain = say("ab", **more)
    assert tokens(deltas) == cut(tokens(plain), RepetitionDetection(5, 0, 5))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("errs", [0, 3])
def test_of_tokens_that_come_at_once_the_later_ones_are_dropped(length: int, errs: int) -> None:
    script = tokenizer().encode("abc", add_special_tokens=False)
    prophet = Prophet(lambda request: script * 40, length)
    prophet.errs = errs
    engine = writer("abc", speculator=prophet)
    asked = SamplingParams(
        temperature=0.0,
        max_tokens=60,
        logprobs=0,
        stop=("never",),
        repetition_detection=RepetitionDetection(5, 0, 4),
    )
    for name in ("a", "b"):
        submit(engine, name, PROMPT, asked)
    for deltas in run(engine).values():
        assert (text(deltas), end_of(deltas)) == ("abc" * 4, STUCK)
        assert len(tokens(deltas)) == sum(len(one.logprobs or ()) for one in deltas) == 12
    assert prophet.num_accepted > 0
    assert engine.stats().generation_tokens == 24


RANDOM: dict[str, Any] = {"allowed_token_ids": (3, 4, 5), "max_tokens": 60, "ignore_eos": True}


@settings(max_examples=examples(40), deadline=None)
@given(
    detection=detections,
    seed=st.integers(0, 20),
    least=st.integers(0, 30),
    num_blocks=st.integers(17, 60),
    count=st.integers(1, 4),
    num_sequences=st.integers(1, 3),
)
def test_whatever_happens_tokens_are_those_up_to_there(
    detection: RepetitionDetection,
    seed: int,
    least: int,
    num_blocks: int,
    count: int,
    num_sequences: int,
) -> None:
    """Batched, preempted, forked: as the request alone without a rule, cut."""
    plain = SamplingParams(**RANDOM, seed=seed, min_tokens=least, n=num_sequences)
    asked = replace(plain, repetition_detection=detection)
    free = null_engine(num_blocks=512)
    submit(free, "a", PROMPT, plain)
    whole = run(free)["a"]
    engine = null_engine(num_blocks=num_blocks)
    for number in range(count):
        submit(engine, str(number), PROMPT, asked)
    for deltas in run(engine).values():
        for index in range(num_sequences):
            wanted = cut(tokens(whole, index), detection, least)
            assert tokens(deltas, index) == wanted
            ends = [one for one in deltas if one.index == index and one.finish_reason]
            found = [(one.finish_reason, one.stop_reason) for one in ends]
            assert found == [STUCK if len(wanted) < 60 else ("length", None)]


def test_beside_others_that_do_not_ask() -> None:
    engine = writer("abc")
    plain = SamplingParams(temperature=0.0, max_tokens=30)
    submit(engine, "plain", PROMPT, plain)
    asked = replace(plain, repetition_detection=RepetitionDetection(3, 3, 2))
    submit(engine, "asks", PROMPT, asked)
    deltas = run(engine)
    assert len(tokens(deltas["plain"])) == 30
    assert (tokens(deltas["asks"]), reasons(deltas["asks"])) == (
        tokens(deltas["plain"])[:6],
        ["repetition"],
    )
    metrics = Metrics("m", engine.stats, lambda: CacheConfig(16, 10, "float16", True))
    told = metrics.render("")[0].decode()
    [line] = [line for line in told.splitlines() if 'finished_reason="repetition"' in line]
    assert line.startswith("vllm:request_success_total{")
    assert line.endswith(" 1.0")


def test_one_that_is_stuck_is_the_best_only_where_none_is_whole() -> None:
    """However likely its tokens are; but one that failed is worse."""
    asked = SamplingParams(seed=1, n=1, best_of=2, max_tokens=4)

    def best(first: Any, second: Any) -> str | None:
        collector = OutputCollector(null_engine().prepare("a", [1, 2], asked))
        for index, (value, reason) in enumerate((first, second)):
            entry = {5: Logprob(value, 1, "")}
            collector.add(CompletionDelta("a", index, "", (5,), (entry,), reason))
        return collector.output().outputs[0].finish_reason

    assert best((-0.1, "repetition"), (-9.0, "length")) == "length"
    assert best((-9.0, "repetition"), (-0.1, "error")) == "repetition"


def test_prompts_without_parameters_have_the_defaults_of_llm() -> None:
    defaults = SamplingDefaults(0.0, repetition_detection=RepetitionDetection(4, 0, 2))
    llm = LLM.from_engine(writer("ab"), defaults=defaults)
    [output] = llm.generate({"prompt_token_ids": PROMPT})
    [one] = output.outputs
    assert (one.text, one.finish_reason, one.stop_reason) == ("abab", *STUCK)
    assert output.finished
    assert "RepetitionDetection(max_pattern_size=4," in str(defaults)
