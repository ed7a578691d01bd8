"""The random numbers that tokens are drawn by; serving/native/csrc/rows/noise.h says why, and how.

A row draws the token with the largest sum of its logit over the temperature and its noise, -log(E)
for an exponential variable E, which is each token with its probability.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

GROUP: Final = 64  # tokens whose numbers begin with the least one of them
LEAST_TEMPERATURE: Final = 1e-20  # a smaller one has no inverse in float32
_GAMMA: Final = 0x9E3779B97F4A7C15
_GROUPS, _TOKENS = 1, 2  # streams


class Noise:
    """The numbers of one row."""

    def __init__(self, uniform: float, num_tokens: int) -> None:
        """Make what there is of groups.

        Args:
            uniform: the row's random number, in [0, 1), of which 53 bits count.
            num_tokens: of the vocabulary.
        """
        self._number = int(uniform * 2.0**53)
        bits = self._bits(_GROUPS, np.arange(-(-num_tokens // GROUP)))
        self._first = (bits % np.uint64(GROUP)).astype(np.int64)
        self._least = _exponential(bits) / GROUP

    @property
    def most(self) -> NDArray[np.float64]:
        """The largest number of each group, float64 [num_groups]."""
        found: NDArray[np.float64] = -np.log(self._least)
        return found

    def of(self, groups: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the numbers of all tokens of some groups, float64 [len(groups), GROUP]."""
        tokens = groups[:, None] * GROUP + np.arange(GROUP)
        least = self._least[groups]
        clocks = least[:, None] + _exponential(self._bits(_TOKENS, tokens))
        clocks[np.arange(len(groups)), self._first[groups]] = least
        found: NDArray[np.float64] = -np.log(clocks)
        return found

    def _bits(self, stream: int, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return 64 random bits for each of some places."""
        with np.errstate(over="ignore"):
            start = _mix(np.uint64((self._number + stream * _GAMMA) % (1 << 64)))
            steps = (places + 1).astype(np.uint64) * np.uint64(_GAMMA)
            bits: NDArray[np.uint64] = _mix(start + steps)
        return bits


def per_unit(temperature: float) -> float:
    """Return what logits are multiplied by."""
    return 1.0 / max(temperature, LEAST_TEMPERATURE)


def _mix(values: Any) -> Any:
    """Scramble uint64 values (the finalizer of SplitMix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _exponential(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return exponential variables of 53 random bits each."""
    found: NDArray[np.float64] = -np.log(((bits >> np.uint64(11)) + 0.5) * 2.0**-53)
    return found
