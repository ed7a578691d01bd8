"""How long not to ask for guesses, where asking was in vain."""

from __future__ import annotations

from collections import deque

ASK_SHARE = 0.005  # of the time, that asking in vain may take
MOST_PAUSE = 64  # steps: text may begin to repeat itself
MOST_PAUSE_OF_HEADS = 1024  # likewise, where it takes so long to afford the next guess on trial
HOPEFUL_PAUSE = 8  # likewise, where a guess on trial was right
MOST_HOPES = 4  # times in a row; if it does not pay then, it does not for another reason
PATIENCE = 4  # times in a row that asking may be in vain before the pause doubles
AFTERMATH = 2  # times what asking takes is what it costs: the step after it finds caches cold
MOST_SAMPLES = 7  # of what asking takes, of which the middle one counts


class Pauses:
    """Pauses that grow, until asking in vain takes little of the time, and end when it is not."""

    def __init__(self) -> None:
        self._vain = 0  # times in a row
        self._num_right = 0  # trials in a row that were right, and nothing was guessed
        self._asking_s: deque[float] = deque(maxlen=MOST_SAMPLES)

    def after(self, asking_s: float, step_s: float, *, can_afford: bool) -> tuple[int, float]:
        """Return for how many steps not to ask again, and the seconds that asking takes.

        Args:
            asking_s: what asking took this time.
            step_s: what a step takes.
            can_afford: whether guesses have saved time of late, which pays for some patience.
        """
        self._asking_s.append(asking_s)
        cost_s = AFTERMATH * sorted(self._asking_s)[(len(self._asking_s) - 1) // 2]
        self._vain += 1
        doublings = self._vain // PATIENCE if can_afford else self._vain
        hopeful = 0 < self._num_right <= MOST_HOPES
        longest = HOPEFUL_PAUSE if hopeful else MOST_PAUSE
        allowed = min(longest, int(cost_s / (ASK_SHARE * step_s)))
        return min(allowed, (1 << min(doublings, MOST_PAUSE.bit_length())) - 1), cost_s

    def note_trial(self, right: bool) -> None:
        """What was guessed on trial has come, or has not."""
        self._num_right = self._num_right + 1 if right else 0

    def end(self) -> None:
        """There are guesses again."""
        self._vain = self._num_right = 0
