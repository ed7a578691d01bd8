"""The device of a server is lost: streams go on, or are told why they cannot."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.tiers import every

from .conftest import RunningServer, StartServer
from .scripted import MODEL, say

TEXTS = [chr(ord("a") + index) * (60 + index) for index in range(5)]
LONG_TEXTS = [text * 10 for text in TEXTS]
AllTexts = list[Future[str | Exception]]


@contextmanager
def streaming(server: RunningServer, texts: Sequence[str] = TEXTS) -> Iterator[AllTexts]:
    """Stream all texts at once, the first as a chat; give each as it comes, or its error."""

    def stream(text: str) -> str | Exception:
        with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
            try:
                if text == texts[0]:
                    chat: Any = client.chat.completions.create(
                        model=MODEL, messages=[{"role": "user", "content": say(text)}], stream=True
                    )
                    return "".join(one.choices[0].delta.content or "" for one in chat)
                chunks = client.completions.create(
                    model=MODEL, prompt=say(text), max_tokens=1000, stream=True
                )
                return "".join(one.choices[0].text for one in chunks)
            except openai.APIError as error:
                return error

    with ThreadPoolExecutor(len(texts)) as pool:
        yield [pool.submit(stream, text) for text in texts]


@pytest.mark.parametrize(
    "options",
    every(3, [{}, {"kv_host_memory": 1 << 20, "preemption": "swap"}, {"max_num_seqs": 2}]),
    ids=["plain", "tiers", "two rows"],
)
def test_streams_go_on_with_the_same_text(
    start_server: StartServer, options: dict[str, Any]
) -> None:
    fallback = {"block_size": 32, "num_blocks": 64, "max_batch_rows": 3}
    server = start_server(lost_at=25, latency_s=0.005, fallback=fallback, **options)
    assert server.health()["losses"] == []
    with streaming(server) as found:
        assert [one.result() for one in found] == TEXTS
    body = server.health()
    [loss] = body["losses"]
    assert (body["status"], body["provider"], body["device"]) == ("ok", "null", "none")
    assert (loss["provider"], loss["device"], loss["replaced_by"]) == ("null", "none", "null")
    assert loss["reason"] == "operation 25 was told to lose the device"
    assert loss["since"].endswith("+00:00")
    assert body["capabilities"]["block_size"] == 32
    assert (body["dtype"], body["kv_cache_dtype"]) == ("float32", "int64")
    assert (body["placement"], body["on_host"], body["emulated"]) == ({"null": 1}, {}, False)
    assert body["engine"]["finished"]["error"] == 0
    metrics = httpx.get(f"{server.url}/metrics").text
    assert f'onnxport:devices_lost_total{{engine="0",model_name="{MODEL}"}} 1.0' in metrics
    assert f'onnxport:fallbacks_total{{engine="0",model_name="{MODEL}"}} 1.0' in metrics
    code, _, err = server.stop()
    assert code == 0
    assert "was lost" in err
    assert "takes over" in err


@pytest.mark.slow
def test_without_a_fallback_each_stream_gets_one_error(
    start_server: StartServer, tmp_path: Path
) -> None:
    lost = tmp_path / "lost"
    server = start_server(lost_at=str(lost), latency_s=0.05)
    with streaming(server, LONG_TEXTS) as found:
        server.wait_for(num_requests_running=len(TEXTS))
        lost.touch()
        for error in [one.result() for one in found]:
            assert isinstance(error, openai.APIError)
            assert "was lost" in str(error)
            assert "--fallback" in str(error)
    health = httpx.get(f"{server.url}/health")
    body = health.json()
    assert (health.status_code, body["status"]) == (503, "failed")
    assert "the device none (null) was lost: operation " in body["reason"]
    assert body["engine"]["finished"]["error"] == len(TEXTS)
    assert [loss["replaced_by"] for loss in body["losses"]] == [None]
    for stream in (False, True):
        ask = {"model": MODEL, "prompt": "x", "stream": stream}
        refused = httpx.post(f"{server.url}/v1/completions", json=ask)
        assert refused.status_code == 503
        assert refused.headers["x-should-retry"] == "false"
        assert refused.json()["error"]["message"] == body["reason"]
    assert httpx.get(f"{server.url}/metrics").status_code == 200
    code, _, _ = server.stop()
    assert code == 0


def test_a_stream_ends_with_the_error(start_server: StartServer) -> None:
    server = start_server(lost_at=5)
    ask = {"model": MODEL, "prompt": say("x" * 50), "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=ask) as got:
        *chunks, last, done = got.read().decode().strip().split("\n\n")
    assert len(chunks) >= 4
    assert all("error" not in chunk for chunk in chunks)
    assert "was lost" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert done == "data: [DONE]"
