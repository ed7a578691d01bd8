"""A place in a text of which more may come."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Protocol

_SPACE = re.compile(r"\s*")
_JSON_SIGNS = re.compile(r'["\[\]{}]')
_PYTHON_SIGNS = re.compile(r"""["'\[\]{}()]""")
_TEXT_SIGNS = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}


class Awaited(Protocol):
    """What has to come before another look at a text is worth it; it reads each piece once."""

    def has_come(self, text: str) -> bool:
        """Take the next piece of text; returns whether it was in it."""
        ...


class AwaitedTag:
    """Waits for a text."""

    def __init__(self, tag: str, before: str) -> None:
        """Begin behind a text without it, whose end may be a part of it."""
        self._tag = tag
        self._before = before

    def has_come(self, text: str) -> bool:
        """Take the next piece of text; returns whether the tag was in it."""
        seen = self._before[max(0, len(self._before) - len(self._tag) + 1) :] + text
        self._before = seen
        return self._tag in seen


class AwaitedSign:
    """Waits for a character that is no space, where space was gone past."""

    def has_come(self, text: str) -> bool:
        """Take the next piece of text; returns whether it was in it."""
        return not text.isspace() and text != ""


class AwaitedBracket:
    """Waits for the bracket that closes the first one of a text."""

    def __init__(self, *, python: bool = False) -> None:
        """Begin before a bracket.

        Args:
            python: whether texts may stand in single quotes, and round brackets count.
        """
        self._signs = _PYTHON_SIGNS if python else _JSON_SIGNS
        self._quote = ""  # of the text that is open
        self._depth = 0
        self._skips = False  # the next character, behind a backslash

    def has_come(self, text: str) -> bool:
        """Take the next piece of text; returns whether the bracket was in it."""
        return self.end(text) is not None

    def end(self, text: str, at: int = 0) -> int | None:
        """Take text from a place on; returns the place behind the bracket; None: it has none."""
        if self._skips and at < len(text):
            self._skips, at = False, at + 1
        while found := (_TEXT_SIGNS[self._quote] if self._quote else self._signs).search(text, at):
            sign, at = found[0], found.end()
            if sign == "\\":
                self._skips = at == len(text)
                at += 1
            elif sign in "\"'":
                self._quote = "" if self._quote else sign
            else:
                self._depth += 1 if sign in "[{(" else -1
                if self._depth == 0:
                    return at
        return None


class Incomplete(Exception):  # noqa: N818 - nothing went wrong
    """What follows the text decides what stands here.

    Attributes:
        awaited: nothing but this can decide it; None: anything may.
    """

    def __init__(self, awaited: Awaited | None = None) -> None:
        """Say what is missing."""
        super().__init__()
        self.awaited = awaited


class Cursor:
    """Goes through a text. Where its end leaves something open, it raises `Incomplete`.

    Attributes:
        at: the place.
        seen: behind the last tag or bracket that was looked for.
    """

    def __init__(self, text: str, at: int, final: bool) -> None:
        """Begin at a place.

        Args:
            text: what was generated so far.
            at: the place.
            final: whether nothing follows; then nothing is left open.
        """
        self.at = at
        self.seen = at
        self._text = text
        self._final = final
        self._spaced = -1  # the end of the text, where space was gone past up to it

    def skip_space(self) -> None:
        """Go to the next character that is no space, if there is one."""
        found = _SPACE.match(self._text, self.at)
        assert found is not None, "no space is space enough"
        self.at = found.end()
        if self.at == len(self._text):
            self._spaced = self.at

    def _open(self) -> Incomplete:
        """Return what to raise where what follows the text decides what stands here."""
        return Incomplete(AwaitedSign() if self.at == self._spaced else None)

    def go_past(self, pattern: re.Pattern[str]) -> str:
        """Go past as many characters as a pattern of single ones has here, and return them."""
        found = pattern.match(self._text, self.at)
        if found is None:
            self.next()
            return ""
        if found.end() == len(self._text) and not self._final:
            raise Incomplete
        self.at = found.end()
        return found[0]

    def next(self) -> str:
        """Return the character that stands here; empty at the end of all."""
        if self.at == len(self._text) and not self._final:
            raise self._open()
        return self._text[self.at : self.at + 1]

    def take(self, *texts: str) -> str | None:
        """Go past the longest of some texts that stands here; None: none does."""
        rest = self._text[self.at : self.at + max(map(len, texts), default=0)]
        if not self._final and any(len(rest) < len(t) and t.startswith(rest) for t in texts):
            raise self._open()
        found = max((text for text in texts if rest.startswith(text)), key=len, default=None)
        self.at += len(found or "")
        return found

    def since(self, start: int) -> str:
        """Return what stands between a place and this one."""
        return self._text[start : self.at]

    def wait_for(self, text: str) -> int | None:
        """Return where the next `text`, a tag, is; None: it does not come."""
        end = self._text.find(text, self.at)
        self.seen = max(self.seen, len(self._text) if end < 0 else end + len(text))
        if end >= 0:
            return end
        if not self._final:
            raise Incomplete(AwaitedTag(text, self._text[self.at :]))
        return None

    def goes_on(self, error: Incomplete, tag: str) -> Incomplete:
        """Return what to raise where a tag that was waited for is within what is left open."""
        if isinstance(error.awaited, AwaitedBracket | AwaitedTag):
            return error
        return Incomplete(AwaitedTag(tag, self._text[self.at :]))

    def until(self, text: str) -> str | None:
        """Go past the next `text`, a tag, and return what stands before; None: it does not come."""
        end = self.wait_for(text)
        if end is None:
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
        closing = AwaitedBracket(python=python)
        end = closing.end(self._text, self.at)
        self.seen = max(self.seen, len(self._text) if end is None else end)
        if end is None:
            if not self._final:
                raise Incomplete(closing)
            return None
        whole, self.at = self._text[self.at : end], end
        return whole

    def json(self) -> Any:
        """Go past a list or an object of JSON and return it; None: it is none."""
        if not self.next() or self.next() not in "[{":
            return None
        whole = self.brackets()
        return None if whole is None else json_value(whole)


def json_value(text: str) -> Any:
    """Return the value of a text of JSON; None: it is none, or null.

    Ends of lines may stand in its texts as they are, which models write.
    """
    try:
        return json.loads(text, parse_constant=_not_json, strict=False)
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


def hidden_places(text: str, hidden: Iterable[str]) -> list[tuple[int, int]]:
    """Return where the texts of `hidden` stand in a text: beginnings and ends, from the left on.

    They are of the text as it is: where one is taken out, what is around it makes no other one.
    """
    pattern = "|".join(map(re.escape, hidden))
    return [found.span() for found in re.finditer(pattern, text)] if pattern else []


def without(text: str, places: Iterable[tuple[int, int]]) -> str:
    """Return a text without what stands at some places of it."""
    kept, end = [], 0
    for start, behind in places:
        kept.append(text[end:start])
        end = behind
    return "".join([*kept, text[end:]])


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
