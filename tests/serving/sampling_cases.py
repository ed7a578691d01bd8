"""Rows of logits and parameters of every kind, for tests of the samplers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.edits import NO_IDS, RowEdits
from onnxport.serving.row_params import Adapting, RowParams, Thinning

Floats = NDArray[np.float32]
KINDS = ("normal", "ties", "equal", "scales", "holes", "peaks", "huge")


def make_logits(kind: str, vocab: int, seed: int) -> Floats:
    """A row of one of KINDS, whose largest value is finite."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 3, vocab)
    if kind == "ties":
        values = np.round(values)
    elif kind == "equal":
        values[:] = values[0]
    elif kind == "scales":  # most of them so close together that one bucket holds them
        values = -(10.0 ** rng.uniform(-4, 2, vocab))
    elif kind == "holes":
        values[rng.random(vocab) < 0.5] = -np.inf
        values[rng.integers(vocab)] = 0.0
    elif kind == "peaks":
        values[rng.integers(0, vocab, 5)] += 20
    elif kind == "huge":
        values = values * 1e30
    return values.astype(np.float32)


def make_mask(vocab: int, seed: int, share: float) -> NDArray[np.uint32]:
    """Allow a share of the tokens, at least one; bits behind the vocabulary are set."""
    rng = np.random.default_rng(seed)
    bits = np.ones(-(-vocab // 32) * 32, np.uint8)
    bits[:vocab] = rng.random(vocab) < share
    bits[rng.integers(vocab)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def make_edits(vocab: int, seed: int) -> RowEdits:
    rng = np.random.default_rng(seed)

    def some(most: int) -> NDArray[np.int64]:
        return rng.permutation(vocab)[: rng.integers(0, min(most, vocab) + 1)].astype(np.int64)

    biased, seen = some(9), some(40)
    banned = np.concatenate((some(5), some(5))) if vocab > 40 else NO_IDS
    return RowEdits(
        biased,
        rng.normal(0, 5, len(biased)).astype(np.float32),
        banned,
        seen,
        rng.integers(0, 4, len(seen)).astype(np.float32),
        float(rng.choice([1.0, 0.7, 1.3])),
        float(rng.choice([0.0, 0.5, -0.5])),
        float(rng.choice([0.0, 0.3])),
        np.sort(rng.permutation(vocab)[: max(1, vocab // 3)]) if rng.random() < 0.3 else None,
    )


def mixed_batch(num_rows: int, vocab: int) -> tuple[Floats, list[RowParams]]:
    """Rows of every kind, with parameters of every kind."""
    logits = np.stack([make_logits(KINDS[i % 7], vocab, i) for i in range(num_rows)])
    choices = [
        RowParams(),
        RowParams(1.0),
        RowParams(1.0, None, 0.9),
        RowParams(0.7, 50, 0.95),
        RowParams(1.0, 3000),
        RowParams(1.0, min_p=0.01),
        RowParams(1.3, 70, 0.8, min_p=0.02),
        RowParams(9.0, None, 0.99),
        RowParams(1.0, thinning=Thinning(1.5)),
        RowParams(1.2, 500, 0.95, thinning=Thinning(2.0, 0.6, 0.05)),
        RowParams(1.0, min_p=0.001, thinning=Thinning(0.0, 0.8)),
        RowParams(0.9, thinning=Thinning(xtc_threshold=0.02)),
        RowParams(1.4, adapting=Adapting(0.2, 1.5)),
        RowParams(1.4, 60, 0.9, adapting=Adapting(0.6)),
        RowParams(1.0, adapting=Adapting(mirostat=1, mu=8.0)),
        RowParams(0.8, adapting=Adapting(mirostat=2, mu=6.0)),
        RowParams(1.1, min_p=0.01, target=0.3),
    ]
    params = []
    for i in range(num_rows):
        row = choices[i % len(choices)]._replace(
            uniform=(i * 0.618) % 1, num_logprobs=(None, 0, 3)[i % 3]
        )
        if i % 4 == 1:
            row = row._replace(edits=make_edits(vocab, i))
        if i % 5 == 2:
            row = row._replace(mask=make_mask(vocab, i, 0.7))
        params.append(row)
    return logits, params
