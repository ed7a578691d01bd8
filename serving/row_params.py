"""How one row is sampled, and what of its logits that needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.contract import ALL_ALLOWED, NO_SUMMARY, NO_SUMS
from onnxport.graphs.noise import LEAST_TEMPERATURE, per_unit
from onnxport.serving.edits import RowEdits

if TYPE_CHECKING:
    from onnxport.serving.infill_sampler import InfillRule


LOG2_E = 1.4426950408889634
MOST_EXACT = 64  # largest logits of a row that are worth telling the model of
NOTHING_LEFT_OUT = 2.0  # a threshold that no probability reaches


class Thinning(NamedTuple):
    """What else leaves tokens of a row out; the defaults leave none out."""

    top_n_sigma: float = 0.0  # keeps logits so many standard deviations below the largest; 0: all
    typical_p: float = 1.0
    xtc_threshold: float = NOTHING_LEFT_OUT


class Adapting(NamedTuple):
    """What depends on all of a row's logits; see `onnxport.serving.adapting`.

    A temperature that moves, up to that of the row, or Mirostat.
    """

    least_temperature: float = 0.0
    exponent: float = 1.0
    mirostat: int = 0  # 1 or 2; 0: the temperature moves
    mu: float = 0.0  # how much a token may surprise, in bits; of this step


class RowParams(NamedTuple):
    """How one row is sampled; a tuple, as every step makes one for every row."""

    temperature: float = 0.0  # 0: greedy
    top_k: int | None = None
    top_p: float = 1.0
    uniform: float = 0.0  # the row's random number, in [0, 1), 53 bits; unused when greedy
    num_logprobs: int | None = None  # None: no logprobs; n: the sampled token and the n likeliest
    min_p: float = 0.0
    edits: RowEdits | None = None  # what changes in the logits before a token is drawn
    mask: NDArray[np.uint32] | None = None  # [ceil(vocab / 32)], bit i % 32 of word i // 32 allows
    # token i; None: all
    thinning: Thinning | None = None
    adapting: Adapting | None = None
    infill: InfillRule | None = None  # what leaves tokens out behind all else
    target: float | None = None  # the probability near which tokens are drawn, of this step

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def per_unit(self) -> float:
        """What logits are multiplied by where one is drawn from all; else 0."""
        return 0.0 if self.greedy or self.truncated else per_unit(self.temperature)

    @property
    def truncated(self) -> bool:
        """Whether some tokens are left out before one is drawn."""
        some = self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0
        return some or self.thinning is not None or self.looks_at_all

    @property
    def has_surprise(self) -> bool:
        """Whether it matters how much the token surprises."""
        if self.target is not None:
            return True
        return self.adapting is not None and self.adapting.mirostat != 0

    @property
    def looks_at_all(self) -> bool:
        """Whether how it is drawn depends on all logits, and no summary of them is enough."""
        if self.adapting is not None:
            return True
        return self.infill is not None or self.target is not None


def exact_logits(row: RowParams, lowered: int | None = 0) -> int:
    """Return how many of the largest logits decide all that comes of a row; 0: any of them may.

    For a row that draws from all these are the largest sums of logits and noise. `top_p`, `min_p`,
    `typical_p` and XTC choose among the `top_k` largest, and `min_p` compares with the very
    largest. Log probabilities look at others, `top_n_sigma`, `infill`, `target` and what is
    `adapting` at all. Where some logits are lowered first, as many more count: at least `top_k` of
    them stay what they are, and all others are less still.

    Args:
        row: how it is sampled; not its edits and mask.
        lowered: how many logits these lower, at most; None: they raise some, or forbid most.
    """
    count = 1 if row.greedy or not row.truncated else row.top_k
    if row.num_logprobs is not None or lowered is None or count is None:
        return 0
    if row.looks_at_all:
        return 0
    if row.thinning is not None and row.thinning.top_n_sigma and not row.greedy:
        return 0
    return count + lowered if count + lowered <= MOST_EXACT else 0


def exact_allowed(row: RowParams, lowered: int | None = 0) -> int:
    """Return how many of the largest logits decide, of those of tokens that the row may get.

    Args:
        row: how it is sampled; not its edits and mask.
        lowered: how many logits its edits lower, at most; None: they raise some.

    Returns:
        What `StepInputs.exact_logits` takes with `allowed_tokens`; 0: others count, too.
    """
    if row.num_logprobs is not None:
        return 0
    return exact_logits(row, lowered) or ALL_ALLOWED


def summary_scale(row: RowParams, *, is_edited: bool, is_masked: bool) -> float:
    """Return what the model should tell of a row's logits; see `contract.SUMMARY_SCALES`.

    Args:
        row: how it is sampled.
        is_edited: whether some of its logits are changed before.
        is_masked: whether most tokens may be forbidden; then little is known of what is left.
    """
    if row.num_logprobs is not None:
        return LOG2_E
    if is_masked and row.truncated and not row.greedy:
        return NO_SUMMARY
    if row.looks_at_all and not row.greedy:
        return NO_SUMMARY
    if is_edited or not row.truncated or row.greedy or row.top_k is not None or row.min_p > 0.0:
        return NO_SUMS
    if row.thinning is not None:
        return NO_SUMS
    return LOG2_E / max(row.temperature, LEAST_TEMPERATURE)
