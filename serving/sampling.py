"""Sampling a step: from requests to rows of logits, and what to do if that fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.drawing import RowParams
from onnxport.serving.outputs import Logprob, TokenLogprobs
from onnxport.serving.request import Request
from onnxport.serving.sampler import (
    RowLogprobs,
    Sampled,
    sample,
    sample_greedy,
    uniform,
)

Naming = Callable[[int], str]
NOT_FINITE = "the model's logits are not finite numbers"
NOTHING_LEFT = (
    "no token is left to draw: allowed_token_ids, bad_words and min_tokens forbid all of them; "
    "allow more"
)


def row_params(request: Request) -> RowParams:
    """Return how to sample the next token of `request`."""
    params = request.params
    position = len(request.tokens)
    return RowParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        uniform=0.0 if params.greedy else uniform(request.seed, position),
        num_logprobs=params.logprobs,
        min_p=params.min_p,
        edits=request.rules.edits(request.tokens) if request.rules else None,
    )


def sample_sequences(sequences: Sequence[Request], logits: NDArray[np.float32]) -> Sampled:
    """Sample one token for each sequence.

    Args:
        sequences: the requests, in the order of the rows.
        logits: float32 [num_sequences, vocab]; as it was at the end.
    """
    if all(request.plain for request in sequences):
        return sample_greedy(logits)
    return sample(logits, [row_params(request) for request in sequences])


def failures(
    sequences: Sequence[Request], logits: NDArray[np.float32], sampled: Sampled
) -> dict[int, str]:
    """Return why some sequences have no token, by their number."""
    return {
        index: NOTHING_LEFT
        if sequences[index].rules is not None and np.isfinite(logits[index].max())
        else NOT_FINITE
        for index in sampled.invalid
    }


def sample_one_by_one(
    sequences: Sequence[Request], logits: NDArray[np.float32]
) -> tuple[Sampled, dict[int, str]]:
    """Sample each sequence by itself, so that the one that cannot be sampled fails alone.

    Returns:
        One token for each sequence, and by number why some have none.
    """
    tokens: list[int] = []
    logprobs: list[RowLogprobs | None] = []
    failed: dict[int, str] = {}
    for index, request in enumerate(sequences):
        row = logits[index : index + 1]
        try:
            one = sample_sequences([request], row)
        except Exception as error:
            one = Sampled([0], None, ())
            failed[index] = f"{type(error).__name__}: {error}"
        if one.invalid:
            failed[index] = failures([request], row, one)[0]
        tokens += one.token_ids
        logprobs += one.logprobs or [None]
    return Sampled(tokens, logprobs, tuple(failed)), failed


def token_logprobs(row: RowLogprobs, name: Naming) -> TokenLogprobs:
    """Return the logprobs of one position, the likeliest tokens first.

    Args:
        row: of the position.
        name: returns the text of a token.
    """
    pairs = zip(row.top_ids, row.top_logprobs, strict=True)
    result = {
        token_id: Logprob(value, rank, name(token_id))
        for rank, (token_id, value) in enumerate(pairs, 1)
    }
    return result | {row.token_id: Logprob(row.logprob, row.rank, name(row.token_id))}
