"""A real server with more to do than it can do at once, as the openai client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from .conftest import RunningServer, StartServer
from .scripted import FAR_AHEAD_S, MODEL, say

LONG = {"model": MODEL, "prompt": say("x" * 1000), "max_tokens": 1000}


def client_of(server: RunningServer, key: str = "unused", max_retries: int = 0) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=max_retries)


@pytest.fixture
def client(server: RunningServer) -> Iterator[OpenAI]:
    with client_of(server) as client:
        yield client


def metrics_of(server: RunningServer) -> dict[str, float]:
    """Return the metrics, but the buckets: name and labels to value."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text):
        for sample in family.samples:
            labels = {**sample.labels}
            assert (labels.pop("model_name"), labels.pop("engine")) == (MODEL, "0")
            found[",".join([sample.name, *labels.values()])] = sample.value
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(client: OpenAI, stream: bool) -> None:
    ask = {"model": MODEL, "prompt": say("abc"), "n": 3, "max_tokens": 10}
    texts, reasons = ["", "", ""], {}
    if stream:
        options = {"include_usage": True}
        for chunk in client.completions.create(stream=True, stream_options=options, **ask):
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                if choice.finish_reason:
                    assert choice.index not in reasons
                    reasons[choice.index] = choice.finish_reason
    else:
        done = client.completions.create(**ask)
        usage = done.usage
        texts = [choice.text for choice in done.choices]
        reasons = {choice.index: choice.finish_reason for choice in done.choices}
    assert texts == ["abc"] * 3
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}
    assert (usage.prompt_tokens, usage.completion_tokens) == (len("abc") + 2, 3 * (len("abc") + 1))


def test_sampled_choices_differ_and_a_seed_repeats_them(client: OpenAI) -> None:
    def texts(prompt: Any) -> list[str]:
        ask = {"prompt": prompt, "n": 4, "max_tokens": 12, "temperature": 2.0, "seed": 5}
        done = client.completions.create(model=MODEL, **ask)
        assert [choice.index for choice in done.choices] == list(range(len(done.choices)))
        return [choice.text for choice in done.choices]

    alone = texts("ab")
    assert len(set(alone)) == 4
    assert texts(["ab", "cd"])[:4] == alone


@pytest.mark.parametrize("stream", [False, True])
def test_several_chat_choices(client: OpenAI, stream: bool) -> None:
    ask = {"model": MODEL, "messages": [{"role": "user", "content": say("abc")}], "n": 3}
    texts = ["", "", ""]
    if stream:
        for chunk in client.chat.completions.create(stream=True, **ask):
            [choice] = chunk.choices
            texts[choice.index] += choice.delta.content or ""
    else:
        texts = [c.message.content for c in client.chat.completions.create(**ask).choices]
    assert texts == ["abc"] * 3


def test_a_prompt_that_was_seen_before_is_cached(client: OpenAI) -> None:
    def cached(**more: Any) -> int:
        prompt = "a prompt of several blocks, " * 4
        done = client.completions.create(model=MODEL, prompt=prompt, max_tokens=1, **more)
        return done.usage.prompt_tokens_details.cached_tokens

    assert cached() == 0
    found = cached()
    assert 64 <= found < 112
    assert cached(n=3) == found  # counted once
    assert cached(extra_body={"cache_salt": "secret"}) == 0
    assert cached(extra_body={"cache_salt": "secret"}) == found


@pytest.mark.slow
def test_priorities_need_a_policy(client: OpenAI, start_server: StartServer) -> None:
    ask = {"model": MODEL, "prompt": say("ok"), "extra_body": {"priority": 1}}
    with pytest.raises(openai.BadRequestError, match="fcfs") as caught:
        client.completions.create(**ask)
    assert caught.value.param == "priority"
    server = start_server(scheduling_policy="priority")
    with client_of(server) as other:
        assert other.completions.create(**ask).choices[0].text == "ok"


@asynccontextmanager
async def full(server: RunningServer) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Keep a server of one row and one place in its queue busy; give what keeps it so."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        holding: list[asyncio.Task[Any]] = []
        for wanted in ({"num_requests_running": 1}, {"num_requests_waiting": 1}):
            holding.append(asyncio.create_task(client.completions.create(**LONG)))
            await asyncio.to_thread(server.wait_for, **wanted)
        yield holding
        for task in holding:
            task.cancel()
        await asyncio.wait(holding)


async def test_a_full_queue_is_told_and_can_be_tried_again(start_server: StartServer) -> None:
    server = start_server(latency_s=0.05, max_num_seqs=1, max_queued_requests=1)
    ask: Any = {"model": MODEL, "prompt": say("ok")}
    url = f"{server.url}/v1"
    async with full(server) as holding:
        async with AsyncOpenAI(base_url=url, api_key="unused", max_retries=0) as client:
            for stream in (False, True):
                with pytest.raises(openai.RateLimitError, match="max_queued_requests") as caught:
                    await client.completions.create(stream=stream, **ask)
                assert int(caught.value.response.headers["retry-after"]) >= 1
                assert caught.value.code == "rate_limit_exceeded"
        statuses = []

        async def free(response: Any) -> None:
            statuses.append(response.status_code)
            for task in holding:
                task.cancel()

        hooks = openai.DefaultAsyncHttpxClient(event_hooks={"response": [free]})
        async with AsyncOpenAI(base_url=url, api_key="x", max_retries=5, http_client=hooks) as one:
            done = await one.completions.create(**ask)
    assert done.choices[0].text == "ok"
    assert statuses[0] == 429
    assert statuses[-1] == 200
    stats = server.wait_for(num_requests_running=0, num_requests_waiting=0)
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_refused"] >= 3


async def test_prompts_that_the_queue_cannot_hold_together(start_server: StartServer) -> None:
    server = start_server(latency_s=0.05, max_num_seqs=1, max_queued_requests=2)
    async with (
        AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client,
        full(server),
    ):
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model=MODEL, prompt=["a", "b"])
        left = {"num_requests_running": 1, "num_requests_waiting": 1, "abort": 1}
        await asyncio.to_thread(server.wait_for, **left)  # the one that had found a place
    stats = server.wait_for(num_requests_running=0, num_requests_waiting=0)
    assert (stats["finished"]["length"], stats["finished"]["stop"]) == (0, 0)


@pytest.mark.slow
def test_more_prompts_than_the_queue_ever_holds(start_server: StartServer) -> None:
    server = start_server(max_num_seqs=1, max_queued_requests=2)
    with client_of(server) as client:
        with pytest.raises(openai.BadRequestError, match="3 prompts, and this server lets 2 wait"):
            client.completions.create(model=MODEL, prompt=[say("a"), say("b"), say("c")])
        done = client.completions.create(model=MODEL, prompt=[say("a"), say("b")])
    assert [choice.text for choice in done.choices] == ["a", "b"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.slow
def test_deadlines(start_server: StartServer, tmp_path: Path, stream: bool) -> None:
    late = tmp_path / "late"
    server = start_server(latency_s=0.02, request_timeout_s=3600, late=str(late))
    with client_of(server, max_retries=2) as client, ThreadPoolExecutor(1) as pool:
        own = {"timeout_s": 2 * FAR_AHEAD_S}  # which counts for a request that has one
        longer = client.completions.create(stream=True, extra_body=own, **LONG)
        assert next(longer).choices[0].text == "x"
        if stream:
            chunks = client.completions.create(stream=True, **LONG)
            assert next(chunks).choices[0].text == "x"
            late.touch()
            with pytest.raises(openai.APIError, match="3600 seconds") as told:
                list(chunks)
            assert told.value.code == "request_timeout"
        else:
            waiting = pool.submit(client.completions.create, **LONG)
            server.wait_for(num_requests_running=2)
            late.touch()
            with pytest.raises(openai.InternalServerError, match="3600 seconds") as caught:
                waiting.result()
            assert caught.value.status_code == 504
        server.wait_for(num_requests_running=1, timeout=1)
        longer.close()
        stats = server.wait_for(num_requests_running=0, timeout=1)  # was not sent again
        assert stats["num_free_blocks"] == stats["num_blocks"]
        done = client.completions.create(model=MODEL, prompt=say("x" * 40), max_tokens=50)
        assert done.choices[0].text == "x" * 40


def test_metrics_after_traffic(start_server: StartServer) -> None:
    server = start_server()
    with client_of(server) as client:
        client.completions.create(model=MODEL, prompt=say("abc"), n=2, max_tokens=8)
        client.completions.create(model=MODEL, prompt="x" * 64, max_tokens=1)
        client.completions.create(model=MODEL, prompt="x" * 64, max_tokens=1)
    server.wait_for(num_requests_running=0)
    found = metrics_of(server)
    assert found["vllm:request_success_total,stop"] == 2
    assert found["vllm:request_success_total,length"] == 2
    assert found["vllm:prompt_tokens_total"] == 5 + 2 * 64
    assert found["vllm:generation_tokens_total"] == 2 * 4 + 2
    assert found["vllm:prefix_cache_queries_total"] > found["vllm:prefix_cache_hits_total"] >= 48
    assert found["vllm:time_to_first_token_seconds_count"] == 3
    assert found["vllm:time_to_first_token_seconds_sum"] > 0
    assert found["vllm:inter_token_latency_seconds_count"] == 2 * 3
    assert found["vllm:e2e_request_latency_seconds_count"] == 4
    assert found["vllm:request_prompt_tokens_sum"] == 5 + 2 * 64
    assert found["vllm:request_generation_tokens_sum"] == 2 * 4 + 2
    assert found["vllm:request_params_n_sum"] == 2 + 1 + 1
    assert found["vllm:request_params_max_tokens_sum"] == 8 + 1 + 1
    assert found["vllm:iteration_tokens_total_count"] == found["onnxport:steps_total"]
    for name in ("queue", "prefill", "decode", "inference"):
        assert found[f"vllm:request_{name}_time_seconds_count"] >= 3


async def test_two_tenants_share(start_server: StartServer) -> None:
    """The second has its answer while the first, which came before it, still waits for all but one.

    By arrival it were the last one.
    """
    server = start_server(
        latency_s=0.01, max_num_seqs=1, scheduling_policy="fair", api_keys=["one", "two"]
    )
    url = f"{server.url}/v1"
    async with (
        AsyncOpenAI(base_url=url, api_key="one", max_retries=0) as one,
        AsyncOpenAI(base_url=url, api_key="two", max_retries=0) as two,
    ):
        first = asyncio.create_task(one.completions.create(**LONG))
        await asyncio.to_thread(server.wait_for, num_requests_running=1)
        others = [asyncio.create_task(one.completions.create(**LONG)) for _ in range(3)]
        await asyncio.to_thread(server.wait_for, num_requests_waiting=3)
        late = asyncio.create_task(two.completions.create(model=MODEL, prompt=say("ok")))
        await asyncio.to_thread(server.wait_for, num_requests_waiting=4)
        first.cancel()
        assert (await late).choices[0].text == "ok"
        stats = await asyncio.to_thread(server.wait_for, num_requests_running=1)
        assert (stats["num_requests_waiting"], stats["finished"]["length"]) == (2, 0)
        for each in others:
            each.cancel()
        await asyncio.wait([first, *others])
    with client_of(server, "three") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
