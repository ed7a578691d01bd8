"""Published chat templates render as transformers renders them, or are refused where it refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import cache
from typing import Any, Final

import pytest

from onnxport.errors import RequestError
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.http.chat_messages import ChatMessage
from tests.tiers import every

from .places import TEMPLATES, needs_llama_cpp

pytestmark = needs_llama_cpp
NAMES: Final = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
TOKENS: Final = {"bos_token": "<s>", "eos_token": "</s>"}
Messages = Sequence[Mapping[str, Any]]


def function(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": [*properties][:1]}
    told = {"name": name, "description": f'Does "{name}" <&> ü.', "parameters": schema}
    return {"type": "function", "function": told}


def call(number: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    told = {"name": name, "arguments": arguments}
    return {"id": f"abcdefgh{number}", "type": "function", "function": told}


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


TOOLS: Final = [
    function(
        "weather",
        city={"type": "string", "description": "where"},
        days={"type": "integer", "description": "how many", "enum": [1, 2]},
    ),
    function("add", a={"type": "array", "items": {"type": "number"}, "description": "each"}),
]
WEATHER = call(1, "weather", {"city": 'Zürich <b>"x"\n', "days": 2})
ADD = call(2, "add", {"a": [1.5, 2]})
HI = says("user", "Hi? <b> & 'ü' 😀")
CALL = says("assistant", "I see.", tool_calls=[WEATHER])
THOUGHT = says("assistant", "Hello.", reasoning_content="I greet.\n")
SUNNY = says("tool", '{"sky": "sunny"}', tool_call_id="abcdefgh1", name="weather")
SUM = says("tool", "3.5", tool_call_id="abcdefgh2", name="add")
CONVERSATIONS: Final[dict[str, Messages]] = {
    "user": [HI],
    "empty": [says("user", "")],
    "system": [says("system", "Be brief."), HI],
    "developer": [says("developer", "Be brief."), HI],
    "turns": [says("system", " Be.\n"), HI, says("assistant", "Yes."), says("user", " Why? \n")],
    "two users": [HI, HI],
    "assistant first": [says("assistant", "I begin."), HI],
    "thought": [HI, THOUGHT, HI],
    "call": [HI, CALL, SUNNY],
    "call without text": [HI, says("assistant", None, tool_calls=[WEATHER]), SUNNY, THOUGHT, HI],
    "call behind a thought": [HI, says("assistant", "", tool_calls=[ADD], reasoning="Hm."), SUM],
    "calls": [HI, says("assistant", None, tool_calls=[WEATHER, ADD]), SUNNY, SUM, THOUGHT, HI],
}
VARIABLES: Final[dict[str, dict[str, Any]]] = {
    "thinks": {"enable_thinking": True},
    "does not": {"enable_thinking": False},
    "thinking": {"thinking": True},
    "low": {"reasoning_effort": "low"},
    "mode": {"thinking_mode": "enabled"},
    "budget": {"thinking_budget": 512},
}
# Where transformers refuses all of these, and onnxport does not: `docs/http.md` says why.
NO_REFERENCE: Final = {
    "CohereForAI-c4ai-command-r-plus-tool_use": "without tools",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use": "without tools",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "without tools",
    "fireworks-ai-llama-3-firefunction-v2": "functions",
    "llama-cpp-deepseek-r1": "with tools",
}
CALLS: Final = tuple(name for name in CONVERSATIONS if name.startswith("call"))
# Conversations that onnxport renders, and `transformers` otherwise or not at all.
OTHERWISE: Final[dict[str, tuple[str, ...]]] = {
    "Kimi-K2-Instruct": CALLS,  # it changes lists, which transformers forbids
    "Kimi-K2-Thinking": CALLS,
    "LFM2-8B-A1B": CALLS,  # the template leaves out what the model called
    "LFM2.5-Instruct": CALLS,
    "meetkai-functionary-medium-v3.2": CALLS,  # its arguments are text
    # Calls without a text have no content, as OpenAI has it; the template asks for that.
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": CALLS[1:],
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": CALLS[1:],
    "llama-cpp-rwkv-world": CALLS[1:],
    # Its thoughts are parts of contents, which requests have none of.
    "mistralai-Ministral-3-14B-Reasoning-2512": ("thought", *CALLS[1:]),
    "openai-gpt-oss-120b": ("calls",),  # `tests/http/test_harmony_template.py` has it
}


@cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate({"default": source(name)}, TOKENS)


@cache
def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def requested(messages: Messages) -> list[dict[str, Any]]:
    """Return messages as a request has them, read as the server reads them."""
    given = deepcopy([*messages])
    for message in given:
        for one in message.get("tool_calls", ()):
            one["function"]["arguments"] = json.dumps(one["function"]["arguments"])
    return [ChatMessage.model_validate(message).plain() for message in given]


def reference(name: str, messages: Messages, tools: Any, prompted: bool, **more: Any) -> str | None:
    """Return what transformers makes of the same; None: it refuses."""
    from transformers.utils.chat_template_utils import render_jinja_template

    given = [dict(message) for message in messages]
    for message in given:
        message["content"] = message["content"] or ""
        thought = message.get("reasoning", message.get("reasoning_content"))
        if thought is not None:  # by both of vLLM's names; transformers adds `thinking`
            message |= {"reasoning": thought, "reasoning_content": thought}
        if message["role"] == "developer" and f"'{message['role']}'" not in source(name):
            message["role"] = "system"
    try:
        rendered, _ = render_jinja_template(
            [given],
            tools=tools,
            chat_template=source(name),
            add_generation_prompt=prompted,
            **TOKENS,
            **more,
        )
    except Exception:
        return None
    return str(rendered[0])


def ours(name: str, messages: Messages, tools: Any, prompted: bool, **more: Any) -> str | None:
    try:
        return template(name).render(requested(messages), tools, prompted, **more)
    except RequestError:
        return None


def lacks_reference(name: str, tools: Any) -> bool:
    where = NO_REFERENCE.get(name)
    return where == ("with tools" if tools else "without tools") or where == "functions"


@pytest.mark.parametrize("name", every(4, NAMES))
def test_conversations(name: str) -> None:
    for what, messages in CONVERSATIONS.items():
        for tools in (TOOLS,) if what in CALLS else (None, TOOLS):
            for prompted in (True, False):
                wanted = reference(name, messages, tools, prompted)
                found = ours(name, messages, tools, prompted)
                if what in OTHERWISE.get(name, ()) or lacks_reference(name, tools):
                    assert found is not None, what
                    continue
                assert found == wanted, (what, bool(tools), prompted)


@pytest.mark.parametrize("name", every(4, NAMES))
def test_variables(name: str) -> None:
    for what, variables in VARIABLES.items():
        if not lacks_reference(name, None):
            wanted = reference(name, [HI], None, True, **variables)
            assert ours(name, [HI], None, True, **variables) == wanted, what


@pytest.mark.parametrize("name", every(4, NAMES))
def test_the_last_message_goes_on(name: str) -> None:
    for messages in ([HI, says("assistant", "It is ")], [HI]):
        if not lacks_reference(name, None):
            wanted = reference(name, messages, None, False, continue_final_message=True)
            assert ours(name, messages, None, False, continue_final_message=True) == wanted


@pytest.mark.parametrize("name", every(4, NAMES))
def test_one_part_is_the_text_it_has(name: str) -> None:
    """Whether a template takes texts, parts, or both."""
    text = CONVERSATIONS["turns"]
    if ours(name, text, None, True) is None:  # Gemma 2 has no system's
        text = [HI]
    in_parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} for message in text
    ]
    assert ours(name, in_parts, None, True) == ours(name, text, None, True)
    two = [says("user", [{"type": "text", "text": one} for one in ("Hi", "you")])]
    found = ours(name, two, None, True)
    assert found is not None
    assert any(f"Hi{between}you" in found for between in ("", " ", "\n"))


def test_there_are_no_more_exceptions_than_needed() -> None:
    """Each of them is one."""
    for name, kinds in OTHERWISE.items():
        for what in kinds:
            messages = CONVERSATIONS[what]
            wanted = reference(name, messages, TOOLS, True)
            assert ours(name, messages, TOOLS, True) != wanted, (name, what)


@pytest.mark.parametrize(
    ("name", "what", "words"),
    [
        ("google-gemma-2-2b-it", "system", "System role not supported"),
        ("meta-llama-Llama-3.2-3B-Instruct", "calls", "single tool-calls"),
        ("mistralai-Mistral-Nemo-Instruct-2407", "two users", "must alternate"),
    ],
)
def test_a_templates_own_words_are_told(name: str, what: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        template(name).render(requested(CONVERSATIONS[what]), TOOLS)


def test_earlier_calls_have_the_ids_that_kimi_gives_them() -> None:
    for name in ("Kimi-K2-Instruct", "Kimi-K2-Thinking"):
        found = ours(name, CONVERSATIONS["calls"], TOOLS, True)
        assert found is not None
        for place, one in enumerate(("weather", "add")):
            assert found.count(f"functions.{one}:{place}") == 2, found  # the call, and its result


def test_earlier_calls_without_text_reach_deepseek_r1() -> None:
    """The template puts arguments beside texts, and writes no calls of a message with content."""
    for what in CALLS[1:]:
        prompt = ours("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", CONVERSATIONS[what], TOOLS, True)
        asked = [c for m in CONVERSATIONS[what] for c in m.get("tool_calls", ())]
        assert prompt is not None
        for one in asked:
            arguments = json.dumps(one["function"]["arguments"], ensure_ascii=False)
            assert f"{one['function']['name']}\n```json\n{arguments}\n```" in prompt


def test_earlier_thoughts_reach_ministral() -> None:
    name = "mistralai-Ministral-3-14B-Reasoning-2512"
    found = ours(name, CONVERSATIONS["thought"], None, True)
    assert found is not None
    assert "[THINK]I greet.\n[/THINK]Hello.</s>" in found


def test_firefunction_is_told_of_functions() -> None:
    found = ours("fireworks-ai-llama-3-firefunction-v2", [HI], TOOLS, True)
    assert found is not None
    assert json.dumps([one["function"] for one in TOOLS], indent=4, ensure_ascii=False) in found
