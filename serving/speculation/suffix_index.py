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
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

SIZES = (1, 2, 4, 8, 16)  # of n-grams: the longer ones lead to long matches past many short ones
MOST_LOOKED_AT = 16  # occurrences, of the longest n-gram that has any
SEPARATOR = -1  # no token: between two texts
ABSENT = -2  # no token, nor a separator: what stands before a text that is shorter than compared
FEW = 8  # ends that are linked one by one, which takes less time than all at once
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
        largest = self.sizes[-1]
        self._numbers = [random.getrandbits(BITS) | 1 for _ in range(largest)]
        # What each token of a window is multiplied by for each size: uint64 [sizes, largest].
        self._factors = np.zeros((len(self.sizes), largest), np.uint64)
        for row, size in enumerate(self.sizes):
            self._factors[row, largest - size :] = self._numbers[size - 1 :: -1]

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

    def sums_at(self, tokens: NDArray[np.int32], first: int, last: int) -> NDArray[np.uint64]:
        """Return the sums of n-grams that end at `first` to `last`, uint64 [sizes, ends].

        Args:
            tokens: which begin as many places before `first` as the largest n-gram has tokens.
            first: the first end; the n-gram is of the tokens before it.
            last: the last end.
        """
        largest = self.sizes[-1]
        wide = tokens[first - largest : last].astype(np.uint64)
        return self._factors @ sliding_window_view(wide, largest).T


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
        self.margin = margin = hashing.depth
        self._hashing = hashing
        self._bucket_bits = max(1, (capacity - 1).bit_length())
        self._shift = BITS - self._bucket_bits
        self.tokens = np.zeros(capacity + 2 * margin, np.int32)
        self.tokens[:margin] = self.tokens[-margin:] = SEPARATOR
        self.view = self.tokens.data
        # Those of one size behind those of another: the latest end of each bucket, and of each end
        # the one before it. 0: none, for no end lies in the margin.
        num_sizes = len(hashing.sizes)
        self._heads = np.zeros(num_sizes << self._bucket_bits, np.int32)
        self._before = np.zeros(num_sizes * len(self.tokens), np.int32)
        self._head_view, self._before_view = self._heads.data, self._before.data

    @property
    def num_bytes(self) -> int:
        """The bytes of its arrays."""
        return self.tokens.nbytes + self._heads.nbytes + self._before.nbytes

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
        sums = self._hashing.sums_at(self.tokens, first, last)
        buckets = (sums + np.uint64(salt)) >> np.uint64(self._shift)
        rows = np.arange(len(sums), dtype=np.uint32)[:, np.newaxis]
        heads = buckets.astype(np.uint32) + (rows << np.uint32(self._bucket_bits))
        ends = np.arange(first, last + 1, dtype=np.int64)
        places = ends + rows * np.int64(len(self.tokens))
        self._link(heads.reshape(-1), places.reshape(-1), np.tile(ends, len(sums)))

    def _link(
        self, heads: NDArray[np.uint32], places: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> None:
        """Put ends, which rise within a size, in front of their chains.

        Args:
            heads: the chains, by their places in `_heads`.
            places: of the ends in `_before`.
            ends: the ones.
        """
        order = _stable_order(heads)
        heads, places, ends = heads[order], places[order], ends[order]
        is_new = heads[1:] != heads[:-1]  # another chain than the one before
        earlier = self._heads[heads]
        np.copyto(earlier[1:], ends[:-1], where=~is_new, casting="same_kind")
        self._before[places] = earlier
        is_last = np.append(is_new, True)
        self._heads[heads[is_last]] = ends[is_last]

    def add_one(self, end: int, sums: Sequence[int], salt: int = 0) -> None:
        """Note one end, of which the sums are known."""
        shift, bits, place, room = self._shift, self._bucket_bits, end, len(self.view)
        heads, before = self._head_view, self._before_view
        for size, total in enumerate(sums):
            head = (size << bits) + (((total + salt) & MASK) >> shift)
            before[place] = heads[head]
            heads[head] = end
            place += room

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
        heads, before, bits, room = self._head_view, self._before_view, self._bucket_bits, len(view)
        found: dict[int, int] = {}
        for size in range(len(sums) - 1, -1, -1):
            least = self._hashing.sizes[size]
            end = heads[(size << bits) + (((sums[size] + salt) & MASK) >> shift)]
            age = num_live
            for _ in range(MOST_LOOKED_AT):
                # A place that was overwritten is younger than who leads to it.
                if not end or (younger := (end - oldest) % capacity) >= age:
                    break
                age = younger
                other = int.from_bytes(view[end - depth : end], "little") ^ window
                shared = depth - (other.bit_length() + TOKEN_BITS - 1) // TOKEN_BITS
                if shared >= least:
                    found[end] = shared
                end = before[size * room + end]
            if found:
                break
        return found


def _stable_order(numbers: NDArray[np.uint32]) -> NDArray[np.intp]:
    """Return a stable order; numbers of 16 bits are sorted in linear time, so half by half."""
    low = np.argsort(numbers.astype(np.uint16), kind="stable")
    high = (numbers >> np.uint32(16)).astype(np.uint16)
    return low[np.argsort(high[low], kind="stable")]
