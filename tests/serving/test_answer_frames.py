"""Answers in frames of special tokens: what is told of them, counted, and what a form allows."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.errors import RequestError
from onnxport.serving.http.reasoning import DeltaSplitter, ReasoningCounter, Thinking
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams
from onnxport.serving.reasoning_formats import FORMATS
from onnxport.serving.split import Stretch
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.thought_budget import with_thought
from onnxport.serving.thoughts import ReasoningSplitter, Thought, first_of
from tests.tiers import examples

from .structured import accepts, compiled, tokenizer

COHERE = FORMATS["cohere_command3"]
MAY = COHERE.thought("<|CHATBOT_TOKEN|>")
OPEN = COHERE.thought("<|CHATBOT_TOKEN|><|START_THINKING|>")
PAST = COHERE.thought("<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>")
PIECES = (*COHERE.frames, *COHERE.opens, *COHERE.closes, "<|", "<|START_", "ab", "\n", ">")
SPOKEN = "<|START_RESPONSE|>yes<|END_RESPONSE|>"


def take(thought: Thought | None, pieces: list[str]) -> tuple[str, str, ReasoningSplitter]:
    splitter = ReasoningSplitter(thought)
    found = [*map(splitter.feed, pieces), splitter.finish()]
    reasoning = "".join(one.reasoning for one in found)
    return reasoning, "".join(one.content for one in found), splitter


def test_places_of_an_answer_are_no_more_than_its_frames_part() -> None:
    """However many pieces it comes in: all of them are kept, and gone through with each piece."""
    text = f"{COHERE.frames[0]}{'yes ' * 50}{COHERE.frames[1]}{'no ' * 50}"
    _, content, splitter = take(PAST, list(text))
    assert content == "yes " * 50 + "no " * 50
    starts = [len(COHERE.frames[0]), len(COHERE.frames[0]) + 200 + len(COHERE.frames[1])]
    assert [*splitter.stretches] == [Stretch(0, starts[0], 200), Stretch(200, starts[1], 150)]


def test_what_a_prompt_says_of_them() -> None:
    assert Thought(COHERE.opens, COHERE.closes, frames=COHERE.frames) == MAY
    assert replace(MAY, is_open=True) == OPEN
    assert replace(MAY, is_past=True) == PAST
    assert FORMATS["qwen3"].thought("<think></think>") is None  # it has no frames


@pytest.mark.parametrize(
    ("thought", "text", "reasoning", "content"),
    [
        (OPEN, f"hm<|END_THINKING|>{SPOKEN}", "hm", "yes"),
        (MAY, f"<|START_THINKING|>hm<|END_THINKING|>{SPOKEN}", "hm", "yes"),
        (MAY, SPOKEN, "", "yes"),
        (PAST, SPOKEN, "", "yes"),
        (PAST, "<|START_THINKING|>yes", "", "<|START_THINKING|>yes"),
        (PAST, f"{SPOKEN}[1]{SPOKEN}", "", "yes[1]yes"),  # calls may stand between
        (PAST, "yes<|END_RESPON", "", "yes<|END_RESPON"),
        (OPEN, "a <|START_TEXT|> b", "a <|START_TEXT|> b", ""),
    ],
)
def test_they_are_not_told(thought: Thought, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        assert take(thought, pieces)[:2] == (reasoning, content)


@given(st.sampled_from([MAY, OPEN, PAST]), st.lists(st.sampled_from(PIECES)), st.data())
@settings(max_examples=examples(300))
def test_any_pieces_give_the_same(thought: Thought, words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    pieces = [text[i:j] for i, j in pairwise([0, *cuts, len(text)])]
    reasoning, content, splitter = take(thought, pieces)
    assert (reasoning, content) == take(thought, [text])[:2]
    told = [text[one.place : one.place + (one.length or 0)] for one in splitter.stretches]
    assert "".join(told) == content
    starts = [one.start for one in splitter.stretches]
    assert starts == [sum(map(len, told[:at])) for at in range(len(told))]


def test_the_longest_frame_counts() -> None:
    assert first_of("a<b>c", ("<b>", "<b>c")) == (1, "<b>c")


def test_streams_give_text_and_tokens_once() -> None:
    words = tokenizer()
    text = f"hm<|END_THINKING|>{SPOKEN}"
    ids = [words.encode(char, add_special_tokens=False)[0] for char in text]
    splitter = DeltaSplitter(Thinking(True, OPEN))
    counter = ReasoningCounter(OPEN, words)
    pieces = []
    for at, (char, token_id) in enumerate(zip(text, ids, strict=True)):
        end = "stop" if at == len(text) - 1 else None
        delta = CompletionDelta("a", 0, char, (token_id,), None, end)
        pieces += splitter.take(delta, counter.add((token_id,)))
    assert "".join(one.delta.text for one in pieces if one.is_thought) == "hm"
    assert "".join(one.delta.text for one in pieces if not one.is_thought) == "yes"
    assert [one for piece in pieces for one in piece.delta.token_ids] == ids
    assert counter.num_tokens == len("hm<|END_THINKING|><")  # the answer has begun behind that


def test_a_form_may_be_in_a_frame() -> None:
    form = StructuredOutputs(json={"type": "object"})
    for thought, before in (
        (OPEN, "hm<|END_THINKING|>"),
        (MAY, "<|START_THINKING|>hm<|END_THINKING|>"),
        (MAY, ""),
        (PAST, ""),
    ):
        shaped = compiled(replace(form, thought=thought))
        for frame in ("", "<|START_TEXT|>", "<|START_RESPONSE|>"):
            assert accepts(shaped, before + frame + '{"a": 1}')
            assert not accepts(shaped, before + frame + "a")
    assert not accepts(compiled(replace(form, thought=PAST)), "hm<|END_THINKING|>{}")


def test_a_budget_is_for_a_thought_that_may_come() -> None:
    params = SamplingParams(thinking_token_budget=3)
    assert with_thought(params, PAST, is_known=True).thinking_token_budget is None
    assert with_thought(params, OPEN, is_known=True).thought == OPEN
    with pytest.raises(RequestError, match="not known"):
        with_thought(params, None, is_known=False)
