"""Drafts that grow in a model's cache, a token a run: what draft models and heads share."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxport.kv.pool import BlockPool
from onnxport.kv.table import BlockTable, blocks_for, release_tail
from onnxport.providers.base import Model, StepInputs
from onnxport.serving import numpy_sampler
from onnxport.serving.request import Request
from onnxport.serving.row_params import RowParams
from onnxport.serving.sampler import Sampled, sample, uniform
from onnxport.serving.sampling import Position, row_params
from onnxport.serving.speculation.packing import DraftPacker, DraftRow, advance, room

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CachedSequence:
    """What the cache holds of a request.

    These are `num_computed` of its tokens, the first of them its token number `first`, and after
    them `guessed`, which may or may not have become its own since.
    """

    first: int = 0
    num_computed: int = 0
    guessed: list[int] = field(default_factory=list)
    table: BlockTable = field(default_factory=BlockTable)

    def num_pending(self, num_tokens: int) -> int:
        """Tokens to compute of a request that has so many."""
        return num_tokens - self.first - self.num_computed - len(self.guessed)

    def note_computed(self, num_tokens: int) -> None:
        """So many more are in the cache."""
        self.num_computed += num_tokens


Cached = TypeVar("Cached", bound=CachedSequence)


@dataclass(slots=True)
class Draft(Generic[Cached]):
    """A draft that grows, one token a round."""

    number: int  # of the request in the call
    request: Request
    sequence: Cached
    length: int
    may_race: bool  # whether the model may be told by what the request draws
    tokens: list[int] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be guessed."""
        return self.sequence.num_pending(len(self.request.tokens) + len(self.tokens))

    def pending(self, most: int) -> DraftRow:
        """Return these tokens, the first `most` of them."""
        request, first = self.request, self.sequence.first
        exact, race = request.exact_logits, self.race
        if request.per_unit and not self.may_race:
            exact = 0
        if self.tokens:
            past = len(request.tokens) + len(self.tokens) - 1 - first
            return DraftRow(self.tokens[-1:], past, self.sequence.table.blocks, exact, race)
        past = self.sequence.num_computed
        new = request.tokens[first + past : first + past + most]
        return DraftRow(new, past, self.sequence.table.blocks, exact, race)

    @property
    def race(self) -> tuple[float, float]:
        """By what the next token is drawn: a row of `StepInputs.races`."""
        request = self.request
        if not request.per_unit or not self.may_race:
            return 0.0, 0.0
        number = uniform(request.seed, len(request.tokens) + len(self.tokens))
        return number, request.per_unit

    def note_computed(self, num_tokens: int) -> None:
        """Their K/V are in the cache."""
        if self.tokens:
            self.sequence.guessed.append(self.tokens[-1])
        else:
            self.sequence.note_computed(num_tokens)


class GrowingDrafter(ABC, Generic[Cached]):
    """Lets a model go on with the requests' tokens, all of them together, a token a run.

    It samples as the requests do, with the same random numbers, so it guesses right as often as
    it agrees with the model that checks. It has a pool of blocks of its own, and gives the blocks
    of the request that was not asked about for the longest time to another one when it runs out.
    """

    may_race = True  # the model's logits are of the tokens that requests draw, in their order

    def __init__(
        self,
        model: Model,
        max_num_batched_tokens: int,
        vocab_size: int,
        num_threads: int | None = None,
    ) -> None:
        """Take over `model`; `close` closes it.

        Args:
            model: the draft model, or a head.
            max_num_batched_tokens: most tokens that it computes in a call to catch up.
            vocab_size: of the model that it drafts for; tokens that only one has are not guessed.
            num_threads: most that sample at once; None: as many as there are physical cores.
        """
        limits = model.capabilities
        self._model = model
        self._pool = BlockPool(limits.num_blocks, limits.block_size)
        self._packer = DraftPacker(limits.block_size)
        self._limits = limits
        self._budget = max_num_batched_tokens
        self._most_tokens = min(self._budget, limits.max_batch_tokens or self._budget)
        self._most_rows = min(limits.max_batch_rows or self._most_tokens, self._most_tokens)
        self._vocab_size = vocab_size
        self._num_threads = num_threads
        self._sequences: OrderedDict[Request, Cached] = OrderedDict()  # latest use last
        self._closed = False

    @abstractmethod
    def _begin(self, request: Request) -> Cached | None:
        """Return what the cache holds of a request; None: it cannot be guessed for.

        Wrong guesses are left out, and there is a token left to compute.
        """

    def _pack(self, rows: Sequence[DraftRow]) -> StepInputs:
        """The arrays of a run, which the next call overwrites."""
        return self._packer.pack(rows)

    def _compute(self, drafts: Sequence[Draft[Cached]], inputs: StepInputs) -> NDArray[np.float32]:
        """Run a step, a row a draft; returns float32 [len(drafts), logits]."""
        return self._model.run(inputs)

    @abstractmethod
    def _spread(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """Logits of the tokens that requests draw from, float32 [rows, vocab_size]."""

    def _likeliest(self, logits: NDArray[np.float32]) -> Sampled:
        """The likeliest token of each row."""
        return numpy_sampler.sample_greedy(self._spread(logits))  # the fastest for few rows

    @property
    def is_cheap(self) -> bool:
        """It is not: each token is a run."""
        return False

    def num_behind(self, request: Request) -> int:
        """See `Drafter.num_behind`; where guesses came true, up to that many more."""
        sequence = self._sequences.get(request)
        if sequence is None:
            return len(request.tokens)
        return max(1, sequence.num_pending(len(request.tokens)))

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Sequence[int]]:
        """See `Drafter.propose`.

        Who is so far behind that `max_num_batched_tokens` do not suffice gets no guesses, and is
        nearer the next time.
        """
        proposals: list[Sequence[int]] = [()] * len(requests)
        begun = self._drafts(requests, lengths)
        begun.sort(key=lambda draft: draft.num_pending)
        growing: list[Draft[Cached]] = []
        for group in self._groups(begun, self._budget):
            growing += self._run(group)
        for draft in growing:
            proposals[draft.number] = draft.tokens  # which still grow
        growing = [draft for draft in growing if _goes_on(draft)]
        for first in range(0, len(growing), self._most_rows):
            self._go_on(growing[first : first + self._most_rows])
        return proposals

    def forget(self, request: Request) -> None:
        """See `Drafter.forget`."""
        sequence = self._sequences.pop(request, None)
        if sequence is not None:
            release_tail(self._pool, sequence.table)

    def close(self) -> None:
        """See `Drafter.close`."""
        if not self._closed:
            self._closed = True
            self._model.close()

    def check(self) -> None:
        """Assert that each block is free or one sequence's (for tests)."""
        self._pool.check(one.table.blocks for one in self._sequences.values())

    def _drafts(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Draft[Cached]]:
        """Begin the drafts of requests that there is room for."""
        asked = set(requests)
        drafts = []
        for number, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            sequence = self._begin(request) if length > 0 else None
            if sequence is None:
                continue
            num_tokens = len(request.tokens) - sequence.first
            most = min(length, self._limits.max_model_len - num_tokens + 1)
            if most < 1:
                self.forget(request)
                continue
            self._sequences.move_to_end(request)
            if self._reserve(sequence.table, num_tokens + most - 1, asked):
                drafts.append(Draft(number, request, sequence, most, self.may_race))
        return drafts

    def _reserve(self, table: BlockTable, num_tokens: int, asked: set[Request]) -> bool:
        """Give a table blocks for so many tokens; False if others that are asked have them."""
        missing = blocks_for(num_tokens, self._limits.block_size) - len(table)
        for other in list(self._sequences):
            if missing <= self._pool.num_free:
                break
            if other not in asked and len(self._sequences[other].table):
                self.forget(other)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            table.blocks.extend(self._pool.allocate(missing, []))
        return True

    def _groups(
        self, drafts: Sequence[Draft[Cached]], budget: int
    ) -> Iterator[list[tuple[Draft[Cached], DraftRow]]]:
        """Split what drafts have to compute into runs, up to `budget` tokens in all."""
        group: list[tuple[Draft[Cached], DraftRow]] = []
        room = self._most_tokens
        for draft in drafts:
            if group and (len(group) == self._most_rows or room < min(draft.num_pending, budget)):
                yield group
                group, room = [], self._most_tokens
            taken = min(draft.num_pending, room, budget)
            if taken < 1:
                break
            group.append((draft, draft.pending(taken)))
            room -= taken
            budget -= taken
        if group:
            yield group

    def _run(self, group: Sequence[tuple[Draft[Cached], DraftRow]]) -> list[Draft[Cached]]:
        """Compute what is missing; return the drafts that have got their first token."""
        rows = [row for _, row in group]
        some = [draft for draft, _ in group]
        logits = self._compute(some, self._pack(rows))
        for draft, row in group:
            draft.note_computed(len(row.tokens))
        ready = [line for line, draft in enumerate(some) if not draft.num_pending]
        if not ready:
            return []
        if len(ready) < len(rows):
            logits = logits[ready]
        return self._draw([some[line] for line in ready], logits)

    def _go_on(self, drafts: list[Draft[Cached]]) -> None:
        """Let drafts grow to their ends, all of them by a token a run.

        Small models make thousands of runs a second: as long as the same drafts grow within their
        blocks, their arrays are packed once.
        """
        inputs: StepInputs | None = None
        left = 0  # times that the arrays can be moved on
        while drafts:
            if inputs is None or not left:
                rows = [draft.pending(1) for draft in drafts]
                inputs = self._pack(rows)
                left = room(rows, self._limits.block_size)
            else:
                tokens = [draft.tokens[-1] for draft in drafts]
                advance(inputs, tokens, [draft.race for draft in drafts])
                left -= 1
            logits = self._compute(drafts, inputs)
            for draft in drafts:
                draft.note_computed(1)
            growing = [draft for draft in self._draw(drafts, logits) if _goes_on(draft)]
            if len(growing) < len(drafts):
                drafts, inputs = growing, None

    def _draw(
        self, drafts: Sequence[Draft[Cached]], logits: NDArray[np.float32]
    ) -> list[Draft[Cached]]:
        """Draw the next token of each draft as the request would; return those that have got one.

        Args:
            drafts: the ones.
            logits: float32 [len(drafts), logits of the model].
        """
        if all(draft.request.plain for draft in drafts):
            drawn = self._likeliest(logits)
        else:
            params = [_row_params(draft) for draft in drafts]
            drawn = sample(self._spread(logits), params, self._num_threads)
        grown = []
        for line, draft in enumerate(drafts):
            if line not in drawn.invalid:
                draft.tokens.append(drawn.token_ids[line])
                grown.append(draft)
        return grown


def _goes_on(draft: Draft[Cached]) -> bool:
    """Whether a draft gets more tokens."""
    if len(draft.tokens) >= draft.length:
        return False
    return draft.tokens[-1] not in draft.request.stop_token_ids


def _row_params(draft: Draft[Cached]) -> RowParams:
    """Return how the request draws the token after the draft."""
    request, mask = draft.request, None
    if request.grammar is not None:
        try:
            mask = request.grammar.masks(request.tokens, draft.tokens)[-1].copy()
        except Exception as error:  # the engine finds out too, and ends the request
            logger.debug("guessing without the grammar of %s: %s", request, error)
    params = row_params(Position(request, tuple(draft.tokens), mask))
    return params._replace(num_logprobs=None)
