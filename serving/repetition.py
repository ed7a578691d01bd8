"""Outputs that are stuck: that end with one pattern, again and again.

A pattern of k tokens stands c times in a row at the end of an output where each of its last
k (c - 1) tokens equals the one k places before it. So for each size of a pattern it is enough to
know for how many tokens in a row that has been so. It follows from the output's tokens alone, in
their order, so batches, preemption, forks and drafts leave no trace in it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np

from onnxport.errors import RequestError

NAME: Final = "repetition_detection"
STOP_REASON: Final = "repetition_detected"  # vLLM's
MAX_PATTERN: Final = 1024  # tokens; with each token of an output as many are compared
MAX_COUNT: Final = 1 << 20
LEAST_ROOM: Final = 256  # tokens that are written before the latest are moved


@dataclass(frozen=True, slots=True)
class RepetitionDetection:
    """When an output is stuck, with vLLM's names and defaults; then it ends.

    Source: vLLM's `RepetitionDetectionParams`.

    Attributes:
        max_pattern_size: most tokens of a pattern; 0: nothing is looked for.
        min_pattern_size: least tokens of one; 0 means 1.
        min_count: how often in a row a pattern stands at the end of an output that is stuck.

    Raises:
        RequestError: a value is out of its range, or they contradict each other.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        self._check("max_pattern_size", MAX_PATTERN)
        self._check("min_pattern_size", MAX_PATTERN)
        self._check("min_count", MAX_COUNT)
        if self.min_pattern_size > self.max_pattern_size:
            raise RequestError(
                f"{NAME} has the min_pattern_size {self.min_pattern_size} and the max_pattern_size "
                f"{self.max_pattern_size}; give a largest size that is no less, or 0 for both to "
                "look for nothing",
                f"{NAME}.min_pattern_size",
            )
        if self.is_on and self.min_count < 2:
            raise RequestError(
                f"{NAME} has the min_count {self.min_count}, and what stands there once does not "
                "repeat itself; give 2 or more, or a max_pattern_size of 0 to look for nothing",
                f"{NAME}.min_count",
            )

    @property
    def is_on(self) -> bool:
        """Whether anything is looked for."""
        return self.max_pattern_size > 0

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> RepetitionDetection:
        """Return what a mapping with the names of the fields says.

        Args:
            given: members that are None count as left out.

        Raises:
            RequestError: a name is not known, or as the constructor.
        """
        known = [each.name for each in fields(cls)]
        told = {name: value for name, value in given.items() if value is not None}
        if unknown := [name for name in told if name not in known]:
            raise RequestError(
                f"{NAME} has {unknown[0][:80]!r}, which is not known; it takes {', '.join(known)}",
                NAME,
            )
        return cls(**told)

    def _check(self, name: str, most: int) -> None:
        """Raise RequestError unless a field is an integer from 0 to `most`."""
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
            raise RequestError(
                f"{NAME}.{name} is {repr(value)[:80]}; it must be an integer in [0, {most}]",
                f"{NAME}.{name}",
            )


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
