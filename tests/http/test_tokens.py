"""What a prompt is made of, as the completion endpoints read it; and what the tokenizer has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from onnxport.serving.chat import ChatTemplate
from onnxport.serving.http.app import AppOptions
from onnxport.serving.tokenizer import Tokenizer

from .fake import MODEL, Client, FakeEngine
from .scripted import CHAT_TEMPLATE

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
    both = {"prompt": text, "content": text}
    assert body_of(await client.post("/detokenize", tokens=tokens)) == both
    assert body_of(await client.post("/detokenize", tokens=[])) == {"prompt": "", "content": ""}


async def test_as_llama_cpp_asks(client: Client, tokenizer: Tokenizer) -> None:
    text = "<|im_start|>é"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    more: dict[str, Any] = {"add_special": False, "parse_special": True}
    for fields in ({}, more, {"add_special": True, "with_pieces": False}):
        found = body_of(await client.post("/tokenize", content=text, **fields))
        assert found == {"tokens": tokens}
    found = body_of(await client.post("/tokenize", content=text, with_pieces=True))
    pieces = ["<|im_start|>", [0xC3], [0xA9]]
    assert found["tokens"] == [
        {"id": one, "piece": piece} for one, piece in zip(tokens, pieces, strict=True)
    ]
    assert body_of(await client.post("/tokenize", content="")) == {"tokens": []}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [TOOL]},
        {"tools": [TOOL], "tool_choice": "none"},
        {"add_generation_prompt": False},
        {"temperature": 0.5, "stream": True},
    ],
)
async def test_the_prompt_of_a_chat(
    client: Client, engine: FakeEngine, fields: dict[str, Any]
) -> None:
    asked = {"model": MODEL, "messages": CHAT, **fields}
    found = body_of(await client.post("/apply-template", **asked))
    assert (await client.post("/v1/chat/completions", **asked)).status_code == 200
    prompt = engine.tokenizer.decode(engine.asked[-1].prompt, skip_special_tokens=False)
    assert found == {"prompt": prompt}


async def test_efforts_of_a_prompt(engine: FakeEngine, model_folder: Path) -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}{{ reasoning_effort }}"})
    client = Client(engine, model_folder, template=template)
    asked = {"messages": CHAT, "reasoning_effort": "low"}
    assert body_of(await client.post("/apply-template", **asked)) == {"prompt": "hilow"}


async def test_what_the_tokenizer_has(client: Client, engine: FakeEngine) -> None:
    found = body_of(await client.get("/tokenizer_info"))
    assert found == {"eos_token": "<|im_end|>", "chat_template": CHAT_TEMPLATE}
    bare = Client(engine, Path(), template=ChatTemplate({}, {"bos_token": "<s>"}))
    assert body_of(await bare.get("/tokenizer_info")) == {"bos_token": "<s>"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"prompt": "a", "stream": True}, "stream"),
        ("/tokenize", {"prompt": "a", "content": "a"}, "prompt"),
        ("/tokenize", {"prompt": "a", "with_pieces": True}, "with_pieces"),
        ("/tokenize", {"messages": CHAT, "add_special": True}, "add_special"),
        ("/tokenize", {"content": "a", "add_special_tokens": True}, "add_special_tokens"),
        ("/tokenize", {"content": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"content": "a", "tools": [TOOL]}, "tools"),
        ("/tokenize", {"content": "a", "parse_special": "no, never"}, "parse_special"),
        ("/tokenize", {"content": ["a"]}, "content"),
        ("/apply-template", {}, "messages"),
        (
            "/apply-template",
            {"messages": CHAT, "truncate_prompt_tokens": 5},
            "truncate_prompt_tokens",
        ),
        ("/apply-template", {"messages": CHAT, "add_special_tokens": True}, "add_special_tokens"),
        ("/apply-template", {"messages": CHAT, "reasoning_effort": "low"}, "reasoning_effort"),
        ("/apply-template", {"messages": [{"role": "none"}], "moood": 1}, None),
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


FIELDS: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": CHAT},
}


@pytest.mark.parametrize("path", FIELDS)
async def test_another_model_is_a_404(client: Client, path: str) -> None:
    assert (await client.post(path, model="other", **FIELDS[path])).status_code == 404


@pytest.mark.parametrize("path", FIELDS)
async def test_a_key_is_needed(engine: FakeEngine, model_folder: Path, path: str) -> None:
    client = Client(engine, model_folder, AppOptions(api_keys=("secret",)))
    assert (await client.post(path, **FIELDS[path])).status_code == 401
    assert (await client.post(path, key="secret", **FIELDS[path])).status_code == 200
