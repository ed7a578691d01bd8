"""One sequence on a loaded model, without the engine."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CapacityError
from onnxport.kv.groups import CacheGroups
from onnxport.kv.states import NO_TOKENS, StatePool
from onnxport.kv.table import blocks_for
from onnxport.providers.base import Model, StepInputs


class LoneSequence:
    """A sequence that grows by what each step computes.

    Its blocks are taken from the end of the pool, or, with `reverse`, from its start, so that their
    order and their offset matter; those of groups of layers take turns. It keeps them all, but
    where no later query sees one, steps are told block 0 instead, so that it matters if that is
    read. A model with states writes one after another of two slots.

    Attributes:
        tables: the blocks of each group.
        num_computed: tokens so far.
    """

    def __init__(self, model: Model, num_tokens: int, *, reverse: bool = False) -> None:
        """Take blocks for `num_tokens`. Raises CapacityError when the pool has not as many."""
        limits = model.capabilities
        self._groups = CacheGroups(limits.windows, limits.block_size)
        count = len(self._groups)
        needed = blocks_for(num_tokens, limits.block_size) * count
        if needed > limits.num_blocks or num_tokens > limits.max_model_len:
            several = f" for {count} groups of layers" if count > 1 else ""
            raise CapacityError(
                f"{num_tokens} tokens are to be checked; the KV cache has {limits.num_blocks} "
                f"blocks of {limits.block_size}{several}, "
                f"and a sequence may have {limits.max_model_len} tokens. Raise kv_cache_tokens or "
                "max_model_len"
            )
        self._model = model
        self._states = StatePool(limits.state_slots) if limits.state_slots else None
        self._state = NO_TOKENS
        last = limits.num_blocks - 1
        blocks = range(needed) if reverse else range(last, last - needed, -1)
        self.tables = [list(blocks[group::count]) for group in range(count)]
        self.num_computed = 0

    def step(self, token_ids: Iterable[int], rows: list[int]) -> NDArray[np.float32]:
        """Compute the next tokens; returns the logits of some, [len(rows), vocab].

        Args:
            token_ids: of the next tokens.
            rows: indices into `token_ids`.
        """
        new = np.fromiter(token_ids, np.int64)
        past, total = self.num_computed, self.num_computed + len(new)
        first, *others = [self._table(group, past, total) for group in range(len(self.tables))]
        states = None if self._states is None else self._states.reserve([self._state])
        inputs = StepInputs(
            input_ids=new,
            block_table=first,
            cumulative_sequence_lengths=np.array([0, len(new)], np.int32),
            past_sequence_lengths=np.array([past], np.int32),
            attention_metadata=np.array([len(new), total, total], np.int32),
            logits_indices=np.array(rows, np.int32),
            more_block_tables=tuple(others),
            state_reads=None if states is None else np.array(states.reads, np.int32),
            state_writes=None if states is None else np.array(states.writes, np.int32),
        )
        logits = self._model.run(inputs)
        self.num_computed = total
        if self._states is not None and states is not None:
            self._states.commit(states)
            self._states.release(self._state)
            self._state = states.writes[0]
        return logits

    def _table(self, group: int, past: int, total: int) -> NDArray[np.int32]:
        """The block table of a group, [1, columns], in a step from `past` tokens to `total`."""
        table = np.array(
            [self.tables[group][: blocks_for(total, self._groups.block_size)]], np.int32
        )
        table[0, : self._groups.first_seen(group, past)] = 0
        return table


def last_logits(model: Model, token_ids: list[int]) -> NDArray[np.float32]:
    """Return the logits after `token_ids`, computed in one step; float32 [vocab]."""
    logits = LoneSequence(model, len(token_ids)).step(token_ids, [len(token_ids) - 1])
    last: NDArray[np.float32] = logits[0].copy()
    return last
