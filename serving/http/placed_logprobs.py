"""Log probabilities of tokens that wait for their text to be told, by where in a text that is."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from onnxport.serving.outputs import TokenLogprobs
from onnxport.serving.split import Stretch
from onnxport.serving.text import Pieces

Token = tuple[int, TokenLogprobs]  # that was sampled, and its candidates


class _Placed(NamedTuple):
    """A token, and where its text begins and ends."""

    start: int
    end: int
    token: Token

    def is_in(self, stretches: Sequence[Stretch]) -> bool:
        """Whether one of its characters, or the next one if it has none, is in some stretches."""
        for each in reversed(stretches):
            if each.length is not None and each.place + each.length <= self.start:
                return False
            if each.place < max(self.end, self.start + 1):
                return True
        return False


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
    _new: deque[_Placed] = field(default_factory=deque, init=False)  # may be of the answer
    _waiting: deque[_Placed] = field(default_factory=deque, init=False)  # of the answer
    _num_characters: int = field(default=0, init=False)  # of the text so far

    def add(self, tokens: Sequence[Token]) -> None:
        """Take the next tokens."""
        for token in tokens:
            start = self._num_characters
            self._num_characters += len(self.pieces.add(token[0]))
            self._new.append(_Placed(start, self._num_characters, token))

    def settle(self, stretches: Sequence[Stretch], end: int) -> None:
        """Forget tokens that are not of the answer, whose candidates may be many.

        Args:
            stretches: where in the text the answer is, in order.
            end: up to where that is all of it.
        """
        while self._new and self._new[0].start < end and self._new[0].end <= end:
            placed = self._new.popleft()
            if placed.is_in(stretches):
                self._waiting.append(placed)

    def take(self, end: int) -> list[Token]:
        """Return those that begin before a place in the text."""
        taken = []
        for placed in (self._waiting, self._new):
            while placed and placed[0].start < end:
                taken.append(placed.popleft().token)
        return taken
