"""Openings of calls within one another are not read as often as there are of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from onnxport.serving.http.tool_calls import MOST_TRIED, ToolCallParser
from onnxport.serving.http.tool_formats.apertus import APERTUS
from onnxport.serving.http.tool_formats.base import ParsedCall, ToolFormat
from onnxport.serving.http.tool_formats.cohere import COHERE_FENCE
from onnxport.serving.http.tool_formats.cursor import AwaitedBracket, Cursor
from onnxport.serving.http.tool_formats.deepseek import DEEPSEEK_V31
from onnxport.serving.http.tool_formats.gemma import GEMMA4
from onnxport.serving.http.tool_formats.harmony import HARMONY
from onnxport.serving.http.tool_formats.hunyuan import HUNYUAN
from onnxport.serving.http.tool_formats.invoke_calls import DEEPSEEK_V32
from onnxport.serving.http.tool_formats.kimi_k2 import KIMI_K2
from onnxport.serving.http.tool_formats.kimi_k3 import KIMI_K3
from onnxport.serving.http.tool_formats.minimax import MINIMAX
from onnxport.serving.http.tool_formats.mistral import MISTRAL_LIST, MISTRAL_NAME
from onnxport.serving.http.tool_formats.pythonic import PYTHONIC
from onnxport.serving.http.tool_formats.xml_calls import GLM45

FUNCTIONS: dict[str, Any] = {"add": {"type": "object", "properties": {"a": {"type": "integer"}}}}
CALL = '{"name": "add", "arguments": {"a": '
K2 = '<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": '
K3 = '<|open|>call tool="add" index="1"<|sep|><|open|>json type="object"<|sep|>{"a": '
HEADER = "<|channel|>commentary to=functions.add<|message|>"
K3_END = "<|close|>json<|sep|><|close|>call<|sep|>"
NESTED: list[tuple[ToolFormat, str, str]] = [
    (HUNYUAN, f"<tool_calls>[{CALL}", "}}]</tool_calls>"),
    (HUNYUAN, "<tool_calls>[", "]</tool_calls>"),
    (MISTRAL_LIST, f"[TOOL_CALLS][{CALL}", "}}]"),
    (MISTRAL_NAME, '[TOOL_CALLS]add[ARGS]{"a": ', "}"),
    (APERTUS, '<|tools_prefix|>[{"add": ', "}]<|tools_suffix|>"),
    (COHERE_FENCE, "Action:\n```json\n[", "]\n```"),
    (PYTHONIC, "<|python_start|>[add(a=", ")]<|python_end|>"),
    (DEEPSEEK_V31, '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": ', "}<｜tool▁call▁end｜>"),
    (KIMI_K2, K2, "}<|tool_call_end|>"),
    (KIMI_K3, K3, f"}}{K3_END}"),
    (KIMI_K3, K3, K3_END),
    (DEEPSEEK_V32, '<｜DSML｜invoke name="add">{"a": ', "}</｜DSML｜invoke>"),
    (DEEPSEEK_V32, '<｜DSML｜invoke name="add">{"a": ', "</｜DSML｜invoke>"),
    (MINIMAX, f"<tool_calls>\n{CALL}", "}}\n</tool_calls>"),
    (GLM45, f"<tool_call>{CALL}", "}}</tool_call>"),
    (GLM45, f"<tool_call>{CALL}", "</tool_call>"),
    (GEMMA4, '<|tool_call>call:add{"a": ', "}<tool_call|>"),
    (GEMMA4, '<|tool_call>call:add{"a": ', "<tool_call|>"),
    (HARMONY, f'{HEADER}{{"a": ', "}"),
]


def parse(syntax: ToolFormat, text: str) -> tuple[str, list[ParsedCall]]:
    parser = ToolCallParser(FUNCTIONS, syntax)
    found = [parser.feed(text[at : at + 4]) for at in range(0, len(text), 4)]
    found.append(parser.finish())
    return "".join(each.content for each in found), [call for each in found for call in each.calls]


@pytest.mark.parametrize(("syntax", "opening", "closing"), NESTED)
def test_the_work_grows_as_the_text_does(
    syntax: ToolFormat, opening: str, closing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_seen = 0

    def counted(look: Callable[..., int | None], text: Callable[..., str]) -> Callable[..., Any]:
        def looks(self: Any, *given: Any) -> int | None:
            nonlocal num_seen
            num_seen += len(text(self, *given))
            return look(self, *given)

        return looks

    end = counted(AwaitedBracket.end, lambda self, text, at=0: text[at:])
    monkeypatch.setattr(AwaitedBracket, "end", end)
    wait_for = counted(Cursor.wait_for, lambda self, tag: self._text[self.at :])
    monkeypatch.setattr(Cursor, "wait_for", wait_for)
    text = opening * 400 + closing * 400
    content, calls = parse(syntax, text)
    assert not calls
    assert content == text or syntax is HARMONY  # which does not tell headers
    assert num_seen < 4 * MOST_TRIED * len(text)


@pytest.mark.parametrize("num_around", [1, MOST_TRIED - 1])
def test_a_call_within_what_is_none_is_found(num_around: int) -> None:
    text = (
        "<tool_calls>[" * num_around + f"<tool_calls>[{CALL}1}}}}]</tool_calls>" + "]" * num_around
    )
    before, behind = "<tool_calls>[" * num_around, "]" * num_around
    assert parse(HUNYUAN, text) == (before + behind, [ParsedCall("add", '{"a": 1}')])


def test_a_call_behind_what_is_none_is_found() -> None:
    nested = "<tool_calls>[" * 100 + "]</tool_calls>" * 100
    text = f"{nested} <tool_calls>[{CALL}1}}}}]</tool_calls>"
    assert parse(HUNYUAN, text) == (nested, [ParsedCall("add", '{"a": 1}')])
    whole = ToolCallParser(FUNCTIONS, HUNYUAN).take(text, is_last=True)
    assert (whole.content, len(whole.calls)) == (nested, 1)
