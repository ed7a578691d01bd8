"""Whether to guess, for whom, and how far: the policy over a drafter."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from onnxport.serving.guesses import StateReader
from onnxport.serving.request import Request
from onnxport.serving.speculation.acceptance import Acceptance
from onnxport.serving.speculation.answers import AnswerLengths
from onnxport.serving.speculation.asking import Asker
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.costs import StepCosts
from onnxport.serving.speculation.debts import Debts
from onnxport.serving.speculation.drafter import Drafter
from onnxport.serving.speculation.ledger import Ledger
from onnxport.serving.speculation.lengths import Choice, choose_lengths
from onnxport.serving.speculation.pauses import AFTERMATH, MOST_PAUSE, MOST_PAUSE_OF_HEADS, Pauses
from onnxport.serving.speculation.trials import Trials
from onnxport.serving.stats import SpeculationCounters

LEAST_SPEEDUP = 1.02  # below that guessing is not worth the doubt
# Of several sequences some get ahead of others, and those that are left at the end share steps that
# take hardly less time: what that costs is in no measured step.
LEAST_SPEEDUP_OF_MANY = 1.1
CROWDED_STEPS = 8  # with more sequences than allowed, before these are counted again
SHORTEST_S = 1e-9  # a clock may not see a step, and no step takes no time
# Telling states takes some microseconds. Where that is more than half a percent of a step, nobody
# is told while guesses rest, but for the last steps of a pause: of these a head knows enough to be
# right nine times in ten that it would be with all of them.
TELLING_S = 1e-5
MOST_TELLING = 0.005
CONTEXT_STEPS = 16
# What is taken to cost so much before it was measured: guessing one place, of a step; and a token
# that a draft model has to catch up with, where there are many, of a place.
ROUND_GUESS = 0.25
CATCH_UP_GUESS = 1 / 16

Guessed = dict[Request, Sequence[int]]


@dataclass(slots=True)
class _Step:
    """What was guessed for a step, and what came of it."""

    num_rows: int
    num_drafted: int  # tokens that are owed count, too
    guessing_s: float  # of a draft model, as it is expected to take
    num_accepted: int = 0
    elapsed_s: float = 0.0  # what it took by itself


class Speculator:
    """Guesses as far as it pays: the expected tokens a second are the most that can be had.

    What is right how often, and what takes how long, is measured all the time. Where guesses do
    not pay there are none, and steps go by without a thought of them. Now and then somebody is
    asked all the same, and what comes shows whether it would have been right.
    """

    def __init__(
        self,
        drafter: Drafter,
        config: SpeculationConfig,
        clock: Callable[[], float] = time.perf_counter,
        reader: StateReader | None = None,
        *,
        recomputes: bool = False,
    ) -> None:
        """Take over `drafter`; `close` closes it.

        Args:
            drafter: guesses.
            config: the most that may be guessed.
            clock: the time in seconds.
            reader: the same, if it has to be told of the model's states.
            recomputes: whether a wrong guess makes the model compute what the request has got in
                that step once more (`Request.num_owed_tokens`).
        """
        self._reader = reader
        self._recomputes = recomputes
        self._asker = Asker(drafter, config.longest_draft, clock)
        self._is_cheap = drafter.is_cheap
        self._config = config
        self._clock = clock
        self._acceptance = Acceptance()
        self._trials = Trials(self._acceptance)
        self._costs = StepCosts()
        self._ledger = Ledger()
        self._pauses = Pauses()
        self._answers = AnswerLengths()
        self._debts = Debts(self._ledger)
        self._vain: Counter[Request] = Counter()  # times that nothing came of asking, to learn
        self._step: _Step | None = None  # the one in hand, if there are guesses
        self._looked_s = 0.0  # when it was asked for, before it was planned
        self._began_s: float | None = None  # when it began, as far as it counts
        self._idle = 0  # steps to come in which guesses are not thought of
        self._trial_s = 0.0  # what the next guesses of a head take that are made only to learn
        self._told = 1  # one more than the last of them, of whose states the reader is told
        self._late_s = 0.0  # when they have taken so much longer than they were to that it is over
        self._num_drafts = 0
        self._accepted_at = [0] * config.longest_draft
        self._num_draft_tokens = 0

    @property
    def counters(self) -> SpeculationCounters:
        """What was guessed so far, and how much of it was right."""
        accepted = tuple(self._accepted_at)
        return SpeculationCounters(
            self._num_drafts, self._num_draft_tokens, sum(accepted), accepted
        )

    @property
    def reader(self) -> StateReader | None:
        """See `Guesses.reader`."""
        return None if self._asker.drafter is None or self._idle >= self._told else self._reader

    def rests(self) -> bool:
        """See `Guesses.rests`."""
        self._began_s = None  # of a step with prompts, which nobody tells of
        if self._idle:
            self._idle -= 1
            if self._idle > MOST_PAUSE and not self._idle % MOST_PAUSE:
                self._wake_if_late()
            return True
        self._looked_s = self._clock()
        return self._asker.drafter is None

    def propose(self, requests: Sequence[Request], budget: int) -> Guessed:
        """Guess what follows the tokens of requests, all of which decode in the next step.

        Args:
            requests: the ones.
            budget: most guesses in all.

        Returns:
            The guesses of some requests; of none where it does not pay.
        """
        start_s = self._clock()
        spent_s = self._asker.spent_s
        rows = len(requests)
        self._settle()
        if not self._may_guess(rows):
            self._began_s = self._clock()
            return {}
        plain_s = self._costs.seconds(rows)
        self._ledger.open(plain_s)
        right = self._trials.judge()
        if right is not None:
            self._pauses.note_trial(right)
        if debt_steps := self._ledger.steps_to_credit(plain_s):
            self._save_up(debt_steps, plain_s)
            self._began_s = self._clock()
            return {}
        found = (self._guess if self._is_cheap else self._guess_by_model)(requests, budget)
        spent_s = self._asker.spent_s - spent_s
        if found:
            # All that is done for guesses is a part of the step, but for a draft model's runs.
            self._began_s = self._looked_s + spent_s
        else:
            # What is thought in vain is no part of a step without guesses, or guesses would seem
            # to cost less than they do.
            self._began_s = self._clock()
            self._pause(self._began_s - start_s - spent_s, plain_s)
        return found

    def note_planned(self, num_drafted: int) -> None:
        """See `Guesses.note_planned`."""
        if self._step is not None:
            self._step.num_drafted = num_drafted

    def note_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """The model has checked a draft: so many of its first tokens were right."""
        if not num_drafted:
            return
        self._num_drafts += 1
        self._num_draft_tokens += num_drafted
        for place in range(num_accepted):
            self._accepted_at[place] += 1
        self._acceptance.note(request, num_drafted, num_accepted)
        if self._step is not None:
            self._step.num_accepted += num_accepted

    def note_step(self, num_rows: int, num_tokens: int, elapsed_s: float) -> None:
        """A step in which all rows decode is done.

        Args:
            num_rows: that decode.
            num_tokens: with the guesses, and with what rows owed.
            elapsed_s: of model and sampling. What the engine does besides counts too, from the
                guesses on, if it was asked for some.
        """
        if self._began_s is None:  # it was not
            self._settle()
        else:
            elapsed_s = max(elapsed_s, self._clock() - self._began_s)
            self._began_s = None
        drafted = num_tokens - num_rows
        self._costs.note(num_rows, drafted, max(elapsed_s, SHORTEST_S))
        if self._step is None and drafted:  # what guesses before have cost
            self._step = _Step(num_rows, drafted, 0.0)
        if self._step is not None:
            self._step.num_drafted, self._step.elapsed_s = drafted, elapsed_s

    def forget(self, request: Request) -> None:
        """Let go of a request that has ended or yields."""
        self._trials.forget(request)
        self._acceptance.forget(request)
        self._asker.forget(request)
        self._debts.charge(request)
        self._vain.pop(request, None)
        if request.finish_reason is not None:
            self._answers.note(request.num_output_tokens)

    def close(self) -> None:
        """Free the drafter. Idempotent."""
        self._asker.close()

    # What the step before has shown, and what the next one may do.

    def _settle(self) -> None:
        """Enter what the last step with guesses saved or cost, by what such steps take.

        Of what size none was measured twice, it is what this one took.
        """
        step, self._step = self._step, None
        if step is None or not self._costs.knows(step.num_rows):
            return
        plain_s = self._costs.seconds(step.num_rows)
        taken_s = self._costs.seconds(step.num_rows, step.num_drafted)
        if not self._costs.has_measured(step.num_rows, step.num_drafted):
            taken_s = max(taken_s, step.elapsed_s)
        taken_s += step.guessing_s
        saved_s = step.num_accepted * plain_s / step.num_rows - (taken_s - plain_s)
        self._debts.pay(self._ledger.note(taken_s, saved_s, plain_s))

    def _may_guess(self, rows: int) -> bool:
        """Whether guesses may be thought of."""
        if not self._config.longest_at(rows):
            plain_s = self._costs.seconds(rows) if self._costs.knows(rows) else math.inf
            self._idle = CROWDED_STEPS
            self._told = 1 if self._spares_telling(plain_s) else CROWDED_STEPS + 1
            return False
        return self._asker.drafter is not None and self._costs.is_fresh(rows)

    def _save_up(self, num_steps: int, plain_s: float) -> None:
        """Nothing may be lost, so nobody is asked: asking would only take more."""
        self._rest(min(num_steps, MOST_PAUSE) - 1, plain_s)
        self._ledger.note((1 + self._idle) * plain_s, 0.0, plain_s)

    def _pause(self, asking_s: float, plain_s: float) -> None:
        """Asking was in vain: let steps go without a thought of guesses, and pay for it."""
        can_afford = self._ledger.has_earned(plain_s)
        spares = self._spares_telling(plain_s)
        if spares:
            asking_s += CONTEXT_STEPS * TELLING_S
        idle, cost_s = self._pauses.after(asking_s, plain_s, can_afford=can_afford)
        if spares and self._trial_s:  # or telling and asking would be for nothing
            goal_s = AFTERMATH * (self._trial_s + cost_s)
            affordable = self._ledger.steps_to_trial(goal_s, plain_s)
            idle = max(idle, min(affordable, MOST_PAUSE_OF_HEADS))
        self._rest(idle, plain_s)
        self._ledger.note((1 + idle) * plain_s, -cost_s, plain_s)

    def _rest(self, num_steps: int, plain_s: float) -> None:
        """Let so many steps go without a thought of guesses."""
        self._idle = num_steps
        self._told = CONTEXT_STEPS if self._spares_telling(plain_s) else num_steps + 1
        self._late_s = self._clock() + 2 * num_steps * plain_s

    def _wake_if_late(self) -> None:
        """End a long pause whose steps take longer than those by which it was chosen."""
        if self._clock() > self._late_s:
            self._idle = CONTEXT_STEPS

    def _spares_telling(self, plain_s: float) -> bool:
        """Whether a reader is not told of all steps while guesses rest."""
        return self._reader is not None and plain_s < TELLING_S / MOST_TELLING

    # Guesses that cost next to nothing: they are made first, and then chosen from.

    def _guess(self, requests: Sequence[Request], budget: int) -> Guessed:
        proposals = self._asker.ask(requests, self._limits(requests))
        limits = list(map(len, proposals))
        if not any(limits):
            return {}
        choice = self._choose(requests, limits, budget)
        if choice is None:
            for request, proposal in zip(requests, proposals, strict=True):
                self._trials.add(request, proposal)
            return {}
        found: Guessed = {}
        for request, proposal, length in zip(requests, proposals, choice.lengths, strict=True):
            if length:
                found[request] = proposal[:length]
            else:
                self._trials.add(request, proposal)
        self._pauses.end()
        self._step = _Step(len(requests), sum(choice.lengths), 0.0)
        return found

    def _limits(self, requests: Sequence[Request]) -> list[int]:
        """Return the longest draft of each request: the last token of all comes by itself."""
        most = self._config.longest_at(len(requests))
        rooms = [one.max_total_tokens - len(one.tokens) - 1 for one in requests]
        return [most if room > most else room for room in rooms]

    def _choose(
        self, requests: Sequence[Request], limits: list[int], budget: int, round_s: float = 0.0
    ) -> Choice | None:
        """Return how far to guess for each request; None if it does not pay."""
        rate = self._acceptance.rate
        rates = [rate(one) for one in requests]
        most = min(budget, sum(limits))
        owed = [one.num_owed_tokens for one in requests] if self._recomputes else None
        due = sum(owed) if owed else 0
        table = self._costs.table(len(requests), due + most)[due : due + most + 1]
        choice = choose_lengths(rates, limits, budget, table, round_s, owed)
        least = LEAST_SPEEDUP if len(requests) == 1 else LEAST_SPEEDUP_OF_MANY
        return choice if choice.speedup >= least else None

    # Guesses that take time: it is chosen first for whom they are made.

    def _guess_by_model(self, requests: Sequence[Request], budget: int) -> Guessed:
        rows = len(requests)
        self._trial_s = 0.0
        plain_s = self._costs.seconds(rows)
        round_s = self._asker.seconds_a_place(rows, ROUND_GUESS * plain_s)
        limits = self._limits(requests)
        choice = self._choose(requests, limits, budget, round_s)
        lengths = [0] * rows
        if choice is not None:
            lengths = self._worth_catching_up(requests, choice, plain_s / rows)
        if not any(lengths):
            self._try(requests, limits, round_s)
            return {}
        token_s = self._asker.seconds_a_token(0.0)  # the first time finds everything cold
        asked = self._asker.ask_model(dict(zip(requests, lengths, strict=True)))
        for request, num_tokens in asked.num_caught_up.items():
            self._debts.add(request, num_tokens * token_s)
        found = asked.guesses
        self._step = _Step(rows, sum(map(len, found.values())), asked.longest * round_s)
        if found:
            self._pauses.end()
            self._debts.note_guessed(found)
        return found

    def _try(self, requests: Sequence[Request], limits: Sequence[int], round_s: float) -> None:
        """Guess for the request that the least is known of, if there is time to learn."""
        prices: dict[Request, float] = {}
        lengths: dict[Request, int] = {}
        unknown_s = CATCH_UP_GUESS * round_s
        token_s = self._asker.seconds_a_token(unknown_s)
        plain_s = self._costs.seconds(len(requests))
        for request, limit in zip(requests, limits, strict=True):
            behind_s = self._asker.seconds_to_catch_up(request, unknown_s)
            most_s = self._answers.coming(request) * plain_s / len(requests)  # it may ever save
            if limit > 0 and behind_s <= most_s:
                length = lengths[request] = min(limit, self._trials.length)
                prices[request] = length * round_s + behind_s
        # Behind a pause of which not all was told.
        late_s = (CONTEXT_STEPS + 1) * token_s
        self._trial_s = self._trials.length * round_s + late_s
        if not prices:
            return
        able = [one for one, price_s in prices.items() if self._ledger.affords_trial(price_s)]
        if not able:
            # A request that it has to catch up with grows while that is saved up for.
            price_s = min(prices.values()) + MOST_PAUSE * token_s
            self._ledger.save_up(price_s, plain_s)
            return
        chosen = min(able, key=lambda one: (self._vain[one], self._acceptance.num_tried(one)))
        asked = self._asker.ask_model({chosen: lengths[chosen]})
        num_caught_up = asked.num_caught_up.get(chosen, 0)
        self._ledger.note_trial(asked.longest * round_s + num_caught_up * token_s)
        self._vain[chosen] += not (asked.longest or num_caught_up)
        for request, guess in asked.guesses.items():
            self._trials.add(request, guess)

    def _worth_catching_up(
        self, requests: Sequence[Request], choice: Choice, token_s: float
    ) -> list[int]:
        """Leave out the requests for which a draft model has to compute more than it would save.

        Args:
            requests: the ones.
            choice: what would be guessed.
            token_s: seconds that a token takes without guesses.
        """
        lengths = list(choice.lengths)
        saved_s = token_s * (1 - 1 / choice.speedup)  # a token
        for row, request in enumerate(requests):
            if lengths[row]:
                behind_s = self._asker.seconds_to_catch_up(request, 0.0)
                if behind_s > self._answers.coming(request) * saved_s:
                    lengths[row] = 0
        return lengths
