"""Calls are found in every format, however a text is cut into pieces."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.base import Block, ParsedCall, ToolFormat
from onnxport.serving.http.tool_formats.glm4 import GLM4
from onnxport.serving.http.tool_formats.granite import GRANITE_TEXT, GRANITE_TOKEN
from onnxport.serving.http.tool_formats.harmony import HARMONY
from onnxport.serving.http.tool_formats.hermes import HERMES
from onnxport.serving.http.tool_formats.lfm2 import LFM2
from onnxport.serving.http.tool_formats.llama3_json import LLAMA3_JSON
from onnxport.serving.http.tool_formats.mistral import MISTRAL_LIST, MISTRAL_NAME
from onnxport.serving.http.tool_formats.phi4_mini import PHI4_MINI_TOKEN, PHI4_MINI_WORD
from onnxport.serving.http.tool_formats.pythonic import PYTHONIC
from onnxport.serving.http.tool_formats.registry import FORMATS
from onnxport.serving.http.tool_formats.solar import SOLAR
from onnxport.serving.http.tool_formats.xml_calls import GLM45, QWEN3_CODER, SEED_OSS

from . import tool_texts_2
from .section_cases import FOUND as IN_SECTIONS
from .test_vllm_formats import FOUND as OF_VLLM

FUNCTIONS = {
    "add": {"type": "object", "properties": {"a": {"type": "integer"}, "t": {"type": "string"}}},
    "add_all": {"type": "object"},
}
ADD = ParsedCall("add", '{"a": 1}')
ALL = ParsedCall("add_all", '{"x": [1, "y]};<|"]}')
J_ADD = '{"name": "add", "arguments": {"a": 1}}'
J_ALL = '{"name": "add_all", "arguments": {"x": [1, "y]};<|"]}}'
L_ADD, L_ALL = (each.replace("arguments", "parameters") for each in (J_ADD, J_ALL))
OTHER = '{"name": "sub", "arguments": {}}'
ARGS = '{"x": [1, "y]};<|"]}'
SEED_ADD = "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n</function>\n"
CODER_ADD = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"

JSON = "<|constrain|>json<|message|>"

Case = tuple[ToolFormat, str, str, list[ParsedCall]]

FOUND: list[Case] = [
    (LLAMA3_JSON, L_ADD, "", [ADD]),
    (LLAMA3_JSON, f" \n{L_ADD}\n", "", [ADD]),
    (LLAMA3_JSON, J_ADD, "", [ADD]),
    (LLAMA3_JSON, f"<|python_tag|>{L_ADD}", "", [ADD]),
    (LLAMA3_JSON, f"See.\n<|python_tag|>{L_ADD}", "See.", [ADD]),
    (LLAMA3_JSON, f"{L_ADD}; {L_ALL};{L_ADD}", "", [ADD, ALL, ADD]),
    (LLAMA3_JSON, f"{L_ADD}\n{L_ALL}", "", [ADD, ALL]),
    (LLAMA3_JSON, f"{L_ADD}; done", "; done", [ADD]),
    (LLAMA3_JSON, f"{L_ADD}; {OTHER}", f"; {OTHER}", [ADD]),
    (LLAMA3_JSON, f"{L_ADD}; done; {L_ADD}", f"; done; {L_ADD}", [ADD]),
    (LLAMA3_JSON, f"{L_ADD};;{L_ADD}", f";;{L_ADD}", [ADD]),
    (LLAMA3_JSON, '{"type": "function", "name": "add"}', "", [ParsedCall("add", "{}")]),
    (
        LLAMA3_JSON,
        f'{{"type": "function", "function": {L_ADD}}}',
        "",
        [ADD],
    ),
    (HARMONY, f'<|channel|>commentary to=functions.add {JSON}{{"a": 1}}', "", [ADD]),
    (HARMONY, f' to=functions.add<|channel|>commentary {JSON}{{"a": 1}}<|call|>', "", [ADD]),
    (HARMONY, '<|channel|>analysis to=functions.add code<|message|>{"a": 1}', "", [ADD]),
    (HARMONY, '<|start|>assistant<|channel|>commentary to=add<|message|>{"a": 1}', "", [ADD]),
    (HARMONY, f"See.<|start|>assistant to=functions.add_all {JSON}{ARGS}", "See.", [ALL]),
    (
        HARMONY,
        f'<|start|>assistant to=functions.add {JSON}{{"a": 1}}<|end|>'
        f"<|start|>assistant to=functions.add_all<|channel|>commentary {JSON}{ARGS}<|end|>",
        "",
        [ADD, ALL],
    ),
    (HARMONY, "<|channel|>final<|message|>to=functions.add", "to=functions.add", []),
    (HARMONY, "to=functions.add is how", "to=functions.add is how", []),
    (HARMONY, '<|channel|>commentary to=functions.sub json<|message|>{"a": 1}', '{"a": 1}', []),
    (HARMONY, '<|channel|>commentary to=functions.add json<|message|>{"a": ', '{"a": ', []),  # cut
    (HARMONY, "<|channel|>commentary to=functions.add js", "", []),
    (HARMONY, "<|channel|>commentary to=add<|message|> <|call|>", "", [ParsedCall("add", "{}")]),
    (
        HARMONY,
        f'<|channel|>commentary to=functions.add {JSON}{{"t": "\\"<|end|><|start|>"}}<|call|>',
        "",
        [ParsedCall("add", '{"t": "\\"<|end|><|start|>"}')],
    ),
    (
        HARMONY,
        "a<|channel|>commentary??<|start|>assistant<|channel|>final<|message|>b",
        "a\n\nb",  # two messages
        [],
    ),
    (MISTRAL_LIST, f"[TOOL_CALLS][{J_ADD}]", "", [ADD]),
    (MISTRAL_LIST, f"[TOOL_CALLS] [{J_ADD}, {J_ALL}]", "", [ADD, ALL]),
    (MISTRAL_LIST, f"Hm. [TOOL_CALLS][{J_ADD}] so", "Hm. so", [ADD]),
    (MISTRAL_LIST, f"[TOOL_CALLS]{J_ADD}", "", [ADD]),
    (MISTRAL_LIST, f'[TOOL_CALLS][{J_ADD}, {J_ALL}, {{"na', ', {"na', [ADD, ALL]),  # cut
    (MISTRAL_LIST, f"[TOOL_CALLS][{J_ADD}", "", [ADD]),
    (MISTRAL_NAME, '[TOOL_CALLS]add[ARGS]{"a": 1}', "", [ADD]),
    (MISTRAL_NAME, '[TOOL_CALLS]add{"a": 1}', "", [ADD]),
    (MISTRAL_NAME, '[TOOL_CALLS]add[CALL_ID]q1w2e3r4t[ARGS]{"a": 1}', "", [ADD]),
    (MISTRAL_NAME, f'[TOOL_CALLS]add{{"a": 1}}[TOOL_CALLS]add_all{ARGS}', "", [ADD, ALL]),
    (GRANITE_TOKEN, f"<|tool_call|>[{J_ADD}, {J_ALL}]", "", [ADD, ALL]),
    (GRANITE_TEXT, f"<tool_call> [{J_ADD}]\n", "", [ADD]),
    (GRANITE_TEXT, f"<|tool_call|>{J_ADD}", "", [ADD]),
    (PHI4_MINI_WORD, f"functools[{J_ADD}, {J_ALL}]", "", [ADD, ALL]),
    (PHI4_MINI_TOKEN, f"<|tool_call|>[{J_ADD}]<|/tool_call|>", "", [ADD]),
    (PHI4_MINI_TOKEN, f"a <|tool_call|>{L_ADD}\n<|/tool_call|> b", "a b", [ADD]),
    (PHI4_MINI_TOKEN, f"<|tool_call|>[{J_ADD}]", "", [ADD]),
    (PYTHONIC, "[add(a=1)]", "", [ADD]),
    (PYTHONIC, '[add(a=1), add_all(x=[1, "y]};<|"])]', "", [ADD, ALL]),
    (PYTHONIC, "<|python_start|>[add(a=1)]<|python_end|>", "", [ADD]),
    (
        PYTHONIC,
        "[add(a=-1.5, t='it\\'s (b)', c={'k': True, 'l': null}, d=(1,), e=None)]",
        "",
        [
            ParsedCall(
                "add",
                '{"a": -1.5, "t": "it\'s (b)", "c": {"k": true, "l": null}, "d": [1], "e": null}',
            )
        ],
    ),
    (PYTHONIC, f"[{J_ADD}, {J_ALL}]", "", [ADD, ALL]),
    (PYTHONIC, f"<|python_start|>{J_ADD}<|python_end|>", "", [ADD]),
    (PYTHONIC, "[add(a=1)]\n[add(a=1)]", "", [ADD, ADD]),
    (
        PYTHONIC,
        "[add_all(from='A', class = 'b=1, in=2', x={'is': True}), add(a=1)]",
        "",
        [ParsedCall("add_all", '{"from": "A", "class": "b=1, in=2", "x": {"is": true}}'), ADD],
    ),
    (
        PYTHONIC,
        "[add(t='one\ntwo\\\nthree')]",
        "",
        [ParsedCall("add", '{"t": "one\\ntwothree"}')],
    ),
    (LFM2, "<|tool_call_start|>[add(a=1)]<|tool_call_end|>", "", [ADD]),
    (LFM2, "Hm. <|tool_call_start|>[add(a=1)]<|tool_call_end|> So", "Hm. So", [ADD]),
    (
        LFM2,
        '<|tool_call_start|>[add(a=1), add_all(x=[1, "y]};<|"])]\n<|tool_call_end|>',
        "",
        [ADD, ALL],
    ),
    (LFM2, "<|tool_call_start|> [add(a=1)]", "", [ADD]),  # cut
    (LFM2, f"<|tool_call_start|>[{J_ADD}, {J_ALL}]<|tool_call_end|>", "", [ADD, ALL]),
    (LFM2, f"<|tool_call_start|>{J_ADD}<|tool_call_end|>", "", [ADD]),
    (
        LFM2,
        "<|tool_call_start|>[add(t='<|tool_call_end|>')]<|tool_call_end|>",
        "",
        [ParsedCall("add", '{"t": "<|tool_call_end|>"}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"t": "one\ntwo"}}</tool_call>',
        "",
        [ParsedCall("add", '{"t": "one\\ntwo"}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "add", "arguments": {"t": "</tool_call>"}}',
        "",
        [ParsedCall("add", '{"t": "</tool_call>"}')],
    ),
    (
        GLM45,
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "",
        [ADD],
    ),
    (GLM45, "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "", [ADD]),
    (GLM45, "Hm.\n<tool_call>add_all\n</tool_call>", "Hm.", [ParsedCall("add_all", "{}")]),
    (
        GLM45,
        "<tool_call>add\n<arg_key>t</arg_key>\n<arg_value>1\n</arg_value>\n"
        '<arg_key>l</arg_key>\n<arg_value>["a"]</arg_value>\n</tool_call>',
        "",
        [ParsedCall("add", '{"t": "1\\n", "l": ["a"]}')],
    ),
    (GLM4, 'add\n{"a": 1}', "", [ADD]),
    (GLM4, f"\n add_all\n{ARGS}", "", [ALL]),
    (GLM4, f'add\n{{"a": 1}}<|assistant|>add_all\n{ARGS}', "", [ADD, ALL]),
    (GLM4, 'Hm.<|assistant|>add\n{"a": 1}', "Hm.", [ADD]),
    (SEED_OSS, f"{SEED_ADD}</seed:tool_call>", "", [ADD]),
    (SEED_OSS, f"a\n{SEED_ADD}</seed:tool_call>\n{SEED_ADD}</seed:tool_call>", "a", [ADD, ADD]),
    (
        SEED_OSS,
        "<seed:tool_call>\n<function=add>\n<parameter=t>1\n2</parameter>\n<parameter=f>True"
        "</parameter>\n<parameter=w>so so</parameter>\n</function>\n</seed:tool_call>",
        "",
        [ParsedCall("add", '{"t": "1\\n2", "f": true, "w": "so so"}')],
    ),
    (
        SEED_OSS,
        '<seed:tool_call>\n<function=add>\n<parameter=l>[1, "</parameter>"]</parameter>\n'
        "<parameter=m>[1] says so</parameter>\n<parameter=n>[so</parameter>\n</function>\n"
        "</seed:tool_call>",
        "",
        [ParsedCall("add", '{"l": [1, "</parameter>"], "m": "[1] says so", "n": "[so"}')],
    ),
    (QWEN3_CODER, CODER_ADD, "", [ADD]),
    (QWEN3_CODER, f"<tool_call>\n{J_ADD}\n</tool_call>", "", [ADD]),
    (QWEN3_CODER, f"So.\n{CODER_ADD[12:]}\n{CODER_ADD}", "So.", [ADD, ADD]),  # no first tag
    (QWEN3_CODER, CODER_ADD[12:-12], "", [ADD]),
]

NO_CALLS: list[tuple[ToolFormat, str]] = [
    (LLAMA3_JSON, '{"a": 1}'),
    (LLAMA3_JSON, OTHER),
    (LLAMA3_JSON, L_ADD[:-1]),
    (LLAMA3_JSON, f"Here: {L_ADD}"),
    (LLAMA3_JSON, "<|python_tag|>print(1)"),
    (LLAMA3_JSON, "{ not JSON }"),
    (LLAMA3_JSON, "[1]"),
    (MISTRAL_LIST, f"[TOOL_CALLS][{J_ADD}, {OTHER}]"),
    (MISTRAL_LIST, f"[{J_ADD}]"),
    (MISTRAL_LIST, "[TOOL_CALLS]add and more"),
    (MISTRAL_NAME, "[TOOL_CALLS]add_al[ARGS]{}"),
    (MISTRAL_NAME, "[TOOL_CALLS]add[ARGS][1]"),
    (MISTRAL_NAME, "[TOOL_CALLS]"),
    (GRANITE_TOKEN, f"[{J_ADD}]"),
    (GRANITE_TOKEN, "<|tool_call|>[]"),
    (PHI4_MINI_WORD, "import functools"),
    (PHI4_MINI_WORD, "functools[1]"),
    (PYTHONIC, "[1] says so"),
    (PYTHONIC, "[add(1)]"),
    (PYTHONIC, "[add(a=b)]"),
    (PYTHONIC, "[add(a=1), sub(a=1)]"),
    (PYTHONIC, "[add(a=1e400)]"),
    (PYTHONIC, "[add(a=b'1')]"),
    (PYTHONIC, "[add(a=1) for a in b]"),
    (PYTHONIC, "[add(**{})]"),
    (PYTHONIC, "[add(a=1"),
    (PYTHONIC, "[add(a=" + "-" * 5000 + "1)]"),
    (LFM2, "[add(a=1)]"),
    (LFM2, "<|tool_call_start|>[add(a=1), sub()]<|tool_call_end|>"),
    (LFM2, "<|tool_call_start|>add(a=1)<|tool_call_end|>"),
    (LFM2, "<|tool_call_start|>[add(a="),
    (GLM4, "add_"),
    (GLM4, "add\nnumbers"),
    (GLM4, 'add {"a": 1}'),
    (GLM4, 'sub\n{"a": 1}'),
    (GLM4, 'I say\nadd\n{"a": 1}'),
    (GLM45, "<tool_call>sub\n</tool_call>"),
    (GLM45, "<tool_call>add\n<arg_key>a</arg_key>\n</tool_call>"),
    (GLM45, "<tool_call>add_all"),
    (SEED_OSS, SEED_ADD.removesuffix("</function>\n")),
    (SEED_OSS, "<seed:tool_call>\nadd\n</seed:tool_call>"),
    (QWEN3_CODER, "<tool_call>\n<function=add\n</tool_call>"),
]

FOUND += tool_texts_2.FOUND
NO_CALLS += tool_texts_2.NO_CALLS


def parse(
    syntax: ToolFormat, *pieces: str, hidden: tuple[str, ...] = ()
) -> tuple[str, list[ParsedCall]]:
    parser = ToolCallParser(FUNCTIONS, syntax, hidden)
    content, calls = "", []
    for parsed in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
        content += parsed.content
        calls += parsed.calls
    return content, calls


@pytest.mark.parametrize(("syntax", "text", "content", "calls"), FOUND)
def test_calls(syntax: ToolFormat, text: str, content: str, calls: list[ParsedCall]) -> None:
    assert parse(syntax, text) == (content, calls)
    assert parse(syntax, *text) == (content, calls)


@pytest.mark.parametrize(("syntax", "text"), NO_CALLS)
def test_what_is_no_call_stays_content(syntax: ToolFormat, text: str) -> None:
    assert parse(syntax, text) == (text, [])
    assert parse(syntax, *text) == (text, [])


@pytest.mark.parametrize("syntax", FORMATS, ids=lambda each: each.name)
def test_text_is_given_as_early_as_it_can(syntax: ToolFormat) -> None:
    parser = ToolCallParser(FUNCTIONS, syntax)
    assert parser.feed("Hello").content == "Hello"
    assert parser.feed(" wor").content == " wor"
    opening = syntax.markers[0]
    assert parser.feed(f"ld{opening[:-1]}").content == "ld"
    assert parser.feed("?").content == f"{opening[:-1]}?"


def test_content_behind_what_turned_out_to_be_no_call_is_not_kept_back() -> None:
    parser = ToolCallParser(FUNCTIONS, PYTHONIC)
    assert parser.feed("[1").content == "[1"
    parser = ToolCallParser(FUNCTIONS, LLAMA3_JSON)
    assert parser.feed('{"na').content == ""
    assert parser.feed('t": ').content == '{"nat":'
    parser = ToolCallParser(FUNCTIONS, MISTRAL_NAME)
    assert parser.feed("[TOOL_CALLS]ad").content == ""
    assert parser.feed("just").content == "[TOOL_CALLS]adjust"


def test_hidden_tokens_are_not_in_content() -> None:
    for text, content in (
        ("a[TOOL_CALLS]b", "ab"),
        ("[ARGS]b[CALL", "b[CALL"),
        ("x [TOOL_CALLS][ARGS] y", "x  y"),
        ("[AR[TOOL_CALLS]GS]", "[ARGS]"),
    ):
        for pieces in ([text], list(text)):
            hidden = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
            parser = ToolCallParser(FUNCTIONS, MISTRAL_NAME, hidden)
            parsed = [*map(parser.feed, pieces), parser.finish()]
            assert "".join(each.content for each in parsed) == content
            ends = [end for each in parsed for end in each.ends]
            assert (ends[-1], ends) == (len(text), sorted(ends))


def test_where_content_ends_before_space_and_hidden_tokens() -> None:
    text = "a [ARGS] \n[ARGS]b"
    for cut, parts in (
        (9, [("a", 1), ("  \nb", len(text))]),
        (0, [("a  \nb", len(text))]),
    ):
        parser = ToolCallParser(FUNCTIONS, MISTRAL_NAME, ("[ARGS]",))
        parsed = [parser.feed(text[:cut]), parser.take(text[cut:], is_last=True)]
        told = [pair for each in parsed for pair in zip(each.parts, each.ends, strict=True)]
        assert told == parts


@pytest.mark.parametrize(
    ("syntax", "text", "is_needed"),
    [
        (HERMES, f"<tool_call>\n{J_ADD}\n</tool_call>", False),
        (QWEN3_CODER, CODER_ADD, False),
        (QWEN3_CODER, f"<tool_call>\n{J_ADD}\n</tool_call>", False),
        (SEED_OSS, f"{SEED_ADD}</seed:tool_call>", False),
        (GLM45, "<tool_call>add\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", True),
    ],
)
def test_a_whole_call_counts_however_far_its_closing_tag_got(
    syntax: ToolFormat, text: str, is_needed: bool
) -> None:
    """It may be cut by the number of tokens or a stop string. GLM's ends the arguments, too."""
    for end in range(text.rindex("</") - 1, len(text)):
        expected = (text[:end], []) if is_needed else ("", [ADD])
        assert parse(syntax, text[:end]) == parse(syntax, *text[:end]) == expected
    whole = text[: text.rindex("</")]
    for behind in ("</tool_x", "x"):
        has_end = whole.endswith("</function>\n")
        expected = (f"\n{behind}", [ADD]) if has_end else (whole + behind, [])
        assert parse(syntax, whole + behind) == parse(syntax, *whole, *behind) == expected


@pytest.mark.parametrize(
    ("behind", "content"),
    [("x \n</tool_call>y", "x \ny"), (" </tool_call>y", " y"), (" </", " </")],
)
def test_space_beside_hidden_tokens_is_content_if_more_follows(behind: str, content: str) -> None:
    text = f"<tool_call>{J_ADD}</tool_call>{behind}"
    for pieces in ([text], list(text)):
        assert parse(HERMES, *pieces, hidden=HERMES.tokens) == (content, [ADD])
        assert parse(HERMES, *pieces, "\n", hidden=HERMES.tokens) == (content, [ADD])


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["string", "null"]}, "12345", "12345"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "[1]", "[1]"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
        ({"oneOf": [{"type": "string"}, {"type": "number"}]}, "true", "true"),
        ({"allOf": [{"type": "string"}]}, "5", "5"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        ({"enum": ["1", 1]}, "1", 1),
        ({"const": "true"}, "true", "true"),
        ({"type": "integer"}, "1.0", 1.0),
        ({"type": "integer"}, "so", "so"),
        ({}, "1", 1),
        ({"enum": 5}, "1", 1),
        ({"anyOf": 5}, "1", 1),
        ({"anyOf": [{"type": "string"}, {"$ref": "#"}]}, "1", "1"),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/none"}]}, "1", 1),
        ({"$ref": "#/$defs/si~1ze"}, "10", "10"),
        ({"anyOf": [{"$ref": "#/$defs/same"}, {"type": "null"}]}, "10", "10"),
        ({"anyOf": [{"$ref": "#/$defs/same"}, {"type": "null"}]}, "null", None),
        ({"$ref": "#/$defs/ever"}, "1", 1),
        ({"$ref": "other.json#/$defs/same"}, "1", 1),
        *(({}, text, text) for text in ("...", "{1, 2}", "b'x'", "1j", "{(1, 2): 3}", "-1e999")),
        ({"type": "number"}, "1e999", "1e999"),
    ],
)
def test_values_in_tags_are_what_their_schema_asks_for(
    schema: dict[str, Any], text: str, value: Any
) -> None:
    defs = {
        "si/ze": {"enum": ["10", "20"]},
        "same": {"$ref": "#/$defs/si~1ze"},
        "ever": {"$ref": "#/$defs/ever"},
    }
    functions = {"f": {"type": "object", "properties": {"a": schema}, "$defs": defs}}
    told = f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    [call] = ToolCallParser(functions, GLM45).take(told, is_last=True).calls
    assert json.loads(call.arguments) == {"a": value}


CODE = 'if a[i] > b(c): {"k": (1, [2])}  # ]})>\n' * 100
J_CODE = json.dumps({"name": "add", "arguments": {"t": CODE, "l": [[1], {"k": [2]}] * 100}})
LONG: list[tuple[ToolFormat, str]] = [
    (HERMES, f"<tool_call>\n{J_CODE}\n</tool_call>"),
    (LLAMA3_JSON, J_CODE),
    (MISTRAL_LIST, f"[TOOL_CALLS][{J_CODE}]"),
    (MISTRAL_NAME, f'[TOOL_CALLS]add[ARGS]{{"t": {json.dumps(CODE)}}}'),
    (GRANITE_TOKEN, f"<|tool_call|>[{J_CODE}]"),
    (PHI4_MINI_WORD, f"functools[{J_CODE}]"),
    (PYTHONIC, f"[add(t={CODE!r}, l={[[1], [2]] * 100})]"),
    (LFM2, f"<|tool_call_start|>[add(t={CODE!r})]<|tool_call_end|>"),
    (GLM4, f'add\n{{"t": {json.dumps(CODE)}}}'),
    (SEED_OSS, f"{SEED_ADD[:-12]}<parameter=t>{CODE}</parameter></function></seed:tool_call>"),
    (QWEN3_CODER, CODER_ADD.replace("add>", f"add>\n<parameter=t>{CODE}</parameter>")),
    (
        GLM45,
        "<tool_call>add"
        + f"<arg_key>t</arg_key><arg_value>{CODE}</arg_value>" * 9
        + "<arg_key>l</arg_key><arg_value>[[1], [2]]</arg_value></tool_call>",
    ),
]
LONG += tool_texts_2.LONG


@pytest.mark.parametrize(("syntax", "text"), LONG, ids=[each.name for each, _ in LONG])
def test_a_long_call_is_not_read_anew_with_every_piece(syntax: ToolFormat, text: str) -> None:
    reads = []

    def read(*given: Any) -> Block:
        reads.append(given)
        return syntax.read(*given)

    _, calls = parse(replace(syntax, read=read), *text)
    assert len(calls) == 1
    assert len(text) > 3000
    assert len(reads) < 100  # some for each mark, which are tokens of models


def test_many_calls_are_each_read_once() -> None:
    seen = 0

    def read(text: str, start: int, *given: Any) -> Block:
        nonlocal seen
        seen += len(text) - start
        return LLAMA3_JSON.read(text, start, *given)

    text = "; ".join([L_ADD] * 100)
    _, calls = parse(replace(LLAMA3_JSON, read=read), *text)
    assert len(calls) == 100
    assert seen < 50 * len(text)


def test_what_opens_many_blocks_and_ends_none_is_content_soon() -> None:
    reads = []

    def read(*given: Any) -> Block:
        reads.append(given)
        return MISTRAL_LIST.read(*given)

    text = '[TOOL_CALLS][{"name": "' * 1000
    assert parse(replace(MISTRAL_LIST, read=read), text) == (text, [])
    assert len(reads) < 50


def _pieces(syntax: ToolFormat) -> list[str]:
    """Return what texts are made of that are nearly calls of a format."""
    whole = [
        text for each, text, *_ in (*FOUND, *IN_SECTIONS, *OF_VLLM) if each.name == syntax.name
    ]
    parts = [text[: len(text) // 2] for text in whole] + [text[len(text) // 2 :] for text in whole]
    return [
        *whole,
        *parts,
        *syntax.tokens,
        *(J_ADD, L_ALL, OTHER, json.dumps([1]), "add", "add_", "(", ")", "{", "}", "[", "]"),
        *(";", ",", '"', "'", "\\", " ", "\n", "x", "<", "=", ">"),
    ]


@pytest.mark.parametrize(
    "syntax", FORMATS, ids=[f"{n}-{each.name}" for n, each in enumerate(FORMATS)]
)
@given(data=st.data())
def test_pieces_make_no_difference(syntax: ToolFormat, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(_pieces(syntax)), max_size=7)))
    hidden = data.draw(st.sampled_from([(), syntax.tokens]))
    whole = parse(syntax, text, hidden=hidden)
    assert parse(syntax, *text, hidden=hidden) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    bounds = [0, *cuts, len(text)]
    assert parse(syntax, *(text[a:b] for a, b in pairwise(bounds)), hidden=hidden) == whole
    tells_headers = not (syntax.has_channels or syntax.headers or syntax is SOLAR)
    if tells_headers and not whole[1] and not hidden:
        assert whole[0] == text


@given(st.text(alphabet=list("[]{}()<>;,=|\"'\\ \nadx_TOLCAS")))
def test_any_text_without_calls_is_content(text: str) -> None:
    for syntax in (HERMES, LLAMA3_JSON, MISTRAL_LIST, PYTHONIC):
        content, calls = parse(syntax, *text)
        assert calls or content == text
