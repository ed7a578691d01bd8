"""Calls that stand in sections, of which each is read by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from onnxport.serving.http.tool_formats.cursor import Cursor


def open_call(cursor: Cursor, section: str, call: str) -> tuple[bool, int]:
    """Go past what opens a section and a call of it, or a call alone.

    Args:
        cursor: where one of the two stands.
        section: opens a section; empty: there are none.
        call: opens a call.

    Returns:
        Whether a call is opened, and the place behind the first of both.
    """
    opened = cursor.take(*filter(None, (section, call)))
    behind = cursor.at
    if opened == call:
        return True, behind
    cursor.skip_space()
    return cursor.take(call) is not None, behind


def json_before(cursor: Cursor, end: str) -> Any:
    """Go past an object of JSON and return it; None: it is none. Nothing before `end` is one."""
    cursor.skip_space()
    if cursor.take(end):
        cursor.at -= len(end)
        return {}
    return cursor.json()


def ends_behind(text: str, at: int, final: bool, ends: Iterable[str]) -> int:
    """Return the place behind texts that may end a call and its section, in their order.

    Each may be missing, space be before it, and the last one be cut at the end of all.

    Args:
        text: what was generated so far.
        at: behind the call.
        final: whether nothing follows `text`.
        ends: the texts.

    Raises:
        Incomplete: what follows `text` decides.
    """
    for end in ends:
        cursor = Cursor(text, at, final)
        cursor.skip_space()
        rest = text[cursor.at :]
        if cursor.take(end):
            at = cursor.at
        elif final and rest and end.startswith(rest):
            return len(text)
    return at
