"""Why an answer ended, as both endpoints tell it, whole and streamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from onnxport.serving.outputs import Failure
from onnxport.serving.tokenizer import Tokenizer

from .conftest import RunningServer
from .fake import Client, FakeEngine, events
from .scripted import MODEL, say

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
NAMED = {"type": "function", "function": {"name": "f"}}


def choices_of(
    server: RunningServer, chat: bool, stream: bool, **fields: Any
) -> list[dict[str, Any]]:
    """Return the choice of an answer, or the parts of it."""
    prompt: dict[str, Any] = {"prompt": say("hello")}
    if chat:
        prompt = {"messages": [{"role": "user", "content": say("hello")}]}
    path = "chat/completions" if chat else "completions"
    body = {"model": MODEL, "temperature": 0, "stream": stream, **prompt, **fields}
    response = httpx.post(f"{server.url}/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    if not stream:
        return list(response.json()["choices"])
    return [choice for event in events(response) for choice in event["choices"]]


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder, frozenset())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_stop_reason(server: RunningServer, tokenizer: Tokenizer, chat: bool, stream: bool) -> None:
    """The stop string or stop token, as in vLLM; nothing for an end of the model, or a length."""
    letter, end = tokenizer.token_to_id("e"), tokenizer.token_to_id("<|im_end|>")
    for fields, reasons in (
        ({}, ("stop", None)),
        ({"max_tokens": 2}, ("length", None)),
        ({"stop": ["x", "llo"]}, ("stop", "llo")),
        ({"stop_token_ids": [letter]}, ("stop", letter)),
        ({"stop_token_ids": [end]}, ("stop", None)),
        ({"stop_token_ids": [end], "ignore_eos": True}, ("stop", end)),
        ({"structured_outputs": {"choice": ["hello"]}}, ("stop", None)),
    ):
        *parts, last = choices_of(server, chat, stream, **fields)
        assert (last["finish_reason"], last["stop_reason"]) == reasons, fields
        assert all(part.get("stop_reason") is None for part in parts)


def test_a_prompt_alone_has_no_end_of_its_own(server: RunningServer) -> None:
    """One token is generated that nobody asked for, and here it is a stop token."""
    [choice] = choices_of(server, False, False, max_tokens=0, echo=True, stop=["h"])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "ends", "said", "wanted"),
    [
        ("auto", "stop", CALL, "tool_calls"),
        ("required", "stop", CALL, "tool_calls"),
        (NAMED, "stop", CALL, "stop"),
        ("auto", "stop", "text", "stop"),
        ("auto", "length", CALL, "length"),
        ("required", "length", CALL, "length"),
        (NAMED, "length", CALL[:30], "length"),
    ],
)
async def test_finish_reason_of_calls(
    model_folder: Path, choice: Any, ends: Any, said: str, wanted: str, stream: bool
) -> None:
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()), (said,), ends)
    client = Client(engine, model_folder)
    response = await client.chat(tools=TOOLS, tool_choice=choice, stream=stream)
    if stream:
        parts = [event["choices"][0] for event in events(response)]
        called = any("tool_calls" in part["delta"] for part in parts)
        reason = parts[-1]["finish_reason"]
    else:
        [only] = response.json()["choices"]
        called, reason = "tool_calls" in only["message"], only["finish_reason"]
    assert called == (said == CALL)
    assert reason == wanted


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("refused", [False, True])
async def test_who_is_to_blame(model_folder: Path, chat: bool, stream: bool, refused: bool) -> None:
    failure = Failure("what happened", refused)
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())
    client = Client(FakeEngine(tokenizer, ("",), "error", None, failure), model_folder)
    response = await (client.chat if chat else client.complete)(stream=stream)
    kind = "invalid_request_error" if refused else "server_error"
    if response.status_code == 200:  # the head had been sent
        assert stream
        error = json.loads(response.text.split("data: ")[-2])["error"]
    else:
        assert response.status_code == (400 if refused else 500)
        error = response.json()["error"]
    assert (error["message"], error["type"]) == ("what happened", kind)
