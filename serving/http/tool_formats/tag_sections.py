"""Calls in tags, an argument a tag, with a pair of tags around all calls of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from onnxport.serving.http.tool_formats.base import (
    BREAK,
    JSON_CALL,
    Block,
    Functions,
    Reader,
    TaggedCall,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor
from onnxport.serving.http.tool_formats.sections import ends_behind, open_call
from onnxport.serving.http.tool_formats.xml_calls import Tags


def sectioned(
    name: str,
    section: tuple[str, str],
    tags: Tags,
    recognizes: Callable[[str], bool],
    *,
    line: str = BREAK,
    of_template: Callable[[str], ToolFormat] | None = None,
) -> ToolFormat:
    """Return the format of calls in tags that stand in a section.

    Args:
        name: of the format.
        section: the tags around all calls, which may be missing.
        tags: of a call.
        recognizes: whether a chat template has the model write this.
        line: what a template writes behind the tags of the section and of a call.
        of_template: see `ToolFormat`.
    """
    opening, closing = section
    before, behind = tags.block

    def tagged(function: str, parameters: Mapping[str, Any]) -> TaggedCall | None:
        inner = tags.written(function, parameters)
        return inner and TaggedCall(
            f"{before}{inner.before}", inner.arguments, f"{inner.behind}{behind}{line}"
        )

    parts = (closing, behind, tags.name[1], *tags.key, *tags.kind, *tags.value)
    return ToolFormat(
        name,
        markers=(opening, before),
        further=tuple(filter(None, parts)),
        read=_reader(section, tags),
        written=Written(
            f"{opening}{line}",
            closing,
            f"{before}{line}{JSON_CALL}{line}{behind}{line}",
            between_calls="",
        ),
        tagged=tagged,
        exact=_reader(section, replace(tags, is_exact=True)),
        ends_thought=section[:1],
        recognizes=recognizes,
        of_template=of_template,
    )


def _reader(section: tuple[str, str], tags: Tags) -> Reader:
    """Return what reads a call, and the section that it may open or close."""
    opening, closing = section
    before = tags.block[0]

    def read(text: str, start: int, final: bool, functions: Functions) -> Block:
        cursor = Cursor(text, start, final)
        is_opened, behind = open_call(cursor, opening, before)
        if not is_opened:
            return Block(behind)
        found = tags(text, cursor.at - len(before), final, functions)
        if not found.calls:
            return found
        return replace(found, end=ends_behind(text, found.end, final, [closing]))

    return read
