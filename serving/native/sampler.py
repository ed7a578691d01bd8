"""The library's sampler: the same interface and meaning as `numpy_sampler`.

A row's result has the same bits whatever else is in the batch, however many threads there are, and
whichever instruction set is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.drawing import RowParams
from onnxport.serving.edits import Addresses, Floats, RowEdits
from onnxport.serving.native.library import (
    BAD_TOKEN,
    CHANGES,
    CHOICE,
    DRAWN,
    NOT_FINITE,
    OUT_OF_MEMORY,
    PACKED_CHANGES,
    REQUEST,
    STEP,
    Batch,
    load_library,
)
from onnxport.serving.sampled import RowLogprobs, Sampled

LOGITS_PER_THREAD = 1 << 18  # to wake a thread for fewer costs more than it saves

_NO_CHANGES = bytes(CHANGES.itemsize)
_NEW_STEP = bytes(STEP.itemsize)

Requests = NDArray[np.void]  # REQUEST [num_rows]


class NativeSampler:
    """Samples the rows of a step on a few threads.

    The threads are the library's: it starts them when they are first needed, and all samplers of a
    process share them.
    """

    def __init__(self, path: Path, isa: str | None = None, num_threads: int = 1) -> None:
        """Load the library.

        Args:
            path: of the library.
            isa: the instruction set, "avx512", "avx2" or "portable"; None: the best there is.
            num_threads: most threads that work at once, the caller's among them.

        Raises:
            ValueError: this processor lacks the instruction set.
        """
        self._library = load_library(path)
        self._kernels = self._library.onnxport_sampling_kernels(isa and isa.encode())
        if self._kernels is None:
            raise ValueError(f"this processor cannot run {isa!r}; leave the instruction set out")
        self.isa: str = self._library.onnxport_sampling_name(self._kernels).decode()
        self.num_threads = num_threads

    def sample_greedy(self, logits: Floats) -> Sampled:
        """See `sampler.sample_greedy`."""
        requests = np.zeros(len(logits), REQUEST)
        requests["greedy"] = 1
        self._run(logits, requests)
        return Sampled(requests["token"].tolist(), None, _invalid(requests))

    def sample(self, logits: Floats, rows: Sequence[RowParams]) -> Sampled:
        """See `sampler.sample`."""
        requests, kept = _requests(rows, logits.shape[1])
        if not logits.flags.writeable and any(row.edits is not None for row in rows):
            logits = logits.copy()
        tops = self._run(logits, requests)
        del kept  # until here the requests point to it
        logprobs: list[RowLogprobs | None] | None = None
        if requests["has_logprobs"].any():
            reports = requests["has_logprobs"] & (requests["status"] == DRAWN)
            places = np.flatnonzero(reports).tolist()
            logprobs = [None] * len(rows)
            for place, found in zip(places, _row_logprobs(requests[places], *tops), strict=True):
                logprobs[place] = found
        return Sampled(requests["token"].tolist(), logprobs, _invalid(requests))

    def logprobs(
        self, logits: Floats, token_ids: Sequence[int], counts: Sequence[int]
    ) -> list[RowLogprobs]:
        """See `sampler.logprobs`."""
        requests = np.zeros(len(token_ids), REQUEST)
        requests["has_token"] = requests["has_logprobs"] = 1
        requests["token"] = token_ids
        requests["num_top"] = np.minimum(counts, logits.shape[1])
        tops = self._run(logits, requests)
        if invalid := _invalid(requests):
            raise FloatingPointError(
                f"the model's logits of row {invalid[0]} are not finite numbers"
            )
        return _row_logprobs(requests, *tops)

    def _run(self, logits: Floats, requests: Requests) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Do all rows.

        Returns:
            The likeliest tokens and their log probabilities, of all rows one behind the other.

        Raises:
            IndexError: the vocabulary lacks a token that a row names.
            MemoryError: there is none left.
        """
        if logits.dtype != np.float32 or logits.strides[1] != 4 or logits.strides[0] % 4:
            logits = np.ascontiguousarray(logits, np.float32)
        assert len(logits) == len(requests)
        ends = np.cumsum(requests["num_top"])
        requests["top_begin"] = ends - requests["num_top"]
        size = int(ends[-1]) if len(ends) else 0
        top_ids, top_logprobs = np.empty(size, np.int64), np.empty(size)
        batch = Batch(
            kernels=self._kernels,
            logits=logits.ctypes.data,
            requests=requests.ctypes.data,
            top_ids=top_ids.ctypes.data,
            top_logprobs=top_logprobs.ctypes.data,
            num_rows=len(requests),
            stride=logits.strides[0] // 4,
            vocab=logits.shape[1],
        )
        threads = min(self.num_threads, len(requests), logits.size // LOGITS_PER_THREAD)
        self._library.onnxport_sampling_run(ctypes.byref(batch), threads)
        worst = int(requests["status"].max(initial=0))
        if worst == OUT_OF_MEMORY:
            raise MemoryError("no memory is left to sample with")
        if worst == BAD_TOKEN:
            raise IndexError(
                f"row {int(requests['status'].argmax())} names a token that the vocabulary of "
                f"{logits.shape[1]} lacks"
            )
        return top_ids, top_logprobs


def _requests(rows: Sequence[RowParams], vocab: int) -> tuple[Requests, list[NDArray[Any]]]:
    """Return what the rows ask for, and the arrays that it points to.

    A step does this for every row, so it is made of bytes, most of which are there already.
    """
    kept: list[NDArray[Any]] = []
    parts: list[bytes] = []
    uniforms: list[float] = []
    masks: list[tuple[int, int]] = []
    for place, row in enumerate(rows):
        temperature, top_k, top_p, uniform, num_logprobs, min_p, edits, mask = row
        parts.append(_choice(temperature, top_k, top_p, num_logprobs, min_p, vocab))
        parts.append(_NO_CHANGES if edits is None else _changes(edits, kept))
        parts.append(_NEW_STEP)
        uniforms.append(uniform)
        if mask is not None:
            masks.append((place, _pointer(_checked_mask(mask, vocab), np.uint32, kept)))
    requests: Requests = np.frombuffer(bytearray(b"".join(parts)), REQUEST)
    requests["uniform"] = uniforms
    for place, address in masks:
        requests["mask"][place] = address
    return requests, kept


@lru_cache(maxsize=4096)
def _choice(
    temperature: float,
    top_k: int | None,
    top_p: float,
    num_logprobs: int | None,
    min_p: float,
    vocab: int,
) -> bytes:
    """Return what stays the same from step to step, a CHOICE."""
    choice = np.zeros((), CHOICE)
    choice["temperature"], choice["top_p"], choice["min_p"] = temperature, top_p, min_p
    choice["greedy"] = RowParams(temperature, top_k).greedy
    if top_k is not None:
        choice["has_top_k"], choice["top_k"] = 1, min(top_k, vocab)
    if num_logprobs is not None:
        choice["has_logprobs"], choice["num_top"] = 1, min(num_logprobs, vocab)
    return choice.tobytes()


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
    return PACKED_CHANGES.pack(*at, *sizes, repetition, presence, frequency, 0.0)


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


def _invalid(requests: Requests) -> tuple[int, ...]:
    """Return the rows that could not be drawn from."""
    return tuple(np.flatnonzero(requests["status"] == NOT_FINITE).tolist())


def _row_logprobs(
    requests: Requests, top_ids: NDArray[np.int64], top_logprobs: NDArray[np.float64]
) -> list[RowLogprobs]:
    """Return the log probabilities that rows asked for and got."""
    ids, values = top_ids.tolist(), top_logprobs.tolist()
    columns = [requests[name].tolist() for name in ("token", "logprob", "rank", "top_begin")]
    ends = (requests["top_begin"] + requests["num_top"]).tolist()
    return [
        RowLogprobs(token, logprob, rank, tuple(ids[begin:end]), tuple(values[begin:end]))
        for token, logprob, rank, begin, end in zip(*columns, ends, strict=True)
    ]
