"""Streams whose chunks have several tokens at least."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from onnxport.errors import RequestError
from onnxport.serving.http.app import AppOptions
from onnxport.serving.outputs import Failure
from onnxport.serving.tokenizer import Tokenizer

from .fake import MODEL, Client, FakeEngine, events
from .test_vllm_fields import BODIES

TEXT = "abcdefgh"
Ask = Callable[..., Client]


@pytest.fixture
def ask(model_folder: Path) -> Ask:
    """Return what makes a client of an engine with the settings that are given."""
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())

    def make(options: AppOptions | None = None, **settings: Any) -> Client:
        engine = FakeEngine(tokenizer, **{"answers": (TEXT,), **settings})
        return Client(engine, model_folder, options)

    return make


async def stream(client: Client, path: str, **fields: Any) -> str:
    """Return the text of a stream."""
    body = {"model": MODEL, "stream": True, **BODIES[path], **fields}
    response = await client.post(f"/v1/{path}", **body)
    assert response.status_code == 200, response.text
    return response.text


def pieces(told: str) -> list[str]:
    """Return the texts of a stream of one answer, one a chunk."""
    texts = []
    for line in told.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        if event.get("type", "").endswith(("output_text.delta", "block_delta")):
            delta = event["delta"]
            texts.append(delta if isinstance(delta, str) else delta["text"])
        for choice in event.get("choices", ()):
            texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
    return [text for text in texts if text]


CUT: Sequence[tuple[int | None, list[str]]] = [
    (None, [*TEXT]),
    (1, [*TEXT]),
    (2, ["a", "bc", "de", "fg", "h"]),
    (3, ["a", "bcd", "efg", "h"]),
    (7, ["a", "bcdefgh"]),
    (1000, ["a", "bcdefgh"]),
]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("interval", "wanted"), CUT)
async def test_pieces(ask: Ask, path: str, interval: int | None, wanted: list[str]) -> None:
    assert pieces(await stream(ask(), path, stream_interval=interval)) == wanted


@pytest.mark.parametrize("path", BODIES)
async def test_the_servers_own_is_for_those_that_give_none(ask: Ask, path: str) -> None:
    client = ask(AppOptions(stream_interval=3))
    assert pieces(await stream(client, path)) == dict(CUT)[3]
    assert pieces(await stream(client, path, stream_interval=2)) == dict(CUT)[2]
    assert pieces(await stream(client, path, stream_interval=1)) == dict(CUT)[1]
    body = {"model": MODEL, **BODIES[path], "stream_interval": 2}
    whole = await client.post(f"/v1/{path}", **body)  # which is told at once
    assert TEXT in whole.text


@pytest.mark.parametrize("chat", [False, True])
async def test_all_that_chunks_have_is_joined(ask: Ask, chat: bool) -> None:
    """Log probabilities, token ids and counts, of several choices of unlike lengths."""
    fields: dict[str, Any] = {
        "n": 3,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        **({"logprobs": True} if chat else {"logprobs": 1}),
    }
    name = "content" if chat else "tokens"
    answers = (TEXT, "xyz", "")
    found = []
    for interval in (1, 3):
        client = ask(answers=answers)
        send: Any = client.chat if chat else client.complete
        chunks = events(await send(**fields, stream_interval=interval))
        parts = [one for chunk in chunks for one in chunk["choices"]]
        choices = []
        for index in range(3):
            mine = [one for one in parts if one["index"] == index]
            told = [one.get("logprobs") or {} for one in mine]
            logprobs = [each for one in told for each in one.get(name) or ()]
            ids = [each for one in mine for each in one.get("token_ids", ())]
            ends = [one["finish_reason"] for one in mine if one.get("finish_reason")]
            choices.append((logprobs, ids, ends))
        assert [len(logprobs) for logprobs, _, _ in choices] == [8, 3, 0]
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        found.append((choices, chunks[-1]["usage"]))
    assert found[0] == found[1]


@pytest.mark.parametrize("path", BODIES)
async def test_what_was_held_is_told_before_an_error(ask: Ask, path: str) -> None:
    client = ask(ends="error", fails=Failure("it broke"))
    told = await stream(client, path, stream_interval=5)
    assert pieces(told) == ["a", "bcdef", "gh"]
    assert "it broke" in told.split("data: ")[-1 if path in ("responses", "messages") else -2]


@pytest.mark.parametrize("interval", [0, -1, 1.5, "2", True])
async def test_what_is_no_interval(ask: Ask, interval: Any) -> None:
    client = ask()
    for path, body in BODIES.items():
        fields = {"model": MODEL, **body, "stream_interval": interval}
        response = await client.post(f"/v1/{path}", **fields)
        assert response.status_code == 400
        assert "stream_interval" in response.json()["error"]["message"]
    with pytest.raises(RequestError, match="stream_interval is 0"):
        AppOptions(stream_interval=0)
