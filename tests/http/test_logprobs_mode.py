"""A server that tells of what tokens are drawn from, or logits, over HTTP."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

from .conftest import RunningServer, StartServer
from .scripted import MODEL, say

pytestmark = pytest.mark.timeout(60)
NAMED = [ord("a") - ord("!"), ord("z") - ord("!")]  # of these the first one comes
NOTHING = -9999.0


def told(server: RunningServer, **fields: Any) -> list[dict[str, float]]:
    body = {
        "model": MODEL,
        "prompt": say("a"),
        "max_tokens": 1,
        "logprob_token_ids": NAMED,
        **fields,
    }
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: list[dict[str, float]] = response.json()["choices"][0]["logprobs"]["top_logprobs"]
    return found


def test_processed_log_probabilities(start_server: StartServer) -> None:
    server = start_server(logprobs_mode="processed_logprobs")
    cut = {"temperature": 2, "top_k": 1}
    assert told(server, **cut) == [{"a": 0.0, "z": NOTHING}]
    allowed = {"temperature": 10, "allowed_token_ids": NAMED, "top_p": 1, "seed": 1}
    [entry] = told(server, **allowed)
    assert entry["a"] - entry["z"] == pytest.approx(2)  # 20 / 10
    assert sum(map(math.exp, entry.values())) == pytest.approx(1)
    messages = [{"role": "user", "content": say("a")}]
    body = {"model": MODEL, "messages": messages, "logprobs": True, "top_logprobs": 3, **cut}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body).json()
    first = answer["choices"][0]["logprobs"]["content"][0]
    assert [one["logprob"] for one in first["top_logprobs"]] == [0.0, NOTHING, NOTHING]


def test_logits(start_server: StartServer) -> None:
    server = start_server(logprobs_mode="raw_logits")
    assert told(server, temperature=0) == [{"a": 20.0, "z": 0.0}]
    assert told(server, temperature=7, top_k=1) == [{"a": 20.0, "z": 0.0}]
    body = {"model": MODEL, "prompt": "x", "best_of": 2, "max_tokens": 1}
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "best_of"
