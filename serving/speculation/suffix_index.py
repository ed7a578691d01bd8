"""Where the tokens that end a text occurred before: an index in flat arrays.

Each occurrence is in a few chains, one for each size of n-gram: that of the n-gram that ends there.
A chain begins at a bucket, which hashes of the n-gram's tokens choose, and leads from the latest
occurrence to earlier ones. Hashes may collide, so what a chain leads to is compared.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

SIZES = (1, 2, 4, 8, 16)  # of n-grams: the longer ones lead to long matches past many short ones
MOST_LOOKED_AT = 16  # occurrences, of the longest n-gram that has any
SEPARATOR = -1  # no token: between two texts
ABSENT = -2  # no token, nor a separator: what stands before a text that is shorter than compared
FEW = 24  # ends that are linked one by one, which takes less time than all at once
BITS = 64
MASK = (1 << BITS) - 1
TOKEN_BITS = 32


class Match(NamedTuple):
    """The longest match of a text's end, and where it is."""

    length: int
    ends: Sequence[int]  # of its occurrences, the latest first; none: there is no match


class Ending(NamedTuple):
    """How a text ends, as an index looks for it."""

    window: int  # the last tokens as one number, the very last one in its highest bits
    sums: tuple[int, ...]  # of hashes, one a size, as far as the text has so many tokens


def longest_of(found: Mapping[int, int]) -> Match:
    """Return those of the ends that `SuffixIndex.longest` found that share the most tokens."""
    length = max(found.values(), default=0)
    return Match(length, [end for end, shared in found.items() if shared == length])


class GramHash:
    """Sums by which n-grams are hashed: each token times a random number of its place.

    That is universal (multiply-shift), so nobody can choose texts whose n-grams collide.
    """

    def __init__(self, depth: int) -> None:
        """Draw the numbers.

        Args:
            depth: most tokens of a match; longer n-grams are not hashed.
        """
        self.depth = depth
        self.sizes = tuple(size for size in SIZES if size <= depth)
        self._numbers = [random.getrandbits(BITS) | 1 for _ in range(self.sizes[-1])]

    def ending(self, tokens: array[int]) -> Ending:
        """Return how `tokens`, int64, end."""
        depth, number = self.depth, len(tokens)
        last = tokens[-depth:]
        compared = array("i", last)
        if number < depth:
            compared = array("i", [ABSENT] * (depth - number)) + compared
        return Ending(int.from_bytes(compared.tobytes(), "little"), self.sums(last))

    def sums(self, last: Sequence[int]) -> tuple[int, ...]:
        """Return the sum of the last tokens of a text for each size that it has."""
        number = len(last)
        totals = list(accumulate(map(mul, reversed(last), self._numbers)))
        return tuple([totals[size - 1] for size in self.sizes if size <= number])

    def sums_at(self, tokens: NDArray[np.int32], first: int, last: int) -> list[NDArray[np.uint64]]:
        """Return the sums of n-grams that end at `first` to `last`, for each size uint64 [ends].

        Args:
            tokens: which begin as many places before `first` as the largest n-gram has tokens.
            first: the first end; the n-gram is of the tokens before it.
            last: the last end.
        """
        wide = tokens[first - self.sizes[-1] : last].astype(np.uint64)
        shift, number = self.sizes[-1], last - first + 1
        total = np.zeros(number, np.uint64)
        found: list[NDArray[np.uint64]] = []
        for place, factor in enumerate(self._numbers, 1):
            start = shift - place
            total += wide[start : start + number] * np.uint64(factor)
            if place in self.sizes:
                found.append(total.copy())
        return found


class SuffixIndex:
    """Chains of occurrences in an array of tokens, which its owner fills.

    The array may be a ring: chains end where what they lead to was overwritten. Memory is
    `num_bytes`, of which the system gives what is touched.

    Attributes:
        tokens: int32 [margin + capacity + margin]; the margins hold separators.
        view: the same, whose elements are read sooner.
        margin: the place of the first token.
        capacity: how many tokens there may be.
    """

    def __init__(self, capacity: int, hashing: GramHash) -> None:
        """Make an index of nothing.

        Args:
            capacity: tokens that it is for.
            hashing: how n-grams are hashed.
        """
        self.capacity = capacity
        self.margin = margin = max(hashing.depth, hashing.sizes[-1])
        self._hashing = hashing
        self._bucket_bits = max(1, (capacity - 1).bit_length())
        self._shift = BITS - self._bucket_bits
        self.tokens = np.zeros(capacity + 2 * margin, np.int32)
        self.tokens[:margin] = self.tokens[-margin:] = SEPARATOR
        self.view = self.tokens.data
        # By size: the latest end of each bucket, and of each end the one before it. 0: none, for
        # no end lies in the margin.
        sizes = range(len(hashing.sizes))
        self._heads = [np.zeros(1 << self._bucket_bits, np.int32) for _ in sizes]
        self._before = [np.zeros(len(self.tokens), np.int32) for _ in sizes]
        self._chains = [
            (heads.data, before.data)
            for heads, before in zip(self._heads, self._before, strict=True)
        ]

    @property
    def num_bytes(self) -> int:
        """The bytes of its arrays."""
        return sum(one.nbytes for one in (self.tokens, *self._heads, *self._before))

    def add(self, first: int, last: int, salt: int = 0) -> None:
        """Note that n-grams end at `first` to `last`, with a token after each of them.

        Args:
            first: an end behind all that were added, but where the ring begins anew.
            last: the last one.
            salt: of the texts that they are to be found for.
        """
        if last - first < FEW:
            largest, view = self._hashing.sizes[-1], self.view
            for end in range(first, last + 1):
                self.add_one(end, self._hashing.sums(view[end - largest : end].tolist()), salt)
            return
        ends = np.arange(first, last + 1, dtype=np.int32)
        for size, sums in enumerate(self._hashing.sums_at(self.tokens, first, last)):
            buckets = (sums + np.uint64(salt)) >> np.uint64(self._shift)
            _link(self._heads[size], self._before[size], buckets.astype(np.uint32), ends)

    def add_one(self, end: int, sums: Sequence[int], salt: int = 0) -> None:
        """Note one end, of which the sums are known."""
        shift = self._shift
        for total, (heads, before) in zip(sums, self._chains, strict=False):
            bucket = ((total + salt) & MASK) >> shift
            before[end] = heads[bucket]
            heads[bucket] = end

    def longest(self, ending: Ending, oldest: int, num_live: int, salt: int = 0) -> dict[int, int]:
        """Return ends of what is most like the end of a text, with how many tokens they share.

        Of the longest n-gram that the text's end shares with others, the latest `MOST_LOOKED_AT`.

        Args:
            ending: of the text.
            oldest: the place of the oldest token.
            num_live: how many places from there on, over the ring's end, hold tokens.
            salt: as they were added.

        Returns:
            By end the number of tokens, the latest first.
        """
        window, sums = ending
        view, capacity, shift, depth = self.view, self.capacity, self._shift, self._hashing.depth
        found: dict[int, int] = {}
        for size in range(len(sums) - 1, -1, -1):
            least = self._hashing.sizes[size]
            heads, before = self._chains[size]
            end, age = heads[((sums[size] + salt) & MASK) >> shift], num_live
            for _ in range(MOST_LOOKED_AT):
                # A place that was overwritten is younger than who leads to it.
                if not end or (younger := (end - oldest) % capacity) >= age:
                    break
                age = younger
                other = int.from_bytes(view[end - depth : end], "little") ^ window
                shared = depth - (other.bit_length() + TOKEN_BITS - 1) // TOKEN_BITS
                if shared >= least and view[end] >= 0:
                    found[end] = shared
                end = before[end]
            if found:
                break
        return found


def _link(
    heads: NDArray[np.int32],
    before: NDArray[np.int32],
    buckets: NDArray[np.uint32],
    ends: NDArray[np.int32],
) -> None:
    """Put ends, which rise, in front of the chains of their buckets."""
    order = _stable_order(buckets)
    buckets, ends = buckets[order], ends[order]
    leads = np.ones(len(ends), np.bool_)  # the first of its bucket
    np.not_equal(buckets[1:], buckets[:-1], out=leads[1:])
    earlier = np.empty_like(ends)
    earlier[1:] = ends[:-1]
    earlier[leads] = heads[buckets[leads]]
    before[ends] = earlier
    trails = np.ones(len(ends), np.bool_)
    trails[:-1] = leads[1:]
    heads[buckets[trails]] = ends[trails]


def _stable_order(numbers: NDArray[np.uint32]) -> NDArray[np.intp]:
    """Return a stable order; numbers of 16 bits are sorted in linear time, so half by half."""
    low = np.argsort(numbers.astype(np.uint16), kind="stable")
    high = np.argsort((numbers >> np.uint32(16)).astype(np.uint16)[low], kind="stable")
    return low[high]
