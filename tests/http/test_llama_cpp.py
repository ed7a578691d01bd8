"""Fields of llama.cpp's server on both endpoints: names, samplers, timings, forms."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import OpenAI

from onnxport.errors import RequestError
from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.http.app import AppOptions
from onnxport.serving.http.job import Job, Usage
from onnxport.serving.http.llama_cpp import OFF, SAMPLERS, with_samplers
from onnxport.serving.http.timings import Span
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.slow_sampling import probabilities

from .conftest import RunningServer
from .fake import Client, FakeEngine, events
from .scripted import MODEL, say

pytestmark = pytest.mark.timeout(60)
Sent = Callable[..., Any]
DEFAULT_ORDER = [  # of llama.cpp
    *("penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc"),
    "temperature",
]


class Asking:
    """Sends requests to one endpoint of an application with an engine that answers anything."""

    def __init__(self, folder: Path, *, is_chat: bool, options: AppOptions | None = None) -> None:
        self.engine = FakeEngine(Tokenizer.from_folder(folder, frozenset()))
        self.is_chat = is_chat
        self._client = Client(self.engine, folder, options)

    async def send(self, **fields: Any) -> httpx.Response:
        return await (self._client.chat if self.is_chat else self._client.complete)(**fields)

    async def params(self, **fields: Any) -> SamplingParams:
        """What the engine was asked for."""
        response = await self.send(**fields)
        assert response.status_code == 200, response.text
        return self.engine.asked[-1].params

    async def refusal(self, **fields: Any) -> tuple[str, str]:
        """The field that is to blame, and the message."""
        response = await self.send(**fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        return error["param"], error["message"]


@pytest.fixture(params=[False, True], ids=["completions", "chat"])
def asking(request: pytest.FixtureRequest, model_folder: Path) -> Asking:
    return Asking(model_folder, is_chat=request.param)


@pytest.mark.asyncio
async def test_what_is_sampled_by_the_same_names(asking: Asking) -> None:
    fields = {
        **{"dynatemp_range": 0.5, "dynatemp_exponent": 2.0, "mirostat": 2, "mirostat_tau": 4.0},
        **{"mirostat_eta": 0.2, "repeat_last_n": 128, "max_tokens": 9},
        **{"adaptive_target": 0.4, "adaptive_decay": 0.7},
    }
    assert await asking.params(**fields) == SamplingParams(**fields)
    nothing = dict.fromkeys(fields) | {"max_tokens": 9}
    assert await asking.params(**nothing) == SamplingParams(max_tokens=9)


@pytest.mark.asyncio
async def test_how_many_tokens(asking: Asking) -> None:
    assert (await asking.params(n_predict=7)).max_tokens == 7
    assert (await asking.params(n_predict=7, max_tokens=7)).max_tokens == 7
    assert (await asking.params(n_predict=-1)).max_tokens is None
    limit = None if asking.is_chat else 16
    assert (await asking.params(n_predict=None)).max_tokens == limit
    for fields in (
        *({"n_predict": 0}, {"n_predict": -2}, {"n_predict": "7"}, {"n_predict": 1.5}),
        *({"n_predict": 7, "max_tokens": 8}, {"n_predict": -1, "max_tokens": 8}),
    ):
        param, message = await asking.refusal(**fields)
        assert param == "n_predict"
        assert "n_predict" in message


@pytest.mark.asyncio
async def test_no_limit_and_a_limit_of_a_chat(model_folder: Path) -> None:
    chat = Asking(model_folder, is_chat=True)
    param, _ = await chat.refusal(n_predict=-1, max_completion_tokens=5)
    assert param == "n_predict"
    param, _ = await chat.refusal(n_predict=4, max_completion_tokens=5)
    assert param == "max_completion_tokens"
    assert (await chat.params(n_predict=5, max_completion_tokens=5)).max_tokens == 5


@pytest.mark.asyncio
async def test_how_many_probabilities(asking: Asking) -> None:
    assert (await asking.params(n_probs=0)).logprobs is None
    assert (await asking.params(n_probs=3)).logprobs == 3
    same: dict[str, Any] = {"logprobs": True, "top_logprobs": 3} if asking.is_chat else {}
    same = same or {"logprobs": 3}
    assert (await asking.params(n_probs=3, **same)).logprobs == 3
    other = {"logprobs": False} if asking.is_chat else {"logprobs": 4}
    for fields in ({"n_probs": 3, **other}, {"n_probs": -1}, {"n_probs": "3"}, {"n_probs": 21}):
        param, message = await asking.refusal(**fields)
        assert param == "n_probs", message


@pytest.mark.asyncio
async def test_the_window_of_penalties(asking: Asking) -> None:
    """That of llama.cpp where its own penalty is given, and changes something."""
    params = await asking.params(repeat_penalty=1.2, frequency_penalty=0.5)
    assert (params.repetition_penalty, params.repeat_last_n) == (1.2, 64)
    params = await asking.params(repeat_penalty=1.2, repeat_last_n=-1)
    assert (params.repetition_penalty, params.repeat_last_n) == (1.2, -1)
    params = await asking.params(repeat_penalty=1.2, penalty_last_n=9)
    assert (params.repetition_penalty, params.repeat_last_n) == (1.2, 9)
    params = await asking.params(repetition_penalty=1.2, repeat_penalty=1.2, repeat_last_n=0)
    assert (params.repetition_penalty, params.repeat_last_n) == (1.2, 0)
    for neutral in (1, 1.0):
        params = await asking.params(repeat_penalty=neutral, frequency_penalty=0.5)
        assert (params.repetition_penalty, params.repeat_last_n) == (1.0, None)
    params = await asking.params(repetition_penalty=1.2)
    assert (params.repetition_penalty, params.repeat_last_n) == (1.2, None)
    for name, fields in (
        ("repeat_penalty", {"repeat_penalty": 1.2, "repetition_penalty": 1.3}),
        ("repeat_penalty", {"repeat_penalty": 200}),
        ("repeat_penalty", {"repeat_penalty": "1.2"}),
        ("repeat_penalty", {"repeat_penalty": True}),
        ("penalty_last_n", {"penalty_last_n": "5"}),
        ("penalty_last_n", {"penalty_last_n": 5, "repeat_last_n": 6}),
        ("penalty_last_n", {"penalty_last_n": -5}),
        ("repeat_last_n", {"repeat_last_n": -5}),
    ):
        param, message = await asking.refusal(**fields)
        assert param == name, message
        assert name in message


@pytest.mark.asyncio
async def test_a_model_s_own_penalty_is_counted_as_told(model_folder: Path) -> None:
    options = AppOptions(defaults=SamplingDefaults(repetition_penalty=1.1, top_k=20))
    asking = Asking(model_folder, is_chat=True, options=options)
    params = await asking.params(repeat_last_n=32)
    assert (params.repetition_penalty, params.repeat_last_n) == (1.1, 32)
    assert (await asking.params(repeat_penalty=1)).repetition_penalty == 1
    params = await asking.params(samplers=["temperature", "top_p"])
    assert (params.repetition_penalty, params.top_k) == (1.0, None)
    params = await asking.params(samplers=["penalties", "temperature", "top_k"])
    assert (params.repetition_penalty, params.top_k) == (1.1, 20)


@pytest.mark.asyncio
async def test_caches_slots_and_adapters(asking: Asking) -> None:
    assert not (await asking.params(cache_prompt=True)).skip_reading_prefix_cache
    assert (await asking.params(cache_prompt=False)).skip_reading_prefix_cache
    more = {"cache_prompt": False, "skip_reading_prefix_cache": False}
    assert (await asking.refusal(**more))[0] == "cache_prompt"
    for slot in (-1, 0, 5):
        await asking.params(id_slot=slot)
    for slot in (-2, "a", True):
        assert (await asking.refusal(id_slot=slot))[0] == "id_slot"
    for adapters in ([], [{"id": 0, "scale": 0.0}, {"id": 1, "scale": 0}]):
        await asking.params(lora=adapters)
    for adapters in ([{"id": 0, "scale": 1.0}], [{"id": 0}], [{}], ["a"], "a"):
        param, message = await asking.refusal(lora=adapters)
        assert param is not None
        assert param.startswith("lora")
        assert adapters in ("a", ["a"]) or "lora" in message
    assert "GET /lora-adapters" in (await asking.refusal(lora=[{"id": 3, "scale": 0.5}]))[1]


@pytest.mark.asyncio
async def test_values_that_change_nothing_and_what_to_do_instead(asking: Asking) -> None:
    await asking.params(
        **{"min_keep": 1, "t_max_predict_ms": 0, "verbose": False, "return_tokens": False},
        **{"post_sampling_probs": False, "timings_per_token": False, "grammar": ""},
    )
    for name, value, advice in (
        ("min_keep", 2, "top_k"),
        ("t_max_predict_ms", 100, "timeout_s"),
        ("verbose", True, "apply-template"),
        ("return_tokens", True, "return_token_ids"),
        ("post_sampling_probs", True, "processed_logprobs"),
    ):
        param, message = await asking.refusal(**{name: value})
        assert param == name
        assert advice in message


@pytest.mark.asyncio
async def test_forms(asking: Asking) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = (await asking.params(json_schema=schema)).structured_outputs
    assert form is not None
    assert (form.kind, form.where) == ("json", "json_schema")
    form = (await asking.params(grammar='root ::= "a" | "b"')).structured_outputs
    assert form is not None
    assert (form.kind, form.where) == ("grammar", "grammar")
    assert (await asking.params(grammar="")).structured_outputs is None
    for name, fields in (
        ("grammar", {"grammar": 'start: "a"'}),
        ("grammar", {"grammar": " "}),
        ("grammar", {"grammar": 'root ::= "a"', "json_schema": schema}),
        ("json_schema", {"json_schema": {"type": "object", "not": {"type": "null"}}}),
        ("json_schema", {"json_schema": "{}"}),
        ("json_schema", {"json_schema": schema, "guided_regex": "a"}),
    ):
        param, message = await asking.refusal(**fields)
        assert param == name, message


@pytest.mark.asyncio
async def test_samplers(asking: Asking) -> None:
    await asking.params(samplers=DEFAULT_ORDER)
    await asking.params(samplers="edskypmxt", temperature=1.0)
    await asking.params(samplers=[*SAMPLERS], temperature=0.5, top_p=0.9, min_p=0.1)
    param, message = await asking.refusal(samplers=DEFAULT_ORDER, temperature=0.5, top_p=0.9)
    assert (param, "top_p before temperature" in message) == ("samplers", True)
    for wrong in (["tfs_z"], ["top_k", "top-k"], "kq", [1], 5, ["top_k"] * 200):
        assert (await asking.refusal(samplers=wrong))[0].startswith("samplers")


ACTIVE: dict[str, dict[str, Any]] = {
    "top_n_sigma": {"top_n_sigma": 1.2},
    "min_p": {"min_p": 0.15},
    "top_k": {"top_k": 4},
    "typical_p": {"typical_p": 0.7},
    "top_p": {"top_p": 0.7},
    "temperature": {"temperature": 1.9},
}


def left_in_order(logits: np.ndarray[Any, Any], order: tuple[str, ...]) -> dict[int, float]:
    """What is left where each sampler is applied by itself, one after the other."""
    values = [float(one) for one in logits]
    chances: dict[int, float] = {}
    for name in order:
        if name == "temperature":
            values = [one / 1.9 for one in values]
            chances = probabilities(values, SamplingParams())
            continue
        chances = probabilities(values, SamplingParams(**ACTIVE[name]))
        values = [one if place in chances else -math.inf for place, one in enumerate(values)]
    return chances


@pytest.mark.parametrize("names", [*permutations(ACTIVE, 2), ("top_k", "min_p", "temperature")])
def test_an_order_that_is_accepted_draws_what_ours_does(names: tuple[str, ...]) -> None:
    """And one that is refused draws something else for some logits."""
    given = {key: value for name in names for key, value in ACTIVE[name].items()}
    ours = tuple(sorted(names, key=SAMPLERS.index))
    rng = np.random.default_rng(3)
    differs = False
    for _ in range(300):
        logits = rng.normal(0, rng.choice([0.5, 1.5, 3]), 12)
        mine, its = left_in_order(logits, ours), left_in_order(logits, names)
        differs |= mine.keys() != its.keys()
    is_refused = False
    try:
        with_samplers([*names], SamplingParams(**given))
    except RequestError:
        is_refused = True
    assert is_refused == differs


@pytest.mark.parametrize(
    ("given", "samplers", "is_right"),
    [
        ({}, [], True),
        ({"temperature": 0.5}, ["temperature"], True),
        ({"temperature": 0.5}, ["temp"], True),
        ({"dynatemp_range": 0.5, "top_k": 3}, ["top_k", "temperature"], False),
        ({"dynatemp_range": 0.5, "top_k": 3}, ["temperature", "top_k"], True),
        ({"temperature": 0.0, "top_p": 0.5, "top_k": 3}, ["top_p", "temperature", "top_k"], True),
        ({"temperature": 0.0, "typical_p": 0.5}, ["typ_p", "temperature"], False),
        (
            {"presence_penalty": 1.0, "dry_multiplier": 1.0, "repetition_penalty": 1.0},
            ["penalties", "dry"],
            True,
        ),
        ({"repetition_penalty": 1.1, "dry_multiplier": 1.0}, ["penalties", "dry"], False),
        ({"repetition_penalty": 1.1, "dry_multiplier": 1.0}, ["dry", "penalties"], True),
        ({"mirostat": 2, "top_p": 0.5, "temperature": 0.5}, ["top_p", "temperature"], True),
        ({"top_k": 5, "top_p": 0.9}, ["top_k", "top_p", "infill"], True),
        ({"top_k": 5, "top_p": 0.9}, ["top_k", "infill", "top_p"], False),
        ({"top_k": 5}, ["infill", "top_p", "top_k"], False),
        ({"temperature": 0.0}, ["infill", "temperature"], True),
        ({"adaptive_target": 0.5, "top_k": 5}, ["adaptive_p", "top_k"], True),
        ({"adaptive_target": 0.5, "top_k": 5}, ["infill", "adaptive-p", "top_k"], False),
    ],
)
def test_which_orders_are_ours(
    given: dict[str, float], samplers: list[str], is_right: bool
) -> None:
    params = SamplingParams(**given)  # type: ignore[arg-type]
    if is_right:
        found = with_samplers(samplers, params)
        assert {name: getattr(found, name) for name in given} == given
        assert found.infill == ("infill" in samplers)
        return
    with pytest.raises(RequestError, match="order is dry, penalties, temperature"):
        with_samplers(samplers, params)


EVERYTHING = SamplingParams(
    **{"dry_multiplier": 1.0, "repetition_penalty": 1.1, "presence_penalty": 0.5},
    **{"frequency_penalty": 0.25, "temperature": 0.5, "dynatemp_range": 0.1, "top_n_sigma": 2.0},
    **{"min_p": 0.1, "top_k": 5, "typical_p": 0.9, "top_p": 0.8, "xtc_probability": 0.5},
    adaptive_target=0.5,
)


def test_what_a_list_leaves_out_is_not_applied() -> None:
    assert with_samplers([*SAMPLERS, "adaptive_p"], EVERYTHING) == EVERYTHING
    assert with_samplers("adetsmkypx", EVERYTHING) == EVERYTHING
    assert with_samplers(SAMPLERS, EVERYTHING) == replace(EVERYTHING, adaptive_target=None)
    assert with_samplers([], EVERYTHING) == SamplingParams()
    assert with_samplers("", EVERYTHING) == SamplingParams()
    for name in OFF:
        alone = with_samplers([name], EVERYTHING)
        kept = {field for field in OFF[name] if getattr(alone, field) != OFF[name][field]}
        assert kept == {*OFF[name]}
        others = (field for other in OFF if other != name for field in OFF[other].items())
        assert all(getattr(alone, field) == value for field, value in others)
    surprising = replace(EVERYTHING, mirostat=2)
    wanted = {**OFF["dry"], **OFF["penalties"]}
    assert with_samplers(["top_k", "infill"], surprising) == replace(surprising, **wanted)


def delta(*times: float) -> CompletionDelta:
    given = (times[0], times[1], times[2]) if times else None
    return CompletionDelta("r", 0, "", (), None, None, times=given)


def test_times_of_several_sequences() -> None:
    span = Span()
    nothing = span.body(5, 0, 0, 0)
    assert nothing["prompt_n"] == 5
    assert {*nothing.values()} == {0, 5}
    for one in (delta(), delta(10.0, 12.0, 12.0), delta(11.0, 13.0, 15.0), delta(10.0, 12.0, 14.0)):
        span.add(one)
    assert span.body(50, 20, 8, 3) == {
        "cache_n": 20,
        "prompt_n": 30,
        "prompt_ms": 3000.0,
        "prompt_per_token_ms": 100.0,
        "prompt_per_second": 10.0,
        "predicted_n": 8,
        "predicted_ms": 2000.0,
        "predicted_per_token_ms": 400.0,
        "predicted_per_second": 2.5,
    }
    alone = span.body(50, 20, 3, 3)  # each came with its prompt
    assert (alone["predicted_per_token_ms"], alone["predicted_per_second"]) == (0.0, 0.0)
    all_cached = span.body(50, 50, 1, 1)
    assert (all_cached["prompt_n"], all_cached["prompt_per_token_ms"]) == (0, 0.0)


def test_guesses_are_told_with_times() -> None:
    usage = Usage(Job([[1, 2], [3]], SamplingParams(n=2), RequestOptions(), "a"))
    for choice, drafts in ((0, None), (0, (4, 1)), (3, (2, 2)), (0, (9, 3)), (1, None)):
        usage.add(choice, CompletionDelta("a", choice, "", (1,), None, None, drafts=drafts))
        is_told = usage.timings().keys() >= {"draft_n", "draft_n_accepted"}
        assert is_told == bool(usage.drafts)
    assert (usage.timings()["draft_n"], usage.timings()["draft_n_accepted"]) == (11, 5)


@pytest.mark.asyncio
async def test_timings_are_told_where_they_are_asked_for(asking: Asking) -> None:
    assert "timings" not in (await asking.send()).json()
    assert "timings" not in (await asking.send(timings_per_token=False)).json()
    assert (await asking.send(timings_per_token=True)).json()["timings"]["predicted_n"] == 2
    usage = {"include_usage": True}
    response = await asking.send(timings_per_token=True, stream=True, stream_options=usage)
    chunks = events(response)
    found = [chunk["timings"]["predicted_n"] for chunk in chunks]
    assert found == sorted(found)
    assert (found[0] < 2, found[-1]) == (True, 2)
    assert chunks[-1]["usage"]["completion_tokens"] == 2
    for chunk in events(await asking.send(stream=True)):
        assert "timings" not in chunk


@pytest.fixture(params=[False, True], ids=["completions", "chat"])
def ask(request: pytest.FixtureRequest, server: RunningServer) -> Any:
    """A function that asks a running server, and returns text and timings of the answer."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:

        def complete(text: str, **more: Any) -> tuple[str, dict[str, Any]]:
            common: Any = {"model": MODEL, "temperature": 0, "extra_body": more}
            if request.param:
                messages: Any = [{"role": "user", "content": say(text)}]
                chat = client.chat.completions.create(messages=messages, **common)
                return chat.choices[0].message.content or "", (chat.model_extra or {})
            done = client.completions.create(prompt=say(text), **common)
            return done.choices[0].text, (done.model_extra or {})

        yield complete


def test_a_running_server(ask: Sent) -> None:
    """The scripted model gives its next token 20 and all others 0."""
    text, more = ask("abcdef", n_predict=4, timings_per_token=True)
    assert text == "abcd"
    timings = more["timings"]
    assert timings["predicted_n"] == 4
    assert timings["prompt_n"] + timings["cache_n"] > 4
    assert timings["prompt_ms"] > 0.0
    assert timings["predicted_per_second"] >= 0.0
    assert ask("abab", n_predict=-1)[0] == "abab"
    assert ask("abc", grammar='root ::= "a" [x-z] "c"')[0][::2] == "ac"
    assert ask("abc", json_schema={"const": "q"})[0] == '"q"'
    sure = {"mirostat": 2, "mirostat_tau": 1.0, "temperature": 1.0, "seed": 3}
    assert ask("abcdef", **sure)[0] == "abcdef"
    wild = {"dynatemp_range": 60.0, "temperature": 60.0, "dynatemp_exponent": 0.0, "seed": 1}
    assert ask("abcdef", n_predict=6, **wild)[0] != "abcdef"
    near = {"adaptive_target": 1.0, "temperature": 1.0, "seed": 3}  # it is sure of these
    assert ask("abcdef", n_predict=6, **near)[0] == "abcdef"
    far = {"adaptive_target": 0.0, "temperature": 1.0, "seed": 3}
    assert ask("abcdef", n_predict=6, **far)[0] != "abcdef"
    left_out = far | {"samplers": ["temperature"]}
    assert ask("abcdef", n_predict=6, **left_out)[0] == "abcdef"
    steady = wild | {"dynatemp_exponent": 100.0, "temperature": 60.0}
    assert ask("abcdef", n_predict=6, **steady)[0] == "abcdef"


def test_a_window_forgets_what_is_behind_it(ask: Sent) -> None:
    """Every token is penalized that is in it, of the prompt and of the answer."""
    bias = {str(ord("z") - ord("!")): 15}
    more = {"repeat_penalty": 1.5, "logit_bias": bias, "n_predict": 3}
    assert ask("abc", **more)[0].startswith("z")
    text, _ = ask("abc", **more, repeat_last_n=1)
    assert text == "abc"
