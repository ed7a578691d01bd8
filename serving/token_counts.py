"""How often each token is in an output, for penalties that count all of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from copy import copy

import numpy as np

from onnxport.serving.edits import (
    Floats,
    Ids,
    address_of,
)


class TokenCounts:
    """How often each token is in an output; tokens of the prompt are known, and count as 0."""

    __slots__ = ("_counts", "_ids", "_num_read", "_places", "addresses")

    def __init__(self, prompt: Sequence[int], num_prompt_tokens: int) -> None:
        """Begin with an output of none.

        Args:
            prompt: its tokens, as far as they matter.
            num_prompt_tokens: how many tokens of a sequence are its prompt.
        """
        self._ids = np.unique(np.array(prompt, np.int64))
        self._counts = np.zeros(len(self._ids), np.float32)
        self._places = {token_id: place for place, token_id in enumerate(self._ids.tolist())}
        self._num_read = num_prompt_tokens
        self._note_addresses()

    def _note_addresses(self) -> None:
        self.addresses = (address_of(self._ids), address_of(self._counts))  # of what `read` returns

    def fork(self) -> TokenCounts:
        """Return one that has read the same tokens, and goes on on its own."""
        other = copy(self)
        other._ids, other._counts = self._ids.copy(), self._counts.copy()
        other._places = self._places.copy()
        other._note_addresses()
        return other

    def read(self, tokens: array[int]) -> tuple[Ids, Floats]:
        """Count what is new in `tokens`; return all known tokens and their counts.

        They are good until the next call.
        """
        for token_id in tokens[self._num_read :]:
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):  # twice the room, so that growing costs little
                more = max(16, place)
                self._ids = np.concatenate((self._ids, np.zeros(more, np.int64)))
                self._counts = np.concatenate((self._counts, np.zeros(more, np.float32)))
                self._note_addresses()
            self._ids[place] = token_id
            self._counts[place] += 1.0
        self._num_read = len(tokens)
        size = len(self._places)
        return self._ids[:size], self._counts[:size]

    def with_more(self, assumed: Sequence[int]) -> tuple[Ids, Floats]:
        """Return what `read` would if these tokens came next, in memory of its own."""
        new = [one for one in dict.fromkeys(assumed) if one not in self._places]
        size = len(self._places)
        ids = np.concatenate((self._ids[:size], np.array(new, np.int64)))
        counts = np.concatenate((self._counts[:size], np.zeros(len(new), np.float32)))
        places = {token_id: size + number for number, token_id in enumerate(new)}
        for token_id in assumed:
            counts[places.get(token_id, self._places.get(token_id, 0))] += 1.0
        return ids, counts
