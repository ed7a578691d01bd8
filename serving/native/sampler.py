"""The library's sampler: the same interface and meaning as `numpy_sampler`.

A row's result has the same bits whatever else is in the batch, however many threads there are, and
whichever instruction set is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.drawing import RowParams
from onnxport.serving.edits import Floats, RowEdits
from onnxport.serving.native.library import (
    BAD_TOKEN,
    DRAWN,
    NOT_FINITE,
    OUT_OF_MEMORY,
    REQUEST,
    Batch,
    load_library,
)
from onnxport.serving.sampled import RowLogprobs, Sampled

LOGITS_PER_THREAD = 1 << 18  # to wake a thread for fewer costs more than it saves

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
        if any(row.edits is not None for row in rows) and not logits.flags.writeable:
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
    """Return what the rows ask for, and the arrays that it points to."""
    requests = np.zeros(len(rows), REQUEST)
    for name in ("temperature", "min_p", "top_p", "uniform", "greedy"):
        requests[name] = [getattr(row, name) for row in rows]
    for name, flag, numbers in (
        ("top_k", "has_top_k", [row.top_k for row in rows]),
        ("num_top", "has_logprobs", [row.num_logprobs for row in rows]),
    ):
        requests[flag] = [number is not None for number in numbers]
        requests[name] = [0 if number is None else min(number, vocab) for number in numbers]
    kept: list[NDArray[Any]] = []
    for place, row in enumerate(rows):
        if row.mask is not None:
            requests["mask"][place] = _pointer(_checked_mask(row.mask, vocab), np.uint32, kept)
    changed = [(place, row.edits) for place, row in enumerate(rows) if row.edits is not None]
    if changed:
        places, edits = zip(*changed, strict=True)
        _set_edits(requests, np.array(places), edits, kept)
    return requests, kept


def _set_edits(
    requests: Requests,
    places: NDArray[np.int64],
    edits: Sequence[RowEdits],
    kept: list[NDArray[Any]],
) -> None:
    """Point to what changes in the rows of some places."""
    for size, columns in (
        ("num_biased", {"bias_ids": np.int64, "bias": np.float32}),
        ("num_banned", {"banned": np.int64}),
        ("num_seen", {"seen": np.int64, "counts": np.float32}),
    ):
        for name, dtype in columns.items():
            arrays = [getattr(edit, name) for edit in edits]
            sizes = np.array([len(array) for array in arrays])
            requests[size][places] = sizes
            requests[name][places] = _pointers(arrays, sizes, dtype, kept)
    for name in ("repetition", "frequency", "presence"):
        requests[name][places] = [getattr(edit, name) for edit in edits]
    for place, edit in zip(places, edits, strict=True):
        if edit.allowed is not None:
            requests["num_allowed"][place] = len(edit.allowed)
            requests["allowed"][place] = _pointer(edit.allowed, np.int64, kept)


def _pointers(
    arrays: Sequence[NDArray[Any]], sizes: NDArray[Any], dtype: type, kept: list[NDArray[Any]]
) -> NDArray[np.uintp]:
    """Return the addresses of arrays in a common copy of that type, which is kept alive.

    To ask for the address of an array costs more than to copy a thousand tokens.
    """
    joined: NDArray[Any] = np.concatenate(arrays).astype(dtype, copy=False)
    ends: NDArray[np.uintp] = np.cumsum(sizes).astype(np.uintp)
    first = _pointer(joined, dtype, kept)
    starts: NDArray[np.uintp] = first + (ends - sizes.astype(np.uintp)) * joined.itemsize
    return starts


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
