"""Logits are the reference's, however a sequence is cut into steps and batches."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.conformance.conftest import Loaded
from tests.conformance.models import num_columns, step
from tests.conformance.rules import check_logits
from tests.conformance.workload import PROMPTS, SYSTEM


def blocks_of(loaded: Loaded, count: int, first: int = 0) -> list[int]:
    """Enough blocks for `count` tokens, from the end of the pool and in falling order."""
    limits = loaded.model.capabilities
    last = num_columns(limits) - 1 - first
    return list(range(last, last - -(-count // limits.block_size), -1))


def run_in_pieces(loaded: Loaded, tokens: list[int], sizes: list[int]) -> NDArray[np.float32]:
    """Logits of every token, computed in steps of `sizes` tokens, the last one of what is left."""
    blocks, found, past = blocks_of(loaded, len(tokens)), [], 0
    for size in [*sizes, len(tokens)]:
        piece = tokens[past : past + size]
        if piece:
            found.append(
                loaded.model.run(step([(piece, past, blocks)], loaded.model.capabilities)).copy()
            )
        past += len(piece)
    return np.concatenate(found)


def test_the_golden_ones(loaded: Loaded) -> None:
    golden = np.load(loaded.path / "golden.npz")
    tokens, rows = golden["token_ids"].tolist(), golden["logits_indices"]
    # the suite's reference reads the artifact, the golden one was made from the checkpoint
    expected = loaded.reference.logits(tokens)[rows]
    np.testing.assert_allclose(expected, golden["logits"], rtol=1e-4, atol=1e-4)
    found = run_in_pieces(loaded, tokens, [len(tokens) // 2, *[1] * len(tokens)])
    check_logits(loaded.rule, golden["logits"], found[rows], "golden")


@pytest.mark.parametrize("sizes", [[], [16], [7, 1, 20, 2], [39]], ids=str)
def test_a_sequence_in_pieces(loaded: Loaded, sizes: list[int]) -> None:
    expected = loaded.reference.logits(SYSTEM)
    check_logits(loaded.rule, expected, run_in_pieces(loaded, SYSTEM, sizes), f"in {sizes}")


def test_a_sequence_where_software_leaves_out_the_rest(glimpsed: Loaded) -> None:
    """What a family's graph is made of shows in one: that it loads, and a prompt in two steps."""
    expected = glimpsed.reference.logits(SYSTEM)
    check_logits(glimpsed.rule, expected, run_in_pieces(glimpsed, SYSTEM, [16]), "in two steps")


def test_a_ragged_batch(loaded: Loaded) -> None:
    """Prompts that begin, go on and decode, in one step."""
    pasts, limits = [0, 42, 16, 31, 5, 0], loaded.model.capabilities
    tables, first = [], 0
    for prompt, past in zip(PROMPTS, pasts, strict=True):
        tables.append(blocks_of(loaded, len(prompt), first))
        first += len(tables[-1])
        if past:
            loaded.model.run(step([(prompt[:past], 0, tables[-1])], limits))
    cases = list(zip(PROMPTS, pasts, tables, strict=True))
    found = loaded.model.run(step([(p[past:], past, table) for p, past, table in cases], limits))
    wanted = [loaded.reference.logits(p)[past:] for p, past, _ in cases]
    check_logits(loaded.rule, np.concatenate(wanted), found, "a ragged batch")


def test_only_the_rows_that_are_asked_for(loaded: Loaded) -> None:
    rows = np.array([39, 0, 7], np.int32)
    blocks, limits = blocks_of(loaded, len(SYSTEM)), loaded.model.capabilities
    inputs = step([(SYSTEM, 0, blocks)], limits, logits_indices=rows)
    found = loaded.model.run(inputs)
    check_logits(loaded.rule, loaded.reference.logits(SYSTEM)[rows], found, "three rows")
