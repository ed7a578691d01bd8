"""Calls in tags whose attributes are the names: DeepSeek V3.2 to V4.1, MiniMax M2, MiniCPM5, Step3.

Those of dots are MiniMax M2's in `<dots_function_call>`.

    <minimax:tool_call>                            <｜DSML｜function_calls>
    <invoke name="f">                              <｜DSML｜invoke name="f">
    <parameter name="a">1</parameter>              <｜DSML｜parameter name="a" string="false">1</…>
    </invoke>                                      </｜DSML｜invoke>
    </minimax:tool_call>                           </｜DSML｜function_calls>

    <function name="f"><param name="a">1</param></function>

Each call is told as soon as it is whole; the tags around all of them may be missing. DSML says of a
value whether it is text, or JSON; with the others the function's parameters do, as in `xml_calls`.
Step3's `<steptml:invoke name="f">` stands in special tokens. MiniCPM5 puts a text in CDATA where it
has a sign of XML or several lines. Where parameters ask for what tags cannot hold, the arguments of
forced calls are JSON in the tags of the call. Source: the models' chat templates, and what vLLM
reads of Step3, DeepSeek V4.1 and dots.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    BREAK,
    NAME,
    Block,
    Functions,
    Matched,
    Nested,
    Tagged,
    TaggedCall,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor, Incomplete, json_value
from onnxport.serving.http.tool_formats.json_calls import call, call_of
from onnxport.serving.http.tool_formats.sections import ends_behind, open_call
from onnxport.serving.http.tool_formats.tagged_values import TEXT, types_of, value_of, written_value
from onnxport.serving.http.tool_formats.xml_calls import (
    NAME_IN_TAG,
    Arguments,
    arguments_before,
    arguments_of,
    in_python,
    schemas_of,
    text_before,
)
from onnxport.serving.structured.schema import ANNOTATIONS

CDATA: Final = ("<![CDATA[", "]]>")
IS_TEXT, IS_JSON = ' string="true"', ' string="false"'
WRAPPERS: Final = ("arguments", "input", "properties")
NO_MARKUP: Final = Matched("[^<&\\n]")  # what of a text needs no CDATA


@dataclass(frozen=True, slots=True)
class Invokes:
    """The tags of one format.

    Attributes:
        block: around calls; empty: there are none.
        call: before the function's name, behind it, and at the end.
        parameter: before an argument's name, behind its value.
        says_type: whether an argument says whether it is text or JSON.
        has_cdata: whether texts may stand in CDATA; other values are as Python writes them.
        line: behind each tag, where the template ends a line.
        takes_json: whether a block may hold a call in JSON.
        is_exact: whether no closing tag of a value is missing.
    """

    block: tuple[str, str]
    call: tuple[str, str, str]
    parameter: tuple[str, str]
    says_type: bool = False
    has_cdata: bool = False
    line: str = BREAK
    is_exact: bool = False
    takes_json: bool = False

    def __call__(self, text: str, start: int, final: bool, functions: Functions) -> Block:
        """Return the call that begins at `start`, with what opens or closes all; see `Reader`."""
        before, behind, end = self.call
        cursor = Cursor(text, start, final)
        is_opened, opened = open_call(cursor, self.block[0], before)
        if self.takes_json and not is_opened and cursor.next() == "{":
            return self._in_json(text, cursor, final, functions)
        name = cursor.take(*functions) if is_opened else None
        if name is None or not cursor.take(behind):
            return Block(opened)
        cursor.wait_for(end)
        try:
            found = call(name, self._arguments(cursor, functions[name]), functions)
        except Incomplete as error:  # the tag that came is within a value
            raise cursor.goes_on(error, end) from None
        if found is None:
            return Block(opened, seen=cursor.seen)
        ends = filter(None, [self.block[1]])
        return Block(ends_behind(text, cursor.at, final, ends), (found,))

    def _in_json(self, text: str, cursor: Cursor, final: bool, functions: Functions) -> Block:
        """Return the call in JSON that stands in an opened block, with what closes that."""
        none = Block(cursor.at)
        found = call_of(cursor.json(), functions)
        if found is None:
            return replace(none, seen=cursor.seen)
        return Block(ends_behind(text, cursor.at, final, self.block[1:]), (found,))

    def _arguments(self, cursor: Cursor, parameters: Mapping[str, Any]) -> Any:
        """Go past the arguments, and the end of the call; None: they are none."""
        end, schemas = self.call[2], schemas_of(parameters)
        cursor.skip_space()
        if cursor.next() == "{":
            whole = cursor.json()
            cursor.skip_space()
            return whole if cursor.take(end) else None
        found = arguments_before(
            cursor,
            set() if self.is_exact else set(schemas),
            lambda left: self._read_arguments(cursor, parameters, schemas, left),
        )
        return None if found is None else self._unwrapped(found, schemas)

    def _read_arguments(
        self,
        cursor: Cursor,
        parameters: Mapping[str, Any],
        schemas: Mapping[str, Any],
        left: set[str],
    ) -> Arguments | None:
        """Go past the arguments, and the end of the call; see `arguments_before`."""
        end, opening = self.call[2], self.parameter[0]
        found: Arguments = []
        while True:
            cursor.skip_space()
            ended = cursor.take(*filter(None, (end, opening, self.block[1])))
            if ended != opening:
                cursor.at -= len(self.block[1]) if ended == self.block[1] and ended else 0
                return found if ended else None
            key, attributes = cursor.until('"'), cursor.until(">")
            if key is None or attributes is None:
                return None
            left.discard(key)
            types = types_of(schemas.get(key), parameters)
            value = self._value(cursor, attributes, types, left)
            if value is None:
                return None
            found.append((key, *value))

    def _unwrapped(self, found: dict[str, Any], schemas: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments; models put all of them into one at times, which nobody asked for."""
        if not (self.says_type or self.has_cdata) or len(found) != 1:
            return found
        [(name, inner)] = found.items()
        is_wrapper = name in WRAPPERS and name not in schemas
        if is_wrapper and isinstance(inner, str):
            inner = json_value(inner)
        return (
            inner
            if is_wrapper and isinstance(inner, dict) and inner.keys() <= schemas.keys()
            else found
        )

    def _value(
        self, cursor: Cursor, attributes: str, types: set[str], left: Container[str]
    ) -> tuple[Any] | None:
        """Go past a value and its closing tag, and return it alone; None: it is not closed.

        Args:
            cursor: at the value.
            attributes: that its tag has beside the name.
            types: that the value may have.
            left: the names of other arguments; see `text_before`.
        """
        closing = self.parameter[1]
        begins = re.compile(rf'\n?{re.escape(self.parameter[0])}({NAME_IN_TAG})"[^<>\n]*>')
        is_text = self.says_type and attributes == IS_TEXT
        if self.has_cdata:
            start = cursor.at
            cursor.skip_space()
            is_text = cursor.take(CDATA[0]) is not None
            cursor.at = cursor.at if is_text else start
        if is_text:
            end = (CDATA[1] if self.has_cdata else "") + closing
            left = () if self.has_cdata else left
            text = text_before(cursor, end, TEXT, begins, left)
            if text is None:
                return None
            return (text if not types or "string" in types else value_of(text, types),)
        is_json = self.says_type and types == TEXT
        text = text_before(cursor, closing, set() if is_json else types, begins, left)
        if text is None:
            return None
        value = value_of(text, set() if is_json else types)
        return (value if not is_json or isinstance(value, str) else text,)

    def written(self, name: str, parameters: Mapping[str, Any]) -> TaggedCall | None:
        """Return how a call of a function is written; None: parameters ask for more than tags can.

        They can hold properties that are there or not, in their order.
        """
        arguments = arguments_of(parameters, self._typed if self.says_type else self._argument)
        if arguments is None:
            return None
        opening, end = self._call_tags()
        return TaggedCall(opening.replace(NAME, name), arguments, end)

    def _call_tags(self) -> tuple[str, str]:
        """Return what is before and behind the arguments of a call, with a place for the name."""
        before, behind, end = self.call
        opening = before if self.block[0] else ""  # else it opens a block
        return f"{opening}{NAME}{behind}{self.line}", f"{self.line}{end}{self.line}"

    def _argument(self, name: str | None, schema: Any) -> Tagged | None:
        """Return how an argument is written; see `arguments_of`."""
        value = written_value(schema)
        if value == ():
            return None
        tags = Tagged(self.parameter[0], '">', f"{self.parameter[1]}{self.line}", name, value)
        if not self.has_cdata:
            return tags
        if value is not None:
            return replace(tags, other=in_python(tags, schema))
        # CDATA opens behind the tag, not as a part of it: no lexeme may begin as a longer one does.
        in_cdata = replace(tags, value=Nested((Tagged(CDATA[0], "", CDATA[1], name=""),)))
        return replace(tags, value=NO_MARKUP, other=in_cdata)

    def _typed(self, name: str | None, schema: Any) -> Tagged | None:
        """Return how an argument is written that says whether it is text; see `arguments_of`."""
        if not isinstance(schema, Mapping) or "$ref" in json.dumps(schema):
            return None
        closing = f"{self.parameter[1]}{self.line}"
        text = Tagged(self.parameter[0], f'"{IS_TEXT}>', closing, name)
        in_json = replace(text, between=f'"{IS_JSON}>', value=schema)
        if name is None:
            return replace(text, other=replace(in_json, value={}))
        if not set(schema) - set(ANNOTATIONS):
            return replace(text, other=in_json)
        types, value = types_of(schema, {}), written_value(schema)
        if value is None:
            return text if types == TEXT else replace(text, other=in_json)
        is_texts = isinstance(value, tuple) and value != ()
        return replace(text, value=value) if is_texts else in_json

    def format(self, name: str, signs: tuple[str, ...], tokens: tuple[str, ...] = ()) -> ToolFormat:
        """Return the format of these tags, of templates with all these signs.

        Args:
            name: of the format.
            signs: see above.
            tokens: that may be special ones, and that tags are made of.
        """
        opening, closing = self.block
        before, end = self._call_tags()
        return ToolFormat(
            name,
            markers=tuple(filter(None, (opening, self.call[0]))),
            further=(*filter(None, [closing, self.call[2], self.parameter[1]]), *tokens),
            read=self,
            written=Written(
                f"{opening}{self.line}" if opening else self.call[0],
                closing,
                f"{before}{ARGUMENTS}{end}",
                between_calls="" if opening else None,
                between_blocks=None if opening else BREAK,
            ),
            tagged=self.written,
            exact=replace(self, is_exact=True),
            ends_thought=tuple(filter(None, [opening, self.call[0] if self.says_type else ""])),
            recognizes=lambda template: all(sign in template for sign in signs),
        )


def _dsml(block: str, space: str = "") -> Invokes:
    mark = f"{DSML}{space}"
    return Invokes(
        (f"<{mark}{block}>", f"</{mark}{block}>"),
        (f'<{mark}invoke name="', '">', f"</{mark}invoke>"),
        (f'<{mark}parameter name="', f"</{mark}parameter>"),
        says_type=True,
    )


DSML: Final = "｜DSML｜"
DEEPSEEK_V32 = _dsml("function_calls").format("deepseek_v32", (DSML, "function_calls>"))
DEEPSEEK_V4 = _dsml("tool_calls").format("deepseek_v4", (DSML, "tool_calls>"))
DEEPSEEK_V41 = _dsml("calls", " ").format("deepseek_v41", (f"{DSML} ",))
STEP3_CALL: Final = ("<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>")
STEP3 = Invokes(
    ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    (
        f'{STEP3_CALL[0]}function{STEP3_CALL[1]}<steptml:invoke name="',
        '">',
        f"</steptml:invoke>{STEP3_CALL[2]}",
    ),
    ('<steptml:parameter name="', "</steptml:parameter>"),
    line="",
).format("step3", ("<steptml:invoke",), STEP3_CALL)
MINIMAX_M2 = Invokes(
    ("<minimax:tool_call>", "</minimax:tool_call>"),
    ('<invoke name="', '">', "</invoke>"),
    ('<parameter name="', "</parameter>"),
).format("minimax_m2", ("<minimax:tool_call>",))
DOTS = Invokes(
    ("<dots_function_call>", "</dots_function_call>"),
    ('<invoke name="', '">', "</invoke>"),
    ('<parameter name="', "</parameter>"),
    takes_json=True,
).format("dots", ("<dots_function_call>",))
MINICPM5 = Invokes(
    ("", ""),
    ('<function name="', '">', "</function>"),
    ('<param name="', "</param>"),
    has_cdata=True,
    line="",
).format("minicpm5", ('<function name="', CDATA[0]))
