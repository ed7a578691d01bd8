"""Finding outputs that are stuck.

A pattern of k tokens stands c times in a row at the end of an output where each of its last
k (c - 1) tokens equals the one k places before it. So for each size of a pattern it is enough to
know for how many tokens in a row that has been so. It follows from the output's tokens alone, in
their order, so batches, preemption, forks and drafts leave no trace in it.
"""

from __future__ import annotations

from array import array
from typing import Final

import numpy as np

from onnxport.serving.repetition import RepetitionDetection

LEAST_ROOM: Final = 256  # tokens that are written before the latest are moved


class Repetition:
    """How the end of one output repeats itself; reads each token once."""

    __slots__ = ("_at", "_latest", "_least", "_most", "_num_read", "_room", "_runs", "_wanted")

    def __init__(self, detection: RepetitionDetection, num_prompt_tokens: int) -> None:
        """Begin behind a prompt of so many tokens.

        Args:
            detection: that is on.
            num_prompt_tokens: of the sequence; what they repeat does not count.
        """
        self._least = max(1, detection.min_pattern_size)
        self._most = detection.max_pattern_size
        self._num_read = num_prompt_tokens
        sizes = np.arange(self._least, self._most + 1, dtype=np.int32)
        self._wanted = sizes * np.int32(detection.min_count - 1)  # tokens, by size of the pattern
        # For how many tokens, up to the last one, each equals the one a pattern's size before it.
        self._runs = np.zeros(len(sizes), np.int32)
        # The output's tokens from `_at` on, the last one first; behind the first one of all there
        # is what equals no token.
        self._at = self._room = max(LEAST_ROOM, self._most)
        self._latest = np.full(self._room + self._most, -1, np.int64)

    def is_stuck(self, tokens: array[int]) -> bool:
        """Return whether a pattern stands often enough at the end.

        Args:
            tokens: the prompt and the output so far; those of the call before, and more.
        """
        for token_id in tokens[self._num_read :]:
            self._read(token_id)
        self._num_read = len(tokens)
        return bool(np.count_nonzero(self._runs >= self._wanted))

    def _read(self, token_id: int) -> None:
        """Take the next token."""
        at = self._at
        self._runs += 1
        self._runs *= self._latest[at + self._least - 1 : at + self._most] == token_id
        if not at:  # there is no room in front: the latest ones go back to the end
            at = self._room
            self._latest[at:] = self._latest[: self._most]
        self._at = at - 1
        self._latest[at - 1] = token_id
