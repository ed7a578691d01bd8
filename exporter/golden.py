"""Reference logits of a fixed short sequence, for `onnxport verify`."""

from __future__ import annotations

import io
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxport.exporter.reference import WeightSource, forward
from onnxport.graphs.spec import ArchSpec

FILE: Final = "golden.npz"
_TOKENS: Final = 20  # more than one block of 16
_ROWS: Final = 4  # few, for a row is the size of the vocabulary


def golden_tokens(spec: ArchSpec) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Token ids, int64 [num_tokens], spread over the vocabulary, and rows, int32 [num_logits]."""
    count = min(_TOKENS, spec.context_length)
    token_ids = np.arange(1, count + 1, dtype=np.int64) * 2_654_435_761 % spec.vocab_size
    rows = np.unique(np.linspace(count / _ROWS, count, _ROWS).astype(np.int32) - 1)
    return token_ids, rows[rows >= 0]


def make_golden(spec: ArchSpec, weights: WeightSource) -> bytes:
    """Run the reference; the bytes of an .npz file.

    It holds `token_ids` int64 [num_tokens], `logits_indices` int32 [num_logits] and `logits`
    float32 [num_logits, vocab], computed in float32 from the weights as they are stored.
    """
    token_ids, rows = golden_tokens(spec)
    logits = forward(spec, weights, token_ids, rows)
    buffer = io.BytesIO()
    np.savez(buffer, token_ids=token_ids, logits_indices=rows, logits=logits)
    return buffer.getvalue()
