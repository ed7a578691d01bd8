"""Whether to guess, for whom, and how far: the policy over a drafter."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnxport.errors import DeviceLostError
from onnxport.serving.request import Request
from onnxport.serving.speculation.acceptance import Acceptance
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.costs import MOST_SAMPLES, StepCosts
from onnxport.serving.speculation.drafter import Drafter
from onnxport.serving.speculation.ledger import FREE_SHARE, Ledger
from onnxport.serving.speculation.lengths import Choice, choose_lengths
from onnxport.serving.stats import SpeculationCounters

logger = logging.getLogger(__name__)

LEAST_SPEEDUP = 1.02  # below that guessing is not worth the doubt
IDLE_STEPS = 8  # without guesses, where they do not pay, before they are thought of again
FEW_PAUSE = 4  # steps that nobody asks, where there was nothing to guess for a while
MOST_PAUSE = 64  # likewise and at most, where asking takes more than `FREE_SHARE` of the time
VAIN_A_PAUSE = 8  # times in a row that asking was in vain, before the pause doubles
PLAIN_EVERY = 64  # steps: one without guesses shows what they are compared with
MOST_FAILURES = 3  # of the drafter in a row, before it is given up
FIRST_OUTPUT = 128  # tokens that an answer is taken to have, before some have ended
OUTPUT_MEMORY = 0.95  # what the mean length of answers keeps of itself with each that ends
SHORTEST_S = 1e-9  # a clock may not see a step, and no step takes no time
ROUND_GUESS = 0.25  # of a step: what guessing one place is taken to cost before it was measured


@dataclass(slots=True)
class _Step:
    """What was guessed for a step, and what came of it."""

    num_rows: int
    num_drafted: int = 0
    guessing_s: float = 0.0  # as it is expected to take
    num_accepted: int = 0


class Speculator:
    """Guesses as far as it pays: the expected tokens a second are the most that can be had.

    What is right how often, and what takes how long, is measured all the time. Where guesses do
    not pay there are none, but for single ones now and then that take 1 % of the time.
    """

    def __init__(
        self,
        drafter: Drafter,
        config: SpeculationConfig,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take over `drafter`; `close` closes it.

        Args:
            drafter: guesses.
            config: the most that may be guessed.
            clock: the time in seconds.
        """
        self._drafter: Drafter | None = drafter
        self._config = config
        self._clock = clock
        self._acceptance = Acceptance()
        self._costs = StepCosts()
        self._ledger = Ledger()
        self._place_s: deque[float] = deque(maxlen=MOST_SAMPLES)  # one place, over all rows
        self._behind_s: deque[float] = deque(maxlen=MOST_SAMPLES)  # one token that was missing
        self._mean_output = float(FIRST_OUTPUT)
        self._last: _Step | None = None
        self._began_s: float | None = None  # when the step in hand was left to the engine
        self._streak = 0  # steps in a row with guesses
        self._idle = 0  # steps to come in which guesses are not thought of
        self._skips = False  # whether the step in hand is one of these
        self._num_skipped = 0  # how many there were since the last other one
        self._vain = 0  # times in a row that it was asked and nothing was guessed that may pay
        self._vain_s: deque[float] = deque(maxlen=MOST_SAMPLES)  # what that took
        self._num_failures = 0
        self._num_drafts = 0
        self._accepted_at = [0] * config.num_speculative_tokens
        self._num_draft_tokens = 0

    @property
    def counters(self) -> SpeculationCounters:
        """What was guessed so far, and how much of it was right."""
        accepted = tuple(self._accepted_at)
        return SpeculationCounters(
            self._num_drafts, self._num_draft_tokens, sum(accepted), accepted
        )

    def propose(self, requests: Sequence[Request], budget: int) -> dict[Request, Sequence[int]]:
        """Guess what follows the tokens of requests, all of which decode in the next step.

        Args:
            requests: the ones.
            budget: most guesses in all.

        Returns:
            The guesses of some requests; of none where it does not pay.
        """
        self._skips = self._idle > 0
        if self._skips:  # as fast as can be: small models make thousands of steps a second
            self._idle -= 1
            self._num_skipped += 1
            return {}
        start_s = self._clock()
        found = self._propose(requests, budget)
        cheap = self._drafter is not None and self._drafter.is_cheap
        # What is thought in vain is no part of a step without guesses, or guesses would seem to
        # cost less than they do.
        self._began_s = start_s if cheap and found else self._clock()
        return found

    def _propose(self, requests: Sequence[Request], budget: int) -> dict[Request, Sequence[int]]:
        self._settle()
        rows = len(requests)
        most_rows = self._config.disable_by_batch_size
        if self._drafter is None or not rows or (most_rows is not None and rows > most_rows):
            return {}
        if self._rests(rows):
            return {}
        self._ledger.open(self._costs.seconds(rows))
        start_s = self._clock()
        found = self._guess(self._drafter, requests, budget)
        self._streak = self._streak + 1 if found else 0
        if not found:
            self._vain_s.append(self._clock() - start_s)
        return found

    def note_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """The model has checked a draft: so many of its first tokens were right."""
        if not num_drafted:
            return
        self._num_drafts += 1
        self._num_draft_tokens += num_drafted
        for place in range(num_accepted):
            self._accepted_at[place] += 1
        self._acceptance.note(request, num_drafted, num_accepted)
        if self._last is not None:
            self._last.num_accepted += num_accepted

    def note_step(self, num_rows: int, num_tokens: int, elapsed_s: float) -> None:
        """A step in which all rows decode is done.

        Args:
            num_rows: that decode.
            num_tokens: with the guesses.
            elapsed_s: of model and sampling. What the engine does besides counts too, from the
                guesses on, if it was asked for some.
        """
        if self._skips:
            return
        if self._began_s is not None:
            elapsed_s = max(elapsed_s, self._clock() - self._began_s)
            self._began_s = None
        self._costs.note(num_tokens, max(elapsed_s, SHORTEST_S))
        if self._last is None:
            self._last = _Step(num_rows)
        self._last.num_drafted = num_tokens - num_rows

    def forget(self, request: Request) -> None:
        """Let go of a request that has ended or yields."""
        self._acceptance.forget(request)
        if self._drafter is not None:
            self._drafter.forget(request)
        if request.finish_reason is not None:
            self._mean_output *= OUTPUT_MEMORY
            self._mean_output += (1 - OUTPUT_MEMORY) * request.num_output_tokens

    def close(self) -> None:
        """Free the drafter. Idempotent."""
        drafter, self._drafter = self._drafter, None
        if drafter is not None:
            drafter.close()

    # What the step before has shown.

    def _settle(self) -> None:
        """Enter what the last step saved or cost, by what such steps are known to take."""
        step, self._last = self._last, None
        if step is None or not self._costs.knows(step.num_rows):
            return
        plain_s = self._costs.seconds(step.num_rows)
        taken_s = self._costs.seconds(step.num_rows + step.num_drafted) + step.guessing_s
        saved_s = step.num_accepted * plain_s / step.num_rows - (taken_s - plain_s)
        self._ledger.note(taken_s + self._num_skipped * plain_s, saved_s, plain_s)
        self._num_skipped = 0

    # What the next one does.

    def _rests(self, rows: int) -> bool:
        """Whether the next step is to go without guesses, whatever they would be."""
        if not self._costs.knows(rows):
            return True
        if self._streak >= PLAIN_EVERY:
            self._streak = 0
            return True
        return False

    def _guess(
        self, drafter: Drafter, requests: Sequence[Request], budget: int
    ) -> dict[Request, Sequence[int]]:
        """Choose lengths and guess."""
        most = self._config.num_speculative_tokens
        limits = [max(0, min(most, one.max_total_tokens - len(one.tokens) - 1)) for one in requests]
        proposals: list[Sequence[int]] = []
        if drafter.is_cheap:
            proposals = self._ask(drafter, requests, limits)
            limits = list(map(len, proposals))
            if not any(limits):
                self._pause(len(requests), 0, FEW_PAUSE)
                return {}
        lengths = self._choose(drafter, requests, limits, budget)
        if not any(lengths):
            self._pause(len(requests), IDLE_STEPS, IDLE_STEPS)
            return {}
        self._last = _Step(len(requests))
        if not drafter.is_cheap:
            proposals = self._ask_model(drafter, requests, lengths, self._last)
        found = {
            request: proposal[:length]
            for request, proposal, length in zip(requests, proposals, lengths, strict=True)
            if length and proposal
        }
        self._last.num_drafted = sum(map(len, found.values()))
        return found

    def _pause(self, rows: int, least: int, most: int) -> None:
        """Let steps go without a thought of guesses.

        Args:
            rows: of the step in hand.
            least: steps, at once.
            most: steps, where thinking takes little of the time; more, where it takes much.
        """
        self._vain += 1
        share = min(self._vain_s, default=0.0) / self._costs.seconds(rows)
        most = min(MOST_PAUSE, max(most, int(share / FREE_SHARE)))
        grown = (1 << min(self._vain // VAIN_A_PAUSE, MOST_PAUSE.bit_length())) - 1
        self._idle = max(least, min(most, grown))

    def _choose(
        self, drafter: Drafter, requests: Sequence[Request], limits: list[int], budget: int
    ) -> list[int]:
        """Return how far to guess for each request; nowhere if it does not pay."""
        rows = len(requests)
        rates = [self._acceptance.rate(one) for one in requests]
        round_s = 0.0 if drafter.is_cheap else self._seconds_a_place(rows)
        choice = choose_lengths(rates, limits, budget, self._costs.seconds, round_s)
        plain_s = self._costs.seconds(rows)
        if choice.speedup >= LEAST_SPEEDUP:
            lengths = self._without_late(drafter, requests, choice, plain_s / rows)
            if any(lengths) and self._ledger.balance_s > 0:
                self._vain = 0
                return lengths
        return self._probe(drafter, requests, limits, round_s)

    def _probe(
        self, drafter: Drafter, requests: Sequence[Request], limits: list[int], round_s: float
    ) -> list[int]:
        """Guess one token of the request that the least is known of, if there is time for it."""
        rows = len(requests)
        lengths = [0] * rows
        cost_s = self._costs.seconds(rows + 1) - self._costs.seconds(rows) + round_s
        behind_s = min(self._behind_s) if self._behind_s else round_s
        prices = {}
        for row in range(rows):
            if limits[row]:
                late = drafter.num_behind(requests[row])
                price_s = cost_s + (behind_s * late if late > self._short else 0.0)
                if self._ledger.affords_trial(price_s):
                    prices[row] = price_s
        if prices:
            row = min(prices, key=lambda row: self._acceptance.num_tried(requests[row]))
            self._ledger.note_trial(prices[row])
            lengths[row] = 1
        return lengths

    def _without_late(
        self, drafter: Drafter, requests: Sequence[Request], choice: Choice, token_s: float
    ) -> list[int]:
        """Leave out the requests for which the drafter has to compute more than it would save.

        Args:
            drafter: guesses.
            requests: the ones.
            choice: what would be guessed.
            token_s: seconds that a token takes without guesses.
        """
        lengths = list(choice.lengths)
        behind_s = min(self._behind_s) if self._behind_s else 0.0
        saved_s = token_s * (1 - 1 / choice.speedup)  # a token
        for row, request in enumerate(requests):
            late = drafter.num_behind(request) if lengths[row] else 0
            if late > self._short:
                left = request.max_total_tokens - len(request.tokens)
                coming = min(left, max(self._mean_output - request.num_output_tokens, 1.0))
                if late * behind_s > coming * saved_s:
                    lengths[row] = 0
        return lengths

    @property
    def _short(self) -> int:
        """Tokens that a drafter may be behind in the ordinary course."""
        return self._config.num_speculative_tokens + 1

    def _seconds_a_place(self, rows: int) -> float:
        """Return what guessing one place takes, over all rows."""
        if len(self._place_s) > 1:  # the first may be slow: memory is touched
            return min(self._place_s)
        return ROUND_GUESS * self._costs.seconds(rows)

    # Asking.

    def _ask_model(
        self, drafter: Drafter, requests: Sequence[Request], lengths: Sequence[int], step: _Step
    ) -> list[Sequence[int]]:
        """Ask for the guesses of requests with a length, and note what that takes."""
        chosen = [row for row, length in enumerate(lengths) if length]
        some = [requests[row] for row in chosen]
        late = [drafter.num_behind(one) for one in some]
        catches_up = max(late) > self._short  # which was weighed, and is no part of what comes
        start_s = self._clock()
        found = self._ask(drafter, some, [lengths[row] for row in chosen])
        elapsed_s = self._clock() - start_s
        longest = max(map(len, found))
        if catches_up and self._drafter is not None:
            computed = sum(late) - sum(drafter.num_behind(one) for one in some)
            self._behind_s.append(elapsed_s / max(1, computed))
        elif longest:
            self._place_s.append(elapsed_s / longest)
            step.guessing_s = longest * self._seconds_a_place(len(requests))
        proposals: list[Sequence[int]] = [()] * len(requests)
        for row, proposal in zip(chosen, found, strict=True):
            proposals[row] = proposal
        return proposals

    def _ask(
        self, drafter: Drafter, requests: Sequence[Request], lengths: Sequence[int]
    ) -> list[Sequence[int]]:
        """Ask for guesses; a drafter that fails makes none, and is given up if that goes on."""
        try:
            found = drafter.propose(requests, lengths)
        except Exception as error:
            self._num_failures += 1
            lost = isinstance(error, DeviceLostError)
            if lost or self._num_failures >= MOST_FAILURES:
                logger.error("speculation is off from now on: guessing failed", exc_info=error)
                self._give_up()
            else:
                logger.warning("guessing failed, and is tried again: %s", error)
                for request in requests:
                    drafter.forget(request)
            return [()] * len(requests)
        self._num_failures = 0
        return found

    def _give_up(self) -> None:
        try:
            self.close()
        except Exception as error:
            logger.warning("closing the drafter failed too, and may leak memory: %s", error)
