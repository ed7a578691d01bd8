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
        attention_metadata=np.array([max(new), max(total), max(total)], np.int32),
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
        ({"attention_metadata": np.array([2, 2, 1], np.int32)}, None),
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
    content = model.read_blocks([0])
    model.close()
    model.close()
    for call in (
        lambda: model.run(inputs([([1], 0, [0])])),
        lambda: model.read_blocks([0]),
        lambda: model.write_blocks([0], content),
        lambda: model.copy_blocks([0], [1]),
    ):
        with pytest.raises(AssertionError, match="closed"):
            call()


def test_blocks_are_tokens_and_positions() -> None:
    model: Model = NullModel(OPTIONS)
    model.run(inputs([([11, 12, 13, 14, 15, 16, 17, 18], 0, [3, 1])]))
    content = model.read_blocks([1, 3])
    form, capabilities = model.capabilities.kv_format, model.capabilities
    assert content.dtype == form.dtype == "int64"
    assert content.shape == (2, form.num_layers, 2, form.num_kv_heads, 4, form.head_size)
    assert content.nbytes == 2 * capabilities.kv_block_bytes
    assert content[:, 0, 0, 0, :, 0].tolist() == [[15, 16, 17, 18], [11, 12, 13, 14]]
    assert content[:, 0, 1, 0, :, 0].tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]


def test_another_model_goes_on_from_written_blocks() -> None:
    first, second = NullModel(OPTIONS), NullModel(OPTIONS)
    first.run(inputs([([1, 2, 3, 4, 5, 6], 0, [3, 1])]))
    expected = first.run(inputs([([7], 6, [3, 1])]))
    second.write_blocks([0, 7], first.read_blocks([3, 1]))
    assert (second.run(inputs([([7], 6, [0, 7])])) == expected).all()
    second.write_blocks([5, 6], first.read_blocks([1, 3]))
    with pytest.raises(AssertionError, match="reads position 0 and finds what was written for 4"):
        second.run(inputs([([7], 6, [5, 6])]))


def test_a_copied_block_forks_a_sequence_and_keeps_its_poison() -> None:
    model = NullModel(OPTIONS)
    model.run(inputs([([1, 2, 3, 4, 5, 6], 0, [3, 1])]))
    model.copy_blocks([1, 1], [2, 0])
    left, right = model.run(inputs([([7], 6, [3, 1]), ([8], 6, [3, 2])]))
    assert (left == model.run(inputs([([1, 2, 3, 4, 5, 6, 7], 0, [4, 5])]))[-1]).all()
    assert (right == model.run(inputs([([1, 2, 3, 4, 5, 6, 8], 0, [6, 7])]))[-1]).all()
    with pytest.raises(AssertionError, match="reads position 6"):
        model.run(inputs([([9], 7, [3, 0])]))


def test_misused_transfers_are_caught() -> None:
    model = NullModel(OPTIONS)
    content = model.read_blocks([0, 1])
    with pytest.raises(AssertionError, match="not in a pool of 8"):
        model.read_blocks([8])
    with pytest.raises(AssertionError, match="sources and targets"):
        model.copy_blocks([0, 1], [1, 2])
    with pytest.raises(AssertionError, match="written twice"):
        model.write_blocks([0, 0], content)
    with pytest.raises(AssertionError, match="content of float64"):
        model.write_blocks([0, 1], content.astype(np.float64))
    assert (model.num_copied_blocks, model.num_read_blocks, model.num_written_blocks) == (0, 2, 0)


def test_transfers_are_counted_and_fail_by_their_number() -> None:
    model = NullModel(replace(OPTIONS, transfer_fails=lambda number: number in (3, 4, 5)))
    model.run(inputs([([1, 2, 3, 4, 5, 6, 7, 8], 0, [0, 1])]))
    content = model.read_blocks([0, 1])
    model.copy_blocks([0, 1, 0], [2, 3, 4])
    model.write_blocks([5, 6], content)
    counts = (model.num_copied_blocks, model.num_read_blocks, model.num_written_blocks)
    assert counts == (3, 2, 2)
    with pytest.raises(ProviderError, match="transfer 3 was told to fail"):
        model.copy_blocks([0], [2])
    with pytest.raises(ProviderError, match="transfer 4 was told to fail"):
        model.read_blocks([0])
    with pytest.raises(ProviderError, match="transfer 5 was told to fail"):
        model.write_blocks([5], content[:1])
    assert counts == (model.num_copied_blocks, model.num_read_blocks, model.num_written_blocks)
    assert model.num_transfers == 6
    for undefined in (2, 5):
        with pytest.raises(AssertionError, match="reads position 0"):
            model.run(inputs([([9], 4, [undefined, 7])]))
    model.run(inputs([([9], 8, [4, 6, 7])]))
