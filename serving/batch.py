"""Packing: a step plan becomes the arrays that a model takes."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.contract import NO_SUMMARY
from onnxport.kv.states import StateStep
from onnxport.providers.base import StepInputs
from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.narrowing import EVERY_TOKEN, may_narrow
from onnxport.serving.request import Request
from onnxport.serving.sampler import uniform
from onnxport.serving.step_buffer import StepBuffer, fill_tables
from onnxport.serving.step_plan import StepPlan

SlotOf = Callable[[Adapter | None], int]  # 0 for none


class BatchPacker:
    """Packs plans into `StepInputs`, in buffers that the next `pack` overwrites.

    That is safe because `Model.run` returns before the next step is packed. As long as a shape
    stays the same, so does the array, the object, that has it: a model that keeps it bound finds
    the next step's numbers in it.

    A plan that follows another, as `following` makes it, has that plan's own fields. Of those
    nothing is packed that is in the buffers already.

    After a step that has read all weights, NumPy's code is in no cache, and a call of it takes
    longer than a row takes here. So arrays are filled through memoryviews, and tokens and blocks
    from the requests' own int64 and int32 arrays: a row costs the same however long its prompt and
    its table are.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        num_groups: int = 1,
        takes_exact_logits: bool = False,
        mask_words: int = 0,
        summary_floats: int = 0,
        features: int = 0,
    ) -> None:
        """Make the buffers.

        Args:
            max_num_seqs: rows that there is room for; more make it grow.
            max_num_batched_tokens: most tokens of a step; likewise.
            num_groups: of layers, each with a block table.
            takes_exact_logits: whether the model gains by being told how many logits are needed.
            mask_words: words that say which tokens a row may get; 0: the model would not gain, or
                nobody can tell it.
            summary_floats: how much the model can tell of a row of logits; 0: nothing, or nobody
                would read it.
            features: numbers that the model tells of each token; 0: none.
        """
        self._takes_exact_logits = takes_exact_logits
        self._input_ids = StepBuffer(np.int64, max_num_batched_tokens)
        self._block_tables = [StepBuffer(np.int32, max_num_seqs) for _ in range(num_groups)]
        self._more_groups = range(1, num_groups)
        self._cumulative = StepBuffer(np.int32, max_num_seqs + 1)
        self._past = StepBuffer(np.int32, max_num_seqs)
        self._metadata = StepBuffer(np.int32, 3)
        self._logits_indices = StepBuffer(np.int32, max_num_seqs)
        self._exact_logits = StepBuffer(np.int32, max_num_seqs)
        self._exact: list[int] = []  # what was packed there
        self._mask_words = mask_words
        self._allowed_tokens = StepBuffer(np.int32, 0)
        self._races = StepBuffer(np.float64, 2 * max_num_seqs)
        self._summary_floats = summary_floats
        self._summary_scales = StepBuffer(np.float32, max_num_seqs)
        self._summaries = StepBuffer(np.float32, max_num_seqs * summary_floats)
        self._features = features
        self._hidden_states = StepBuffer(np.float32, max_num_seqs * features)
        self._state_reads = StepBuffer(np.int32, max_num_seqs)
        self._state_writes = StepBuffer(np.int32, max_num_seqs)
        self._packed: tuple[StepPlan, StepInputs] | None = None  # what is in the buffers

    def pack(
        self,
        plan: StepPlan,
        *,
        reads_states: bool = True,
        slot_of: SlotOf | None = None,
        states: StateStep | None = None,
    ) -> StepInputs:
        """Return the arrays of `plan`, whose requests already hold their new blocks.

        Logits are asked for where the plan needs them. When it does nowhere, they are asked for
        once, at the end, and not used: no graph has to take an empty axis.

        Args:
            plan: of the step.
            reads_states: whether somebody reads `StepInputs.hidden_states`, if the model tells any.
            slot_of: returns the slot of an adapter; None: no request has one.
            states: the slots that rows read and write; None: the model has none.
        """
        last, self._packed = self._packed, None
        follows = last is not None and _follows(plan, last[0])
        told = self._room_for_states(plan.num_tokens) if reads_states else None
        if last and follows:
            inputs = self._follow(plan, last[1])
            if inputs.hidden_states is not told:
                inputs = replace(inputs, hidden_states=told)
        else:
            inputs = self._pack(plan, told, slot_of)
        if states is not None:
            inputs = self._with_slots(inputs, states)
        self._packed = plan, inputs
        return inputs

    def _pack(
        self, plan: StepPlan, states: NDArray[np.float32] | None, slot_of: SlotOf | None
    ) -> StepInputs:
        ends = list(accumulate(plan.num_new))
        total = list(map(operator.add, plan.num_past, plan.num_new))
        exact, allowed = self._pack_allowed(plan)
        tables = self._pack_block_tables(plan)
        races = _races(plan) if exact is not None and plan.sampled else None
        scales = _summary_scales(plan) if self._summary_floats else None
        return StepInputs(
            input_ids=self._pack_input_ids(plan, ends[-1]),
            block_table=tables[0],
            cumulative_sequence_lengths=self._cumulative.fill([0, *ends]),
            past_sequence_lengths=self._past.fill(plan.num_past),
            attention_metadata=self._metadata.fill([max(plan.num_new), max(total), max(total)]),
            logits_indices=self._logits_indices.fill(_logits_indices(plan, ends)),
            adapter_slots=_adapter_slots(plan, slot_of),
            exact_logits=exact,
            allowed_tokens=allowed,
            races=None if races is None else self._pack_races(races),
            summary_scales=None if scales is None else self._summary_scales.fill(scales),
            summaries=None if scales is None else self._room_for_summaries(len(scales)),
            more_block_tables=tables[1:],
            hidden_states=states,
        )

    def _pack_allowed(
        self, plan: StepPlan
    ) -> tuple[NDArray[np.int32] | None, NDArray[np.int32] | None]:
        """Return EXACT_LOGITS and ALLOWED_TOKENS; `narrow` completes rows that have a grammar."""
        if not self._takes_exact_logits:
            return None, None
        if not plan.sampled:
            return self._pack_unread(plan)
        narrowed = [bool(self._mask_words) and may_narrow(one) for one in plan.requests]
        wanted = list(map(_exact, plan.requests, narrowed))
        if not any(wanted) and not any(narrowed):
            return None, None
        lines = list(zip(plan.requests, wanted, plan.num_logits, strict=True))
        self._exact = [number for _, number, count in lines for _ in range(count)]
        exact = self._exact_logits.fill(self._exact)
        if not any(narrowed):
            return exact, None
        allowed = self._allowed_tokens.shaped((len(exact), self._mask_words))
        end = 0
        for request, _, count in lines:
            start, end = end, end + count
            if request.grammar is None:
                words = request.allowed_words
                allowed[start:end] = EVERY_TOKEN if words is None else words
        return exact, allowed

    def _pack_unread(
        self, plan: StepPlan
    ) -> tuple[NDArray[np.int32] | None, NDArray[np.int32] | None]:
        """Let the model compute no more than one logit of a row that nobody reads."""
        if any(plan.num_logits) or not self._mask_words:
            return None, None
        allowed = self._allowed_tokens.shaped((1, self._mask_words))
        allowed[0] = 0
        allowed[0, 0] = 1
        return self._exact_logits.fill([1]), allowed

    def _pack_races(self, races: list[float]) -> NDArray[np.float64]:
        packed = self._races.shaped((len(races) // 2, 2))
        self._races.view[: len(races)] = array("d", races)
        return packed

    def _with_slots(self, inputs: StepInputs, states: StateStep) -> StepInputs:
        """Pack the slots of states; the arrays stay the same while the rows are as many."""
        reads = self._state_reads.fill(states.reads)
        writes = self._state_writes.fill(states.writes)
        if inputs.state_reads is reads and inputs.state_writes is writes:
            return inputs
        return replace(inputs, state_reads=reads, state_writes=writes)

    def _room_for_summaries(self, rows: int) -> NDArray[np.float32]:
        return self._summaries.shaped((rows, self._summary_floats))

    def _room_for_states(self, num_tokens: int) -> NDArray[np.float32] | None:
        if not self._features:
            return None
        return self._hidden_states.shaped((num_tokens, self._features))

    def _follow(self, plan: StepPlan, inputs: StepInputs) -> StepInputs:
        """Pack what has changed since the last plan, which gave `inputs`."""
        self._input_ids.fill([request.tokens[-1] for request in plan.requests])
        self._past.fill(plan.num_past)
        self._metadata.fill([1, max(plan.num_past) + 1, max(plan.num_past) + 1])
        if inputs.allowed_tokens is not None:
            self._exact_logits.fill(self._exact)
        if inputs.races is not None and (races := _races(plan)) is not None:
            self._pack_races(races)
        width = inputs.block_table.shape[1]
        for row, num_new in enumerate(plan.num_new_columns):
            if not num_new:
                continue
            table = plan.requests[row].table
            blocks = table.blocks
            if len(blocks) > width:
                first, *others = self._pack_block_tables(plan)
                return replace(inputs, block_table=first, more_block_tables=tuple(others))
            place = row * width + len(blocks) - 1
            self._block_tables[0].view[place] = blocks[-1]
            for group in self._more_groups:
                self._block_tables[group].view[place] = table.groups[group][-1]
        return inputs

    def _pack_input_ids(self, plan: StepPlan, num_tokens: int) -> NDArray[np.int64]:
        packed = self._input_ids.shaped((num_tokens,))
        view = self._input_ids.view
        end = 0
        for row, request in enumerate(plan.requests):
            start, past, new = end, plan.num_past[row], plan.num_new[row]
            end += new
            if row in plan.drafts:
                guessed = plan.drafts[row]
                own = new - len(guessed)
                view[start : start + own] = request.tokens[past : past + own]
                view[start + own : end] = array("q", guessed)
            else:
                view[start:end] = request.tokens[past : past + new]
        return packed

    def _pack_block_tables(self, plan: StepPlan) -> tuple[NDArray[np.int32], ...]:
        tables = [request.table.blocks for request in plan.requests]
        width = max(map(len, tables))
        packed = [fill_tables(self._block_tables[0], tables, width)]
        for group in self._more_groups:
            tables = [request.table.groups[group] for request in plan.requests]
            packed.append(fill_tables(self._block_tables[group], tables, width))
        return tuple(packed)


def _follows(plan: StepPlan, last: StepPlan) -> bool:
    """Whether `plan` was made by `following` from `last`."""
    return plan.requests is last.requests and plan.num_new is last.num_new


def _adapter_slots(plan: StepPlan, slot_of: SlotOf | None) -> NDArray[np.int32] | None:
    """Return the adapter slot of each row, int32 [batch]; None where no row has one."""
    if all(request.adapter is None for request in plan.requests):
        return None
    assert slot_of is not None
    rows = zip(plan.requests, plan.num_past, plan.num_new, strict=True)
    slots = [_slot(request, past, past + new, slot_of) for request, past, new in rows]
    return np.array(slots, np.int32) if any(slots) else None


def _slot(request: Request, start: int, end: int, slot_of: SlotOf) -> int:
    """Return the adapter slot of a row that computes tokens `start` to `end - 1`."""
    first = request.adapter_start
    assert end <= first or start >= first, f"{request} computes {start} to {end} past {first}"
    return slot_of(request.adapter) if start >= first else 0


def _logits_indices(plan: StepPlan, ends: list[int]) -> list[int]:
    """Return the tokens after which logits are needed; never none.

    Args:
        plan: of the step.
        ends: where each row ends among the tokens.
    """
    if len(plan.sampled) == len(ends) == sum(plan.num_logits):
        return [end - 1 for end in ends]
    rows = zip(ends, plan.num_logits, strict=True)
    return [token for end, count in rows for token in range(end - count, end)] or [ends[-1] - 1]


def _exact(request: Request, is_narrowed: bool) -> int:
    """Return how many logits of a row have to be exact, by what is known before the model runs.

    Siblings draw from the same logits, each by a number of its own.
    """
    if request.per_unit and request.siblings:
        return 0
    if is_narrowed:
        return 0 if request.grammar else request.exact_allowed
    return 0 if request.scores_missing else request.exact_logits


def _races(plan: StepPlan) -> list[float] | None:
    """Return contract.RACES, two numbers a row of logits; None where no row draws from all."""
    if not any(request.per_unit for request in plan.requests):
        return None
    races: list[float] = []
    for request, count in zip(plan.requests, plan.num_logits, strict=True):
        if request.per_unit:
            first = len(request.tokens)
            for position in range(first, first + count):
                races += (uniform(request.seed, position), request.per_unit)
        else:
            races += [0.0] * (2 * count)
    return races


def _summary_scales(plan: StepPlan) -> list[float] | None:
    """Return what is to be told of each row of logits; None where nothing is, of any of them."""
    wanted = [NO_SUMMARY if one.scores_missing else one.summary_scale for one in plan.requests]
    if not plan.sampled or max(wanted) == NO_SUMMARY:
        return None
    return [one for one, count in zip(wanted, plan.num_logits, strict=True) for _ in range(count)]
