"""Reference logits of a fixed short sequence, for `onnxport verify`."""

from __future__ import annotations

import io
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxport.exporter.reference import draft_forward, forward
from onnxport.exporter.reference_parts import WeightSource
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


def make_draft_golden(spec: ArchSpec, weights: WeightSource) -> bytes:
    """The same of a draft head, with states that are made up.

    It holds besides `target_hidden_states` float32 [num_tokens, features], `draft_hidden_states`
    float32 [num_tokens, hidden] and `last_hidden_states` float32 [num_logits, hidden]. The last
    tokens come with the head's own states.
    """
    assert spec.draft is not None
    token_ids, rows = golden_tokens(spec)
    count, dice = len(token_ids), np.random.Generator(np.random.SFC64(0))
    given = dice.standard_normal((count, spec.draft.features), np.float32)
    own = dice.standard_normal((count, spec.hidden_size), np.float32)
    first = count - count // _ROWS  # of those with the head's own
    given[first:] = 0
    own[:first] = 0
    logits, last = draft_forward(spec, weights, token_ids, (given, own), rows)
    buffer = io.BytesIO()
    np.savez(
        buffer,
        token_ids=token_ids,
        target_hidden_states=given,
        draft_hidden_states=own,
        logits_indices=rows,
        logits=logits,
        last_hidden_states=last,
    )
    return buffer.getvalue()
