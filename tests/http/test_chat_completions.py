"""`/v1/chat/completions`, with the openai client and with plain HTTP."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from .conftest import RunningServer
from .scripted import MODEL, say

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tell the weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def user(text: str) -> list[dict[str, Any]]:
    """Return a conversation that makes the model answer `text`."""
    return [{"role": "user", "content": say(text)}]


@pytest.fixture
def client(server: RunningServer) -> Any:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def test_one_answer(client: OpenAI) -> None:
    done = client.chat.completions.create(model=MODEL, messages=user("Grüße 你好 🙂"))
    assert done.object == "chat.completion"
    assert done.id.startswith("chatcmpl-")
    [choice] = done.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "Grüße 你好 🙂"
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert done.usage.completion_tokens == len("Grüße 你好 🙂".encode()) + 1


def test_every_role_and_kind_of_content(client: OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "system", "content": "one"},
            {"role": "developer", "content": [{"type": "text", "text": "two"}]},
            {"role": "user", "content": "three", "name": "ann"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "call_1",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            *user("done"),
        ],
    )
    assert done.choices[0].message.content == "done"


def test_answers_are_as_long_as_the_context_unless_told_otherwise(client: OpenAI) -> None:
    ask = {"model": MODEL, "messages": user("x" * 300)}
    assert len(client.chat.completions.create(**ask).choices[0].message.content) == 300
    for name in ("max_tokens", "max_completion_tokens"):
        done = client.chat.completions.create(**ask, **{name: 5})
        assert done.choices[0].message.content == "xxxxx"
        assert done.choices[0].finish_reason == "length"


def test_neutral_values_change_nothing(client: OpenAI) -> None:
    done = client.chat.completions.create(
        model=MODEL,
        messages=user("same"),
        n=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        logit_bias={},
        user="someone",
        metadata={"a": "b"},
        store=False,
        seed=None,
        stop=None,
        response_format={"type": "text"},
        tool_choice="auto",
        parallel_tool_calls=True,
        extra_body={"repetition_penalty": 1.0, "min_p": 0, "skip_special_tokens": True},
    )
    assert done.choices[0].message.content == "same"


def test_the_stream_is_openais_byte_by_byte(server: RunningServer) -> None:
    ask = {"model": MODEL, "messages": user("aé"), "stream": True}
    ask["stream_options"] = {"include_usage": True}
    response = httpx.post(f"{server.url}/v1/chat/completions", json=ask)
    assert response.status_code == 200
    assert response.text.endswith("\n\ndata: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n")[:-2]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "é"},
        {},
    ]
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]]
    assert reasons == [None, None, None, "stop"]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] > 4
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_no_usage_in_a_stream_that_did_not_ask(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=user("a"), stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


async def test_asynchronous_client_streams(server: RunningServer) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        ask = {"model": MODEL, "messages": user("one two three")}
        stream = await client.chat.completions.create(stream=True, **ask)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "one two three"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: OpenAI, stream: bool) -> None:
    ask = {"model": MODEL, "messages": user("ab"), "logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = client.chat.completions.create(stream=True, **ask)
        found = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
        content = [token for one in found for token in one.content]
    else:
        content = client.chat.completions.create(**ask).choices[0].logprobs.content
    assert [token.token for token in content] == ["a", "b", "<|im_end|>"]
    assert [token.bytes for token in content[:2]] == [[97], [98]]
    for token in content:
        assert len(token.top_logprobs) == 2
        assert token.top_logprobs[0].logprob == token.logprob <= 0


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_tokens_join_to_the_text(client: OpenAI, stream: bool) -> None:
    """Where a token is a part of a character, its bytes alone tell which."""
    said = "é日😀"
    ask = {"model": MODEL, "messages": user(said), "logprobs": True, "top_logprobs": 1}
    if stream:
        chunks = client.chat.completions.create(stream=True, **ask)
        found = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
        content = [token for one in found for token in one.content]
    else:
        content = client.chat.completions.create(**ask).choices[0].logprobs.content
    assert bytes(one for token in content[:-1] for one in token.bytes).decode() == said
    assert all(token.top_logprobs[0].bytes == token.bytes for token in content)


def test_logprobs_of_the_sampled_token_alone(client: OpenAI) -> None:
    ask = {"model": MODEL, "messages": user("a"), "logprobs": True}
    content = client.chat.completions.create(**ask).choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in content] == [0, 0]


def test_tool_call(client: OpenAI) -> None:
    ask = {"model": MODEL, "tools": [TOOL]}
    done = client.chat.completions.create(messages=user(f"Let me look.\n{CALL}"), **ask)
    [choice] = done.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    [call] = choice.message.tool_calls
    assert call.type == "function"
    assert call.id.startswith("call_")
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    done = client.chat.completions.create(messages=user(CALL), **ask)
    assert done.choices[0].message.content is None


def test_tool_calls_in_a_stream(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=user(f"Well <b>.\n{CALL}\n{CALL}"), tools=[TOOL], stream=True
    )
    content, calls, reasons = "", {}, []
    for chunk in stream:
        [choice] = chunk.choices
        content += choice.delta.content or ""
        for call in choice.delta.tool_calls or []:
            calls[call.index] = (call.id, call.function.name, json.loads(call.function.arguments))
        reasons += [choice.finish_reason] if choice.finish_reason else []
    assert content == "Well <b>."
    assert [call[1:] for call in calls.values()] == [("weather", {"city": "Rome"})] * 2
    assert calls[0][0] != calls[1][0]
    assert reasons == ["tool_calls"]


def test_the_clients_own_accumulator_understands_the_stream(client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=user(CALL), tools=[TOOL], stream_options={"include_usage": True}
    ) as stream:
        for _ in stream:
            pass
        done = stream.get_final_completion()
    assert done.choices[0].message.tool_calls[0].function.name == "weather"
    assert done.usage.completion_tokens == len(CALL) + 1


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL], "tool_choice": "none"}])
def test_without_tools_the_text_is_content(client: OpenAI, more: dict[str, Any]) -> None:
    done = client.chat.completions.create(model=MODEL, messages=user(CALL), **more)
    assert done.choices[0].message.content == CALL
    assert done.choices[0].finish_reason == "stop"


def test_tools_are_given_to_the_template(client: OpenAI) -> None:
    ask = {"model": MODEL, "messages": user("a")}
    without = client.chat.completions.create(**ask).usage.prompt_tokens
    tools = client.chat.completions.create(tools=[TOOL], **ask).usage.prompt_tokens
    none = client.chat.completions.create(tools=[TOOL], tool_choice="none", **ask)
    assert tools > without == none.usage.prompt_tokens


def test_the_context_is_too_short(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="4096") as caught:
        client.chat.completions.create(model=MODEL, messages=user("x"), max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"


def test_curl(server: RunningServer) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    ask = json.dumps({"model": MODEL, "messages": user("hello"), "stream": True})
    header = "Content-Type: application/json"
    command = [curl, "-sN", f"{server.url}/v1/chat/completions", "-H", header, "-d", ask]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert '"content":"o"' in out
    assert out.endswith("data: [DONE]\n\n")
