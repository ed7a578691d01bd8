r"""Patterns of strings in JSON, so that the compiler enforces them.

A class of a regular expression that holds every control character, as each negated one does, the
compiler takes for one that holds every escape, too: for `[^"]` it allows `\"`. Most control
characters cannot be written here in any case (`source.JSON_OPTIONS`), so they are taken out of such
classes, which changes nothing else.
"""

from __future__ import annotations

import re
import warnings

UNWRITABLE = r"\x00-\x07\x0b\x0e-\x1f"
_PROPERTY = re.compile(r"\\P(\{[^{}]*\}|[A-Za-z])")
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
_SPELLED_CONTROL = re.compile(r"[\x00-\x1f]|\\(?:[0c]|x0|x1|x\{|u00[01]|u\{)")


def writable(pattern: str) -> str:
    """Return a pattern without the characters that cannot be written, in the compiler's syntax.

    Raises:
        ValueError: it asks for such a character, or what it means here is not clear.
    """
    return _Rewriter(pattern).rewritten()


class _Rewriter:
    """Goes through a pattern, whose classes may be nested."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._parts: list[str] = []
        self._begins: list[int | None] = []  # of the classes around this place; None: negated

    def rewritten(self) -> str:
        """Return the whole."""
        while self._at < len(self._pattern):
            char, pair = self._pattern[self._at], self._pattern[self._at : self._at + 2]
            if negated := _PROPERTY.match(self._pattern, self._at):
                self._copy(negated.end(), rf"[^\p{negated[1]}{UNWRITABLE}]")
            elif char == "\\":
                self._copy(self._at + 2)
            elif self._begins and pair == "[:":
                self._posix()
            elif char == "[":
                self._open()
            elif self._begins and char == "]":
                self._close()
            elif self._begins and pair in ("&&", "~~"):
                raise ValueError(f"it has {pair} in a class; write that character once")
            elif not self._begins and _CONTROL.match(char):
                raise ValueError(f"it has the control character {char!r}, which cannot be written")
            else:
                self._copy(self._at + 1)
        return "".join(self._parts)

    def _copy(self, end: int, changed: str | None = None) -> None:
        self._parts.append(self._pattern[self._at : end] if changed is None else changed)
        self._at = end

    def _open(self) -> None:
        negated = self._pattern.startswith("[^", self._at)
        self._begins.append(None if negated else self._at)
        if negated:
            self._copy(self._at + 2, f"[^{UNWRITABLE}")
        else:
            self._copy(self._at + 1)
        after = self._pattern[self._at : self._at + 1]
        if after in ("]", "-"):  # itself, at the beginning of a class
            self._copy(self._at + 1, f"\\{after}")

    def _close(self) -> None:
        self._copy(self._at + 1)
        begin = self._begins.pop()
        if begin is not None:
            _check_class(self._pattern[begin : self._at])

    def _posix(self) -> None:
        end = self._pattern.find(":]", self._at)
        if end < 0 or self._pattern.startswith("[:^", self._at):
            raise ValueError("it has [:^…:], which is not supported; write [^[:…:]]")
        self._copy(end + 2)


def _check_class(text: str) -> None:
    """Refuse a class of all control characters, spelled out, without one that has an escape."""
    if not _SPELLED_CONTROL.search(text):
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of sets in sets
            fits = re.compile(text).fullmatch
    except re.error as error:
        raise ValueError(f"it has the class {text!r}, which cannot be checked: {error}") from error
    if all(fits(chr(code)) for code in range(32)) and not (fits('"') and fits("\\")):
        raise ValueError(
            f"it has the class {text!r}, which holds control characters that cannot be written; "
            "begin it with a space"
        )
