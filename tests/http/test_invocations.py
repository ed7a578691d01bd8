"""`POST /invocations`, SageMaker's: each body goes to the endpoint that it is for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from onnxport.serving.http.app import AppOptions
from onnxport.serving.http.invocations import CLASSIFY, InvocationsMiddleware
from onnxport.serving.http.middleware import BodyLimitMiddleware
from onnxport.serving.tokenizer import Tokenizer

from .fake import Client, FakeEngine, events

USER = {"role": "user", "content": "ab"}


async def told(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer where a request went, and with what."""
    request = Request(scope, receive)
    if request.method == "GET":
        await Response("read")(scope, receive, send)
        return
    await JSONResponse({request.url.path: await request.json()})(scope, receive, send)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": [USER], "model": "m"}, "/v1/chat/completions"),
        ({"messages": [USER], "input": "x"}, "/v1/chat/completions"),
        ({"prompt": "ab", "messages": None}, "/v1/completions"),
        ({"prompt": [1, 2]}, "/v1/completions"),
        ({"query": "q", "documents": ["a"]}, "/rerank"),
        ({"query": "q", "texts": ["a"]}, "/rerank"),
        ({"text_1": "q", "text_2": "a"}, "/score"),
        ({"queries": "q", "documents": ["a"]}, "/score"),
        ({"data_1": "q", "data_2": "a"}, "/score"),
        ({"input": "ab"}, "/v1/embeddings"),
    ],
)
def test_a_body_tells_its_endpoint(body: dict[str, Any], path: str) -> None:
    client = TestClient(InvocationsMiddleware(told))
    assert client.post("/invocations", json=body).json() == {path: body}
    assert client.post("/other", json=body).json() == {"/other": body}
    assert client.get("/invocations").text == "read"


def test_what_an_input_is_for_depends_on_the_model() -> None:
    client = TestClient(InvocationsMiddleware(told, CLASSIFY))
    assert client.post("/invocations", json={"input": "a"}).json() == {"/classify": {"input": "a"}}
    prompt = {"prompt": "a"}
    assert client.post("/invocations", json=prompt).json() == {"/v1/completions": prompt}


def test_a_body_that_comes_in_pieces() -> None:
    client = TestClient(InvocationsMiddleware(told))
    answer = client.post("/invocations", content=iter([b'{"prom', b'pt": ', b'"ab"}']))
    assert answer.json() == {"/v1/completions": {"prompt": "ab"}}


def test_a_body_that_is_too_large_is_refused_announced_or_not() -> None:
    client = TestClient(BodyLimitMiddleware(InvocationsMiddleware(told), max_body_bytes=20))
    for content in (b" " * 21, iter([b'{"prompt":', b'"abcdefghi"}'])):
        answer = client.post("/invocations", content=content)
        assert answer.status_code == 413
        assert "larger than 20 bytes" in answer.json()["error"]["message"]
    answer = client.post("/invocations", content=iter([b'{"prompt":', b'"abcdefg"}']))
    assert answer.json() == {"/v1/completions": {"prompt": "abcdefg"}}


async def test_answers_streams_and_errors(model_folder: Path) -> None:
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()))
    client = Client(engine, model_folder, AppOptions(api_keys=("k",), force_include_usage=True))
    whole = await client.post("/invocations", "k", messages=[USER])
    assert whole.json()["choices"][0]["message"]["content"] == "ok"
    chunks = events(await client.post("/invocations", "k", prompt="ab", stream=True))
    assert "".join(one["choices"][0]["text"] for one in chunks[:-1]) == "ok"
    wrong = await client.post("/invocations", "k", prompt="ab", n=0)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "n")
    unknown = await client.post("/invocations", "k", frob=1)
    assert unknown.status_code == 400
    assert "neither messages, nor prompt" in unknown.json()["error"]["message"]
    assert (await client.post("/invocations", prompt="ab")).status_code == 401


@pytest.mark.parametrize("options", [None, {"include_usage": False}])
async def test_a_server_may_tell_the_usage_unasked(
    model_folder: Path, options: dict[str, bool] | None
) -> None:
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()))
    client = Client(engine, model_folder, AppOptions(force_include_usage=True))
    for send in (client.complete, client.chat):
        chunks = events(await send(stream=True, stream_options=options))
        used = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert used == sorted(used)
        assert (used[-1], chunks[-1]["choices"]) == (2, [])
        assert (await send()).json()["usage"]["completion_tokens"] == 2
