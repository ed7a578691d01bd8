"""Find tool calls in generated text: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`.

This is the format of the Hermes and Qwen families. The parser takes text in any pieces, gives
content as early as it can, and loses nothing: a block that is not a call of an offered function
stays content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """One call of a function."""

    name: str
    arguments: str  # JSON text


@dataclass(frozen=True, slots=True)
class Parsed:
    """What one piece of text gave: content and calls, in their order."""

    parts: tuple[str | ParsedCall, ...] = ()

    @property
    def content(self) -> str:
        """The content alone."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> tuple[ParsedCall, ...]:
        """The calls alone."""
        return tuple(part for part in self.parts if isinstance(part, ParsedCall))


@dataclass(slots=True)
class ToolCallParser:
    """Split generated text into content and tool calls, incrementally.

    Attributes:
        names: the functions that were offered; a call of another one stays content.
    """

    names: Collection[str]
    _pending: str = field(default="", init=False)  # text that cannot be told apart yet
    _found: bool = field(default=False, init=False)

    def feed(self, text: str) -> Parsed:
        """Take the next piece of text."""
        self._pending += text
        return self._take(final=False)

    def finish(self) -> Parsed:
        """Take the end of the text; a block that was left open counts if it is complete."""
        return self._take(final=True)

    def take(self, text: str, *, is_last: bool) -> Parsed:
        """Take a piece of text, and the end if that is behind it."""
        parsed = self.feed(text)
        if not is_last:
            return parsed
        return Parsed(parsed.parts + self.finish().parts)

    def _take(self, final: bool) -> Parsed:
        """Consume as much of the pending text as can be told apart."""
        parts: list[str | ParsedCall] = []
        while self._pending:
            start = self._pending.find(OPEN)
            if start < 0:
                parts.append(self._take_content(final))
                break
            end = self._end(start + len(OPEN), final)
            if end < 0 and not final:
                text = self._pending[:start].rstrip()
                parts.append(self._drop_space(text, keep=len(text)))
                break
            stop = end + len(CLOSE) if end >= 0 else len(self._pending)
            inner = self._pending[start + len(OPEN) : end if end >= 0 else stop]
            if call := _parse(inner, self.names):
                parts += [self._drop_space(self._pending[:start].rstrip(), keep=stop), call]
                self._found = True
            else:
                parts.append(self._drop_space(self._pending[:stop], keep=stop))
        return Parsed(tuple(part for part in parts if part))

    def _end(self, start: int, final: bool) -> int:
        """Return where a block's closing tag is; -1: not there yet.

        A tag in the middle of one of its texts closes nothing, if that leads to a whole block.
        """
        first = end = self._pending.find(CLOSE, start)
        while end >= 0:
            whole = _is_whole(self._pending[start:end])
            if whole is not None:
                return end if whole else first
            end = self._pending.find(CLOSE, end + 1)
        return first if final else -1

    def _take_content(self, final: bool) -> str:
        """Take the text before anything that may be the start of a block."""
        if final:
            text, self._pending = self._pending, ""
            return text.rstrip() if self._found else text
        held = _partial_tag(self._pending)
        text = self._pending[: len(self._pending) - held].rstrip()
        return self._drop_space(text, keep=len(text))

    def _drop_space(self, text: str, keep: int) -> str:
        """Advance to `keep`; space that only separates calls is not content."""
        self._pending = self._pending[keep:]
        return "" if self._found and not text.strip() else text


def _partial_tag(text: str) -> int:
    """Return how many characters at the end of `text` may be the start of a block."""
    longest = min(len(OPEN) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if OPEN.startswith(text[-n:])), 0)


def _is_whole(inner: str) -> bool | None:
    """Whether a text is JSON; None: it ends in the middle of one of the texts in it."""
    try:
        json.loads(inner)
    except json.JSONDecodeError as error:
        return None if error.msg.startswith("Unterminated string") else False
    except (ValueError, RecursionError):
        return False
    return True


def _parse(inner: str, names: Collection[str]) -> ParsedCall | None:
    """Return the call in a block, or None when it is not one of an offered function."""
    try:
        value = json.loads(inner, parse_constant=_not_json)
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            return None
        given = value.get("arguments")
        if given is None or given == "":  # of a function that takes none
            given = {}
        if isinstance(given, str):  # JSON already, if it is any
            given = json.loads(given, parse_constant=_not_json)
        if not isinstance(given, dict):
            return None
        arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return None
    if _SURROGATE.search(arguments):  # half of a character, which is JSON as an escape alone
        arguments = json.dumps(given)
    return ParsedCall(value["name"], arguments) if value["name"] in names else None


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
