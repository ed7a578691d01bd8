"""logprob_token_ids over HTTP: what each endpoint tells of the tokens that a client names."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from onnxport.serving.http.logprobs import CompletionLogprobs, chat_logprobs, prompt_entries
from onnxport.serving.outputs import Logprob
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.tokenizers_for_tests import byte_level

from .conftest import RunningServer
from .fake import Client, FakeEngine, events
from .scripted import MODEL, say

pytestmark = pytest.mark.timeout(60)
END = 258  # <|im_end|>; the scripted model gives its next token 20 and all others 0
VOCAB = 261
TOTAL = math.log(math.exp(20) + VOCAB - 1)
LIKELY, OTHER = pytest.approx(20 - TOTAL, abs=1e-5), pytest.approx(-TOTAL, abs=1e-5)


def letter(char: str) -> int:
    """The token of a printable character."""
    return ord(char) - ord("!")


def post(server: RunningServer, path: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/{path}", json=body)


NAMED = [letter("b"), letter("z")]


@pytest.mark.parametrize("stream", [False, True])
def test_completions_tell_them_at_each_position(server: RunningServer, stream: bool) -> None:
    fields = {"prompt": say("ab"), "logprob_token_ids": NAMED, "stream": stream}
    response = post(server, "completions", **fields)
    answers = events(response) if stream else [response.json()]
    parts = [one["choices"][0]["logprobs"] for one in answers]
    top = [one for part in parts for one in part["top_logprobs"]]
    assert top == [
        {"b": OTHER, "z": OTHER, "a": LIKELY},
        {"b": LIKELY, "z": OTHER},
        {"b": OTHER, "z": OTHER, "<|im_end|>": LIKELY},
    ]
    assert [one for part in parts for one in part["tokens"]] == ["a", "b", "<|im_end|>"]
    assert [one for part in parts for one in part["token_logprobs"]] == [LIKELY] * 3


def test_completions_tell_the_likeliest_besides(server: RunningServer) -> None:
    fields = {"prompt": say("a"), "logprob_token_ids": NAMED, "max_tokens": 1}
    [choice] = post(server, "completions", logprobs=2, **fields).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": LIKELY, "!": OTHER, "b": OTHER, "z": OTHER}]
    more = {"return_tokens_as_token_ids": True}
    [choice] = post(server, "completions", **fields, **more).json()["choices"]
    names = [f"token_id:{one}" for one in (*NAMED, letter("a"))]
    assert list(choice["logprobs"]["top_logprobs"][0]) == names


def test_an_echoed_prompt_has_its_own_log_probabilities_alone(server: RunningServer) -> None:
    prompt = say("a")
    fields = {"prompt": prompt, "logprob_token_ids": NAMED, "echo": True}
    [choice] = post(server, "completions", **fields).json()["choices"]
    told = choice["logprobs"]
    assert "".join(told["tokens"]) == prompt + "a<|im_end|>"
    assert all(len(one) == 1 for one in told["top_logprobs"][1:-2])
    assert [len(one) for one in told["top_logprobs"][-2:]] == [3, 3]
    assert choice["prompt_logprobs"] is None


@pytest.mark.parametrize("more", [{}, {"logprobs": True}])
def test_chats_tell_them_at_each_position(server: RunningServer, more: dict[str, Any]) -> None:
    """Whether or not they say logprobs, as OpenAI's client sends it; in the order of rank."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        done = client.chat.completions.create(
            model=MODEL,
            temperature=0,
            messages=[{"role": "user", "content": say("ab")}],
            extra_body={"logprob_token_ids": NAMED[::-1]},
            **more,
        )
    told = done.choices[0].logprobs
    assert told is not None
    assert told.content is not None
    assert [one.token for one in told.content] == ["a", "b", "<|im_end|>"]
    assert [one.logprob for one in told.content] == [LIKELY] * 3
    for one in told.content:
        assert [each.token for each in one.top_logprobs] == ["b", "z"]
        wanted = [LIKELY if one.token == "b" else OTHER, OTHER]
        assert [each.logprob for each in one.top_logprobs] == wanted


def test_chats_tell_the_likeliest_besides_also_in_streams(server: RunningServer) -> None:
    response = post(
        server,
        "chat/completions",
        messages=[{"role": "user", "content": say("ab")}],
        logprobs=True,
        top_logprobs=1,
        logprob_token_ids=NAMED,
        stream=True,
    )
    parts = [one["choices"][0]["logprobs"] for one in events(response)]
    content = [entry for part in parts if part for entry in part["content"]]
    assert [[one["token"] for one in entry["top_logprobs"]] for entry in content] == [
        ["a", "b", "z"],
        ["b", "z"],
        ["<|im_end|>", "b", "z"],
    ]


def test_an_empty_list_asks_for_nothing(server: RunningServer) -> None:
    [choice] = post(server, "completions", prompt=say("a"), logprob_token_ids=[]).json()["choices"]
    assert choice["logprobs"] is None
    messages = [{"role": "user", "content": say("a")}]
    fields = {"messages": messages, "logprob_token_ids": [], "logprobs": False}
    [choice] = post(server, "chat/completions", **fields).json()["choices"]
    assert choice["logprobs"] is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"logprob_token_ids": list(range(129))}, "logprob_token_ids", "at most 128"),
        ({"logprob_token_ids": [VOCAB]}, "logprob_token_ids", f"0 to {VOCAB - 1}"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids.0", "greater than or equal to 0"),
        ({"logprob_token_ids": 5}, "logprob_token_ids", "list"),
    ],
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_what_cannot_be_told_is_refused(
    server: RunningServer, path: str, fields: dict[str, Any], param: str, words: str
) -> None:
    asked: dict[str, Any] = {"prompt": "a"}
    if path != "completions":
        asked = {"messages": [{"role": "user", "content": "a"}]}
    for stream in (False, True):
        response = post(server, path, **asked, **fields, stream=stream)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert words in error["message"]


Ask = Callable[..., Client]


@pytest.fixture
def client(model_folder: Path) -> Client:
    return Client(FakeEngine(Tokenizer.from_folder(model_folder, frozenset())), model_folder)


async def test_what_contradicts_them_is_refused(client: Client) -> None:
    response = await client.chat(logprob_token_ids=[3], logprobs=False)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprobs"
    response = await client.complete(logprob_token_ids=[3], echo=True, max_tokens=0)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logprob_token_ids"
    response = await client.complete(logprob_token_ids=[3], echo=True, stream=True)
    assert response.json()["error"]["param"] == "echo"
    assert client.engine.asked == []


def test_what_json_has_no_number_for() -> None:
    tokenizer = Tokenizer(byte_level())
    entry = {5: Logprob(-math.inf, 2, "a"), 6: Logprob(-1.0, 1, "b")}
    lists = CompletionLogprobs(tokenizer).body([(5, entry)])
    assert lists["token_logprobs"] == [-9999.0]
    assert lists["top_logprobs"] == [{"a": -9999.0, "b": -1.0}]
    [told] = chat_logprobs(tokenizer, [(6, entry)], 2)["content"]
    assert [one["logprob"] for one in told["top_logprobs"]] == [-1.0, -9999.0]
    [prompt] = prompt_entries([entry]) or ()
    assert prompt is not None
    assert prompt["5"]["logprob"] == -9999.0
