"""`/v1/completions`, with the openai client and with plain HTTP."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from .conftest import RunningServer
from .scripted import MODEL, say


@pytest.fixture
def client(server: RunningServer) -> Any:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def events(text: str) -> list[str]:
    """Return the data of each event; checks that there is nothing else."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def test_one_prompt(client: OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt=say("hello"), temperature=0)
    assert done.object == "text_completion"
    assert done.id.startswith("cmpl-")
    assert done.model == MODEL
    [choice] = done.choices
    assert (choice.index, choice.text, choice.finish_reason) == (0, "hello", "stop")
    assert choice.logprobs is None
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(say("hello")) - len("<|say|><|over|>") + 2
    assert done.usage.completion_tokens == len("hello") + 1
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.usage.prompt_tokens_details is not None
    assert done.usage.prompt_tokens_details.cached_tokens == 0


def test_special_tokens_are_text_where_that_is_asked_for(client: OpenAI) -> None:
    prompt = say("a<|say|>bc")
    ask: dict[str, Any] = {"model": MODEL, "prompt": prompt, "temperature": 0, "logprobs": 0}
    assert client.completions.create(**ask).choices[0].text == "abc"
    whole: dict[str, Any] = {"extra_body": {"skip_special_tokens": False}}
    done = client.completions.create(**ask, **whole).choices[0]
    assert (done.text, done.finish_reason) == ("a<|say|>bc", "stop")
    assert done.logprobs is not None
    names = done.logprobs.tokens[:4]
    assert names == ["a", "<|say|>", "b", "c"]
    assert done.logprobs.text_offset[:4] == [0, 1, 8, 9]
    streamed = client.completions.create(**ask, **whole, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "a<|say|>bc"
    stopped = client.completions.create(**ask, **whole, stop="<|say|>").choices[0]
    assert (stopped.text, stopped.stop_reason) == ("a", "<|say|>")


def test_sixteen_tokens_unless_told_otherwise(client: OpenAI) -> None:
    done = client.completions.create(model=MODEL, prompt=say("x" * 50))
    assert done.choices[0].text == "x" * 16
    assert done.choices[0].finish_reason == "length"


def test_token_ids_give_the_same_as_text(client: OpenAI) -> None:
    ask = {"model": MODEL, "temperature": 0, "max_tokens": 6}
    by_text = client.completions.create(prompt="abc", **ask)
    ids = [ord(char) - ord("!") for char in "abc"]
    by_ids = client.completions.create(prompt=ids, **ask)
    by_lists = client.completions.create(prompt=[ids], **ask)
    assert by_text.choices[0].text == by_ids.choices[0].text == by_lists.choices[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_keep_their_order(client: OpenAI, stream: bool) -> None:
    texts = ["longer than the rest", "short", ""]
    ask = {"model": MODEL, "prompt": [say(text) for text in texts], "max_tokens": 30}
    if not stream:
        done = client.completions.create(**ask)
        assert [choice.index for choice in done.choices] == [0, 1, 2]
        assert [choice.text for choice in done.choices] == texts
        assert done.usage.completion_tokens == sum(len(text) + 1 for text in texts)
        return
    found, reasons = ["", "", ""], {}
    for chunk in client.completions.create(stream=True, **ask):
        [choice] = chunk.choices
        found[choice.index] += choice.text
        if choice.finish_reason:
            assert choice.index not in reasons
            reasons[choice.index] = choice.finish_reason
    assert found == texts
    assert reasons == {0: "stop", 1: "stop", 2: "stop"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [["ab", "ab"], [[64, 65], [64, 65]]])
def test_echo(client: OpenAI, prompt: Any, stream: bool) -> None:
    ask = {"model": MODEL, "prompt": prompt, "echo": True, "max_tokens": 2}
    texts = ["", ""]
    if stream:
        for chunk in client.completions.create(stream=True, **ask):
            texts[chunk.choices[0].index] += chunk.choices[0].text
    else:
        texts = [choice.text for choice in client.completions.create(**ask).choices]
    assert [text[:2] for text in texts] == ["ab", "ab"]
    assert all(len(text) > 2 for text in texts)


def test_stop_strings(client: OpenAI) -> None:
    ask = {"model": MODEL, "prompt": say("one. two. three."), "max_tokens": 30}
    assert client.completions.create(stop=[" three", ". t"], **ask).choices[0].text == "one"
    assert client.completions.create(stop="e.", **ask).choices[0].text == "on"


def test_vllm_fields(client: OpenAI) -> None:
    ask = {"model": MODEL, "prompt": say("abcd"), "max_tokens": 8}
    stop = {"stop_token_ids": [ord("c") - ord("!")], "top_k": 1}
    done = client.completions.create(extra_body=stop, **ask)
    assert done.choices[0].text == "ab"
    assert done.choices[0].finish_reason == "stop"
    done = client.completions.create(extra_body={"ignore_eos": True}, **ask)
    assert done.usage.completion_tokens == 8
    assert done.choices[0].finish_reason == "length"


def test_a_seed_makes_samples_reproducible(client: OpenAI) -> None:
    def text(seed: int) -> str:
        ask = {"temperature": 1.5, "top_p": 0.95, "seed": seed}
        return client.completions.create(model=MODEL, prompt="a", **ask).choices[0].text

    assert text(7) == text(7)
    assert text(7) != text(8)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(client: OpenAI, stream: bool) -> None:
    ask = {"model": MODEL, "prompt": "a", "logprobs": 2, "max_tokens": 3, "temperature": 0}
    lists: dict[str, list[Any]] = {}
    chunks = client.completions.create(stream=True, **ask) if stream else None
    for one in chunks or [client.completions.create(**ask)]:
        for name, values in one.choices[0].logprobs.model_dump().items():
            lists.setdefault(name, []).extend(values)
    assert {name: len(values) for name, values in lists.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 3
    )
    assert all(value < 0 for value in lists["token_logprobs"])
    assert lists["text_offset"][0] == 0
    for token, value, top in zip(
        lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True
    ):
        assert top[token] == value == max(top.values())


def test_the_stream_is_openais_byte_by_byte(server: RunningServer) -> None:
    ask = {"model": MODEL, "prompt": say("ab"), "stream": True}
    ask["stream_options"] = {"include_usage": True}
    response = httpx.post(f"{server.url}/v1/completions", json=ask)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    *parts, usage = map(json.loads, chunks)
    assert [part["choices"][0]["text"] for part in parts] == ["a", "b", ""]
    assert [part["choices"][0]["finish_reason"] for part in parts] == [None, None, "stop"]
    assert all(part["usage"] is None for part in parts)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 3
    assert len({part["id"] for part in [*parts, usage]}) == 1
    assert {part["object"] for part in parts} == {"text_completion"}


async def test_streams_run_at_once(server: RunningServer) -> None:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        ask = {"model": MODEL, "prompt": say("one two three"), "max_tokens": 30}
        first = await client.completions.create(stream=True, **ask)
        second = await client.completions.create(stream=True, **ask)
        assert "".join([c.choices[0].text async for c in second]) == "one two three"
        assert "".join([c.choices[0].text async for c in first]) == "one two three"


def test_thirty_two_clients_at_once(server: RunningServer, client: OpenAI) -> None:
    def ask(index: int) -> str:
        text = f"number {index}!"
        request = {"model": MODEL, "prompt": say(text), "max_tokens": 40}
        if index % 2:
            return client.completions.create(**request).choices[0].text
        chunks = client.completions.create(stream=True, **request)
        return "".join(chunk.choices[0].text for chunk in chunks)

    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(ask, range(32))) == [f"number {index}!" for index in range(32)]
    stats = server.health()["engine"]
    assert (stats["num_requests_running"], stats["num_requests_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"]


def test_a_prompt_that_cannot_run_leaves_the_others_unscheduled(
    server: RunningServer, client: OpenAI
) -> None:
    before = server.health()["engine"]["finished"]
    with pytest.raises(openai.BadRequestError, match="5000") as caught:
        client.completions.create(model=MODEL, prompt=["fine", "x" * 5000])
    assert caught.value.code == "context_length_exceeded"
    assert "4096" in caught.value.message
    assert server.health()["engine"]["finished"] == before
