"""What a server with another limit of log probabilities tells: of all tokens, if it has none."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from onnxport.errors import RequestError
from onnxport.serving.http.responses_request import renamed

from .conftest import RunningServer, StartServer
from .fake import events
from .scripted import MODEL, say

pytestmark = pytest.mark.timeout(60)
VOCAB = 261
MESSAGES = [{"role": "user", "content": say("ab")}]


def post(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/{path}", json=body)


def told(server: RunningServer, path: str, **fields: Any) -> dict[str, Any]:
    response = post(server, path, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


@pytest.fixture(scope="module")
def unlimited(_start: StartServer) -> RunningServer:
    return _start(max_logprobs=-1)


@pytest.mark.parametrize("stream", [False, True])
def test_completions_tell_all_tokens(unlimited: RunningServer, stream: bool) -> None:
    fields = {"prompt": say("ab"), "logprobs": -1, "return_tokens_as_token_ids": True}
    response = post(unlimited, "completions", **fields, stream=stream)
    answers = events(response) if stream else [response.json()]
    parts = [one["choices"][0]["logprobs"]["top_logprobs"] for one in answers]
    found = [top for part in parts for top in part]
    assert len(found) == 3
    for top in found:
        assert len(top) == VOCAB
        assert sum(map(math.exp, top.values())) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize(
    ("likeliest", "prompts", "more"),
    [(-1, 3, {}), (1, -1, {"max_tokens": 0}), (-1, -1, {}), (-1, None, {})],
)
def test_echoed_prompts_tell_as_many_as_each_field_asks_for(
    unlimited: RunningServer, likeliest: int, prompts: int | None, more: dict[str, Any]
) -> None:
    fields = {"prompt": say("ab"), "echo": True, "return_tokens_as_token_ids": True, **more}
    asked = {"logprobs": likeliest, "prompt_logprobs": prompts}
    [choice] = told(unlimited, "completions", **fields, **asked)["choices"]
    for count, field in (
        (likeliest, choice["logprobs"]["top_logprobs"]),
        (prompts, choice.get("prompt_logprobs")),
    ):
        if count is None:
            assert field is None
            continue
        wanted = {VOCAB} if count == -1 else {count, count + 1}
        assert {len(one) for one in field[1:]} <= wanted


def test_chats_tell_all_tokens(unlimited: RunningServer) -> None:
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": -1}
    [choice] = told(unlimited, "chat/completions", **chat)["choices"]
    for entry in choice["logprobs"]["content"]:
        assert len(entry["top_logprobs"]) == VOCAB
        values = [one["logprob"] for one in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
    response = post(unlimited, "chat/completions", **chat, stream=True)
    found = [one["choices"][0]["logprobs"] for one in events(response)]
    counts = [len(entry["top_logprobs"]) for part in found if part for entry in part["content"]]
    assert counts == [VOCAB] * 3
    body = told(unlimited, "chat/completions", **chat | {"top_logprobs": 50}, prompt_logprobs=-1)
    [choice] = body["choices"]
    assert {len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]} == {50}
    assert {len(entry) for entry in body["prompt_logprobs"][1:]} == {VOCAB}


def test_responses_tell_all_tokens(unlimited: RunningServer) -> None:
    include = ["message.output_text.logprobs"]
    body = told(unlimited, "responses", input=say("ab"), include=include, top_logprobs=-1)
    [text] = body["output"][0]["content"]
    assert [len(entry["top_logprobs"]) for entry in text["logprobs"]] == [VOCAB] * 2
    assert body["top_logprobs"] == -1


def test_what_memory_should_not_hold_is_refused(unlimited: RunningServer) -> None:
    fields = {"prompt": [9] * 200, "prompt_logprobs": 30, "n": 64, "max_tokens": 252}
    error = post(unlimited, "completions", **fields, logprobs=-1).json()["error"]
    assert error["param"] == "prompt_logprobs"
    assert "261 (logprobs) x 16128 tokens are 4591488 log probabilities" in error["message"]
    several = {"prompt": [[9]] * 100, "max_tokens": 161, "logprobs": -1}  # none of them alone
    error = post(unlimited, "completions", **several).json()["error"]
    assert error["param"] == "logprobs"
    assert "261 (logprobs) x 16100 tokens are 4202100 log" in error["message"]


def test_responses_call_them_otherwise() -> None:
    error = renamed(RequestError("261 (logprobs) x 5 tokens are too many", "logprobs"))
    assert error.param == "top_logprobs"
    assert str(error) == "261 (top_logprobs) x 5 tokens are too many"


def refused(server: RunningServer, path: str, param: str, words: str, **fields: Any) -> None:
    for stream in (False, True):
        response = post(server, path, **fields, stream=stream)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert words in error["message"]
        assert "--max-logprobs" in error["message"] or words.startswith("give")


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (21, "is 21, and at most 20 of the likeliest are told here"),
        (-1, f"is -1, that is all {VOCAB} tokens, and at most 20"),
        (-2, "give 0 or more, or -1 for all tokens"),
    ],
)
def test_more_than_usual_is_refused_by_the_name_that_the_client_knows(
    server: RunningServer, count: int, words: str
) -> None:
    refused(server, "completions", "logprobs", words, prompt="a", logprobs=count)
    chat = {"messages": MESSAGES, "logprobs": True, "top_logprobs": count}
    refused(server, "chat/completions", "top_logprobs", words, **chat)
    include = ["message.output_text.logprobs"]
    fields = {"input": "a", "include": include, "top_logprobs": count}
    refused(server, "responses", "top_logprobs", words, **fields)
    for path, asked in (("completions", {"prompt": "a"}), ("chat/completions", chat)):
        fields = {**asked, "top_logprobs": 1} if path != "completions" else asked
        response = post(server, path, **fields, prompt_logprobs=count)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt_logprobs"
        assert words in response.json()["error"]["message"]


def test_a_lower_limit(start_server: StartServer) -> None:
    server = start_server(max_logprobs=2)
    words = "is 3, and at most 2"
    refused(server, "completions", "logprobs", words, prompt="a", logprobs=3)
    [choice] = told(server, "completions", prompt=say("a"), logprobs=2)["choices"]
    assert all(2 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])
