"""Forced calls whose arguments are values in a language of their own: Gemma's and Python's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.base import ToolFormat
from onnxport.serving.http.tool_formats.forced import calls
from onnxport.serving.http.tool_formats.gemma import FUNCTION_GEMMA, GEMMA4
from onnxport.serving.http.tool_formats.lfm2 import LFM2
from onnxport.serving.http.tool_formats.pythonic import PYTHONIC
from tests.serving.structured import accepts, assert_valid, compiled, write

SYNTAXES = [GEMMA4, FUNCTION_GEMMA, PYTHONIC, LFM2]
every_syntax = pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda each: each.name)
TREE = {
    "type": "object",
    "properties": {
        "n": {"type": "integer"},
        "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    },
    "required": ["n"],
    "additionalProperties": False,
}
PROPERTIES: dict[str, Any] = {
    "short": {"type": "string", "minLength": 1, "maxLength": 3},
    "size": {"type": "integer", "minimum": -5, "maximum": 70},
    "kind": {"enum": ["x y", "it's", "", 1, None, True]},
    "one": {"const": "a, b"},
    "some": {"anyOf": [{"type": "boolean"}, {"type": ["number", "null"]}]},
    "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    "none": {"type": "array", "maxItems": 0},
    "tree": {"$ref": "#/$defs/tree"},
    "loose": {},
    "any": {"type": "object"},
}


def tool(name: str, properties: dict[str, Any], *required: str) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
        "$defs": {"tree": TREE},
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def parse(syntax: ToolFormat, tools: list[dict[str, Any]], text: str) -> list[tuple[str, Any]]:
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in tools}
    parsed = ToolCallParser(schemas, syntax).take(text, is_last=True)
    assert parsed.content == "", text
    for each in parsed.calls:
        assert_valid(schemas[each.name], each.arguments)
    return [(each.name, json.loads(each.arguments)) for each in parsed.calls]


@every_syntax
@pytest.mark.parametrize("name", PROPERTIES)
def test_what_a_random_model_is_forced_to_write_is_valid(syntax: ToolFormat, name: str) -> None:
    tools = [tool("f", {name: PROPERTIES[name], "b": {"type": "boolean"}}, name)]
    form = compiled(calls(tools, syntax, several=False))
    texts = [text for seed in range(4) if (text := write(form.sequence(3), seed)) is not None]
    assert texts
    for text in texts:
        [(_, arguments)] = parse(syntax, tools, text)
        assert name in arguments
        assert not text.startswith(f'{syntax.written.opening}{{"name"')


@pytest.mark.parametrize(
    ("syntax", "text", "allowed"),
    [
        (GEMMA4, '<|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>', True),
        (GEMMA4, '<|tool_call>call:f{b:<|"|>x<|"|>,a:1}<tool_call|>', False),  # another order
        (GEMMA4, "<|tool_call>call:f{a:1}<tool_call|>", True),
        (GEMMA4, "<|tool_call>call:f{}<tool_call|>", False),
        (GEMMA4, '<|tool_call>call:f{a:<|"|>1<|"|>}<tool_call|>', False),
        (GEMMA4, '<|tool_call>call:f{"a": 1}<tool_call|>', False),
        (
            FUNCTION_GEMMA,
            "<start_function_call>call:f{a:<escape>1<escape>}<end_function_call>",
            True,
        ),
        (
            FUNCTION_GEMMA,
            "<start_function_call>call:f{a:<escape>x<escape>}<end_function_call>",
            False,
        ),
        (PYTHONIC, "[f(b='x', a=1)]", True),
        (PYTHONIC, '[f(b="x",a=1)]', True),
        (PYTHONIC, "<|python_start|>[f(a=1)]", True),
        (PYTHONIC, "[f(a=1, b='x')]", False),
        (PYTHONIC, "[f(a='1')]", False),
        (PYTHONIC, "[f(a=1, c=2)]", False),
        (PYTHONIC, '[{"name": "f", "arguments": {"a": 1}}]', False),
        (LFM2, '<|tool_call_start|>[f(b="x", a=1)]<|tool_call_end|>', True),
        (LFM2, "<|tool_call_start|>[f(b=x, a=1)]<|tool_call_end|>", False),
    ],
)
def test_what_is_forced(syntax: ToolFormat, text: str, allowed: bool) -> None:
    tools = [tool("f", {"b": {"type": "string"}, "a": {"type": "integer"}}, "a")]
    assert accepts(compiled(calls(tools, syntax, several=False)), text) == allowed


@every_syntax
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^[ab]+$"},
        {"enum": [[1], [2]]},
        {"type": "object", "additionalProperties": {"type": "integer"}},
        {
            **{"type": "object", "properties": {"ü": {"type": "null"}}},
            **{"patternProperties": {"x": {}}, "additionalProperties": True},
        },
    ],
)
def test_what_asks_for_more_than_such_values_say_is_json(
    syntax: ToolFormat, schema: dict[str, Any]
) -> None:
    tools = [tool("f", {"a": schema}, "a"), tool("g", {"a": {"type": "integer"}})]
    form = compiled(calls(tools, syntax, several=True))
    text = write(form.sequence(3), 1)
    assert text is not None
    assert parse(syntax, tools, text)
    python = syntax in (PYTHONIC, LFM2)
    call = '[{"name": "g", "arguments": {"a": 1}}]' if python else None
    if call is not None:  # calls of a list are of one kind
        opening, closing = syntax.written.opening, syntax.written.closing
        assert accepts(form, f"{opening[:-1]}{call}{closing[1:]}")
        assert not accepts(form, f"{opening}g(a=1){closing}")


def test_functions_that_python_cannot_name_are_called_in_json() -> None:
    tools = [tool("get-it", {"a": {"type": "integer"}}, "a")]
    form = compiled(calls(tools, PYTHONIC, several=False))
    assert accepts(form, '[{"name": "get-it", "arguments": {"a": 1}}]')
    tools = [tool("it.get", {"class": {"type": "integer"}}, "class")]
    form = compiled(calls(tools, PYTHONIC, several=False))
    assert accepts(form, "[it.get(class=1)]")
    assert parse(PYTHONIC, tools, "[it.get(class=1)]") == [("it.get", {"class": 1})]
