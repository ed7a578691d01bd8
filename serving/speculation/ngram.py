"""Guessing by repetition: what followed the last time that these tokens came."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from onnxport.serving.request import Request

MOST_LOOKED_AT = 16  # occurrences of the shortest n-gram, for a longer one that ends there


class NgramDrafter:
    """Looks up the end of a sequence in the sequence itself, prompt and output.

    The longest n-gram that ends the sequence and was in it before says what comes: what followed
    its latest occurrence. Where that reaches the end of the sequence, it goes on with itself, as a
    loop does.
    """

    def __init__(self, longest: int, shortest: int) -> None:
        """Look for n-grams of `longest` tokens, then of fewer, down to `shortest`."""
        assert longest >= shortest >= 1
        self._sizes = range(longest, shortest - 1, -1)
        self._indices: dict[Request, NgramIndex] = {}

    @property
    def is_cheap(self) -> bool:
        """It is: some dictionary look-ups."""
        return True

    def num_behind(self, request: Request) -> int:
        """Return 0: nothing has to be computed."""
        return 0

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Sequence[int]]:
        """See `Drafter.propose`."""
        proposals: list[Sequence[int]] = []
        for request, length in zip(requests, lengths, strict=True):
            index = self._indices.get(request)
            if index is None:
                index = self._indices[request] = NgramIndex(self._sizes)
            proposals.append(index.following(request.tokens, length))
        return proposals

    def forget(self, request: Request) -> None:
        """See `Drafter.forget`."""
        self._indices.pop(request, None)

    def close(self) -> None:
        """See `Drafter.close`."""
        self._indices.clear()


class NgramIndex:
    """Where the shortest n-grams of one sequence end, with the one before each; grows with it.

    Longer ones are found among these, so that little is done for a token that is only read.
    """

    __slots__ = ("_before", "_ends", "_longest", "_shortest")

    def __init__(self, sizes: Sequence[int]) -> None:
        """Begin with an empty sequence; `sizes` are those of the n-grams, the longest first."""
        self._longest, self._shortest = sizes[0], sizes[-1]
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> end of its latest occurrence
        self._before: list[int | None] = [None] * self._shortest  # end -> that of the one before

    def following(self, tokens: array[int], length: int) -> Sequence[int]:
        """Return `length` tokens that may follow `tokens`, or none.

        Args:
            tokens: those of the call before, and more.
            length: how many.
        """
        self._read(tokens)
        number, size = len(tokens), self._shortest
        if number <= size:
            return ()
        best = end = self._ends.get(tuple(tokens[-size:]))
        before, longest = self._before, min(self._longest, number)
        for _ in range(MOST_LOOKED_AT):
            if end is None or size == longest:
                break
            # Of matches of one length the latest counts, which came first here.
            if size < end and tokens[end - size - 1] == tokens[number - size - 1]:
                found = _num_common(tokens, end, longest)
                if found > size:
                    best, size = end, found
            end = before[end]
        return () if best is None else _copied(tokens, best, length)

    def _read(self, tokens: array[int]) -> None:
        """Note the n-grams that something follows: all but those at the very end."""
        size, known = self._shortest, len(self._before)
        new = tokens[known - size : len(tokens) - 1].tolist()
        for end, gram in enumerate(
            zip(*(new[place:] for place in range(size)), strict=False), known
        ):
            self._before.append(self._ends.get(gram))
            self._ends[gram] = end


def _num_common(tokens: array[int], end: int, most: int) -> int:
    """Return how many of the last tokens, up to `most`, are those that end at `end` too."""
    number = len(tokens)
    for size in range(min(most, end)):
        if tokens[end - size - 1] != tokens[number - size - 1]:
            return size
    return min(most, end)


def _copied(tokens: array[int], start: int, length: int) -> Sequence[int]:
    """Return the `length` tokens from `start` on; at the end those that were returned follow."""
    found = tokens[start : start + length]
    while len(found) < length:
        found.extend(found[: length - len(found)])
    return found
