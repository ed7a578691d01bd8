"""How long not to ask for guesses, where asking was in vain."""

from __future__ import annotations

from collections import deque

ASK_SHARE = 0.005  # of the time, that asking in vain may take
MOST_PAUSE = 64  # steps: text may begin to repeat itself
MOST_SAMPLES = 7  # of what asking takes, of which the middle one counts


class Pauses:
    """Pauses that grow, until asking in vain takes little of the time, and end when it is not."""

    def __init__(self) -> None:
        self._vain = 0  # times in a row
        self._asking_s: deque[float] = deque(maxlen=MOST_SAMPLES)

    @property
    def asking_s(self) -> float:
        """What asking in vain takes."""
        return sorted(self._asking_s)[(len(self._asking_s) - 1) // 2]

    def after(self, asking_s: float, step_s: float) -> int:
        """Return for how many steps not to ask again.

        Args:
            asking_s: what asking took this time.
            step_s: what a step takes.
        """
        self._asking_s.append(asking_s)
        self._vain = min(self._vain + 1, MOST_PAUSE.bit_length())
        allowed = int(self.asking_s / (ASK_SHARE * step_s))
        return min(allowed, MOST_PAUSE, (1 << self._vain) - 1)

    def end(self) -> None:
        """Guesses may be right now."""
        self._vain = 0
