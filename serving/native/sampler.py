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
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.contract import NO_SUMMARY, NO_SUMS, summary_floats
from onnxport.serving.drawing import Adapting, RowParams, Thinning
from onnxport.serving.edits import Addresses, Floats, RowEdits
from onnxport.serving.native.library import (
    BAD_TOKEN,
    CHANGES,
    CHOICE,
    DRAWN,
    NOT_FINITE,
    OUT_OF_MEMORY,
    REQUEST_SIZE,
    RESULTS,
    STEP,
    Batch,
    load_library,
)
from onnxport.serving.sampled import RowLogprobs, Sampled

LOGITS_PER_THREAD = 1 << 18  # to wake a thread for fewer costs more than it saves


_Result = tuple[int, int, float, float, int]  # token, rank, logprob, surprise, status


class _Asked(NamedTuple):
    """What the rows ask for; made of bytes, as most of them are there already in every step.

    Arrays of NumPy would do, but the model drives all code out of the caches between two steps, and
    a dozen of NumPy's functions take longer to come back than 32 rows take here.
    """

    requests: array[int]  # bytes, REQUEST_SIZE a row
    ends: list[int]  # of the likeliest tokens that each row asks for, one row behind the other
    kept: list[NDArray[Any]]  # what the requests point to


class _Call(NamedTuple):
    """What the library is called with, and where it answers.

    What the addresses in `batch` lead to is kept by `asked` and the caller.
    """

    batch: Batch
    threads: int
    asked: _Asked
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


_NO_CHANGES = bytes(CHANGES.size)
_UNTHINNED = Thinning()
_UNMOVED = Adapting()
_FIXED, _DYNAMIC, _NEAR, _DYNAMIC_NEAR = 0, 3, 4, 5  # csrc/request.h; 1 and 2 are Mirostat's


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
            call = self._call(logits, _ask_likeliest(logits, allowed), summaries)
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
        asked = _ask(rows, logits.shape[1])
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
        asked = _ask_about(token_ids, counts, logits.shape[1])
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

    def _call(self, logits: Floats, asked: _Asked, summaries: Floats | None = None) -> _Call:
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


def _ask(rows: Sequence[RowParams], vocab: int) -> _Asked:
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
    return _Asked(array("b", b"".join(parts)), ends, kept)


def _ask_likeliest(logits: Floats, allowed: NDArray[np.int32] | None) -> _Asked:
    """Return what rows ask for of which nothing but the likeliest token is wanted."""
    num_rows, vocab = logits.shape
    if allowed is not None:
        masks = allowed.view(np.uint32)
        assert len(masks) == num_rows
        return _ask([RowParams(mask=mask) for mask in masks], vocab)
    return _Asked(array("b", _likeliest(vocab) * num_rows), [0] * num_rows, [])


@lru_cache(maxsize=16)
def _likeliest(vocab: int) -> bytes:
    """Return what one such row asks for."""
    return _ask([RowParams()], vocab).requests.tobytes()


def _ask_about(token_ids: Sequence[int], counts: Sequence[int], vocab: int) -> _Asked:
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
    return _Asked(array("b", b"".join(parts)), ends, [])


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
