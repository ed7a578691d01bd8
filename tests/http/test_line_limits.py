"""Answers that end with a line that comes too late, or is not indented."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from onnxport.errors import OverloadedError
from onnxport.serving.http.generation import generate
from onnxport.serving.http.intervals import spaced
from onnxport.serving.http.job import Job
from onnxport.serving.http.line_limits import LineLimits, limited
from onnxport.serving.outputs import CompletionDelta, FinishReason
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.helpers import Clock

from .fake import Client, FakeEngine

pytestmark = pytest.mark.asyncio


class Source:
    """Deltas of some choices, one piece of text each; each takes a second."""

    def __init__(self, pieces: Sequence[tuple[int, str]], end: FinishReason = "stop") -> None:
        self.told = 0
        self.is_closed = False
        self._pieces, self._end = pieces, end
        self._last = {choice: place for place, (choice, _) in enumerate(pieces)}

    async def deltas(self) -> AsyncGenerator[CompletionDelta, None]:
        try:
            for place, (choice, text) in enumerate(self._pieces):
                await asyncio.sleep(0)
                self.told += 1
                reason = self._end if self._last[choice] == place else None
                stop = 7 if reason == "stop" else None
                yield CompletionDelta("r", choice, text, (1,), None, reason, stop)
        finally:
            self.is_closed = True


async def read(
    source: Source, limits: LineLimits, num_choices: int = 1
) -> list[tuple[str, FinishReason | None]]:
    texts = [""] * num_choices
    reasons: list[FinishReason | None] = [None] * num_choices
    clock = Clock(tick_s=1.0)
    async with aclosing(limited(source.deltas(), num_choices, limits, clock)) as deltas:
        async for delta in deltas:
            choice = delta.index
            assert reasons[choice] is None
            texts[choice] += delta.text
            reasons[choice] = delta.finish_reason
            assert delta.stop_reason == (7 if delta.finish_reason == "stop" else None)
    assert source.is_closed
    return list(zip(texts, reasons, strict=True))


@pytest.mark.parametrize(
    ("text", "indent", "expected"),
    [
        ("x\n    y", 4, None),
        ("x\n    y", 5, "x\n    "),
        ("x\n\t\ty", 2, None),
        ("x\n\t y\nz", 2, "x\n\t y\n"),
        ("x\n\n    y", 4, "x\n"),  # an empty line has no indent
        ("x\n  ", 4, None),  # nothing is known yet of this line
        ("\n    x", 4, None),
        ("x y z", 4, None),
        ("x\ny", 0, None),
    ],
)
async def test_indents(text: str, indent: int, expected: str | None) -> None:
    for size in (1, 3, len(text)):
        pieces = [(0, text[at : at + size]) for at in range(0, len(text), size)]
        found = await read(Source(pieces), LineLimits(indent))
        wanted = (text, "stop") if expected is None else (expected, "length")
        assert found == [wanted], size


@pytest.mark.parametrize(
    ("pieces", "predict_s", "expected"),
    [
        (["a", "b", "\n", "c"], 1.5, "ab\n"),  # the first line may be the last
        (["a", "\n", "b", "c\nd", "e"], 1.5, "a\nbc\nd"),
        (["a", "b", "c"], 1.5, None),
        (["a", "\n", "b"], None, None),
        (["\n", "b"], 0.5, None),
        (["a", "b", "c\nd"], 1.5, None),  # late, but it has ended by itself
    ],
)
async def test_time(pieces: list[str], predict_s: float | None, expected: str | None) -> None:
    source = Source([(0, piece) for piece in pieces])
    found = await read(source, LineLimits(predict_s=predict_s))
    assert found == [("".join(pieces), "stop") if expected is None else (expected, "length")]
    if expected is not None:
        assert source.told < len(pieces)


async def test_each_choice_by_itself() -> None:
    source = Source([(0, "a\n"), (1, "b"), (0, "x"), (0, "y"), (1, "c"), (1, "d"), (0, "z")])
    assert await read(source, LineLimits(1), 2) == [("a\n", "length"), ("bcd", "stop")]
    assert source.told == 6


async def test_a_failure_stays_one() -> None:
    found = await read(Source([(0, "a\n"), (0, "b")], "error"), LineLimits(1))
    assert found == [("a\n", "error")]


@pytest.mark.parametrize("interval", [1, 3])
async def test_each_prompt_ends_by_itself(interval: int) -> None:
    """It is aborted where its last choice ends, however long others go on."""
    short = [(place % 2, text) for place, text in enumerate(["a\n"] * 2 + ["b"] * 200)]
    long = [(0, "c"), (1, "d\n"), (1, "e"), *[(0, "c")] * 60]
    sources = [Source(short), Source(long)]
    engine: Any = SimpleNamespace(
        stream=lambda prompt, *_: sources[prompt[0]].deltas(), most_prompts=2
    )
    params = SamplingParams(n=2)
    job = Job([[0], [1]], params, RequestOptions(), "r", interval, LineLimits(1))
    texts, reasons = [""] * 4, [""] * 4
    stream = generate(engine, job) if interval == 1 else spaced(engine, job)
    async with aclosing(stream) as deltas:
        async for choice, delta in deltas:
            assert not reasons[choice]
            texts[choice] += delta.text
            reasons[choice] = delta.finish_reason or ""
            if all(reasons[:2]) and not reasons[2] and len(texts[2]) > 10:
                assert sources[0].is_closed
                assert not sources[1].is_closed
    assert texts == ["a\n", "a\n", "c" * 61, "d\n"]
    assert reasons == ["length", "length", "stop", "length"]
    assert [source.told for source in sources] == [4, 63]


async def test_streams_that_never_began_are_closed(model_folder: Path) -> None:
    engine = FakeEngine(Tokenizer.from_folder(model_folder, frozenset()))
    engine.refusals += [None, OverloadedError("full", 3.0)]
    answer = await Client(engine, model_folder).post("/completion", prompt=["a", "b"], n_indent=1)
    assert answer.status_code == 429
    assert len(engine.streams) == 1
