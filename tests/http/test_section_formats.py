"""Calls of which each is read by itself, in sections that may be there or not."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.base import Block, ParsedCall, ToolFormat
from onnxport.serving.http.tool_formats.deepseek import DEEPSEEK_V31
from onnxport.serving.http.tool_formats.invoke_calls import DEEPSEEK_V32, MINICPM5, MINIMAX_M2
from onnxport.serving.http.tool_formats.kimi_k2 import KIMI_K2
from onnxport.serving.http.tool_formats.minimax import MINIMAX
from onnxport.serving.http.tool_formats.minimax_m3 import MINIMAX_M3, SIGN
from tests.http.parsing import parsed

from .section_cases import (
    BEGIN,
    C_ADD,
    FOUND,
    FUNCTIONS,
    J_ADD,
    K_ADD,
    K_BEGIN,
    M2,
    M2_ADD,
    M3_ADD,
    NO_CALLS,
    V31_ADD,
    dsml,
    m3,
)

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
    ("syntax", "text"),
    [
        (DEEPSEEK_V31, BEGIN + V31_ADD * 2),
        (KIMI_K2, K_BEGIN + K_ADD * 2),
        (MINIMAX_M2, "<minimax:tool_call>\n" + M2_ADD * 2),
        (MINIMAX_M3, f"{SIGN}<tool_call>\n" + M3_ADD * 2),
    ],
)
def test_a_call_is_told_before_the_next_one_is_whole(syntax: ToolFormat, text: str) -> None:
    parser = ToolCallParser(FUNCTIONS, syntax)
    half = text.rindex("add") + 3
    assert [each.name for each in parser.feed(text[:half]).calls] == ["add"]
    assert [each.name for each in parser.take(text[half:], is_last=True).calls] == ["add"]


CODE = 'if a[i] > b(c): {"k": (1, [2])}  # ]})>\n' * 100
LONG = [
    (DEEPSEEK_V31, V31_ADD.replace('{"a": 1}', json.dumps({"t": CODE}))),
    (KIMI_K2, K_ADD.replace('{"a": 1}', json.dumps({"t": CODE}))),
    (MINIMAX_M2, M2.format(M2_ADD.replace('"a">1', f'"t">{CODE}'))),
    (DEEPSEEK_V32, dsml("t", "true", CODE)),
    (MINICPM5, C_ADD.replace('"a">1', f'"t"><![CDATA[{CODE}]]>')),
    (MINIMAX_M3, m3("t", CODE.replace("[", "("))),
    (MINIMAX, f"<tool_calls>{J_ADD.replace('1', json.dumps(CODE))}</tool_calls>"),
]


@pytest.mark.parametrize(("syntax", "text"), LONG, ids=[each.name for each, _ in LONG])
def test_a_long_call_is_not_read_anew_with_every_piece(syntax: ToolFormat, text: str) -> None:
    num_reads = 0

    def read(*given: Any) -> Block:
        nonlocal num_reads
        num_reads += 1
        return syntax.read(*given)

    _, calls = parse(replace(syntax, read=read), *text)
    assert (len(calls), len(text) > 3000, num_reads < 120) == (1, True, True)
