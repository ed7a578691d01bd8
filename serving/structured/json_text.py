"""Where a text stands in any JSON: texts that stand alike go on in the same way.

What `automaton.py` says of an expression, said of the grammar of a JSON object without a schema
(RFC 8259): which lists and objects are open, what is due in the innermost, and how far a string,
a number or a word has come. Whether a text is allowed is not asked here, only how it may go on, so
what is told apart needlessly costs masks, and what is not known is said to be so.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

# Between the parts there is one space, or there are ends of lines and an indent.
MOST_LINES = 2  # ends of them in a row
MOST_INDENT = 20  # spaces and tabs behind these
WHITESPACE: Final = rf" |\n{{1,{MOST_LINES}}}[ \t]{{0,{MOST_INDENT}}}"

_SPACES: Final = frozenset(b" \t\n")
_DIGITS: Final = frozenset(b"0123456789")
_ESCAPED: Final = frozenset(b'bfnrt"\\')
_PLAIN: Final = re.compile(rb'[^"\\\x00-\x1f\x80-\xff]*')  # what leaves a string as it was
_QUOTE, _BACKSLASH = b'"'[0], b"\\"[0]
_WORDS: Final = {b"t"[0]: b"rue", b"f"[0]: b"alse", b"n"[0]: b"ull"}
# How a number goes on, by how far it has come: -, 0, 1 (digits), ., .1, E, E+, E1.
_NUMBERS: Final[dict[bytes, tuple[tuple[frozenset[int], bytes], ...]]] = {
    b"-": ((frozenset(b"0"), b"0"), (_DIGITS, b"1")),
    b"0": ((frozenset(b"."), b"."), (frozenset(b"eE"), b"E")),
    b"1": ((_DIGITS, b"1"), (frozenset(b"."), b"."), (frozenset(b"eE"), b"E")),
    b".": ((_DIGITS, b".1"),),
    b".1": ((_DIGITS, b".1"), (frozenset(b"eE"), b"E")),
    b"E": ((_DIGITS, b"E1"), (frozenset(b"+-"), b"E+")),
    b"E+": ((_DIGITS, b"E1"),),
    b"E1": ((_DIGITS, b"E1"),),
}
_WHOLE_NUMBERS: Final = frozenset([b"0", b"1", b".1", b"E1"])


class Place(NamedTuple):
    """Where a text stands.

    Attributes:
        opened: a bracket for each list and object that is open, the innermost last.
        due: what comes next, or what this is the middle of: "object" at the beginning, "name",
            "first name" (or the end of the object), ":", "value", "first value" (or the end of the
            list), "," (or the end of what is open, be it of the text).
        part: of a string `"`, a backslash behind it if one came, and the bytes of a character that
            is not whole; of a number how far it has come; of a word what is left of it. Empty
            between the parts.
        spaces: whitespace since the last part, a tab in it as a space.
    """

    opened: str = ""
    due: str = "object"
    part: bytes = b""
    spaces: bytes = b""


class JsonText:
    """Says where in a JSON object a text ends. Never changes, so threads may share it."""

    def __init__(self, longest_token: int, most_closed: int) -> None:
        """Tell places apart as far as one token can tell them.

        Args:
            longest_token: no token has more characters.
            most_closed: no token ends more lists and objects.
        """
        self._longest = longest_token
        self._most_closed = most_closed

    @property
    def start(self) -> Place | None:
        """The place of the empty text."""
        return Place()

    def after(self, place: Place, text: bytes) -> Place | None:
        """Return where a text ends after `text` more; None where that is not known."""
        found: Place | None = place
        position = 0
        while found is not None and position < len(text):
            if found.part == b'"' and (plain := _PLAIN.match(text, position)):
                position = plain.end()
            if position < len(text):
                byte = text[position]
                found = _inside(found, byte) if found.part else _between(found, byte)
                position += 1
        return found

    def key(self, place: Place) -> Place:
        """Return what is the same for texts after which the same tokens may come.

        A token ends at most `most_closed` lists and objects, and stands then in the one around
        them; of one more it is known that it is there. The end of an indent matters where a token
        may reach it, and ends of lines where one more may come.
        """
        opened = place.opened[-self._most_closed - 2 :]
        spaces = place.spaces
        lines = spaces.rstrip(b" ")
        indent = len(spaces) - len(lines)
        if lines and indent and indent + self._longest <= MOST_INDENT:
            spaces = b"\n "
        elif indent and lines:
            spaces = b"\n" + b" " * indent
        return place._replace(opened=opened, spaces=spaces)


def _inside(place: Place, byte: int) -> Place | None:
    """Return where a text ends that goes on inside of a string, a number or a word."""
    part = place.part
    if part[0] == _QUOTE:
        return _in_string(place, byte)
    if part in _NUMBERS:
        for bytes_, then in _NUMBERS[part]:
            if byte in bytes_:
                return place._replace(part=then)
        return _between(_ended(place), byte) if part in _WHOLE_NUMBERS else None
    if byte != part[0]:
        return None
    return place._replace(part=part[1:]) if len(part) > 1 else _ended(place)


def _in_string(place: Place, byte: int) -> Place | None:
    """Return where a text ends that goes on inside of a string."""
    pending = place.part[1:]
    if pending == b"\\":
        return place._replace(part=b'"') if byte in _ESCAPED else None
    if pending or byte >= 0x80:
        return _in_character(place, pending + bytes([byte]))
    if byte == _QUOTE:
        return _ended(place)
    if byte == _BACKSLASH:
        return place._replace(part=b'"\\')
    return place if byte >= 0x20 else None


def _in_character(place: Place, pending: bytes) -> Place | None:
    """Return where a text ends that has come so far in a character beyond ASCII (RFC 3629)."""
    first = pending[0]
    if not 0xC2 <= first <= 0xF4 or not all(0x80 <= byte <= 0xBF for byte in pending[1:]):
        return None
    length = 2 + (first >= 0xE0) + (first >= 0xF0)
    return place._replace(part=b'"' if len(pending) == length else b'"' + pending)


def _ended(place: Place) -> Place:
    """Return where a text ends when a part of it has ended."""
    return place._replace(due=":" if "name" in place.due else ",", part=b"", spaces=b"")


def _between(place: Place, byte: int) -> Place | None:
    """Return where a text ends that goes on between the parts."""
    if byte in _SPACES:
        spaces = _with_space(place.spaces, byte)
        return None if spaces is None else place._replace(spaces=spaces)
    opened, due = place.opened, place.due
    match chr(byte):
        case "{" if due in ("object", "value", "first value"):
            return Place(opened + "{", "first name")
        case "[" if due in ("value", "first value"):
            return Place(opened + "[", "first value")
        case "}" if due in (",", "first name") and opened.endswith("{"):
            return Place(opened[:-1], ",")
        case "]" if due in (",", "first value") and opened.endswith("["):
            return Place(opened[:-1], ",")
        case "," if due == "," and opened:
            return Place(opened, "name" if opened.endswith("{") else "value")
        case ":" if due == ":":
            return Place(opened, "value")
        case '"' if due not in (",", ":", "object"):
            return Place(opened, due, b'"')
    return _begun(place, byte) if due in ("value", "first value") else None


def _with_space(spaces: bytes, byte: int) -> bytes | None:
    """Return whitespace that goes on; None: it may not."""
    if byte == b"\n"[0]:
        return spaces + b"\n" if spaces in (b"", b"\n") else None
    if not spaces:
        return b" " if byte == b" "[0] else None
    indent = len(spaces) - len(spaces.rstrip(b" "))
    return spaces + b" " if spaces[0] == b"\n"[0] and indent < MOST_INDENT else None


def _begun(place: Place, byte: int) -> Place | None:
    """Return where a text ends that begins a number or a word."""
    if byte in _WORDS:
        return Place(place.opened, place.due, _WORDS[byte])
    if byte in _DIGITS or byte == b"-"[0]:
        part = b"1" if byte > b"0"[0] else bytes([byte])
        return Place(place.opened, place.due, part)
    return None
