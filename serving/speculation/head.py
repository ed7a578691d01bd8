"""Guessing with a head that reads what the model made of the tokens before .

It is an EAGLE-3 head, or the model's own layer of multi-token prediction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxport.kv.table import release_tail
from onnxport.providers.base import Model, StepInputs
from onnxport.serving import numpy_sampler
from onnxport.serving.request import Request
from onnxport.serving.sampler import Sampled
from onnxport.serving.speculation.growing import Draft, GrowingDrafter
from onnxport.serving.speculation.packing import DraftRow, HeadStates
from onnxport.serving.speculation.states import Count, DecodeStates, HeadSequence, States
from onnxport.serving.step_buffer import StepBuffer

MOST_BYTES = 256 << 20  # of states that wait, over all requests
MOST_KEPT = 64  # tokens of a run whose arrays are kept for the next one


class Reads(NamedTuple):
    """What a head reads of each token."""

    features: int  # numbers of the model's state
    hidden: int  # of what the head itself makes
    final: bool = False  # the first is what the model's final norm makes


class HeadDrafter(GrowingDrafter[HeadSequence]):
    """Lets a draft head go on from the model's own states.

    States come with the model's steps and wait until the request is guessed for. What is missing
    of those before, be it a prefix that was cached, or what was dropped, the head does without:
    its cache begins behind that. RoPE tells distances alone, so a cache may begin anywhere. A
    guess is in the cache with what the head itself made of the one before, and is computed again
    with the model's state once it has come true.
    """

    def __init__(
        self,
        model: Model,
        tokens: NDArray[np.int32],
        reads: Reads,
        max_num_batched_tokens: int,
        vocab_size: int,
        num_threads: int | None = None,
    ) -> None:
        """Take over `model`; `close` closes it.

        Args:
            model: the head.
            tokens: int32 [logits], the token that each logit is of.
            reads: what goes into it beside tokens.
            max_num_batched_tokens: most tokens that it computes in a call to catch up.
            vocab_size: of the model that it drafts for.
            num_threads: most that sample at once; None: as many as there are physical cores.
        """
        super().__init__(model, max_num_batched_tokens, vocab_size, num_threads)
        self._tokens = tokens
        self._features, self._hidden, self.reads_final = reads
        # Noise is of places among the logits, which are not those of the model's tokens here.
        self.may_race = len(tokens) == vocab_size and bool((tokens == np.arange(vocab_size)).all())
        # As in `StepInputs`: the model's states, the head's own, and what it makes of a run.
        self._given, self._own, self._made = (StepBuffer(np.float32, 0) for _ in range(3))
        self._waiting = Count()
        self._decodes = DecodeStates()  # which no sequence has yet
        self._most_waiting = MOST_BYTES // (self._features * np.dtype(np.float32).itemsize)

    def note_states(self, request: Request, first: int, states: States) -> None:
        """See `guesses.StateReader.note_states`."""
        self._hand_over()
        self._note(request, first, states)

    def note_decodes(
        self, requests: tuple[Request, ...], firsts: Sequence[int], states: States
    ) -> None:
        """See `guesses.StateReader.note_decodes`; a request gets its states when they are read."""
        if self._decodes.add(requests, firsts, states):
            return
        self._hand_over()
        if any(one.siblings for one in requests):  # which fork at the end of this step
            for row, request in enumerate(requests):
                self._note(request, firsts[row], states[row : row + 1])
        else:
            self._decodes.begin(requests, firsts, states.shape[1])
            self._decodes.add(requests, firsts, states)

    def close(self) -> None:
        """See `Drafter.close`; nobody may tell any more when requests end."""
        self._decodes = DecodeStates()
        for request in list(self._sequences):
            self.forget(request)
        super().close()

    def num_behind(self, request: Request) -> int:
        """See `Drafter.num_behind`."""
        self._hand_over()
        return super().num_behind(request)

    def propose(self, requests: Sequence[Request], lengths: Sequence[int]) -> list[Sequence[int]]:
        """See `GrowingDrafter.propose`."""
        self._hand_over()
        return super().propose(requests, lengths)

    def _hand_over(self) -> None:
        """Give the sequences what was kept step by step."""
        for request, first, states in self._decodes.take():
            self._note(request, first, states)

    def _note(self, request: Request, first: int, states: States) -> None:
        sequence = self._sequences.get(request)
        if sequence is None:
            sequence = HeadSequence(first + 1, total=self._waiting)
            self._sequences[request] = sequence
        sequence.add(first, states)
        for sibling in request.siblings:
            self.forget(sibling)
            self._sequences[sibling] = sequence.fork()
        while self._waiting.tokens > self._most_waiting:
            self.forget(next(iter(self._sequences)))

    def forget(self, request: Request) -> None:
        """See `Drafter.forget`."""
        self._hand_over()
        sequence = self._sequences.pop(request, None)
        if sequence is not None:
            sequence.restart(0)
            release_tail(self._pool, sequence.table)

    def _begin(self, request: Request) -> HeadSequence | None:
        sequence, num_tokens = self._sequences.get(request), len(request.tokens)
        if sequence is None or not sequence.num_waiting or sequence.end != num_tokens - 1:
            return None
        sequence.guessed.clear()
        if num_tokens - sequence.first >= self._limits.max_model_len:
            sequence.begin_anew()
        return sequence

    def _pack(self, rows: Sequence[DraftRow]) -> StepInputs:
        num_tokens = sum(len(row.tokens) for row in rows)
        given = _zeros(self._given, (num_tokens, self._features))
        own = _zeros(self._own, (num_tokens, self._hidden))
        made = self._made.shaped((len(rows), self._hidden))
        return self._packer.pack(rows, HeadStates(given, own, made))

    def _compute(
        self, drafts: Sequence[Draft[HeadSequence]], inputs: StepInputs
    ) -> NDArray[np.float32]:
        given, own = inputs.target_hidden_states, inputs.draft_hidden_states
        made = inputs.last_hidden_states
        assert given is not None
        assert own is not None
        assert made is not None
        ends = inputs.cumulative_sequence_lengths.tolist()
        for line, draft in enumerate(drafts):
            if draft.tokens:
                own[ends[line]] = draft.sequence.made
            else:
                draft.sequence.read(given[ends[line] : ends[line + 1]])
        logits = self._model.run(inputs)
        for draft, state in zip(drafts, made, strict=True):
            draft.sequence.made = state.copy()
        return logits

    def _spread(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        spread = np.full((len(logits), self._vocab_size), -np.inf, np.float32)
        spread[:, self._tokens] = logits
        return spread

    def _likeliest(self, logits: NDArray[np.float32]) -> Sampled:
        found = numpy_sampler.sample_greedy(logits)
        tokens = [int(self._tokens[place]) for place in found.token_ids]
        return Sampled(tokens, None, found.invalid)


def _zeros(buffer: StepBuffer[np.float32], shape: tuple[int, int]) -> NDArray[np.float32]:
    """Zeros of a shape, of a buffer's memory unless they are many."""
    if shape[0] > MOST_KEPT:
        return np.zeros(shape, np.float32)
    zeros = buffer.shaped(shape)
    zeros.fill(0.0)
    return zeros
