"""Measuring a loaded model, on a clock that only the model moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxport.providers import trial
from onnxport.providers.base import Capabilities, Model, StepInputs
from onnxport.providers.null import NullModel, NullOptions
from onnxport.providers.trial import Figures, measure
from onnxport.serving.verify.decoding import LentModel
from tests.providers.models import opened

Cost = Callable[[int, int], float]  # seconds of a run of so many tokens in so many rows


class Timed(NullModel):
    """A model whose runs take time; it checks every batch as the contract says."""

    def __init__(
        self,
        cost: Cost,
        options: NullOptions | None = None,
        max_batch_tokens: int | None = None,
    ) -> None:
        super().__init__(options)
        self._max_batch_tokens = max_batch_tokens
        self._cost = cost
        self.now_s = 0.0
        self.batches: list[tuple[int, int]] = []  # tokens, rows

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, max_batch_tokens=self._max_batch_tokens)

    def clock(self) -> float:
        return self.now_s

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        batch = len(inputs.input_ids), len(inputs.past_sequence_lengths)
        assert batch[0] <= (self._max_batch_tokens or batch[0])
        self.now_s += self._cost(*batch)
        self.batches.append(batch)
        return super().run(inputs)


def slow_at_first(cost: Cost) -> Cost:
    """As a provider that compiles each new shape."""
    seen = set()

    def total(tokens: int, rows: int) -> float:
        first = (tokens, rows) not in seen
        seen.add((tokens, rows))
        return cost(tokens, rows) + 100 * first

    return total


def test_each_figure_is_a_run_after_the_first() -> None:
    model = Timed(slow_at_first(lambda tokens, rows: 0.001 * tokens + 0.01 * rows))
    found = measure(model, model.clock)
    assert found.decode_s == pytest.approx(0.011)
    assert found.decode_rows_s == pytest.approx(0.088)
    assert found.prefill_s == pytest.approx(0.138)
    assert found.score_s == pytest.approx(9 * 0.138 + 63 * (0.011 + 0.088))
    assert set(model.batches) == {(16, 1), (1, 1), (8, 8), (128, 1)}


@pytest.mark.parametrize(("slots", "rows"), [(9, 8), (64, 8), (4, 3), (2, 1)])
def test_rows_of_a_model_with_states_go_on_from_one_of_them(slots: int, rows: int) -> None:
    model = Timed(lambda tokens, rows: 0.001 * tokens + 0.01 * rows, NullOptions(state_slots=slots))
    found = measure(model, model.clock)
    assert found.decode_s == pytest.approx(0.011)
    assert found.prefill_s == pytest.approx(0.138)
    assert set(model.batches) == {(16, 1), (15, 1), (1, 1), (rows, rows), (128, 1)}


def test_one_slow_run_is_an_exception() -> None:
    runs = iter(range(1000))
    model = Timed(lambda tokens, rows: 50.0 if next(runs) == 4 else 0.01)
    assert measure(model, model.clock).decode_s == pytest.approx(0.01)


def test_it_ends_after_its_time_or_its_runs() -> None:
    quick = Timed(lambda tokens, rows: 1e-6)
    measure(quick, quick.clock)
    assert len(quick.batches) == 1 + 3 * (1 + trial.MOST_RUNS)
    middling = Timed(lambda tokens, rows: 0.11)
    measure(middling, middling.clock)
    assert middling.now_s < 3 * (trial.PHASE_S + 0.11 + 0.11) + 0.11
    slow = Timed(lambda tokens, rows: 20.0)
    measure(slow, slow.clock)
    assert len(slow.batches) == 1 + 3 * 2


def test_a_model_that_has_lost_is_not_measured_further() -> None:
    model = Timed(lambda tokens, rows: 0.5)
    found = measure(model, model.clock, best_s=31.0)
    assert found == Figures(0.5)
    assert found.score_s == 63 * 0.5 > 31
    assert set(model.batches) == {(16, 1), (1, 1)}
    assert "more than 31.5 s" in str(found)
    assert measure(model, model.clock, best_s=32.0).prefill_s == 0.5


@given(
    block_size=st.integers(1, 300),
    num_blocks=st.integers(1, 40),
    max_model_len=st.integers(1, 300),
    max_batch_rows=st.none() | st.integers(1, 9),
    max_batch_tokens=st.none() | st.integers(1, 150),
)
def test_it_fits_every_pool(
    block_size: int,
    num_blocks: int,
    max_model_len: int,
    max_batch_rows: int | None,
    max_batch_tokens: int | None,
) -> None:
    options = NullOptions(
        vocab_size=7,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=min(max_model_len, block_size * num_blocks),
        max_batch_rows=max_batch_rows,
    )
    model = Timed(lambda tokens, rows: 0.5 + 0.25 * tokens, options, max_batch_tokens)
    found = measure(model, model.clock)
    most_rows = max(rows for _, rows in model.batches)
    most_tokens = max(tokens for tokens, rows in model.batches if rows == 1)
    # What does not fit in one step takes several.
    assert found.decode_rows_s == pytest.approx(8 / most_rows * (0.5 + 0.25 * most_rows))
    assert found.prefill_s == pytest.approx(128 / most_tokens * (0.5 + 0.25 * most_tokens))
    assert most_rows <= (max_batch_rows or 8)
    enough_tokens = max_batch_tokens is None or max_batch_tokens >= 128
    if num_blocks >= 8 and block_size >= 16 and max_batch_rows in (None, 8, 9) and enough_tokens:
        assert most_rows == 8
    if options.max_model_len >= 128 and enough_tokens:
        assert most_tokens == 128


class Grouped(LentModel):
    """A model that keeps what it was told; every look at its clock takes a while."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.steps: list[StepInputs] = []
        self.copies: list[tuple[int, int]] = []
        self.now_s = 0.0

    def clock(self) -> float:
        self.now_s += trial.PHASE_S
        return self.now_s

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        self.steps.append(inputs)
        return super().run(inputs)

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.copies += zip(sources, targets, strict=True)
        super().copy_blocks(sources, targets)


@pytest.mark.parametrize(("tokens", "num_rows"), [(1024, 8), (64, 4), (16, 1)])
def test_groups_of_layers_have_blocks_of_their_own(
    alternating_artifact: Path, tokens: int, num_rows: int
) -> None:
    with opened(alternating_artifact, "custom", kv_cache_tokens=tokens) as model:
        grouped = Grouped(model)
        found = measure(grouped, grouped.clock)
    assert found.prefill_s is not None
    first, *_, last = grouped.steps
    widest = max(grouped.steps, key=lambda step: len(step.block_table))
    assert len(widest.block_table) == num_rows
    assert len(last.input_ids) == min(128, tokens)
    for step in grouped.steps:
        tables = np.stack([step.block_table, *step.more_block_tables])
        assert len(tables) == 2
        assert len(np.unique(tables)) == tables.size
        assert tables.max() < model.capabilities.num_blocks
        assert all(table.flags.c_contiguous for table in step.more_block_tables)
    # Each row attends to copies of what the first step wrote in each group.
    copied = {target: source for source, target in grouped.copies}
    for wrote, reads in (
        (first.block_table, widest.block_table),
        (first.more_block_tables[0], widest.more_block_tables[0]),
    ):
        assert {copied.get(block, block) for block in reads[:, 0].tolist()} == {wrote[0, 0]}
