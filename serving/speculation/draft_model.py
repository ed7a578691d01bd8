"""Guessing with a smaller model, on any provider."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.request import Request
from onnxport.serving.speculation.growing import CachedSequence, GrowingDrafter


class ModelDrafter(GrowingDrafter[CachedSequence]):
    """Lets a smaller model go on with the requests' tokens.

    Guesses that came true stay in its cache.
    """

    def _begin(self, request: Request) -> CachedSequence | None:
        sequence = self._sequences.setdefault(request, CachedSequence())
        tokens = request.tokens
        for guess in sequence.guessed:
            if sequence.num_computed >= len(tokens) or tokens[sequence.num_computed] != guess:
                break
            sequence.num_computed += 1
        sequence.guessed.clear()
        sequence.num_computed = min(sequence.num_computed, len(tokens) - 1)
        known = self._limits.vocab_size
        if any(token_id >= known for token_id in tokens[sequence.num_computed :]):
            return None
        return sequence

    def _spread(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return _widened(logits, self._vocab_size)


def _widened(logits: NDArray[np.float32], vocab_size: int) -> NDArray[np.float32]:
    """Return logits of exactly `vocab_size` tokens; those that are not there cannot be drawn."""
    rows, width = logits.shape
    if width == vocab_size:
        return logits
    widened = np.full((rows, vocab_size), -np.inf, np.float32)
    common = min(width, vocab_size)
    widened[:, :common] = logits[:, :common]
    return widened
