"""Answers that end with a line: where it takes too long, or is not indented as it should be."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from onnxport.serving.outputs import CompletionDelta

Deltas = AsyncGenerator[CompletionDelta, None]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class LineLimits:
    """llama.cpp's limits of what is filled in.

    Attributes:
        indent: spaces and tabs that each line but the first has, at least; 0: any number.
        predict_s: how long an answer may take from its first token before its next line ends it;
            None: as long as it likes.
    """

    indent: int = 0
    predict_s: float | None = None


@dataclass(slots=True)
class _Lines:
    """What was seen of one text."""

    limits: LineLimits
    clock: Clock
    begun_s: float | None = None
    indent: int | None = field(default=None)  # of the line that has nothing else yet

    def seen(self, delta: CompletionDelta) -> CompletionDelta:
        """Return a delta, cut and with its end where the text ends in it."""
        now_s = self.clock()
        if self.begun_s is None:
            self.begun_s = now_s
        if (place := self._shallow(delta.text)) is not None:
            return _ending(replace(delta, text=delta.text[:place]))
        predict_s = self.limits.predict_s
        is_late = predict_s is not None and now_s - self.begun_s > predict_s
        cuts = is_late and "\n" in delta.text and delta.finish_reason is None
        return _ending(delta) if cuts else delta

    def _shallow(self, text: str) -> int | None:
        """Return where a line begins that is indented too little, behind its indent."""
        if not self.limits.indent:
            return None
        for place, char in enumerate(text):
            if self.indent is not None and char in " \t":
                self.indent += 1
                continue
            if self.indent is not None and self.indent < self.limits.indent:
                return place
            self.indent = 0 if char == "\n" else None
        return None


def _ending(delta: CompletionDelta) -> CompletionDelta:
    """Return the last delta of a text; it keeps an end that it has."""
    if delta.finish_reason in ("error", "abort", "timeout"):
        return delta
    return replace(delta, finish_reason="length", stop_reason=None)


async def limited(
    deltas: Deltas, num_choices: int, limits: LineLimits, clock: Clock = time.monotonic
) -> Deltas:
    """Yield deltas up to the line that ends each choice, and end the request behind the last one.

    Args:
        deltas: of one prompt; closed at the end, which aborts what has not ended by itself.
        num_choices: how many completions it has.
        limits: of each.
        clock: in seconds.
    """
    going = {choice: _Lines(limits, clock) for choice in range(num_choices)}
    async with aclosing(deltas):
        async for delta in deltas:
            if delta.index not in going:
                continue
            if delta.progress is not None:  # before the first token, with which time begins
                yield delta
                continue
            delta = going[delta.index].seen(delta)
            if delta.finish_reason is not None:
                del going[delta.index]
            yield delta
            if not going:
                return
