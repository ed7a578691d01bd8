"""Answers that end with a line that comes too late, or is not indented."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import pytest

from onnxport.serving.http.line_limits import LineLimits, limited
from onnxport.serving.outputs import CompletionDelta, FinishReason
from tests.serving.helpers import Clock

pytestmark = pytest.mark.asyncio


class Source:
    """Deltas of some choices, one piece of text each; each takes a second."""

    def __init__(self, pieces: Sequence[tuple[int, str]], end: FinishReason = "stop") -> None:
        self.told = 0
        self.is_closed = False
        self._pieces, self._end = pieces, end
        self._last = {choice: place for place, (choice, _) in enumerate(pieces)}

    async def deltas(self) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
        try:
            for place, (choice, text) in enumerate(self._pieces):
                self.told += 1
                reason = self._end if self._last[choice] == place else None
                yield choice, CompletionDelta("r", choice, text, (1,), None, reason)
        finally:
            self.is_closed = True


async def read(
    source: Source, limits: LineLimits, num_choices: int = 1
) -> list[tuple[str, FinishReason | None]]:
    texts = [""] * num_choices
    reasons: list[FinishReason | None] = [None] * num_choices
    clock = Clock(tick_s=1.0)
    async with aclosing(limited(source.deltas(), num_choices, limits, clock)) as deltas:
        async for choice, delta in deltas:
            assert reasons[choice] is None
            texts[choice] += delta.text
            reasons[choice] = delta.finish_reason
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
