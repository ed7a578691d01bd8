"""How requests are treated: priorities, tenants, deadlines, and a queue that is full."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnxport.errors import OverloadedError, RequestError
from onnxport.serving.events import StepRecord
from onnxport.serving.http.app import AppOptions
from onnxport.serving.outputs import Failure
from onnxport.serving.params import RequestOptions
from onnxport.serving.tokenizer import Tokenizer

from .fake import Client, FakeEngine, events

FULL: OverloadedError = pickle.loads(pickle.dumps(OverloadedError("the queue is full", 2.3)))
Ask = Callable[..., Client]


@pytest.fixture
def ask(model_folder: Path) -> Ask:
    """Return what makes a client of a server with the options that are given."""
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())

    def make(engine: dict[str, Any] | None = None, **options: Any) -> Client:
        return Client(FakeEngine(tokenizer, **engine or {}), model_folder, AppOptions(**options))

    return make


async def options_of(client: Client, **fields: Any) -> RequestOptions:
    """Return what the engine was told, the same by both endpoints."""
    for send in (client.complete, client.chat):
        response = await send(**fields)
        assert response.status_code == 200, response.text
    first, second = (asked.options for asked in client.engine.asked[-2:])
    assert first == second
    return first


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, RequestOptions()),
        ({"priority": -3}, RequestOptions(priority=-3)),
        ({"priority": None, "cache_salt": None, "timeout_s": None}, RequestOptions()),
        ({"user": "ann"}, RequestOptions(tenant="ann")),
        ({"prompt_cache_key": "k", "safety_identifier": "s"}, RequestOptions()),
        ({"cache_salt": "secret"}, RequestOptions(cache_salt="secret")),
        ({"timeout_s": 5}, RequestOptions(timeout_s=5)),
    ],
)
async def test_fields(ask: Ask, fields: dict[str, Any], expected: RequestOptions) -> None:
    assert await options_of(ask(), **fields) == expected


async def test_prompts_of_one_request_are_treated_alike(ask: Ask) -> None:
    client = ask()
    await client.complete(["a", "b", "c"], priority=1, user="ann")
    expected = RequestOptions(priority=1, tenant="ann")
    assert [asked.options for asked in client.engine.asked] == [expected] * 3
    assert len({asked.request_id for asked in client.engine.asked}) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"priority": 2**40}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": True}, "priority"),
        ({"user": 5}, "user"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"timeout_s": "5"}, "timeout_s"),
        ({"timeout_s": 1e12}, "timeout_s"),
    ],
)
async def test_values_out_of_range(ask: Ask, fields: dict[str, Any], param: str) -> None:
    client = ask()
    for response in (await client.complete(**fields), await client.chat(**fields)):
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert client.engine.asked == []


async def test_a_priority_that_the_engine_refuses(ask: Ask) -> None:
    refusal = RequestError("priority is 1, and the policy is fcfs", "priority")
    response = await ask({"refusals": [refusal]}).complete(priority=1, stream=True)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "priority")


async def test_each_of_several_keys_is_a_tenant(ask: Ask) -> None:
    client = ask(api_keys=("sesame", "simsim"))
    first = await options_of(client, key="sesame", user="ann")
    second = await options_of(client, key="simsim", user="ann")
    assert (first.tenant, second.tenant) == ("key-1", "key-2")
    for key in ("", "open", "sesame,simsim", "sesam", "sesamé"):
        assert (await client.complete(key=key)).status_code == 401
    assert len(client.engine.asked) == 4


async def test_one_key_leaves_the_tenant_to_the_user(ask: Ask) -> None:
    client = ask(api_keys=("sesame",))
    assert (await options_of(client, key="sesame", user="ann")).tenant == "ann"
    assert (await client.complete(key="open")).status_code == 401


async def test_keys_are_not_shown() -> None:
    assert "sesame" not in repr(AppOptions(api_keys=("sesame",)))


async def test_the_servers_deadline_is_for_those_that_give_none(ask: Ask) -> None:
    client = ask(request_timeout_s=30)
    assert (await options_of(client)).timeout_s == 30
    assert (await options_of(client, timeout_s=60)).timeout_s == 60


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_before_the_first_delta(ask: Ask, stream: bool) -> None:
    client = ask({"answers": ("",), "ends": "timeout"})
    for send in (client.complete, client.chat):
        response = await send(timeout_s=1.5, stream=stream)
        assert response.status_code == 504
        error = response.json()["error"]
        assert (error["type"], error["param"]) == ("server_error", "timeout_s")
        assert error["code"] == "request_timeout"
        assert "1.5 seconds" in error["message"]
        assert response.headers["x-should-retry"] == "false"


async def test_a_deadline_before_the_end(ask: Ask) -> None:
    client = ask({"answers": ("some text", "more"), "ends": "timeout"})
    for send in (client.complete, client.chat):
        response = await send(timeout_s=2, n=2)
        assert (response.status_code, list(response.json())) == (504, ["error"])


async def test_a_deadline_inside_a_stream_is_an_event(ask: Ask) -> None:
    client = ask({"answers": ("some",), "ends": "timeout"}, request_timeout_s=7)
    response = await client.complete(stream=True)
    assert response.status_code == 200
    *chunks, error = events(response)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "some"
    assert error["error"]["code"] == "request_timeout"
    assert "7 seconds" in error["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("wait_s", "header"), [(2.3, "3"), (0.0, "1"), (1.0, "1"), (90.5, "91")])
async def test_a_full_queue(ask: Ask, stream: bool, wait_s: float, header: str) -> None:
    client = ask({"refusals": [OverloadedError("the queue is full", wait_s)] * 2})
    for send in (client.complete, client.chat):
        response = await send(stream=stream)
        assert response.status_code == 429
        assert response.headers["retry-after"] == header
        assert response.json()["error"] == {
            "message": "the queue is full",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }
    assert (await client.complete(stream=stream)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_queue_that_is_full_at_the_last_prompt(ask: Ask, stream: bool) -> None:
    client = ask({"refusals": [None, None, FULL]})
    response = await client.complete(["a", "b", "c"], stream=stream)
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert len(client.engine.asked) == 2  # and no stream was left open, which the client checks


async def test_health_is_json_all_through(ask: Ask) -> None:
    body = (await ask().get("/health")).json()
    assert body["capabilities"]["kv_format"]["num_kv_heads"] >= 1
    assert {"prefix_cache_hits", "host_tier_bytes", "num_tier_errors"} <= set(body["engine"])
    assert body["engine"]["finished"] == {"stop": 0}


async def test_metrics_listen_to_the_engine(ask: Ask) -> None:
    client = ask()
    [listener] = client.engine.listeners
    listener.on_step(StepRecord(0.0, 0.1, 2, 7, 2, (0.1, 0.1)))
    response = await client.get("/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    lines = response.text.splitlines()
    assert 'vllm:iteration_tokens_total_sum{engine="0",model_name="fake"} 7.0' in lines
    assert re.search(r"^# TYPE vllm:num_requests_running gauge$", response.text, re.MULTILINE)
    response = await client.get("/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


@pytest.mark.parametrize(
    ("failure", "status"),
    [(Failure("RuntimeError: it broke"), 500), (Failure("the regex is too large", True), 400)],
)
@pytest.mark.parametrize("answer", ["", "par"])
async def test_what_a_request_failed_of(
    ask: Ask, failure: Failure, status: int, answer: str
) -> None:
    client = ask({"ends": "error", "fails": failure, "answers": (answer,)})
    for send in (client.complete, client.chat):
        response = await send()
        assert response.status_code == status
        error = response.json()["error"]
        assert failure.message in error["message"]
        response = await send(stream=True)
        assert response.status_code == (200 if answer else status)
        told = events(response)[-1] if answer else response.json()
        assert told["error"] == error
