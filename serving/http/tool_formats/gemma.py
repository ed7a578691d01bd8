"""`<|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>`: Gemma 4; FunctionGemma's, in other marks.

Texts stand between two marks as they are, names of arguments and of members are bare, and the rest
is as in JSON. FunctionGemma's `<start_function_call>call:f{a:<escape>x<escape>}<end_function_call>`
may have any value between its marks: it is what the function's parameters ask for. Forced calls
whose parameters ask for more than such values can say have arguments in JSON, which is read, too.
Source: the models' chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    NAME,
    Block,
    Functions,
    Literals,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor, Incomplete
from onnxport.serving.http.tool_formats.json_calls import call
from onnxport.serving.http.tool_formats.tagged_values import TEXT, types_of, value_of

MOST_NESTED: Final = 100
_ENDS: Final = ",]}"  # of a bare value
_BARE: Final = re.compile(r"[^{}\[\],<>]+")  # what a name may be that has no marks around it


class _NoValueError(Exception):
    """What stands here is no value."""


@dataclass(frozen=True, slots=True)
class GemmaReader:
    """Reads calls.

    Attributes:
        opening, closing: around a call.
        quote: on both sides of a text.
        holds_any: whether values of any type may stand between quotes.
    """

    opening: str
    closing: str
    quote: str
    holds_any: bool = False

    def __call__(self, text: str, start: int, final: bool, functions: Functions) -> Block:
        """Return the block that begins at `start`; see `Reader`.

        The closing mark may be missing at the end of all, where the call itself is whole. Models
        leave out `call` now and then.
        """
        cursor = Cursor(text, start + len(self.opening), final)
        none = Block(cursor.at)
        cursor.skip_space()
        cursor.take("call")
        if not cursor.take(":"):
            return none
        cursor.skip_space()
        name = cursor.take(*functions)
        cursor.skip_space()
        if name is None or cursor.next() != "{":
            return none
        cursor.wait_for(self.closing)
        try:
            found = call(name, self._arguments(cursor, functions[name]), functions)
            cursor.skip_space()
            rest = text[cursor.at :]
            if final and self.closing.startswith(rest):
                cursor.at = len(text)
            elif not cursor.take(self.closing):
                found = None
        except _NoValueError:
            found = None
        except Incomplete as error:  # the mark that came is within a text
            raise cursor.goes_on(error, self.closing) from None
        return Block(cursor.at, (found,)) if found else replace(none, seen=cursor.seen)

    def _arguments(self, cursor: Cursor, parameters: Mapping[str, Any]) -> Any:
        """Go past the arguments of a call, which may be JSON, and return them."""
        begin = cursor.at
        cursor.take("{")
        cursor.skip_space()
        is_json = cursor.next() == '"'
        cursor.at = begin
        if is_json:
            return cursor.json()
        properties = parameters.get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        return self._members(cursor, schemas, parameters, 0)

    def _members(
        self, cursor: Cursor, schemas: Mapping[str, Any], root: Mapping[str, Any], depth: int
    ) -> dict[str, Any]:
        """Go past an object and return it.

        Args:
            cursor: before its bracket.
            schemas: of its members, by name.
            root: the parameters that they are a part of.
            depth: how many objects and lists it is in.
        """
        cursor.take("{")
        found: dict[str, Any] = {}
        while not self._ends(cursor, "}", is_first=not found):
            key = self._key(cursor)
            found[key] = self._value(cursor, types_of(schemas.get(key), root), depth)
        return found

    def _key(self, cursor: Cursor) -> str:
        """Go past the name of a member and the colon behind it, and return the name."""
        key = self._quoted(cursor)
        if key is not None:
            cursor.skip_space()
            if not cursor.take(":"):
                raise _NoValueError
            return key
        key = cursor.until(":")
        if key is None or not _BARE.fullmatch(key.strip()):
            raise _NoValueError
        return key.strip()

    def _value(self, cursor: Cursor, types: set[str], depth: int) -> Any:
        """Go past a value and return it."""
        if depth == MOST_NESTED:
            raise _NoValueError
        cursor.skip_space()
        text = self._quoted(cursor)
        if text is not None:
            if self.holds_any or (types and "string" not in types):
                return value_of(text, types)
            return text
        if cursor.next() == "{":
            return self._members(cursor, {}, {}, depth + 1)
        if cursor.take("["):
            items: list[Any] = []
            while not self._ends(cursor, "]", is_first=not items):
                items.append(self._value(cursor, set(), depth + 1))
            return items
        begin = cursor.at
        while (sign := cursor.next()) and sign not in _ENDS:
            if cursor.take(self.closing):
                raise _NoValueError
            cursor.at += 1
        bare = cursor.since(begin).strip()
        if not bare:
            raise _NoValueError
        return bare if types == TEXT else value_of(bare, types)

    def _quoted(self, cursor: Cursor) -> str | None:
        """Go past a text between quotes and return it; None: none stands here."""
        if not cursor.take(self.quote):
            return None
        text = cursor.until(self.quote)
        if text is None:
            raise _NoValueError
        return text

    def _ends(self, cursor: Cursor, bracket: str, *, is_first: bool) -> bool:
        """Go past a comma, or the bracket that ends a list or an object; returns whether it did."""
        cursor.skip_space()
        if cursor.take(bracket):
            return True
        if not is_first and not cursor.take(","):
            raise _NoValueError
        cursor.skip_space()
        return False


def _gemma(opening: str, closing: str, literals: Literals, name: str) -> ToolFormat:
    quote = literals.quote
    return ToolFormat(
        name,
        markers=(opening,),
        further=(closing, quote),
        read=GemmaReader(opening, closing, quote, literals.holds_any),
        written=Written(opening, closing, literals.call, between_blocks=""),
        literals=literals,
        ends_thought=(opening,),
        recognizes=lambda template: opening in template and quote in template,
    )


_CALL: Final = f"call:{NAME}{ARGUMENTS}"
GEMMA4 = _gemma(
    "<|tool_call>",
    "<tool_call|>",
    Literals(
        _CALL,
        {"boolean": ("true", "false"), "null": ("null", "None")},
        quote='<|"|>',
        is_sorted=True,
    ),
    "gemma4",
)
FUNCTION_GEMMA = _gemma(
    "<start_function_call>",
    "<end_function_call>",
    Literals(
        _CALL,
        {"boolean": ("true", "false", "True", "False"), "null": ("null", "None")},
        quote="<escape>",
        holds_any=True,
    ),
    "functiongemma",
)
