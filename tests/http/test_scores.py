"""What a client learns of the prompt's tokens, and which of many completions it gets."""

from __future__ import annotations

from typing import Any

import httpx
from openai import OpenAI

from .conftest import RunningServer
from .scripted import MODEL, say

PROMPT = say("ok")


def complete(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **fields}
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_echo_with_logprobs_tells_the_prompts_too(server: RunningServer) -> None:
    [choice] = complete(server, echo=True, logprobs=2)["choices"]
    [plain] = complete(server, logprobs=2)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == PROMPT + plain["text"]
    count = len(logprobs["tokens"]) - len(plain["logprobs"]["tokens"])
    assert "".join(logprobs["tokens"][:count]) == PROMPT
    assert logprobs["tokens"][count:] == plain["logprobs"]["tokens"]
    assert logprobs["token_logprobs"][count:] == plain["logprobs"]["token_logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert all(value < 0 for value in logprobs["token_logprobs"][1:])
    starts = [len("".join(logprobs["tokens"][:place])) for place in range(len(logprobs["tokens"]))]
    assert logprobs["text_offset"] == starts
    assert all(2 <= len(top) <= 3 for top in logprobs["top_logprobs"][1:])


def test_scoring_a_prompt_generates_nothing(server: RunningServer) -> None:
    """As evaluation harnesses ask: echo, logprobs and no tokens."""
    body = complete(server, echo=True, logprobs=1, max_tokens=0)
    [choice] = body["choices"]
    assert choice["text"] == PROMPT
    assert "".join(choice["logprobs"]["tokens"]) == PROMPT
    assert body["usage"]["completion_tokens"] == 0
    assert complete(server, echo=True, max_tokens=0)["choices"][0]["text"] == PROMPT


def test_what_generates_nothing_may_take_the_whole_context(server: RunningServer) -> None:
    longest = httpx.get(f"{server.url}/v1/models").json()["data"][0]["max_model_len"]
    ask: dict[str, Any] = {"prompt": [9] * longest, "echo": True, "max_tokens": 0}
    body = complete(server, **ask)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] == longest
    cut = complete(server, **(ask | {"prompt": [9] * (longest + 5), "truncate_prompt_tokens": -1}))
    assert cut["usage"]["prompt_tokens"] == longest
    for change in ({"prompt": [9] * (longest + 1)}, {"max_tokens": 1}):
        more = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, **ask, **change})
        assert more.status_code == 400
        assert f"the context length is {longest}" in more.json()["error"]["message"]


def test_prompt_logprobs_of_completions(server: RunningServer) -> None:
    [choice] = complete(server, prompt_logprobs=1)["choices"]
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    [told] = complete(server, echo=True, logprobs=1)["choices"]
    for entry, token, value in zip(
        rest, told["logprobs"]["tokens"][1:], told["logprobs"]["token_logprobs"][1:], strict=False
    ):
        assert {one["decoded_token"]: one["logprob"] for one in entry.values()}[token] == value
        assert 1 in {one["rank"] for one in entry.values()}
        assert all(name.isdigit() for name in entry)
    assert told["prompt_logprobs"] is None
    several = complete(server, prompt_logprobs=3, echo=True, logprobs=1)["choices"][0]
    assert several["logprobs"] == told["logprobs"]
    assert all(3 <= len(entry) <= 4 for entry in several["prompt_logprobs"][1:])


def test_prompt_logprobs_of_chat_completions(server: RunningServer) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        response = client.chat.completions.create(
            model=MODEL,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=4,
            n=2,
            extra_body={"prompt_logprobs": 0},
        )
    body = response.model_dump()
    assert response.usage is not None
    assert len(body["prompt_logprobs"]) == response.usage.prompt_tokens
    assert all(len(entry) == 1 for entry in body["prompt_logprobs"][1:])


def test_best_of_returns_the_likeliest(server: RunningServer) -> None:
    fields = {"prompt": say("x"), "temperature": 4, "max_tokens": 6, "seed": 3, "logprobs": 0}
    several = complete(server, n=6, **fields)["choices"]

    def mean(choice: dict[str, Any]) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return sum(values) / len(values)

    ranked = sorted(several, key=mean, reverse=True)
    assert len({round(mean(choice), 6) for choice in ranked}) > 2
    body = complete(server, n=2, best_of=6, **fields)
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    for choice, expected in zip(body["choices"], ranked, strict=False):
        assert choice["text"] == expected["text"]
        assert choice["logprobs"] == expected["logprobs"]
    tokens = sum(len(choice["logprobs"]["tokens"]) for choice in several)
    assert body["usage"]["completion_tokens"] == tokens  # all that was generated
    fields.pop("logprobs")
    plain = complete(server, n=2, best_of=6, **fields)["choices"]
    assert [choice["text"] for choice in plain] == [choice["text"] for choice in body["choices"]]
    assert all(choice["logprobs"] is None for choice in plain)
