"""Variables of the chat template that a server has for all requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from onnxport.serving.chat import ChatTemplate
from onnxport.serving.tokenizer import Tokenizer

from .fake import MODEL, Client, FakeEngine

SOURCE = (
    "{{ messages[0].content }} {{ mood }} {{ style }}"
    "{% if enable_thinking is defined %} {{ enable_thinking }}{% endif %}"
)
CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture
def engine(model_folder: Path) -> FakeEngine:
    return FakeEngine(Tokenizer.from_folder(model_folder, frozenset()))


@pytest.fixture
def client(engine: FakeEngine, model_folder: Path) -> Client:
    variables = {"mood": "calm", "style": "plain", "enable_thinking": False}
    return Client(engine, model_folder, template=ChatTemplate({"default": SOURCE}, {}, variables))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, "hi calm plain False"),
        ({"chat_template_kwargs": {}}, "hi calm plain False"),
        ({"chat_template_kwargs": {"mood": "wild"}}, "hi wild plain False"),
        ({"chat_template_kwargs": {"mood": None}}, "hi None plain False"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "hi calm plain True"),
    ],
)
async def test_those_of_a_request_go_before_them(
    client: Client, engine: FakeEngine, fields: dict[str, Any], expected: str
) -> None:
    told = await client.post("/tokenize", messages=CHAT, **fields)
    assert engine.tokenizer.decode(told.json()["tokens"]) == expected
    ask = {"model": MODEL, **fields}
    for path, said in (
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": "hi"}),
    ):
        assert (await client.post(path, **ask, **said)).status_code == 200
        assert list(engine.asked[-1].prompt) == told.json()["tokens"], path


@pytest.mark.parametrize(("effort", "expected"), [("low", "True"), ("none", "False")])
async def test_so_does_an_effort(
    client: Client, engine: FakeEngine, effort: str, expected: str
) -> None:
    assert (await client.chat("hi", reasoning_effort=effort)).status_code == 200
    prompt = engine.tokenizer.decode(engine.asked[-1].prompt)
    assert prompt == f"hi calm plain {expected}"
