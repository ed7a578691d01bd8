"""`/completion`: what a completion is, told as llama.cpp's clients read it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from onnxport.errors import OverloadedError
from onnxport.serving.adapters.registry import Adapter
from onnxport.serving.http.app import AppOptions
from onnxport.serving.outputs import Failure
from onnxport.serving.tokenizer import Tokenizer

from .conftest import RunningServer
from .fake import MODEL as FAKE
from .fake import Client, FakeEngine
from .scripted import MODEL, say
from .test_generation_fields import GIVEN

pytestmark = pytest.mark.timeout(60)


def letter(char: str) -> int:
    """The token of a printable character."""
    return ord(char) - ord("!")


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder, frozenset())


def post(server: RunningServer, text: str, **fields: Any) -> httpx.Response:
    body = {"prompt": say(text), "temperature": 0, **fields}
    return httpx.post(f"{server.url}/completion", json=body)


def told(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, of which the last one says so; nothing comes behind."""
    assert response.status_code == 200, response.text
    *chunks, end = response.text.split("\n\n")
    assert end == ""
    found = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    assert [one["stop"] for one in found] == [False] * (len(found) - 1) + [True]
    return found


def test_a_text(server: RunningServer) -> None:
    found = told(post(server, "a\nb", return_tokens=True))
    assert found == {
        "index": 0,
        "content": "a\nb",
        "tokens": found["tokens"],
        "stop": True,
        "tokens_predicted": 4,  # with the end token
        "tokens_evaluated": found["tokens_evaluated"],
        "model": MODEL,
        "stop_type": "eos",
        "stopping_word": "",
        "has_new_line": True,
        "truncated": False,
        "tokens_cached": found["tokens_cached"],
    }
    assert len(found["tokens"]) == 4
    assert found["tokens_evaluated"] == 5
    assert told(post(server, "ab"))["tokens"] == []
    both = httpx.post(f"{server.url}/completions", json={"prompt": say("ab"), "temperature": 0})
    assert told(both)["content"] == "ab"


@pytest.mark.parametrize(
    ("fields", "content", "kind", "word"),
    [
        ({"n_predict": 2}, "ab", "limit", ""),
        ({"n_predict": -1}, "abcd", "eos", ""),
        ({"stop": ["c"]}, "ab", "word", "c"),
        ({"stop": "bc"}, "a", "word", "bc"),
        ({"stop_token_ids": [letter("c")]}, "ab", "eos", ""),
        ({"repetition_detection": {"max_pattern_size": 1, "min_count": 2}}, "abcd", "eos", ""),
        ({"grammar": 'root ::= "ab" [cd]'}, "abc", "eos", ""),
        ({"grammar": ""}, "abcd", "eos", ""),
        ({"json_schema": {"const": "abcd"}}, '"abcd"', "eos", ""),
        ({"logit_bias": [[letter("b"), -100], [letter("z"), 1]]}, "azcd", "eos", ""),
        ({"logit_bias": {str(letter("b")): -100, str(letter("z")): 1}}, "azcd", "eos", ""),
        ({"logit_bias": []}, "abcd", "eos", ""),
        (
            {"n_predict": None, "cache_prompt": True, "n_keep": 5, "samplers": None},
            "abcd",
            "eos",
            "",
        ),
    ],
)
def test_what_ends_it(
    server: RunningServer, fields: dict[str, Any], content: str, kind: str, word: str
) -> None:
    found = told(post(server, "abcd", **fields))
    assert (found["content"], found["stop_type"], found["stopping_word"]) == (content, kind, word)
    streamed = events(post(server, "abcd", **fields, stream=True))
    assert "".join(one["content"] for one in streamed) == content
    assert {**streamed[-1], "content": content, "tokens_cached": found["tokens_cached"]} == found


def test_an_answer_that_is_stuck_has_reached_its_limit(server: RunningServer) -> None:
    rule = {"max_pattern_size": 1, "min_count": 3}
    found = told(post(server, "xxxxxx", repetition_detection=rule))
    assert (found["content"], found["stop_type"]) == ("xxx", "limit")


def test_pieces_of_a_stream(server: RunningServer) -> None:
    *pieces, last = events(post(server, "abc", stream=True, return_tokens=True))
    assert "".join(one["content"] for one in pieces) == "abc"
    assert [token for one in pieces for token in one["tokens"]][:3] == list(map(letter, "abc"))
    counts = [one["tokens_predicted"] for one in (*pieces, last)]
    assert counts == sorted(counts)
    assert (last["content"], last["tokens"], last["tokens_predicted"]) == ("", [], 4)


def test_token_ids_and_a_cached_prompt(server: RunningServer) -> None:
    ids = httpx.post(f"{server.url}/tokenize", json={"content": say("x" * 40)}).json()["tokens"]
    found = [told(httpx.post(f"{server.url}/completion", json={"prompt": ids})) for _ in range(2)]
    assert [one["content"] for one in found] == ["x" * 40] * 2
    assert found[1]["tokens_cached"] > 0


async def test_it_is_a_completion(tokenizer: Tokenizer, model_folder: Path) -> None:
    client = Client(FakeEngine(tokenizer), model_folder, AppOptions(request_timeout_s=5.0))
    fields = {name: one for name, one in GIVEN.items() if name != "structured_outputs"}
    for more in ({}, fields, {"structured_outputs": {"json": {}}}):
        named = {"max_tokens": 7, "stop": ["x"], **more}
        assert (await client.complete("ab", **named)).status_code == 200
        named = {"n_predict": 7, "stop": ["x"], **more}
        if "structured_outputs" in more:
            named = {"n_predict": 7, "stop": ["x"], "json_schema": {}}
        answer = await client.post("/completion", prompt="ab", **named)
        assert answer.status_code == 200, answer.text
        one, other = client.engine.asked[-2:]
        assert (one.prompt, one.params, one.options) == (other.prompt, other.params, other.options)
    assert (await client.post("/completion", prompt="ab")).status_code == 200
    assert client.engine.asked[-1].params.max_tokens is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": "x" * 20_000}, None),
        ({"n_predict": 0}, "n_predict"),
        ({"n_predict": -2}, "n_predict"),
        ({"n_predict": 10**9}, None),
        ({"max_tokens": 5}, "max_tokens"),
        ({"grammar": "root ::= nothing"}, "grammar"),
        ({"json_schema": {"type": 5}}, "json_schema"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
        ({"grammar": 'root ::= "a"', "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"logit_bias": [[1, False]]}, "logit_bias"),
        ({"logit_bias": [["a", 1]]}, "logit_bias"),
        ({"logit_bias": [[1, 1], [1, 2]]}, "logit_bias"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"n_probs": 5}, "n_probs"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"image_data": [{}]}, "image_data"),
        ({"temperature": -1}, "temperature"),
        ({"id_slot": 3}, "id_slot"),
        ({"model": "other"}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(
    server: RunningServer, fields: dict[str, Any], param: str | None, stream: bool
) -> None:
    body = {"prompt": "a", "stream": stream, **fields}
    found = httpx.post(f"{server.url}/completion", json=body)
    assert found.status_code == (404 if "model" in fields else 400), found.text
    assert found.json()["error"]["param"] == param, found.text


async def test_what_fails(tokenizer: Tokenizer, model_folder: Path) -> None:
    engine = FakeEngine(tokenizer, ("ab",), "error", None, Failure("it broke", False))
    client = Client(engine, model_folder)
    answer = await client.post("/completion", prompt="ab")
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "it broke")
    answer = await client.post("/completion", prompt="ab", stream=True)
    *_, last, end = answer.text.split("\n\n")
    assert (json.loads(last.removeprefix("data: "))["error"]["message"], end) == ("it broke", "")
    client.engine.refusals.append(OverloadedError("full", 3.0))
    assert (await client.post("/completion", prompt="ab")).status_code == 429


async def test_names_and_keys(tokenizer: Tokenizer, model_folder: Path) -> None:
    engine = FakeEngine(tokenizer)
    client = Client(engine, model_folder, AppOptions(api_keys=("secret",)))
    for path in ("/completion", "/completions"):
        assert (await client.post(path, prompt="ab")).status_code == 401
        answer = await client.post(path, "secret", prompt="ab", model=FAKE)
        assert answer.json()["model"] == FAKE
    engine.adapters.append(Adapter("sql", 1, "", 4, Path(), None))
    answer = await client.post("/completion", "secret", prompt="ab", model="sql")
    assert answer.json()["model"] == "sql"
    assert engine.asked[-1].options.adapter == "sql"
