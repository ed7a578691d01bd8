"""Guessing by repetition: what followed the last time that these tokens came."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from onnxport.serving.request import Request


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
    """Where the n-grams of one sequence end; grows with it."""

    __slots__ = ("_ends", "_num_read", "_sizes")

    def __init__(self, sizes: Sequence[int]) -> None:
        """Begin with an empty sequence; `sizes` are those of the n-grams, the longest first."""
        self._sizes = sizes
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram -> end of its latest occurrence
        self._num_read = 0  # n-grams that end at or before it are known

    def following(self, tokens: array[int], length: int) -> Sequence[int]:
        """Return `length` tokens that may follow `tokens`, or none.

        Args:
            tokens: those of the call before, and more.
            length: how many.
        """
        self._read(tokens)
        for size in self._sizes:
            if size < len(tokens):
                end = self._ends.get(tuple(tokens[-size:]))
                if end is not None:
                    return _copied(tokens, end, length)
        return ()

    def _read(self, tokens: array[int]) -> None:
        """Note the n-grams that something follows: all but those at the very end."""
        ends = self._ends
        for end in range(self._num_read + 1, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    ends[tuple(tokens[end - size : end])] = end
        self._num_read = max(self._num_read, len(tokens) - 1)


def _copied(tokens: array[int], start: int, length: int) -> Sequence[int]:
    """Return the `length` tokens from `start` on; at the end those that were returned follow."""
    found = tokens[start : start + length]
    while len(found) < length:
        found.extend(found[: length - len(found)])
    return found
