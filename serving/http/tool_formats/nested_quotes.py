"""Texts of Python's that models write with quotes of the same kind in them, as shell commands have.

    [run(command='grep -c 'a b' notes.txt')]

Such a text ends where an argument or a call may follow, or the end of all, and that at one place
alone: what may end at several places is ambiguous, and left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

ARGUMENT: Final = r"[^\W\d][\w-]*(?=\s*=(?!=))"
_QUOTE: Final = re.compile(r"[\"']")
_SIGNS: Final = {quote: re.compile(rf"\\.|{quote}", re.DOTALL) for quote in "\"'"}
_CLOSES: Final = re.compile(r"\s*[,)\]}:]")  # what stands behind a text as Python has it
_MORE: Final = re.compile(rf"\s*,\s*{ARGUMENT}")


def requoted(text: str, names: Iterable[str]) -> str | None:
    """Return a list of calls with the quotes within its texts escaped.

    Args:
        text: the list.
        names: of functions that it may call.

    Returns:
        None: there are none, or it is ambiguous where their texts end.
    """
    among = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    call_ends = re.compile(rf"\s*\)\s*(?:\]\s*\Z|,\s*(?:{among})\s*\()")
    parts: list[str] = []
    at, is_changed = 0, False
    while quote := _QUOTE.search(text, at):
        inner = _quotes_within(text, quote.end(), quote[0], call_ends)
        if inner is None:
            return None
        *within, end = inner
        begin = at
        for place in within:
            parts += text[begin:place], "\\"
            begin = place
        at, is_changed = end + 1, is_changed or bool(within)
        parts.append(text[begin:at])
    return "".join([*parts, text[at:]]) if is_changed else None


def _quotes_within(
    text: str, start: int, quote: str, call_ends: re.Pattern[str]
) -> list[int] | None:
    """Return where quotes stand in what is between quotes, and the one that closes it at last.

    Args:
        text: the list of calls.
        start: behind the quote that opens.
        quote: which one.
        call_ends: what follows the last text of a call.

    Returns:
        None: it may end at several places, or nowhere.
    """
    found: list[int] = []
    num_within: int | None = None  # before the quote that may close it
    for sign in _SIGNS[quote].finditer(text, start):
        if sign[0] != quote:
            continue
        found.append(sign.start())
        if len(found) == 1 and _CLOSES.match(text, sign.end()):
            return found
        is_last = call_ends.match(text, sign.end()) is not None
        if is_last or _MORE.match(text, sign.end()):
            if num_within is not None:
                return None
            num_within = len(found)
        if is_last:
            break
    return None if num_within is None else found[:num_within]
