"""What vLLM reads of models, and was not read here: formats, and calls that are not quite whole."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from onnxport.cli.application import tool_call_parser
from onnxport.errors import RequestError
from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.base import ParsedCall, ToolFormat
from onnxport.serving.http.tool_formats.deepseek import DEEPSEEK_V3
from onnxport.serving.http.tool_formats.hy3 import HY3, HY3_PLAIN
from onnxport.serving.http.tool_formats.invoke_calls import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DEEPSEEK_V41,
    MINICPM5,
    MINIMAX_M2,
    STEP3,
)
from onnxport.serving.http.tool_formats.lfm2 import LFM2
from onnxport.serving.http.tool_formats.olmo3 import OLMO3
from onnxport.serving.http.tool_formats.registry import NAMES, SAME, named, recognized
from onnxport.serving.http.tool_formats.syntax import ToolSyntax
from onnxport.serving.http.tool_formats.tagged_json import GRANITE_20B, INTERNLM, LONGCAT
from onnxport.serving.http.tool_formats.xml_calls import GLM45, MIMO, QWEN3_CODER
from onnxport.serving.thoughts import ReasoningSplitter, Thought
from tests.http.parsing import parsed

FUNCTIONS: dict[str, Any] = {
    "add": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "t": {"type": "string"}},
    },
    "now": {"type": "object"},
}
ADD, NOW = ParsedCall("add", '{"a": 1}'), ParsedCall("now", "{}")
BOTH = ParsedCall("add", '{"t": "x", "a": 1}')
J_ADD, J_NOW = '{"name": "add", "arguments": {"a": 1}}', '{"name": "now", "arguments": {}}'
ACTION = "<|action_start|><|plugin|>"
HY = "<tool_calls>\n<tool_call>add<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
V41 = (
    '<｜DSML｜ invoke name="add">\n'
    '<｜DSML｜ parameter name="a" string="false">1</｜DSML｜ parameter>'
    "\n</｜DSML｜ invoke>\n"
)
V4 = '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="t" string="true">'
S3 = '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="add">'
S3_END = "</steptml:invoke><｜tool_call_end｜>"
CODER = "<tool_call>\n<function=add>\n<parameter=t>\nx\n"

FOUND: list[tuple[ToolFormat, str, str, list[ParsedCall]]] = [
    (OLMO3, "<function_calls>add(a=1)</function_calls>", "", [ADD]),
    (OLMO3, "So.\n<function_calls>\nadd(a=1)\nnow()\n</function_calls>", "So.", [ADD, NOW]),
    (OLMO3, "<function_calls>add(t='x', a=1)", "", [BOTH]),  # cut
    (OLMO3, "<function_calls>now()</function_c", "", [NOW]),
    (OLMO3, f"<function_calls>{J_ADD}\n{J_NOW}</function_calls>", "", [ADD, NOW]),
    (
        OLMO3,
        "<function_calls>add(t='</function_calls>', b=[true, null])</function_calls>",
        "",
        [ParsedCall("add", '{"t": "</function_calls>", "b": [true, null]}')],
    ),
    (
        INTERNLM,
        f'Hm. {ACTION}{{"name": "add", "parameters": {{"a": 1}}}}<|action_end|>',
        "Hm.",
        [ADD],
    ),
    (INTERNLM, f"{ACTION}\n{J_ADD}\n<|action_end|>\n", "", [ADD]),
    (LONGCAT, f"<longcat_tool_call>\n{J_ADD}\n</longcat_tool_call>", "", [ADD]),
    (
        LONGCAT,
        f"a<longcat_tool_call>{J_ADD}</longcat_tool_call>\n<longcat_tool_call>{J_NOW}",
        "a",
        [ADD, NOW],
    ),
    (GRANITE_20B, f"<function_call> {J_ADD}\n<function_call>{J_NOW}", "", [ADD, NOW]),
    (HY3_PLAIN, f"So.{HY}</tool_call>\n</tool_calls>", "So.", [ADD]),
    (HY3_PLAIN, "<tool_calls><tool_call>now<tool_sep></tool_call></tool_calls>", "", [NOW]),
    (
        DEEPSEEK_V41,
        f"\n\n<｜DSML｜ calls>\n{V41}{V41}</｜DSML｜ calls>",
        "",
        [ADD, ADD],
    ),
    (
        STEP3,
        f'<｜tool_calls_begin｜>{S3}<steptml:parameter name="t">x</steptml:parameter>\n'
        f'<steptml:parameter name="a">1</steptml:parameter>{S3_END}{S3}{S3_END}'
        "<｜tool_calls_end｜>",
        "",
        [BOTH, ParsedCall("add", "{}")],
    ),
    (
        MIMO,
        "<tool_call><function=add><parameter=t>\nx\n</parameter></function></tool_call>",
        "",
        [ParsedCall("add", '{"t": "\\nx\\n"}')],
    ),
    # What closes an argument, or a call, may be missing.
    (
        QWEN3_CODER,
        f"{CODER}<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "",
        [BOTH],
    ),
    (QWEN3_CODER, f"{CODER}</parameter>\n</tool_call>", "", [ParsedCall("add", '{"t": "x"}')]),
    (
        QWEN3_CODER,  # which is no argument
        f"{CODER}<parameter=b>\n1\n</parameter>\n</function>\n</tool_call>",
        "",
        [ParsedCall("add", '{"t": "x\\n<parameter=b>\\n1"}')],
    ),
    (
        GLM45,
        "<tool_call>add<arg_key>t</arg_key><arg_value>x<arg_key>a</arg_key><arg_value>1</arg_value>"
        "</tool_call>",
        "",
        [BOTH],
    ),
    (
        MINIMAX_M2,
        '<invoke name="add"><parameter name="t">x\n<parameter name="a">1</parameter></invoke>',
        "",
        [BOTH],
    ),
    (
        DEEPSEEK_V4,
        f"<｜DSML｜tool_calls>\n{V4}x</｜DSML｜parameter>\n</｜DSML｜tool_calls>",
        "",
        [ParsedCall("add", '{"t": "x"}')],
    ),
    # What begins an argument may be a part of a text, too.
    (
        QWEN3_CODER,  # where that argument is given behind it
        f"{CODER}<parameter=a>\n</parameter>\n<parameter=a>\n1\n</parameter>\n</function>",
        "",
        [ParsedCall("add", '{"t": "x\\n<parameter=a>", "a": 1}')],
    ),
    (
        QWEN3_CODER,  # where it begins no line
        f"{CODER}to <parameter=a>\n</parameter>\n</function>\n</tool_call>",
        "",
        [ParsedCall("add", '{"t": "x\\nto <parameter=a>"}')],
    ),
    (
        GLM45,  # where no value follows
        "<tool_call>add<arg_key>t</arg_key><arg_value>x <arg_key>a</arg_key></arg_value>"
        "</tool_call>",
        "",
        [ParsedCall("add", '{"t": "x <arg_key>a</arg_key>"}')],
    ),
    (
        MINIMAX_M2,
        '<invoke name="add"><parameter name="t"><parameter name="a">2</parameter>'
        '<parameter name="a">1</parameter></invoke>',
        "",
        [ParsedCall("add", '{"t": "<parameter name=\\"a\\">2", "a": 1}')],
    ),
    # All arguments in one, which nobody asked for.
    (
        DEEPSEEK_V32,
        V4.replace('"t"', '"input"') + '{"a": 1}</｜DSML｜parameter></｜DSML｜invoke>',
        "",
        [ADD],
    ),
    (
        MINICPM5,
        '<function name="add"><param name="properties">{\'a\': 1}</param></function>',
        "",
        [ADD],
    ),
    # What Python does not take.
    (
        LFM2,
        "<|tool_call_start|>[add(a=007, t='05', b=[1.05, 00, 0x1f, 010], c={3})]<|tool_call_end|>",
        "",
        [ParsedCall("add", '{"a": 7, "t": "05", "b": [1.05, 0, 31, 10], "c": [3]}')],
    ),
    (
        LFM2,
        "<|tool_call_start|>[add(t='a\0b')]<|tool_call_end|>",
        "",
        [ParsedCall("add", '{"t": "a\\u0000b"}')],
    ),
    # Quotes of one kind within one another.
    *(
        (LFM2, f"<|tool_call_start|>[{told}]<|tool_call_end|>", "", calls)
        for told, calls in (
            (
                "add(t='cut -c '2-4' log', a=1)",
                [ParsedCall("add", """{"t": "cut -c '2-4' log", "a": 1}""")],
            ),
            ('add(t="a "b" c"), now()', [ParsedCall("add", r'{"t": "a \"b\" c"}'), NOW]),
            ("add(t='p 'a)]' q')", [ParsedCall("add", """{"t": "p 'a)]' q"}""")]),
            (
                "add(t='who's'), add(t='it')",
                [ParsedCall("add", """{"t": "who's"}"""), ParsedCall("add", '{"t": "it"}')],
            ),
        )
    ),
    (
        OLMO3,
        "<function_calls>add(t='a 'b' c')</function_calls>",
        "",
        [ParsedCall("add", """{"t": "a 'b' c"}""")],
    ),
]
NO_CALLS: list[tuple[ToolFormat, str]] = [
    (OLMO3, "<function_calls>sub(a=1)</function_calls>"),
    (OLMO3, "<function_calls>add(a=1) and more</function_calls>"),
    (OLMO3, "<function_calls>add(1)</function_calls>"),
    (OLMO3, "<function_calls></function_calls>"),
    (LFM2, "<|tool_call_start|>[add(t='a 'b' c', u='d')]<|tool_call_end|>"),  # ends where?
    (LFM2, "<|tool_call_start|>[add(t='a' b)]<|tool_call_end|>"),
    (INTERNLM, f"<|action_start|><|interpreter|>{J_ADD}"),
    (LONGCAT, '<longcat_tool_call>{"name": "sub", "arguments": {}}</longcat_tool_call>'),
    (GRANITE_20B, "<function_call> says so"),
    (HY3_PLAIN, "<tool_calls>[1]"),
    (STEP3, '<steptml:invoke name="add"></steptml:invoke>'),
    (DEEPSEEK_V41, '<｜DSML｜invoke name="add"></｜DSML｜invoke>'),
]


parse = partial(parsed, FUNCTIONS)


@pytest.mark.parametrize(("syntax", "text", "content", "calls"), FOUND)
def test_calls(syntax: ToolFormat, text: str, content: str, calls: list[ParsedCall]) -> None:
    for pieces in ([text], [*text], [text[: len(text) // 2], text[len(text) // 2 :]]):
        told, found = parse(syntax, *pieces)
        assert (told, [each.name for each in found]) == (content, [each.name for each in calls])
        assert [json.loads(each.arguments) for each in found] == [
            json.loads(each.arguments) for each in calls
        ]


@pytest.mark.parametrize(("syntax", "text"), NO_CALLS)
def test_what_is_no_call_stays_content(syntax: ToolFormat, text: str) -> None:
    assert parse(syntax, text) == (text, [])
    assert parse(syntax, *text) == (text, [])


@pytest.mark.parametrize(
    ("syntax", "source"),
    [
        (OLMO3, "Call in <function_calls></function_calls>"),
        (INTERNLM, "'<|action_start|><|plugin|>\\n' + call + '<|action_end|>'"),
        (LONGCAT, "<longcat_tool_call>{'name': name}</longcat_tool_call>"),
        (GRANITE_20B, '<function_call> {"name": "f", "arguments": {}}'),
        (HY3, "{% set suffix = ':opensource' %}{{ '<tool_sep{}><arg_key{}>'.format(suffix) }}"),
        (HY3_PLAIN, "<tool_call>f<tool_sep><arg_key>a</arg_key>"),
        (DEEPSEEK_V41, "<｜DSML｜ calls>"),
        (DEEPSEEK_V4, "<｜DSML｜tool_calls>"),
        (STEP3, '<｜tool_calls_begin｜><steptml:invoke name="f">'),
        (DEEPSEEK_V3, "<｜tool▁calls▁begin｜>```json"),
        (MIMO, "{{ '<parameter=' ~ key ~ '>' ~ value ~ '</parameter>' }}<function="),
        (QWEN3_CODER, "{{ '<parameter=' ~ key ~ '>\\n' ~ value }}<function="),
    ],
)
def test_templates_are_recognized(syntax: ToolFormat, source: str) -> None:
    assert recognized(source) is syntax


@pytest.mark.parametrize("name", SAME)
def test_other_names_of_vllm(name: str) -> None:
    assert tool_call_parser(name) == name
    assert named(name, "").name == SAME[name]
    assert name not in NAMES


def test_a_name_that_is_none() -> None:
    with pytest.raises(RequestError, match=r"granite4, .*hermes, .*qwen3_xml"):
        named("qwen4_xml", "")


@pytest.mark.parametrize(
    ("syntax", "call"),
    [
        (QWEN3_CODER, f"{CODER}</parameter>\n</function>\n</tool_call>"),
        (GLM45, "<tool_call>now</tool_call>"),
        (DEEPSEEK_V4, f"{V4}x</｜DSML｜parameter></｜DSML｜invoke>"),
    ],
)
def test_a_call_ends_a_thought_that_was_not_closed(syntax: ToolFormat, call: str) -> None:
    thought = Thought(("<think>",), ("</think>",), is_open=True, ends_before=syntax.ends_thought)
    splitter = ReasoningSplitter(thought)
    splits = [splitter.take(char, is_last=False) for char in f"Well.\n{call}"]
    splits.append(splitter.finish())
    assert "".join(each.reasoning for each in splits) == "Well."
    content = "".join(each.content for each in splits)
    assert (content, len(parse(syntax, content)[1])) == (call, 1)


@pytest.mark.parametrize(("text", "value"), [("018", 18), ("-007", -7), ("00", 0), ("01x", "01x")])
def test_numbers_may_begin_with_zeros(text: str, value: Any) -> None:
    told = f"<tool_call>add<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"
    [call] = parse(GLM45, told)[1]
    assert json.loads(call.arguments) == {"a": value}
    told = told.replace(">a<", ">t<")
    [call] = parse(GLM45, told)[1]
    assert json.loads(call.arguments) == {"t": text}


@pytest.mark.parametrize(
    ("syntax", "told", "text"),
    [
        (
            QWEN3_CODER,
            f"{CODER}<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
            "x\n<parameter=a>\n1",
        ),
        (
            GLM45,
            "<tool_call>add<arg_key>t</arg_key><arg_value>x<arg_key>a</arg_key><arg_value>1"
            "</arg_value></tool_call>",
            "x<arg_key>a</arg_key><arg_value>1",
        ),
        (
            HY3_PLAIN,
            f"{HY.replace('>a<', '>t<').replace('>1<', '>x<arg_key>a</arg_key><arg_value>1<')}"
            "</tool_call>",
            "x<arg_key>a</arg_key><arg_value>1",
        ),
        (
            DEEPSEEK_V4,
            f'{V4}x<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>'
            "</｜DSML｜invoke>",
            'x<｜DSML｜parameter name="a" string="false">1',
        ),
    ],
)
def test_no_tag_is_missing_in_what_a_grammar_wrote(
    syntax: ToolFormat, told: str, text: str
) -> None:
    tools = ToolSyntax(syntax)
    found: list[Any] = []
    for is_formed in (True, False):
        parser = tools.parser(FUNCTIONS, skip_special_tokens=True, is_formed=is_formed)
        found += [json.loads(each.arguments) for each in parser.take(told, is_last=True).calls]
    assert found == [{"t": text}, {"t": "x", "a": 1}]


def test_many_properties_cost_nothing_with_each_argument() -> None:
    class Names(dict[str, Any]):
        num_read = 0

        def __iter__(self) -> Iterator[str]:
            Names.num_read += 1
            return super().__iter__()

    properties = Names({f"a{each}": {"type": "string"} for each in range(50)})
    functions = {"add": {"type": "object", "properties": properties}}
    told = "".join(f"<parameter=a{each}>\nx\n</parameter>\n" for each in range(50))
    text = f"<tool_call>\n<function=add>\n{told}</function>\n</tool_call>"
    [call] = ToolCallParser(functions, QWEN3_CODER).take(text, is_last=True).calls
    assert (len(json.loads(call.arguments)), Names.num_read) == (50, 1)
