r"""Patterns of strings in JSON, so that the compiler enforces them.

A class of a regular expression that holds every control character, as each negated one does, the
compiler takes for one that holds every escape, too: for `[^"]` it allows `\"`. Most control
characters cannot be written here in any case (`source.JSON_OPTIONS`), so they are taken out of
negated classes, which changes nothing else; other classes that hold them without `"` and `\` are
refused.
"""

from __future__ import annotations

import re
import warnings

UNWRITABLE = r"\x00-\x07\x0b\x0e-\x1f"
_OF_SETS = ("&&", "--", "~~")  # what is in both classes, in the first alone, in one of the two
_BEGUN = re.compile(r"[^-\\][^\[\]^\\-]-")  # a range, behind no other one
MOST_NESTED = 8  # classes in classes
_CONTROLS = [chr(code) for code in (*range(8), *range(0x0E, 0x1C))]  # none is white space
_CONTROL = re.compile(r"[\x00-\x07\x0b\x0e-\x1f]")
_NEGATED_PROPERTY = re.compile(r"\\P(\{[^{}]*\}|[A-Za-z])")
_CLASS = re.compile(r"\\p(?:C|\{(?P<name>[^{}]*)\})|\[:cntrl:\]", re.IGNORECASE)
_CATEGORY = ("gc", "general_category", "generalcategory")
_OF_CONTROLS = ("c", "cc", "control", "cntrl", "other")
_CODE = re.compile(r"\\[xu]\{([0-9A-Fa-f]{1,6})\}")
_PROPERTY = re.compile(r"\\p(?:\{[^{}]*\}|[A-Za-z])")
_POSIX = re.compile(r"\[:\w+:\]")
_AROUND = re.compile(r"\(\?<?[=!]|\\[bB]|\\[1-9]|\\k<")  # look-around and back-references


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
        self._negated: list[bool] = []  # whether each of the classes around this place is
        self._begin = 0  # of the outermost class

    def rewritten(self) -> str:
        """Return the whole."""
        while self._at < len(self._pattern):
            char, pair = self._pattern[self._at], self._pattern[self._at : self._at + 2]
            found = _control_class(self._pattern, self._at)
            if found and sum(self._negated) % 2 == 0:  # in no negated class
                raise ValueError(f"it has {found}, and control characters cannot be written")
            around = None if self._negated else _AROUND.match(self._pattern, self._at)
            if around:
                raise ValueError(
                    f"it has {around[0]}: neither look-around nor back-references are supported, "
                    "but for what looks ahead right behind ^; write it in another way"
                )
            if negated := _NEGATED_PROPERTY.match(self._pattern, self._at):
                self._copy(negated.end(), rf"[^\p{negated[1]}{UNWRITABLE}]")
            elif char == "\\":
                self._copy(self._at + 2)
            elif self._negated and pair == "[:":
                self._posix()
            elif char == "[":
                self._open()
            elif self._negated and char == "]":
                self._close()
            elif self._negated and pair in _OF_SETS and not self._ends_range(pair):
                raise ValueError(f"it has {pair} in a class, which has two meanings; escape both")
            elif not self._negated and _CONTROL.match(char):
                raise ValueError(f"it has the control character {char!r}, which cannot be written")
            else:
                self._copy(self._at + 1)
        return "".join(self._parts)

    def _ends_range(self, pair: str) -> bool:
        """Whether a range such as `!-~` ends with the first of two characters."""
        return pair == "~~" and bool(_BEGUN.match(self._pattern, self._at - 3))

    def _copy(self, end: int, changed: str | None = None) -> None:
        self._parts.append(self._pattern[self._at : end] if changed is None else changed)
        self._at = end

    def _open(self) -> None:
        if not self._negated:
            self._begin = self._at
        if len(self._negated) == MOST_NESTED:
            raise ValueError(f"it has more than {MOST_NESTED} classes in each other")
        negated = self._pattern.startswith("[^", self._at)
        self._negated.append(negated)
        if negated:
            self._copy(self._at + 2, f"[^{UNWRITABLE}")
        else:
            self._copy(self._at + 1)
        after = self._pattern[self._at : self._at + 1]
        if after in ("]", "-"):  # itself, at the beginning of a class
            self._copy(self._at + 1, f"\\{after}")

    def _close(self) -> None:
        self._copy(self._at + 1)
        negated = self._negated.pop()
        if not self._negated and not negated:
            _check_class(self._pattern[self._begin : self._at])

    def _posix(self) -> None:
        end = self._pattern.find(":]", self._at)
        if end < 0 or self._pattern.startswith("[:^", self._at):
            raise ValueError("it has [:^…:], which is not supported; write [^[:…:]]")
        self._copy(end + 2)


def _control_class(pattern: str, at: int) -> str | None:
    """Return the class of control characters that begins at a place; None: there is none."""
    found = _CLASS.match(pattern, at)
    if found is None or found["name"] is None:
        return found and found[0]
    kind, has_kind, name = found["name"].lower().rpartition("=")
    if has_kind and kind.strip() not in _CATEGORY:
        return None
    return found[0] if name.strip() in _OF_CONTROLS else None


def _outermost(text: str) -> str:
    """A class without those in it, so that Python sees one class and nothing else."""
    parts: list[str] = []
    depth = at = 0
    while at < len(text):
        piece = text[at : at + 2] if text[at] == "\\" else text[at]
        at += len(piece)
        if piece == "[":
            depth += 1
            end = at + text.startswith("^", at)
            piece += text[at:end] + ("\\]" if text.startswith("]", end) else "")
            at = end + text.startswith("]", end)
        if depth == 1:
            parts.append(piece)
        if piece == "]":
            depth -= 1
    return "".join(parts)


def _check_class(text: str) -> None:
    """Refuse a class with control characters, spelled out, that has not both `"` and a backslash.

    Of classes in it nothing is known; what holds none of these characters is left out.
    """
    plain = _CODE.sub(lambda code: rf"\U{int(code[1], 16):08x}", text)
    plain = _outermost(_POSIX.sub("", _PROPERTY.sub("", plain)))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of sets in sets
            fits = re.compile(plain).fullmatch
    except (re.error, OverflowError):  # Python's are others; the compiler says what is wrong
        return
    if any(map(fits, _CONTROLS)) and not (fits('"') and fits("\\")):
        raise ValueError(
            f"it has the class {text[:80]!r} with control characters, which cannot be written; "
            "begin it with a space"
        )
