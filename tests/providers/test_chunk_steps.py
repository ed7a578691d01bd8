"""Steps that are cut into runs of few new tokens a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxport.providers.base import StepInputs
from onnxport.providers.buckets import Buckets
from onnxport.providers.chunk_steps import MOST_PLACES, Piece, chunk_parts, cut


@pytest.mark.parametrize(
    ("new", "places", "wanted"),
    [
        ([1], 1, [[(0, 0, 1)]]),
        ([1, 4, 2], 12, [[(0, 0, 1), (1, 0, 4), (2, 0, 2)]]),
        ([1, 4, 2], 11, [[(1, 0, 4), (2, 0, 2)], [(0, 0, 1)]]),
        ([5], 1, [[(0, 0, 4)], [(0, 4, 5)]]),
        ([9, 1, 6], 8, [[(0, 0, 4), (2, 0, 4)], [(1, 0, 1)], [(0, 4, 8), (2, 4, 6)], [(0, 8, 9)]]),
        ([0, 2], 12, [[(0, 0, 0), (1, 0, 2)]]),
    ],
)
def test_cut(new: list[int], places: int, wanted: list[list[tuple[int, int, int]]]) -> None:
    assert cut(new, 4, places) == wanted


def test_many_rows_of_one_token_run_together() -> None:
    assert len(cut([1] * MOST_PLACES, 64)) == 1
    assert [len(run) for run in cut([1] * 100 + [64], 64)] == [16, 85]


def test_rows_are_as_wide_as_they_are_padded() -> None:
    buckets = Buckets(2048, 256, 4096, 16, row_is_tile=True)

    def sizes(new: list[int]) -> list[int]:
        return [len(run) for run in cut(new, 64, width=buckets.row_width)]

    assert sizes([1] * 256) == [256]
    assert sizes([1] * 126 + [2, 8]) == [128]
    assert sizes([1] * 127 + [2, 8]) == [128, 1]
    assert sizes([1] * 100 + [9]) == [16, 85]
    for longest in (1, 2, 8, 9, 64):
        shape = buckets.shape(2 * longest, 2, longest, 8)
        assert buckets.row_width(longest) == shape.query_tile


def test_runs_have_no_more_rows_than_they_may() -> None:
    assert cut([1, 4, 2], 4, most_rows=2) == [[(1, 0, 4), (2, 0, 2)], [(0, 0, 1)]]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(1, 8), st.integers(1, 20))
def test_every_token_runs_once_and_in_order(new: list[int], most: int, places: int) -> None:
    done = [0] * len(new)
    for run in cut(new, most, places):
        rows = [piece.row for piece in run]
        assert rows == sorted(set(rows))
        longest = max(piece.end - piece.first for piece in run)
        assert len(run) == 1 or len(run) * longest <= places
        for piece in run:
            assert piece.first == done[piece.row]
            assert 0 < piece.end - piece.first <= most
            done[piece.row] = piece.end
    assert done == new


def test_parts() -> None:
    inputs = StepInputs(
        input_ids=np.arange(10, 16),
        block_table=np.array([[3, 4], [5, 6]], np.int32),
        cumulative_sequence_lengths=np.array([0, 5, 6], np.int32),
        past_sequence_lengths=np.array([2, 3], np.int32),
        attention_metadata=np.array([5, 7, 7], np.int32),
        logits_indices=np.array([5, 0, 4], np.int32),
        hidden_states=np.zeros((6, 2), np.float32),
        state_reads=np.array([0, 7], np.int32),
        state_writes=np.array([2, 9], np.int32),
        adapter_slots=np.array([4, 3], np.int32),
    )
    runs = [[Piece(0, 0, 4), Piece(1, 0, 1)], [Piece(0, 4, 5)]]
    (first, tokens, own), (second, rest, last) = chunk_parts(inputs, runs, 4)
    assert first.input_ids.tolist() == [10, 11, 12, 13, 15]
    assert first.cumulative_sequence_lengths.tolist() == [0, 4, 5]
    assert first.past_sequence_lengths.tolist() == [2, 3]
    assert first.attention_metadata.tolist() == [4, 6, 6]
    assert first.block_table.tolist() == [[3, 4], [5, 6]]
    assert first.logits_indices.tolist() == [4, 0]
    assert (tokens.tolist(), own.tolist()) == ([0, 1, 2, 3, 5], [0, 1])
    assert first.state_reads is not None
    assert first.state_reads.tolist() == [0, 7]
    assert first.hidden_states is not None
    assert first.hidden_states.shape == (5, 2)
    assert second.input_ids.tolist() == [14]
    assert second.past_sequence_lengths.tolist() == [6]
    assert second.block_table.tolist() == [[3, 4]]
    assert (rest.tolist(), last.tolist()) == ([4], [2])
    assert first.adapter_slots is not None
    assert second.adapter_slots is not None
    assert (first.adapter_slots.tolist(), second.adapter_slots.tolist()) == ([4, 3], [4])
    for part, reads, writes in ((first, [0, 7], [2, 9]), (second, [2], [2])):
        assert part.state_reads is not None
        assert part.state_writes is not None
        assert (part.state_reads.tolist(), part.state_writes.tolist()) == (reads, writes)
        arrays = [getattr(part, name) for name in part.__slots__]
        assert all(a.flags.c_contiguous for a in arrays if isinstance(a, np.ndarray))
        assert part.state_reads.dtype == part.past_sequence_lengths.dtype == np.int32


def test_a_part_that_wants_no_logits_asks_for_one() -> None:
    zeros = np.zeros(1, np.int32)
    inputs = StepInputs(
        input_ids=np.arange(6),
        block_table=np.array([[1]], np.int32),
        cumulative_sequence_lengths=np.array([0, 6], np.int32),
        past_sequence_lengths=zeros,
        attention_metadata=np.array([6, 6, 6], np.int32),
        logits_indices=np.array([5], np.int32),
        state_reads=zeros,
        state_writes=zeros + 1,
    )
    first, second = chunk_parts(inputs, cut([6], 4), 16)
    assert (first[0].logits_indices.tolist(), first[2].tolist()) == ([3], [])
    assert (second[0].logits_indices.tolist(), second[2].tolist()) == ([1], [0])
