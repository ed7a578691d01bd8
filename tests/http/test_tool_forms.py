"""Calls that are forced or strict have the model's own format, whatever the model would write."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken

from onnxport.errors import RequestError
from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.base import BREAK, ID, TaggedCall, ToolFormat
from onnxport.serving.http.tool_formats.forced import calls
from onnxport.serving.http.tool_formats.functionary import FUNCTIONARY_MESSAGE
from onnxport.serving.http.tool_formats.glm4 import GLM4
from onnxport.serving.http.tool_formats.hermes import HERMES
from onnxport.serving.http.tool_formats.llama3_json import LLAMA3_JSON
from onnxport.serving.http.tool_formats.muse import MUSE
from onnxport.serving.http.tool_formats.registry import FORMATS
from onnxport.serving.http.tool_formats.xml_calls import GLM45, QWEN3_CODER, SEED_OSS
from onnxport.serving.structured.compiler import CompileLimits, compile_grammar
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.structured.vocabulary import Vocabulary
from onnxport.serving.thoughts import Thought
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.structured import accepts as accepts_text
from tests.serving.structured import assert_valid, compiled, ids_of, write
from tests.serving.tokenizers_for_tests import EOS, byte_level
from tests.tiers import crossed

THOUGHT = Thought(("<think>",), ("</think>",))
NAMES = [f"{number}-{each.name}" for number, each in enumerate(FORMATS)]
every_format = pytest.mark.parametrize("syntax", FORMATS, ids=NAMES)
every_plain_format = pytest.mark.parametrize(  # of the others test_harmony_forms.py tells
    "syntax", [each for each in FORMATS if not each.has_channels], ids=lambda each: each.name
)


def tool(name: str, strict: bool | None = None, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    told = {"name": name, "parameters": parameters, "strict": strict}
    return {"type": "function", "function": told}


ADD = tool("add", True, a={"type": "integer"}, kind={"enum": ["x", "y"]})
FIND = tool("find it! (größe) [ARGS] {1}", True, text={"type": "string", "maxLength": 12})
TOOLS = [ADD, FIND]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}


@cache
def special_vocabulary(*texts: str) -> tuple[Tokenizer, Vocabulary]:
    """Return a tokenizer where some texts are special tokens."""
    fast = byte_level()
    fast.add_special_tokens([AddedToken(text, special=True) for text in texts])
    words = Tokenizer(fast, frozenset([fast.token_to_id(EOS)]))
    return words, Vocabulary.build(words, words.vocab_size, words.eos_token_ids)


def special_of(syntax: ToolFormat) -> dict[str, int]:
    words, _ = special_vocabulary(*syntax.tokens)
    found = {text: words.token_to_id(text) for text in syntax.tokens}
    return {text: one for text, one in found.items() if one is not None}


def accepts(syntax: ToolFormat, form: StructuredOutputs, text: str) -> bool:
    """Whether a form allows a text in which the markers of a format are special tokens."""
    words, vocabulary = special_vocabulary(*syntax.tokens)
    sequence = compile_grammar(form, vocabulary, CompileLimits()).sequence(0)
    tokens = array("q", words.encode(text, add_special_tokens=False))
    if sequence.num_possible(array("q"), tokens) < len(tokens):
        return False
    return words.eos_token_ids <= set(ids_of(sequence.masks(tokens)[0]))


def literal(syntax: ToolFormat, value: Any, is_call: bool = False) -> str:
    """Return a value as a model writes it in the format's own language."""
    assert syntax.literals is not None
    python = syntax.literals.is_python
    if isinstance(value, str):
        quote = syntax.literals.quote
        return json.dumps(value) if python else f"{quote}{value}{quote}"
    if not isinstance(value, dict):
        return repr(value) if python else json.dumps(value)
    if python and is_call:
        return ", ".join(f"{key}={literal(syntax, each)}" for key, each in value.items())
    told = (f"{key}:{literal(syntax, value[key])}" for key in sorted(value))
    return f"{{{','.join(told)}}}"


def written(syntax: ToolFormat, *arguments: dict[str, Any], name: str = "add") -> str:
    """Return calls as a model writes them in a format."""
    how = syntax.written
    told = [
        tagged.before
        + "".join(one.before + "1" + one.after for one in tagged.arguments if one.name == "")
        + "".join(_argument(tagged, key, value) for key, value in each.items())
        + tagged.behind
        for each in arguments
        if (tagged := _tagged(syntax, name, each))
    ] or [
        (syntax.literals or how)
        .call.replace(
            "{arguments}", literal(syntax, each, True) if syntax.literals else json.dumps(each)
        )
        .replace("{id}", "123456789")
        .replace("{quoted}", json.dumps(name))
        .replace("{name}", name)
        for each in arguments
    ]
    blocks = told if how.between_calls is None else [how.between_calls.join(told)]
    return spelled(
        (how.between_blocks or "").join(how.opening + each + how.closing for each in blocks)
    )


def _tagged(syntax: ToolFormat, name: str, arguments: dict[str, Any]) -> TaggedCall | None:
    """Return how a call is written in tags, with any arguments, or with these where that cannot be.

    A function that is not strict has any.
    """
    found = syntax.tagged and syntax.tagged(name, {"type": "object"})
    if found or not syntax.tagged or name == "loose":
        return found or None
    schemas = {
        key: {"type": "string" if isinstance(value, str) else "integer"}
        for key, value in arguments.items()
    }
    return syntax.tagged(name, {"type": "object", "properties": schemas})


def _argument(tagged: TaggedCall, key: str, value: Any) -> str:
    """Return an argument in its tags, which may say whether it is text."""
    tags = next(each for each in tagged.arguments if each.name in (None, key))
    is_text = isinstance(value, str)
    ways = [tags]
    while (way := ways[-1].other) is not None:
        ways.append(way)
    if len(ways) > 1:  # it says whether it is text, or a type
        fit = (way for way in ways if _may_be(value, way.value))
        tags = next(fit, ways[0])
    return tags.before + key + tags.between + (value if is_text else json.dumps(value)) + tags.after


def _may_be(value: Any, written: Any) -> bool:
    """Whether a value is one that an argument may have in one of its ways."""
    if isinstance(value, str):
        return not isinstance(written, Mapping)
    kinds = (None, "integer", "number")
    return isinstance(written, Mapping) and written.get("type") in kinds


def spelled(text: str) -> str:
    """Return a text of a format as models write it."""
    return text.replace(BREAK, "\n").replace(ID, "0")


def has_several(syntax: ToolFormat) -> bool:
    """Whether a text may have several calls."""
    return syntax.written.between_calls is not None or syntax.written.between_blocks is not None


GOOD, BAD = {"a": 1, "kind": "x"}, {"a": "one", "kind": "x"}


@every_format
@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_what_a_random_model_is_forced_to_write_is_a_call(
    syntax: ToolFormat, several: bool, seed: int
) -> None:
    grammar = compiled(calls(TOOLS, syntax, several=several)).sequence(3)
    text = write(grammar, seed)
    if text is None:  # it found no end
        return
    parsed = ToolCallParser(SCHEMAS, syntax).take(text, is_last=True)
    assert parsed.content == ""
    assert len(parsed.calls) >= 1
    assert several or len(parsed.calls) == 1
    for call in parsed.calls:
        assert_valid(SCHEMAS[call.name], call.arguments)


@every_format
def test_forced_calls_in_special_tokens(syntax: ToolFormat) -> None:
    special = special_of(syntax)
    several = calls(TOOLS, syntax, special, several=True)
    one = calls(TOOLS, syntax, special, several=False, name="add")
    assert accepts(syntax, one, written(syntax, GOOD))
    # One of the functions has a name that Python has not, so calls of all are written in JSON.
    python = syntax.literals is not None and syntax.literals.is_python
    plain = replace(syntax, literals=None) if python else syntax
    assert accepts(syntax, several, written(plain, GOOD))
    assert accepts(syntax, several, written(plain, GOOD, GOOD)) == has_several(syntax)
    for form, text in (
        (one, written(syntax, GOOD, GOOD)),
        (one, written(syntax, {"text": "a"}, name=FIND["function"]["name"])),
        (one, written(syntax, BAD)),
        (one, f"See: {written(syntax, GOOD)}"),
        (several, ""),
        (several, "text"),
        (several, written(plain, GOOD, BAD)),
        (several, written(plain, GOOD, name="sub")),
    ):
        assert not accepts(syntax, form, text), text


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "x": {"type": "integer"}},
    "required": ["name", "x"],
    "additionalProperties": False,
}


@every_format
@pytest.mark.parametrize(
    ("in_tokens", "schema"), crossed(2, [True, False], [PERSON, {"type": "object"}])
)
def test_calls_or_an_answer_of_a_form(
    syntax: ToolFormat, in_tokens: bool, schema: dict[str, Any]
) -> None:
    """Also where calls begin as the answer does, as those of llama3_json do."""
    special = special_of(syntax) if in_tokens else {}
    tools = [ADD, tool("loose", None, a={"type": "integer"})]
    tagged = THOUGHT if syntax is HERMES else None

    def allowed(text: str, several: bool = True) -> bool:
        found = calls(tools, syntax, special, several=several, forced=False, alone=True)
        form = StructuredOutputs(json=schema, calls=found, thought=tagged)
        text = "<think>hm</think>\n" + text if tagged else text
        if in_tokens:
            return accepts(syntax, form, text)
        return accepts_text(compiled(form), text)

    call, loose = written(syntax, GOOD), written(syntax, {"b": "1"}, name="loose")
    for text in ('{"name": "Bob", "x": 1}', '{"name":"add","x":1}', call, loose):
        assert allowed(text), text
    if has_several(syntax):
        assert allowed(written(syntax, GOOD, GOOD))
        assert not allowed(written(syntax, GOOD, GOOD), several=False)
    for text in ("", "text", f"text {call}", f'{call} {{"name": "Bob", "x": 1}}', "[1]"):
        assert not allowed(text), text
    if schema is PERSON or syntax.name != "llama3_json":  # where a call is any object, too
        for text in (written(syntax, BAD), written(syntax, GOOD, name="other")):
            assert not allowed(text), text


def test_what_parameters_refer_to_is_found_where_a_call_is_one_schema() -> None:
    point = {"properties": {"y": {"$ref": "#/$defs/point"}}, "additionalProperties": False}
    parameters = {"properties": {"a": {"$ref": "#/$defs/point"}}, "$defs": {"point": point}}
    strict = {"name": "f", "strict": True, "parameters": {**parameters, "type": "object"}}
    tools = [{"type": "function", "function": strict}]
    answer = StructuredOutputs(
        json=PERSON, calls=calls(tools, LLAMA3_JSON, several=False, forced=False, alone=True)
    )
    form = compiled(answer)
    assert accepts_text(form, '{"name": "f", "parameters": {"a": {"y": {"y": {}}}}}')
    assert not accepts_text(form, '{"name": "f", "parameters": {"a": {"y": {"z": {}}}}}')


NAMED = (GLM4, FUNCTIONARY_MESSAGE)  # nothing but a name opens a call


@every_plain_format
@pytest.mark.parametrize("in_tokens", [True, False])
def test_strict_calls_where_the_model_may_call(syntax: ToolFormat, in_tokens: bool) -> None:
    special = special_of(syntax) if in_tokens else {}
    tools = [ADD, tool("loose", None, a={"type": "integer"})]
    form = calls(tools, syntax, special, several=True, forced=False)

    def allowed(text: str, form: StructuredOutputs = form) -> bool:
        if in_tokens:
            return accepts(syntax, form, text)
        return accepts_text(compiled(form), text)

    assert allowed("")
    assert allowed("no call [1] {2} here")
    assert allowed(written(syntax, GOOD))
    assert allowed(written(syntax, GOOD, GOOD))
    assert allowed(f"{written(syntax, GOOD)} after")
    assert allowed(written(syntax, {"b": "1"}, name="loose"))
    assert not allowed(written(syntax, BAD))
    # Where nothing but a name opens a call, that of another function is text like any other.
    is_text = syntax in NAMED or (syntax is MUSE and not in_tokens)
    assert allowed(written(syntax, GOOD, name="sub")) == is_text
    for marker in syntax.markers:
        assert not allowed(f"text {marker} text")
    for sign in syntax.goes_on:  # what follows is read as a call
        assert not allowed(f"{written(syntax, GOOD)}\n{sign} {written(syntax, BAD)}")
        assert allowed(f"{written(syntax, GOOD)} after {sign}")
    if not syntax.begins(["add"]):
        assert allowed(f"See: {written(syntax, GOOD)}")
    elif syntax.written.optional_marker:
        marked = syntax.written.optional_marker + written(syntax, GOOD)
        assert allowed(marked)
        assert allowed(f"See: {marked}") == in_tokens
        assert not allowed(f" {written(syntax, BAD)}")
        assert allowed(f"{written(syntax, GOOD)} and {marked} after")
    once = calls(tools, syntax, special, several=False, forced=False)
    assert allowed(written(syntax, GOOD), once)
    assert not allowed(written(syntax, GOOD, GOOD), once)
    assert not allowed(f"{written(syntax, GOOD)} after", once)
    assert allowed("no call", once)


@pytest.mark.parametrize("syntax", [HERMES, LLAMA3_JSON, GLM45], ids=lambda each: each.name)
def test_strict_says_whether_all_parameters_are_enforced(
    syntax: ToolFormat, caplog: pytest.LogCaptureFixture
) -> None:
    tags = {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}
    caplog.set_level(logging.INFO)
    loose, strict = tool("f", None, a=tags), tool("f", True, a=tags)
    form = compiled(calls([loose], syntax, several=False))
    for given, allowed in (([1, 2], True), ([1, 1], True), ([3], False), ("x", False)):
        assert accepts_text(form, written(syntax, {"a": given}, name="f")) == allowed
    assert not accepts_text(form, written(syntax, {}, name="f"))
    [told] = [record.getMessage() for record in caplog.records]
    where = "'tools.0.function.parameters#/properties/a/uniqueItems'"
    assert f"tools is enforced but for {where}, which cannot be" in told
    with pytest.raises(RequestError, match="'uniqueItems', which is not supported") as caught:
        calls([strict], syntax, several=False)
    assert caught.value.param == "tools.0.function.parameters"


@pytest.mark.parametrize("syntax", [HERMES, LLAMA3_JSON, QWEN3_CODER], ids=lambda each: each.name)
@pytest.mark.parametrize("strict", [True, False, None])
def test_forced_functions_have_no_further_arguments(
    syntax: ToolFormat, strict: bool | None
) -> None:
    """As OpenAI asks that the parameters of strict ones say, and vLLM and llama.cpp take all."""
    inner = {"type": "object", "properties": {"c": {"type": "integer", "format": "int32"}}}
    function = tool("f", strict, a=inner)
    parameters = function["function"]["parameters"]
    del parameters["additionalProperties"]
    form = compiled(calls([function], syntax, several=False))
    assert accepts_text(form, written(syntax, {"a": {"c": 1}}, name="f"))
    more = written(syntax, {"a": {"c": 1}, "b": 1}, name="f")
    within = written(syntax, {"a": {"c": 1, "b": 1}}, name="f")
    assert not accepts_text(form, more)
    assert not accepts_text(form, within)
    inner["additionalProperties"] = True
    form = compiled(calls([function], syntax, several=False))
    assert accepts_text(form, within)
    assert not accepts_text(form, more)


@pytest.mark.parametrize("parameters", [{"not": {}}, {"type": "string"}])
def test_parameters_that_are_no_object(parameters: dict[str, Any]) -> None:
    function = {"name": "f", "parameters": parameters}
    with pytest.raises(RequestError, match=r"exclude everything|arguments are an object"):
        calls([{"type": "function", "function": function}], HERMES, several=False)


TEXTS = {"t": {"type": "string", "description": "a text"}, "k": {"enum": ["x", "y"]}}


@pytest.mark.parametrize(
    ("parameters", "arguments", "others"),
    [
        (
            {"properties": TEXTS},
            [{}, {"t": "1\n <b>"}, {"t": "", "k": "y"}],
            [{"k": "z"}, {"b": 1}],
        ),
        ({"properties": TEXTS, "required": ["k"]}, [{"k": "x"}], [{}, {"t": "a"}]),
        ({"properties": {"n": {"type": "number"}}}, [{"n": 1.5}], [{"n": "x"}]),
        ({"properties": {"l": {"type": "array"}}}, [{"l": [1, "</parameter>"]}], [{"l": "x"}]),
        ({"additionalProperties": False}, [{}], [{"a": "x"}]),
        ({}, [{}, {"a": "x", "b": [1]}], []),
    ],
)
@pytest.mark.parametrize("syntax", [GLM45, SEED_OSS, QWEN3_CODER], ids=lambda each: each.name)
def test_arguments_in_tags(
    syntax: ToolFormat,
    parameters: dict[str, Any],
    arguments: list[dict[str, Any]],
    others: list[dict[str, Any]],
) -> None:
    function = {"name": "f", "parameters": {"type": "object", **parameters}}
    form = compiled(calls([{"type": "function", "function": function}], syntax, several=False))
    for each in arguments:
        text = written(syntax, each, name="f")
        assert accepts_text(form, text), text
        [call] = ToolCallParser({"f": parameters}, syntax).take(text, is_last=True).calls
        assert json.loads(call.arguments) == each
    for each in others:
        assert not accepts_text(form, written(syntax, each, name="f"))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "maxLength": 3},
        {"type": ["string", "integer"]},
        {"anyOf": [{"type": "string"}, {"type": "null"}, {"type": "array"}]},
        {"enum": ["1", "x"]},
        {"type": "string", "enum": ["<"]},
        {"$ref": "#/$defs/one"},
        {},
    ],
)
@pytest.mark.parametrize("syntax", [GLM45, SEED_OSS, QWEN3_CODER], ids=lambda each: each.name)
def test_what_tags_cannot_hold_is_written_in_json(
    syntax: ToolFormat, schema: dict[str, Any]
) -> None:
    parameters = {"type": "object", "properties": {"a": schema}, "$defs": {"one": {"const": "x"}}}
    function = {"name": "f", "parameters": parameters}
    form = compiled(calls([{"type": "function", "function": function}], syntax, several=False))
    value = schema.get("enum", ["x"])[0]
    told = json.dumps({"name": "f", "arguments": {"a": value}})
    text = spelled(f"{syntax.written.opening}{told}{syntax.written.closing}")
    assert accepts_text(form, text)
    assert not accepts_text(form, written(syntax, {"a": value}, name="f"))
    [call] = ToolCallParser({"f": parameters}, syntax).take(text, is_last=True).calls
    assert json.loads(call.arguments) == {"a": value}
