"""Reasoning, text and calls of messages with channels, however an answer is cut into deltas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.serving.channels import MARKS, Channels
from onnxport.serving.http.reasoning import DeltaSplitter, Thinking
from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.base import ParsedCall
from onnxport.serving.http.tool_formats.harmony import HARMONY
from onnxport.serving.outputs import CompletionDelta, FinishReason
from tests.tiers import examples

from .harmony import NEXT, call, message

FUNCTIONS = {"add": {"type": "object", "required": ["x"]}}
ADD = call("add", '{"x": 1}')
SEE, SORRY = message("commentary", "See."), message("final", "Sorry.")
BROKEN = call("add", "x = 1")
SEE_SORRY = "See.\n\nSorry."
PIECES = (
    *MARKS,
    *(NEXT, message("analysis", "hm"), message("final", "yes"), ADD),
    *(call("add", '{"x":'), call("sub", "{}"), " to=functions.add", "to=functions.sub ", "to=add"),
    *('"}', '"', "\\", "}", "assistant", "<", "<|", "a ", " ", "\n", "é"),
)
Told = tuple[str, str, list[ParsedCall]]


def told(pieces: Sequence[str], hidden: tuple[str, ...]) -> Told:
    """Return what a stream of deltas tells: reasoning, content and calls."""
    thinking = Thinking(True, Channels(), hidden=hidden, functions=("add",))
    splitter, parser = DeltaSplitter(thinking), ToolCallParser(FUNCTIONS, HARMONY, hidden)
    reasoning, content, calls = "", "", []
    for index, text in enumerate([*pieces, ""]):
        reason: FinishReason | None = "stop" if index == len(pieces) else None
        delta = CompletionDelta("r", 0, text, (), None, reason)
        for is_thought, piece in splitter.take(delta, ()):
            if is_thought:
                reasoning += piece.text
                continue
            parsed = parser.take(piece.text, is_last=piece.finish_reason is not None)
            content += parsed.content
            calls += parsed.calls
    return reasoning, content, calls


@given(st.lists(st.sampled_from(PIECES), max_size=9), st.sampled_from([(), MARKS]), st.data())
@settings(max_examples=examples(300), deadline=None)
def test_any_deltas_tell_the_same(
    words: list[str], hidden: tuple[str, ...], data: st.DataObject
) -> None:
    """And no mark, but in arguments."""
    text = "".join(words)
    whole = told([text], hidden)
    thinking = Thinking(True, Channels(), hidden=hidden, functions=("add",))
    reasoning, answer = thinking.parted(text)
    parsed = ToolCallParser(FUNCTIONS, HARMONY, hidden).take(answer, is_last=True)
    assert (reasoning, parsed.content, list(parsed.calls)) == whole
    assert told(text, hidden) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    assert told([text[a:b] for a, b in pairwise([0, *cuts, len(text)])], hidden) == whole
    assert not any(mark in told for told in whole[:2] for mark in MARKS)


def test_a_backslash_behind_arguments_hides_no_mark() -> None:
    text = f"{ADD}\\{message('final', 'yes')}"
    for pieces in ([text], list(text)):
        assert told(pieces, MARKS) == ("", "\\\n\nyes", [ParsedCall("add", '{"x": 1}')])


@pytest.mark.parametrize(
    ("messages", "content", "num_calls"),
    [
        ([BROKEN, SORRY], "x = 1\n\nSorry.", 0),
        ([BROKEN, BROKEN, SORRY], "x = 1\n\nx = 1\n\nSorry.", 0),
        ([SEE, BROKEN, ADD, SORRY], "See.\n\nx = 1\n\nSorry.", 1),
        ([ADD, SORRY], "Sorry.", 1),
        ([ADD, ADD, BROKEN], "x = 1", 2),
        ([SEE, ADD, SORRY], "See.\n\nSorry.", 1),
        ([SEE, ADD], "See.", 1),
        ([SEE, message("analysis", "hm"), ADD, message("analysis", "hm"), SORRY], SEE_SORRY, 1),
        ([ADD, message("final", "\n\nyes")], "\n\nyes", 1),  # as the model writes it
        ([call("add", ""), SORRY], "Sorry.", 0),
        ([SEE, call("add", ""), SORRY], "See.\n\nSorry.", 0),
    ],
)
def test_what_is_said_around_calls_is_parted(
    messages: list[str], content: str, num_calls: int
) -> None:
    """Also from what looked like a call and is none."""
    text = NEXT.join(messages)
    for pieces in ([text], list(text)):
        _, found, calls = told(pieces, MARKS)
        assert (found, len(calls)) == (content, num_calls)


@given(st.lists(st.sampled_from(PIECES), max_size=9), st.data())
@settings(max_examples=examples(200), deadline=None)
def test_parts_end_where_they_stand_in_the_text(words: list[str], data: st.DataObject) -> None:
    """Whatever is not told before them."""
    text = "".join(words)
    cut = data.draw(st.integers(0, len(text)))
    parser = ToolCallParser(FUNCTIONS, HARMONY, MARKS)
    found = [parser.feed(text[:cut]), parser.take(text[cut:], is_last=True)]
    parts = [one for each in found for one in zip(each.parts, each.ends, strict=True)]
    for part, end in parts:
        last = part.rstrip()[-1:] if isinstance(part, str) else "}"
        assert not last or text[end - 1] == last  # space is where it may be
    ends = [end for _, end in parts]
    assert ends == sorted(ends)
    assert not ends or ends[-1] <= len(text)
