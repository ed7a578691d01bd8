"""`[f(a=1), g(b="x")]`: Llama 3.2 and 4 with templates that ask for it, ToolACE.

The text is a list of calls as Python has them, with literals as arguments. Calls that are forced or
strict are written in JSON, which is read as well, where a function's name is none of Python's, or
its parameters ask for more than a grammar of Python's values says. Source: the models' chat
templates.
"""

from __future__ import annotations

import ast
import keyword
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

from onnxport.serving.http.tool_formats.base import (
    PYTHON_LITERALS,
    Block,
    Functions,
    ParsedCall,
    ToolFormat,
    Written,
)
from onnxport.serving.http.tool_formats.cursor import Cursor
from onnxport.serving.http.tool_formats.json_calls import JsonReader, call

START, END = "<|python_start|>", "<|python_end|>"
_WORDS = {"true": True, "false": False, "null": None}  # JSON's, which models mix in
_MARK = "_argument_"  # of a name that is a word of Python's own
_TO_MEND = re.compile(
    r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?P<name>\b[a-z]+\b(?=\s*=(?!=)))""", re.DOTALL
)


@dataclass(frozen=True, slots=True)
class PythonicReader:
    """Reads a list of calls, or calls in JSON, with a marker around it or without one.

    Attributes:
        opening: the marker that a block may begin with.
        closing: that it may end with.
    """

    opening: str
    closing: str
    _read_json: JsonReader = field(init=False)

    def __post_init__(self) -> None:
        """Read JSON between the same markers."""
        object.__setattr__(self, "_read_json", JsonReader((self.opening,), closing=self.closing))

    def __call__(self, text: str, start: int, final: bool, functions: Functions) -> Block:
        """Return the block that begins at `start`; see `Reader`."""
        cursor = Cursor(text, start, final)
        cursor.take(self.opening)
        none = Block(max(cursor.at, start + 1))
        cursor.skip_space()
        begin = cursor.at
        if begin > start and cursor.next() == "{":
            return self._read_json(text, start, final, functions)
        if not cursor.take("["):
            return none
        cursor.skip_space()
        if cursor.next() == "{":
            return self._read_json(text, start, final, functions)
        if cursor.take(*functions) is None:
            return none
        cursor.at = begin
        calls = calls_in(cursor.brackets(python=True), functions)
        if not calls:
            return none
        end = cursor.at
        cursor.skip_space()
        return Block(cursor.at if cursor.take(self.closing) else end, calls)


def calls_in(text: str | None, functions: Functions) -> tuple[ParsedCall, ...]:
    """Return the calls of a list as Python has it; none unless all are of offered functions."""
    if text is None:
        return ()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # of escapes that Python lacks
            found = ast.parse(_TO_MEND.sub(_mended, text), mode="eval").body
        calls = [_call(each, functions) for each in getattr(found, "elts", ())]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return ()
    whole = tuple(each for each in calls if each is not None)
    return whole if len(whole) == len(calls) else ()


def _call(node: ast.expr, functions: Functions) -> ParsedCall | None:
    """Return the call that an expression is; arguments without a name are none."""
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {}
    for each in node.keywords:
        if each.arg is None:
            return None
        arguments[each.arg.removeprefix(_MARK)] = _value(each.value)
    return call(ast.unparse(node.func), arguments, functions)


def _mended(found: re.Match[str]) -> str:
    """Return what Python takes for what it does not: its own words as names, ends of lines."""
    if found["name"]:
        return f"{_MARK}{found[0]}" if keyword.iskeyword(found[0]) else found[0]
    return found[0].replace("\\\n", "").replace("\n", "\\n")


def _value(node: ast.expr) -> Any:
    """Return the value of a literal.

    Raises:
        ValueError: it is none.
    """
    match node:
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(each) for each in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(each) for key, each in zip(keys, values, strict=True)}
    return ast.literal_eval(node)


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("a name of a member is no text")


PYTHONIC = ToolFormat(
    "pythonic",
    markers=(START,),
    begins=lambda functions: ("[",),
    goes_on=("[",),
    further=(END,),
    read=PythonicReader(START, END),
    written=Written("[", "]", between_calls=", ", optional_marker=START),
    literals=PYTHON_LITERALS,
    recognizes=lambda template: "[func_name1(" in template,
)
