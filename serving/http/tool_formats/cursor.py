"""A place in a text of which more may come."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

CLOSERS = frozenset("]})>")  # a block ends with one of them
_SPACE = re.compile(r"\s*")
_JSON_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"|["\[\]{}]', re.DOTALL)
_PYTHON_PARTS = re.compile(r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|["'\[\]{}()]""", re.DOTALL)


class Incomplete(Exception):  # noqa: N818 - nothing went wrong
    """What follows the text decides what stands here.

    Attributes:
        in_block: whether nothing but the end of a block can decide it, so one of `CLOSERS`.
    """

    def __init__(self, *, in_block: bool = False) -> None:
        """Say what is missing."""
        super().__init__()
        self.in_block = in_block


class Cursor:
    """Goes through a text. Where its end leaves something open, it raises `Incomplete`.

    Attributes:
        at: the place.
    """

    def __init__(self, text: str, at: int, final: bool) -> None:
        """Begin at a place.

        Args:
            text: what was generated so far.
            at: the place.
            final: whether nothing follows; then nothing is left open.
        """
        self.at = at
        self._text = text
        self._final = final

    def skip_space(self) -> None:
        """Go to the next character that is no space, if there is one."""
        found = _SPACE.match(self._text, self.at)
        assert found is not None, "no space is space enough"
        self.at = found.end()

    def next(self) -> str:
        """Return the character that stands here; empty at the end of all."""
        if self.at == len(self._text) and not self._final:
            raise Incomplete
        return self._text[self.at : self.at + 1]

    def take(self, *texts: str) -> str | None:
        """Go past the longest of some texts that stands here; None: none does."""
        rest = self._text[self.at : self.at + max(map(len, texts), default=0)]
        if not self._final and any(len(rest) < len(t) and t.startswith(rest) for t in texts):
            raise Incomplete
        found = max((text for text in texts if rest.startswith(text)), key=len, default=None)
        self.at += len(found or "")
        return found

    def since(self, start: int) -> str:
        """Return what stands between a place and this one."""
        return self._text[start : self.at]

    def until(self, text: str) -> str | None:
        """Go past the next `text`, a tag, and return what stands before; None: it does not come."""
        end = self._text.find(text, self.at)
        if end < 0:
            if not self._final:
                raise Incomplete(in_block=True)
            return None
        before, self.at = self._text[self.at : end], end + len(text)
        return before

    def brackets(self, *, python: bool = False) -> str | None:
        """Go past the bracket that closes the one here, and return all in between, with both.

        Args:
            python: whether texts may stand in single quotes, and round brackets count.

        Returns:
            None: it is not closed.
        """
        depth = 0
        for part in (_PYTHON_PARTS if python else _JSON_PARTS).finditer(self._text, self.at):
            if part[0] in "\"'":  # a text without its end
                break
            if len(part[0]) > 1:
                continue
            depth += 1 if part[0] in "[{(" else -1
            if depth == 0:
                whole, self.at = self._text[self.at : part.end()], part.end()
                return whole
        if not self._final:
            raise Incomplete(in_block=True)
        return None

    def json(self) -> Any:
        """Go past a list or an object of JSON and return it; None: it is none."""
        if not self.next() or self.next() not in "[{":
            return None
        whole = self.brackets()
        return None if whole is None else json_value(whole)


def json_value(text: str) -> Any:
    """Return the value of a text of JSON; None: it is none, or null."""
    try:
        return json.loads(text, parse_constant=_not_json)
    except (ValueError, RecursionError):
        return None


def longest_partial(text: str, markers: Iterable[str]) -> int:
    """Return how many characters at the end of `text` may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        most = min(len(marker) - 1, len(text))
        fits = (n for n in range(most, longest, -1) if marker.startswith(text[-n:]))
        longest = next(fits, longest)
    return longest


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
