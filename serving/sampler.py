"""Sampling: one token a row of logits.

Rows are independent of each other: what a row yields depends on its logits, its parameters and
its own random number, never on what else is in the batch. The random number is a hash of the
request's seed and the position, so nothing has to be kept between steps, but for what Mirostat
allows next (`adapting.Mirostat`), and a request that is preempted, or moved to another row, goes on
as if nothing had happened.

Native code does it, on as many threads as the caller says; NumPy where that was not built.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from onnxport.providers.memory import physical_cores
from onnxport.serving import numpy_sampler
from onnxport.serving.edits import Floats
from onnxport.serving.native.library import find_library
from onnxport.serving.native.sampler import NativeSampler
from onnxport.serving.row_params import RowParams
from onnxport.serving.sampled import RowLogprobs, Sampled

__all__ = [
    "RowLogprobs",
    "Sampled",
    "logprobs",
    "sample",
    "sample_greedy",
    "uniform",
]

MASK_64 = (1 << 64) - 1
WIDE = 1 << 19  # logits that are worth a second thread


def uniform(seed: int, position: int) -> float:
    """Return a random number in [0, 1), the same for the same seed and position.

    The output of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators,
    OOPSLA 2014) at `position`, in a stream that begins at the mixed seed.
    """
    state = _stream(seed) + (position + 1) * 0x9E3779B97F4A7C15
    return (_mix64(state) >> 11) * 2.0**-53


@lru_cache(maxsize=4096)
def _stream(seed: int) -> int:
    """Return where the stream of a seed begins; the same requests ask step after step."""
    return _mix64(seed)


def _mix64(value: int) -> int:
    value &= MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


@cache
def native_sampler(num_threads: int | None = None) -> NativeSampler | None:
    """Return the process's native sampler for so many threads; None where it was not built.

    Args:
        num_threads: most that work at once; None: as many as there are physical cores.
    """
    path = find_library()
    if path is None:
        return None
    return NativeSampler(path, num_threads=num_threads or physical_cores())


def sample_greedy(
    logits: Floats,
    num_threads: int | None = None,
    summaries: Floats | None = None,
    allowed: NDArray[np.int32] | None = None,
) -> Sampled:
    """Return the likeliest token of each row; of equals the one with the lowest id.

    Args:
        logits: float32 [num_rows, vocab], not changed.
        num_threads: see `native_sampler`.
        summaries: see `sample`.
        allowed: which tokens each row may get, `StepInputs.allowed_tokens`; None: all.
    """
    # Without summaries of few logits NumPy's own native code has the result earlier.
    pays = summaries is not None or allowed is not None or logits.size >= WIDE
    native = native_sampler(num_threads) if pays else None
    if native:
        return native.sample_greedy(logits, summaries, allowed)
    if allowed is not None:
        return numpy_sampler.sample(
            logits, [RowParams(mask=one) for one in allowed.view(np.uint32)]
        )
    return numpy_sampler.sample_greedy(logits)


def sample(
    logits: Floats,
    rows: Sequence[RowParams],
    num_threads: int | None = None,
    summaries: Floats | None = None,
) -> Sampled:
    """Sample one token a row.

    The changes come first, then temperature (as in vLLM). `top_n_sigma`, `min_p`, `top_k`,
    `typical_p`, `top_p` and XTC each choose among what the one before left. Of tokens with equal
    logits the lowest id counts as the likeliest. Log probabilities are of the logits as given.

    Args:
        logits: float32 [num_rows, vocab]; changed for the time of the call where rows ask for it.
        rows: the parameters of each row.
        num_threads: see `native_sampler`.
        summaries: what the model told of each row, contract.LOGITS_SUMMARIES, which the call may
            change to the same effect; a row gets the same token without. None: nothing.
    """
    native = native_sampler(num_threads)
    return native.sample(logits, rows, summaries) if native else numpy_sampler.sample(logits, rows)


def logprobs(
    logits: Floats,
    token_ids: Sequence[int],
    counts: Sequence[int],
    num_threads: int | None = None,
) -> list[RowLogprobs]:
    """Return the log probabilities and ranks of one token a row, and of the likeliest tokens.

    Args:
        logits: float32 [num_rows, vocab], unscaled.
        token_ids: one a row.
        counts: how many of the likeliest tokens to report, 0 or more; one a row.
        num_threads: see `native_sampler`.

    Raises:
        FloatingPointError: a row has NaN or no finite maximum.
    """
    return (native_sampler(num_threads) or numpy_sampler).logprobs(logits, token_ids, counts)
