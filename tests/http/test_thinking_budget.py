"""A budget of thinking, in chats and responses: a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from .conftest import RunningServer, StartServer, _servers
from .scripted import MODEL, say, write_tokenizer
from .test_reasoning import JSON, TAGS, TEMPLATE, TOOL, body, joined, streamed, whole

OPENS, CLOSES = TAGS
IN_LETTERS = (len(OPENS) - 1, len(CLOSES) - 1)  # tokens; "hi" is one
# The model goes on with its script behind what it was made to say in the place of some of it.
LONG = "abcdefgjklmnopqr</think>yes"


@pytest.fixture(scope="module", params=[True, False], ids=["tokens", "letters"])
def has_tokens(request: pytest.FixtureRequest) -> bool:
    """Whether tags are tokens."""
    return bool(request.param)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, has_tokens: bool) -> Iterator[StartServer]:
    folder = tmp_path_factory.mktemp("budget")
    write_tokenizer(folder, TEMPLATE, TAGS if has_tokens else ())
    with _servers(folder) as start:
        yield start


@pytest.fixture(scope="module")
def thinker(start: StartServer, has_tokens: bool) -> RunningServer:
    return start(texts=TAGS if has_tokens else ())


def test_an_answer_begins_behind_the_budget(thinker: RunningServer, has_tokens: bool) -> None:
    opening, closing = (1, 1) if has_tokens else IN_LETTERS
    for thinks in (None, True):
        for most in (0, 3):
            begins = OPENS if thinks is None else f"{OPENS}\n"
            ask = body(begins + LONG, thinks, thinking_token_budget=most)
            told = whole(thinker, ask)
            [choice] = told["choices"]
            message = choice["message"]
            assert message["reasoning"] == (LONG[:most] or None)
            assert message["content"] == LONG[most + closing :]
            num = most + closing + (opening if thinks is None else 0)
            assert told["usage"]["completion_tokens_details"] == {"reasoning_tokens": num}
            chunks = streamed(thinker, ask)
            assert joined(chunks, "reasoning") == LONG[:most]
            assert joined(chunks, "content") == message["content"]
            assert chunks[-1]["usage"]["completion_tokens"] == told["usage"]["completion_tokens"]


def test_a_thought_that_is_within_its_budget_is_left_alone(thinker: RunningServer) -> None:
    for most in (9, 10**9, -1, None):
        message = whole(thinker, body(f"{OPENS}abc{CLOSES}yes", thinking_token_budget=most))
        message = message["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("abc", "yes")
    for text, thinks in (("yes", None), (f"{OPENS}\n\n{CLOSES}\n\nyes <think>", False)):
        message = whole(thinker, body(text, thinks, thinking_token_budget=0))
        message = message["choices"][0]["message"]
        assert (message["reasoning"], message["content"][:3]) == (None, "yes")


def test_several_answers_with_log_probabilities(thinker: RunningServer, has_tokens: bool) -> None:
    ask = body(OPENS + LONG, thinking_token_budget=3, n=3, logprobs=True, top_logprobs=1)
    for choice in whole(thinker, ask)["choices"]:
        assert choice["message"]["reasoning"] == "abc"
        entries = choice["logprobs"]["content"]
        spelled = b"".join(bytes(each["bytes"]) for each in entries).decode()
        assert spelled.startswith(f"{OPENS}abc{CLOSES}")
        first = 3 + (1 if has_tokens else IN_LETTERS[0])
        assert entries[first]["token"] == (CLOSES if has_tokens else "<")
        assert entries[first]["logprob"] < -10  # the model's own, which would go on
        assert entries[first]["top_logprobs"][0]["token"] == "d"


@pytest.mark.parametrize("thinks", [None, True])
def test_the_form_of_an_answer_is_behind_it(thinker: RunningServer, thinks: bool | None) -> None:
    begins = OPENS if thinks is None else f"{OPENS}\n"
    ask = body(begins + "é" * 30, thinks, thinking_token_budget=3, response_format=JSON)
    message = whole(thinker, ask)["choices"][0]["message"]
    assert message["reasoning"] == "éé"  # a character is ended
    assert isinstance(json.loads(message["content"])["x"], int)
    ask = body(
        begins + "a" * 30, thinks, thinking_token_budget=3, tools=[TOOL], tool_choice="required"
    )
    message = whole(thinker, ask)["choices"][0]["message"]
    assert message["reasoning"] == "aaa"
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]).keys() == {"x"}


def test_a_response_has_it_too(thinker: RunningServer) -> None:
    ask = {"model": MODEL, "input": say(OPENS + LONG), "thinking_token_budget": 3}
    found = httpx.post(f"{thinker.url}/v1/responses", json={**ask, "temperature": 0}).json()
    reasoning, message = found["output"]
    assert reasoning["content"][0]["text"] == "abc"
    assert message["content"][0]["text"].endswith("yes")


@pytest.mark.parametrize("given", [-2, 1.5, "4", True])
def test_what_is_no_budget_is_refused(thinker: RunningServer, given: Any) -> None:
    chat = body("yes", thinking_token_budget=given)
    response = {"model": MODEL, "input": "a", "thinking_token_budget": given}
    for path, ask in (("chat/completions", chat), ("responses", response)):
        refused(thinker, path, ask, "thinking_token_budget")


def test_where_it_cannot_be_obeyed_it_is_refused(
    start: StartServer, thinker: RunningServer, server: RunningServer, has_tokens: bool
) -> None:
    prompt = {"model": MODEL, "prompt": "a", "thinking_token_budget": 4}
    refused(thinker, "completions", prompt, "completions know of no reasoning")
    del prompt["thinking_token_budget"]
    for free in ({}, {"thinking_token_budget": -1}):  # no limit is none
        answer = httpx.post(f"{thinker.url}/v1/completions", json=prompt | free)
        assert answer.status_code == 200
    chat = body("yes", thinking_token_budget=4)
    banned = {**chat, "bad_words": [CLOSES]}
    refused(thinker, "chat/completions", banned, "bad_words must not forbid")
    if not has_tokens:
        return
    refused(server, "chat/completions", chat, "it is not known how this model writes")
    harmony = start(reasoning_parser="openai_gptoss", thinking_token_budget=-1)
    refused(harmony, "chat/completions", chat, "reasoning in messages")
    for each in (server, harmony):
        whole(each, chat | {"thinking_token_budget": -1})


def refused(server: RunningServer, path: str, ask: dict[str, Any], words: str) -> None:
    answer = httpx.post(f"{server.url}/v1/{path}", json=ask)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] in ("thinking_token_budget", "bad_words")


def test_a_budget_of_requests_that_give_none(
    start: StartServer, thinker: RunningServer, has_tokens: bool
) -> None:
    server = start(texts=TAGS if has_tokens else (), thinking_token_budget=3)

    def thought(**more: Any) -> Any:
        return whole(server, body(OPENS + LONG, **more))["choices"][0]["message"]["reasoning"]

    assert thought() == LONG[:3]
    assert thought(thinking_token_budget=5) == LONG[:5]
    assert thought(thinking_token_budget=-1) == LONG.removesuffix("</think>yes")
    ask = {"model": MODEL, "input": say(OPENS + LONG), "temperature": 0}
    for budget, wanted in ((None, LONG[:3]), (-1, LONG.removesuffix("</think>yes"))):
        more = {"thinking_token_budget": budget}
        found = httpx.post(f"{server.url}/v1/responses", json=ask | more).json()["output"]
        assert found[0]["content"][0]["text"] == wanted
    assert thought(response_format=JSON, max_tokens=60) == LONG[:3]
    assert thought(thinking_token_budget=None) == LONG[:3]
    assert thought(bad_words=["</think>", "zzz"], max_tokens=60) != LONG[:3]
    messages = [
        whole(each, body(text, False))["choices"][0]["message"]
        for each in (server, thinker)
        for text in ("yes", "a longer answer")
    ]
    assert messages[:2] == messages[2:]  # no thought may come
    prompt = {"model": MODEL, "prompt": say(OPENS + LONG), "max_tokens": 60}
    done = httpx.post(f"{server.url}/v1/completions", json=prompt)
    assert done.json()["choices"][0]["text"].startswith(OPENS + LONG)


@pytest.mark.parametrize(
    ("parser", "budget", "reason"),
    [
        ("none", 3, "it is not known how this model writes its reasoning"),
        ("openai_gptoss", 3, "which no tag closes"),
        ("qwen3", -2, "thinking_token_budget is -2"),
    ],
)
def test_a_server_that_can_have_no_budget(
    start: StartServer, parser: str, budget: int, reason: str
) -> None:
    with pytest.raises(pytest.fail.Exception, match=reason):
        start(reasoning_parser=parser, thinking_token_budget=budget)
