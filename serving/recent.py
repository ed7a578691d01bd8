"""How often tokens are among the last ones of a sequence: what llama.cpp's penalties look at."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy

import numpy as np

from onnxport.serving.edits import Floats, Ids, address_of

ROOM = 64  # tokens


class RecentCounts:
    """How often each token is among the last ones of a sequence, its prompt included.

    A token costs the same however many these are: it is counted, and the one that it drives out is
    not any more.
    """

    __slots__ = (
        *("_counts", "_ids", "_last_n", "_num_read", "_places", "_size", "_tokens"),
        "addresses",
    )

    def __init__(self, last_n: int) -> None:
        """Begin with a sequence that is not read yet.

        Args:
            last_n: how many of its last tokens count, 1 or more; -1: all.
        """
        self._last_n = last_n
        self._num_read = 0
        self._size = 0
        self._ids: Ids = np.zeros(ROOM, np.int64)
        self._counts: Floats = np.zeros(ROOM, np.float32)
        self._places: dict[int, int] = {}
        self._tokens: array[int] = array("q")
        self._note_addresses()

    def _note_addresses(self) -> None:
        self.addresses = (address_of(self._ids), address_of(self._counts))  # of what `read` returns

    def read(self, tokens: array[int]) -> tuple[Ids, Floats]:
        """Count what is new in `tokens`; return the tokens that are there, each once, and counts.

        They are good until the next call.

        Args:
            tokens: the prompt and the output so far; those of the call before, and more.
        """
        self._tokens = tokens
        if not self._num_read:
            self._read_at_once(tokens)
        for number in range(self._num_read, len(tokens)):
            self._add(tokens[number])
            if 0 <= self._last_n <= number:
                self._remove(tokens[number - self._last_n])
        self._num_read = len(tokens)
        return self._ids[: self._size], self._counts[: self._size]

    def fork(self) -> RecentCounts:
        """Return one that has read the same tokens, and goes on on its own."""
        other = copy(self)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        other._places = self._places.copy()
        other._note_addresses()
        return other

    def with_more(self, assumed: Sequence[int]) -> tuple[Ids, Floats]:
        """Return what `read` would if these tokens came next, in memory of its own."""
        number = self._num_read + len(assumed)
        first = 0 if self._last_n < 0 else max(0, number - self._last_n)
        before = 0 if self._last_n < 0 else max(0, self._num_read - self._last_n)
        gone = self._tokens[before : min(first, self._num_read)]
        come = assumed[max(0, first - self._num_read) :]
        new = [one for one in dict.fromkeys(come) if one not in self._places]
        places = {token_id: self._size + place for place, token_id in enumerate(new)}
        ids = np.concatenate((self._ids[: self._size], np.array(new, np.int64)))
        counts = np.concatenate((self._counts[: self._size], np.zeros(len(new), np.float32)))
        for token_id in come:
            counts[places.get(token_id, self._places.get(token_id, 0))] += 1.0
        for token_id in gone:
            counts[self._places[token_id]] -= 1.0
        left = counts > 0.0
        return ids[left], counts[left]

    def _read_at_once(self, tokens: array[int]) -> None:
        """Count the tokens of a sequence of which nothing was read, as a prompt is."""
        last = tokens if self._last_n < 0 else tokens[-self._last_n :]
        ids, counts = np.unique(np.array(last, np.int64), return_counts=True)
        self._size = len(ids)
        self._ids = np.concatenate((ids, np.zeros(ROOM, np.int64)))
        self._counts = np.concatenate((counts, np.zeros(ROOM))).astype(np.float32)
        self._places = {token_id: place for place, token_id in enumerate(ids.tolist())}
        self._num_read = len(tokens)
        self._note_addresses()

    def _add(self, token_id: int) -> None:
        place = self._places.setdefault(token_id, self._size)
        if place == self._size:
            if self._size == len(self._ids):  # twice the room, so that growing costs little
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
                self._note_addresses()
            self._ids[place] = token_id
            self._counts[place] = 0.0
            self._size += 1
        self._counts[place] += 1.0

    def _remove(self, token_id: int) -> None:
        """Count a token once less; the last one takes the place of one that is gone."""
        place = self._places[token_id]
        self._counts[place] -= 1.0
        if self._counts[place]:
            return
        self._size -= 1
        del self._places[token_id]
        if place < self._size:
            last = int(self._ids[self._size])
            self._ids[place], self._counts[place] = last, self._counts[self._size]
            self._places[last] = place
