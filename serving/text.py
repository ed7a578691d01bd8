"""The text of one request: detokenized as tokens come, and cut at stop strings."""

from __future__ import annotations

from typing import Protocol


class Pieces(Protocol):
    """Turns tokens into pieces of text; see `detokenizer`."""

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        ...

    def finish(self) -> str:
        """Return the text that was kept back."""
        ...


class TextStream:
    """Releases text as it is certain: never one that a stop string may yet cut off.

    The stop string that is complete first ends the text, and of those that are complete at the
    same character the longest: how the text was split into tokens makes no difference.
    """

    __slots__ = ("_held", "_pieces", "_stop")

    def __init__(self, pieces: Pieces, stop: tuple[str, ...] = ()) -> None:
        self._pieces = pieces
        self._stop = stop
        self._held = ""  # a beginning of some stop string

    def add(self, token_id: int) -> tuple[str, str | None]:
        """Return new text, and the stop string that ended it or None."""
        piece = self._pieces.add(token_id)
        return self._release(piece) if self._stop else (piece, None)

    def finish(self) -> tuple[str, str | None]:
        """Return all that was held; what completes in it may still be a stop string."""
        text, stop = self._release(self._pieces.finish())
        if stop is None:
            text, self._held = text + self._held, ""
        return text, stop

    def _release(self, piece: str) -> tuple[str, str | None]:
        text = self._held + piece
        found = find_stop(text, self._stop)
        if found is not None:
            start, stop = found
            self._held = ""
            return text[:start], stop
        certain = len(text) - longest_beginning(text, self._stop)
        self._held = text[certain:]
        return text[:certain], None


def find_stop(text: str, stop: tuple[str, ...]) -> tuple[int, str] | None:
    """Return where the first complete stop string begins, and which it is."""
    found = [(start + len(s), start, s) for s in stop if (start := text.find(s)) >= 0]
    if not found:
        return None
    _, start, string = min(found)
    return start, string


def longest_beginning(text: str, stop: tuple[str, ...]) -> int:
    """Return the length of the longest end of `text` with which a stop string begins."""
    longest = max(map(len, stop), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-length:]) for s in stop):
            return length
    return 0
