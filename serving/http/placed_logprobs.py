"""Log probabilities of tokens that wait for their text to be told, by where in a text that is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onnxport.serving.text import Pieces

Entry = dict[str, Any]  # of one token


@dataclass(slots=True)
class PlacedLogprobs:
    """Log probabilities of the tokens of one text, until its parts are told.

    What is told of a text, and when, need not be as its tokens came: a part may be held until it is
    certain what it is, and several may come at once. A token is told with the first part that has
    one of its characters. One without a text of its own, such as the beginning of a character, is
    where the next one begins.

    Attributes:
        pieces: gives the text of each token.
    """

    pieces: Pieces
    _waiting: deque[tuple[int, int, Entry]] = field(default_factory=deque, init=False)
    _num_characters: int = field(default=0, init=False)  # of the text so far

    def add(self, token_ids: Sequence[int], entries: Sequence[Entry]) -> None:
        """Take the next tokens."""
        for token_id, entry in zip(token_ids, entries, strict=True):
            start = self._num_characters
            self._num_characters += len(self.pieces.add(token_id))
            self._waiting.append((start, self._num_characters, entry))

    def take(self, end: int) -> list[Entry]:
        """Return those that begin before a place in the text."""
        taken = []
        while self._waiting and self._waiting[0][0] < end:
            taken.append(self._waiting.popleft()[2])
        return taken

    def drop(self, end: int) -> None:
        """Forget those that end at a place in the text, or before it."""
        while self._waiting and self._waiting[0][0] < end and self._waiting[0][1] <= end:
            self._waiting.popleft()

    def take_all(self) -> list[Entry]:
        """Return all that are left."""
        taken = [entry for _, _, entry in self._waiting]
        self._waiting.clear()
        return taken
