"""The fields that all APIs share: a response and a message mean by them what a chat does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from onnxport.serving.http.fields import OF_ENGINES
from onnxport.serving.http.generation_fields import GenerationFields
from onnxport.serving.http.messages_request import MessagesRequest
from onnxport.serving.http.responses_request import ResponsesRequest
from onnxport.serving.tokenizer import Tokenizer

from .conftest import RunningServer
from .fake import MODEL as FAKE
from .fake import Client, FakeEngine
from .scripted import MODEL, say

pytestmark = pytest.mark.timeout(60)
INCLUDED = {"include": ["message.output_text.logprobs"]}
GIVEN: dict[str, Any] = {  # a value of each field that changes something
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 3,
    "stop_token_ids": [7],
    "ignore_eos": True,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "min_p": 0.1,
    "typical_p": 0.8,
    "top_n_sigma": 1.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.8,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["!"],
    "dynatemp_range": 0.3,
    "dynatemp_exponent": 1.5,
    "mirostat": 2,
    "mirostat_tau": 4.0,
    "mirostat_eta": 0.2,
    "adaptive_target": 0.5,
    "adaptive_decay": 0.8,
    "repeat_last_n": 32,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "logit_bias": {"7": 2.0},
    "bad_words": ["no"],
    "allowed_token_ids": [5, 6, 7],
    "min_tokens": 2,
    "repetition_detection": {"max_pattern_size": 9, "min_count": 4},
    "skip_reading_prefix_cache": True,
    "structured_outputs": {"regex": "[ab]+"},
    "priority": 2,
    "cache_salt": "s",
    "timeout_s": 9.0,
    "stream_interval": 3,
}


def letter(char: str) -> int:
    """The token of a printable character."""
    return ord(char) - ord("!")


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder, frozenset())


@pytest.fixture(params=["responses", "messages"])
def other(request: pytest.FixtureRequest) -> str:
    """An API other than chats."""
    name: str = request.param
    return name


def body_of(other: str, text: str, **fields: Any) -> dict[str, Any]:
    """Return a body of such an API, of 9 tokens at most."""
    if other == "responses":
        return {"input": text, "max_output_tokens": 9, **fields}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 9, **fields}


def test_each_field_is_tried() -> None:
    assert GIVEN.keys() | {"stream"} == GenerationFields.model_fields.keys()


@pytest.mark.parametrize("name", sorted(GIVEN))
async def test_a_field_means_what_it_means_in_a_chat(
    tokenizer: Tokenizer, model_folder: Path, other: str, name: str
) -> None:
    client = Client(FakeEngine(tokenizer), model_folder)
    asked: list[dict[str, Any]] = [{}, {name: GIVEN[name]}]
    for fields in asked:
        assert (await client.chat("ab", max_tokens=9, **fields)).status_code == 200
        body = body_of(other, "ab", model=FAKE, **fields)
        answer = await client.post(f"/v1/{other}", **body)
        assert answer.status_code == 200, answer.text
    chat, told, chat_with, told_with = client.engine.asked
    assert (chat.params, chat.options) == (told.params, told.options)
    assert (chat_with.params, chat_with.options) == (told_with.params, told_with.options)
    if name != "stream_interval":  # which is no matter of the engine's
        assert (told.params, told.options) != (told_with.params, told_with.options)


def streamed(server: RunningServer, other: str, **fields: Any) -> int:
    """Return how many chunks a stream's text comes in."""
    body = body_of(other, say("abcdef"), model=MODEL, stream=True, **fields)
    text = httpx.post(f"{server.url}/v1/{other}", json=body).text
    return text.count("output_text.delta\n") + text.count('"text_delta"')


def test_a_stream_has_larger_chunks(server: RunningServer, other: str) -> None:
    assert streamed(server, other) == 6
    assert streamed(server, other, stream_interval=3) < 6


@pytest.mark.parametrize("name", sorted(GIVEN))
def test_a_field_of_another_type_is_refused_by_its_name(
    server: RunningServer, other: str, name: str
) -> None:
    body = body_of(other, "a", **{name: {"a": [1]}})
    found = httpx.post(f"{server.url}/v1/{other}", json=body)
    assert found.status_code == 400, found.text
    assert name in found.json()["error"]["message"]


@pytest.mark.parametrize("name", sorted(OF_ENGINES))
def test_values_that_change_nothing(server: RunningServer, other: str, name: str) -> None:
    values = OF_ENGINES[name]
    for value in values if isinstance(values, tuple) else [5]:
        body = body_of(other, say("ok"), **{name: value})
        found = httpx.post(f"{server.url}/v1/{other}", json=body)
        assert found.status_code == 200, found.text
    if isinstance(values, tuple):
        found = httpx.post(f"{server.url}/v1/{other}", json=body_of(other, "a", **{name: "x"}))
        assert found.status_code == 400
        assert name in found.json()["error"]["message"]


def test_fields_are_no_others() -> None:
    """What one of the two lacks is refused there, not dropped."""
    fields = {"stop", "logprob_token_ids", "thinking_token_budget", "user"}
    assert not fields & MessagesRequest.model_fields.keys()
    assert fields <= ResponsesRequest.model_fields.keys()


def post(server: RunningServer, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/v1/responses", json=body)


@pytest.mark.parametrize("top", [None, 1])
def test_a_response_tells_of_tokens_that_are_named(server: RunningServer, top: int | None) -> None:
    ask = {"input": say("ab"), **INCLUDED, "logprob_token_ids": [letter("b"), letter("z")]}
    found = post(server, **ask, top_logprobs=top)
    assert found.status_code == 200, found.text
    entries = found.json()["output"][0]["content"][0]["logprobs"]
    assert [one["token"] for one in entries] == ["a", "b"]
    told = [[one["token"] for one in each["top_logprobs"]] for each in entries]
    assert told == ([["b", "z"], ["b", "z"]] if top is None else [["a", "b", "z"], ["b", "z"]])
    likely = entries[1]["top_logprobs"][0]["logprob"]
    assert likely == pytest.approx(-math.log1p(260 * math.exp(-20)), abs=1e-5)


def test_a_response_without_log_probabilities_names_no_tokens(server: RunningServer) -> None:
    error = post(server, input="a", logprob_token_ids=[1]).json()["error"]
    assert error["param"] == "logprob_token_ids"
    assert "include lacks" in error["message"]
    error = post(server, input="a", logprob_token_ids=[9999], **INCLUDED).json()["error"]
    assert error["param"] == "logprob_token_ids"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_that_is_kept_has_log_probabilities(
    server: RunningServer, stream: bool
) -> None:
    ask = {"input": say("abSTOPcd"), "stop": "STOP", "include_stop_str_in_output": True}
    found = post(server, **ask, **INCLUDED, stream=stream)
    if stream:
        assert '"delta":"STOP","logprobs":[{"token":"S"' in found.text
        assert '"text":"abSTOP"' in found.text
        return
    [part] = found.json()["output"][0]["content"]
    assert part["text"] == "abSTOP"
    assert "".join(one["token"] for one in part["logprobs"]) == "abSTOP"


def test_special_tokens_that_are_spelled(server: RunningServer) -> None:
    bias = {"257": 100}  # <|im_start|>
    ask = {"input": say("ab"), "logit_bias": bias, "max_output_tokens": 2}
    plain = post(server, **ask).json()["output"][0]["content"][0]["text"]
    spelled = post(server, **ask, skip_special_tokens=False, **INCLUDED).json()
    [part] = spelled["output"][0]["content"]
    assert plain == ""
    assert part["text"] == "<|im_start|>" * 2
    assert [one["token"] for one in part["logprobs"]] == ["<|im_start|>"] * 2
