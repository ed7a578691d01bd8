"""`/v1/responses`, with the openai client and with plain HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from onnxport.errors import RequestError
from onnxport.serving.http.app import AppOptions
from onnxport.serving.outputs import CompletionDelta, Failure, Logprob
from onnxport.serving.params import SamplingParams
from onnxport.serving.tokenizer import Tokenizer

from .conftest import RunningServer
from .fake import MODEL as FAKE
from .fake import Client, FakeEngine
from .scripted import MODEL, say

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Tell the weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NAMED = {"type": "json_schema", "name": "a"}
UNENFORCED = {"type": "object", "$ref": "http://x"}
GIVEN = {"type": "function_call", "call_id": "call_1", "name": "weather"}
PART = {"type": "input_text", "text": "a"}
USER = {"role": "user", "content": "a"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOGPROBS = ["message.output_text.logprobs"]


@pytest.fixture
def client(server: RunningServer) -> Any:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(model_folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(model_folder, frozenset())


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream; each is named by its type, and they are numbered."""
    *blocks, end = text.split("\n\n")
    assert end == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
        EVENT.validate_python(found[-1])
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def told(body: dict[str, Any]) -> Any:
    """Return a response without what differs from one to the next."""
    if isinstance(body, dict):
        changing = ("id", "call_id", "created_at", "completed_at")
        return {name: told(one) for name, one in body.items() if name not in changing}
    return [told(one) for one in body] if isinstance(body, list) else body


def test_a_text(client: OpenAI) -> None:
    done = client.responses.create(model=MODEL, input=say("Grüße 你好 🙂"), metadata={"a": "b"})
    assert done.object == "response"
    assert done.id.startswith("resp_")
    assert done.output_text == "Grüße 你好 🙂"
    assert done.status == "completed"
    assert (done.error, done.incomplete_details) == (None, None)
    assert done.metadata == {"a": "b"}
    [message] = done.output
    assert message.type == "message"
    assert (message.role, message.status) == ("assistant", "completed")
    assert done.usage is not None
    assert done.usage.output_tokens == len("Grüße 你好 🙂".encode()) + 1
    assert done.usage.total_tokens == done.usage.input_tokens + done.usage.output_tokens


def test_a_text_that_is_cut(client: OpenAI) -> None:
    done = client.responses.create(model=MODEL, input=say("x" * 50), max_output_tokens=5)
    assert done.output_text == "xxxxx"
    assert done.status == "incomplete"
    assert done.incomplete_details is not None
    assert done.incomplete_details.reason == "max_output_tokens"
    assert done.output[0].status == "incomplete"  # type: ignore[union-attr]


def test_no_text_is_a_message_all_the_same(client: OpenAI) -> None:
    done = client.responses.create(model=MODEL, input=say(""))
    assert (done.output_text, len(done.output)) == ("", 1)


def test_the_stream_is_openais(server: RunningServer) -> None:
    ask = {"model": MODEL, "input": say("aé"), "stream": True}
    response = httpx.post(f"{server.url}/v1/responses", json=ask)
    assert response.headers["content-type"].startswith("text/event-stream")
    found = events(response.text)
    assert [one["type"].removeprefix("response.") for one in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [one["delta"] for one in found if "delta" in one] == ["a", "é"]
    assert found[0]["response"]["status"] == "in_progress"
    del ask["stream"]
    whole = httpx.post(f"{server.url}/v1/responses", json=ask).json()
    last = found[-1]["response"]
    assert told(last) == told({**whole, "usage": last["usage"]})
    assert last["id"] == found[0]["response"]["id"]


def test_timings_are_told_where_they_are_asked_for(server: RunningServer) -> None:
    ask: dict[str, Any] = {"model": MODEL, "input": say("abc"), "timings_per_token": True}
    whole = httpx.post(f"{server.url}/v1/responses", json=ask).json()
    assert whole["timings"]["predicted_n"] == whole["usage"]["output_tokens"]
    found = events(httpx.post(f"{server.url}/v1/responses", json={**ask, "stream": True}).text)
    told = [one["timings"]["predicted_n"] for one in found if "timings" in one]
    assert (told[0], told[-1]) == (1, whole["timings"]["predicted_n"])
    assert len(told) == len({*told})  # with the last event of a step alone
    assert found[-1]["response"]["timings"] == found[-1]["timings"]
    for untold in (False, None):
        answer = httpx.post(f"{server.url}/v1/responses", json={**ask, "timings_per_token": untold})
        assert "timings" not in answer.json()


def test_calls_of_functions(client: OpenAI, server: RunningServer) -> None:
    ask: dict[str, Any] = {"model": MODEL, "input": say(f"Let me see.\n{CALL}\n{CALL}")}
    done = client.responses.create(**ask, tools=[TOOL])
    kinds = [item.type for item in done.output]
    assert kinds == ["message", "function_call", "function_call"]
    assert done.output_text == "Let me see."
    call = done.output[1]
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    body = {**ask, "tools": [TOOL], "stream": True, "include": LOGPROBS, "top_logprobs": 1}
    assert events(httpx.post(f"{server.url}/v1/responses", json=body).text)
    with client.responses.stream(**ask, tools=[TOOL]) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert kinds.count("response.function_call_arguments.done") == 2
    assert [item.type for item in streamed.output] == [item.type for item in done.output]
    assert streamed.output_text == done.output_text
    assert done.tools[0].type == "function"


def test_text_that_comes_with_the_end_of_a_call_stays_behind_it(server: RunningServer) -> None:
    # The end of the call may be the start of the stop string, so it comes with the "b".
    ask = {"model": MODEL, "input": say(f"a{CALL}b"), "tools": [TOOL], "stop": "</tool_call>x"}
    whole = httpx.post(f"{server.url}/v1/responses", json=ask).json()
    assert [item["type"] for item in whole["output"]] == ["message", "function_call", "message"]
    assert [item["content"][0]["text"] for item in whole["output"][::2]] == ["a", "b"]
    found = events(httpx.post(f"{server.url}/v1/responses", json={**ask, "stream": True}).text)
    done = [one["item"] for one in found if one["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["message", "function_call", "message"]
    listed = httpx.post(f"{server.url}/v1/responses", json={**ask, "include": LOGPROBS}).json()
    assert listed["output"][2]["content"][0]["logprobs"][0]["token"] == "b"


async def test_what_it_gave_can_be_sent_back(
    server: RunningServer, tokenizer: Tokenizer, model_folder: Path
) -> None:
    """As agents do it: the output, then what the functions gave, is the next input's end."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        first = await client.responses.create(
            model=MODEL, input=say(f"Let me see.\n{CALL}"), tools=[TOOL]
        )
    call = first.output[1]
    assert call.type == "function_call"
    for dumped in (
        [item.model_dump() for item in first.output],
        [item.model_dump(exclude_none=True) for item in first.output],
    ):
        given = [
            {"role": "user", "content": [{"type": "input_text", "text": "How is it?"}]},
            *dumped,
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ]
        engine = FakeEngine(tokenizer)
        fake = Client(engine, model_folder)
        ask = {"model": FAKE, "tools": [TOOL], "instructions": "Be brief."}
        assert (await fake.post("/v1/responses", input=given, **ask)).status_code == 200
        function = {"name": "weather", "arguments": call.arguments}
        calls = [{"id": call.call_id, "type": "function", "function": function}]
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "How is it?"},
            {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
        ]
        described = {name: one for name, one in TOOL.items() if name not in ("type", "strict")}
        tools = [{"type": "function", "function": described}]
        chat = await fake.post("/v1/chat/completions", model=FAKE, messages=messages, tools=tools)
        assert chat.status_code == 200
        assert engine.asked[0].prompt == engine.asked[1].prompt


@pytest.mark.parametrize(
    "text",
    [
        f"a {CALL}",
        f"{CALL} b",
        f"a {CALL} b {CALL}\nc",
        CALL.replace("Rome", "é\\ud800"),  # half of a character
    ],
)
async def test_what_it_gave_is_the_message_that_a_chat_gives(
    tokenizer: Tokenizer, model_folder: Path, text: str
) -> None:
    engine = FakeEngine(tokenizer, (text,))
    client = Client(engine, model_folder)
    described = {name: one for name, one in TOOL.items() if name != "type"}
    ask: dict[str, Any] = {"model": FAKE, "tools": [TOOL]}
    chat: dict[str, Any] = {"model": FAKE, "tools": [{"type": "function", "function": described}]}
    given = await client.post("/v1/responses", input=[USER], **ask)
    told = await client.post("/v1/chat/completions", messages=[USER], **chat)
    output, message = given.json()["output"], told.json()["choices"][0]["message"]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "rain"}
        for item in output
        if item["type"] == "function_call"
    ]
    tools = [
        {"role": "tool", "tool_call_id": each["call_id"], "content": "rain"} for each in results
    ]
    await client.post("/v1/responses", input=[USER, *output, *results, USER], **ask)
    await client.post("/v1/chat/completions", messages=[USER, message, *tools, USER], **chat)
    assert engine.asked[2].prompt == engine.asked[3].prompt


def test_its_settings_can_be_sent_again(server: RunningServer) -> None:
    ask = {"model": MODEL, "input": "a", "tools": [TOOL], "temperature": 0.5}
    first = httpx.post(f"{server.url}/v1/responses", json=ask).json()
    made = ("id", "object", "created_at", "completed_at", "status", "output", "usage")
    ends = ("error", "incomplete_details")
    settings = {name: one for name, one in first.items() if name not in (*made, *ends)}
    again = httpx.post(f"{server.url}/v1/responses", json={"input": "a", **settings})
    assert again.status_code == 200, again.text
    assert {name: again.json()[name] for name in settings} == settings


async def test_fields_mean_what_they_mean_in_a_chat(
    tokenizer: Tokenizer, model_folder: Path
) -> None:
    engine = FakeEngine(tokenizer)
    client = Client(engine, model_folder)
    same = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 3,
        "stop": ["x"],
        "presence_penalty": 0.5,
        "user": "ann",
        "priority": 2,
        "timeout_s": 9.0,
    }
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    named = {"name": "one", "schema": schema}
    text = {"format": {"type": "json_schema", **named}}
    ask = {"max_output_tokens": 7, "text": text, "include": LOGPROBS, "top_logprobs": 2}
    assert (
        await client.post("/v1/responses", model=FAKE, input="ab", **same, **ask)
    ).status_code == 200
    form = {"type": "json_schema", "json_schema": named}
    more = {"max_completion_tokens": 7, "response_format": form, "logprobs": True}
    assert (await client.chat("ab", **same, **more, top_logprobs=2)).status_code == 200
    first, second = engine.asked
    assert (first.prompt, first.params) == (second.prompt, second.params)
    assert first.options == second.options


def test_a_form_of_the_text(client: OpenAI) -> None:
    class Answer(BaseModel):
        city: str

    done = client.responses.parse(
        model=MODEL, input=say('{"city":"Rome"}'), text_format=Answer, temperature=0
    )
    assert isinstance(done.output_parsed, Answer)


def test_log_probabilities_are_those_of_the_text(client: OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "input": say(f"ab\n{CALL}"), "tools": [TOOL]}
    done = client.responses.create(**ask, include=LOGPROBS, top_logprobs=2)
    message = done.output[0]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert "".join(one.token for one in part.logprobs) == "ab"
    assert all(len(one.top_logprobs) == 2 for one in part.logprobs)
    without = client.responses.create(**ask).output[0].content[0]  # type: ignore[union-attr]
    assert without.logprobs == []  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ["ab", ""])
@pytest.mark.parametrize("tools", [[], [TOOL]])
@pytest.mark.parametrize("stop", ["ST", "STOP", None])
def test_what_ends_a_text_has_none(
    server: RunningServer, text: str, tools: list[Any], stop: str | None
) -> None:
    """An end token, or the tokens of a stop string; the deltas say the same as their end."""
    told = f"{text}STOP{CALL}" if stop else text
    ask = {"model": MODEL, "input": say(told), "tools": tools, "stop": stop, "include": LOGPROBS}
    found = events(httpx.post(f"{server.url}/v1/responses", json={**ask, "stream": True}).text)
    deltas = [one for one in found if one["type"] == "response.output_text.delta"]
    [done] = [one for one in found if one["type"] == "response.output_text.done"]
    assert [each for one in deltas for each in one["logprobs"]] == done["logprobs"]
    assert "".join(each["token"] for each in done["logprobs"]) == done["text"] == text
    [item] = httpx.post(f"{server.url}/v1/responses", json=ask).json()["output"]
    assert len(item["content"][0]["logprobs"]) == len(text)


class InPieces(FakeEngine):
    """Says so many tokens a delta, as an engine may that speculates; each has its own logprob."""

    size = 1

    async def _stream(
        self, number: int, request_id: str, params: SamplingParams
    ) -> AsyncGenerator[CompletionDelta, None]:
        [text] = self.answers
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        pieces = self.tokenizer.detokenizer([], spelled=params.spelled_token_ids)
        for start in range(0, len(ids), self.size):
            some = ids[start : start + self.size]
            logprobs = [
                {one: Logprob(-0.5 - number, 1, self.tokenizer.token_text(one))}
                for number, one in enumerate(some, start)
            ]
            ends = self.ends if start + self.size >= len(ids) else None
            told = "".join(map(pieces.add, some))
            yield CompletionDelta("r", 0, told, tuple(some), logprobs, ends)


TEXT, REST = True, False


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    "parts",
    [
        [("a b", TEXT), (f"\n{CALL}", REST), ("\nd", TEXT)],
        [("a", TEXT), (f"\n{CALL}", REST), ("}", TEXT), (CALL, REST), ("d", TEXT)],
        [(CALL, REST), (" }", TEXT), (f"\n{CALL}", REST), (">", TEXT)],
        [("hi", TEXT), (CALL, REST), ("hi", TEXT)],  # one token
        [(CALL, REST), ("é🙂", TEXT), (CALL + CALL, REST), ("é", TEXT)],  # of two, four tokens
        [(" \n a", TEXT), (CALL, REST)],
        [("a <tool_c", TEXT), (CALL, REST), (" b", TEXT), (f"\n{CALL}\n", REST)],
    ],
)
async def test_log_probabilities_of_texts_around_calls(
    tokenizer: Tokenizer, model_folder: Path, parts: list[tuple[str, bool]], size: int
) -> None:
    engine = InPieces(tokenizer, ["".join(text for text, _ in parts)])
    engine.size = size
    client = Client(engine, model_folder)
    ask: dict[str, Any] = {"model": FAKE, "input": "x", "tools": [TOOL], "include": LOGPROBS}
    output = (await client.post("/v1/responses", **ask)).json()["output"]
    found = [item["content"][0] for item in output if item["type"] == "message"]
    assert [part["text"] for part in found] == [text for text, is_text in parts if is_text]
    expected, number = [], 0
    for text, is_text in parts:
        start, number = number, number + len(tokenizer.encode(text, add_special_tokens=False))
        expected += [list(range(start, number))] if is_text else []
    told = [[-0.5 - one["logprob"] for one in part["logprobs"]] for part in found]
    assert told == expected


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("reasoning", ["hm", "hm\n" * 30])
async def test_log_probabilities_of_an_answer_in_tags(
    tokenizer: Tokenizer, model_folder: Path, reasoning: str, size: int
) -> None:
    before = f"<think>\n{reasoning}</think>\n\n<response>\n"
    engine = InPieces(tokenizer, [f"{before}yes, é\n</response>\n"])
    engine.size = size
    client = Client(engine, model_folder, AppOptions(reasoning_parser="ernie45"))
    for tools in ([], [TOOL]):
        ask = {"model": FAKE, "input": "x", "tools": tools, "include": LOGPROBS}
        output = (await client.post("/v1/responses", **ask)).json()["output"]
        assert [item["type"] for item in output] == ["reasoning", "message"]
        [part] = output[1]["content"]
        assert part["text"] == "yes, é"
        first = len(tokenizer.encode(before, add_special_tokens=False))
        numbers = [-0.5 - each["logprob"] for each in part["logprobs"]]
        assert numbers == list(range(first, first + len("yes, é".encode())))


async def test_a_failure_in_the_middle_is_an_event(
    tokenizer: Tokenizer, model_folder: Path
) -> None:
    engine = FakeEngine(tokenizer, ("ab",), "error", None, Failure("it broke", False))
    client = Client(engine, model_folder)
    response = await client.post("/v1/responses", model=FAKE, input="a", stream=True)
    assert response.status_code == 200
    last = events(response.text)[-1]
    assert last["type"] == "error"
    assert last["error"]["message"] == last["message"]
    whole = await client.post("/v1/responses", model=FAKE, input="a")
    assert whole.status_code == 500
    assert whole.json()["error"]["message"] == last["message"]


def test_the_client_raises_what_fails_in_the_middle(client: OpenAI) -> None:
    with pytest.raises(openai.APIError, match="seconds"):
        for _ in client.responses.create(
            model=MODEL, input=say("x" * 3000), stream=True, extra_body={"timeout_s": 0.05}
        ):
            pass


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [None]}, "input.0"),
        ({"input": ["a"]}, "input.0"),
        ({"input": [{"type": 5}]}, "input.0"),
        ({"input": [USER, {"role": "user"}]}, "input.1.content"),
        ({"input": [USER, {"role": "tool", "content": "a"}]}, "input.1.role"),
        ({"input": [USER, {**USER, "mood": "good"}]}, "input.1.mood"),
        ({"input": [USER, {**USER, "content": 5}]}, "input.1.content"),
        ({"input": [{**USER, "content": [{}]}]}, "input.0.content.0"),
        ({"input": [{**USER, "content": [{**PART, "text": 5}]}]}, "input.0.content.0.text"),
        ({"input": [{**GIVEN, "arguments": {}}]}, "input.0.arguments"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"store": True}, "store"),
        ({"truncation": "middle"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"generate_summary": "concise"}}, "reasoning.generate_summary"),
        ({"request_id": "a b"}, "request_id"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "no"}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format"),
        ({"text": {"format": {"type": "text", "name": "a"}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"model": "other"}, "model"),
    ],
)
def test_what_is_refused(server: RunningServer, fields: dict[str, Any], param: str | None) -> None:
    ask = {"model": MODEL, "input": "a", **fields}
    for more in ({}, {"stream": True}):
        response = httpx.post(f"{server.url}/v1/responses", json={**ask, **more})
        assert response.status_code == (404 if "model" in fields else 400), response.text
        error = response.json()["error"]
        if param is not None:
            assert error["param"] == param, error


def test_a_prompt_that_is_too_long_is_refused_whatever_truncation_says(
    server: RunningServer,
) -> None:
    for truncation in ("auto", "disabled"):
        ask = {"model": MODEL, "input": "x" * 20_000, "truncation": truncation}
        found = httpx.post(f"{server.url}/v1/responses", json=ask)
        assert found.status_code == 400, found.text
        assert "context" in found.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_told_back_is_refused(
    tokenizer: Tokenizer, model_folder: Path, stream: bool
) -> None:
    client = Client(FakeEngine(tokenizer), model_folder)
    tool = {**TOOL, "parameters": {"type": "object", "default": math.nan}}
    ask = {"model": FAKE, "input": "a", "tools": [tool], "stream": stream}
    response = await client.post("/v1/responses", **ask)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_called_as_it_is_here(
    tokenizer: Tokenizer, model_folder: Path, stream: bool
) -> None:
    """A grammar is compiled when all that a body can tell was looked at."""
    name = "response_format.json_schema.schema"
    client = Client(
        FakeEngine(tokenizer, refusals=[RequestError(f"{name} is bad", name)]), model_folder
    )
    response = await client.post("/v1/responses", model=FAKE, input="a", stream=stream)
    error = response.json()["error"]
    assert response.status_code == 400
    assert (error["param"], error["message"]) == ("text.format.schema", "text.format.schema is bad")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"text": {"format": {**NAMED, "schema": UNENFORCED}}}, "text.format.schema", "#/$ref"),
        (
            {"tools": [TOOL, {**TOOL, "name": "a", "strict": True, "parameters": UNENFORCED}]},
            "tools.1.parameters",
            "#/$ref",
        ),
        ({"tools": [TOOL, {**TOOL, "parameters": {}}]}, "tools.1.name", "several functions"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "name": "no"}},
            "tool_choice",
            '{"type": "function", "name": …}',
        ),
        ({"input": [{**GIVEN, "arguments": "{"}]}, "input", "the earlier tool call 'weather'"),
        ({"input": [{**GIVEN, "arguments": "[" * 9999}]}, "input", "these messages: "),
        ({"max_output_tokens": -1}, "max_output_tokens", "max_output_tokens is -1"),
    ],
)
def test_what_a_chat_refuses_is_called_as_it_is_here(
    server: RunningServer, fields: dict[str, Any], param: str, words: str
) -> None:
    ask = {"model": MODEL, "input": "a", **fields}
    error = httpx.post(f"{server.url}/v1/responses", json=ask).json()["error"]
    assert error["param"] == param
    assert words in error["message"]


async def test_a_key_is_needed(tokenizer: Tokenizer, model_folder: Path) -> None:
    client = Client(FakeEngine(tokenizer), model_folder, AppOptions(api_keys=("secret",)))
    assert (await client.post("/v1/responses", model=FAKE, input="a")).status_code == 401
    response = await client.post("/v1/responses", "secret", model=FAKE, input="a")
    assert Response.model_validate(response.json()).output_text == "ok"
