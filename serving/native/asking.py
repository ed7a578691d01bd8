"""What the rows of a call ask of the library, in the bytes that it reads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.edits import Addresses, Floats, RowEdits
from onnxport.serving.native.library import (
    CHANGES,
    CHOICE,
    DRAWN,
    STEP,
)
from onnxport.serving.row_params import Adapting, RowParams, Thinning

_NO_CHANGES = bytes(CHANGES.size)
_UNTHINNED = Thinning()
_UNMOVED = Adapting()
_FIXED, _DYNAMIC, _NEAR, _DYNAMIC_NEAR = 0, 3, 4, 5  # csrc/request.h; 1 and 2 are Mirostat's


class Asked(NamedTuple):
    """What the rows ask for; made of bytes, as most of them are there already in every step.

    Arrays of NumPy would do, but the model drives all code out of the caches between two steps, and
    a dozen of NumPy's functions take longer to come back than 32 rows take here.
    """

    requests: array[int]  # bytes, REQUEST_SIZE a row
    ends: list[int]  # of the likeliest tokens that each row asks for, one row behind the other
    kept: list[NDArray[Any]]  # what the requests point to


def ask(rows: Sequence[RowParams], vocab: int) -> Asked:
    """Return what rows ask for that are to be drawn."""
    kept: list[NDArray[Any]] = []
    parts: list[bytes] = []
    ends: list[int] = []
    end = 0
    for row in rows:
        assert row.infill is None  # see `infill_sampler.filled`
        temperature, top_k, top_p, uniform, num_logprobs, min_p, edits, mask, _, moves, _, aim = row
        mu = 0.0
        if moves is not None:  # of which mu is another one each time
            mu, moves = moves.mu, moves._replace(mu=0.0)
        kind = _kind(moves)
        if aim is not None:
            assert kind in (_FIXED, _DYNAMIC)  # Mirostat comes in place of all else
            mu, kind = aim, _NEAR if kind == _FIXED else _DYNAMIC_NEAR
        choice = (temperature, top_k, top_p, num_logprobs, min_p, row.thinning, moves, kind)
        parts.append(_choice(*choice, vocab))
        parts.append(_NO_CHANGES if edits is None else _changes(edits, kept))
        at = 0 if mask is None else _pointer(_checked_mask(mask, vocab), np.uint32, kept)
        parts.append(STEP.pack(at, uniform, mu, 0, end, 0, 0.0, 0.0, DRAWN))
        if num_logprobs:
            end += min(num_logprobs, vocab)
        ends.append(end)
    return Asked(array("b", b"".join(parts)), ends, kept)


def ask_likeliest(logits: Floats, allowed: NDArray[np.int32] | None) -> Asked:
    """Return what rows ask for of which nothing but the likeliest token is wanted."""
    num_rows, vocab = logits.shape
    if allowed is not None:
        masks = allowed.view(np.uint32)
        assert len(masks) == num_rows
        return ask([RowParams(mask=mask) for mask in masks], vocab)
    return Asked(array("b", _likeliest(vocab) * num_rows), [0] * num_rows, [])


@lru_cache(maxsize=16)
def _likeliest(vocab: int) -> bytes:
    """Return what one such row asks for."""
    return ask([RowParams()], vocab).requests.tobytes()


def ask_about(token_ids: Sequence[int], counts: Sequence[int], vocab: int) -> Asked:
    """Return what rows ask for whose tokens are known."""
    parts: list[bytes] = []
    ends: list[int] = []
    end = 0
    for token_id, count in zip(token_ids, counts, strict=True):
        num_top = min(count, vocab)
        parts.append(
            CHOICE.pack(*(0.0, 0.0, 1.0, *_UNTHINNED, 0.0, 1.0, 0, num_top, 0, 0, 1, 1, 0, _FIXED))
        )
        parts.append(_NO_CHANGES)
        parts.append(STEP.pack(0, 0.0, 0.0, token_id, end, 0, 0.0, 0.0, DRAWN))
        end += num_top
        ends.append(end)
    return Asked(array("b", b"".join(parts)), ends, [])


def _kind(adapting: Adapting | None) -> int:
    """Return what of a row's sampling depends on all of its logits, as the library numbers it."""
    return _FIXED if adapting is None else adapting.mirostat or _DYNAMIC


@lru_cache(maxsize=4096)
def _choice(
    temperature: float,
    top_k: int | None,
    top_p: float,
    num_logprobs: int | None,
    min_p: float,
    thinning: Thinning | None,
    adapting: Adapting | None,
    kind: int,
    vocab: int,
) -> bytes:
    """Return what stays the same from step to step, a CHOICE."""
    least_temperature, exponent, _, _ = adapting or _UNMOVED
    return CHOICE.pack(
        temperature,
        min_p,
        top_p,
        *(thinning or _UNTHINNED),
        least_temperature,
        exponent,
        0 if top_k is None else min(top_k, vocab),
        0 if num_logprobs is None else min(num_logprobs, vocab),
        RowParams(temperature, top_k).greedy,
        top_k is not None,
        False,
        num_logprobs is not None,
        thinning is not None,
        kind,
    )


def _changes(edits: RowEdits, kept: list[NDArray[Any]]) -> bytes:
    """Return what changes in the logits of a row, a CHANGES."""
    bias_ids, bias, banned, seen, counts, repetition, presence, frequency, allowed, at = edits
    assert len(bias_ids) == len(bias)
    assert len(seen) == len(counts)
    if at is None:
        at = Addresses(
            _pointer(bias_ids, np.int64, kept),
            _pointer(bias, np.float32, kept),
            _pointer(banned, np.int64, kept),
            _pointer(seen, np.int64, kept),
            _pointer(counts, np.float32, kept),
            0 if allowed is None else _pointer(allowed, np.int64, kept),
        )
    num_allowed = 0 if allowed is None else len(allowed)
    sizes = (len(bias_ids), len(banned), len(seen), num_allowed)
    return CHANGES.pack(*at, *sizes, repetition, presence, frequency, 0.0)


def _pointer(array: NDArray[Any], dtype: type, kept: list[NDArray[Any]]) -> int:
    """Return the address of an array, contiguous and of that type, which is kept alive."""
    array = np.ascontiguousarray(array, dtype)
    kept.append(array)
    return array.ctypes.data


def _checked_mask(mask: NDArray[np.uint32], vocab: int) -> NDArray[np.uint32]:
    """Return a mask; raises ValueError if it is too short for the vocabulary."""
    if len(mask) * 32 < vocab:
        raise ValueError(f"a mask has {len(mask)} words; {vocab} tokens need {-(-vocab // 32)}")
    return mask
