r"""Patterns of strings in JSON, so that the compiler enforces them.

A class of a regular expression that holds every control character, as each negated one does, the
compiler takes for one that holds every escape, too: for `[^"]` it allows `\"`. Most control
characters cannot be written here in any case (`source.JSON_OPTIONS`), so they are taken out of
negated classes, which changes nothing else; other classes that hold them without `"` and `\` are
refused.

What the compiler reads in another way than ECMA-262, which JSON Schema asks for, is written in its
words: `.`, `\s` and `\S`, and `[` in a class. Where Python's `re` or Rust's `regex` differ from
ECMA-262 about `.` and white space, a text that fits here fits in all three.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping

UNWRITABLE = r"\x00-\x07\x0b\x0e-\x1f\x7f"
_OF_SETS = ("&&", "--", "~~")  # what is in both classes, in the first alone, in one of the two
_BEGUN = re.compile(r"[^-\\][^\[\]^\\-]-")  # a range, behind no other one
# Each as it stands outside of negated classes, and within these. To ECMA-262 U+FEFF is white space,
# to the compiler and to Python U+0085 is; here neither is any of the two.
_SPACES: Mapping[str, tuple[str, str]] = {
    r"\s": (r"[\s--\u{85}]", r"\s\u{feff}"),
    r"\S": (r"[\S--\u{feff}]", r"\S\u{85}"),
}
_DOT = rf"[^\n\r\u{{2028}}\u{{2029}}{UNWRITABLE}]"  # to others \n alone ends a line
_DOT_ALL = re.compile(r"\(\?[a-zA-Z]*s")  # a flag of others than ECMA-262 that says what . is
_CONTROLS = [chr(code) for code in (*range(8), *range(0x0E, 0x1C))]  # none is white space
_CONTROL = re.compile(  # itself, or an escape of it
    rf"""\\?[{UNWRITABLE}]
    |\\[av]|\\0(?![0-9])
    |\\[xuU]\{{0*(?:[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])\}}
    |\\(?:x|u00|U000000)(?:0[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])""",
    re.VERBOSE,
)
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_BEGUN_WITH_END = re.compile(r"\[\^?\](?P<more>(?:\\.|[^\]\\])*\])?", re.DOTALL)
_ESCAPED = re.compile(r"\\.", re.DOTALL)
_UNWRITTEN = [char for char in map(chr, range(0x80)) if re.match(f"[{UNWRITABLE}]", char)]
_WRITTEN = [char for char in map(chr, range(0x80)) if char not in _UNWRITTEN]
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
    """Goes through a pattern."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._parts: list[str] = []
        self._begin: int | None = None  # of the class around this place
        self._is_negated = False  # whether that class is
        self._has_any = _DOT_ALL.search(pattern) is not None

    def rewritten(self) -> str:
        """Return the whole."""
        while self._at < len(self._pattern):
            char, pair = self._pattern[self._at], self._pattern[self._at : self._at + 2]
            in_class = self._begin is not None
            self._refuse(char, pair, in_class=in_class)
            if negated := _NEGATED_PROPERTY.match(self._pattern, self._at):
                self._copy(negated.end(), rf"[^\p{negated[1]}{UNWRITABLE}]")
            elif both := _PAIR.match(self._pattern, self._at):
                self._copy(both.end(), json.loads(f'"{both[0]}"'))
            elif in_class and pair == r"\b":  # a backspace there
                self._copy(self._at + 2, r"\x08")
            elif pair in _SPACES:
                self._copy(self._at + 2, _SPACES[pair][self._is_negated])
            elif char == "\\":
                self._copy(self._at + 2)
            elif in_class and pair == "[:":
                self._posix()
            elif in_class and char == "[":
                self._copy(self._at + 1, r"\[")
            elif char == "[":
                self._open()
            elif in_class and char == "]":
                self._close()
            elif char == "." and not in_class and not self._has_any:
                self._copy(self._at + 1, _DOT)
            else:
                self._copy(self._at + 1)
        return "".join(self._parts)

    def _refuse(self, char: str, pair: str, *, in_class: bool) -> None:
        """Raise ValueError for what stands at this place, if it cannot be enforced."""
        found = _control_class(self._pattern, self._at)
        if found and not self._is_negated:
            raise ValueError(f"it has {found}, and control characters cannot be written")
        if not in_class and (around := _AROUND.match(self._pattern, self._at)):
            raise ValueError(
                f"it has {around[0]}: neither look-around nor back-references are supported, "
                "but for what looks ahead right behind ^; write it in another way"
            )
        if in_class and pair in _OF_SETS and not self._ends_range(pair):
            raise ValueError(f"it has {pair} in a class, which has two meanings; escape both")
        if not in_class and (control := _CONTROL.match(self._pattern, self._at)):
            raise ValueError(
                f"it has the control character {control[0]!r}, which cannot be written"
            )

    def _ends_range(self, pair: str) -> bool:
        """Whether a range such as `!-~` ends with the first of two characters."""
        return pair == "~~" and bool(_BEGUN.match(self._pattern, self._at - 3))

    def _copy(self, end: int, changed: str | None = None) -> None:
        self._parts.append(self._pattern[self._at : end] if changed is None else changed)
        self._at = end

    def _open(self) -> None:
        if self._is_empty():
            self._copy(self._at + 3, f"[^{UNWRITABLE}]")
            return
        self._begin = self._at
        self._is_negated = self._pattern.startswith("[^", self._at)
        if self._is_negated:
            self._copy(self._at + 2, f"[^{UNWRITABLE}")
        else:
            self._copy(self._at + 1)
        after = self._pattern[self._at : self._at + 1]
        if after in ("]", "-"):  # itself, at the beginning of a class
            self._copy(self._at + 1, f"\\{after}")

    def _is_empty(self) -> bool:
        """Whether `[^]` stands at this place, and is a class as ECMA-262 has it.

        Others have `]` for one of its characters, which it is where a class ends further on: only
        they know a `]` that ends nothing.

        Raises:
            ValueError: it may be either; or nothing fits it.
        """
        found = _BEGUN_WITH_END.match(self._pattern, self._at)
        if found is None or (found["more"] and "[" not in _ESCAPED.sub("", found["more"])):
            return False
        if found["more"]:
            raise ValueError(
                f"it has {found[0][:80]}, which has two meanings; write [\\s\\S] for any "
                "character, or escape each bracket within a class"
            )
        if found[0] == "[]":
            raise ValueError("it has [], which nothing fits; escape both, or write what fits")
        return True

    def _close(self) -> None:
        self._copy(self._at + 1)
        if not self._is_negated:
            _check_class(self._pattern[self._begin : self._at])
        self._begin, self._is_negated = None, False

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


def _check_class(text: str) -> None:
    """Refuse a class that the compiler would take for another one, as far as is known here.

    One with control characters, spelled out, that has not both `"` and a backslash allows escapes;
    one of nothing else is left out. What holds none of these characters is not looked at.
    """
    coded = _CODE.sub(lambda code: rf"\U{int(code[1], 16):08x}", text)
    plain = _POSIX.sub("", _PROPERTY.sub("", coded))
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
    if plain == coded and any(map(fits, _UNWRITTEN)) and not any(map(fits, _WRITTEN)):
        raise ValueError(
            f"it has the class {text[:80]!r} of control characters, which cannot be written"
        )
