"""Answers that have ended, kept to guess those that are like them."""

from __future__ import annotations

import random
from array import array
from bisect import bisect_right
from collections.abc import Hashable, Sequence

import numpy as np

from onnxport.serving.speculation.suffix_index import (
    BITS,
    SEPARATOR,
    Ending,
    GramHash,
    Match,
    SuffixIndex,
    longest_of,
)

LARGEST_SHARE = 4  # an answer takes no more than one of so many parts of all room


class Owner:
    """Whose answers some are: they are found for requests of the same owner alone."""

    __slots__ = ("key", "num_answers", "salt")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.num_answers = 0
        self.salt = random.getrandbits(BITS)


class PastAnswers:
    """The latest answers, the oldest of which make room for others.

    They lie behind each other in a ring, each in one piece, with a separator behind it. Places are
    counted on for ever; `SuffixIndex.margin + place % capacity` is where a token is.
    """

    def __init__(self, most_answers: int, most_tokens: int, hashing: GramHash) -> None:
        """Keep nothing yet.

        Args:
            most_answers: kept at once.
            most_tokens: likewise, over all of them, with the tokens before them.
            hashing: how n-grams are hashed.
        """
        self._index = SuffixIndex(most_tokens, hashing)
        self._most_answers = most_answers
        self._largest = most_tokens // LARGEST_SHARE - 1
        self._context = hashing.depth
        self._owners: dict[Hashable, Owner] = {}
        # Of each answer, the oldest first: where it begins and ends, and whose it is.
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._whose: list[Owner] = []
        self._next = 0  # the place of the next token

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._starts)

    @property
    def num_tokens(self) -> int:
        """How many tokens are kept."""
        return sum(self._stops) - sum(self._starts)

    @property
    def num_bytes(self) -> int:
        """The bytes that they may take at most."""
        return self._index.num_bytes

    def add(self, key: Hashable, tokens: array[int], num_prompt_tokens: int) -> None:
        """Keep an answer, of one that is too long its last part.

        The last tokens of the prompt are kept too, for what follows them is the answer's beginning.

        Args:
            key: whose it is.
            tokens: prompt and answer, int64.
            num_prompt_tokens: how many of them are the prompt's.
        """
        if len(tokens) - num_prompt_tokens < 2:
            return
        first = max(num_prompt_tokens - self._context, len(tokens) - self._largest, 0)
        kept = np.frombuffer(tokens[first:], np.int64)
        index, capacity = self._index, self._index.capacity
        if (left := capacity - self._next % capacity) < len(kept) + 1:
            here = index.margin + self._next % capacity
            index.tokens[here : here + left] = SEPARATOR  # nothing is found there any more
            self._next += left
        start, stop = self._next, self._next + len(kept)
        while self._starts and (
            self._starts[0] + capacity <= stop or len(self) >= self._most_answers
        ):
            self._evict()
        where = index.margin + start % capacity
        index.tokens[where : where + len(kept)] = kept
        index.tokens[where + len(kept)] = SEPARATOR
        owner = self._owners.get(key)
        if owner is None:
            owner = self._owners[key] = Owner(key)
        owner.num_answers += 1
        index.add(where + max(1, num_prompt_tokens - first), where + len(kept) - 1, owner.salt)
        self._starts.append(start)
        self._stops.append(stop)
        self._whose.append(owner)
        self._next = stop + 1

    def longest(self, key: Hashable, ending: Ending) -> Match:
        """Return where the answers of `key` have the longest match of a text's end."""
        owner = self._owners.get(key)
        if owner is None:
            return Match(0, ())
        index, oldest = self._index, self._starts[0]
        place = index.margin + oldest % index.capacity
        found = index.longest(ending, place, self._next - oldest, owner.salt)
        length, ends = longest_of(found)
        # Two owners' n-grams may have one bucket, though hardly ever.
        ends = [end for end in ends if self._has(owner, end)]
        return Match(length if ends else 0, ends)

    def following(self, ends: Sequence[int], length: int) -> list[bytes]:
        """Return `length` tokens behind each of some ends; see `likeliest`."""
        view = self._index.view
        return [view[end : end + length].tobytes() for end in ends]

    def _has(self, owner: Owner, end: int) -> bool:
        """Whether an answer that has a token behind an end is an owner's."""
        index, oldest = self._index, self._starts[0]
        place = oldest + (end - index.margin - oldest) % index.capacity
        return self._whose[bisect_right(self._starts, place) - 1] is owner

    def _evict(self) -> None:
        """Let go of the oldest one."""
        owner = self._whose[0]
        del self._starts[0], self._stops[0], self._whose[0]
        owner.num_answers -= 1
        if not owner.num_answers:
            del self._owners[owner.key]

    def clear(self) -> None:
        """Let go of all."""
        while self._starts:
            self._evict()
