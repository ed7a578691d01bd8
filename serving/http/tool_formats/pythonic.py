"""`[f(a=1), g(b="x")]`: Llama 3.2 and 4 with templates that ask for it, ToolACE.

The text is a list of calls as Python has them, with literals as arguments. Calls that are forced or
strict are written in JSON, which is read as well, where a function's name is none of Python's, or
its parameters ask for more than a grammar of Python's values says. Source: the models' chat
templates.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
from onnxport.serving.http.tool_formats.literal_rules import is_name
from onnxport.serving.http.tool_formats.nested_quotes import ARGUMENT, requoted

START, END = "<|python_start|>", "<|python_end|>"
_WORDS = {"true": True, "false": False, "null": None}  # JSON's, which models mix in
_ZEROS = r"(?<![\w.])0[0_]*(?=[1-9])"  # before a number, which Python does not take
_TEXT = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""


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
        if not calls and begin > start:  # quotes in its texts may hide where the list ends
            cursor.at = begin
            end = cursor.wait_for(self.closing)
            if end is not None:
                cursor.at = end
                calls = calls_in(cursor.since(begin), functions)
        if not calls:
            return replace(none, seen=cursor.seen)
        end = cursor.at
        cursor.skip_space()
        return Block(cursor.at if cursor.take(self.closing) else end, calls)


def calls_in(text: str | None, functions: Functions) -> tuple[ParsedCall, ...]:
    """Return the calls of a list as Python has it; none unless all are of offered functions.

    Its texts may have quotes of the same kind in them; see `nested_quotes`.
    """
    if text is None:
        return ()
    found = _parsed(text, functions)
    if found is None:
        mended = requoted(text, functions)
        found = None if mended is None else _parsed(mended, functions)
    return found or ()


def _parsed(text: str, functions: Functions) -> tuple[ParsedCall, ...] | None:
    """Return the calls of a list; see `calls_in`. None: it is not as Python has it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that speak of escapes that Python lacks
            mended, names = _mended(text, functions)
            found = ast.parse(mended, mode="eval").body
        calls = [_call(each, functions, names) for each in getattr(found, "elts", ())]
    except SyntaxError:
        return None
    except (ValueError, TypeError, RecursionError, MemoryError):
        return ()
    whole = tuple(each for each in calls if each is not None)
    return whole if len(whole) == len(calls) else ()


def _call(node: ast.expr, functions: Functions, names: Mapping[str, str]) -> ParsedCall | None:
    """Return the call that an expression is; arguments without a name are none.

    Args:
        node: the expression.
        functions: that were offered.
        names: see `_mended`.
    """
    if not isinstance(node, ast.Call) or node.args:
        return None
    arguments = {}
    for each in node.keywords:
        if each.arg is None:
            return None
        arguments[names.get(each.arg, each.arg)] = _value(each.value)
    name = ast.unparse(node.func)
    return call(names.get(name, name), arguments, functions)


def _to_mend(functions: Functions) -> re.Pattern[str]:
    """Return a pattern of texts, and of names that may be none of Python's."""
    odd = sorted((name for name in functions if not is_name(name)), key=len, reverse=True)
    called = rf"|(?:{'|'.join(map(re.escape, odd))})(?=\s*\()" if odd else ""
    name = rf"(?<![\w.-])(?P<name>{ARGUMENT}{called})"
    return re.compile(rf"{_TEXT}|(?P<zeros>{_ZEROS})|{name}", re.DOTALL)


def _mended(text: str, functions: Functions) -> tuple[str, dict[str, str]]:
    """Mend odd names and what else models write that Python does not take.

    That is zeros before a number, and in texts ends of lines and characters of code 0.

    Returns:
        The text, and what each name that it has in place of another one stands for.
    """
    names: dict[str, str] = {}
    mark = "_"
    while mark in text:
        mark += "_"

    def mended(found: re.Match[str]) -> str:
        name = found["name"]
        if found["zeros"]:
            return ""
        if not name:
            text = found[0].replace("\\\n", "").replace("\n", "\\n")
            return text.replace("\0", "\\x00")
        if is_name(name):
            return name
        names[f"{mark}{len(names)}"] = name
        return f"{mark}{len(names) - 1}"

    return _to_mend(functions).sub(mended, text), names


def _value(node: ast.expr) -> Any:
    """Return the value of a literal.

    Raises:
        ValueError: it is none.
    """
    match node:
        case ast.Name(id=word) if word in _WORDS:
            return _WORDS[word]
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
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
