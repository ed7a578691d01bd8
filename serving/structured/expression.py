"""Reading regular expressions, so far as their syntax is in common use."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import NamedTuple

MOST_NESTED = 50  # groups; each takes some of Python's own stack
ASCII = (1 << 128) - 1
COUNTS = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")


def _set(chars: str) -> int:
    """Return the bits of the ASCII characters among some."""
    return sum(1 << ord(char) for char in set(chars) if char.isascii())


def _span(first: str, last: str) -> int:
    return (1 << ord(last) + 1) - (1 << ord(first))


DIGITS = _span("0", "9")
LETTERS = _span("a", "z") | _span("A", "Z")
CLASSES = {"d": DIGITS, "w": DIGITS | LETTERS | _set("_"), "s": _set(" \t\n\v\f\r")}
CLASSES |= {name.upper(): ASCII & ~chars for name, chars in CLASSES.items()}
CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}


class UnknownSyntaxError(Exception):
    """Where a text ends in this expression cannot be told."""


class Chars(NamedTuple):
    """One character."""

    chars: int  # bit i: the ASCII character i may stand there; nothing is said of others
    shortest: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """Parts in a row."""

    parts: tuple[Part, ...]
    shortest: int


@dataclass(frozen=True, slots=True)
class Either:
    """One of some parts."""

    parts: tuple[Part, ...]
    shortest: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part, so many times."""

    body: Part
    least: int
    most: int | None
    shortest: int


Part = Chars | Row | Either | Repeat  # `shortest`: characters of its shortest text


def read_expression(text: str) -> Part:
    """Read an expression that is valid in the syntax of Rust's `regex`.

    Raises:
        UnknownSyntaxError: not all of its syntax is known here.
    """
    return _Reader(text).read()


def ascii_chars(part: Part) -> int:
    """Return which ASCII characters the texts of a part may have: bit i, the character i."""
    if isinstance(part, Chars):
        return part.chars
    inner = (part.body,) if isinstance(part, Repeat) else part.parts
    return reduce(or_, map(ascii_chars, inner), 0)


class _Reader:
    """Reads the syntax that is in common use, and refuses all other."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0

    def read(self) -> Part:
        part = self._either()
        if self._at < len(self._text):
            raise UnknownSyntaxError(self._text[self._at :])
        return part

    def _next(self) -> str:
        """Return the next character; the empty text at the end."""
        return self._text[self._at : self._at + 1]

    def _take(self) -> str:
        char = self._next()
        if not char:
            raise UnknownSyntaxError("the end")
        self._at += 1
        return char

    def _skip(self, text: str) -> bool:
        """Read a text, if it is there."""
        found = self._text.startswith(text, self._at)
        self._at += found * len(text)
        return found

    def _either(self) -> Part:
        parts = [self._row()]
        while self._skip("|"):
            parts.append(self._row())
        return Either(tuple(parts), min(one.shortest for one in parts))

    def _row(self) -> Part:
        parts = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._repeated(self._one()))
        return Row(tuple(parts), sum(one.shortest for one in parts))

    def _repeated(self, part: Part) -> Part:
        counts: tuple[int, int | None]
        match self._next():
            case "*":
                counts = (0, None)
            case "+":
                counts = (1, None)
            case "?":
                counts = (0, 1)
            case "{":
                found = COUNTS.match(self._text, self._at)
                if found is None:
                    raise UnknownSyntaxError(self._text[self._at :])
                counts = _numbers(found)
                self._at = found.end() - 1
            case _:
                return part
        self._at += 1
        if self._next() in ("*", "+", "?", "{"):  # as few as possible, or a repetition of another
            raise UnknownSyntaxError(self._next())
        return Repeat(part, *counts, counts[0] * part.shortest)

    def _one(self) -> Part:
        char = self._take()
        if char == "(":
            self._skip("?:")
            self._depth += 1
            if self._next() == "?" or self._depth > MOST_NESTED:
                raise UnknownSyntaxError("(?")
            part = self._either()
            self._depth -= 1
            if not self._skip(")"):
                raise UnknownSyntaxError("(")
            return part
        if char == "[":
            return Chars(self._class())
        if char == ".":
            return Chars(ASCII & ~_set("\n"))
        if char == "\\":
            return Chars(self._escaped())
        if char in "*+?{}]^$":
            raise UnknownSyntaxError(char)
        return Chars(_set(char))

    def _escaped(self) -> int:
        char = self._take()
        if char in CLASSES:
            return CLASSES[char]
        if char in CONTROLS:
            return _set(CONTROLS[char])
        if char.isalnum() or char in "<>":  # which stand for ends of words
            raise UnknownSyntaxError(f"\\{char}")
        return _set(char)

    def _class(self) -> int:
        negated = self._skip("^")
        if self._next() == "]":  # which is one of the characters there
            raise UnknownSyntaxError("]")
        chars = 0
        while not self._skip("]"):
            first = self._member()
            more = self._text[self._at : self._at + 2]
            if more[:1] == "-" and more != "-]":
                self._at += 1
                last = self._member()
                one = first.bit_count() == last.bit_count() == 1
                if not one or first > last or more == "--":
                    raise UnknownSyntaxError("-")
                first = (last << 1) - first
            chars |= first
        return ASCII & ~chars if negated else chars

    def _member(self) -> int:
        char = self._take()
        if char == "\\":
            return self._escaped()
        more = self._next()
        if char in "[]^" or (char in "-&~" and more == char):  # sets of sets
            raise UnknownSyntaxError(char)
        return _set(char)


def _numbers(found: re.Match[str]) -> tuple[int, int | None]:
    least, comma, most = found.groups()
    if not comma:
        return int(least), int(least)
    return int(least), int(most) if most else None
