"""Calls and thoughts of formats that vLLM and llama.cpp read, and where models close no thought."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from onnxport.serving.channels import Channels, ChannelSplitter
from onnxport.serving.http.chat_turn import Turn
from onnxport.serving.http.reasoning import Thinking
from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.base import ParsedCall, ToolFormat
from onnxport.serving.http.tool_formats.cohere import COHERE4
from onnxport.serving.http.tool_formats.functionary import FUNCTIONARY_MESSAGE
from onnxport.serving.http.tool_formats.gemma import GEMMA4
from onnxport.serving.http.tool_formats.hermes import HERMES
from onnxport.serving.http.tool_formats.hunyuan import HUNYUAN
from onnxport.serving.http.tool_formats.hy3 import HY4
from onnxport.serving.http.tool_formats.invoke_calls import DOTS
from onnxport.serving.http.tool_formats.k2_horizon import K2_HORIZON
from onnxport.serving.http.tool_formats.mistral import MISTRAL_NAME
from onnxport.serving.http.tool_formats.muse import MUSE
from onnxport.serving.http.tool_formats.plamo3 import PLAMO3
from onnxport.serving.http.tool_formats.registry import recognized
from onnxport.serving.http.tool_formats.syntax import ToolSyntax
from onnxport.serving.reasoning import ReasoningFormat
from onnxport.serving.reasoning_formats import FORMATS, reasoning_format
from onnxport.serving.thoughts import ReasoningSplitter, Thought
from tests.http.parsing import parsed

FUNCTIONS: dict[str, Any] = {
    "book": {
        "type": "object",
        "properties": {"seats": {"type": "integer"}, "row": {"type": "string"}},
    },
    "list": {"type": "object"},
}


def book(**arguments: Any) -> ParsedCall:
    return ParsedCall("book", json.dumps(arguments))


LIST = ParsedCall("list", "{}")
DOT = '<invoke name="book">\n<parameter name="seats">2</parameter>\n</invoke>\n'
ATEM = (
    '<atem:function_calls>\n<atem:invoke name="book">\n'
    '<atem:parameter name="row">7 </atem:parameter>'
    "\n</atem:invoke>\n</atem:function_calls>"
)
K2 = "<ifm|tool_calls>\n{}</ifm|tool_calls>"
K2_CALL = (
    "<ifm|tool_call>book\n<ifm|arg_key>seats</ifm|arg_key>\n<ifm|arg_value>2</ifm|arg_value>\n"
    "</ifm|tool_call>\n"
)
HY = (
    "<tool_calls><tool_call>book<arg_key>row</arg_key><arg_value>7</arg_value></tool_call>"
    "<tool_call>list</tool_call></tool_calls>"
)
JSON_BOOK = '{"name": "book", "arguments": {"seats": 2}}'


def plamo(name: str, arguments: str) -> str:
    """Return a call in PLaMo's marks: `[x]` begins one and `[/x]` ends it."""
    told = (
        f"[tool_request][tool_name]{name}[/tool_name]"
        f"[tool_arguments]<|plamo:constrain|>json<|plamo:msg|>{arguments}[/tool_arguments]"
        "[/tool_request]"
    )
    told = f"[tool_requests]{told}[/tool_requests]".replace("[/", "<|plamo:end_")
    return told.replace("[", "<|plamo:begin_").replace("]", ":plamo|>")


FOUND: list[tuple[ToolFormat, str, str, list[ParsedCall]]] = [
    (DOTS, f"So.<dots_function_call>\n{DOT}</dots_function_call>", "So.", [book(seats=2)]),
    (DOTS, f"<dots_function_call>\n{DOT}{DOT}", "", [book(seats=2)] * 2),
    (DOTS, f"<dots_function_call>{JSON_BOOK}\n</dots_function_call>", "", [book(seats=2)]),
    (PLAMO3, "So." + plamo("book", '{"seats": 2}'), "So.", [book(seats=2)]),
    (PLAMO3, plamo("list", ""), "", [LIST]),
    (PLAMO3, plamo("list", "{}").partition("<|plamo:end_tool_arg")[0], "", [LIST]),
    (K2_HORIZON, f"So.\n{K2.format(K2_CALL + K2_CALL)}", "So.", [book(seats=2)] * 2),
    (K2_HORIZON, K2.format(f"<ifm|tool_call>{JSON_BOOK}</ifm|tool_call>"), "", [book(seats=2)]),
    (K2_HORIZON, K2.format("<ifm|tool_call>list\n</ifm|tool_call>"), "", [LIST]),
    (
        K2_HORIZON,  # a type beside a value, which the function's own goes before
        K2_CALL.replace(
            "</ifm|arg_key>\n", "</ifm|arg_key>\n<ifm|arg_type>string</ifm|arg_type>\n"
        ),
        "",
        [book(seats=2)],
    ),
    (
        K2_HORIZON,
        K2_CALL.replace("seats", "code").replace(
            "</ifm|arg_key>\n", "</ifm|arg_key>\n<ifm|arg_type>string</ifm|arg_type>\n"
        ),
        "",
        [book(code="2")],
    ),
    (HY4, HY, "", [book(row="7"), LIST]),
    (MUSE, f" to=book<|message|>{ATEM}", "", [book(row="7 ")]),
    (
        MUSE,
        f"So.<|start|>assistant to=book<|message|>{ATEM}<|eom|>"
        "<|start|>assistant to=list<|message|>"
        '<atem:function_calls>\n<atem:invoke name="list">\n</atem:invoke>\n</atem:function_calls>',
        "So.",
        [book(row="7 "), LIST],
    ),
]
NO_CALLS: list[tuple[ToolFormat, str]] = [
    (DOTS, f"<dots_function_call>{DOT.replace('book', 'buy')}</dots_function_call>"),
    (DOTS, "<dots_function_call>no</dots_function_call>"),
    (DOTS, f"<dots_function_call>{JSON_BOOK.replace('book', 'buy')}"),
    (PLAMO3, plamo("buy", "{}")),
    (PLAMO3, plamo("book", "2")),
    (K2_HORIZON, K2.format(K2_CALL.replace("book", "buy"))),
    (MUSE, f"It is {ATEM}"),  # in a message to the user it is text
    (MUSE, f" to=buy<|message|>{ATEM}"),
]


parse = partial(parsed, FUNCTIONS)


@pytest.mark.parametrize(("syntax", "text", "content", "calls"), FOUND)
def test_calls(syntax: ToolFormat, text: str, content: str, calls: list[ParsedCall]) -> None:
    assert parse(syntax, text) == (content, calls)
    assert parse(syntax, *text) == (content, calls)


@pytest.mark.parametrize(("syntax", "text"), NO_CALLS)
def test_what_is_no_call_stays_content(syntax: ToolFormat, text: str) -> None:
    assert parse(syntax, text) == (text, [])
    assert parse(syntax, *text) == (text, [])


@pytest.mark.parametrize(
    ("syntax", "source"),
    [
        (DOTS, "<dots_function_call>"),
        (PLAMO3, "{{ '<|plamo:begin_tool_requests:plamo|>' }}"),
        (K2_HORIZON, "<ifm|tool_calls> <ifm|arg_key>"),
        (MUSE, "<atem:function_calls>"),
        (HY4, "<tool_calls><tool_call>f<arg_key>"),
    ],
)
def test_templates_are_recognized(syntax: ToolFormat, source: str) -> None:
    assert recognized(source) is syntax


@pytest.mark.parametrize("name", ["hy_v3", "hy_v4"])
@pytest.mark.parametrize(
    "source",
    [
        "<tool_calls:9f> <arg_key:9f> <think:9f>",
        "{% set S = ':9f' %}{{ '<tool_calls{}><arg_key{}>'.format(S) }}{{ '<think{}>'.format(S) }}",
    ],
)
def test_tags_have_the_suffix_of_a_release(name: str, source: str) -> None:
    separator = "<tool_sep" if name == "hy_v3" else ""
    syntax = recognized(source + separator)
    assert syntax is not None
    assert syntax.name == name
    told = HY.replace("book<", "book<tool_sep><").replace("list<", "list<tool_sep><")
    text = (told if separator else HY).replace(">", ":9f>").replace(":9f>7", ":9f>7")
    assert parse(syntax, text) == ("", [book(row="7"), LIST])
    found = reasoning_format("auto", [source])
    assert isinstance(found, ReasoningFormat)
    assert found.opens[0] == "<think:9f>"
    thought = found.thought("<think:9f>")
    assert thought is not None
    assert split(thought, "a</think:9f>b") == ("a", "b")


def split(thought: Thought, *pieces: str) -> tuple[str, str]:
    splitter = ReasoningSplitter(thought)
    parts = [*(splitter.take(each, is_last=False) for each in pieces), splitter.finish()]
    return "".join(each.reasoning for each in parts), "".join(each.content for each in parts)


SELF = " to=self<|message|>"
OPEN = Thought(("<think>",), ("</think>",), is_open=True)
CALL = f"<tool_call>\n{JSON_BOOK}\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (f"I book.\n{CALL}", "I book.", CALL),
        (f"I book.\n{CALL}\n{CALL}\n", "I book.", f"{CALL}\n{CALL}\n"),
        (CALL, "", CALL),
        # The thought goes on, or is closed, or cut.
        (f"First {CALL} and then {CALL}", f"First {CALL} and then ", CALL),
        (f"I book {CALL}, maybe", f"I book {CALL}, maybe", ""),
        (f"I book {CALL}\n</think>\nDone.", f"I book {CALL}", "Done."),
        (f"I book {CALL}</think>{CALL}", f"I book {CALL}", CALL),
        (CALL[:30], CALL[:30], ""),
        ("It is <tool_call> and </tool_call>", "It is <tool_call> and </tool_call>", ""),
        (f"<tool_call> or {CALL}", "<tool_call> or ", CALL),
        ("a <tool", "a <tool", ""),
    ],
)
def test_a_call_that_nothing_follows_ends_a_thought(
    text: str, reasoning: str, content: str
) -> None:
    thought = replace(OPEN, ends_with=HERMES.ends_thought_with)
    assert split(thought, text) == (reasoning, content)
    assert split(thought, *text) == (reasoning, content)


def test_a_thought_that_speaks_of_a_tag_is_told_as_it_comes() -> None:
    splitter = ReasoningSplitter(replace(OPEN, ends_with=HERMES.ends_thought_with))
    assert splitter.feed("a <tool_call> b").reasoning == "a <tool_call> b"
    assert splitter.feed(f"c {CALL}").reasoning == "c "
    assert splitter.feed(" d").reasoning == f"{CALL} d"


@pytest.mark.parametrize(
    ("syntax", "call"),
    [
        (HUNYUAN, f"<tool_calls>[{JSON_BOOK}]</tool_calls>"),
        (MISTRAL_NAME, '[TOOL_CALLS]book[ARGS]{"seats": 2}'),
    ],
)
def test_other_calls_that_nothing_follows(syntax: ToolFormat, call: str) -> None:
    thought = replace(OPEN, ends_with=syntax.ends_thought_with)
    for pieces in ([f"So {call}"], f"So {call}"):
        assert split(thought, *pieces) == ("So ", call)
    for pieces in ([f"So {call}</think>b"], f"So {call}</think>b"):
        assert split(thought, *pieces) == (f"So {call}", "b")
    assert parse(syntax, call) == ("", [book(seats=2)])


@pytest.mark.parametrize("syntax", [GEMMA4, COHERE4, K2_HORIZON, PLAMO3, HY4])
def test_what_opens_calls_ends_a_thought(syntax: ToolFormat) -> None:
    thought = replace(OPEN, ends_before=syntax.ends_thought)
    assert split(thought, f"So {syntax.markers[0]}x") == ("So ", f"{syntax.markers[0]}x")


@pytest.mark.parametrize(
    ("name", "prompt", "text"),
    [
        ("kimi_k3", "<|open|>think<|sep|>", "a<|open|>response<|sep|>b<|close|>response<|sep|>"),
        ("cohere_command4", "<|START_THINKING|>", "a<|START_TEXT|>b<|END_TEXT|>"),
        ("k2_horizon", "<ifm|think_fast>", "a</ifm|think_fast>b"),
        ("plamo3", "", "<|plamo:begin_think:plamo|>a<|plamo:end_think:plamo|>b"),
        (
            "muse",
            "",
            f"{SELF}a<|eom|><|start|>assistant to=commentary<|message|>b<|eom|>",
        ),
        ("gemma4", "", "<|channel>thought\na<channel|>b<channel|>"),
        ("gemma4", "", "<|channel><|channel>thought\na<channel|>b<|channel>thought\n<channel|>"),
    ],
)
def test_thoughts(name: str, prompt: str, text: str) -> None:
    told = FORMATS[name]
    thought = told.thought(prompt)
    assert thought is not None
    thought = replace(thought, ends_before=told.answers)
    assert split(thought, text) == ("a", "b")
    assert split(thought, *text) == ("a", "b")


def test_a_header_is_not_told_where_no_functions_are_offered() -> None:
    params = SimpleNamespace(skip_special_tokens=True, structured_outputs=None)
    job: Any = SimpleNamespace(params=params)
    turn = Turn(job, {}, Thinking(False), "m", None)

    def parser(syntax: ToolFormat) -> ToolCallParser | None:
        service: Any = SimpleNamespace(tools=ToolSyntax(syntax))
        return turn.parser(service)

    assert parser(HERMES) is None
    found = parser(FUNCTIONARY_MESSAGE)
    assert found is not None
    assert found.take("all\nHello >>> you", is_last=True).content == "Hello >>> you"


def test_a_commentary_before_the_analysis_is_nothing() -> None:
    splitter = ChannelSplitter(Channels())
    text = "<|channel|>commentary to=assistant<|channel|>analysis<|message|>a<|end|>"
    parts = splitter.parts(f"{text}<|start|>assistant<|channel|>final<|message|>b", is_last=True)
    assert "".join(each.reasoning for each in parts) == "a"
    assert "".join(each.content for each in parts) == "b"
