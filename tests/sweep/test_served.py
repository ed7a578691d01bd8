"""A server under everything at once: each answer is the one that its request gets alone.

The sweep of pairs has each combination by itself, in one process; here requests of all kinds meet
over HTTP: with adapters that outnumber their slots, in a cache that is too small for all, beside
clients that leave. The reference is the same server with nothing else to do.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from onnxport.graphs.artifact import Artifact
from tests.cli.conftest import onnxport, serving
from tests.serving.adapting import random_tensors, write_adapter
from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[2]
MESSAGES = [
    one["messages"]
    for one in json.loads((ROOT / "demo/prompts.json").read_text())
    if "messages" in one and all(set(message) == {"role", "content"} for message in one["messages"])
]
SYSTEM = "You are Portia, a helpful assistant made for onnxport. " * 5
NUM_REQUESTS = 70
AT_ONCE = 32
BEAMS = 0.15  # the part of the requests that are beam searches
DRAW = (
    *("temperature", "seed", "top_p", "top_k", "min_p", "typical_p", "xtc_probability"),
    *("repetition_detection", "mirostat", "mirostat_tau", "dynatemp_range"),
    "adaptive_target",
)
LEAVING = 0.15  # the part of the clients that do
ADAPTERS = {"first": ("q_proj", "v_proj"), "second": ("o_proj", "up_proj"), "third": ("k_proj",)}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": ["integer", "null"], "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 16}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
FORMS: Sequence[dict[str, Any]] = (
    {"json": PERSON},
    {"json_object": True},
    {"regex": "[a-z]{2,9}( [a-z]{2,9}){0,3}"},
    {"choice": ["yes", "no", "perhaps not"]},
)
SOMETIMES: Sequence[dict[str, Any]] = (  # each in a few of the requests
    {"repetition_penalty": 1.2},
    {"presence_penalty": 0.8, "frequency_penalty": -0.2},
    {"logit_bias": {"10": 5, "11": -100}, "bad_words": ["onnx", "the port"]},
    {"min_tokens": 3, "stop": [".", "the"]},
    {"ignore_eos": True},
    {"stop_token_ids": [50, 51], "include_stop_str_in_output": True},
    {"top_p": 0.9, "min_p": 0.02},
    {"top_k": 20},
    {"n": 3},
    {"dry_multiplier": 2.0},
    {"mirostat": 2, "mirostat_tau": 4.0},
    {"adaptive_target": 0.4, "min_p": 0.02},
    {"dynatemp_range": 0.5, "repeat_penalty": 1.2, "seed": 5},
    {"xtc_probability": 0.5, "typical_p": 0.9},
    {"repetition_detection": {"max_pattern_size": 8, "min_count": 3}},
    {"skip_reading_prefix_cache": True},
)
DRAFT = ("--speculative-config", '{{"method": "draft_model", "model": "{draft}"}}')
NGRAM = ("--speculative-config", '{{"method": "ngram", "num_speculative_tokens": 4}}')
SUFFIX = ("--speculative-config", '{{"method": "suffix", "suffix_decoding_max_spec_factor": 2}}')
SERVERS = {
    "draft, swap, fair": (
        *("--preemption", "swap", "--kv-host-memory", "8MiB", "--max-num-batched-tokens", "96"),
        *("--scheduling-policy", "fair", *DRAFT),
    ),
    "ngram, int8, priority": (
        *("--kv-cache-dtype", "int8", "--preemption", "recompute", "--max-num-batched-tokens"),
        *("64", "--scheduling-policy", "priority", *NGRAM),
    ),
    "suffix, small steps": ("--max-num-batched-tokens", "48", "--max-num-seqs", "12", *SUFFIX),
    "disk, no guesses": (
        *("--kv-disk", "{disk}", "--kv-host-memory", "2MiB", "--max-num-seqs", "12"),
    ),
}

Body = dict[str, Any]
Asking = tuple[str, Body]  # path, and body


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The demo's models as artifacts, and adapters of the larger one."""
    folder = tmp_path_factory.mktemp("served")
    found = {"model": folder / "model", "draft": folder / "draft"}
    for name, artifact in found.items():
        done = onnxport("export", ROOT / "demo" / name, artifact)
        assert done.returncode == 0, done.stderr
    spec = Artifact.read(found["model"]).manifest.model
    for seed, (name, targets) in enumerate(ADAPTERS.items()):
        tensors = random_tensors(spec, targets=targets, seed=seed)
        smaller = {key: value / 3 for key, value in tensors.items()}
        found[name] = write_adapter(folder / name, smaller, target_modules=[*targets])
    return found


def asking(seed: int) -> Asking:
    """Return a request of any kind, whose answer nothing but itself decides."""
    dice = random.Random(seed)
    path, body = _drawn_or_greedy(dice, seed)
    if dice.random() < BEAMS:
        body = {name: value for name, value in body.items() if name not in DRAW}
        body |= {"use_beam_search": True, "n": dice.choice([1, 2, 4])}
        body |= {"length_penalty": dice.choice([-0.5, 1, 2])}
    return path, body


def _drawn_or_greedy(dice: random.Random, seed: int) -> Asking:
    """Return a request that is no beam search."""
    body: Body = {"model": dice.choice(["served", "served", *ADAPTERS])}
    body["max_tokens"] = dice.choice([1, 9, 30, 90])
    body |= {"temperature": 0} if dice.random() < 0.4 else {"temperature": 0.9, "seed": seed}
    for fields in SOMETIMES:
        if dice.random() < 0.12 and fields.get("min_tokens", 0) < body["max_tokens"]:
            body |= fields
    if dice.random() < 0.5:
        prompts: Sequence[Any] = (
            "Once upon a time",
            "1 2 3 4 5 6 7 8 1 2 3",
            f"{SYSTEM}Tell me of ports.",
            [dice.randrange(3, 2000) for _ in range(dice.choice([1, 7, 40, 150]))],
        )
        body["prompt"] = dice.choice(prompts)
        if dice.random() < 0.3:
            body["logprobs"] = dice.choice([0, 3])
        if dice.random() < 0.3:
            body["structured_outputs"] = dice.choice(FORMS)
        return "/v1/completions", body
    system = [{"role": "system", "content": SYSTEM}] if dice.random() < 0.5 else []
    messages = [one for one in dice.choice(MESSAGES) if one["role"] != "system"]
    body["messages"] = [*system, *messages]
    kind = dice.random()
    if kind < 0.2:
        schema = {"name": "person", "strict": True, "schema": PERSON}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif kind < 0.4:
        body |= {"tools": [WEATHER], "tool_choice": dice.choice(["auto", "required"])}
    elif kind < 0.6:
        body |= {"logprobs": True, "top_logprobs": 2}
    return "/v1/chat/completions", body


def told(choices: Sequence[Body]) -> dict[int, list[Any]]:
    """Return text, arguments of calls and reason of each choice, of an answer or of a stream."""
    found: dict[int, list[Any]] = {}
    for choice in choices:
        own = found.setdefault(choice["index"], ["", "", None])
        message = choice.get("message") or choice.get("delta") or {}
        own[0] += choice.get("text") or message.get("content") or ""
        for call in message.get("tool_calls") or ():
            own[1] += (call["function"].get("name") or "") + call["function"]["arguments"]
        own[2] = choice["finish_reason"] or own[2]
    return found


async def whole(client: httpx.AsyncClient, path: str, body: Body) -> list[Body]:
    """Return the choices of an answer."""
    response = await client.post(path, json=body)
    assert response.status_code == 200, (response.text, body)
    choices: list[Body] = response.json()["choices"]
    return choices


async def streamed(
    client: httpx.AsyncClient, path: str, body: Body, most: int | None = None
) -> list[Body]:
    """Return what a stream tells of choices; with `most` the client leaves after so many events."""
    choices: list[Body] = []
    async with client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, (await response.aread(), body)
        number = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, (event, body)
            choices += event["choices"]
            number += 1
            if number == most:
                break
    return choices


async def all_at_once(
    client: httpx.AsyncClient,
    requests: Sequence[Asking],
    expected: Sequence[list[Body]],
    seed: int,
    priorities: Sequence[int],
) -> int:
    """Send all in any order, some as streams; return how many clients left."""
    dice = random.Random(seed)
    room = asyncio.Semaphore(AT_ONCE)
    left = 0

    async def one(number: int, how: float, priority: int, most: int) -> None:
        nonlocal left
        path, body = requests[number]
        body = {**body, "priority": priority, "user": f"user {number % 3}"}
        async with room:
            if how < LEAVING:
                await streamed(client, path, body, most)
                left += 1
            elif how < 0.5:
                assert told(await streamed(client, path, body)) == told(expected[number]), body
            else:
                assert without_ids(await whole(client, path, body)) == expected[number], body

    tasks: list[Awaitable[None]] = [
        one(number, dice.random(), dice.choice(priorities), dice.choice([1, 2, 5]))
        for number in dice.sample(range(len(requests)), len(requests))
    ]
    await asyncio.gather(*tasks)
    return left


def without_ids(choices: list[Body]) -> list[Body]:
    """Return choices without what is another one each time."""
    for choice in choices:
        for call in (choice.get("message") or {}).get("tool_calls") or ():
            del call["id"]
    return choices


@pytest.mark.slow
@pytest.mark.parametrize("options", SERVERS.values(), ids=SERVERS.keys())
def test_answers_are_those_of_requests_alone(
    options: Sequence[str], folders: dict[str, Path], tmp_path: Path
) -> None:
    seed = [*SERVERS.values()].index(options)
    requests = [asking(1000 * seed + number) for number in range(NUM_REQUESTS)]
    priorities = range(3) if "priority" in options else [0]  # other policies take none
    given = [one.format(**folders, disk=tmp_path / "disk") for one in options]
    adapters = [f"{name}={folders[name]}" for name in ADAPTERS]
    many = ("--max-loras", "2", "--max-cpu-loras", "4", "--lora-modules", *adapters)

    async def run(url: str) -> None:
        limits = httpx.Limits(max_connections=AT_ONCE)
        async with httpx.AsyncClient(base_url=url, limits=limits, timeout=PATIENCE_S) as client:
            expected = [without_ids(await whole(client, *one)) for one in requests]
            again = [seed, seed + 1] if options[-2:] == SUFFIX else [seed]  # each user's the same
            for order in again:
                left = await all_at_once(client, requests, expected, order, priorities)
                assert left > 0
            await idle(client)
            told_of = (await client.get("/metrics")).text
            assert re.search(r"^onnxport:lora_swaps_total\{.*\} [1-9]", told_of, re.MULTILINE)
            assert re.search(r"^vllm:kv_cache_usage_perc\{.*\} 0.0$", told_of, re.MULTILINE)

    with serving(folders["model"], "--served-model-name", "served", *given, *many) as (url, _):
        asyncio.run(run(url))


async def idle(client: httpx.AsyncClient) -> None:
    """Return once nothing runs or waits, also of those whose clients left."""

    async def busy() -> bool:
        engine = (await client.get("/health")).json()["engine"]
        return bool(engine["num_requests_running"] or engine["num_requests_waiting"])

    async with asyncio.timeout(PATIENCE_S):
        while await busy():
            await asyncio.sleep(0.01)
