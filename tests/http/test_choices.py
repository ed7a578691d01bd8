"""Several choices of a request: `n`, over one or several prompts, whole and streamed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onnxport.serving.tokenizer import Tokenizer

from .fake import Client, FakeEngine, events

ANSWERS = ("long", "b", "")
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
Ask = Callable[..., Client]


@pytest.fixture
def ask(model_folder: Path) -> Ask:
    """Return what makes a client of an engine with the answers that are given."""
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())
    return lambda **settings: Client(FakeEngine(tokenizer, **settings), model_folder)


def by_choice(chunks: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return the parts of each choice, in order of their coming."""
    found: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        found.setdefault(choice["index"], []).append(choice)
    return found


async def test_choices_of_one_prompt(ask: Ask) -> None:
    client = ask(answers=ANSWERS)
    body = (await client.complete(n=3)).json()
    assert [(c["index"], c["text"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "long", "stop"),
        (1, "b", "stop"),
        (2, "", "stop"),
    ]
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["prompt_tokens"] == 2  # once
    [asked] = client.engine.asked
    assert asked.params.n == 3


async def test_choices_of_several_prompts_count_on(ask: Ask) -> None:
    client = ask(answers=("x", "yy"), cached=(1, 2))
    body = (await client.complete(["a", "bcd"], n=2, echo=True)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in body["choices"]] == ["ax", "ayy", "bcdx", "bcdyy"]
    assert body["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 6,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 3},
    }


async def test_streamed_choices_come_as_they_are_ready(ask: Ask) -> None:
    client = ask(answers=ANSWERS, cached=(1, 1))
    usage = {"include_usage": True}
    response = await client.complete(["a", "b"], n=3, echo=True, stream=True, stream_options=usage)
    *chunks, last = events(response)
    found = by_choice(chunks)
    texts = {index: "".join(part["text"] for part in parts) for index, parts in found.items()}
    assert texts == {0: "along", 1: "ab", 2: "a", 3: "blong", 4: "bb", 5: "b"}
    for parts in found.values():
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]
        assert parts[-1]["finish_reason"] == "stop"
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0)  # not one after the other
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (2, 10)


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_and_offsets_are_each_choices_own(ask: Ask, stream: bool) -> None:
    client = ask(answers=ANSWERS)
    response = await client.complete(n=3, logprobs=0, stream=stream)
    if stream:
        found = by_choice(events(response))
    else:
        found = {choice["index"]: [choice] for choice in response.json()["choices"]}
    for index, answer in enumerate(ANSWERS):
        tokens = [token for part in found[index] for token in part["logprobs"]["tokens"]]
        values = [value for part in found[index] for value in part["logprobs"]["token_logprobs"]]
        offsets = [offset for part in found[index] for offset in part["logprobs"]["text_offset"]]
        assert tokens == list(answer)
        assert values == [-0.5 - index] * len(answer)
        assert offsets == list(range(len(answer)))


async def test_chat_choices(ask: Ask) -> None:
    client = ask(answers=ANSWERS)
    body = (await client.chat(n=3, logprobs=True)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == list(ANSWERS)
    found = [[one["logprob"] for one in c["logprobs"]["content"]] for c in body["choices"]]
    assert found == [[-0.5] * 4, [-1.5], []]


async def test_streamed_chat_choices_each_begin_with_the_role(ask: Ask) -> None:
    client = ask(answers=ANSWERS)
    found = by_choice(events(await client.chat(n=3, stream=True)))
    assert sorted(found) == [0, 1, 2]
    for index, parts in found.items():
        assert parts[0]["delta"] == {"role": "assistant", "content": ""}
        assert [part["delta"] for part in parts[1:]] == [
            *({"content": char} for char in ANSWERS[index]),
            {},
        ]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_each_choices_own(ask: Ask, stream: bool) -> None:
    client = ask(answers=(CALL + CALL, "no <tool", f"so {CALL}"))
    response = await client.chat(n=3, tools=[TOOL], stream=stream)
    if stream:
        found = by_choice(events(response))
        parts = {i: [part["delta"] for part in found[i]] for i in found}
        reasons = [found[i][-1]["finish_reason"] for i in range(3)]
    else:
        choices = response.json()["choices"]
        parts = {choice["index"]: [choice["message"]] for choice in choices}
        reasons = [choice["finish_reason"] for choice in choices]
    calls = [[c for part in parts[i] for c in part.get("tool_calls", ())] for i in range(3)]
    assert [len(each) for each in calls] == [2, 0, 1]
    assert len({call["id"] for each in calls for call in each}) == 3
    if stream:
        assert [[call["index"] for call in each] for each in calls] == [[0, 1], [], [0]]
    content = ["".join(part.get("content") or "" for part in parts[i]) for i in range(3)]
    assert content == ["", "no <tool", "so"]
    assert reasons == ["tool_calls", "stop", "tool_calls"]


@pytest.mark.parametrize("fields", [{"n": 2, "best_of": 2}, {"best_of": 1}, {"best_of": None}])
async def test_best_of_may_say_the_same_as_n(ask: Ask, fields: dict[str, Any]) -> None:
    response = await ask(answers=("x", "y")).complete(**fields)
    assert len(response.json()["choices"]) == fields.get("n", 1)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"best_of": 2, "stream": True}, "best_of", "best_of is 2 and n is 1"),
        ({"n": 2, "best_of": 3, "stream": True}, "best_of", "known at their end"),
        ({"best_of": 129}, "best_of", "[1, 128]"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20 of the likeliest"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "whole response only"),
        ({"n": 2, "best_of": 1}, "best_of", "best_of is 1 and n is 2"),
        ({"n": 0}, "n", "n is 0"),
        ({"n": 129}, "n", "[1, 128]"),
        ({"n": True}, "n", "integer"),
        ({"n": 1.5}, "n", "integer"),
    ],
)
async def test_wrong_numbers(ask: Ask, fields: dict[str, Any], param: str, words: str) -> None:
    client = ask()
    for response in (await client.complete(**fields), await client.chat(**fields)):
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == param
        assert words in error["message"]
    assert client.engine.asked == []
