r"""Patterns that look ahead at their beginning, as several patterns that do not.

No automaton looks around. But what stands behind `^` is looked at from the beginning of the text,
so `^(?=A)B` says that the text fits `^A` and fits `^B`; and of the common negative ones each has
a pattern of its own. It is enough that a text which fits the patterns fits the whole one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

MOST_AHEAD = 16  # patterns that one is written as
_AHEAD = ("(?=", "(?!")
_AROUND = re.compile(r"\(\?<?[=!]")
_PIECE = re.compile(r"\\.|.", re.DOTALL)
_CLASS = r"\[\^?(?:[^\]\\\[^]|\\.)(?:[^\]\\\[]|\\.)*\]"
_CHAR = r"\\[^\w\s]|[^\\\[\](){}.*+?^$|/]"
_ONE = rf"{_CLASS}|\\[sSdDwW]|{_CHAR}"
_ALL_OF = re.compile(rf"\^?(?P<one>{_ONE})\*\$")
_FIRST = re.compile(rf"\^?(?P<one>{_ONE})")
_ANYWHERE = re.compile(rf"\^?\.\*(?P<one>{_ONE})")
_TWICE = re.compile(rf"\^?\.\*(?P<one>{_CHAR})(?P=one)")


def looks_around(pattern: str) -> bool:
    """Whether a pattern looks around, so far as can be seen at once."""
    return _AROUND.search(pattern) is not None


def without_lookahead(pattern: str) -> tuple[str, ...] | None:
    """Return patterns that a text has to fit, all of them, in place of one that looks ahead.

    Args:
        pattern: as ECMA-262 has it.

    Returns:
        Each text that fits them fits the pattern. None: it cannot be written so.
    """
    if not pattern.startswith("^") or "[]" in pattern or "[^]" in pattern:  # read in two ways
        return None
    if any(piece == "|" and depth == 0 for _, piece, depth in _pieces(pattern)):
        return None
    parts: list[str] = []
    at = 1
    while pattern.startswith(_AHEAD, at):
        end = _end(pattern, at)
        if end is None or pattern[end : end + 1] in ("*", "+", "?", "{"):
            return None
        inner = pattern[at + 3 : end - 1]
        part = f"^(?:{inner})" if pattern[at + 2] == "=" else _never(inner)
        if part is None or looks_around(inner) or len(parts) == MOST_AHEAD:
            return None
        parts.append(part)
        at = end
    rest = pattern[at:]
    return None if looks_around(rest) else (*parts, f"^{rest}")


def _never(inner: str) -> str | None:
    """Return a pattern of texts that do not fit another one at their beginning; None: unknown.

    A `.` of that fits no end of a line; these patterns then say the same of all lines, not of the
    first alone.
    """
    if found := _ALL_OF.fullmatch(inner):
        return _other(found["one"])
    if found := _FIRST.fullmatch(inner):
        return f"^(?:{_other(found['one'])}|$)"
    if found := _ANYWHERE.fullmatch(inner):
        return f"^{_other(found['one'])}*$"
    if found := _TWICE.fullmatch(inner):
        return f"^(?:{found['one']}?{_other(found['one'])})*{found['one']}?$"
    return None


def _other(one: str) -> str:
    """Return the class of characters that are not those of a class, or not this one."""
    if one.startswith("[^"):
        return f"[{one[2:]}"
    return f"[^{one[1:]}" if one.startswith("[") else f"[^{one}]"


def _pieces(pattern: str, at: int = 0) -> Iterator[tuple[int, str, int]]:
    """Yield what stands outside of classes: where, the character with its escape, and how deep."""
    depth = 0
    in_class = False
    for piece in _PIECE.finditer(pattern, at):
        if in_class:
            in_class = piece[0] != "]"
            continue
        if piece[0] == ")":
            depth -= 1
        yield piece.start(), piece[0], depth
        if piece[0] == "(":
            depth += 1
        in_class = piece[0] == "["


def _end(pattern: str, at: int) -> int | None:
    """Return where a group ends that begins at a place; None: it does not."""
    found = (place for place, piece, depth in _pieces(pattern, at) if piece == ")" and depth == 0)
    place = next(found, None)
    return None if place is None else place + 1
