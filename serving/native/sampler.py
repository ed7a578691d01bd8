"""The library's sampler: the same interface and meaning as `numpy_sampler`.

A row's result has the same bits whatever else is in the batch, however many threads there are, and
whichever instruction set is used.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.contract import NO_SUMMARY, NO_SUMS, summary_floats
from onnxport.serving.edits import Floats
from onnxport.serving.native.asking import Asked, ask, ask_about, ask_likeliest
from onnxport.serving.native.library import (
    BAD_TOKEN,
    DRAWN,
    NOT_FINITE,
    OUT_OF_MEMORY,
    REQUEST_SIZE,
    RESULTS,
    Batch,
    load_library,
)
from onnxport.serving.row_params import RowParams
from onnxport.serving.sampled import RowLogprobs, Sampled

LOGITS_PER_THREAD = 1 << 18  # to wake a thread for fewer costs more than it saves


_Result = tuple[int, int, float, float, int]  # token, rank, logprob, surprise, status


class _Call(NamedTuple):
    """What the library is called with, and where it answers.

    What the addresses in `batch` lead to is kept by `asked` and the caller.
    """

    batch: Batch
    threads: int
    asked: Asked
    top_ids: array[int]
    top_logprobs: array[float]


class _Greedy(threading.local):
    """A thread's last call for likeliest tokens.

    A model's logits lie where they lay the step before, so that it can be made again.
    """

    call: _Call | None = None
    arrays: tuple[Callable[[], NDArray[Any] | None], ...] = ()  # that it was for

    def fits(self, *arrays: NDArray[Any] | None) -> bool:
        """Whether it was for these very arrays. One that is gone fits nothing, nor no array."""
        if self.call is None:
            return False
        return all(
            had is _no_array if array is None else had() is array
            for had, array in zip(self.arrays, arrays, strict=True)
        )

    def keep(self, call: _Call, *arrays: NDArray[Any] | None) -> None:
        """Keep a call for these arrays; None: it had none."""
        self.call = call
        self.arrays = tuple(_no_array if one is None else weakref.ref(one) for one in arrays)


def _no_array() -> None:
    return None


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
        self._greedy = _Greedy()

    def fence(self) -> None:
        """Let other threads see what was written before it before what is written after it."""
        self._library.onnxport_sampling_fence()

    def sample_greedy(
        self,
        logits: Floats,
        summaries: Floats | None = None,
        allowed: NDArray[np.int32] | None = None,
    ) -> Sampled:
        """See `sampler.sample_greedy`."""
        kept, call = self._greedy, self._greedy.call
        if call is None or not kept.fits(logits, summaries, allowed):
            logits = _rows_of_floats(logits)
            call = self._call(logits, ask_likeliest(logits, allowed), summaries)
            kept.keep(call, logits, summaries, allowed)
        results, invalid = self._run(call)
        tokens = [one[0] for one in results]
        for row in invalid:
            tokens[row] = 0  # not that of the call before
        return Sampled(tokens, None, invalid)

    def sample(
        self, logits: Floats, rows: Sequence[RowParams], summaries: Floats | None = None
    ) -> Sampled:
        """See `sampler.sample`."""
        asked = ask(rows, logits.shape[1])
        if not logits.flags.writeable and any(row.edits is not None for row in rows):
            logits = logits.copy()
        logits = _rows_of_floats(logits)
        call = self._call(logits, asked, summaries)
        results, invalid = self._run(call)
        logprobs: list[RowLogprobs | None] | None = None
        asking = [row.num_logprobs is not None for row in rows]
        if any(asking):
            found = _row_logprobs(results, call)
            logprobs = [one if yes else None for one, yes in zip(found, asking, strict=True)]
            for row in invalid:
                logprobs[row] = None
        surprises: list[float] | None = None
        if any(row.has_surprise for row in rows):
            surprises = [one[3] for one in results]
        return Sampled([one[0] for one in results], logprobs, invalid, surprises)

    def logprobs(
        self, logits: Floats, token_ids: Sequence[int], counts: Sequence[int]
    ) -> list[RowLogprobs]:
        """See `sampler.logprobs`."""
        asked = ask_about(token_ids, counts, logits.shape[1])
        logits = _rows_of_floats(logits)
        call = self._call(logits, asked)
        results, invalid = self._run(call)
        if invalid:
            raise FloatingPointError(
                f"the model's logits of row {invalid[0]} are not finite numbers"
            )
        return _row_logprobs(results, call)

    def summarize(self, logits: Floats, scales: Sequence[float]) -> Floats:
        """Return what a model would tell of rows of logits, contract.LOGITS_SUMMARIES.

        Args:
            logits: float32 [num_rows, vocab].
            scales: contract.SUMMARY_SCALES, one a row.
        """
        logits = np.ascontiguousarray(logits, np.float32)
        told = np.full((len(logits), summary_floats(logits.shape[1])), np.nan, np.float32)
        for row, to, scale in zip(logits, told, scales, strict=True):
            if scale < NO_SUMS:
                to[-1] = NO_SUMMARY
                continue
            self._library.onnxport_sampling_summarize(
                self._kernels, row.ctypes.data, len(row), scale, to.ctypes.data
            )
        return told

    def _call(self, logits: Floats, asked: Asked, summaries: Floats | None = None) -> _Call:
        """Return a call for all rows of logits, which must outlive it, as must the summaries."""
        num_rows, vocab = logits.shape
        assert len(asked.requests) == num_rows * REQUEST_SIZE
        room = bytes(8 * asked.ends[-1]) if asked.ends else b""
        top_ids, top_logprobs = array("q", room), array("d", room)
        batch = Batch(
            self._kernels,
            logits.ctypes.data,
            None if summaries is None else _checked_summaries(summaries, logits).ctypes.data,
            asked.requests.buffer_info()[0],
            top_ids.buffer_info()[0],
            top_logprobs.buffer_info()[0],
            num_rows,
            logits.strides[0] // 4,
            0 if summaries is None else summaries.strides[0] // 4,
            vocab,
        )
        threads = min(self.num_threads, num_rows, logits.size // LOGITS_PER_THREAD)
        return _Call(batch, threads, asked, top_ids, top_logprobs)

    def _run(self, call: _Call) -> tuple[list[_Result], tuple[int, ...]]:
        """Do all rows.

        Returns:
            What came of them, and which could not be drawn from.

        Raises:
            IndexError: the vocabulary lacks a token that a row names.
            MemoryError: there is none left.
        """
        call.batch.next = 0
        self._library.onnxport_sampling_run(ctypes.byref(call.batch), call.threads)
        results: list[_Result] = list(RESULTS.iter_unpack(call.asked.requests))
        failed = {row: one[4] for row, one in enumerate(results) if one[4] != DRAWN}
        for row, status in failed.items():
            if status == OUT_OF_MEMORY:
                raise MemoryError("no memory is left to sample with")
            if status == BAD_TOKEN:
                raise IndexError(
                    f"row {row} names a token that the vocabulary of {call.batch.vocab} lacks"
                )
            assert status == NOT_FINITE
        return results, tuple(failed)


def _rows_of_floats(logits: Floats) -> Floats:
    """Return the logits as the library reads them: themselves, or a copy."""
    if logits.dtype != np.float32 or logits.strides[1] != 4 or logits.strides[0] % 4:
        return np.ascontiguousarray(logits, np.float32)
    return logits


def _checked_summaries(summaries: Floats, logits: Floats) -> Floats:
    """Return them; raises ValueError if they cannot be of these logits."""
    rows, vocab = logits.shape
    fits = summaries.shape == (rows, summary_floats(vocab)) and summaries.dtype == np.float32
    if not fits or summaries.strides[1] != 4 or not summaries.flags.writeable:
        raise ValueError(
            f"summaries of {rows} rows of {vocab} logits are float32 "
            f"[{rows}, {summary_floats(vocab)}], contiguous rows that may be changed; found "
            f"{summaries.dtype} {list(summaries.shape)}, in steps of {summaries.strides} bytes"
        )
    return summaries


def _row_logprobs(results: Sequence[_Result], call: _Call) -> list[RowLogprobs]:
    """Return the log probabilities of rows; void where a row did not ask for them."""
    found: list[RowLogprobs] = []
    begin = 0
    for (token, rank, logprob, _, _), end in zip(results, call.asked.ends, strict=True):
        top_ids, top_values = tuple(call.top_ids[begin:end]), tuple(call.top_logprobs[begin:end])
        found.append(RowLogprobs(token, logprob, rank, top_ids, top_values))
        begin = end
    return found
