"""How much time may be put into guesses that bring in nothing."""

from __future__ import annotations

import math

FREE_SHARE = 0.01  # of the time of steps: what guessing may cost where it never pays
TRIAL_SHARE = 0.005  # likewise what a draft model may take of it that only guesses to learn
FIRST_STEPS = 3  # steps that the first guesses may cost, and that can be saved up of this share
FIRST_S = 0.005  # or so much: where a step takes far less, the first guesses find everything cold
MOST_STEPS = 32  # steps that may be lost before it shows that they do not pay any more


class Ledger:
    """What guesses have saved and cost, in seconds.

    Estimates decide whether to guess; this bounds what they cost when they are wrong.

    Attributes:
        balance_s: what may be lost.
        trial_s: what of it may be put into guesses that are not expected to pay, to learn.
    """

    def __init__(self) -> None:
        self.balance_s = 0.0
        self.trial_s = 0.0
        self._goal_s = 0.0  # what a trial is known to take: so much can be saved up, too
        self._opened = False

    def open(self, step_s: float) -> None:
        """Give the first credit, once: some steps that take so long, or some milliseconds."""
        if not self._opened:
            self._opened = True
            first_s = max(FIRST_STEPS * step_s, min(FIRST_S, MOST_STEPS * step_s))
            self.balance_s += first_s
            self.trial_s += first_s  # nothing is known yet

    def affords_trial(self, price_s: float) -> bool:
        """Whether guesses that are expected to cost so much may be made only to learn."""
        return price_s <= min(self.balance_s, self.trial_s)

    def save_up(self, price_s: float, step_s: float) -> None:
        """So much can be saved up of what is free, if it is no more than may ever be lost.

        Args:
            price_s: of guesses that are made to learn.
            step_s: of a step without guesses.
        """
        self._goal_s = price_s if price_s <= MOST_STEPS * step_s else 0.0

    def steps_to_trial(self, price_s: float, step_s: float) -> int:
        """After how many steps, which take so long, guesses of this price may be made to learn.

        Until then it is saved up for; 0: now.
        """
        self._goal_s = price_s
        short_s = price_s - self.balance_s, price_s - self.trial_s
        shares = FREE_SHARE, TRIAL_SHARE
        steps = [one / (share * step_s) for one, share in zip(short_s, shares, strict=True)]
        return max(0, math.ceil(max(steps)))

    def note_trial(self, price_s: float) -> None:
        """They are made."""
        self.trial_s -= price_s
        self.balance_s -= price_s

    def steps_to_credit(self, step_s: float) -> int:
        """After how many steps, which take so long, something may be lost again; 0: now."""
        if self.balance_s > 0:
            return 0
        return 1 + int(-self.balance_s / (FREE_SHARE * step_s))

    def has_earned(self, step_s: float) -> bool:
        """Whether there is more than what is given for free, some steps that take so long."""
        return self.balance_s > self._most_free_s(step_s)

    def charge(self, lost_s: float) -> None:
        """So much time was taken and has not come back."""
        self.balance_s -= lost_s

    def note(self, elapsed_s: float, saved_s: float, step_s: float) -> float:
        """Steps took so long, which is so much less than those that they replaced.

        Args:
            elapsed_s: of the steps and of guessing for them.
            saved_s: negative where it took longer.
            step_s: of a step without guesses.

        Returns:
            What of it is more than may be lost, and so is not kept.
        """
        most = MOST_STEPS * step_s
        room = max(0.0, self._most_free_s(step_s) - self.balance_s)
        free = min(room, FREE_SHARE * elapsed_s)
        balance_s = max(-most, self.balance_s + free + saved_s)
        self.balance_s = min(most, balance_s)
        self.trial_s = min(most, self.trial_s + TRIAL_SHARE * elapsed_s)
        return balance_s - self.balance_s

    def _most_free_s(self, step_s: float) -> float:
        """What can be saved up of what is given for free."""
        return max(FIRST_STEPS * step_s, self._goal_s)
