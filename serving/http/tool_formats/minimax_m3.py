"""Calls in tags behind `]<]minimax[>[`, whose names are those of arguments: MiniMax M3.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">]<]minimax[>[<a>1]<]minimax[>[</a>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

Objects and lists are tags within tags, the entries of lists in `<item>`; an argument that is null
is left out. What a value is, its schema says, and without one its tags. Each call is told as soon
as it is whole. Where parameters ask for what tags cannot hold, the arguments of forced calls are
JSON in the tags of the call. Source: the model's chat template.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    BREAK,
    NAME,
    Block,
    Functions,
    Nested,
    Tagged,
    TaggedCall,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor, Incomplete
from onnxport.serving.http.tool_formats.json_calls import call
from onnxport.serving.http.tool_formats.sections import ends_behind, open_call
from onnxport.serving.http.tool_formats.tagged_values import (
    referred,
    types_of,
    value_of,
    written_value,
)
from onnxport.serving.http.tool_formats.xml_calls import arguments_of
from onnxport.serving.structured.schema import ANNOTATIONS

SIGN: Final = "]<]minimax[>["
OPEN, CLOSE = f"{SIGN}<tool_call>", f"{SIGN}</tool_call>"
CALL: Final = (f'{SIGN}<invoke name="', '">', f"{SIGN}</invoke>")
ITEM: Final = "item"
MOST_DEPTH: Final = 128  # of tags within tags
_CONTAINERS: Final = {"object", "array"}

Entries = list[tuple[str, Any]]  # names of tags, and what is in them


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the call that begins at `start`, with what opens or closes all; see `Reader`."""
    before, behind, end = CALL
    cursor = Cursor(text, start, final)
    is_opened, opened = open_call(cursor, OPEN, before)
    name = cursor.take(*functions) if is_opened else None
    if name is None or not cursor.take(behind):
        return Block(opened)
    cursor.wait_for(end)
    try:
        found = call(name, _arguments(cursor, functions[name]), functions)
    except Incomplete as error:  # the tag that came is within a value
        raise cursor.goes_on(error, end) from None
    if found is None:
        return Block(opened, seen=cursor.seen)
    return Block(ends_behind(text, cursor.at, final, [CLOSE]), (found,))


def _arguments(cursor: Cursor, parameters: Mapping[str, Any]) -> Any:
    """Go past the arguments and the end of the call; None: they are none."""
    cursor.skip_space()
    if cursor.next() == "{":
        whole = cursor.json()
        cursor.skip_space()
        return whole if cursor.take(CALL[2]) else None
    entries = _entries(cursor, CALL[2].removeprefix(SIGN), parameters, parameters, 0)
    return None if entries is None else _object(entries)


def _entries(
    cursor: Cursor, end: str, schema: Any, root: Mapping[str, Any], depth: int
) -> Entries | None:
    """Go past tags up to `end`, and return what is in them; None: they are not whole."""
    found: Entries = []
    while True:
        cursor.skip_space()
        if depth > MOST_DEPTH or not cursor.take(SIGN):
            return None
        if cursor.take(end):
            return found
        name = cursor.until(">") if cursor.take("<") else None
        if not name or name.startswith("/"):
            return None
        value = _value(cursor, name, _inner(schema, name, root), root, depth)
        if value is None:
            return None
        found.append((name, value[0]))


def _value(
    cursor: Cursor, name: str, schema: Any, root: Mapping[str, Any], depth: int
) -> tuple[Any] | None:
    """Go past what is in a tag, and its end, and return it alone; None: it is not whole."""
    types, begin, end = types_of(schema, root), cursor.at, f"</{name}>"
    if types.isdisjoint(_CONTAINERS) and types:
        text = cursor.until(SIGN + end)
        return None if text is None else (value_of(text, types),)
    text = cursor.until(SIGN)
    if text is None:
        return None
    if cursor.take(end):
        empty = not text.strip() and "string" not in types and types & _CONTAINERS
        if empty:
            return ([] if "array" in types else {},)
        return (value_of(text, types),)
    cursor.at = begin
    entries = _entries(cursor, end, schema, root, depth + 1)
    if entries is None:
        return None
    is_list = "array" in types or (not types and all(key == ITEM for key, _ in entries))
    if is_list and ("object" not in types or all(key == ITEM for key, _ in entries)):
        return ([value for _, value in entries],)
    return (_object(entries),)


def _object(entries: Entries) -> dict[str, Any]:
    """Return an object of entries; those of one name are a list."""
    found: dict[str, list[Any]] = {}
    for name, value in entries:
        found.setdefault(name, []).append(value)
    return {name: each[0] if len(each) == 1 else each for name, each in found.items()}


def _inner(schema: Any, name: str, root: Mapping[str, Any]) -> Any:
    """Return the schema of what is in a tag within a value; None: there is none."""
    for each in _alternatives(schema, root):
        properties = each.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
        for key in ("items", "additionalProperties"):
            if isinstance(each.get(key), Mapping):
                return each[key]
    return None


def _alternatives(schema: Any, root: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield a schema, and those among which it has one choose."""
    one = referred(schema, root)
    if not isinstance(one, Mapping):
        return
    yield one
    for key in ("anyOf", "oneOf", "allOf"):
        for each in one.get(key) or () if isinstance(one.get(key), list) else ():
            other = referred(each, root)
            if isinstance(other, Mapping):
                yield other


def written(name: str, parameters: Mapping[str, Any]) -> TaggedCall | None:
    """Return how a call of a function is written; None: parameters ask for more than tags can."""
    arguments = arguments_of(parameters, _argument)
    if arguments is None:
        return None
    return TaggedCall(f"{CALL[0]}{name}{CALL[1]}", arguments, f"{CALL[2]}{BREAK}")


def _argument(name: str | None, schema: Any) -> Tagged | None:
    """Return how an argument is written; see `arguments_of`. Its name stands at both ends."""
    if not name or name.startswith("/"):  # any name, or one that makes no tag
        return None
    tags = Tagged(f"{SIGN}<", ">", f"{SIGN}</{name}>", name)
    types = types_of(schema, {})
    if types.isdisjoint(_CONTAINERS):
        value = written_value(schema)
        return None if value == () else replace(tags, value=value)
    asked = set(schema) - set(ANNOTATIONS)
    if schema.get("type") == "array" and asked <= {"type", "items"}:
        item = _argument(ITEM, schema.get("items"))
        return None if item is None else replace(tags, value=Nested((replace(item, times="*"),)))
    if schema.get("type") == "object":
        inner = arguments_of(schema, _argument)
        return None if inner is None else replace(tags, value=Nested(inner))
    return None


MINIMAX_M3 = ToolFormat(
    "minimax_m3",
    markers=(OPEN, CALL[0]),
    further=(SIGN, "<tool_call>", "</tool_call>"),
    read=read,
    written=Written(
        f"{OPEN}{BREAK}",
        CLOSE,
        f"{CALL[0]}{NAME}{CALL[1]}{ARGUMENTS}{CALL[2]}{BREAK}",
        between_calls="",
    ),
    tagged=written,
    ends_thought=(OPEN, CALL[0]),
    recognizes=lambda template: SIGN in template,
)
