"""Calls in tags, an argument a tag: GLM 4.5, Seed-OSS, Qwen3-Coder.

    <tool_call>f                                   <seed:tool_call>
    <arg_key>a</arg_key>                           <function=f>
    <arg_value>1</arg_value>                       <parameter=a>1</parameter>
    </tool_call>                                   </function>
                                                   </seed:tool_call>

Qwen3-Coder's are Seed's, with `<tool_call>` and each value on lines of its own, and MiMo V2's are
those without such lines. A value is text where the function's parameters say so, and otherwise
JSON, or what Python writes for it, or text. What begins another argument ends a value, too.
Where parameters ask for what tags cannot hold, forced calls are JSON in the tags of a block.
Source: the models' chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from onnxport.serving.http.tool_formats.base import (
    BREAK,
    Block,
    Functions,
    Tagged,
    TaggedCall,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor, Incomplete
from onnxport.serving.http.tool_formats.json_calls import call, call_of
from onnxport.serving.http.tool_formats.sections import ends_behind
from onnxport.serving.http.tool_formats.tagged_values import (
    TEXT,
    TYPES,
    types_of,
    value_of,
    written_value,
)
from onnxport.serving.structured.schema import ANNOTATIONS

Arguments = list[tuple[str, Any]]  # names and values, in their order
NAME_IN_TAG: Final = r'[^<>"\n]+'
_TAG: Final = re.compile(r"</?\w+>")
_FLAT: Final = {"type", "properties", "required", "additionalProperties", *ANNOTATIONS}
TEXT_SCHEMA: Final = {"type": "string"}
_IN_PYTHON: Final = {"boolean": ("True", "False"), "null": ("None",)}


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of one format.

    Attributes:
        block: around a call.
        name: before the function's name and behind it; the second may be a space.
        key: around the name of an argument.
        value: around its value; the first may be empty.
        kind: around the type of its value, which may stand between both; empty: nowhere.
        end: of the function; empty: that of the block is.
        own_lines: whether a value stands on lines of its own.
        is_python: whether the template writes values as Python does.
        is_exact: whether no closing tag of a value is missing.
    """

    block: tuple[str, str]
    name: tuple[str, str]
    key: tuple[str, str]
    value: tuple[str, str]
    end: str = ""
    own_lines: bool = False
    is_python: bool = False
    is_exact: bool = False
    kind: tuple[str, str] = ("", "")

    def __call__(self, text: str, start: int, final: bool, functions: Functions) -> Block:
        """Return the block that begins at `start`; see `Reader`.

        Its closing tag may be missing, or cut, where the call itself is whole: where nothing else
        ends that, at the end of all alone. A call that has an end of its own needs no opening tag.
        """
        opening, closing = self.block
        cursor = Cursor(text, start, final)
        is_bare = cursor.take(*self.openings) != opening
        none = Block(cursor.at)
        cursor.at = start if is_bare else cursor.at
        cursor.skip_space()
        is_json = cursor.next() == "{"
        name = None if is_json else self._name(cursor, functions)
        if name is None and not is_json:
            return none
        closing = (name and self.end) or closing
        cursor.wait_for(closing)
        try:
            if name is None:
                found = call_of(cursor.json(), functions)
            else:
                found = call(name, self._arguments(cursor, functions[name]), functions)
        except Incomplete as error:  # the tag that came is within a value
            raise cursor.goes_on(error, closing) from None
        end = ends_behind(text, cursor.at, final, [self.block[1]])
        is_closed = end > cursor.at or (final and not text[cursor.at :].strip())
        if found is None or not (is_closed or closing == self.end):
            return replace(none, seen=cursor.seen)
        return Block(end, (found,))

    @property
    def openings(self) -> tuple[str, ...]:
        """What a block may begin with."""
        return (self.block[0], self.name[0]) if self.end else (self.block[0],)

    def written(self, name: str, parameters: Mapping[str, Any]) -> TaggedCall | None:
        """Return how a call of a function is written; None: parameters ask for more than tags can.

        They can hold properties that are there or not, in their order, each in JSON, of some texts,
        or any text.
        """
        arguments = arguments_of(parameters, self._argument)
        if arguments is None:
            return None
        before, behind = self.name
        return TaggedCall(f"{before}{name}{behind}{BREAK}", arguments, f"{BREAK}{self.end}")

    def _argument(self, name: str | None, schema: Any) -> Tagged | None:
        """Return how an argument is written; see `arguments_of`."""
        value = written_value(schema)
        if value == ():
            return None
        line = "\n" if self.own_lines else ""
        between = self.key[1] + (f"{BREAK}{self.value[0]}" if self.value[0] else line)
        tags = Tagged(self.key[0], between, f"{line}{self.value[1]}{BREAK}", name, value)
        return replace(tags, other=in_python(tags, schema)) if self.is_python else tags

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
        schemas = schemas_of(parameters)
        return arguments_before(
            cursor,
            set() if self.is_exact else set(schemas),
            lambda left: self._read_arguments(cursor, parameters, schemas, left),
        )

    def _read_arguments(
        self,
        cursor: Cursor,
        parameters: Mapping[str, Any],
        schemas: Mapping[str, Any],
        left: set[str],
    ) -> Arguments | None:
        """Go past the arguments, and the end of the function; see `arguments_before`."""
        found: Arguments = []
        begins = self._begins()
        while True:
            cursor.skip_space()
            ended = cursor.take(*filter(None, (self.end, self.block[1], self.key[0])))
            if ended is None:
                return None
            if ended != self.key[0]:
                cursor.at -= 0 if ended == self.end else len(ended)
                return found
            key = cursor.until(self.key[1])
            kind = self._kind(cursor)
            if self.value[0]:
                cursor.skip_space()
                if not cursor.take(self.value[0]):
                    return None
            if key is None:
                return None
            left.discard(key)
            types = types_of(schemas.get(key), parameters) or kind
            value = self._text(cursor, types, begins, left)
            if value is None:
                return None
            found.append((key, value_of(value, types)))

    def _kind(self, cursor: Cursor) -> set[str]:
        """Go past the type that stands before a value, and return it; empty: there is none."""
        opening, closing = self.kind
        if not opening:
            return set()
        cursor.skip_space()
        told = cursor.until(closing) if cursor.take(opening) else None
        return set() if told is None else {told.partition("[")[0].strip().lower()} & TYPES

    def _begins(self) -> re.Pattern[str]:
        """Return what begins an argument within a value; see `text_before`."""
        before, behind = map(re.escape, self.key)
        line = "\n" if self.own_lines else "\n?"
        value = rf"\s*{re.escape(self.value[0])}" if self.value[0] else ""
        if self.kind[0]:
            opening, closing = map(re.escape, self.kind)
            value = rf"(?:\s*{opening}[^<>]*{closing})?{value}"
        return re.compile(f"{line}{before}({NAME_IN_TAG}){behind}{value}")

    def _text(
        self, cursor: Cursor, types: set[str], begins: re.Pattern[str], left: Container[str]
    ) -> str | None:
        """Go past a value and its closing tag, and return it; see `text_before`."""
        text = text_before(cursor, self.value[1], types, begins, left)
        if text is None or not self.own_lines:
            return text
        return text.removeprefix("\n").removesuffix("\n")


def schemas_of(parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schemas of a function's parameters, by their names."""
    properties = parameters.get("properties")
    return properties if isinstance(properties, Mapping) else {}


def arguments_before(
    cursor: Cursor, names: set[str], read: Callable[[set[str]], Arguments | None]
) -> dict[str, Any] | None:
    """Go past arguments, with closing tags of values missing only where that makes a call.

    Where an argument would be given twice, what began it within a value is a part of that.

    Args:
        cursor: before the first of them.
        names: that may begin an argument within a value.
        read: goes past them. It takes the names that are left, and takes out those that it reads.

    Returns:
        None: they are none.
    """
    start = cursor.at
    pairs = read(set(names))
    if names and (pairs is None or len(dict(pairs)) < len(pairs)):
        cursor.at = start
        pairs = read(set())
    return None if pairs is None else dict(pairs)


def text_before(
    cursor: Cursor,
    closing: str,
    types: set[str],
    begins: re.Pattern[str] | None = None,
    names: Container[str] = (),
) -> str | None:
    """Go past a value and its closing tag, and return it; a tag in a text of JSON is none.

    Args:
        cursor: at the value.
        closing: its tag.
        types: that the value may have; see `types_of`.
        begins: an argument, with its name as a group; before other arguments models forget the
            tag now and then.
        names: of the others.

    Returns:
        None: it is not closed.
    """
    start = cursor.at
    cursor.skip_space()
    begin = cursor.at
    if types != TEXT and cursor.json() is not None:
        value = cursor.since(begin)
        cursor.skip_space()
        if cursor.take(closing):
            return value
    cursor.at = start
    text = cursor.until(closing)
    if text is None or begins is None or not names:
        return text
    begun = (each.start() for each in begins.finditer(text) if each[1] in names)
    end = next(begun, None)
    if end is None:
        return text
    cursor.at = start + end
    return text[:end]


def arguments_of(
    parameters: Mapping[str, Any], argument: Callable[[str | None, Any], Tagged | None]
) -> tuple[Tagged, ...] | None:
    """Return how arguments are written in tags; None: parameters ask for more than tags can.

    They can hold properties that are there or not, in their order.

    Args:
        parameters: the schema of the arguments.
        argument: returns how one of some name and schema is written; None: it cannot be. The name
            may be any, which is None, and is a text then.
    """
    if not parameters.keys() <= _FLAT:
        return None
    properties, required = parameters.get("properties") or {}, parameters.get("required") or ()
    additional = parameters.get("additionalProperties", True)
    if not isinstance(additional, bool) or not set(required) <= properties.keys():
        return None
    if not properties and additional:
        written = argument(None, TEXT_SCHEMA)
        return None if written is None else (replace(written, times="*"),)
    found: list[Tagged] = []
    for key, schema in properties.items():
        written = argument(key, schema)
        if written is None or re.search(r"[<>\"\s]", key):
            return None
        found.append(replace(written, times="" if key in required else "?"))
    return tuple(found)


def in_python(written: Tagged, schema: Any) -> Tagged | None:
    """Return an argument as Python writes its value; None: that is as it is written already."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    told = _IN_PYTHON.get(kind) if isinstance(kind, str) else None
    is_plain = told is not None and set(schema) <= {"type", *ANNOTATIONS}
    return replace(written, value=told) if is_plain else None


def _xml(name: str, tags: Tags, sign: str) -> ToolFormat:
    opening, closing = tags.block
    return ToolFormat(
        name,
        markers=tags.openings,
        further=(
            closing,
            *(one for one in (tags.end, *tags.key, *tags.value) if _TAG.fullmatch(one)),
        ),
        read=tags,
        written=Written(
            opening + (BREAK if tags.end else ""),
            (BREAK if tags.end else "") + closing,
            between_blocks=BREAK,
        ),
        tagged=tags.written,
        exact=replace(tags, is_exact=True),
        ends_thought=(opening,),  # as with vLLM
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
    Tags(SEED_CALL, FUNCTION, PARAMETER, ("", "</parameter>"), "</function>", is_python=True),
    SEED_CALL[0],
)
_SAME_LINE: Final = re.compile(  # as a template writes an argument
    r"""<parameter=['"]\s*[+~]\s*[\w.]+\s*[+~]\s*['"]>['"]\s*[+~]"""
)
_CODER: Final = Tags(
    TOOL_CALL, FUNCTION, PARAMETER, ("", "</parameter>"), "</function>", is_python=True
)
MIMO = replace(
    _xml("mimo", _CODER, ""),
    recognizes=lambda template: _SAME_LINE.search(template) is not None,
)
QWEN3_CODER = _xml("qwen3_coder", replace(_CODER, own_lines=True), "<function=")
