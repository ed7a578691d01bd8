"""Log probabilities of the tokens that a request names, whichever token is sampled.

They are few, and only who names some pays for them: their logits are read, the sampled token's log
probability tells what the softmax subtracts, and their ranks take two passes over the row each, or
a sort of what is as likely as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxport.serving.edits import Floats, Ids
from onnxport.serving.sampled import NamedLogprob, RowLogprobs

FEW = 8  # tokens for which two looks at all logits take less than sorting these


def with_named(row: RowLogprobs, logits: Floats, token_ids: Sequence[int]) -> RowLogprobs:
    """Return the log probabilities of a row with those of some tokens.

    Args:
        row: of the row, as the sampler reports it.
        logits: float32 [vocab], of which it was made.
        token_ids: each once; all are the vocabulary's.
    """
    ids = np.array(token_ids, np.int64)
    values = logits[ids]
    log_sum = float(logits[row.token_id]) - row.logprob
    logprobs = np.minimum(values.astype(np.float64) - log_sum, 0.0)  # rounding may exceed it
    found = zip(token_ids, logprobs.tolist(), _ranks(logits, ids, values), strict=True)
    return row._replace(named=tuple(NamedLogprob(*one) for one in found))


def _ranks(logits: Floats, ids: Ids, values: Floats) -> list[int]:
    """Return how likely tokens are among all, 1 being the likeliest; of equals the lower id is.

    Args:
        logits: float32 [vocab].
        ids: of the tokens, int64 [num_tokens].
        values: their logits, float32 [num_tokens].
    """
    if len(ids) > FEW:
        # Those below all of them do not count: where these are likely tokens few are left.
        ascending = np.sort(logits[logits >= values.min()])
        before = len(ascending) - np.searchsorted(ascending, values, "right")
        equals = len(ascending) - np.searchsorted(ascending, values, "left") - before
        for place in np.flatnonzero(equals > 1):
            before[place] += np.count_nonzero(logits[: ids[place]] == values[place])
        found: list[int] = (before + 1).tolist()
        return found
    ranks = []
    for token_id, value in zip(ids.tolist(), values, strict=True):
        rank = int(np.count_nonzero(logits > value)) + 1
        if np.count_nonzero(logits >= value) > rank:
            rank += int(np.count_nonzero(logits[:token_id] == value))
        ranks.append(rank)
    return ranks
