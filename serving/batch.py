"""Packing: a step plan becomes the arrays that a model takes."""

from __future__ import annotations

import operator
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from onnxport.providers.base import StepInputs
from onnxport.serving.draft import StepPlan


class BatchPacker:
    """Packs plans into `StepInputs`, in buffers that the next `pack` overwrites.

    That is safe because `Model.run` returns before the next step is packed and keeps no input.
    Tokens and blocks are copied through memoryviews, from the requests' own int64 and int32
    arrays: a row costs the same however long its prompt and its table are.
    """

    def __init__(
        self, max_num_seqs: int, max_num_batched_tokens: int, *, takes_exact_logits: bool = False
    ) -> None:
        """Make the buffers.

        Args:
            max_num_seqs: rows that there is room for; more make it grow.
            max_num_batched_tokens: most tokens of a step.
            takes_exact_logits: whether the model gains by being told how many logits are needed.
        """
        self._takes_exact_logits = takes_exact_logits
        self._input_ids: NDArray[np.int64] = np.zeros(max_num_batched_tokens, np.int64)
        self._input_ids_view = self._input_ids.data.cast("B").cast("q")
        self._cumulative: NDArray[np.int32] = np.zeros(max_num_seqs + 1, np.int32)
        self._grow_block_table(max_num_seqs)

    def pack(self, plan: StepPlan) -> StepInputs:
        """Return the arrays of `plan`, whose requests already hold their new blocks.

        Logits are asked for where the plan needs them. When it does nowhere, they are asked for
        once, at the end, and not used: no graph has to take an empty axis.
        """
        # Python's own sums: after a step that has read all weights, NumPy's code is in no cache.
        rows = len(plan.requests)
        cumulative = self._cumulative[: rows + 1]
        cumulative[1:] = list(accumulate(plan.num_new))
        past = np.array(plan.num_past, np.int32)
        total = list(map(operator.add, plan.num_past, plan.num_new))
        metadata = np.array([max(plan.num_new), max(total), min(total)], np.int32)
        return StepInputs(
            input_ids=self._pack_input_ids(plan),
            block_table=self._pack_block_table(plan),
            cumulative_sequence_lengths=cumulative,
            past_sequence_lengths=past,
            attention_metadata=metadata,
            logits_indices=_logits_indices(plan, cumulative[1:]),
            adapter_slots=_adapter_slots(plan),
            exact_logits=_exact_logits(plan) if self._takes_exact_logits else None,
        )

    def _pack_input_ids(self, plan: StepPlan) -> NDArray[np.int64]:
        view = self._input_ids_view
        end = 0
        for row, request in enumerate(plan.requests):
            start, past, new = end, plan.num_past[row], plan.num_new[row]
            end += new
            if row in plan.drafts:
                guessed = plan.drafts[row]
                own = new - len(guessed)
                view[start : start + own] = request.tokens[past : past + own]
                self._input_ids[start + own : end] = guessed
            else:
                view[start:end] = request.tokens[past : past + new]
        return self._input_ids[:end]

    def _pack_block_table(self, plan: StepPlan) -> NDArray[np.int32]:
        tables = [request.table.blocks for request in plan.requests]
        width = max(map(len, tables))
        size = len(tables) * width
        if size > self._block_table.size:
            self._grow_block_table(2 * size)
        packed = self._block_table[:size]
        packed.fill(0)
        view = self._block_table_view
        start = 0
        for blocks in tables:
            view[start : start + len(blocks)] = blocks
            start += width
        return packed.reshape(-1, width)

    def _grow_block_table(self, size: int) -> None:
        self._block_table: NDArray[np.int32] = np.zeros(size, np.int32)
        self._block_table_view = self._block_table.data.cast("B").cast("i")


def _adapter_slots(plan: StepPlan) -> NDArray[np.int32] | None:
    """Return the adapter slot of each row, int32 [batch]; None where no row has one."""
    if not any(request.adapter_slot for request in plan.requests):
        return None
    return np.array([request.adapter_slot for request in plan.requests], np.int32)


def _logits_indices(plan: StepPlan, ends: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the tokens after which logits are needed, int32 [num_logits]; never none.

    Args:
        plan: of the step.
        ends: int32 [num_rows], where each row ends among the tokens.
    """
    if len(plan.sampled) == len(ends) == sum(plan.num_logits):
        return ends - 1
    counts = np.array(plan.num_logits, np.int32)
    if not counts.any():
        return ends[-1:] - 1
    stops = counts.cumsum(dtype=np.int32)
    shifts = np.repeat(ends - stops, counts)
    indices: NDArray[np.int32] = np.arange(stops[-1], dtype=np.int32) + shifts
    return indices


def _exact_logits(plan: StepPlan) -> NDArray[np.int32] | None:
    """Return how many of a row's largest logits must be exact, int32 [num_logits]; see `Model.run`.

    None where all rows need all of them, or nobody samples.
    """
    wanted = [0 if one.scores_missing else one.exact_logits for one in plan.requests]
    if not any(wanted) or not plan.sampled:
        return None
    counts = plan.num_logits
    if max(counts) == min(counts) == 1:
        return np.array(wanted, np.int32)
    return np.array(wanted, np.int32).repeat(counts)
