"""What every step has to be, whoever runs it: the contract of `StepInputs`, asserted."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.contract import ALL_ALLOWED, mask_words
from onnxport.providers.base import Capabilities, StepInputs
from onnxport.providers.null_states import check_slots


def check_inputs(inputs: StepInputs, limits: Capabilities) -> None:
    """Assert that `inputs` keep the graph contract and the model's limits."""
    batch = len(inputs.past_sequence_lengths)
    num_tokens = len(inputs.input_ids)
    for name, array, dtype, dims in (
        ("input_ids", inputs.input_ids, np.int64, 1),
        ("block_table", inputs.block_table, np.int32, 2),
        ("cumulative_sequence_lengths", inputs.cumulative_sequence_lengths, np.int32, 1),
        ("past_sequence_lengths", inputs.past_sequence_lengths, np.int32, 1),
        ("attention_metadata", inputs.attention_metadata, np.int32, 1),
        ("logits_indices", inputs.logits_indices, np.int32, 1),
    ):
        assert array.dtype == dtype, f"{name} is {array.dtype}"
        assert array.ndim == dims, f"{name} has shape {array.shape}"
        assert array.flags.c_contiguous, f"{name} is not contiguous"
    cumulative, past = inputs.cumulative_sequence_lengths, inputs.past_sequence_lengths
    assert 1 <= batch <= (limits.max_batch_rows or batch), f"{batch} rows"
    assert num_tokens <= (limits.max_batch_tokens or num_tokens), f"{num_tokens} tokens"
    assert len(inputs.block_table) == batch
    assert len(cumulative) == batch + 1
    assert cumulative[0] == 0
    assert cumulative[-1] == num_tokens
    new = np.diff(cumulative)
    assert (new >= 1).all(), "a row without new tokens"
    assert (past >= 0).all()
    total = past + new
    assert total.max() <= limits.max_model_len
    assert inputs.attention_metadata.tolist() == [new.max(), total.max(), total.max()]
    assert ((inputs.input_ids >= 0) & (inputs.input_ids < limits.vocab_size)).all()
    _check_tables(inputs, limits, -(-total // limits.block_size))
    if inputs.adapter_slots is not None:
        slots = inputs.adapter_slots
        assert slots.dtype == np.int32
        assert slots.shape == (batch,)
        assert ((slots >= 0) & (slots <= limits.max_adapters)).all()
    check_slots(inputs, limits)
    _check_logits(inputs, limits)


def _check_tables(inputs: StepInputs, limits: Capabilities, used: NDArray[np.integer[Any]]) -> None:
    """Assert that each group of layers has a block table; `used` columns of each row, [batch]."""
    assert len(inputs.more_block_tables) == len(limits.windows) - 1, "a block table for each group"
    for table in (inputs.block_table, *inputs.more_block_tables):
        assert table.shape == inputs.block_table.shape
        assert table.dtype == np.int32
        assert table.flags.c_contiguous
        assert used.max() <= table.shape[1], "the block table is too narrow"
        beyond = np.arange(table.shape[1]) >= used[:, None]
        assert (table[beyond] == 0).all(), "an unused entry of the block table is not 0"
        assert ((table >= 0) & (table < limits.num_blocks)).all()


def _check_logits(inputs: StepInputs, limits: Capabilities) -> None:
    """Assert that what is said of logits is said of each row of them."""
    indices = inputs.logits_indices
    assert len(indices) >= 1
    assert ((indices >= 0) & (indices < len(inputs.input_ids))).all()
    if inputs.exact_logits is not None:
        exact = inputs.exact_logits
        assert exact.dtype == np.int32
        assert exact.shape == inputs.logits_indices.shape
        assert (exact >= (0 if inputs.allowed_tokens is None else ALL_ALLOWED)).all()
    if inputs.allowed_tokens is not None:
        allowed = inputs.allowed_tokens
        assert inputs.exact_logits is not None
        assert allowed.dtype == np.int32
        assert allowed.shape == (len(inputs.logits_indices), mask_words(limits.vocab_size))
        assert allowed.flags.c_contiguous
    if inputs.races is not None:
        races = inputs.races
        assert inputs.exact_logits is not None
        assert races.dtype == np.float64
        assert races.shape == (len(inputs.logits_indices), 2)
        assert ((races[:, 0] >= 0) & (races[:, 0] < 1)).all()
        assert (races[:, 1] >= 0).all()
