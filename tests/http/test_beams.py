"""Beam search over HTTP, as OpenAI's client sends it: on both endpoints, whole and streamed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.http.app import AppOptions
from onnxport.serving.params import SamplingParams
from onnxport.serving.repetition import RepetitionDetection
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.beams import Text, null_logits, search

from .conftest import RunningServer
from .fake import Client, FakeEngine
from .scripted import MODEL

pytestmark = pytest.mark.timeout(60)
PATHS = ("completions", "chat/completions")
PROMPT = [5, 6, 7, 8, 9]
WIDTH, MAX_TOKENS = 3, 6
BEAMS = {"use_beam_search": True}


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder, frozenset({258}))  # <|im_end|>


@pytest.fixture
def openai(server: RunningServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def texts(tokenizer: Tokenizer, prompt: list[int], width: int = WIDTH, **more: Any) -> list[Text]:
    """What the search has to find."""
    ends = sorted(tokenizer.eos_token_ids)
    size = tokenizer.vocab_size
    return search(
        lambda ids: null_logits(ids, (None,), size), prompt, width, MAX_TOKENS, ends=ends, **more
    )


def complete(openai: OpenAI, prompt: Any = None, **fields: Any) -> Any:
    extra = BEAMS | fields.pop("extra", {})
    asked = {"n": WIDTH, "max_tokens": MAX_TOKENS, **fields}
    return openai.completions.create(
        model=MODEL, prompt=PROMPT if prompt is None else prompt, extra_body=extra, **asked
    )


def test_the_choices_are_the_best_texts(openai: OpenAI, tokenizer: Tokenizer) -> None:
    wanted = texts(tokenizer, PROMPT)
    answer = complete(openai, extra={"return_token_ids": True})
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [tuple(choice.token_ids) for choice in answer.choices] == [one.tokens for one in wanted]
    assert [choice.text for choice in answer.choices] == [
        tokenizer.decode(one.tokens) for one in wanted
    ]
    assert answer.usage.completion_tokens == sum(len(one.tokens) for one in wanted)
    assert answer.usage.prompt_tokens == len(PROMPT)


def test_length_penalty_and_end_tokens(openai: OpenAI, tokenizer: Tokenizer) -> None:
    ends = list(range(0, tokenizer.vocab_size, 6))
    size = tokenizer.vocab_size
    found = []
    for penalty in (-2.0, 2.0):
        wanted = search(
            lambda ids: null_logits(ids, (None,), size),
            PROMPT,
            WIDTH,
            MAX_TOKENS,
            ends=[*ends, *tokenizer.eos_token_ids],
            length_penalty=penalty,
        )
        extra = {"stop_token_ids": ends, "length_penalty": penalty, "return_token_ids": True}
        answer = complete(openai, extra=extra)
        found.append([tuple(choice.token_ids) for choice in answer.choices])
        assert found[-1] == [one.tokens for one in wanted]
        for choice in answer.choices:
            is_end = choice.token_ids[-1] in ends
            assert choice.finish_reason == ("stop" if is_end else "length")
            assert choice.stop_reason == (choice.token_ids[-1] if is_end else None)
    assert found[0] != found[1]


def test_a_stream_tells_each_choice_at_the_end(openai: OpenAI, tokenizer: Tokenizer) -> None:
    wanted = texts(tokenizer, PROMPT)
    chunks = list(complete(openai, stream=True, stream_options={"include_usage": True}, logprobs=1))
    *told, last = chunks
    assert [chunk.choices[0].index for chunk in told] == [0, 1, 2]
    assert [chunk.choices[0].text for chunk in told] == [
        tokenizer.decode(one.tokens) for one in wanted
    ]
    assert all(chunk.choices[0].finish_reason == "length" for chunk in told)
    assert [len(chunk.choices[0].logprobs.tokens) for chunk in told] == [MAX_TOKENS] * 3
    assert last.usage.completion_tokens == sum(len(one.tokens) for one in wanted)


def test_several_prompts_echo_and_logprobs(openai: OpenAI, tokenizer: Tokenizer) -> None:
    prompts = [PROMPT, PROMPT[:2]]
    answer = complete(openai, prompts, echo=True, n=2, logprobs=1)
    found = [choice.text for choice in answer.choices]
    assert found == [
        tokenizer.decode([*prompt, *one.tokens])
        for prompt in prompts
        for one in texts(tokenizer, prompt, 2)
    ]
    for choice, prompt in zip(answer.choices, [p for p in prompts for _ in range(2)], strict=True):
        assert len(choice.logprobs.tokens) == len(prompt) + MAX_TOKENS


def test_the_best_of_more(openai: OpenAI, tokenizer: Tokenizer) -> None:
    answer = complete(openai, n=2, best_of=5, extra={"return_token_ids": True})
    wanted = texts(tokenizer, PROMPT, 5)
    assert [tuple(choice.token_ids) for choice in answer.choices] == [
        one.tokens for one in wanted[:2]
    ]
    with pytest.raises(BadRequestError, match="best_of is 5 and n is 2"):
        complete(openai, n=2, best_of=5, stream=True)


def test_there_are_no_more_choices_than_texts(openai: OpenAI) -> None:
    extra = {"allowed_token_ids": [40]}
    answer = complete(openai, [PROMPT, PROMPT[:2]], extra=extra, echo=True)
    assert [choice.index for choice in answer.choices] == [0, 3]
    assert answer.usage.completion_tokens == 2 * MAX_TOKENS
    told = list(complete(openai, extra=extra, stream=True))
    assert [chunk.choices[0].index for chunk in told] == [0]
    messages: Any = [{"role": "user", "content": "ab"}]
    chat = openai.chat.completions.create(
        model=MODEL, messages=messages, n=3, max_tokens=4, extra_body={**BEAMS, **extra}
    )
    assert [choice.index for choice in chat.choices] == [0]
    streamed = openai.chat.completions.create(
        model=MODEL, messages=messages, n=3, max_tokens=4, stream=True, extra_body=BEAMS | extra
    )
    assert {chunk.choices[0].index for chunk in streamed} == {0}


def test_chats(openai: OpenAI, tokenizer: Tokenizer) -> None:
    messages: Any = [{"role": "user", "content": "ab"}]
    extra: dict[str, Any] = BEAMS | {"return_token_ids": True}
    asked: dict[str, Any] = {"model": MODEL, "messages": messages, "n": WIDTH}
    answer: Any = openai.chat.completions.create(
        **asked, max_tokens=MAX_TOKENS, logprobs=True, top_logprobs=2, extra_body=extra
    )
    wanted = texts(tokenizer, answer.prompt_token_ids)
    assert [tuple(choice.token_ids) for choice in answer.choices] == [one.tokens for one in wanted]
    assert [choice.message.content for choice in answer.choices] == [
        tokenizer.decode(one.tokens) for one in wanted
    ]
    for choice, text in zip(answer.choices, wanted, strict=True):
        entries = choice.logprobs.content
        assert len(entries) == len(text.tokens)
        assert sum(entry.logprob for entry in entries) == pytest.approx(text.logprob, abs=1e-3)
    stream: Any = openai.chat.completions.create(
        **asked, max_tokens=MAX_TOKENS, stream=True, extra_body=extra
    )
    told: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk.choices:
            told[choice.index] = told.get(choice.index, "") + (choice.delta.content or "")
    assert told == {index: tokenizer.decode(one.tokens) for index, one in enumerate(wanted)}


def test_each_beam_keeps_to_the_form(openai: OpenAI) -> None:
    form = {"structured_outputs": {"regex": "[a-d]{3}"}}
    answer = complete(openai, n=4, max_tokens=20, extra=form)
    found = [choice.text for choice in answer.choices]
    assert len(set(found)) == 4
    assert all(len(text) == 3 and set(text) <= set("abcd") for text in found)
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_more_beams_than_run_at_once(openai: OpenAI) -> None:
    for fields in ({"n": 120}, {"n": 1, "best_of": 120}):
        with pytest.raises(BadRequestError, match=r"is 120, and the engine runs \d+ sequences"):
            complete(openai, **fields)


# What is asked.


async def asked(client: Client, path: str, **fields: Any) -> SamplingParams:
    method = client.complete if path == "completions" else client.chat
    response = await method(**fields)
    assert response.status_code == 200, response.text
    return client.engine.asked[-1].params


@pytest.fixture
def client(tokenizer: Tokenizer, model_folder: Path) -> Client:
    """A client of a server whose model's authors draw."""
    defaults = SamplingDefaults(
        temperature=0.6,
        top_p=0.9,
        top_k=20,
        min_p=0.05,
        typical_p=0.9,
        repetition_penalty=1.1,
        repetition_detection=RepetitionDetection(4, 1, 3),
    )
    return Client(FakeEngine(tokenizer, answers=("a", "b")), model_folder, AppOptions(defaults))


@pytest.mark.parametrize("path", PATHS)
async def test_nothing_is_drawn_that_was_not_asked_for(client: Client, path: str) -> None:
    params = await asked(client, path, n=2, max_tokens=4, **BEAMS)
    assert params == SamplingParams(
        temperature=0.0,
        n=2,
        max_tokens=4,
        repetition_penalty=1.1,
        use_beam_search=True,
    )
    params = await asked(
        client, path, temperature=2, length_penalty=0.5, repetition_penalty=1.3, **BEAMS
    )
    assert (params.temperature, params.length_penalty, params.repetition_penalty) == (2, 0.5, 1.3)
    for value in (False, None):
        params = await asked(client, path, use_beam_search=value)
        assert not params.use_beam_search
        assert (params.temperature, params.top_k) == (0.6, 20)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 3),
        ("top_p", 0.5),
        ("top_k", 4),
        ("min_p", 0.2),
        ("typical_p", 0.5),
        ("top_n_sigma", 1.0),
        ("xtc_probability", 0.5),
        ("dynatemp_range", 0.5),
        ("mirostat", 2),
        ("adaptive_target", 0.5),
        ("repetition_detection", {"max_pattern_size": 4, "min_count": 3}),
    ],
)
async def test_what_draws_is_refused(client: Client, path: str, name: str, value: Any) -> None:
    method = client.complete if path == "completions" else client.chat
    response = await method(n=2, **BEAMS, **{name: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == name
    assert "use_beam_search" in error["message"]
    assert client.engine.asked == []


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"length_penalty": 0.5}, "length_penalty"),
        ({"length_penalty": 17, **BEAMS}, "length_penalty"),
        ({"use_beam_search": "yes"}, "use_beam_search"),
        ({"use_beam_search": 1}, "use_beam_search"),
        ({"beam_width": 3, **BEAMS}, "beam_width"),
        ({"early_stopping": True, **BEAMS}, "early_stopping"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    client: Client, path: str, fields: dict[str, Any], param: str
) -> None:
    method = client.complete if path == "completions" else client.chat
    response = await method(**fields)
    assert response.status_code == 400, response.text
    assert param in (response.json()["error"]["param"] or response.text)
