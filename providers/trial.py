"""A short measured trial: how long a loaded model takes for a typical request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from onnxport.providers.base import Capabilities, Model, StepInputs

PROMPT_TOKENS: Final = 128  # of a typical request
OUTPUT_TOKENS: Final = 64
ROWS: Final = 8  # requests at once
SHORT_TOKENS: Final = 16  # what a decode step attends to; the weights are what takes its time
PHASE_S: Final = 1.0  # of each of the three measurements, if a run is not longer
MOST_RUNS: Final = 100

Clock = Callable[[], float]  # seconds, such as time.perf_counter


@dataclass(frozen=True, slots=True)
class Figures:
    """What a trial measured; None where it was broken off, for the model had lost by then."""

    decode_s: float  # one step of one row
    decode_rows_s: float | None = None  # one step of ROWS rows
    prefill_s: float | None = None  # PROMPT_TOKENS tokens of one row

    @property
    def score_s(self) -> float:
        """Seconds for a request of PROMPT_TOKENS and OUTPUT_TOKENS, alone and then ROWS at once.

            alone    = prefill_s        + (OUTPUT_TOKENS - 1) * decode_s
            together = prefill_s * ROWS + (OUTPUT_TOKENS - 1) * decode_rows_s

        What was not measured counts as nothing, so the sum is a lower bound then.
        """
        steps_s = self.decode_s + (self.decode_rows_s or 0.0)
        return (1 + ROWS) * (self.prefill_s or 0.0) + (OUTPUT_TOKENS - 1) * steps_s

    def __str__(self) -> str:
        if self.decode_rows_s is None or self.prefill_s is None:
            return (
                f"more than {self.score_s:.3g} s for the typical requests, for a step of 1 row "
                f"takes {self.decode_s * 1e3:.3g} ms"
            )
        return (
            f"{self.score_s:.3g} s for the typical requests: a step of 1 row takes "
            f"{self.decode_s * 1e3:.3g} ms, one of {ROWS} rows {self.decode_rows_s * 1e3:.3g} ms, "
            f"{PROMPT_TOKENS} tokens of a prompt {self.prefill_s * 1e3:.3g} ms"
        )


def measure(model: Model, clock: Clock, best_s: float | None = None) -> Figures:
    """Time decode steps and a prefill, each after a run that is not counted.

    Where the model takes fewer rows or tokens, the figures are what several steps would take. The
    cache holds nothing of use afterwards, as before.

    Args:
        model: a loaded model.
        clock: what to time with.
        best_s: the score to beat; the trial ends early where that is out of reach. None: none yet.

    Raises:
        ProviderError: the device fails.
    """
    limits = model.capabilities
    most_tokens = limits.max_batch_tokens or PROMPT_TOKENS
    longest = min(limits.max_model_len, limits.kv_tokens, most_tokens)
    short, prompt = min(SHORT_TOKENS, longest), min(PROMPT_TOKENS, longest)
    row_blocks = -(-short // limits.block_size) * len(limits.windows)
    most_rows = min(limits.max_batch_rows or ROWS, most_tokens)
    rows = min(ROWS, most_rows, limits.num_blocks // row_blocks)
    model.run(_batch(limits, 1, past=0, new=short))
    if limits.state_slots:
        rows = min(rows, limits.state_slots - 1)
        model.run(_batch(limits, 1, past=0, new=max(1, short - 1)))  # what decode steps go on from
    found = Figures(_median_s(model, _batch(limits, 1, past=short - 1, new=1), clock))
    if best_s is not None and found.score_s > best_s:
        return found
    if rows > 1:  # the other rows attend to copies of what the first one wrote
        targets = range(row_blocks, rows * row_blocks)
        model.copy_blocks([target % row_blocks for target in targets], targets)
    decode_s = _median_s(model, _batch(limits, rows, past=short - 1, new=1), clock)
    prefill_s = _median_s(model, _batch(limits, 1, past=0, new=prompt), clock)
    return Figures(found.decode_s, decode_s * ROWS / rows, prefill_s * PROMPT_TOKENS / prompt)


def _median_s(model: Model, inputs: StepInputs, clock: Clock) -> float:
    """How long a run takes once whatever the first one compiles, tunes or reads is there."""
    model.run(inputs)
    times_s: list[float] = []
    begin = clock()
    while not times_s or (len(times_s) < MOST_RUNS and clock() - begin < PHASE_S):
        start = clock()
        model.run(inputs)
        times_s.append(clock() - start)
    return median(times_s)


def _batch(limits: Capabilities, rows: int, *, past: int, new: int) -> StepInputs:
    """Rows of equal length, each with blocks of its own, that ask for one token's logits each.

    Of states they go on from the one that a single row without a past left.
    """
    width, num_groups = -(-(past + new) // limits.block_size), len(limits.windows)
    blocks = _int32(range(rows * num_groups * width)).reshape(rows, num_groups, width)
    first, *others = np.ascontiguousarray(blocks.swapaxes(0, 1))
    first_slot = 2 if past else 1
    return StepInputs(
        input_ids=_int64([token % limits.vocab_size for token in range(past, past + new)] * rows),
        block_table=first,
        cumulative_sequence_lengths=_int32(range(0, rows * new + 1, new)),
        past_sequence_lengths=_int32([past] * rows),
        attention_metadata=_int32([new, past + new, past + new]),
        logits_indices=_int32(range(new - 1, rows * new, new)),
        more_block_tables=tuple(others),
        state_reads=_int32([first_slot - 1] * rows) if limits.state_slots else None,
        state_writes=(_int32(range(first_slot, first_slot + rows)) if limits.state_slots else None),
    )


def _int32(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, np.int32)


def _int64(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.array(values, np.int64)
