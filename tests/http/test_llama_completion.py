"""`/completion`: what a completion is, told as llama.cpp's clients read it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from onnxport.errors import OverloadedError
from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.http.app import AppOptions
from onnxport.serving.http.completion_request import CompletionRequest
from onnxport.serving.http.llama_completion import LlamaRequest
from onnxport.serving.http.llama_cpp import LlamaCppFields
from onnxport.serving.http.llama_request import NEUTRAL_LLAMA
from onnxport.serving.http.logprobs import completion_probabilities
from onnxport.serving.outputs import Failure, Logprob
from onnxport.serving.params import SamplingParams
from onnxport.serving.tokenizer import Tokenizer

from .conftest import RunningServer
from .fake import MODEL as FAKE
from .fake import Client, FakeEngine
from .scripted import MODEL, say
from .test_generation_fields import GIVEN

pytestmark = pytest.mark.timeout(60)
LLAMA_CPP: dict[str, Any] = {
    **{"n_probs": 2, "repeat_penalty": 1.2, "samplers": ["penalties", "temperature", "top_k"]},
    **{"temperature": 0.5, "top_k": 9, "timings_per_token": True, "cache_prompt": False},
    **{"id_slot": 3, "lora": [{"id": 0, "scale": 0.0}], "min_keep": 1, "t_max_predict_ms": 0},
    **{"post_sampling_probs": False, "return_progress": False, "grammar": ""},
}

CLIENT: dict[str, Any] = {  # llama.cpp's defaults, as its clients send them
    **{"n_predict": -1, "n_keep": 0, "seed": -1, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    **{"tfs_z": 1.0, "typical_p": 1.0, "repeat_penalty": 1.1, "repeat_last_n": 64},
    **{"penalize_nl": True, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "grammar": "", "image_data": []},
    **{"adaptive_target": -1.0, "adaptive_decay": 0.9},
    **{"n_probs": 0, "min_keep": 0, "cache_prompt": True, "samplers": "edskypmxt"},
}


def letter(char: str) -> int:
    """The token of a printable character."""
    return ord(char) - ord("!")


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder, frozenset())


def post(server: RunningServer, text: str, **fields: Any) -> httpx.Response:
    body = {"prompt": say(text), "temperature": 0, **fields}
    return httpx.post(f"{server.url}/completion", json=body)


def told(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the events of a stream, of which the last one says so; nothing comes behind."""
    assert response.status_code == 200, response.text
    *chunks, end = response.text.split("\n\n")
    assert end == ""
    found = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    assert [one["stop"] for one in found] == [False] * (len(found) - 1) + [True]
    return found


def test_a_text(server: RunningServer) -> None:
    found = told(post(server, "a\nb", return_tokens=True))
    assert found == {
        "index": 0,
        "content": "a\nb",
        "tokens": found["tokens"],
        "stop": True,
        "id_slot": -1,
        "tokens_predicted": 4,  # with the end token
        "tokens_evaluated": found["tokens_evaluated"],
        "model": MODEL,
        "stop_type": "eos",
        "stopping_word": "",
        "has_new_line": True,
        "truncated": False,
        "tokens_cached": found["tokens_cached"],
        "timings": found["timings"],
        "prompt": say("a\nb"),
        "generation_settings": found["generation_settings"],
    }
    assert len(found["tokens"]) == 4
    assert found["tokens_evaluated"] == 5
    assert told(post(server, "ab"))["tokens"] == []
    both = httpx.post(f"{server.url}/completions", json={"prompt": say("ab"), "temperature": 0})
    assert told(both)["content"] == "ab"


@pytest.mark.parametrize(
    ("fields", "content", "kind", "word"),
    [
        ({"n_predict": 2}, "ab", "limit", ""),
        ({"n_predict": -1}, "abcd", "eos", ""),
        ({"max_tokens": 2}, "ab", "limit", ""),
        (CLIENT, "abcd", "eos", ""),
        ({"max_tokens": 2, "n_predict": 2}, "ab", "limit", ""),
        ({"stop": ["c"]}, "ab", "word", "c"),
        ({"stop": "bc"}, "a", "word", "bc"),
        ({"stop_token_ids": [letter("c")]}, "ab", "eos", ""),
        ({"repetition_detection": {"max_pattern_size": 1, "min_count": 2}}, "abcd", "eos", ""),
        ({"grammar": 'root ::= "ab" [cd]'}, "abc", "eos", ""),
        ({"grammar": ""}, "abcd", "eos", ""),
        ({"json_schema": {"const": "abcd"}}, '"abcd"', "eos", ""),
        ({"logit_bias": [[letter("b"), -100], [letter("z"), 1]]}, "azcd", "eos", ""),
        ({"logit_bias": {str(letter("b")): -100, str(letter("z")): 1}}, "azcd", "eos", ""),
        ({"logit_bias": []}, "abcd", "eos", ""),
        (
            {"n_predict": None, "cache_prompt": True, "n_keep": 5, "samplers": None},
            "abcd",
            "eos",
            "",
        ),
    ],
)
def test_what_ends_it(
    server: RunningServer, fields: dict[str, Any], content: str, kind: str, word: str
) -> None:
    found = told(post(server, "abcd", **fields))
    assert (found["content"], found["stop_type"], found["stopping_word"]) == (content, kind, word)
    streamed = events(post(server, "abcd", **fields, stream=True))
    assert "".join(one["content"] for one in streamed) == content
    same = {name: found[name] for name in ("content", "tokens_cached", "timings")}
    settings = streamed[-1]["generation_settings"]
    assert settings["stream"]
    assert {**streamed[-1], **same, "generation_settings": {**settings, "stream": False}} == found


def test_what_was_asked_for_is_told(server: RunningServer) -> None:
    """Defaults with it, by names that a request may have again."""
    biases = [[letter("z"), 0.5]]
    form = 'root ::= "a"'
    given = {"n_predict": 3, "top_k": 7, "stop": ["x", "y"], "n_probs": 2, "min_tokens": 1}
    given |= {"grammar": form, "repeat_penalty": 1.5, "repeat_last_n": 9, "seed": 5}
    found = told(post(server, "ab", **given, logit_bias=biases))["generation_settings"]
    assert {name: found[name] for name in given} == given
    assert found["logit_bias"] == [{"token": letter("z"), "bias": 0.5}]
    assert (found["max_tokens"], found["ignore_eos"], found["stream"]) == (3, False, False)
    plain = told(post(server, "ab"))["generation_settings"]
    assert (plain["n_predict"], plain["seed"], plain["grammar"]) == (-1, -1, "")
    assert (plain["top_k"], plain["logit_bias"], plain["stop"]) == (0, [], [])


def test_a_prompt_of_tokens_is_told_as_text(server: RunningServer) -> None:
    ids = httpx.post(f"{server.url}/tokenize", json={"content": say("ab")}).json()["tokens"]
    body = {"prompt": ids, "temperature": 0}
    assert told(httpx.post(f"{server.url}/completion", json=body))["prompt"] == say("ab")


def test_fields_that_a_request_names(server: RunningServer) -> None:
    names = ["content", "generation_settings/n_predict", "timings/none", "content/x", "none"]
    wanted = {"content": "ab", "generation_settings/n_predict": 2}
    assert told(post(server, "abc", n_predict=2, response_fields=names)) == wanted
    *pieces, end = (
        json.loads(event.removeprefix("data: "))
        for event in post(
            server, "abc", n_predict=2, response_fields=names, stream=True
        ).text.split("\n\n")[:-1]
    )
    assert all("tokens_predicted" in piece for piece in pieces)
    assert end == {**wanted, "content": ""}
    assert "tokens_cached" in told(post(server, "abc", response_fields=[]))


def test_an_answer_that_is_stuck_has_reached_its_limit(server: RunningServer) -> None:
    rule = {"max_pattern_size": 1, "min_count": 3}
    found = told(post(server, "xxxxxx", repetition_detection=rule))
    assert (found["content"], found["stop_type"]) == ("xxx", "limit")


def test_pieces_of_a_stream(server: RunningServer) -> None:
    *pieces, last = events(post(server, "abc", stream=True, return_tokens=True))
    assert "".join(one["content"] for one in pieces) == "abc"
    assert [token for one in pieces for token in one["tokens"]][:3] == list(map(letter, "abc"))
    counts = [one["tokens_predicted"] for one in (*pieces, last)]
    assert counts == sorted(counts)
    assert (last["content"], last["tokens"], last["tokens_predicted"]) == ("", [], 4)
    for text, has_new_line in (("a\nb", True), ("ab", False)):
        assert events(post(server, text, stream=True))[-1]["has_new_line"] == has_new_line


def test_token_ids_and_a_cached_prompt(server: RunningServer) -> None:
    ids = httpx.post(f"{server.url}/tokenize", json={"content": say("x" * 40)}).json()["tokens"]
    found = [told(httpx.post(f"{server.url}/completion", json={"prompt": ids})) for _ in range(2)]
    assert [one["content"] for one in found] == ["x" * 40] * 2
    assert found[1]["tokens_cached"] > 0


async def test_it_is_a_completion(tokenizer: Tokenizer, model_folder: Path) -> None:
    client = Client(FakeEngine(tokenizer), model_folder, AppOptions(request_timeout_s=5.0))
    fields = {name: one for name, one in GIVEN.items() if name != "structured_outputs"}
    for more in ({}, fields, LLAMA_CPP, {"json_schema": {}}, {"grammar": 'root ::= "a"'}):
        same = {"n_predict": 7, "stop": ["x"], **more}
        assert (await client.complete("ab", **same)).status_code == 200
        answer = await client.post("/completion", prompt="ab", **same)
        assert answer.status_code == 200, answer.text
        one, other = client.engine.asked[-2:]
        options = replace(one.options, ends_at_context=True)
        assert (one.prompt, one.params, options) == (other.prompt, other.params, other.options)
    assert (await client.post("/completion", prompt="ab")).status_code == 200
    assert client.engine.asked[-1].params.max_tokens is None


def test_a_field_is_obeyed_or_neutral() -> None:
    assert not NEUTRAL_LLAMA.keys() & LlamaRequest.model_fields.keys()
    assert not CompletionRequest.neutral.keys() & LlamaCppFields.model_fields.keys()


async def test_fields_of_llama_cpp(tokenizer: Tokenizer, model_folder: Path) -> None:
    client = Client(FakeEngine(tokenizer), model_folder)
    assert (await client.post("/completion", prompt="ab", **LLAMA_CPP)).status_code == 200
    params = client.engine.asked[-1].params
    assert params == SamplingParams(
        max_tokens=None,
        logprobs=2,
        repetition_penalty=1.2,
        repeat_last_n=64,
        temperature=0.5,
        top_k=9,
        skip_reading_prefix_cache=True,
    )
    more = {**LLAMA_CPP, "penalty_last_n": 5}
    assert (await client.post("/completion", prompt="ab", **more)).status_code == 200
    assert client.engine.asked[-1].params == replace(params, repeat_last_n=5)


async def test_defaults_that_are_told_can_be_sent(tokenizer: Tokenizer, model_folder: Path) -> None:
    """And say what no field says: a client need not know which ones a user has changed."""
    defaults = SamplingDefaults(0.6, 0.9, 5, 0.1, 1.1, 0.8)
    client = Client(FakeEngine(tokenizer), model_folder, AppOptions(defaults))
    params = (await client.get("/props")).json()["default_generation_settings"]["params"]
    for fields in ({}, params):
        answer = await client.post("/completion", prompt="ab", **fields)
        assert answer.status_code == 200, answer.text
    plain, told = (asked.params for asked in client.engine.asked)
    assert plain == replace(told, repeat_last_n=None)
    assert told.repeat_last_n == -1  # all, as ever


def entry(char: str, likelihood: float) -> dict[str, Any]:
    """What is told of the token of a letter."""
    return {
        "id": letter(char),
        "token": char,
        "bytes": [ord(char)],
        "logprob": pytest.approx(likelihood, abs=1e-4),
    }


def test_probabilities(server: RunningServer) -> None:
    """The scripted model gives its next token 20, and z has the bias 15 here, which is not told."""
    ask = {"n_probs": 1, "logit_bias": [[letter("z"), 30]], "n_predict": 2}
    expected = [{**entry("z", -20.0), "top_logprobs": [entry(char, 0.0)]} for char in ("a", "b")]
    found = told(post(server, "ab", **ask))
    assert (found["content"], found["completion_probabilities"]) == ("zz", expected)
    *pieces, last = events(post(server, "ab", **ask, stream=True))
    assert [one for piece in pieces for one in piece["completion_probabilities"]] == expected
    assert "completion_probabilities" not in last
    for none in ({}, {"n_probs": 0}):
        assert "completion_probabilities" not in told(post(server, "ab", **none))
    three = told(post(server, "ab", n_probs=3))["completion_probabilities"]
    assert [len(one["top_logprobs"]) for one in three] == [3] * 3  # the end token has some, too


async def test_a_probability_of_nothing(tokenizer: Tokenizer) -> None:
    candidates = {5: Logprob(-math.inf, 9, "&"), 6: Logprob(-0.5, 1, "'"), 7: Logprob(-1.5, 2, "(")}
    [found] = completion_probabilities(tokenizer, [(5, candidates)], 2)
    assert (found["id"], found["logprob"]) == (5, -9999.0)
    assert [one["id"] for one in found["top_logprobs"]] == [6, 7]


def test_timings(server: RunningServer) -> None:
    found = told(post(server, "abc"))["timings"]
    assert found["predicted_n"] == 4
    assert found["prompt_n"] + found["cache_n"] == told(post(server, "abc"))["tokens_evaluated"]
    assert found["prompt_ms"] > 0.0
    *pieces, last = events(post(server, "abc", stream=True))
    assert last["timings"]["predicted_n"] == 4
    assert not any("timings" in one for one in pieces)
    *pieces, last = events(post(server, "abc", stream=True, timings_per_token=True))
    counts = [one["timings"]["predicted_n"] for one in pieces]
    assert counts == [one["tokens_predicted"] for one in pieces]
    assert last["timings"]["predicted_n"] == 4


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", 5.5]}, "prompt"),
        ({"prompt": ["a", ["b", [1]]]}, "prompt"),
        ({"prompt": [["a"], []]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": ["a"] * 2000}, "prompt"),
        ({"prompt": "x" * 20_000}, None),
        ({"prompt": [1, *[""] * 100_000]}, None),
        ({"n_predict": 0, "max_tokens": 5}, "n_predict"),
        ({"n_predict": -2}, "n_predict"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 5, "n_predict": 4}, "n_predict"),
        ({"max_tokens": 5, "n_predict": -1}, "n_predict"),
        ({"n_predict": "5"}, "n_predict"),
        ({"grammar": 'start: "a"'}, "grammar"),
        ({"grammar": "root ::= nothing"}, "grammar"),
        ({"json_schema": {"type": 5}}, "json_schema"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "grammar"),
        ({"grammar": 'root ::= "a"', "structured_outputs": {"regex": "a"}}, "grammar"),
        ({"logit_bias": [[1, True]]}, "logit_bias"),
        ({"logit_bias": [["", 1]]}, "logit_bias"),
        ({"logit_bias": [["a" * 2000, 1]]}, "logit_bias"),
        ({"logit_bias": [[10**9, 1]]}, "logit_bias"),
        ({"logit_bias": "a"}, "logit_bias"),
        ({"logit_bias": [[1, 1], [1, 2]]}, "logit_bias"),
        ({"logit_bias": [[1]]}, "logit_bias"),
        ({"logit_bias": [[1, 10**400]]}, "logit_bias"),
        ({"n_probs": -1}, "n_probs"),
        ({"n_probs": 21}, "n_probs"),
        ({"post_sampling_probs": 1}, "post_sampling_probs"),
        ({"verbose": True}, "verbose"),
        ({"prompt": {"prompt_string": "a", "multimodal_data": ["aGk="]}}, "prompt"),
        ({"prompt": {"prompt_string": 5}}, "prompt"),
        ({"prompt": [{"prompt_string": "a", "other": 1}]}, "prompt"),
        ({"samplers": ["nothing"]}, "samplers"),
        ({"samplers": ["top_p", "top_k"], "top_p": 0.5, "top_k": 3}, "samplers"),
        ({"repeat_penalty": -1}, "repeat_penalty"),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"penalty_last_n": -2, "repeat_penalty": 1.1}, "penalty_last_n"),
        ({"lora": [{"id": 0, "scale": 1}]}, "lora"),
        ({"logprobs": 2}, "logprobs"),
        ({"n": 2, "n_cmpl": 3}, "n_cmpl"),
        ({"n_cmpl": 0}, "n"),
        ({"n_indent": -1}, "n_indent"),
        ({"t_max_predict_ms": -2}, "t_max_predict_ms"),
        ({"return_progress": 5}, "return_progress"),
        ({"image_data": [{}]}, "image_data"),
        ({"temperature": -1}, "temperature"),
        ({"id_slot": -2}, "id_slot"),
        ({"model": "other"}, "model"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_refused(
    server: RunningServer, fields: dict[str, Any], param: str | None, stream: bool
) -> None:
    body = {"prompt": "a", "stream": stream, **fields}
    found = httpx.post(f"{server.url}/completion", json=body)
    assert found.status_code == (404 if "model" in fields else 400), found.text
    assert found.json()["error"]["param"] == param, found.text


async def test_what_fails(tokenizer: Tokenizer, model_folder: Path) -> None:
    engine = FakeEngine(tokenizer, ("ab",), "error", None, Failure("it broke", False))
    client = Client(engine, model_folder)
    answer = await client.post("/completion", prompt="ab")
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "it broke")
    answer = await client.post("/completion", prompt="ab", stream=True)
    *_, last, end = answer.text.split("\n\n")
    assert (json.loads(last.removeprefix("data: "))["error"]["message"], end) == ("it broke", "")
    client.engine.refusals.append(OverloadedError("full", 3.0))
    assert (await client.post("/completion", prompt="ab")).status_code == 429


async def test_names_and_keys(tokenizer: Tokenizer, model_folder: Path) -> None:
    engine = FakeEngine(tokenizer)
    client = Client(engine, model_folder, AppOptions(api_keys=("secret",)))
    for path in ("/completion", "/completions"):
        assert (await client.post(path, prompt="ab")).status_code == 401
        answer = await client.post(path, "secret", prompt="ab", model=FAKE)
        assert answer.json()["model"] == FAKE
    engine.adapters.append(Adapter("sql", 1, "", 4, Path(), None))
    answer = await client.post("/completion", "secret", prompt="ab", model="sql")
    assert answer.json()["model"] == "sql"
    assert engine.asked[-1].options.adapter == "sql"


def ids(server: RunningServer, text: str) -> list[int]:
    found: list[int] = httpx.post(f"{server.url}/tokenize", json={"content": text}).json()["tokens"]
    return found


def ask(server: RunningServer, prompt: Any, **fields: Any) -> httpx.Response:
    body = {"prompt": prompt, "temperature": 0, **fields}
    return httpx.post(f"{server.url}/completion", json=body)


def test_prompts_of_texts_and_tokens(server: RunningServer) -> None:
    tokens = ids(server, say("ab"))
    begin, middle, end = tokens[0], tokens[1:-1], tokens[-1]
    mixed = [begin, "ab", end]
    for one in (mixed, ["<|say|>a", *middle[1:], end], [mixed], [tokens], [say("ab")], tokens):
        found = told(ask(server, one))
        assert (found["content"], found["prompt"]) == ("ab", say("ab"))
    several = [say("ab"), [*ids(server, say("cd"))], [begin, "ef", end]]
    found = ask(server, several).json()
    assert [one["content"] for one in found] == ["ab", "cd", "ef"]
    assert [one["index"] for one in found] == [0, 1, 2]
    assert [one["prompt"] for one in found] == [say("ab"), say("cd"), say("ef")]
    assert [one["tokens_predicted"] for one in found] == [3, 3, 3]
    assert [one["timings"]["predicted_n"] for one in found] == [3, 3, 3]


def test_several_answers(server: RunningServer) -> None:
    for fields in ({"n_cmpl": 2}, {"n": 2}, {"n": 2, "n_cmpl": 2}):
        found = ask(server, [say("ab"), say("cde")], **fields).json()
        assert [(one["index"], one["content"]) for one in found] == [
            *((0, "ab"), (1, "ab"), (2, "cde"), (3, "cde")),
        ]
    assert told(ask(server, say("ab"), n_cmpl=1))["content"] == "ab"
    response = ask(server, [say("ab"), say("cde")], n_cmpl=2, stream=True)
    chunks = [json.loads(one[6:]) for one in response.text.split("\n\n")[:-1]]
    texts: dict[int, str] = {}
    ended: dict[int, dict[str, Any]] = {}
    for one in chunks:
        assert one["index"] not in ended
        texts[one["index"]] = texts.get(one["index"], "") + one["content"]
        if one["stop"]:
            ended[one["index"]] = one
    assert texts == {0: "ab", 1: "ab", 2: "cde", 3: "cde"}
    assert {index: one["tokens_predicted"] for index, one in ended.items()} == {
        **{0: 3, 1: 3},
        **{2: 4, 3: 4},
    }
    assert ended[2]["prompt"] == say("cde")


def test_biases_of_texts_and_of_what_must_not_come(server: RunningServer) -> None:
    z = letter("z")
    for biases in (
        [[letter("b"), False], [z, 1]],
        [["b", False], ["z", 1]],
        {"b": False, "z": 1},
        {str(letter("b")): False, str(z): 1.0},
        [["b", -100], [z, 1]],
    ):
        found = told(ask(server, say("abc"), logit_bias=biases))
        assert found["content"] == "azc", biases
    found = told(ask(server, say("abc"), logit_bias=[["zz", 5.0], ["b", False]]))
    assert found["generation_settings"]["logit_bias"] == [
        {"token": letter("b"), "bias": None},
        {"token": z, "bias": 10.0},
    ]
    everything = [[one, False] for one in range(261)]
    response = ask(server, say("abc"), logit_bias=everything)
    assert response.status_code == 400
    assert "logit_bias" in response.json()["error"]["message"]


def test_a_prompt_that_is_only_read(server: RunningServer) -> None:
    prompt = say("y" * 80)
    found = told(ask(server, prompt, n_predict=0, return_tokens=True))
    assert (found["content"], found["tokens"], found["tokens_predicted"]) == ("", [], 0)
    assert (found["stop_type"], found["timings"]["predicted_n"]) == ("limit", 0)
    assert found["generation_settings"]["n_predict"] == 0
    assert told(ask(server, prompt, n_predict=1))["tokens_cached"] > 0
    [event] = events(ask(server, prompt, n_predict=0, stream=True))
    assert event["content"] == ""


def test_lines(server: RunningServer) -> None:
    found = told(ask(server, say("a\n b\nc"), n_indent=1))
    assert (found["content"], found["stop_type"]) == ("a\n b\n", "limit")
    assert told(ask(server, say("a\nb"), t_max_predict_ms=100_000))["content"] == "a\nb"
