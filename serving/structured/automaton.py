"""The places of a regular expression: a text that ends at the same ones goes on in the same way.

A mask is expensive to compute and easy to keep, but the library that computes it does not say in
which state it is. So this says it, for the syntax that is in common use. Of all other syntax, and
of texts beyond ASCII, it says nothing.

The places are those of Glushkov's automaton (1961), with a counted part written out.
"""

from __future__ import annotations

from collections.abc import Callable

from onnxport.serving.structured.expression import (
    Chars,
    Either,
    Part,
    Repeat,
    Row,
    UnknownSyntaxError,
    read_expression,
)

MOST_PLACES = 10_000  # of an expression, counted parts written out
MOST_JOINS = 20_000  # and what they lead to
MOST_AT_ONCE = 64  # places where a text may end at once: more take longer than a mask is worth

Places = frozenset[int]


class Automaton:
    """Says where in an expression a text ends. Never changes what it says, so threads may share it.

    Each place takes one character and leads to a join, from which the next places are reached.
    """

    def __init__(self, text: str, longest_token: int) -> None:
        """Read an expression.

        Args:
            text: valid in the syntax of Rust's `regex`; the whole text has to match.
            longest_token: characters of the longest token.

        Raises:
            UnknownSyntaxError: it has syntax that is not known here, or is too large.
        """
        self._lookahead = longest_token
        self._chars: list[int] = []  # by place: the bits of the ASCII characters that it takes
        self._join_after: list[int] = []  # by place: where its character leads
        self._alike: list[int] = []  # by place: the one that stands for it in `key`
        self._joins: list[tuple[list[int], list[int]]] = []  # by join: its places, further joins
        self._num_joined = 0
        self._reached: dict[int, Places | None] = {}  # by join
        nowhere = self._join([], [])
        end = self._place(0, nowhere)
        first = self._build(read_expression(text), self._join([end], []))
        # The library may treat the empty text as no other, so it has a place to itself.
        self._start = self._join([self._place(0, nowhere)], [first])

    @property
    def start(self) -> Places | None:
        """The places of the empty text; None if there are too many."""
        return self._all_of(self._start)

    def after(self, places: Places, text: bytes) -> Places | None:
        """Return where a text ends after `text` more; None where that is not known."""
        for byte in text:
            found: set[int] = set()
            for place in places:
                if self._chars[place] >> byte & 1:
                    more = self._all_of(self._join_after[place])
                    if more is None:
                        return None
                    found |= more
            if not found or len(found) > MOST_AT_ONCE:  # none, where it is not ASCII
                return None
            places = frozenset(found)
        return places

    def key(self, places: Places) -> Places:
        """Return what is the same for texts after which the same tokens may come."""
        return frozenset(map(self._alike.__getitem__, places))

    def _all_of(self, join: int) -> Places | None:
        """Return all places of a join, those by way of others too."""
        if join in self._reached:
            return self._reached[join]
        found: set[int] = set()
        seen, left = {join}, [join]
        while left and len(found) <= MOST_AT_ONCE:
            places, joins = self._joins[left.pop()]
            found.update(places)
            for one in joins:
                if one not in seen:
                    seen.add(one)
                    left.append(one)
        all_of = frozenset(found) if len(found) <= MOST_AT_ONCE else None
        self._reached[join] = all_of
        return all_of

    # Building, from the end to the beginning: each part is told the join that comes after it.

    def _place(self, chars: int, after: int) -> int:
        if len(self._chars) >= MOST_PLACES:
            raise UnknownSyntaxError("it is too large")
        self._chars.append(chars)
        self._join_after.append(after)
        self._alike.append(len(self._alike))
        return len(self._alike) - 1

    def _join(self, places: list[int], joins: list[int]) -> int:
        self._num_joined += 1 + len(joins)
        if self._num_joined > MOST_JOINS:
            raise UnknownSyntaxError("it is too large")
        self._joins.append((places, joins))
        return len(self._joins) - 1

    def _build(self, part: Part, after: int) -> int:
        """Add the places of a part; returns the join before it."""
        match part:
            case Chars(chars):
                return self._join([self._place(chars, after)], [])
            case Row(parts):
                for one in reversed(parts):
                    after = self._build(one, after)
                return after
            case Either(parts):
                return self._join([], [self._build(one, after) for one in parts])
            case Repeat(body, least, most):
                if most is None:
                    loop = self._join([], [after])
                    self._joins[loop][1].append(self._build(body, loop))
                    return self._copies(body, least, loop, lambda join: join)
                out = after
                after = self._copies(
                    body, most - least, out, lambda join: self._join([], [join, out])
                )
                return self._copies(body, least, after, lambda join: join)
        raise AssertionError(part)

    def _copies(self, body: Part, number: int, after: int, before: Callable[[int], int]) -> int:
        """Add a part several times over; returns the join before them.

        No token has more than `_lookahead` characters. So copies are alike as far as tokens tell,
        if each is followed by that many characters of further ones.
        """
        near = -(-self._lookahead // body.shortest) + 1 if body.shortest else number
        for copy in range(number):
            first = len(self._chars)
            after = before(self._build(body, after))
            if copy > near:
                size = len(self._chars) - first
                self._alike[first:] = self._alike[first - size : first]
        return after
