"""Calls of which each piece says little, and functions with names that a language cannot have."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    BREAK,
    ID,
    NAME,
    QUOTED,
    Functions,
    ToolFormat,
)
from onnxport.serving.http.tool_formats.base import Block as Found
from onnxport.serving.http.tool_formats.forced import calls as forms_of
from onnxport.serving.http.tool_formats.kimi_k2 import KIMI_K2
from onnxport.serving.http.tool_formats.lfm2 import LFM2
from onnxport.serving.http.tool_formats.llama3_json import LLAMA3_JSON
from onnxport.serving.http.tool_formats.mistral import MISTRAL_ID
from onnxport.serving.http.tool_formats.pythonic import PYTHONIC
from onnxport.serving.http.tool_formats.registry import FORMATS
from onnxport.serving.http.tool_formats.tagged_values import value_of
from tests.serving.structured import compiled, write

PLACES = {NAME: "f", QUOTED: '"f"', ID: "123456789", ARGUMENTS: '{"a": "x"}', BREAK: "\n"}


def calls_of(syntax: ToolFormat, functions: Functions, *pieces: str) -> list[Any]:
    parser = ToolCallParser(functions, syntax)
    found = [call for piece in pieces for call in parser.feed(piece).calls]
    return [(call.name, call.arguments) for call in [*found, *parser.finish().calls]]


def block(syntax: ToolFormat) -> str:
    """Return a call as it may be forced, without the end of its block."""
    text = syntax.written.opening + syntax.written.call
    for place, told in PLACES.items():
        text = text.replace(place, told)
    return text


@pytest.mark.parametrize("syntax", FORMATS, ids=lambda each: each.name)
def test_space_behind_a_call_does_not_have_it_read_anew(syntax: ToolFormat) -> None:
    reads = 0

    def read(text: str, start: int, final: bool, functions: Functions) -> Found:
        nonlocal reads
        reads += 1
        return syntax.read(text, start, final, functions)

    counted = replace(syntax, read=read)
    assert calls_of(counted, {"f": {}}, block(syntax), *" \n" * 100) == [("f", '{"a": "x"}')]
    assert reads < 10


def test_an_id_may_have_many_characters() -> None:
    for syntax, before, behind in (
        (KIMI_K2, "<|tool_call_begin|>f:", "<|tool_call_argument_begin|>{}"),
        (MISTRAL_ID, "[TOOL_CALLS]f[CALL_ID]", "[ARGS]{}"),
    ):
        assert calls_of(syntax, {"f": {}}, before, *"12" * 2000, behind) == [("f", "{}")]
    assert (
        calls_of(KIMI_K2, {"f": {}}, *"<|tool_call_begin|>f:<|tool_call_argument_begin|>{}") == []
    )


ODD: Functions = {"get-weather": {}, "weather": {}, "a.b/c": {}, "import": {}, "7z": {}, "_": {}}


@pytest.mark.parametrize("name", ODD)
def test_functions_are_called_whatever_python_thinks_of_their_names(name: str) -> None:
    told = [
        (name, '{"a": "weather(b=1), get-weather(c=2)"}'),
        ("weather", '{"x-y": 1, "class": {}}'),
    ]
    values = "'weather(b=1), get-weather(c=2)'"
    for syntax, text in (
        (PYTHONIC, f"[{name}(a={values}), weather(x-y=1, class={{}})]"),
        (LFM2, f"<|tool_call_start|>[{name}(a={values}), weather(x-y=1, class={{}})]"),
    ):
        assert calls_of(syntax, ODD, text) == calls_of(syntax, ODD, *text) == told
    assert calls_of(LLAMA3_JSON, ODD, f"<|python_tag|>{name}.call(a=1)") == [(name, '{"a": 1}')]


def test_another_function_is_not_called_for_one_of_an_odd_name() -> None:
    for text in (
        "[a-weather(a=1)]",
        "[weather(a=get-weather(b=1))]",
        "[__0(a=1), get-weather(a=1)]",
    ):
        assert calls_of(PYTHONIC, ODD, text) == []


@pytest.mark.parametrize("syntax", FORMATS, ids=lambda each: each.name)
@pytest.mark.parametrize(
    "name", ["", "/x", 'q"x', "<y>", "a b", "a&quot;b", "{c}", "größe", "item"]
)
def test_forced_arguments_are_read_whatever_they_are_called(syntax: ToolFormat, name: str) -> None:
    schema = {
        "type": "object",
        "properties": {name: {"type": "boolean"}},
        "required": [name],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    form = compiled(forms_of(tools, syntax, several=False))
    text = next(filter(None, (write(form.sequence(3), seed) for seed in range(9))))
    [(_, arguments)] = calls_of(syntax, {"f": schema}, text)
    assert json.loads(arguments).keys() == {name}, text


def test_escapes_that_python_lacks_are_no_warning() -> None:
    assert value_of(r"'\d'", set()) == r"\d"
    assert calls_of(PYTHONIC, {"f": {}}, r"[f(a='\d')]") == [("f", r'{"a": "\\d"}')]
