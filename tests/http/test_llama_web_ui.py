"""What llama.cpp's web UI sends and reads: a chat whose prompt and thoughts are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from onnxport.errors import RequestError
from onnxport.serving.http import sse
from onnxport.serving.http.app import AppOptions
from onnxport.serving.http.controls import NOT_THERE
from onnxport.serving.http.llama_cpp import told as means
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams
from onnxport.serving.tokenizer import Tokenizer
from onnxport.version import __version__
from tests.waiting import wait_until

from .conftest import RunningServer, StartServer, _servers
from .fake import Client, FakeEngine
from .fake import events as told
from .scripted import MODEL, say, write_tokenizer
from .test_reasoning import TAGS, TEMPLATE

pytestmark = pytest.mark.timeout(60)
# With each message; the UI leaves sampling to the server unless its settings say otherwise.
ALWAYS: dict[str, Any] = {
    **{"stream": True, "return_progress": True, "sse_ping_interval": 1},
    **{"timings_per_token": True, "reasoning_format": "auto", "reasoning_control": True},
}
SETTINGS: dict[str, Any] = {
    **{"max_tokens": -1, "typ_p": 0.9, "backend_sampling": False, "thinking_budget_tokens": 128},
    **{"continue_final_message": True, "add_generation_prompt": False},
}
ANSWER = "<think>\nhm\n</think>\n\nyes"


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    folder = tmp_path_factory.mktemp("thinking")
    write_tokenizer(folder, TEMPLATE, TAGS)
    with _servers(folder) as start:
        yield start


@pytest.fixture(scope="module")
def slow(start: StartServer) -> RunningServer:
    """A server that reads a prompt in steps of 32 tokens."""
    return start(texts=TAGS, max_num_batched_tokens=32, max_num_seqs=4, block_size=16)


def chat(
    server: RunningServer, path: str = "/v1/chat/completions", **fields: Any
) -> httpx.Response:
    messages = [{"role": "user", "content": say(ANSWER)}]
    return httpx.post(f"{server.url}{path}", json={"messages": messages, **fields})


def test_a_stream_tells_how_much_of_the_prompt_is_computed(slow: RunningServer) -> None:
    salt: dict[str, Any] = {"temperature": 0, "cache_salt": "progress"}
    [cold, warm] = [told(chat(slow, **ALWAYS, **salt)) for _ in range(2)]
    steps = [chunk["prompt_progress"] for chunk in cold if "prompt_progress" in chunk]
    total = steps[0]["total"]
    assert [step["processed"] for step in steps] == [*range(32, total, 32), total]
    assert {(step["cache"], step["total"]) for step in steps} == {(0, total)}
    assert sorted(times := [step["time_ms"] for step in steps]) == times
    assert all("timings" in chunk for chunk in cold)
    first, *later = [chunk["choices"][0]["delta"] for chunk in cold]
    assert first == {"role": "assistant", "content": ""}
    assert later[: len(steps)] == [{}] * len(steps)
    [last] = [chunk["prompt_progress"] for chunk in warm if "prompt_progress" in chunk]
    assert 0 < last["cache"] < last["processed"] == total
    plain = told(chat(slow, stream=True, **salt))
    assert not any("prompt_progress" in chunk for chunk in plain)
    whole = chat(slow, return_progress=True, **salt).json()
    assert whole["choices"][0]["message"]["content"] == "yes"


def test_completions_tell_it_too(slow: RunningServer) -> None:
    prompt = "x" * 70 + say("ok")
    asked = {"prompt": prompt, "stream": True, "return_progress": True, "cache_prompt": False}
    for path in ("/v1/completions", "/completion"):
        response = httpx.post(f"{slow.url}{path}", json={**asked, "stream_interval": 9})
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        steps = [one["prompt_progress"]["processed"] for one in chunks if "prompt_progress" in one]
        assert steps == [32, 64, 74], path


def test_thoughts_may_stay_in_the_content(slow: RunningServer) -> None:
    fields: dict[str, Any] = {"reasoning_format": "none", "temperature": 0}
    done = chat(slow, **fields).json()
    assert done["choices"][0]["message"] == {
        **{"role": "assistant", "content": ANSWER, "refusal": None},
    }
    assert "completion_tokens_details" not in done["usage"]
    chunks = told(chat(slow, stream=True, **fields))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == ANSWER
    for name in ("auto", "deepseek"):
        message = chat(slow, reasoning_format=name, temperature=0).json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    tools = [{"type": "function", "function": {"name": "add"}}]
    more: dict[str, Any]
    for more in ({"tools": tools}, {"include_reasoning": False}):
        error = chat(slow, **fields, **more).json()["error"]
        assert error["param"] == "reasoning_format", error
    assert chat(slow, reasoning_format="deepseek-legacy").status_code == 400


def test_a_budget_goes_on_where_thoughts_are_not_told_apart(slow: RunningServer) -> None:
    fields: dict[str, Any] = {
        "reasoning_format": "none",
        "thinking_budget_tokens": 0,
        "temperature": 0,
    }
    content = chat(slow, **fields).json()["choices"][0]["message"]["content"]
    assert content.startswith("<think></think>"), content


@pytest.mark.asyncio
async def test_what_it_sends_is_understood(model_folder: Path) -> None:
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()))
    client = Client(engine, model_folder)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for fields in (ALWAYS, {**ALWAYS, **SETTINGS, "thinking_budget_tokens": -1}):
        response = await client.post("/v1/chat/completions", messages=messages, **fields)
        assert response.status_code == 200, response.text
    assert engine.asked[-1].params.typical_p == 0.9
    assert engine.asked[-1].params.max_tokens is None
    assert engine.asked[-1].options.tells_progress
    unlimited: list[dict[str, Any]]
    unlimited = [{"max_completion_tokens": -1}, {"max_tokens": -1, "n_predict": -1}]
    for limits in unlimited:
        await client.chat(**limits)
        assert engine.asked[-1].params.max_tokens is None
    for fields in (
        *({"max_tokens": -1, "n_predict": 5}, {"max_tokens": -1, "max_completion_tokens": 5}),
        *({"typ_p": 0.5, "typical_p": 0.6}, {"thinking_budget_tokens": 5}),
        *({"sse_ping_interval": -2}, {"max_tokens": -2}),
    ):
        response = await client.chat(**fields)
        assert response.status_code == 400, fields
    for name, value in (("typ_p", 5), ("reasoning_budget_tokens", -5)):
        one: dict[str, Any] = {name: value}
        error = (await client.chat(**one)).json()["error"]
        assert error["param"] == name
        assert error["message"].startswith(f"{name} is {value}")
    assert (await client.complete(max_tokens=-1)).status_code == 200
    assert engine.asked[-1].params.max_tokens is None


@pytest.mark.parametrize("given", [(5, 7), (-1, 7), (7, -1)])
@pytest.mark.parametrize("first", ["thinking_budget_tokens", "thinking_token_budget"])
def test_budgets_by_several_names_have_to_agree(first: str, given: tuple[int, int]) -> None:
    names = (first, "reasoning_budget_tokens")
    with pytest.raises(RequestError, match="send one of them"):
        means(dict(zip(names, given, strict=True)), is_chat=True)
    same = means(dict.fromkeys(names, 7), is_chat=True)
    assert same["thinking_token_budget"] == 7
    servers = means(dict.fromkeys(names[1:], -1), is_chat=True)
    assert "thinking_token_budget" not in servers


class Thinker(FakeEngine):
    """One that thinks until it is told to answer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer)
        self.closed: list[str] = []
        self.goes_on = asyncio.Event()

    async def end_thoughts(self, request_id: str) -> bool:
        self.closed.append(request_id)
        self.goes_on.set()
        return True

    async def _stream(
        self, number: int, request_id: str, params: SamplingParams
    ) -> AsyncGenerator[CompletionDelta, None]:
        await self.goes_on.wait()
        yield CompletionDelta(request_id, 0, "ok", (1,), None, "stop")


@pytest.mark.asyncio
async def test_a_thought_is_closed_with_the_key_of_its_chat_alone(model_folder: Path) -> None:
    engine = Thinker(Tokenizer.from_folder(model_folder, frozenset()))
    options = AppOptions(api_keys=("ours", "theirs"))
    client = Client(engine, model_folder, options)
    ask: dict[str, Any] = {"id": "chatcmpl-mine", "action": "reasoning_end"}
    path = "/v1/chat/completions/control"
    chat = asyncio.create_task(client.chat(key="ours", request_id="mine", reasoning_control=True))
    while not engine.asked:
        await asyncio.sleep(0)
    refused = await client._http.post(path, json=ask, headers={"x-api-key": "theirs"})
    assert refused.json() == {"success": False, "message": NOT_THERE}
    assert not engine.closed
    closed = await client._http.post(path, json=ask, headers={"x-api-key": "ours"})
    assert closed.json() == {"success": True}
    assert (await chat).status_code == 200
    assert engine.closed == [engine.asked[0].request_id]
    assert (await client.post(path, "ours", **ask)).json()["message"] == NOT_THERE


@pytest.mark.asyncio
async def test_what_computes_an_answer_is_told(model_folder: Path) -> None:
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()))
    client = Client(engine, model_folder, AppOptions(artifact="0123456789abcdef"))
    expected = f"onnxport-{__version__}-{engine.capabilities.provider}-01234567"
    for ask in (client.chat, client.complete):
        assert (await ask()).json()["system_fingerprint"] == expected
        chunks = told(await ask(stream=True))
        assert {chunk["system_fingerprint"] for chunk in chunks} == {expected}


@pytest.mark.asyncio
async def test_pings_are_as_a_request_asks(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()))
    client = Client(engine, model_folder, AppOptions(sse_ping_interval_s=7))
    intervals: list[float] = []

    class Noted(sse._EventStream):
        def __init__(self, *given: Any) -> None:
            intervals.append(given[3])
            super().__init__(*given)

    monkeypatch.setattr(sse, "_EventStream", Noted)
    for given in (None, 2, 0, -1):
        for path in ("/v1/chat/completions", "/v1/completions", "/completion"):
            chats = "chat" in path
            asked: dict[str, Any]
            asked = {"messages": [{"role": "user", "content": "a"}]} if chats else {"prompt": "a"}
            await client.post(path, stream=True, sse_ping_interval=given, **asked)
    assert intervals == [7] * 3 + [2] * 3 + [0] * 6


@pytest.mark.asyncio
async def test_paths_without_v1(model_folder: Path) -> None:
    """As llama.cpp's server has them, and with a key where the others have one."""
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()))
    client = Client(engine, model_folder)
    message = [{"role": "user", "content": "hello"}]
    chatted = await client.post("/chat/completions", messages=message)
    assert chatted.json()["choices"][0]["message"]["content"] == "ok"
    assert (await client.post("/responses", input="hello")).json()["object"] == "response"
    assert (await client.get("/models")).json() == (await client.get("/v1/models")).json()
    counted = await client.post("/tokenize", messages=message)
    expected = {"object": "response.input_tokens", "input_tokens": counted.json()["count"]}
    for prefix in ("", "/v1"):
        asked: dict[str, Any]
        for path, asked in (
            ("/chat/completions/input_tokens", {"messages": message}),
            ("/responses/input_tokens", {"input": "hello"}),
        ):
            assert (await client.post(f"{prefix}{path}", **asked)).json() == expected
    cut: dict[str, Any] = {"messages": message, "truncate_prompt_tokens": 3}
    told = await client.post("/chat/completions/input_tokens", **cut)
    assert told.json()["input_tokens"] == 3
    bad = await client.post("/responses/input_tokens", input="hi", reasoning={"effort": "low"})
    assert bad.json()["error"]["param"] == "reasoning.effort"
    locked = Client(engine, model_folder, AppOptions(api_keys=("secret",)))
    for path in ("/chat/completions", "/responses", "/chat/completions/input_tokens"):
        assert (await locked.post(path)).status_code == 401
        assert (await locked.post(path, "secret")).status_code == 400
    assert (await locked.get("/models")).status_code == 401


def test_the_model_s_name_is_told(slow: RunningServer) -> None:
    """The UI shows what the last chunk says, and is served by a name that it was never told."""
    assert {chunk["model"] for chunk in told(chat(slow, **ALWAYS))} == {MODEL}


@pytest.mark.slow
def test_a_thought_is_closed_when_the_client_says_so(start: StartServer) -> None:
    server = start(texts=TAGS, latency_s=0.1)
    thought = "<think>" + "a" * 1500  # which takes minutes

    def control(name: str, **fields: Any) -> dict[str, Any]:
        body = {"id": name, "action": "reasoning_end", **fields}
        found: dict[str, Any]
        found = httpx.post(f"{server.url}/v1/chat/completions/control", json=body).json()
        return found

    def asked(**fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": say(thought)}]
        return {"messages": messages, "temperature": 0, "stream": True, **fields}

    url = f"{server.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=asked(reasoning_control=True)) as response:
        name, thoughts = "", 0
        for line in response.iter_lines():
            if not line.startswith("data: "):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            delta = chunk["choices"][0]["delta"]
            if delta.get("content"):
                break
            thoughts += len(delta.get("reasoning_content") or "")
            if thoughts > 2 and not name:
                name = chunk["id"]
                assert control(name) == {"success": True}
        assert 2 < thoughts < 1500
        assert delta["content"].startswith("a")
        assert not control(name)["success"]  # it answers
    wait_until(lambda: "is running" in control(name)["message"])
    with httpx.stream("POST", url, json=asked()) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: "))
        name = json.loads(next(lines).removeprefix("data: "))["id"]
        assert not control(name)["success"]  # nobody has said before that it may be closed
    assert control("none", action="stop")["error"]["param"] == "action"
    assert control("none", model="other")["error"]["code"] == "model_not_found"


def test_models_without_thoughts_are_asked_in_the_same_way(server: RunningServer) -> None:
    messages = [{"role": "user", "content": say("yes")}]
    body = {"messages": messages, "temperature": 0, "reasoning_control": True, "max_tokens": 9}
    for more in ({}, {"response_format": {"type": "json_object"}}, {"bad_words": ["</think>"]}):
        assert httpx.post(f"{server.url}/v1/chat/completions", json={**body, **more}).is_success
