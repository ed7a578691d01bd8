"""What the engine asks of whoever guesses tokens ahead."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onnxport.providers.base import Capabilities
from onnxport.serving.request import Request
from onnxport.serving.sampling import Drawn
from onnxport.serving.stats import SpeculationCounters
from onnxport.serving.step_plan import StepPlan

logger = logging.getLogger(__name__)

Drafts = Mapping[Request, Sequence[int]]
NO_DRAFTS: Drafts = MappingProxyType({})
# Tokens that a request may owe (`Request.num_owed_tokens`) and get guesses all the same: each time
# that these are wrong it owes more.
MOST_OWED = 16


class StateReader(Protocol):
    """Reads what the model makes of each token.

    Attributes:
        reads_final: whether that is what the final norm makes, and not what some layers read.
    """

    reads_final: bool

    def note_states(self, request: Request, first: int, states: NDArray[np.float32]) -> None:
        """The model has computed tokens of a request, that are its own by now.

        Args:
            request: the one.
            first: the number of the first of these tokens, from 0; those before it may have been
                told of, or not.
            states: float32 [num_tokens, features], which the next step may overwrite.
        """
        ...

    def note_decodes(
        self, requests: tuple[Request, ...], firsts: Sequence[int], states: NDArray[np.float32]
    ) -> None:
        """The model has computed a token of each of some requests, no guess among them.

        Steps that follow one another have the same tuple of requests, and small models make
        thousands of them a second.

        Args:
            requests: the ones.
            firsts: the numbers of these tokens, as above.
            states: float32 [len(requests), features], which the next step may overwrite.
        """
        ...


class Guesses(Protocol):
    """Guesses what the model is going to say; the model checks it, so a guess changes no output.

    Belongs to the engine's thread. Nothing here may raise because of a device.
    """

    @property
    def counters(self) -> SpeculationCounters:
        """What was guessed so far, and how much of it was right."""
        ...

    @property
    def reader(self) -> StateReader | None:
        """Who has to be told of the states of the step in hand; None: nobody.

        What it is from one `rests` to the next, unless `propose` was called in between.
        """
        ...

    def rests(self) -> bool:
        """Whether the next step goes without guesses, whoever is in it; asked once before each.

        Small models make thousands of steps a second, so this has to take next to no time.
        """
        ...

    def propose(self, requests: Sequence[Request], budget: int) -> Drafts:
        """Return tokens that may follow those of some requests; none where it does not pay.

        Args:
            requests: those that decode in the next step.
            budget: most tokens that can be checked in it, over all of them.

        Returns:
            Tokens that are `possible`, at least one for each request that is named.
        """
        ...

    def note_planned(self, num_drafted: int) -> None:
        """So many of the tokens that were proposed last are checked in this step, maybe none."""
        ...

    def note_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        """So many guessed tokens were checked, and the first `num_accepted` of them were right."""
        ...

    def note_step(self, num_rows: int, num_tokens: int, elapsed_s: float) -> None:
        """A step without prompts took so long, the guessing left out.

        Its tokens are one a row, guesses, and those that rows owed. `propose` came before it, or
        some were owed.
        """
        ...

    def forget(self, request: Request) -> None:
        """The request has ended."""
        ...

    def close(self) -> None:
        """Free what it holds. Idempotent."""
        ...


class Guessing:
    """What the engine does about guesses, if there is somebody to guess."""

    def __init__(self, guesses: Guesses | None) -> None:
        """Take over `guesses`; `close` closes it. None: there are never any."""
        self._guesses = guesses
        self._asked = self._found = False  # for the step in hand, and whether that found any

    @property
    def counters(self) -> SpeculationCounters | None:
        """What was guessed so far; None: nobody guesses."""
        return self._guesses.counters if self._guesses else None

    @property
    def reads_states(self) -> bool:
        """Whether the model's states have to be told of in the step in hand."""
        return self._guesses is not None and self._guesses.reader is not None

    @property
    def reads_final(self) -> bool:
        """Whether these are what the final norm makes (`StateReader.reads_final`)."""
        reader = self._guesses.reader if self._guesses else None
        return reader is not None and reader.reads_final

    def note_model(self, limits: Capabilities) -> None:
        """A model checks guesses from now on: log what they may change all the same."""
        if self._guesses is not None and limits.rounds_anew:
            logger.warning(
                "%s rounds keys in its %s cache anew when tokens join their block, so that wrong "
                "guesses change them a little, and a near tie may fall differently; caches in "
                "floating point (--kv-cache-dtype) have no such trace",
                limits.provider,
                limits.kv_cache_dtype,
            )

    def rests(self) -> bool:
        """Whether the next step goes without guesses; asked once before each."""
        self._asked = self._found = False
        return self._guesses is None or self._guesses.rests()

    def next(self, decoding: Iterable[Request], budget: int) -> Drafts:
        """Return tokens that may follow those of requests that decode in the step in hand.

        Args:
            decoding: the ones.
            budget: most tokens in all.
        """
        assert self._guesses is not None
        decoding = [
            request
            for request in decoding
            if request.num_output_tokens
            and request.beams is None
            and request.feedback is None  # what it draws from depends on what it drew
            and request.max_total_tokens - len(request.tokens) > 1
            and request.num_owed_tokens < MOST_OWED
        ]
        if not decoding or budget < 1:
            return NO_DRAFTS
        found = self._guesses.propose(decoding, budget)
        assert sum(map(len, found.values())) <= budget
        self._asked, self._found = True, bool(found)
        return found

    def note_planned(self, plan: StepPlan) -> None:
        """The step in hand is planned: tell who guessed for it what is checked of that."""
        if self._found:
            assert self._guesses is not None
            self._guesses.note_planned(plan.num_drafted)

    def accept(self, plan: StepPlan, drawn: Iterable[Drawn]) -> dict[int, Sequence[int]]:
        """Return by row the tokens of its draft that were right, and tell who guessed them.

        Args:
            plan: of the step that checked the drafts.
            drawn: what its sequences got.
        """
        if not plan.drafts:
            return {}
        assert self._guesses is not None
        tokens = {one.request: one.token_ids for one in drawn}
        accepted: dict[int, Sequence[int]] = {}
        for row, draft in plan.drafts.items():
            request = plan.requests[row]
            right = num_equal(tokens[request], draft)
            accepted[row] = draft[:right]
            checked, were_right = request.drafts or (0, 0)
            request.drafts = checked + len(draft), were_right + right
            self._guesses.note_verified(request, len(draft), right)
        return accepted

    def note_states(
        self, plan: StepPlan, states: NDArray[np.float32], accepted: Mapping[int, Sequence[int]]
    ) -> None:
        """Tell who reads them of the model's states, but for those of wrong guesses.

        Args:
            plan: of a step that is not committed yet.
            states: float32 [plan.num_tokens, features].
            accepted: what `accept` returned.
        """
        reader = self._guesses.reader if self._guesses else None
        if reader is None:
            return
        has_others = not all(map(_may_guess, plan.requests))
        if plan.num_decodes == len(plan.requests) == plan.num_tokens and not has_others:
            reader.note_decodes(plan.requests, plan.num_past, states)
            return
        start = 0
        for row, request in enumerate(plan.requests):
            new = plan.num_new[row]
            wrong = len(plan.drafts.get(row, ())) - len(accepted.get(row, ()))
            if _may_guess(request):
                reader.note_states(request, plan.num_past[row], states[start : start + new - wrong])
            start += new

    def note_step(self, plan: StepPlan, elapsed_s: float) -> None:
        """A step is done; only those of decodes alone can be compared.

        What rows owe is a cost of guesses, though nobody may have been asked for more of them.
        """
        if self._guesses is None or plan.num_decodes != len(plan.requests):
            return
        owes = plan.num_tokens > plan.num_decodes + plan.num_drafted
        if self._asked or owes:
            self._guesses.note_step(plan.num_decodes, plan.num_tokens, elapsed_s)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        if self._guesses is not None:
            self._guesses.forget(request)

    def close(self) -> None:
        """Free what guesses. Idempotent."""
        if self._guesses is not None:
            self._guesses.close()


def _may_guess(request: Request) -> bool:
    """Whether anybody guesses for a request: not for beams, nor where nothing is generated."""
    return request.beams is None and request.pooler is None


def possible(request: Request, tokens: Sequence[int]) -> Sequence[int]:
    """Return the first tokens of a guess that may follow: they fit its length and its grammar."""
    tokens = tokens[: request.max_total_tokens - len(request.tokens) - 1]
    if request.grammar is not None and tokens:
        tokens = tokens[: request.grammar.num_possible(request.tokens, tokens)]
    return tokens


def num_equal(tokens: Sequence[int], draft: Sequence[int]) -> int:
    """Return how many of the first tokens are those of the draft."""
    count = 0
    for token_id, guessed in zip(tokens, draft, strict=False):
        if token_id != guessed:
            break
        count += 1
    return count
