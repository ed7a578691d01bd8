"""Calls in tags, an argument a tag: GLM 4.5, Seed-OSS, Qwen3-Coder.

    <tool_call>f                                   <seed:tool_call>
    <arg_key>a</arg_key>                           <function=f>
    <arg_value>1</arg_value>                       <parameter=a>1</parameter>
    </tool_call>                                   </function>
                                                   </seed:tool_call>

Qwen3-Coder's are Seed's, with `<tool_call>` and each value on lines of its own. A value is text
where the function's parameters say so, and otherwise JSON, or what Python writes for it, or text.
Source: the models' chat templates.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onnxport.serving.http.tool_formats.base import Block, Functions, ToolFormat, Written
from onnxport.serving.http.tool_formats.cursor import Cursor, json_value
from onnxport.serving.http.tool_formats.json_calls import call, call_of


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of one format.

    Attributes:
        block: around a call.
        name: before the function's name and behind it; the second may be a space.
        key: around the name of an argument.
        value: around its value; the first may be empty.
        end: of the function; empty: that of the block is.
        own_lines: whether a value stands on lines of its own.
    """

    block: tuple[str, str]
    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""
    own_lines: bool = False

    def __call__(self, text: str, start: int, final: bool, functions: Functions) -> Block:
        """Return the block that begins at `start`; see `Reader`."""
        opening, closing = self.block
        cursor = Cursor(text, start + len(opening), final)
        none = Block(cursor.at)
        cursor.skip_space()
        if cursor.next() == "{":
            found = call_of(cursor.json(), functions)
        else:
            name = self._name(cursor, functions)
            arguments = None if name is None else self._arguments(cursor, functions[name])
            found = None if name is None else call(name, arguments, functions)
        cursor.skip_space()
        return Block(cursor.at, (found,)) if found and cursor.take(closing) else none

    def _name(self, cursor: Cursor, functions: Functions) -> str | None:
        """Go past the name of an offered function; None: it is none."""
        before, behind = self.name
        if before and not cursor.take(before):
            return None
        name = cursor.take(*functions)
        if behind and not cursor.take(behind):
            return None
        return name

    def _arguments(self, cursor: Cursor, parameters: Mapping[str, Any]) -> dict[str, Any] | None:
        """Go past the arguments, and the end of the function; None: they are none."""
        properties = parameters.get("properties")
        types = properties if isinstance(properties, Mapping) else {}
        found: dict[str, Any] = {}
        while True:
            cursor.skip_space()
            ended = cursor.take(self.end or self.block[1], self.key[0])
            if ended is None:
                return None
            if ended != self.key[0]:
                cursor.at -= 0 if self.end else len(ended)
                return found
            key = cursor.until(self.key[1])
            if self.value[0]:
                cursor.skip_space()
                if not cursor.take(self.value[0]):
                    return None
            value = cursor.until(self.value[1])
            if key is None or value is None:
                return None
            found[key] = _value(self._trimmed(value), types.get(key))

    def _trimmed(self, value: str) -> str:
        return value.removeprefix("\n").removesuffix("\n") if self.own_lines else value


def _value(text: str, schema: Any) -> Any:
    """Return the value of an argument, by the type that its schema names."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    value = json_value(text.strip())
    if value is not None or text.strip() == "null":
        return value
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text


def _xml(name: str, tags: Tags, sign: str) -> ToolFormat:
    opening, closing = tags.block
    return ToolFormat(
        name,
        markers=(opening,),
        further=(closing, *filter(None, (*tags.key, *tags.value))),
        read=tags,
        written=Written(f"{opening}\n", f"\n{closing}", between_blocks="\n"),
        recognizes=lambda template: sign in template,
    )


TOOL_CALL = ("<tool_call>", "</tool_call>")
SEED_CALL = ("<seed:tool_call>", "</seed:tool_call>")
FUNCTION, PARAMETER = ("<function=", ">"), ("<parameter=", ">")

GLM45 = _xml(
    "glm45",
    Tags(TOOL_CALL, ("", ""), ("<arg_key>", "</arg_key>"), ("<arg_value>", "</arg_value>")),
    "<arg_key>",
)
SEED_OSS = _xml(
    "seed_oss",
    Tags(SEED_CALL, FUNCTION, PARAMETER, ("", "</parameter>"), "</function>", own_lines=True),
    SEED_CALL[0],
)
QWEN3_CODER = _xml(
    "qwen3_coder",
    Tags(TOOL_CALL, FUNCTION, PARAMETER, ("", "</parameter>"), "</function>", own_lines=True),
    "<function=",
)
