"""Calls in sections of special tokens, an argument a section that says its type: Kimi K3.

    <|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>
    <|open|>argument key="a" type="number"<|sep|>1<|close|>argument<|sep|>
    <|close|>call<|sep|><|close|>tools<|sep|>

All on one line. Each call is told as soon as it is whole; what is around all of them may be
missing. A call may have its arguments as JSON in a section `json`, as those that are forced have
where parameters ask for what sections cannot hold. Source: the model's chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    ID,
    NAME,
    Block,
    Functions,
    Matched,
    Tagged,
    TaggedCall,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor, Incomplete
from onnxport.serving.http.tool_formats.json_calls import call
from onnxport.serving.http.tool_formats.sections import ends_behind, open_call
from onnxport.serving.http.tool_formats.tagged_values import TEXT, types_of, value_of, written_value
from onnxport.serving.http.tool_formats.xml_calls import (
    arguments_of,
    schemas_of,
    text_before,
)
from onnxport.serving.structured.schema import ANNOTATIONS

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
SECTION: Final = (f"{OPEN}tools{SEP}", f"{CLOSE}tools{SEP}")
CALL: Final = (f'{OPEN}call tool="', f"{CLOSE}call{SEP}")
ARGUMENT: Final = (f'{OPEN}argument key="', f"{CLOSE}argument{SEP}")
JSON: Final = (f'{OPEN}json type="object"{SEP}', f"{CLOSE}json{SEP}")
IS_TEXT: Final = ' type="string"'
KINDS: Final = ("string", "number", "boolean", "null", "object", "array")  # that arguments say
_ESCAPES: Final = (("&", "&amp;"), ('"', "&quot;"))  # of attributes, in this order


def read(text: str, start: int, final: bool, functions: Functions) -> Block:
    """Return the call that begins at `start`, with what opens or closes all; see `Reader`."""
    cursor = Cursor(text, start, final)
    is_opened, behind = open_call(cursor, SECTION[0], CALL[0])
    if not is_opened:
        return Block(behind)
    names = {f'{_escaped(name)}"': name for name in functions}
    name = names.get(cursor.take(*names) or "")
    if name is None:
        return Block(behind)
    cursor.wait_for(CALL[1])
    try:
        found = call(name, _arguments(cursor, functions[name]), functions)
    except Incomplete as error:  # the end that came is within a value
        raise cursor.goes_on(error, CALL[1]) from None
    if found is None:
        return Block(behind, seen=cursor.seen)
    return Block(ends_behind(text, cursor.at, final, [SECTION[1]]), (found,))


def _arguments(cursor: Cursor, parameters: Mapping[str, Any]) -> Any:
    """Go past the index, the arguments and the end of the call; None: they are none."""
    if cursor.until(SEP) is None:
        return None
    schemas = schemas_of(parameters)
    found: dict[str, Any] = {}
    while True:
        cursor.skip_space()
        opened = cursor.take(JSON[0], ARGUMENT[0], CALL[1])
        if opened == JSON[0] and not found:
            found = cursor.json()
            cursor.skip_space()
            if not isinstance(found, dict) or not cursor.take(JSON[1]):
                return None
            continue
        if opened != ARGUMENT[0]:
            return found if opened == CALL[1] else None
        name, attributes = cursor.until('"'), cursor.until(SEP)
        if name is None or attributes is None:
            return None
        name = _unescaped(name)
        is_text, types = attributes == IS_TEXT, types_of(schemas.get(name), parameters)
        told = cursor.until(ARGUMENT[1]) if is_text else text_before(cursor, ARGUMENT[1], set())
        if told is None:
            return None
        is_kept = is_text and (not types or "string" in types)
        found[name] = told if is_kept else value_of(told, types - TEXT)


def _escaped(text: str) -> str:
    """Return a text as attributes have it."""
    for sign, escape in _ESCAPES:
        text = text.replace(sign, escape)
    return text


def _unescaped(text: str) -> str:
    """Return the text that attributes have so."""
    for sign, escape in reversed(_ESCAPES):
        text = text.replace(escape, sign)
    return text


def written(name: str, parameters: Mapping[str, Any]) -> TaggedCall | None:
    """Return how a call of a function is written; None: parameters ask for more than it can say."""
    arguments = arguments_of(parameters, _argument)
    if arguments is None:
        return None
    index = Tagged(' index="', "", f'"{SEP}', name="", value=Matched("[0-9]"))
    return TaggedCall(f'{CALL[0]}{_escaped(name)}"', (index, *arguments), CALL[1])


def _argument(name: str | None, schema: Any) -> Tagged | None:
    """Return how an argument is written, in as many ways as it has types; see `arguments_of`."""
    ways = list(_ways(schema if name is not None else {}))
    found: Tagged | None = None
    for way in ways:
        if way is None:
            return None
        kind, value = way
        between = f'" type="{kind}"{SEP}'
        known = None if name is None else _escaped(name)
        found = Tagged(ARGUMENT[0], between, ARGUMENT[1], known, value, other=found)
    return found


def _ways(schema: Any) -> Iterator[tuple[str, Any] | None]:
    """Yield the types that a value may have, and what it may be then; None: it cannot be said."""
    if not isinstance(schema, Mapping) or "$ref" in json.dumps(schema):
        yield None
        return
    asked = set(schema) - set(ANNOTATIONS)
    if not asked:
        yield from ((kind, None if kind == "string" else {"type": kind}) for kind in KINDS)
    elif len(asked) == 1 and asked <= {"anyOf", "oneOf"}:
        for each in schema[asked.pop()]:
            yield from _ways(each)
    elif isinstance(schema.get("type"), list):
        for kind in schema["type"]:
            yield from _ways({**schema, "type": kind})
    else:
        types, value = types_of(schema, {}), written_value(schema)
        kind = "".join(types).replace("integer", "number") if len(types) == 1 else ""
        yield None if value == () or not kind else (kind, value)


KIMI_K3 = ToolFormat(
    "kimi_k3",
    markers=(SECTION[0], CALL[0]),
    further=(OPEN, CLOSE, SEP),
    read=read,
    written=Written(
        *SECTION,
        f'{CALL[0]}{NAME}" index="{ID}"{SEP}{JSON[0]}{ARGUMENTS}{JSON[1]}{CALL[1]}',
        between_calls="",
    ),
    tagged=written,
    ends_thought=SECTION[:1],
    recognizes=lambda template: OPEN in template and "open_tag('tools')" in template,
)
