"""What common clients send and read: lm-eval, GuideLLM, LangChain, vLLM's load tester."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI

from onnxport.errors import RequestError
from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.http.app import AppOptions
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.tokenizer import Tokenizer

from .conftest import RunningServer
from .fake import MODEL as FAKE
from .fake import Client, FakeEngine, events
from .scripted import MODEL, say
from .test_errors import error_of

ENDPOINTS = {
    "/v1/completions": {"prompt": "ab"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "ab"}]},
    "/v1/responses": {"input": "ab"},
}
Ask = Callable[..., Client]


@pytest.fixture
def ask(model_folder: Path) -> Ask:
    """Return what makes a client of an engine with the settings that are given."""
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())

    def client(options: AppOptions | None = None, **settings: Any) -> Client:
        return Client(FakeEngine(tokenizer, **settings), model_folder, options)

    return client


# Fields of messages.


@pytest.mark.parametrize("kind", ["text", "message", None])
async def test_lm_evals_chat_has_types_in_its_messages(ask: Ask, kind: str | None) -> None:
    client = ask()
    body = {
        "messages": [{"role": "user", "content": "Question: 2+2?\nAnswer:", "type": kind}],
        "model": FAKE,
        "max_tokens": 256,
        "temperature": 0,
        "stop": ["\n\n"],
        "seed": 1234,
    }
    answer = await client.post("/v1/chat/completions", **body)
    assert answer.status_code == 200, answer.text
    del body["messages"][0]["type"]
    assert (await client.post("/v1/chat/completions", **body)).status_code == 200
    typed, plain = client.engine.asked
    assert typed.prompt == plain.prompt


@pytest.mark.parametrize("control", [{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}, {}])
async def test_cache_control_of_a_text_says_nothing(ask: Ask, control: dict[str, Any]) -> None:
    client = ask()
    part = {"type": "text", "text": "ab"}
    for one in ({**part, "cache_control": control}, {**part, "cache_control": None}, part):
        messages = [{"role": "user", "content": [one]}]
        answer = await client.post("/v1/chat/completions", model=FAKE, messages=messages)
        assert answer.status_code == 200, answer.text
    assert len({asked.prompt for asked in client.engine.asked}) == 1


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"type": "image"}, "messages.0.type"),
        ({"type": 1}, "messages.0.type"),
        ({"content": [{"type": "text", "text": "a", "cache_control": "x"}]}, "messages.0.content"),
        ({"content": [{"type": "text", "text": "a", "bold": 1}]}, "messages"),
        ({"cache_control": {"type": "ephemeral"}}, "messages.0.cache_control"),
        ({"mood": ""}, "messages.0.mood"),
    ],
)
async def test_what_messages_may_not_have(ask: Ask, message: dict[str, Any], param: str) -> None:
    given = {"role": "user", "content": "a", **message}
    answer = await ask().post("/v1/chat/completions", model=FAKE, messages=[given])
    assert error_of(answer)["param"] == param


# Fields that are null.


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_unknown_fields_that_are_null_say_nothing(ask: Ask, path: str) -> None:
    client = ask()
    body = {"model": FAKE, **ENDPOINTS[path]}
    assert (await client.post(path, **body, wholly_unknown=None)).status_code == 200
    error = error_of(await client.post(path, **body, wholly_unknown=False))
    assert (error["param"], error["code"]) == ("wholly_unknown", "unknown_parameter")


async def test_also_in_what_a_field_holds(ask: Ask) -> None:
    client = ask()
    function = {"name": "f", "parameters": {"type": "object"}, "x": None}
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "x": None}], "x": None}
        ],
        "tools": [{"type": "function", "function": function, "x": None}],
        "response_format": {"type": "text", "x": None},
        "stream": True,
        "stream_options": {"include_usage": True, "x": None},
    }
    answer = await client.post("/v1/chat/completions", model=FAKE, **body)
    assert answer.status_code == 200, answer.text
    form = {"name": "a", "schema": {"type": "object"}, "content": None}
    body = {**ENDPOINTS["/v1/chat/completions"], "model": FAKE}
    asked = {"type": "json_schema", "json_schema": form}
    answer = await client.post("/v1/chat/completions", **body, response_format=asked)
    assert answer.status_code == 200, answer.text
    function["x"] = 1
    tools = [{"type": "function", "function": function}]
    error = error_of(await client.post("/v1/chat/completions", **body, tools=tools))
    assert error["param"] == "tools.0.function.x"


async def test_of_the_further_endpoints(ask: Ask) -> None:
    client = ask(AppOptions(allow_runtime_lora=True))
    assert (await client.post("/tokenize", prompt="a", x=None)).status_code == 200
    error_of(await client.post("/tokenize", prompt="a", x=0))
    body = {"lora_name": "a", "lora_path": "/nowhere"}
    assert (await client.post("/v1/load_lora_adapter", **body, x=None)).status_code == 200
    error_of(await client.post("/v1/load_lora_adapter", **body, x=0))


# The names of the model.


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_request_without_a_model_means_the_servers_own(ask: Ask, path: str) -> None:
    client = ask()
    for fields in ({}, {"model": None}, {"model": ""}):
        answer = await client.post(path, **ENDPOINTS[path], **fields)
        assert (answer.status_code, answer.json()["model"]) == (200, FAKE)
    assert {asked.options.adapter for asked in client.engine.asked} == {None}
    for missing in ("/tokenize", "/detokenize"):
        body = {"prompt": "a"} if missing == "/tokenize" else {"tokens": [5]}
        assert (await client.post(missing, **body, model=None)).status_code == 200


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_several_names_of_one_model(ask: Ask, path: str) -> None:
    client = ask(AppOptions(aliases=("second", "org/third")))
    for name in (FAKE, "second", "org/third"):
        answer = await client.post(path, **ENDPOINTS[path], model=name)
        assert (answer.status_code, answer.json()["model"]) == (200, FAKE)
        streamed = await client.post(path, **ENDPOINTS[path], model=name, stream=True)
        assert f'"model":"{FAKE}"' in streamed.text
    message = error_of(await client.post(path, **ENDPOINTS[path], model="fourth"), 404)["message"]
    assert message.endswith(f"this server has '{FAKE}', 'second', 'org/third'")


async def test_all_names_are_listed_and_taken(ask: Ask) -> None:
    options = AppOptions(aliases=("second", "org/third"), allow_runtime_lora=True)
    own = Adapter("own", 1, "", 4, Path("/own"), None)
    client = ask(options, adapters=[own])
    listed = (await client.get("/v1/models")).json()["data"]
    told = [(one["id"], one["root"], one["parent"]) for one in listed]
    assert told == [
        (FAKE, FAKE, None),
        ("second", FAKE, None),
        ("org/third", FAKE, None),
        ("own", "/own", FAKE),
    ]
    for model in listed:
        assert (await client.get(f"/v1/models/{model['id']}")).json() == model
    assert (await client.get("/v1/models/")).json() == listed[0]
    body = {"lora_name": "second", "lora_path": "/nowhere"}
    assert error_of(await client.post("/v1/load_lora_adapter", **body))["param"] == "lora_name"
    assert (await client.complete(model="own")).json()["model"] == "own"
    assert (await client.get("/health")).json()["model"] == FAKE
    assert 'model_name="fake"' in (await client.get("/metrics")).text


@pytest.mark.parametrize("aliases", [(FAKE,), ("a", "a"), ("",)])
def test_names_that_cannot_be(ask: Ask, aliases: tuple[str, ...]) -> None:
    with pytest.raises(RequestError, match="each once"):
        ask(AppOptions(aliases=aliases))


# Usage in every chunk.

CONTINUOUS = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def counts(chunk: dict[str, Any]) -> tuple[int, int, int]:
    usage = chunk["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


async def test_every_chunk_of_a_completion_tells_the_usage_so_far(ask: Ask) -> None:
    client = ask(answers=("long", "b"))
    *chunks, last = events(await client.complete("abc", n=2, **CONTINUOUS))
    assert [counts(one)[1] for one in chunks] == [1, 2, 3, 3, 4, 5, 5]  # ends have no token
    for one in chunks:
        assert set(one["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}
        assert counts(one) == (3, counts(one)[1], 3 + counts(one)[1])
        assert one["choices"]
    assert (last["choices"], counts(last)) == ([], (3, 5, 8))
    assert "prompt_tokens_details" in last["usage"]


async def test_every_chunk_of_a_chat_tells_the_usage_so_far(ask: Ask) -> None:
    client = ask(answers=("long",))
    *chunks, last = events(await client.chat(**CONTINUOUS))
    given = len(client.engine.asked[0].prompt)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [counts(one) for one in chunks] == [
        (given, told, given + told) for told in (0, 1, 2, 3, 4, 4)
    ]
    assert (last["choices"], counts(last)) == ([], (given, 4, given + 4))


async def test_text_that_was_kept_back_counts_when_it_is_told(ask: Ask) -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    tool = {"type": "function", "function": {"name": "f"}}
    *chunks, last = events(await ask(answers=(call,)).chat(tools=[tool], **CONTINUOUS))
    assert [counts(one)[1] for one in chunks] == [0, len(call), len(call)]
    assert counts(last)[1] == len(call)


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, {"include_usage": False}])
async def test_chunks_without_it(ask: Ask, options: dict[str, Any]) -> None:
    client = ask()
    more = {"continuous_usage_stats": False}
    for stream_options in (options, options | more):
        for found in (
            await client.complete(stream=True, stream_options=stream_options),
            await client.chat(stream=True, stream_options=stream_options),
        ):
            *chunks, last = events(found)
            asked = bool(options.get("include_usage"))
            assert bool(last.get("usage")) == asked
            assert all(("usage" in one) == asked and not one.get("usage") for one in chunks)


def test_the_openai_client_reads_usage_of_every_chunk(server: RunningServer) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        chunks = list(client.completions.create(model=MODEL, prompt=say("abc"), **CONTINUOUS))
    found = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert len(found) == len(chunks)
    assert found == sorted(found)
    assert found[-1] == 4
    assert not chunks[-1].choices


# Tokens by their ids.


class Doubtful(FakeEngine):
    """Also says what else it thought of."""

    async def _stream(self, *given: Any) -> AsyncGenerator[CompletionDelta, None]:
        async for delta in super()._stream(*given):
            for entries in delta.logprobs or ():
                [entry] = entries.values()
                entries[7] = type(entry)(-3.0, 2, "")
            yield delta


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_of_log_probabilities_by_their_ids(model_folder: Path, stream: bool) -> None:
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())
    client = Client(Doubtful(tokenizer), model_folder)
    how: dict[str, Any] = {"return_tokens_as_token_ids": True, "stream": stream}
    found = await client.complete(logprobs=2, **how)
    parts = events(found) if stream else [found.json()]
    lists = [one["choices"][0]["logprobs"] for one in parts]
    names = [name for one in lists for name in one["tokens"]]
    assert names == [f"token_id:{ord(one)}" for one in "ok"]
    assert [list(top) for one in lists for top in one["top_logprobs"]] == [
        [name, "token_id:7"] for name in names
    ]
    assert [at for one in lists for at in one["text_offset"]] == [0, 1]

    found = await client.chat(logprobs=True, top_logprobs=2, **how)
    parts = events(found) if stream else [found.json()]
    given = [part["choices"][0]["logprobs"] for part in parts]
    tokens = [one for each in given if each for one in each["content"]]
    assert [one["token"] for one in tokens] == names
    assert [[top["token"] for top in one["top_logprobs"]] for one in tokens] == [
        [name, "token_id:7"] for name in names
    ]
    assert [bytes(one["bytes"]) for one in tokens] == [
        tokenizer.token_bytes(ord(one)) for one in "ok"
    ]


async def test_otherwise_by_their_texts(ask: Ask) -> None:
    for how in ({}, {"return_tokens_as_token_ids": False}, {"return_tokens_as_token_ids": None}):
        done = (await ask().complete(logprobs=0, **how)).json()
        assert done["choices"][0]["logprobs"]["tokens"] == ["o", "k"]
    without = await ask().complete(return_tokens_as_token_ids=True)
    assert without.json()["choices"][0]["logprobs"] is None


def test_tokens_of_a_prompt_by_their_ids(server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": [65, 66], "max_tokens": 0, "echo": True, "logprobs": 1}
    done = httpx.post(
        f"{server.url}/v1/completions", json=body | {"return_tokens_as_token_ids": True}
    ).json()
    logprobs = done["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:65", "token_id:66"]
    assert all(name.startswith("token_id:") for name in logprobs["top_logprobs"][1])


# Summaries of reasoning.


@pytest.mark.parametrize("reasoning", [{"summary": "auto"}, {"generate_summary": "auto"}])
async def test_a_summary_where_there_is_one(ask: Ask, reasoning: dict[str, Any]) -> None:
    done = (await ask().post("/v1/responses", model=FAKE, input="a", reasoning=reasoning)).json()
    assert done["status"] == "completed"
    assert done["reasoning"] == {"effort": None, "summary": None}


@pytest.mark.parametrize("name", ["summary", "generate_summary"])
@pytest.mark.parametrize("value", ["concise", "detailed", "", True, ["auto"]])
async def test_a_summary_that_has_to_be(ask: Ask, name: str, value: Any) -> None:
    body = {"model": FAKE, "input": "a", "reasoning": {name: value}}
    error = error_of(await ask().post("/v1/responses", **body))
    assert error["param"] == f"reasoning.{name}"
    assert f"reasoning.{name} is {value!r}, and there is nothing here" in error["message"]
