"""What sampling a step gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class NamedLogprob(NamedTuple):
    """The log probability of a token that a request names, by the model's own softmax."""

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest


class RowLogprobs(NamedTuple):
    """Log probabilities of one row, by the model's own softmax."""

    token_id: int  # the sampled token
    logprob: float
    rank: int  # 1 is the likeliest
    top_ids: tuple[int, ...]  # the likeliest tokens, the likeliest first
    top_logprobs: tuple[float, ...]
    named: tuple[NamedLogprob, ...] = ()  # of the tokens that the request names, in its order


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a step sampled."""

    token_ids: list[int]  # one a row
    logprobs: list[RowLogprobs | None] | None  # one a row; None when no row asked
    invalid: tuple[int, ...]  # rows with NaN or no finite maximum, as changed, or as given where
    # logprobs are asked for; their token is void, and they have no logprobs
    surprises: list[float] | None = None  # one a row: of the token among those that were left, in
    # bits; 0 without Mirostat and adaptive-p. None where no row has either
