"""Reasoning, text and calls of messages with channels, however an answer is cut into deltas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

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
        assert told(pieces, MARKS) == ("", "\\yes", [ParsedCall("add", '{"x": 1}')])
