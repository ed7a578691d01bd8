"""`/v1/messages`, with the anthropic client and with plain HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

from onnxport.errors import CapacityError, OverloadedError
from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.http.app import AppOptions
from onnxport.serving.http.messages import PING
from onnxport.serving.http.messages_blocks import Message, conversation
from onnxport.serving.outputs import Failure
from onnxport.serving.tokenizer import Tokenizer
from tests.waiting import PATIENCE_S

from .conftest import RunningServer, StartServer
from .fake import MODEL as FAKE
from .fake import Client, FakeEngine
from .harmony import TEMPLATE as HARMONY
from .scripted import MODEL, say

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "Tell the weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
USER = {"role": "user", "content": "ab"}
THINKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined %}{{ enable_thinking }}{% endif %}<think></think>"
)
ALWAYS = "{{ messages[-1].content }}<think>"
Ask = Callable[..., Client]


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture
def client(server: RunningServer) -> Iterator[Anthropic]:
    with Anthropic(base_url=server.url, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def ask(model_folder: Path) -> Ask:
    """Return what makes a client of an engine with the settings that are given."""
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())

    def make(options: AppOptions | None = None, template: str = "", **settings: Any) -> Client:
        made = ChatTemplate({"default": template}) if template else None
        return Client(FakeEngine(tokenizer, **settings), model_folder, options, made)

    return make


async def send(client: Client, **fields: Any) -> httpx.Response:
    body = {"model": FAKE, "max_tokens": 9, "messages": [USER], **fields}
    return await client.post("/v1/messages", **body)


async def prompt(client: Client, **fields: Any) -> str:
    """Return the prompt that a request gave."""
    answer = await send(client, **fields)
    assert answer.status_code == 200, answer.text
    ids = client.engine.asked[-1].prompt
    return client.engine.tokenizer.decode(ids, skip_special_tokens=False)


def error_of(answer: httpx.Response, status: int, kind: str) -> str:
    """Return the message of an error; checks its shape."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"}
    assert set(body["error"]) == {"type", "message"}
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    return str(body["error"]["message"])


async def refused(client: Client, **fields: Any) -> str:
    return error_of(await send(client, **fields), 400, "invalid_request_error")


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream; each is named by its type."""
    *blocks, end = text.split("\n\n")
    assert end == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        if found[-1]["type"] not in ("error", "ping"):
            EVENT.validate_python(found[-1])
    return found


# With the client.


def test_a_text(client: Anthropic) -> None:
    done = client.messages.create(model=MODEL, max_tokens=99, messages=user(say("Grüße 🙂")))
    assert (done.type, done.role, done.model) == ("message", "assistant", MODEL)
    assert done.id.startswith("msg_")
    assert [block.type for block in done.content] == ["text"]
    assert done.content[0].text == "Grüße 🙂"  # type: ignore[union-attr]
    assert (done.stop_reason, done.stop_sequence) == ("end_turn", None)
    assert done.usage.output_tokens == len("Grüße 🙂".encode()) + 1
    assert done._request_id is not None
    assert done.id.endswith(done._request_id)


def test_why_it_ended(client: Anthropic) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": user(say("abcdef"))}
    cut = client.messages.create(**ask, max_tokens=3)
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "abc")  # type: ignore[union-attr]
    stopped = client.messages.create(**ask, max_tokens=99, stop_sequences=["x", "de"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "de")
    assert stopped.content[0].text == "abc"  # type: ignore[union-attr]


def test_tools_are_called_and_answered(client: Anthropic) -> None:
    messages = user(say(f"Let me see.\n{CALL}\n{CALL}"))
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 500, "tools": [TOOL]}
    done = client.messages.create(**ask, messages=messages)
    assert done.stop_reason == "tool_use"
    assert [block.type for block in done.content] == ["text", "tool_use", "tool_use"]
    calls = [block for block in done.content if block.type == "tool_use"]
    assert all(call.id.startswith("toolu_") for call in calls)
    assert calls[0].id != calls[1].id
    assert [(call.name, call.input) for call in calls] == [("weather", {"city": "Rome"})] * 2
    results: Any = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "warm"} for call in calls
    ]
    answer: Any = {"role": "assistant", "content": done.content}
    more = [*messages, answer, {"role": "user", "content": results}]
    again = client.messages.create(**ask, messages=more)
    read = again.usage.cache_read_input_tokens or 0
    assert read + again.usage.input_tokens > done.usage.input_tokens
    with client.messages.stream(**ask, messages=messages) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["text", "tool_use", "tool_use"]
    assert final.content[1].input == {"city": "Rome"}  # type: ignore[union-attr]
    assert final.usage.output_tokens == done.usage.output_tokens


def test_a_stream(client: Anthropic) -> None:
    with client.messages.stream(model=MODEL, max_tokens=9, messages=user(say("aé"))) as stream:
        assert list(stream.text_stream) == ["a", "é"]
        final = stream.get_final_message()
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 4)


def test_cached_tokens_are_none_of_the_input(client: Anthropic) -> None:
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "messages": user("cached " * 20)}
    counted = client.messages.count_tokens(model=MODEL, messages=ask["messages"]).input_tokens
    client.messages.create(**ask)
    usage = client.messages.create(**ask).usage
    assert usage.cache_read_input_tokens
    assert usage.input_tokens + usage.cache_read_input_tokens == counted
    assert usage.cache_creation_input_tokens == 0


def test_errors_are_the_clients(client: Anthropic) -> None:
    ask: dict[str, Any] = {"max_tokens": 2, "messages": user("a")}
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        client.messages.create(**ask, model="other")
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        client.messages.create(**ask | {"max_tokens": 10**6}, model=MODEL, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def keyed(_start: StartServer) -> RunningServer:
    return _start(api_keys=["right"])


@pytest.mark.parametrize("how", [{"api_key": "right"}, {"auth_token": "right"}])
def test_keys(keyed: RunningServer, how: dict[str, Any], monkeypatch: Any) -> None:
    for name in ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 2, "messages": user("a")}
    with Anthropic(base_url=keyed.url, max_retries=0, **how) as client:
        assert client.messages.create(**ask).type == "message"
    wrong = dict.fromkeys(how, "wrong")
    with (
        Anthropic(base_url=keyed.url, max_retries=0, **wrong) as client,
        pytest.raises(anthropic.AuthenticationError, match="key is wrong"),
    ):
        client.messages.create(**ask)
    answer = httpx.post(f"{keyed.url}/v1/messages", json=ask)
    assert "x-api-key: KEY" in error_of(answer, 401, "authentication_error")
    other = httpx.get(f"{keyed.url}/v1/models", headers={"x-api-key": "right"})
    assert other.status_code == 200  # which the same clients ask for


# Events.


async def test_the_stream_is_anthropics(ask: Ask) -> None:
    options = AppOptions(reasoning_parser="qwen3")
    client = ask(options, answers=(f"<think>hm</think>a{CALL}b",), cached=[2, 2])
    found = events((await send(client, tools=[TOOL], stream=True)).text)
    kinds = [one["type"] for one in found]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = found[0]["message"]
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["cache_read_input_tokens"] == 2
    blocks = [one["content_block"] for one in found if one["type"] == "content_block_start"]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "text"]
    assert (blocks[0]["thinking"], blocks[1]["text"], blocks[2]["input"]) == ("", "", {})
    deltas = [(o["index"], o["delta"]) for o in found if o["type"] == "content_block_delta"]
    assert [delta for at, delta in deltas if at == 0][-1] == {
        "type": "signature_delta",
        "signature": "",
    }
    assert [d["partial_json"] for at, d in deltas if at == 2] == ['{"city": "Rome"}']
    stops = [one["index"] for one in found if one["type"] == "content_block_stop"]
    assert stops == [0, 1, 2, 3]
    whole = (await send(client, tools=[TOOL])).json()
    assert [block["type"] for block in whole["content"]] == [block["type"] for block in blocks]
    assert whole["content"][0] == {"type": "thinking", "thinking": "hm", "signature": ""}
    assert whole["stop_reason"] == found[-2]["delta"]["stop_reason"] == "tool_use"
    assert whole["usage"] == found[-2]["usage"]
    assert set(whole["usage"]["output_tokens_details"]) == {"thinking_tokens"}
    given = len(client.engine.asked[0].prompt)
    assert whole["usage"]["input_tokens"] == given - 2


async def test_no_text_is_no_block(ask: Ask) -> None:
    client = ask(answers=("",))
    assert (await send(client)).json()["content"] == []
    kinds = [one["type"] for one in events((await send(client, stream=True)).text)]
    assert kinds == ["message_start", "message_delta", "message_stop"]
    later = [USER, {"role": "assistant", "content": []}]
    assert await prompt(client, messages=later) == await prompt(client)
    assert await prompt(client, messages=[*later, USER]) != await prompt(client)


async def test_an_answer_that_was_cut_behind_a_call(ask: Ask) -> None:
    answer = (await send(ask(answers=(CALL,), ends="length"), tools=[TOOL])).json()
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    assert answer["stop_reason"] == "max_tokens"


async def test_a_failure_is_the_last_event(ask: Ask) -> None:
    client = ask(fails=Failure("it cannot be", refused=True))
    *_, last = events((await send(client, stream=True)).text)
    error = {"type": "invalid_request_error", "message": "it cannot be"}
    assert last == {"type": "error", "error": error}
    assert await refused(client) == "it cannot be"
    client = ask(ends="error")
    *_, last = events((await send(client, stream=True)).text)
    assert last["error"]["type"] == "api_error"


async def test_half_of_a_character_in_an_input(ask: Ask) -> None:
    call = CALL.replace("Rome", "\\ud83d")
    answer = await send(ask(answers=(call,)), tools=[TOOL])
    assert answer.json()["content"][0]["input"] == {"city": "\ud83d"}


def test_silence_is_told_by_events(start_server: StartServer, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    server = start_server(hold=str(hold), sse_ping_interval_s=0.05)
    ask = {"model": MODEL, "max_tokens": 2, "messages": user(say("ab")), "stream": True}
    assert PING == b'event: ping\ndata: {"type":"ping"}\n\n'
    told = ""
    with httpx.stream("POST", f"{server.url}/v1/messages", json=ask) as answer:
        for piece in answer.iter_text():
            told += piece
            if told.count("event: ping") == 3:
                hold.unlink(missing_ok=True)
    assert [one["type"] for one in events(told)].count("ping") >= 3
    hold.touch()
    with Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        stream = client.messages.create(**ask)  # returns at the first ping
        hold.unlink()
        assert [one.type for one in stream][-1] == "message_stop"


# What requests mean.


async def test_a_request_is_a_chat(ask: Ask) -> None:
    client = ask()
    messages = [{"role": "system", "content": "s"}, USER]
    await client.post(
        "/v1/chat/completions",
        model=FAKE,
        messages=messages,
        max_tokens=9,
        temperature=0.5,
        top_p=0.5,
        top_k=5,
        stop=["x"],
        seed=3,
        user="me",
    )
    block = {"type": "text", "text": "ab", "cache_control": {"type": "ephemeral"}}
    header = {"type": "text", "text": "x-anthropic-billing-header: cc=1;"}
    answer = await send(
        client,
        system=[header, {"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        messages=[{"role": "user", "content": [block]}],
        temperature=0.5,
        top_p=0.5,
        top_k=5,
        stop_sequences=["x"],
        seed=3,
        metadata={"user_id": "me"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        wholly_unknown=None,
    )
    assert answer.status_code == 200, answer.text
    chat, message = client.engine.asked
    assert (chat.prompt, chat.params) == (message.prompt, message.params)
    assert chat.options == message.options


def test_conversations() -> None:
    use = {"type": "tool_use", "id": "toolu_call_1", "name": "f", "input": {"a": "é"}}
    result: dict[str, Any] = {"type": "tool_result", "tool_use_id": "toolu_call_1"}
    texts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    given = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "redacted_thinking", "data": "?"},
                {"type": "text", "text": "c"},
                use,
            ],
        },
        {"role": "assistant", "content": "d"},
        {
            "role": "user",
            "content": [
                {**result, "content": texts, "is_error": True},
                {**result, "is_error": True},
                {**result, "content": None},
                {"type": "text", "text": "e"},
            ],
        },
        {"role": "system", "content": "f"},
    ]
    messages = [Message.model_validate(one) for one in given]
    function = {"name": "f", "arguments": '{"a": "é"}'}
    tool = {"role": "tool", "tool_call_id": "call_1"}
    parts = [{"type": "text", "text": "Error: x"}, {"type": "text", "text": "y"}]
    assert conversation("s", messages, "|") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": "c|d",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
        },
        {**tool, "content": parts},
        {**tool, "content": "Error:"},
        {**tool, "content": ""},
        {"role": "user", "content": "e"},
        {"role": "system", "content": "f"},
    ]


async def test_an_answer_that_is_begun(ask: Ask) -> None:
    begun = [USER, {"role": "assistant", "content": "I am "}]
    text = await prompt(ask(), messages=begun)
    assert text.endswith("assistant\nI am ")
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {}}
    for content in ([use], [{"type": "text", "text": "a"}, use]):
        messages = [USER, {"role": "assistant", "content": content}]
        assert "end it with text" in await refused(ask(), messages=messages)
    assert "no text" in await refused(ask(), messages=[{"role": "assistant", "content": ""}])
    shouts = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    told = await refused(ask(template=shouts), messages=begun)
    assert told.startswith("the last message is the assistant's, to go on with")


@pytest.mark.parametrize(
    ("choice", "like"),
    [
        ({"type": "auto"}, {"tool_choice": "auto"}),
        ({"type": "none"}, {"tool_choice": "none"}),
        ({"type": "any"}, {"tool_choice": "required"}),
        (
            {"type": "any", "disable_parallel_tool_use": True},
            {"tool_choice": "required", "parallel_tool_calls": False},
        ),
        (
            {"type": "tool", "name": "weather"},
            {"tool_choice": {"type": "function", "function": {"name": "weather"}}},
        ),
    ],
)
async def test_choices_of_tools(ask: Ask, choice: dict[str, Any], like: dict[str, Any]) -> None:
    client = ask()
    function = {"name": "weather", "description": "Tell the weather"}
    tool = {"type": "function", "function": {**function, "parameters": TOOL["input_schema"]}}
    done = await client.chat(tools=[tool], max_tokens=9, **like)
    assert done.status_code == 200, done.text
    custom = {**TOOL, "type": "custom", "cache_control": {"type": "ephemeral"}}
    assert (await send(client, tools=[custom], tool_choice=choice)).status_code == 200
    chat, message = client.engine.asked
    told = [client.engine.tokenizer.decode(one.prompt) for one in (chat, message)]
    assert sorted(told[0]) == sorted(told[1])  # the members of a tool have no order
    assert chat.params == message.params


@pytest.mark.parametrize("older", [False, True])
async def test_forms(ask: Ask, older: bool) -> None:
    client = ask()
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    form = {"type": "json_schema", "schema": schema}
    fields = {"output_format": form} if older else {"output_config": {"format": form}}
    assert (await send(client, **fields)).status_code == 200
    [compiled] = client.engine.compiled
    assert compiled.strict
    assert json.loads(str(compiled.json)) == {**schema, "additionalProperties": False}


# Thinking.


async def test_thinking_is_switched(ask: Ask) -> None:
    client = ask(template=THINKS)
    on = {"type": "enabled", "budget_tokens": 5}
    assert "True<think>" in await prompt(client, thinking=on)
    assert "True<think>" in await prompt(client, thinking={"type": "adaptive"})
    assert "False<think>" in await prompt(client, thinking={"type": "disabled"})
    assert "]ab<think>" in await prompt(client)
    effort = {"effort": "low"}
    off = await prompt(client, thinking={"type": "disabled"}, output_config=effort)
    assert "False<think>" in off


async def test_a_budget(ask: Ask) -> None:
    client = ask(template=ALWAYS)
    await prompt(client, thinking={"type": "enabled", "budget_tokens": 5})
    assert client.engine.asked[-1].params.thinking_token_budget == 5
    unknown = ask(AppOptions(reasoning_parser="none"), template=THINKS)
    told = await refused(unknown, thinking={"type": "enabled", "budget_tokens": 5})
    assert told.startswith("thinking.budget_tokens is 5")


@pytest.mark.parametrize("how", [{"type": "disabled"}, {"type": "adaptive", "display": "omitted"}])
async def test_thoughts_that_are_not_wanted(ask: Ask, how: dict[str, Any]) -> None:
    client = ask(template=ALWAYS, answers=("hm</think>a",))
    assert [b["type"] for b in (await send(client)).json()["content"]] == ["thinking", "text"]
    assert (await send(client, thinking=how)).json()["content"] == [{"type": "text", "text": "a"}]


@pytest.mark.parametrize("efforts", [{}, {"output_config": {"effort": "low"}}])
async def test_a_template_that_knows_effort_alone(ask: Ask, efforts: dict[str, Any]) -> None:
    client = ask(template="{{ messages[0].content }}{{ reasoning_effort }}<think>")
    text = await prompt(client, thinking={"type": "disabled"}, **efforts)
    assert text == ("ablow<think>" if efforts else "abnone<think>")


async def test_a_model_that_does_not_think_is_not_told_to(ask: Ask) -> None:
    client = ask()
    plain = await prompt(client)
    for how in (
        {"type": "enabled", "budget_tokens": 1024},
        {"type": "adaptive", "display": "summarized"},
        {"type": "disabled"},
    ):
        assert await prompt(client, thinking=how) == plain
    for effort in ("low", "max"):
        told = await refused(client, output_config={"effort": effort})
        assert f"output_config.effort is {effort!r}" in told


@pytest.mark.parametrize("thinking", [None, {"type": "adaptive"}])
async def test_the_usual_effort_says_nothing_where_there_is_none(ask: Ask, thinking: Any) -> None:
    """Claude Code sends it to every model."""
    asked = {"output_config": {"effort": "high"}, "thinking": thinking}
    for template in (None, ALWAYS):
        client = ask(template=template) if template else ask()
        assert await prompt(client, **asked) == await prompt(client, thinking=thinking)
    levels = ask(template="{{ messages[0].content }}{{ reasoning_effort }}<think>")
    assert await prompt(levels, **asked) == "abhigh<think>"
    assert "True<think>" in await prompt(ask(template=THINKS), **asked)


async def test_gpt_oss_cannot_do_without_thinking(ask: Ask) -> None:
    client = ask(template=HARMONY)
    plain = await prompt(client)
    assert await prompt(client, thinking={"type": "disabled"}) == plain
    assert await prompt(client, output_config={"effort": "high"}) != plain
    told = await refused(client, thinking={"type": "enabled", "budget_tokens": 5})
    assert told.startswith("thinking.budget_tokens is 5, and this model writes its reasoning in")


async def test_several_keys_are_tenants(ask: Ask) -> None:
    client = ask(AppOptions(api_keys=("one", "two")))
    body = {"model": FAKE, "max_tokens": 9, "messages": [USER], "metadata": {"user_id": "me"}}
    for headers in ({"x-api-key": "two"}, {"x-api-key": "no", "Authorization": "Bearer two"}):
        answer = await client._http.post("/v1/messages", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
    assert [asked.options.tenant for asked in client.engine.asked] == ["key-2"] * 2


# What is refused.

IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}


def blocks(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"max_tokens": -1}, "max_tokens is -1"),
        ({"messages": []}, "messages"),
        (blocks(), "has no blocks"),
        (blocks(IMAGE), "a block of type 'image' was given; models here read text alone"),
        (blocks({"type": "document", "source": {}}), "'document'"),
        (blocks({"type": "server_tool_use"}), "'server_tool_use'"),
        (
            blocks({"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}),
            "a block of messages of type 'image'",
        ),
        (blocks({"type": "thinking", "thinking": ""}), "has a block of type 'thinking'"),
        (
            blocks({"type": "tool_result", "tool_use_id": "1"}, role="assistant"),
            "has a block of type 'tool_result'",
        ),
        (blocks({"type": "text", "text": "a", "bold": 1}), "messages.0.content.0.bold"),
        ({"system": [IMAGE]}, "a block of system of type 'image'"),
        ({"system": 1}, "system: should be a text or a list of blocks"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "no tools of its own"),
        ({"tools": [{"name": "f"}]}, "'tools.0.input_schema' is missing"),
        ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools.0.input_examples"),
        ({"tools": [{**TOOL, "defer_loading": True}]}, "tools.0.defer_loading"),
        ({"tools": [TOOL, {**TOOL, "description": "x"}]}, "several functions called 'weather'"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"tool_choice": {"type": "tool"}}, "without a name"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "with a name"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "f"}}, "names 'f'"),
        ({"thinking": {"type": "enabled"}}, "without budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "with budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences is ('',); every stop string"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"stop_sequences": ["a"] * 65}, "stop_sequences: "),
        ({"structured_outputs": {"a\\d": 1}}, "structured_outputs has 'a\\\\d'"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": "1"}, "temperature: input should be a valid number"),
        ({"metadata": {"user_id": 1}}, "metadata.user_id"),
        ({"container": "c"}, "container is 'c'"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"speed": "fast"}, "speed is 'fast'"),
        ({"wholly_unknown": 1}, "unknown field 'wholly_unknown'"),
        ({"max_token": 1}, "did you mean 'max_tokens'"),
        (
            {
                "output_format": {"type": "json_schema", "schema": {}},
                "output_config": {"format": {"type": "json_schema", "schema": {}}},
            },
            "mean the same",
        ),
        ({"temperature": float("nan")}, "no number of JSON"),
    ],
)
async def test_refusals(ask: Ask, fields: dict[str, Any], words: str) -> None:
    assert words in await refused(ask(), **fields)


async def test_errors_have_anthropics_shape_on_these_routes_alone(ask: Ask) -> None:
    client = ask(AppOptions(max_body_bytes=200))
    assert "missing" in error_of(
        await client.post("/v1/messages", messages=[USER]), 400, "invalid_request_error"
    )
    error_of(await send(client, system="x" * 300), 413, "request_too_large")
    error_of(await client.post("/v1/messages/batches"), 404, "not_found_error")
    error_of(await client.get("/v1/messages"), 405, "invalid_request_error")
    assert "error" in (await client.post("/v1/messagesx")).json()
    assert "type" not in (await client.post("/v1/messagesx")).json()


async def test_a_full_queue_is_an_overloaded_server(ask: Ask) -> None:
    answer = await send(ask(refusals=[OverloadedError("full", 1.5)]))
    assert error_of(answer, 529, "overloaded_error") == "full"
    assert answer.headers["retry-after"] == "2"
    error_of(await send(ask(refusals=[CapacityError("long")])), 400, "invalid_request_error")
    error_of(await send(ask(ends="error")), 500, "api_error")
    error_of(await send(ask(ends="timeout")), 504, "timeout_error")


async def test_adapters_and_names(ask: Ask) -> None:
    client = ask(adapters=[Adapter("own", 1, "", 4, Path("/own"), None)])
    assert (await send(client, model="own")).json()["model"] == "own"
    assert client.engine.asked[-1].options.adapter == "own"
    assert (await send(client, model=None)).json()["model"] == FAKE
    error_of(await send(client, model="other"), 404, "not_found_error")


async def test_counting(ask: Ask) -> None:
    client = ask()
    fields: dict[str, Any] = {"system": "s", "tools": [TOOL], "messages": [USER]}
    await send(client, **fields)
    counted = await client.post("/v1/messages/count_tokens", model=FAKE, **fields)
    assert counted.json() == {"input_tokens": len(client.engine.asked[-1].prompt)}
    fields["tool_choice"] = {"type": "none"}
    fewer = await client.post("/v1/messages/count_tokens", model=FAKE, **fields)
    assert fewer.json()["input_tokens"] < counted.json()["input_tokens"]
    path = "/v1/messages/count_tokens"
    error_of(await client.post(path, **fields, max_tokens=1), 400, "invalid_request_error")
    error_of(await client.post(path, **{**fields, "model": "x"}), 404, "not_found_error")
    effort = await client.post(path, **fields, output_config={"effort": "low"})
    assert "output_config.effort" in error_of(effort, 400, "invalid_request_error")


def test_a_client_that_goes_ends_its_request(start_server: StartServer) -> None:
    server = start_server(latency_s=0.02)
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 1000, "messages": user(say("x" * 1000))}
    with server.asking("messages", ask):
        server.wait_for(num_requests_running=1)
    server.wait_for(num_requests_running=0, abort=1)
    url = f"{server.url}/v1/messages"
    with httpx.stream("POST", url, json={**ask, "stream": True}) as answer:
        assert next(answer.iter_lines()) == "event: message_start"
    server.wait_for(num_requests_running=0, abort=2)
