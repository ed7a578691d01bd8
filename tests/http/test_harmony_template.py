"""Conversations for a chat template that takes messages in channels, as gpt-oss's does."""

from __future__ import annotations

from typing import Any

import pytest

from onnxport.errors import RequestError
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.http.tool_formats.harmony import HARMONY
from onnxport.serving.http.tool_formats.registry import named, recognized
from onnxport.serving.reasoning_formats import reasoning_format

from .harmony import TEMPLATE

USER = {"role": "user", "content": "hi"}
SYSTEM = "<|start|>system<|message|>Reasoning: medium<|end|>"
HI = "<|start|>user<|message|>hi<|end|>"


def call(name: str, given: str = "{}", **more: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": given}, **more}


def written(name: str, given: str = "{}") -> str:
    begin = f"<|start|>assistant to=functions.{name}<|channel|>commentary json<|message|>"
    return f"{begin}{given}<|call|>"


def result(name: str, text: str) -> str:
    begin = f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"
    return f'{begin}"{text}"<|end|>'


def thought(text: str) -> str:
    return f"<|start|>assistant<|channel|>analysis<|message|>{text}<|end|>"


def rendered(*messages: dict[str, Any], **more: Any) -> str:
    text = ChatTemplate({"default": TEMPLATE}).render([USER, *messages], **more)
    assert text.startswith(SYSTEM + HI)
    assert text.endswith("<|start|>assistant")
    return text.removeprefix(SYSTEM + HI).removesuffix("<|start|>assistant")


def test_the_template_tells_the_formats() -> None:
    assert recognized(TEMPLATE) is HARMONY
    assert named("openai", TEMPLATE) is HARMONY
    found = reasoning_format("auto", ["", TEMPLATE])
    assert found == reasoning_format("openai_gptoss", ())
    assert str(found) == "in messages of the channel analysis"
    assert reasoning_format("auto", ["{{ '<|channel|>' }}"]) is None


def test_reasoning_is_called_as_the_template_calls_it() -> None:
    for name in ("reasoning", "reasoning_content", "thinking"):
        asked = {"role": "assistant", "tool_calls": [call("f")], name: "hm"}
        assert rendered(asked) == thought("hm") + written("f")
    said = {"role": "assistant", "tool_calls": [call("f")], "content": "See."}
    assert rendered(said) == thought("See.") + written("f")
    assert rendered({**said, "reasoning": "hm"}) == thought("hm\n\nSee.") + written("f")
    done = {"role": "assistant", "content": "yes", "reasoning": "hm"}
    assert rendered(done, USER) == "<|start|>assistant<|channel|>final<|message|>yes<|end|>" + HI


def test_what_is_said_before_a_call_is_no_answer() -> None:
    """Items of responses become messages of their own; analysis before them would be dropped."""
    first = {"role": "assistant", "tool_calls": [call("f")], "reasoning": "a"}
    said = {"role": "assistant", "content": "See."}
    second = {"role": "assistant", "tool_calls": [call("g")], "reasoning": "b"}
    told = [thought("a"), written("f"), result("f", "1"), thought("See.\n\nb"), written("g")]
    assert rendered(first, {"role": "tool", "content": "1"}, said, second) == "".join(told)
    assert rendered(said, USER, second) == "".join(
        ["<|start|>assistant<|channel|>final<|message|>See.<|end|>", HI, thought("b"), written("g")]
    )


def test_each_call_is_a_message_with_its_result() -> None:
    calls = {
        "role": "assistant",
        "reasoning": "hm",
        "tool_calls": [call("f", '{"a": 1}'), call("g"), call("h")],
    }
    results = [
        {"role": "tool", "tool_call_id": "g", "content": "2"},
        {"role": "tool", "tool_call_id": "f", "content": "1"},
    ]
    told = [thought("hm"), written("f", '{"a": 1}'), result("f", "1"), written("g")]
    assert rendered(calls, *results) == "".join([*told, result("g", "2"), written("h")])
    unnamed = [{"role": "tool", "content": each} for each in "123"]
    told = [thought("hm"), written("f", '{"a": 1}'), result("f", "1"), written("g")]
    told += [result("g", "2"), written("h"), result("h", "3")]
    assert rendered(calls, *unnamed) == "".join(told)
    other = {"role": "tool", "tool_call_id": "x", "content": "4"}
    two = {**calls, "tool_calls": calls["tool_calls"][:2]}
    assert rendered(two, *results, other).endswith(result("g", "2") + result("g", "4"))
    later = [{"role": "assistant", "tool_calls": [call("k")]}, {**other, "tool_call_id": "k"}]
    told = [written("f", '{"a": 1}'), result("f", "1"), written("g"), result("g", "2")]
    assert rendered(two, *results, *later).endswith(
        "".join([*told, written("k"), result("k", "4")])
    )
    none = {"role": "assistant", "content": "yes", "tool_calls": []}
    assert rendered(none) == "<|start|>assistant<|channel|>final<|message|>yes<|end|>"


def test_calls_in_messages_of_their_own_have_their_results_too() -> None:
    """Results that come behind all of them; the template calls each by the last call."""
    first = {"role": "assistant", "tool_calls": [call("f")]}
    second = {"role": "assistant", "tool_calls": [call("g"), call("h")], "reasoning": "hm"}
    results = {
        name: {"role": "tool", "tool_call_id": name, "content": name.upper()} for name in "fgh"
    }
    told = [written("f"), result("f", "F"), thought("hm"), written("g"), result("g", "G")]
    told += [written("h"), result("h", "H")]
    for order in ("fgh", "hgf", "gfh"):
        given = [results[name] for name in order]
        assert rendered(first, second, *given, USER) == "".join(told) + HI
    unnamed = [{"role": "tool", "content": name} for name in "FGH"]
    assert rendered(first, second, *unnamed) == "".join(told)
    told.remove(result("g", "G"))
    assert rendered(first, second, results["h"], results["f"]) == "".join(told)


def test_instructions_are_one_message_at_the_beginning() -> None:
    template = ChatTemplate({"default": TEMPLATE})
    first = [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}]
    text = template.render([*first, USER])
    assert f"{SYSTEM}<|start|>developer<|message|>a\n\nb<|end|>{HI}" in text
    with pytest.raises(RequestError, match="put it there"):
        template.render([USER, *first])


def test_tools_need_no_description() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    text = ChatTemplate({"default": TEMPLATE}).render([USER], tools)
    assert "<|start|>developer<|message|>// :type f;<|end|>" in text


def test_an_answer_can_be_continued() -> None:
    template = ChatTemplate({"default": TEMPLATE})
    said = {"role": "assistant", "content": "It is", "reasoning": "hm"}
    text = template.render([USER, said], None, False, continue_final_message=True)
    assert text == f"{SYSTEM}{HI}<|start|>assistant<|channel|>final<|message|>It is"
    found = reasoning_format("openai_gptoss", ())
    assert found is not None
    begun: Any = found.thought(text, "It is")
    assert begun.begun == "<|channel|>final<|message|>"
    assert begun.is_final
    plain: Any = found.thought(template.render([USER]))
    assert (plain.begun, plain.is_final) == ("", False)
