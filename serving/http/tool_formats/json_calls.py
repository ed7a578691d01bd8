"""Calls that are written in JSON: objects with a name and arguments, alone or in lists."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from onnxport.serving.http.tool_formats.base import Block, Functions, ParsedCall
from onnxport.serving.http.tool_formats.cursor import Cursor, json_value

KEYS = ('"name"', '"type"', '"id"', '"arguments"', '"parameters"')  # a call's first one
_SURROGATE = re.compile("[\ud800-\udfff]")


def call(name: str, arguments: object, functions: Functions) -> ParsedCall | None:
    """Return a call of an offered function; None: it is none, or the arguments are no object."""
    if name not in functions or not isinstance(arguments, dict):
        return None
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None
    if _SURROGATE.search(text):  # half of a character, which is JSON as an escape alone
        text = json.dumps(arguments)
    return ParsedCall(name, text)


def call_of(value: Any, functions: Functions) -> ParsedCall | None:
    """Return the call that an object of JSON is; arguments may be called parameters.

    It may be in OpenAI's shape, too, as `function` of an object.
    """
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = value["function"]
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get("arguments", value.get("parameters"))
    if given is None or given == "":  # of a function that takes none
        given = {}
    if isinstance(given, str):  # JSON already, if it is any
        given = json_value(given)
    return call(value["name"], given, functions)


def _may_be_call(cursor: Cursor) -> bool:
    """Whether a list or an object begins as calls do; other JSON is not kept back to its end."""
    if cursor.take("["):
        cursor.skip_space()
    if not cursor.take("{"):
        return False
    cursor.skip_space()
    return cursor.take(*KEYS) is not None


@dataclass(frozen=True, slots=True)
class JsonReader:
    """Reads calls in JSON behind a marker, or without one at the beginning of a text.

    Attributes:
        markers: that a block may begin with.
        closing: that it may end with.
        separator: that a block may begin with behind another one; None: nothing.
        call_of: returns the call that a value of JSON is; None: it is none.
    """

    markers: tuple[str, ...]
    closing: str | None = None
    separator: str | None = None
    call_of: Callable[[Any, Functions], ParsedCall | None] = call_of

    def __call__(self, text: str, start: int, final: bool, functions: Functions) -> Block:
        """Return the block that may begin at `start`; see `Reader`."""
        cursor = Cursor(text, start, final)
        marked = cursor.take(*self.markers, *filter(None, [self.separator]))
        none = Block(max(cursor.at, start + 1))
        cursor.skip_space()
        begin = cursor.at
        if marked not in self.markers and not _may_be_call(cursor):
            return none
        cursor.at = begin
        calls = self._calls(cursor.json(), functions)
        if not calls and final and cursor.at == begin:
            return self._cut(text, begin, functions) or none
        if not calls:
            return replace(none, seen=cursor.seen)
        end = cursor.at
        if self.closing is not None:
            behind = Cursor(text, end, final)
            behind.skip_space()
            end = behind.at if behind.take(self.closing) else end
        return Block(end, calls)

    def _calls(self, value: Any, functions: Functions) -> tuple[ParsedCall, ...]:
        """Return the calls of an object, or of a list of objects; none unless all are calls."""
        values = value if isinstance(value, list) else [value]
        found = [self.call_of(each, functions) for each in values]
        calls = tuple(each for each in found if each is not None)
        return calls if len(calls) == len(found) else ()

    def _cut(self, text: str, start: int, functions: Functions) -> Block | None:
        """Return the calls that are whole in a list that the text ends in; None: there are none."""
        cursor = Cursor(text, start, final=True)
        if not cursor.take("["):
            return None
        cursor.skip_space()
        calls: tuple[ParsedCall, ...] = ()
        end = start
        while more := self._calls(cursor.json(), functions):
            calls, end = calls + more, cursor.at
            cursor.skip_space()
            cursor.take(",")
            cursor.skip_space()
        return Block(end, calls) if calls else None
