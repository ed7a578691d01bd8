"""Answers that repeat themselves end, as each API tells it: a real server, and a made-up engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from onnxport.serving.defaults import SamplingDefaults
from onnxport.serving.http.app import AppOptions
from onnxport.serving.outputs import FinishReason
from onnxport.serving.repetition import RepetitionDetection
from onnxport.serving.tokenizer import Tokenizer

from .conftest import RunningServer
from .fake import Client, FakeEngine, events
from .scripted import MODEL, say

pytestmark = pytest.mark.timeout(60)
LOOP = "abc" * 40
RULE = {"max_pattern_size": 4, "min_count": 3}
CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f"}}]
PATHS = ("completions", "chat/completions", "responses", "messages")


def body(path: str, text: str, **fields: Any) -> dict[str, Any]:
    """Return a request for an answer of some text."""
    messages = [{"role": "user", "content": say(text)}]
    given: dict[str, Any] = {
        "completions": {"prompt": say(text), "max_tokens": 99},
        "chat/completions": {"messages": messages},
        "responses": {"input": say(text)},
        "messages": {"messages": messages, "max_tokens": 99},
    }[path]
    return {"model": MODEL, "temperature": 0, **given, **fields}


def post(server: RunningServer, path: str, text: str = LOOP, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/{path}", json=body(path, text, **fields))


def answer(server: RunningServer, path: str, text: str = LOOP, **fields: Any) -> Any:
    """Return the first choice of an answer, or all of it where there are none."""
    response = post(server, path, text, **fields)
    assert response.status_code == 200, response.text
    told = response.json()
    return told["choices"][0] if "choices" in told else told


def test_finish_reason_and_stop_reason(server: RunningServer) -> None:
    ends = ("finish_reason", "stop_reason")
    for path in ("completions", "chat/completions"):
        choice = answer(server, path, repetition_detection=RULE)
        text = choice["text"] if path == "completions" else choice["message"]["content"]
        assert text == "abc" * 3
        assert [choice[name] for name in ends] == ["repetition", "repetition_detected"]
        whole = answer(server, path, repetition_detection={"max_pattern_size": 0, "min_count": 3})
        assert whole["finish_reason"] == ("length" if path == "completions" else "stop")


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_streams_of_several(server: RunningServer, path: str) -> None:
    response = post(server, path, repetition_detection=RULE, stream=True, n=2)
    choices = [choice for event in events(response) for choice in event["choices"]]
    for index in (0, 1):
        parts = [one for one in choices if one["index"] == index]
        texts = [one.get("text", (one.get("delta") or {}).get("content")) or "" for one in parts]
        assert "".join(texts) == "abc" * 3
        found = [(one["finish_reason"], one.get("stop_reason")) for one in parts]
        assert found[-1] == ("repetition", "repetition_detected")
        assert {reason for reason, _ in found[:-1]} == {None}


def test_a_form_is_cut_and_a_metric_counts(server: RunningServer) -> None:
    before = server.health()["engine"]["finished"]["repetition"]
    form = {"structured_outputs": {"regex": "(abc){4,9}!"}, "repetition_detection": RULE}
    for path in PATHS:
        told = json.dumps(answer(server, path, **form))
        assert "abcabcabc" in told
        assert "abcabcabca" not in told
    server.wait_for(repetition=before + 4)
    metrics = httpx.get(f"{server.url}/metrics").text
    [line] = [line for line in metrics.splitlines() if 'finished_reason="repetition"' in line]
    assert float(line.split()[-1]) == before + 4


def test_a_response_is_incomplete(server: RunningServer) -> None:
    """As OpenAI has no word for it, it is told as what was cut."""
    told = answer(server, "responses", repetition_detection=RULE)
    assert told["status"] == told["output"][0]["status"] == "incomplete"
    assert told["incomplete_details"] == {"reason": "max_output_tokens"}
    assert told["output"][0]["content"][0]["text"] == "abc" * 3
    stream = post(server, "responses", repetition_detection=RULE, stream=True).text
    assert stream.count("event: response.incomplete\n") == 1
    assert "response.completed" not in stream


def test_a_message_has_reached_its_most(server: RunningServer) -> None:
    told = answer(server, "messages", repetition_detection=RULE)
    assert (told["stop_reason"], told["stop_sequence"]) == ("max_tokens", None)
    assert told["content"][0]["text"] == "abc" * 3
    stream = post(server, "messages", repetition_detection=RULE, stream=True).text
    assert '"stop_reason":"max_tokens"' in stream.replace(" ", "")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_pattern_size": 4}, "min_count 0"),
        ({"max_pattern_size": 4, "min_count": 1}, "min_count 1"),
        ({"max_pattern_size": 4, "min_pattern_size": 5, "min_count": 2}, "no less"),
        ({"max_pattern_size": 4.5, "min_count": 2}, "max_pattern_size is 4.5"),
        ({"max_pattern_size": 5000, "min_count": 2}, "[0, 1024]"),
        ({"max_size": 5}, "'max_size', which is not known"),
        ([4, 1, 2], "repetition_detection"),
        (True, "repetition_detection"),
    ],
)
def test_what_is_no_rule_is_refused(server: RunningServer, given: Any, words: str) -> None:
    for path in PATHS:
        response = post(server, path, repetition_detection=given)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert words in error["message"]
        if path != "messages":
            assert error["param"].split(".")[0] == "repetition_detection"


async def ask(client: Client, path: str, **fields: Any) -> RepetitionDetection | None:
    """Return what the engine is asked to look for."""
    response = await client.post(f"/v1/{path}", **body(path, "ab", model="fake", **fields))
    assert response.status_code == 200, response.text
    return client.engine.asked[-1].params.repetition_detection


async def test_the_servers_rule_is_for_those_that_give_none(model_folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())
    theirs = RepetitionDetection(8, 2, 5)
    options = AppOptions(SamplingDefaults(repetition_detection=theirs))
    client = Client(FakeEngine(tokenizer), model_folder, options)
    plain = Client(FakeEngine(tokenizer), model_folder)
    off = {"max_pattern_size": 0}
    for path in PATHS:
        assert await ask(client, path) == await ask(client, path, repetition_detection=None)
        assert client.engine.asked[-1].params.repetition_detection == theirs
        assert await ask(client, path, repetition_detection=RULE) == RepetitionDetection(4, 0, 3)
        assert await ask(client, path, repetition_detection=off) == RepetitionDetection()
        assert await ask(plain, path) is None


@pytest.mark.parametrize("stream", [False, True])
async def test_calls_before_may_not_be_all(model_folder: Path, stream: bool) -> None:
    tokenizer = Tokenizer.from_folder(model_folder, frozenset())
    engine = FakeEngine(tokenizer, (CALL + "aaa",), "repetition", "repetition_detected")
    client = Client(engine, model_folder)
    response = await client.chat(tools=TOOLS, stream=stream)
    told = events(response)[-1] if stream else response.json()
    choice = told["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    more = {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}], "tools": tools}
    message = (await client.post("/v1/messages", model="fake", **more)).json()
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    assert message["content"][0]["type"] == "tool_use"


async def test_one_that_is_stuck_is_not_the_best(model_folder: Path) -> None:
    """The first completion has likelier tokens, in this engine."""

    class Engine(FakeEngine):
        def __init__(self, reasons: Sequence[FinishReason]) -> None:
            super().__init__(Tokenizer.from_folder(model_folder, frozenset()), ("x", "y"))
            self.reasons = reasons

        async def _stream(self, number: int, request_id: str, params: Any) -> Any:
            async for delta in super()._stream(number, request_id, params):
                if delta.finish_reason is not None:
                    delta.finish_reason = self.reasons[delta.index]
                yield delta

    for reasons, best in ((("repetition", "stop"), "y"), (("repetition",) * 2, "x")):
        client = Client(Engine(reasons), model_folder)
        response = await client.complete(n=1, best_of=2)
        assert response.json()["choices"][0]["text"] == best
