"""`/tokenize` and `/detokenize`: what a prompt is made of, as the completion endpoints read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from onnxport.serving.http.app import AppOptions
from onnxport.serving.tokenizer import Tokenizer

from .fake import MODEL, Client, FakeEngine

CHAT = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder, frozenset())


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


@pytest.fixture
def client(engine: FakeEngine, model_folder: Path) -> Client:
    return Client(engine, model_folder)


def body_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def test_a_text(client: Client, tokenizer: Tokenizer) -> None:
    found = body_of(await client.post("/tokenize", prompt="hello"))
    assert found == {
        "count": 5,
        "max_model_len": client.engine.capabilities.max_model_len,
        "tokens": tokenizer.encode("hello"),
        "token_strs": None,
    }


async def test_a_longer_text_than_the_model_takes_is_counted(client: Client) -> None:
    length = client.engine.capabilities.max_model_len + 1
    assert body_of(await client.post("/tokenize", prompt="x" * length))["count"] == length


async def test_tokens_as_the_vocabulary_spells_them(client: Client) -> None:
    found = body_of(await client.post("/tokenize", prompt="a b", return_token_strs=True))
    assert found["token_strs"] == ["a", "Ġ", "b"]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"mood": "good"}},
        {"add_special_tokens": True},
        {"model": MODEL},
    ],
)
async def test_a_conversation_is_what_a_chat_has(
    client: Client, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    found = body_of(await client.post("/tokenize", messages=CHAT, **fields))
    asked = {"model": MODEL, "messages": CHAT, **fields}
    assert (await client.post("/v1/chat/completions", **asked)).status_code == 200
    assert tuple(found["tokens"]) == engine.asked[-1].prompt


async def test_there_and_back(client: Client) -> None:
    text = "<|im_start|>user\nÜber 10 € 🙂<|im_end|>"
    tokens = body_of(await client.post("/tokenize", prompt=text, model=MODEL))["tokens"]
    assert body_of(await client.post("/detokenize", tokens=tokens)) == {"prompt": text}
    assert body_of(await client.post("/detokenize", tokens=[])) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"prompt": "a", "stream": True}, "stream"),
        ("/tokenize", {"prompt": "\ud800"}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": CHAT, "chat_template_kwargs": {"tools": 1}}, None),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [0, 10**9]}, "tokens"),
    ],
)
async def test_what_is_refused(
    client: Client, path: str, fields: dict[str, Any], param: str | None
) -> None:
    response = await client.post(path, **fields)
    assert response.status_code == 400
    if param is not None:
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_another_model_is_a_404(client: Client, path: str) -> None:
    fields: dict[str, Any] = {"prompt": "a"} if path == "/tokenize" else {"tokens": [1]}
    assert (await client.post(path, model="other", **fields)).status_code == 404


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_a_key_is_needed(engine: FakeEngine, model_folder: Path, path: str) -> None:
    client = Client(engine, model_folder, AppOptions(api_keys=("secret",)))
    fields: dict[str, Any] = {"prompt": "a"} if path == "/tokenize" else {"tokens": [1]}
    assert (await client.post(path, **fields)).status_code == 401
    assert (await client.post(path, key="secret", **fields)).status_code == 200
