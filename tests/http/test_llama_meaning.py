"""What `/completion` means where llama.cpp and other APIs differ: ends, contexts, probabilities."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from onnxport.errors import CapacityError
from onnxport.providers.null import NullModel
from onnxport.serving.http.app import AppOptions
from onnxport.serving.http.logprobs import drawn
from onnxport.serving.limits import max_total_tokens
from onnxport.serving.params import SamplingParams
from onnxport.serving.tokenizer import Tokenizer

from .conftest import RunningServer, StartServer
from .fake import Client, FakeEngine
from .scripted import say
from .test_llama_completion import events, letter, post, told

pytestmark = pytest.mark.timeout(60)


def test_a_stream_tells_its_tokens(server: RunningServer) -> None:
    *pieces, last = events(post(server, "abc", stream=True))
    assert [one["tokens"] for one in pieces][:3] == [[letter("a")], [letter("b")], [letter("c")]]
    assert last["tokens"] == []
    assert {one["id_slot"] for one in (*pieces, last)} == {-1}
    assert told(post(server, "abc", id_slot=2))["id_slot"] == 2


def test_how_long_an_answer_may_get_that_ends_at_the_context() -> None:
    limits = replace(NullModel().capabilities, max_model_len=64)
    for asked, total in ((10, 14), (60, 64), (61, 64), (10**9, 64), (None, 64)):
        assert max_total_tokens(4, asked, limits, ends_at_context=True) == total
    assert max_total_tokens(63, 9, limits, ends_at_context=True) == 64
    with pytest.raises(CapacityError, match="64 prompt tokens") as found:
        max_total_tokens(64, 9, limits, ends_at_context=True)
    assert (found.value.num_prompt, found.value.num_context) == (64, 64)
    with pytest.raises(CapacityError):
        max_total_tokens(4, 61, limits)


@pytest.mark.asyncio
async def test_probabilities_are_counted_to_the_context(model_folder: Path) -> None:
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()), max_logprobs=None)
    asked: dict[str, Any] = {"prompt": "a", "n_probs": 50, "n_predict": 10**6}
    found = await Client(engine, model_folder).post("/completion", **asked)
    assert found.status_code == 200, found.text


@pytest.mark.asyncio
async def test_the_kv_cache_ends_an_answer_too(model_folder: Path) -> None:
    limits = NullModel().capabilities
    small = replace(limits, num_blocks=1, max_model_len=8 * limits.block_size)
    engine = FakeEngine(
        Tokenizer.from_folder(model_folder, frozenset()), ends="length", capabilities=small
    )
    client = Client(engine, model_folder)
    for room in (2, 3):  # of which the answer, "ok", takes 2
        prompt = [5] * (limits.block_size + 1 - room)
        found = (await client.post("/completion", prompt=prompt)).json()
        assert found["tokens_predicted"] == 2
        assert (found["stop_type"], found["truncated"]) == ("limit", room == 2)


@pytest.mark.slow
def test_the_context_ends_what_is_longer(start_server: StartServer) -> None:
    server = start_server(max_model_len=64)
    for stream in (False, True):
        _check_context(server, stream)


def _check_context(server: RunningServer, stream: bool) -> None:
    def end(text: str, **fields: Any) -> dict[str, Any]:
        response = post(server, text, stream=stream, **fields)
        return events(response)[-1] if stream else told(response)

    found = end("ab", ignore_eos=True, n_predict=10**6)
    assert found["tokens_evaluated"] + found["tokens_predicted"] == 64
    assert (found["stop_type"], found["truncated"]) == ("limit", True)
    assert found["generation_settings"]["n_predict"] == 10**6
    found = end("ab", ignore_eos=True, n_predict=8)
    assert (found["tokens_predicted"], found["truncated"]) == (8, False)
    assert end("ab", n_predict=10**6)["stop_type"] == "eos"
    both = {"prompt": [say("abcd"), say("a")], "temperature": 0, "n_predict": 59}
    one, other = httpx.post(f"{server.url}/completion", json={**both, "ignore_eos": True}).json()
    assert (one["tokens_predicted"], one["truncated"]) == (58, True)
    assert (other["tokens_predicted"], other["truncated"]) == (59, False)
    refused = post(server, "x" * 80, stream=stream)
    error = refused.json()["error"]
    assert refused.status_code == 400
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (82, 64)
    beyond = {"prompt": "a", "max_tokens": 64}
    assert httpx.post(f"{server.url}/v1/completions", json=beyond).status_code == 400


def test_ends_that_are_ignored_never_come(server: RunningServer) -> None:
    """Other APIs have vLLM's meaning: the end token comes, and the answer goes on."""
    found = told(post(server, "ab", ignore_eos=True, n_predict=6, return_tokens=True))
    [end] = found["generation_settings"]["logit_bias"]
    assert end["bias"] is None
    assert found["tokens"][:2] == [letter("a"), letter("b")]
    assert end["token"] not in found["tokens"]
    assert found["stop_type"] == "limit"
    asked = {"prompt": say("ab"), "temperature": 0, "max_tokens": 6, "return_token_ids": True}
    other = httpx.post(f"{server.url}/v1/completions", json={**asked, "ignore_eos": True}).json()
    assert end["token"] in other["choices"][0]["token_ids"]
    more = told(post(server, "ab", ignore_eos=True, n_predict=6, logit_bias=[[5, 1.5]]))
    assert more["generation_settings"]["logit_bias"] == [{"token": 5, "bias": 1.5}, end]
    assert told(post(server, "ab"))["generation_settings"]["logit_bias"] == []


def test_a_prompt_may_be_an_object(server: RunningServer) -> None:
    text = say("ab")
    asked: dict[str, Any] = {"temperature": 0, "n_predict": 2}
    for prompt in ({"prompt_string": text}, {"prompt_string": text, "multimodal_data": []}):
        found = told(httpx.post(f"{server.url}/completion", json={"prompt": prompt, **asked}))
        assert (found["content"], found["prompt"]) == ("ab", text)
    several = [text, {"prompt_string": say("cd")}]
    found = httpx.post(f"{server.url}/completion", json={"prompt": several, **asked}).json()
    assert [one["content"] for one in found] == ["ab", "cd"]


def test_biases_add_up_as_far_as_one_may_go(server: RunningServer) -> None:
    b, z = letter("b"), letter("z")
    found = told(post(server, "abc", logit_bias=[["bb", -60], [b, -60], ["z", 1], ["zz", 0.5]]))
    assert found["content"] == "azc"
    assert found["generation_settings"]["logit_bias"] == [
        {"token": b, "bias": -100.0},
        {"token": z, "bias": 2.0},
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities_of_what_was_drawn_from(server: RunningServer, stream: bool) -> None:
    asked = {"n_probs": 4, "post_sampling_probs": True, "n_predict": 3, "stream": stream}

    def positions(**fields: Any) -> list[dict[str, Any]]:
        response = post(server, "abc", **asked, **fields)
        answers = events(response) if stream else [told(response)]
        return [each for one in answers for each in one.get("completion_probabilities", [])]

    hot = positions(temperature=5.0, top_k=3, seed=4)
    assert len(hot) == 3
    for one in hot:
        assert set(one) == {"id", "token", "bytes", "prob", "top_probs"}
        assert len(one["top_probs"]) == 3  # of four that were asked for; no other can come
        assert math.isclose(sum(each["prob"] for each in one["top_probs"]), 1.0, abs_tol=1e-5)
        assert one["prob"] in [each["prob"] for each in one["top_probs"]]
    for one in positions():
        [only] = one["top_probs"]
        assert (only["prob"], only["id"]) == (1.0, one["id"])
    raw = post(server, "abc", n_probs=4, n_predict=3, temperature=5.0, top_k=3)
    [first, *_] = told(raw)["completion_probabilities"]
    assert len(first["top_logprobs"]) == 4


def test_what_cannot_come_is_left_out() -> None:
    known = {"id": 1, "token": "a", "bytes": [97]}
    entry = {**known, "logprob": -0.5, "top_logprobs": [{**known, "logprob": -9999.0}]}
    assert drawn([entry], SamplingParams()) == [
        {**known, "prob": math.exp(-0.5), "top_probs": []},
    ]


def test_a_schema_needs_no_name(server: RunningServer) -> None:
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "abc"}}}
    body = {"messages": [{"role": "user", "content": say("x")}], "response_format": form}
    done = httpx.post(f"{server.url}/v1/chat/completions", json={**body, "temperature": 0}).json()
    assert done["choices"][0]["message"]["content"] == '"abc"'


def test_text_that_spells_special_tokens(server: RunningServer) -> None:
    asked = {"content": "<|over|>a"}

    def tokens(**fields: Any) -> Any:
        return httpx.post(f"{server.url}/tokenize", json={**asked, **fields}).json()

    assert len(tokens()["tokens"]) == len(tokens(parse_special=True)["tokens"]) == 2
    plain = tokens(parse_special=False)["tokens"]
    assert len(plain) == 9
    pieces = tokens(parse_special=False, with_pieces=True)["tokens"]
    assert "".join(one["piece"] for one in pieces) == "<|over|>a"
    assert tokens()["tokens"] == tokens(parse_special=None)["tokens"]
    assert tokens(parse_special=False, add_special=True)["error"]["param"] == "add_special"


@pytest.mark.asyncio
async def test_the_other_header_of_a_key(model_folder: Path) -> None:
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()))
    client = Client(engine, model_folder, AppOptions(api_keys=("secret",)))
    for path in ("/v1/models", "/props", "/slots"):
        assert (await client.get(path, **{"x-api-key": "secret"})).status_code == 200
        assert (await client.get(path, **{"x-api-key": "wrong"})).status_code == 401


@pytest.mark.asyncio
async def test_what_models_and_props_tell(model_folder: Path) -> None:
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()))
    client = Client(engine, model_folder)
    [model] = (await client.get("/models")).json()["data"]
    limits = engine.capabilities
    assert model["meta"] == {"n_ctx": limits.max_model_len, "n_vocab": limits.vocab_size}
    props = (await client.get("/props")).json()
    assert props["modalities"] == {"vision": False, "video": False, "audio": False}
    params = props["default_generation_settings"]["params"]
    assert (params["max_tokens"], params["seed"]) == (-1, -1)


def test_completions_take_the_same_prompts(server: RunningServer) -> None:
    text = {
        "content": [{"type": "text", "text": "<|say|>"}, {"type": "text", "text": "ef<|over|>"}]
    }
    ids = httpx.post(f"{server.url}/tokenize", json={"content": say("cd")}).json()["tokens"]
    prompts = [say("ab"), ids, text, {"prompt_string": say("gh")}]
    asked = {"temperature": 0, "max_tokens": 2}
    found = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompts, **asked}).json()
    assert [one["text"] for one in found["choices"]] == ["ab", "cd", "ef", "gh"]
    image = {"content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    wrong: list[Any] = [image, [image], {"content": []}, {"content": "a"}, ["a", 5], ["a", [["b"]]]]
    for prompt in wrong:
        answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": prompt, **asked})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt"), prompt
