"""A model that tells its states, and a head that checks them, over the null model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.providers.base import Capabilities, StepInputs
from onnxport.providers.null import _GAMMA, NullModel, NullOptions, _mix
from onnxport.serving.speculation.head import HeadDrafter, Reads

FEATURES = 3  # a token, its position, and a one
HIDDEN = 2  # a token and its position
SEEN = 2  # tokens that the model looks back on, the last one included
VOCAB = 512


class TellingModel(NullModel):
    """A null model that sees two tokens, and tells of each token what and where it is."""

    num_untold = 0  # steps of which nobody wants to know that

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, features=FEATURES)

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        logits = super().run(inputs)
        self.num_untold += inputs.hidden_states is None
        if inputs.hidden_states is not None:
            assert inputs.hidden_states.shape == (len(inputs.input_ids), FEATURES)
            inputs.hidden_states[:, 0] = inputs.input_ids
            inputs.hidden_states[:, 1] = _positions(inputs)
            inputs.hidden_states[:, 2] = 1
        return logits


class HeadModel(NullModel):
    """What `TellingModel` says next, from a token and the state of the one before.

    It fails where these do not belong to each other, or not to what its cache holds.
    """

    def __init__(self, options: NullOptions, tokens: NDArray[np.int32]) -> None:
        super().__init__(options)
        self.tokens = tokens
        self.num_given = self.num_own = 0  # tokens that came with a state of the model, or its own
        self.num_late = 0  # that came with the model's, and are not the first in their cache
        self._hashed = np.arange(VOCAB, dtype=np.uint64) * _GAMMA

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        given, own = inputs.target_hidden_states, inputs.draft_hidden_states
        assert given is not None
        assert own is not None
        assert inputs.last_hidden_states is not None
        super().run(inputs)
        is_given = given[:, 2] == 1
        assert (given[~is_given] == 0).all()
        assert (own[is_given] == 0).all()
        before = np.where(is_given[:, None], given[:, :2], own).astype(np.int64)
        self._check(inputs, before)
        places = before[:, 1] + 1
        hashes = self._mixed(before[:, 0], before[:, 1]) + self._mixed(inputs.input_ids, places)
        at = inputs.logits_indices
        inputs.last_hidden_states[:, 0] = inputs.input_ids[at]
        inputs.last_hidden_states[:, 1] = places[at]
        positions = _positions(inputs)
        self.num_given += int(is_given.sum())
        self.num_own += int((~is_given).sum())
        self.num_late += int((is_given & (positions > 0)).sum())
        bits = _mix(_mix(hashes[at])[:, None] + self._hashed[self.tokens])
        return (bits >> np.uint64(40)).astype(np.float32) * np.float32(8 * 2.0**-24)

    def _check(self, inputs: StepInputs, before: NDArray[np.int64]) -> None:
        """The token before is the one in the cache, where that has one."""
        ends, block_size = inputs.cumulative_sequence_lengths, self.options.block_size
        for row, past in enumerate(inputs.past_sequence_lengths.tolist()):
            for number, line in enumerate(range(ends[row], ends[row + 1])):
                place = past + number - 1
                if place >= 0:
                    block = inputs.block_table[row, place // block_size]
                    assert self._tokens[block, place % block_size] == before[line, 0]
            steps = np.diff(before[ends[row] : ends[row + 1], 1])
            assert (steps == 1).all(), "states of a row are of tokens that follow each other"

    def _mixed(self, tokens: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.uint64]:
        return _mix(tokens.astype(np.uint64) * _GAMMA + _mix(places.astype(np.uint64)))


def head_drafter(
    tokens: NDArray[np.int32] | None = None, budget: int = 64, **options: Any
) -> HeadDrafter:
    """A drafter over a `HeadModel`; `tokens` are those it has logits of, all by default."""
    if tokens is None:
        tokens = np.arange(VOCAB, dtype=np.int32)
    given = {"num_blocks": 256, "block_size": 4, "takes_exact_logits": True}
    model = HeadModel(NullOptions(**{**given, **options}), tokens)
    return HeadDrafter(model, tokens, Reads(FEATURES, HIDDEN), budget, VOCAB)


def _positions(inputs: StepInputs) -> NDArray[np.int64]:
    """Of each token in its row's cache."""
    new = np.diff(inputs.cumulative_sequence_lengths)
    rows = np.repeat(np.arange(len(new)), new)
    starts = inputs.cumulative_sequence_lengths[:-1]
    found: NDArray[np.int64] = np.arange(len(rows)) - starts[rows]
    return found + inputs.past_sequence_lengths[rows]
