"""How much time may be put into guesses that bring in nothing."""

from __future__ import annotations

FREE_SHARE = 0.01  # of the time of steps: what trying costs where it never pays
FIRST_STEPS = 8  # steps that the first tries may cost
MOST_STEPS = 64  # steps that may be lost before it shows that it does not pay any more


class Ledger:
    """The balance of what guesses have saved and cost, in seconds, and a little for trying.

    Estimates decide whether to guess; this bounds what they cost when they are wrong.
    """

    def __init__(self) -> None:
        self.balance_s = 0.0
        self._opened = False

    def open(self, step_s: float) -> None:
        """Give the first credit, once: some steps that take so long."""
        if not self._opened:
            self._opened = True
            self.balance_s += FIRST_STEPS * step_s

    def note(self, elapsed_s: float, saved_s: float, step_s: float) -> None:
        """A step took so long, which is so much less than the steps that it replaced.

        Args:
            elapsed_s: of the step and of guessing for it.
            saved_s: negative where it took longer.
            step_s: of a step without guesses.
        """
        most = MOST_STEPS * step_s
        balance = self.balance_s + FREE_SHARE * elapsed_s + saved_s
        self.balance_s = min(most, max(-most, balance))
