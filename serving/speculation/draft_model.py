"""Guessing with a smaller model, on any provider."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from onnxport.kv.pool import BlockPool
from onnxport.kv.table import BlockTable, blocks_for, release_tail
from onnxport.providers.base import Model, StepInputs
from onnxport.serving import numpy_sampler
from onnxport.serving.drawing import RowParams
from onnxport.serving.request import Request
from onnxport.serving.sampler import sample, uniform
from onnxport.serving.sampling import Position, row_params
from onnxport.serving.speculation.packing import DraftRow, advance, pack, room

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Sequence:
    """What the draft model's cache holds of a request.

    These are its first `num_computed` tokens, and after them `guessed`, which may or may not have
    become its own since.
    """

    table: BlockTable = field(default_factory=BlockTable)
    num_computed: int = 0
    guessed: list[int] = field(default_factory=list)

    def follow(self, tokens: Sequence[int]) -> None:
        """Keep of the guesses those that came true, but leave the last token to be computed."""
        for guess in self.guessed:
            if self.num_computed >= len(tokens) or tokens[self.num_computed] != guess:
                break
            self.num_computed += 1
        self.guessed.clear()
        self.num_computed = min(self.num_computed, len(tokens) - 1)


@dataclass(slots=True)
class _Draft:
    """A draft that grows, one token a round."""

    number: int  # of the request in the call
    request: Request
    sequence: _Sequence
    length: int
    tokens: list[int] = field(default_factory=list)

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be guessed."""
        computed = self.sequence.num_computed + len(self.sequence.guessed)
        return len(self.request.tokens) + len(self.tokens) - computed

    def pending(self, most: int) -> DraftRow:
        """Return these tokens, the first `most` of them."""
        exact, race = self.request.exact_logits, self.race
        if self.tokens:
            past = len(self.request.tokens) + len(self.tokens) - 1
            return DraftRow(self.tokens[-1:], past, self.sequence.table.blocks, exact, race)
        past = self.sequence.num_computed
        new = self.request.tokens[past : past + most]
        return DraftRow(new, past, self.sequence.table.blocks, exact, race)

    @property
    def race(self) -> tuple[float, float]:
        """By what the next token is drawn: a row of `StepInputs.races`."""
        request = self.request
        if not request.per_unit:
            return 0.0, 0.0
        number = uniform(request.seed, len(request.tokens) + len(self.tokens))
        return number, request.per_unit

    def note_computed(self, num_tokens: int) -> None:
        """Their K/V are in the cache."""
        if self.tokens:
            self.sequence.guessed.append(self.tokens[-1])
        else:
            self.sequence.num_computed += num_tokens


class ModelDrafter:
    """Lets a model go on with the requests' tokens, all of them together, a token a run.

    It samples as the requests do, with the same random numbers, so it guesses right as often as
    the two models agree. It has a pool of blocks of its own, and gives the blocks of the request
    that was not asked about for the longest time to another one when it runs out.
    """

    def __init__(
        self,
        model: Model,
        max_num_batched_tokens: int,
        vocab_size: int,
        num_threads: int | None = None,
    ) -> None:
        """Take over `model`; `close` closes it.

        Args:
            model: the draft model.
            max_num_batched_tokens: most tokens that it computes in a call to catch up.
            vocab_size: of the model that it drafts for; tokens that only one has are not guessed.
            num_threads: most that sample at once; None: as many as there are physical cores.
        """
        limits = model.capabilities
        self._model = model
        self._pool = BlockPool(limits.num_blocks, limits.block_size)
        self._limits = limits
        self._budget = max_num_batched_tokens
        self._most_tokens = min(self._budget, limits.max_batch_tokens or self._budget)
        self._most_rows = min(limits.max_batch_rows or self._most_tokens, self._most_tokens)
        self._vocab_size = vocab_size
        self._num_threads = num_threads
        self._sequences: OrderedDict[Request, _Sequence] = OrderedDict()  # latest use last
        self._closed = False

    @property
    def is_cheap(self) -> bool:
        """It is not: each token is a run."""
        return False

    def num_behind(self, request: Request) -> int:
        """See `Drafter.num_behind`; where guesses came true, up to that many more."""
        sequence = self._sequences.get(request)
        if sequence is None:
            return len(request.tokens)
        computed = sequence.num_computed + len(sequence.guessed)
        return max(1, len(request.tokens) - computed)

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Sequence[int]]:
        """See `Drafter.propose`.

        Who is so far behind that `max_num_batched_tokens` do not suffice gets no guesses, and is
        nearer the next time.
        """
        proposals: list[Sequence[int]] = [()] * len(requests)
        begun = self._drafts(requests, lengths)
        begun.sort(key=lambda draft: draft.num_pending)
        growing: list[_Draft] = []
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

    def _drafts(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[_Draft]:
        """Begin the drafts of requests that there is room for."""
        asked = set(requests)
        drafts = []
        for number, (request, length) in enumerate(zip(requests, lengths, strict=True)):
            num_tokens = len(request.tokens)
            most = min(length, self._limits.max_model_len - num_tokens + 1)
            if length < 1:
                continue
            if most < 1:
                self.forget(request)
                continue
            sequence = self._sequences.setdefault(request, _Sequence())
            self._sequences.move_to_end(request)
            sequence.follow(request.tokens)
            unknown = any(
                token_id >= self._limits.vocab_size
                for token_id in request.tokens[sequence.num_computed :]
            )
            if not unknown and self._reserve(sequence.table, num_tokens + most - 1, asked):
                drafts.append(_Draft(number, request, sequence, most))
        return drafts

    def _reserve(self, table: BlockTable, num_tokens: int, asked: set[Request]) -> bool:
        """Give a table blocks for so many tokens; False if others that are asked have them."""
        missing = blocks_for(num_tokens, self._limits.block_size) - len(table)
        for other in list(self._sequences):
            if missing <= self._pool.num_free:
                break
            if other not in asked:
                self.forget(other)
        if missing > self._pool.num_free:
            return False
        if missing > 0:
            table.blocks.extend(self._pool.allocate(missing, []))
        return True

    def _groups(
        self, drafts: Sequence[_Draft], budget: int
    ) -> Iterator[list[tuple[_Draft, DraftRow]]]:
        """Split what drafts have to compute into runs, up to `budget` tokens in all."""
        group: list[tuple[_Draft, DraftRow]] = []
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

    def _run(self, group: Sequence[tuple[_Draft, DraftRow]]) -> list[_Draft]:
        """Compute what is missing; return the drafts that have got their first token."""
        rows = [row for _, row in group]
        logits = self._model.run(pack(rows, self._limits.block_size))
        for draft, row in group:
            draft.note_computed(len(row.tokens))
        ready = [line for line, (draft, _) in enumerate(group) if not draft.num_pending]
        if not ready:
            return []
        if len(ready) < len(rows):
            logits = logits[ready]
        return self._draw([group[line][0] for line in ready], logits)

    def _go_on(self, drafts: list[_Draft]) -> None:
        """Let drafts grow to their ends, all of them by a token a run.

        Small models make thousands of runs a second: as long as the same drafts grow within their
        blocks, their arrays are packed once.
        """
        inputs: StepInputs | None = None
        left = 0  # times that the arrays can be moved on
        while drafts:
            if inputs is None or not left:
                rows = [draft.pending(1) for draft in drafts]
                inputs = pack(rows, self._limits.block_size)
                left = room(rows, self._limits.block_size)
            else:
                tokens = [draft.tokens[-1] for draft in drafts]
                advance(inputs, tokens, [draft.race for draft in drafts])
                left -= 1
            logits = self._model.run(inputs)
            for draft in drafts:
                draft.note_computed(1)
            growing = [draft for draft in self._draw(drafts, logits) if _goes_on(draft)]
            if len(growing) < len(drafts):
                drafts, inputs = growing, None

    def _draw(self, drafts: Sequence[_Draft], logits: NDArray[np.float32]) -> list[_Draft]:
        """Draw the next token of each draft as the request would; return those that have got one.

        Args:
            drafts: the ones.
            logits: float32 [len(drafts), vocabulary of the draft model].
        """
        logits = _widened(logits, self._vocab_size)
        if all(draft.request.plain for draft in drafts):
            drawn = numpy_sampler.sample_greedy(logits)  # the fastest for rows as few as these
        else:
            drawn = sample(logits, [_row_params(draft) for draft in drafts], self._num_threads)
        grown = []
        for line, draft in enumerate(drafts):
            if line not in drawn.invalid:
                draft.tokens.append(drawn.token_ids[line])
                grown.append(draft)
        return grown


def _goes_on(draft: _Draft) -> bool:
    """Whether a draft gets more tokens."""
    if len(draft.tokens) >= draft.length:
        return False
    return draft.tokens[-1] not in draft.request.stop_token_ids


def _row_params(draft: _Draft) -> RowParams:
    """Return how the request draws the token after the draft."""
    request, mask = draft.request, None
    if request.grammar is not None:
        try:
            mask = request.grammar.masks(request.tokens, draft.tokens)[-1].copy()
        except Exception as error:  # the engine finds out too, and ends the request
            logger.debug("guessing without the grammar of %s: %s", request, error)
    params = row_params(Position(request, tuple(draft.tokens), mask))
    return params._replace(num_logprobs=None)


def _widened(logits: NDArray[np.float32], vocab_size: int) -> NDArray[np.float32]:
    """Return logits of exactly `vocab_size` tokens; those that are not there cannot be drawn."""
    rows, width = logits.shape
    if width == vocab_size:
        return logits
    widened = np.full((rows, vocab_size), -np.inf, np.float32)
    common = min(width, vocab_size)
    widened[:, :common] = logits[:, :common]
    return widened
