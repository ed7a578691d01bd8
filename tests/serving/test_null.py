"""The null provider sees every mistake it is there to see."""

from dataclasses import replace

import numpy as np
import pytest

from onnxport.errors import ProviderError
from onnxport.providers.base import Model, StepInputs
from onnxport.providers.null import NullModel, NullOptions

OPTIONS = NullOptions(vocab_size=100, num_blocks=8, block_size=4, max_model_len=20)


def inputs(rows: list[tuple[list[int], int, list[int]]]) -> StepInputs:
    """Pack rows of (new tokens, past length, blocks), logits for every token."""
    new = [len(tokens) for tokens, _, _ in rows]
    total = [len(tokens) + past for tokens, past, _ in rows]
    width = max(len(blocks) for _, _, blocks in rows)
    table = [blocks + [0] * (width - len(blocks)) for _, _, blocks in rows]
    return StepInputs(
        input_ids=np.array([t for tokens, _, _ in rows for t in tokens], np.int64),
        block_table=np.array(table, np.int32),
        cumulative_sequence_lengths=np.cumsum([0, *new]).astype(np.int32),
        past_sequence_lengths=np.array([past for _, past, _ in rows], np.int32),
        attention_metadata=np.array([max(new), max(total), min(total)], np.int32),
        logits_indices=np.arange(sum(new), dtype=np.int32),
    )


def test_logits_depend_on_all_tokens_before_and_on_nothing_else() -> None:
    model: Model = NullModel(OPTIONS)
    whole = model.run(inputs([([1, 2, 3, 4, 5, 6], 0, [3, 1]), ([1, 2, 9], 0, [0])]))
    assert whole.shape == (9, 100)
    assert whole.dtype == np.float32
    first = model.run(inputs([([1, 2, 3], 0, [5])]))
    rest = model.run(inputs([([4, 5, 6], 3, [5, 7])]))
    assert (np.concatenate([first, rest]) == whole[:6]).all()
    assert (whole[6:8] == whole[:2]).all()
    assert (whole[8] != whole[2]).any()
    swapped = model.run(inputs([([2, 1, 3], 0, [5])]))
    assert (swapped[2] != first[2]).any()


def test_stale_unwritten_and_poisoned_slots_are_seen() -> None:
    model = NullModel(OPTIONS)
    with pytest.raises(AssertionError, match="reads position 0"):
        model.run(inputs([([4], 3, [0])]))
    model.run(inputs([([1, 2, 3, 4, 5], 0, [0, 1])]))
    with pytest.raises(AssertionError, match="reads position 4 and finds what was written for 0"):
        model.run(inputs([([6], 5, [0, 2]), ([1], 0, [2])]))
    model.poison([1])
    with pytest.raises(AssertionError, match="reads position 4"):
        model.run(inputs([([6], 5, [0, 1])]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": np.array([1, 2, 3], np.int32)}, "input_ids is int32"),
        ({"input_ids": np.array([1, 2, 100], np.int64)}, None),
        ({"block_table": np.array([[8], [1]], np.int32)}, None),
        ({"block_table": np.array([[0, 5], [1, 0]], np.int32)}, "unused entry"),
        ({"block_table": np.array([[0] * 4, [1, 0, 0, 0]], np.int32)[:, ::2]}, "not contiguous"),
        ({"block_table": np.zeros((2, 1), np.int32)}, "two tokens are written to one slot"),
        ({"cumulative_sequence_lengths": np.array([0, 3, 3], np.int32)}, "without new tokens"),
        ({"cumulative_sequence_lengths": np.array([0, 2, 4], np.int32)}, None),
        ({"past_sequence_lengths": np.array([[0], [0]], np.int32)}, "has shape"),
        ({"past_sequence_lengths": np.array([0, 3], np.int32)}, None),
        ({"attention_metadata": np.array([2, 2, 2], np.int32)}, None),
        ({"logits_indices": np.array([3], np.int32)}, None),
        ({"logits_indices": np.array([], np.int32)}, None),
    ],
)
def test_broken_contracts_are_refused(change: dict[str, object], words: str | None) -> None:
    model = NullModel(OPTIONS)
    good = inputs([([1, 2], 0, [0]), ([3], 0, [1])])
    model.run(good)
    with pytest.raises(AssertionError, match=words):
        model.run(replace(good, **change))  # type: ignore[arg-type]


def test_a_failure_poisons_what_it_would_have_written() -> None:
    model = NullModel(replace(OPTIONS, fails=lambda run: run == 1))
    model.run(inputs([([1, 2], 0, [0])]))
    with pytest.raises(ProviderError, match="run 1 was told to fail"):
        model.run(inputs([([3], 2, [0])]))
    model.run(inputs([([4], 2, [0])]))
    with pytest.raises(AssertionError, match="reads position 3"):
        model.run(inputs([([5], 4, [0, 1])]))


def test_a_closed_model_refuses() -> None:
    model = NullModel(OPTIONS)
    model.close()
    model.close()
    with pytest.raises(AssertionError, match="closed"):
        model.run(inputs([([1], 0, [0])]))
