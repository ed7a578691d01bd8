"""What agents and their libraries send: Codex, Anthropic's tool runners, instructor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnxport.serving.tokenizer import Tokenizer

from .fake import Client, FakeEngine
from .test_errors import error_of

MESSAGES = [{"role": "user", "content": "ab"}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
Ask = Callable[..., Client]


@pytest.fixture
def ask(model_folder: Path) -> Ask:
    """Return what makes a client of an engine that says some text."""
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())
    return lambda answer="ok": Client(FakeEngine(tokenizer, answers=(answer,)), model_folder)


def function(name: str, **more: Any) -> dict[str, Any]:
    """Return a function as `/v1/responses` has it."""
    return {"type": "function", "name": name, "parameters": CITY, "strict": False, **more}


def space(name: str, *names: str) -> dict[str, Any]:
    """Return functions of a namespace."""
    tools = [function(each) for each in names]
    return {"type": "namespace", "name": name, "description": "Of trips.", "tools": tools}


TOOLS = [function("look"), space("trips", "book", "cancel"), space("hotels", "book")]


def call(name: str) -> str:
    told = json.dumps({"name": name, "arguments": {"city": "Bonn"}})
    return f"<tool_call>\n{told}\n</tool_call>"


def prompt_of(client: Client) -> str:
    [asked] = client.engine.asked
    return client.engine.tokenizer.decode(asked.prompt, skip_special_tokens=False)


# Namespaces of `/v1/responses`, which Codex has for its agents and for servers of MCP.


@pytest.mark.parametrize("stream", [False, True])
async def test_a_function_of_a_namespace_is_called(ask: Ask, stream: bool) -> None:
    client = ask(call("trips__cancel"))
    found = await client.post("/v1/responses", input="ab", tools=TOOLS, stream=stream)
    assert found.status_code == 200, found.text
    prompt = prompt_of(client)
    for name in ("look", "trips__book", "trips__cancel", "hotels__book"):
        assert f'"name": "{name}"' in prompt
    if not stream:
        response = found.json()
        assert response["tools"] == TOOLS
        [item] = response["output"]
    else:
        events = [json.loads(one[6:]) for one in found.text.splitlines() if one[:6] == "data: "]
        kinds = {event["type"]: event for event in events}
        item = kinds["response.output_item.done"]["item"]
        added = kinds["response.output_item.added"]["item"]
        assert (added["name"], added["namespace"]) == ("cancel", "trips")
        assert kinds["response.function_call_arguments.done"]["name"] == "cancel"
        assert kinds["response.completed"]["response"]["output"] == [item]
    assert (item["name"], item["namespace"]) == ("cancel", "trips")
    assert json.loads(item["arguments"]) == {"city": "Bonn"}


async def test_a_function_of_none_has_no_namespace(ask: Ask) -> None:
    found = await ask(call("look")).post("/v1/responses", input="ab", tools=TOOLS)
    [item] = found.json()["output"]
    assert item["name"] == "look"
    assert "namespace" not in item


async def test_calls_of_a_namespace_are_sent_back(ask: Ask) -> None:
    client = ask()
    given = {"type": "function_call", "call_id": "call_1", "arguments": "{}", "status": "completed"}
    items = [
        {"type": "message", **MESSAGES[0]},
        {**given, "name": "book", "namespace": "hotels"},
        {"type": "function_call_output", "call_id": "call_1", "output": "done"},
    ]
    found = await client.post("/v1/responses", input=items, tools=TOOLS)
    assert found.status_code == 200, found.text
    assert '"name": "hotels__book", "arguments": {}' in prompt_of(client)


@pytest.mark.parametrize(
    ("name", "chosen"),
    [("look", "look"), ("cancel", "trips__cancel"), ("hotels__book", "hotels__book")],
)
async def test_a_function_of_a_namespace_is_chosen(ask: Ask, name: str, chosen: str) -> None:
    client = ask(call(chosen))
    choice = {"type": "function", "name": name}
    found = await client.post("/v1/responses", input="ab", tools=TOOLS, tool_choice=choice)
    assert found.status_code == 200, found.text
    [form] = client.engine.compiled
    assert chosen in form.text


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            {"tool_choice": {"type": "function", "name": "book"}},
            "tool_choice",
            "trips__book, hotel",
        ),
        ({"tool_choice": {"type": "function", "name": "no"}}, "tool_choice", "one of the tools"),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search' was given; send tools"),
        ({"tools": [{"type": "namespace", "name": "a"}]}, "tools.0.tools", "missing"),
        ({"tools": [space("", "a")]}, "tools.0.name", "at least 1"),
        (
            {"tools": [{**space("a"), "tools": [{"type": "custom", "name": "b"}]}]},
            None,
            "'function'",
        ),
        ({"tools": [space("a", "b"), function("a__b", strict=True)]}, None, "'a__b'"),
        # The functions are the same, but the client runs two.
        ({"tools": [space("a", "b"), function("a__b")]}, "tools", "two functions"),
        ({"tools": [space("a", "b__c"), space("a__b", "c")]}, "tools", "'a__b__c'"),
    ],
)
async def test_tools_that_cannot_be(
    ask: Ask, fields: dict[str, Any], param: str | None, words: str
) -> None:
    body: dict[str, Any] = {"input": "ab", "tools": TOOLS, **fields}
    error = error_of(await ask().post("/v1/responses", **body))
    assert words in error["message"]
    assert param in (None, error["param"])


async def test_what_codex_says_of_itself_says_nothing(ask: Ask) -> None:
    body: dict[str, Any] = {"input": "ab", "client_metadata": {"session_id": "0", "turn": "{}"}}
    assert (await ask().post("/v1/responses", **body)).status_code == 200


# Threads, which Anthropic's tool runners ask for first.


async def test_a_runner_is_told_to_go_on_without_a_thread(ask: Ask) -> None:
    client = ask()
    body: dict[str, Any] = {"max_tokens": 8, "messages": MESSAGES}
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        refused = await client.post("/v1/messages", **body, thread=thread, stream=True)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert "send all messages" in error["message"]
        details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert error["details"] == details
    assert (await client.post("/v1/messages", **body, thread=None)).status_code == 200
    other = await client.post("/v1/messages", **body, threads=1)
    assert set(other.json()["error"]) == {"type", "message"}


# A form of answers beside a call that is forced, which instructor sends.

FORM = {"type": "json_schema", "name": "Town", "schema": {"type": "object"}, "strict": True}


async def test_where_a_call_is_forced_a_form_of_answers_says_nothing(ask: Ask) -> None:
    choice = {"type": "function", "name": "look"}
    forms = []
    for text in ({}, {"text": {"format": FORM}}):
        client = ask(call("look"))
        body: dict[str, Any] = {
            "input": "ab",
            "tools": [function("look")],
            "tool_choice": choice,
            **text,
        }
        found = await client.post("/v1/responses", **body)
        assert found.status_code == 200, found.text
        assert [each["type"] for each in found.json()["output"]] == ["function_call"]
        forms.append(client.engine.compiled)
    plain, beside = forms
    assert plain == beside
    tool = {"type": "function", "function": {"name": "look", "parameters": CITY}}
    named = {"type": "json_schema", "json_schema": {"name": "Town", "schema": {"type": "object"}}}
    client = ask(call("look"))
    body = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
    found = await client.post("/v1/chat/completions", **body, response_format=named)
    assert found.json()["choices"][0]["message"]["tool_calls"]
    [form] = client.engine.compiled
    assert "look" in form.text


async def test_it_has_to_be_valid_there_too(ask: Ask) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": CITY}}
    body: dict[str, Any] = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}
    wrong = {"type": "json_schema"}
    error = error_of(await ask().post("/v1/chat/completions", **body, response_format=wrong))
    assert error["param"] == "response_format.json_schema"
