"""Batch files: which lines are requests, and what is answered to them, in which order."""

from __future__ import annotations

import asyncio
import codecs
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from onnxport.errors import OverloadedError, RequestError
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.http.app import create_app
from onnxport.serving.http.batch_file import AHEAD, Answer, Line, answers, read_lines
from onnxport.serving.tokenizer import Tokenizer

from .fake import FakeEngine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOLD = {"custom_id": "a", "method": "POST", "url": TEXT, "body": {"prompt": "ab"}}
MESSAGES = [{"role": "user", "content": "ab"}]


def line(**changed: Any) -> bytes:
    """Return a line; None leaves a field out."""
    fields = {name: one for name, one in (TOLD | changed).items() if one is not None}
    return json.dumps(fields).encode()


def batch(*bodies: dict[str, Any], url: str = TEXT) -> list[Line]:
    return [Line(str(number), url, json.dumps(body).encode()) for number, body in enumerate(bodies)]


async def asked(app: Any, lines: Sequence[Line], most: int = 2) -> list[Answer]:
    return [answer async for answer in answers(app, lines, most)]


def test_requests_of_a_file() -> None:
    texts = [line(), b"", b"  \r\n", line(custom_id="b", method=None, url=CHAT)]
    first, second = read_lines(texts)
    assert (first.custom_id, first.url, json.loads(first.body)) == ("a", TEXT, {"prompt": "ab"})
    assert (second.custom_id, second.url) == ("b", CHAT)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"{", "no JSON"),
        (b'"\xff"', "no text in UTF-8"),
        (b"[1]", "write an object"),
        (line(custom_id=None), "custom_id is missing"),
        (line(custom_id=""), "custom_id is missing"),
        (line(custom_id=7), "custom_id is missing"),
        (line(method="GET"), "method is 'GET'"),
        (line(url="/v1/audio/speech"), "url is '/v1/audio/speech'; give one of"),
        (line(url=["x"]), "give one of"),
        (line(body=None), "body is missing"),
        (line(body=["x"]), "body is missing"),
        (line(body={"prompt": "x", "stream": True}), "stream true"),
        (line(model="m"), "'model'"),
    ],
)
def test_lines_that_are_no_requests(text: bytes, reason: str) -> None:
    with pytest.raises(RequestError, match="line 2: ") as caught:
        read_lines([line(custom_id="other"), text])
    assert reason in str(caught.value)


def test_all_bad_lines_are_told_at_once_up_to_ten() -> None:
    with pytest.raises(RequestError) as caught:
        read_lines([line(), line(), *[b"{"] * 11])
    text = str(caught.value)
    assert "line 2: custom_id 'a' is there before" in text
    assert "line 11: " in text
    assert "line 12" not in text
    assert text.endswith("and 2 more")
    with pytest.raises(RequestError, match="no requests"):
        read_lines([b"", b" "])


def test_files_of_editors_that_mark_their_encoding() -> None:
    assert len(read_lines([codecs.BOM_UTF8 + line(), line(custom_id="b")])) == 2
    assert read_lines([codecs.BOM_UTF8 + b"\r\n", line()])


def test_any_text_of_json_can_be_written() -> None:
    answer = Answer("\ud83d \u2028é", 200, "r", {"text": '中\\ud800"\n'})
    written = answer.written()
    assert written.count(b"\n") == 1
    assert "中".encode() in written
    found = json.loads(written)
    assert (found["custom_id"], found["response"]["body"]) == (answer.custom_id, answer.body)


async def test_a_bug_fails_its_own_request_alone(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()))
    engine.refusals[:] = [KeyError("bug"), None]
    app = create_app(engine, "fake", ChatTemplate.read(model_folder))
    found = await asked(app, batch({"prompt": "ab"}, {"prompt": "ab"}), most=1)
    assert [answer.status for answer in found] == [500, 200]
    assert found[0].told()["error"]["type"] == "server_error"
    assert "KeyError" in caplog.text


async def test_answers_and_errors_of_endpoints(model_folder: Path) -> None:
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()))
    app = create_app(engine, "fake", ChatTemplate.read(model_folder))
    lines = batch({"prompt": "ab"}, {"prompt": "ab", "n": 0}, {"prompt": "ab", "frob": 1})
    lines.append(Line("last", CHAT, json.dumps({"messages": MESSAGES}).encode()))
    found = [answer.told() for answer in await asked(app, lines)]
    assert [one["custom_id"] for one in found] == ["0", "1", "2", "last"]
    assert [one["response"]["status_code"] for one in found] == [200, 400, 400, 200]
    assert found[0]["response"]["body"]["choices"][0]["text"] == "ok"
    assert found[3]["response"]["body"]["choices"][0]["message"]["content"] == "ok"
    assert found[0]["error"] is None
    assert found[1]["error"] == found[1]["response"]["body"]["error"]
    assert (found[1]["error"]["param"], found[2]["error"]["param"]) == ("n", "frob")
    whole = found[0]["response"]
    assert whole["body"]["id"] == f"cmpl-{whole['request_id']}"
    assert len({one["id"] for one in found}) == len(found)


class Full:
    """An application that refuses whoever comes while it answers somebody."""

    def __init__(self, *, ever: bool = False) -> None:
        self.refused = 0
        self.busy = ever

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.busy:
            self.refused += 1
            await JSONResponse({"error": {}}, 429)(scope, receive, send)
            return
        self.busy = True
        await asyncio.sleep(0.02)
        self.busy = False
        await JSONResponse({})(scope, receive, send)


async def test_what_too_many_waited_for_is_asked_again(model_folder: Path) -> None:
    app = Full()
    assert [answer.status for answer in await asked(app, batch(*[{}] * 5), most=4)] == [200] * 5
    assert app.refused >= 3
    [refused] = await asked(Full(ever=True), batch({}))  # nobody leaves whom it waits for
    assert refused.status == 429
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()))
    engine.refusals[:] = [OverloadedError("full", 1.0), None]
    server = create_app(engine, "fake", ChatTemplate.read(model_folder))
    [again] = await asked(server, batch({"prompt": "ab"}))
    assert again.status == 200


class Held:
    """An application whose answer to the first request comes behind all others."""

    def __init__(self, number: int) -> None:
        self.running = self.most = self.done = 0
        self._first = asyncio.Event()
        self._last = number - 1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await Request(scope, receive).json()
        self.running += 1
        self.most = max(self.most, self.running)
        if body["n"] == 0:
            await self._first.wait()
        else:
            await asyncio.sleep(0)
        self.running -= 1
        self.done += 1
        if self.done == self._last:
            self._first.set()
        await JSONResponse({"n": body["n"]})(scope, receive, send)


async def test_so_many_run_at_once_and_answers_are_in_order() -> None:
    number = 3 * AHEAD
    app = Held(number)
    found = await asked(app, batch(*({"n": n} for n in range(number))), most=3)
    assert [answer.body["n"] for answer in found] == list(range(number))
    assert app.most == 3


async def test_who_stops_reading_leaves_nothing_running(model_folder: Path) -> None:
    app = Held(5)
    reader = answers(app, batch({"n": 1}, {"n": 0}, {"n": 2}), 3)
    assert (await anext(reader)).body == {"n": 1}
    await reader.aclose()
    assert len(asyncio.all_tasks()) == 1
