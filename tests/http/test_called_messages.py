"""Calls that are sent back reach LFM2, whose chat templates speak of none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onnxport.errors import RequestError
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.http.tool_calls import ToolCallParser
from onnxport.serving.http.tool_formats.lfm2 import LFM2

from . import tool_templates as templates

ADD = ("add", {"a": 1, "b": [True, None, -2.5]})


def asked(*calls: tuple[str, dict[str, Any]], content: str | None = None) -> list[dict[str, Any]]:
    told = [
        {
            "id": f"call_{place}",
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments)},
        }
        for place, (name, arguments) in enumerate(calls)
    ]
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": content, "tool_calls": told},
        {"role": "tool", "tool_call_id": "call_0", "content": "3"},
    ]


@pytest.mark.parametrize("source", [templates.LFM2, templates.LFM25])
def test_calls_are_ahead_of_the_text(source: str) -> None:
    template = ChatTemplate({"default": source})
    call = "<|tool_call_start|>[add(a=1, b=[True, None, -2.5])]<|tool_call_end|>"
    tools = [{"type": "function", "function": {"name": "add"}}]
    for content, text in ((None, ""), ("I add.", "I add.")):
        found = template.render(asked(ADD, content=content), tools)
        assert f"<|im_start|>assistant\n{call}{text}<|im_end|><|im_start|>tool\n3" in found


@pytest.mark.parametrize(
    "calls",
    [
        [ADD],
        [ADD, ("empty", {})],
        [("say", {"text": 'it\'s "so"\n\\ \u2028 ü 😀', "from": {"a b": [{}], "c": False}})],
        [("get-weather", {"city": "Köln"}), ADD],
        [("find", {"a-b": 1})],
        [("say", {"text": "\ud83d"})],
    ],
)
def test_the_model_would_have_written_them_so(calls: list[tuple[str, dict[str, Any]]]) -> None:
    rendered = ChatTemplate({"default": templates.LFM2}).render(asked(*calls))
    text = rendered.split("<|im_start|>assistant\n")[1].split("<|im_end|>")[0]
    parser = ToolCallParser({name: {} for name, _ in calls}, LFM2)
    parsed = parser.take(text, is_last=True)
    assert parsed.content == ""
    assert [(one.name, json.loads(one.arguments)) for one in parsed.calls] == calls


def test_a_template_that_writes_calls_gets_them() -> None:
    own = templates.LFM2 + "{% for m in messages %}{{ m.tool_calls | default('') }}{% endfor %}"
    found = ChatTemplate({"default": own}).render(asked(ADD))
    assert "<|tool_call_start|>" not in found
    assert "call_0" in found


def test_other_templates_are_left_alone() -> None:
    assert "add" not in ChatTemplate({"default": templates.NO_TOOLS}).render(asked(ADD))


def test_arguments_that_are_no_json() -> None:
    messages = asked(ADD)
    messages[1]["tool_calls"][0]["function"]["arguments"] = "{"
    with pytest.raises(RequestError, match="are not JSON"):
        ChatTemplate({"default": templates.LFM2}).render(messages)
