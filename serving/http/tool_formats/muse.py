"""Muse's calls: messages to a function, each with one call in tags.

    <|start|>assistant to=f<|message|><atem:function_calls>
    <atem:invoke name="f">
    <atem:parameter name="a">1</atem:parameter>
    </atem:invoke>
    </atem:function_calls><|eom|>

The prompt ends with `<|start|>assistant`, so that a text begins with the recipient. Tags in another
message are text that speaks of them. Source: the model's chat template.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    BREAK,
    NAME,
    Block,
    Functions,
    Reader,
    TaggedCall,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor
from onnxport.serving.http.tool_formats.invoke_calls import Invokes
from onnxport.serving.http.tool_formats.sections import ends_behind

START, MESSAGE, MESSAGE_END, TURN_END = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
HEADER: Final = f"{START}assistant"
TO: Final = " to="
ATEM: Final = Invokes(
    ("<atem:function_calls>", "</atem:function_calls>"),
    ('<atem:invoke name="', '">', "</atem:invoke>"),
    ('<atem:parameter name="', "</atem:parameter>"),
)


def _reader(tags: Invokes) -> Reader:
    """Return what reads a message to a function."""

    def read(text: str, start: int, final: bool, functions: Functions) -> Block:
        cursor = Cursor(text, start, final)
        cursor.take(HEADER)
        none = Block(max(cursor.at, start + 1))
        cursor.skip_space()
        if not cursor.take(TO.strip()) or cursor.take(*functions) is None:
            return none
        if not cursor.take(MESSAGE):
            return none
        cursor.skip_space()
        begin = cursor.at
        if not cursor.take(tags.block[0], tags.call[0]):
            return none
        found = tags(text, begin, final, functions)
        if not found.calls:
            return replace(none, seen=found.seen)
        return replace(found, end=ends_behind(text, found.end, final, [MESSAGE_END]))

    return read


def _begins(functions: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{TO.strip()}{name}{MESSAGE}" for name in functions)


def tagged(name: str, parameters: Mapping[str, Any]) -> TaggedCall | None:
    """Return how a call of a function is written; None: parameters ask for more than tags can."""
    inner = ATEM.written(name, parameters)
    return inner and TaggedCall(
        f"{TO}{name}{MESSAGE}{ATEM.block[0]}{BREAK}{inner.before}",
        inner.arguments,
        f"{inner.behind}{ATEM.block[1]}",
    )


_IN_JSON: Final = (
    f"{TO}{NAME}{MESSAGE}{ATEM.block[0]}{BREAK}{ATEM.call[0]}{NAME}{ATEM.call[1]}{BREAK}{ARGUMENTS}"
    f"{BREAK}{ATEM.call[2]}{BREAK}{ATEM.block[1]}"
)
MUSE = ToolFormat(
    "muse",
    markers=(START,),
    begins=_begins,
    further=(MESSAGE, MESSAGE_END),
    read=_reader(ATEM),
    written=Written(
        "",
        MESSAGE_END,
        _IN_JSON,
        between_blocks=HEADER,
        optional_marker=HEADER,
    ),
    tagged=tagged,
    exact=_reader(replace(ATEM, is_exact=True)),
    recognizes=lambda template: ATEM.block[0] in template,
)
