"""The text of one request: detokenized as tokens come, and cut at stop strings."""

from __future__ import annotations

import re
from copy import copy
from typing import Protocol

from onnxport.serving.outputs import Failure

_SURROGATE = re.compile("[\ud800-\udfff]")


HALF = (
    "holds half of a character (a lone UTF-16 surrogate such as \\ud800, which bytes that are not "
    "UTF-8 become, too); give whole characters"
)


def is_whole(text: str) -> bool:
    """Whether a text has whole characters alone, and so a form in UTF-8."""
    return text.isascii() or _SURROGATE.search(text) is None


def with_halves_escaped(text: str) -> str:
    """Return a text of JSON with halves of characters as the escapes that JSON has for them."""
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", text)


class Pieces(Protocol):
    """Turns tokens into pieces of text; see `detokenizer`."""

    def add(self, token_id: int) -> str:
        """Return the text that `token_id` completes."""
        ...

    def finish(self) -> str:
        """Return the text that was kept back."""
        ...

    def fork(self) -> Pieces:
        """Return what goes on from here on its own."""
        ...


class TextStream:
    """Releases text as it is certain: never one that a stop string may yet cut off.

    The stop string that is complete first ends the text, and of those that are complete at the
    same character the longest: how the text was split into tokens makes no difference.

    Attributes:
        may_stop: whether there are stop strings, so that the text may end its sequence.
        failure: why there is no more text; None: there is. Set by who finds it out.
    """

    __slots__ = (
        "_held",
        "_includes_stop",
        "_num_early",
        "_pieces",
        "_stop",
        "failure",
        "may_stop",
    )

    def __init__(
        self,
        pieces: Pieces,
        stop: tuple[str, ...] = (),
        *,
        includes_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Begin a text.

        Args:
            pieces: gives the text of each token.
            stop: strings that end the text.
            includes_stop: whether the one that ended the text is a part of it.
            min_tokens: a stop string that is complete within so many tokens is text like any other.
        """
        self._pieces = pieces
        self._stop = stop
        self._includes_stop = includes_stop
        self._num_early = min_tokens  # tokens still to come that end no stop string
        self._held = ""  # a beginning of some stop string
        self.may_stop = bool(stop)
        self.failure: Failure | None = None

    def add(self, token_id: int) -> tuple[str, str | None]:
        """Return new text, and the stop string that ended it or None."""
        piece = self._pieces.add(token_id)
        if not self._stop:
            return piece, None
        self._num_early -= 1
        return self._release(piece)

    def finish(self) -> tuple[str, str | None]:
        """Return all that was held; what completes in it may still be a stop string."""
        text, stop = self._release(self._pieces.finish())
        if stop is None:
            text, self._held = text + self._held, ""
        return text, stop

    def fork(self) -> TextStream:
        """Return a text that goes on from here on its own."""
        other = copy(self)
        other._pieces = self._pieces.fork()
        return other

    def _release(self, piece: str) -> tuple[str, str | None]:
        text = self._held + piece
        found = None
        if self._num_early < 0:
            found = find_stop(text, self._stop, len(self._held))
        if found is not None:
            start, stop = found
            self._held = ""
            return text[: start + len(stop) if self._includes_stop else start], stop
        certain = len(text) - longest_beginning(text, self._stop)
        self._held = text[certain:]
        return text[:certain], None


def find_stop(text: str, stop: tuple[str, ...], after: int = 0) -> tuple[int, str] | None:
    """Return where the stop string that is complete first begins, and which it is.

    Args:
        text: where to look.
        stop: what to look for.
        after: a stop string must be complete after so many characters, not before.
    """
    found = []
    for string in stop:
        start = text.find(string, max(0, after + 1 - len(string)))
        if start >= 0:
            found.append((start + len(string), start, string))
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
