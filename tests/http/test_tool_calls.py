"""Tool calls are found in text, however it is cut into pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.base import ParsedCall

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
ADD = ParsedCall("add", '{"a": 1, "b": 2}')


def parse(*pieces: str) -> tuple[str, list[ParsedCall]]:
    parser = ToolCallParser({"add": {}})
    content, calls = "", []
    for parsed in [*(parser.feed(piece) for piece in pieces), parser.finish()]:
        content += parsed.content
        calls += parsed.calls
    return content, calls


def test_content_and_calls_keep_their_order() -> None:
    parsed = ToolCallParser({"add": {}}).take(f"a\n{CALL}b{CALL}", is_last=True)
    assert parsed.parts == ("a", ADD, "b", ADD)
    assert (parsed.content, parsed.calls) == ("ab", (ADD, ADD))
    assert parsed.ends == (1, 2 + len(CALL), 3 + len(CALL), 3 + 2 * len(CALL))


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("plain < text\n", "plain < text\n", []),
        (CALL, "", [ADD]),
        (f"Let me see.\n\n{CALL}", "Let me see.", [ADD]),
        (f"{CALL}\n{CALL}\n", "", [ADD, ADD]),
        (f"{CALL}\nand done", "\nand done", [ADD]),
        (CALL.removesuffix("</tool_call>"), "", [ADD]),  # the end token came instead
        ('<tool_call>{"name": "add"}</tool_call>', "", [ParsedCall("add", "{}")]),
        *(
            (
                f'<tool_call>{{"name": "add", "arguments": {nothing}}}</tool_call>',
                "",
                [ParsedCall("add", "{}")],
            )
            for nothing in ("null", '""')
        ),
        (
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [ParsedCall("add", '{"a": 1}')],
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": "\\ud800é"}}</tool_call>',
            "",
            [ParsedCall("add", '{"a": "\\ud800\\u00e9"}')],  # a half is told as the escape it was
        ),
        (
            '<tool_call>{"name": "add", "arguments": {"a": "x</tool_call>y"}}</tool_call>!',
            "!",
            [ParsedCall("add", '{"a": "x</tool_call>y"}')],
        ),
        (f"<tool_call> or {CALL}", "<tool_call> or", [ADD]),
        (
            f'<tool_call>{{"name": "add</tool_call>\n{CALL}',
            '<tool_call>{"name": "add</tool_call>',
            [ADD],
        ),
    ],
)
def test_calls(text: str, content: str, calls: list[ParsedCall]) -> None:
    assert parse(text) == (content, calls)
    assert parse(*text) == (content, calls)


@pytest.mark.parametrize(
    "text",
    [
        "a <tool_call>{broken</tool_call> b",
        'a \n <tool_call>{"name": "other", "arguments": {}}</tool_call>',
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": ["add"]}</tool_call>',
        '<tool_call>{"name": {"add": 1}, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": NaN}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "\\ud800"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "not JSON"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "[1]"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1e400}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": ' + "[" * 5000 + "</tool_call>",
        '<tool_call>{"name": "add", "arguments": ' + "[" * 5000 + "]" * 5000 + "}</tool_call>",
        '<tool_call>{"name": "add</tool_call>',
        "an open \n <tool_call>{",
        "almost <tool_cal",
        "  ",
    ],
)
def test_what_is_no_call_stays_content(text: str) -> None:
    assert parse(text) == (text, [])
    assert parse(*text) == (text, [])


def test_content_is_given_as_early_as_it_can() -> None:
    parser = ToolCallParser({"add": {}})
    assert parser.feed("Hello").content == "Hello"
    assert parser.feed(" wor<").content == " wor"
    assert parser.feed("b>").content == "<b>"
    assert parser.feed(" the tag <tool_call> ").content == " the tag"
    assert parser.feed("begins a").content == " <tool_call> begins a"
    assert parser.feed(f"\n{CALL}").calls == (ADD,)


PIECES = [
    "<tool_call>",
    "</tool_call>",
    CALL,
    "<",
    "tool",
    " ",
    "\n",
    "x",
    json.dumps({"name": 1}),
    '{"name": "add',
    '"}',
]


@given(st.lists(st.sampled_from(PIECES), max_size=8), st.data())
def test_pieces_make_no_difference(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    whole = parse(text)
    assert parse(*text) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert parse(text[:cut], text[cut:]) == whole
    if not whole[1]:
        assert whole[0] == text
    parser = ToolCallParser({"add": {}})
    found = [parser.feed(text[:cut]), parser.take(text[cut:], is_last=True)]
    told = [one for each in found for one in zip(each.parts, each.ends, strict=True)]
    for part, end in told:
        assert text[:end].endswith(part if isinstance(part, str) else ("</tool_call>", "}", "}\n"))
    assert [end for _, end in told] == sorted(end for _, end in told)
