"""Logits that stay in a device's memory until it is known how many of them the host needs.

All logits of 64 rows of a vocabulary of 150,000 are 39 MB, which take longer to bring to the host
and to look through than a small model takes to compute them. Where `StepInputs.exact_logits` says
that a few of each row decide, the device selects these, and the host gets a row in which all others
are LEAST, with a summary beside it, so that nobody reads them. Where any may be drawn, all of
them are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs import contract
from onnxport.graphs.logit_selection import (
    COPY,
    COUNT,
    SUMS,
    TOKENS,
    VALUES,
    copy_graph,
    largest_graph,
)
from onnxport.providers.base import StepInputs
from onnxport.providers.ort import Target, quiet_options, start_session

LEAST: Final = np.float32(-1e38)  # a logit that nobody gets, and finite after any penalty
# With fewer logits than this the copy is done before a selection is.
FEWEST_LOGITS: Final = 1 << 19
# How many are selected: the smallest of these that is larger than what any row needs, for if the
# last one equals what a row needs, more may.
COUNTS: Final = (8, 32, 96)
MOST_LOCKED: Final = 256 << 20  # bytes of logits that keep their place; that of more is freed
GROUP: Final = 64  # logits of a group in contract.LOGITS_SUMMARIES
CHUNK: Final = 1024  # and of a chunk

# Keeps an array where a device can read and write it by itself; what is returned lets go of it.
PageLock = Callable[[NDArray[Any]], Callable[[], None]]


class DeviceLogits:
    """A place for logits in a device's memory, and the ways from there to the host.

    What fails on the device is raised as ONNX Runtime raises it.
    """

    def __init__(
        self,
        vocab_size: int,
        target: Target,
        page_lock: PageLock | None = None,
        *,
        fewest: int = FEWEST_LOGITS,
    ) -> None:
        """Start the graphs.

        Args:
            vocab_size: logits of a row.
            target: the execution provider that computes them.
            page_lock: lets a device copy into host memory without help; None: it cannot.
            fewest: logits of a step from which on some are selected.
        """
        self._vocab_size = vocab_size
        self._target = target
        self._page_lock = page_lock
        self._fewest = fewest
        self._copy, self._largest = (
            start_session(model.SerializeToString(), None, quiet_options(), target)
            for model in (copy_graph(vocab_size), largest_graph(vocab_size))
        )
        # onnxruntime.OrtValue float32 [rows, vocab], of the device.
        self._fixed: Any = None  # what `reserve` made
        self._memory: Any = None  # for more rows than that
        self._all = np.empty((0, vocab_size), np.float32)
        self._unlock: Callable[[], None] | None = None  # for `_all`
        self._few = np.empty((0, vocab_size), np.float32)  # LEAST but for `_selected`
        self._selected: tuple[NDArray[np.intp], NDArray[np.int64]] | None = None
        self._row_numbers = np.arange(0)[:, None]

    def bind(self, binding: Any, rows: int) -> None:
        """Let a session's next run write contract.LOGITS here, float32 [rows, vocab]."""
        if rows > _rows_of(self._fixed) and rows > _rows_of(self._memory):
            room = _room(rows, _rows_of(self._memory), self._vocab_size)
            self._memory = self._allocated(room)
        place = (self._target.memory, self._target.device_id)
        shape, address = (rows, self._vocab_size), self._memory_of(rows).data_ptr()
        binding.bind_output(contract.LOGITS, *place, np.float32, shape, address)

    def reserve(self, rows: int) -> None:
        """Make a place for steps of up to so many rows, which stays where it is. To be called once.

        What was recorded on a device goes on to write there; larger steps go to another place.
        """
        assert self._fixed is None, "there is a place already"
        self._fixed = self._allocated(rows)

    def fetch(self, rows: int, inputs: StepInputs) -> NDArray[np.float32]:
        """Bring the first rows to the host, as much of them as the step needs.

        Args:
            rows: how many were written last.
            inputs: of the step, not padded; its `summaries` are written.

        Returns:
            float32 [rows, vocab], see `providers.base.Model.run`; the next call may overwrite it.
        """
        needed = self._needed(rows, inputs)
        if needed is not None:
            found = self._select(rows, needed, inputs)
            if found is not None:
                return found
        if inputs.summaries is not None:
            inputs.summaries[:, -1] = contract.NO_SUMMARY
        return self._copied(rows)

    def close(self) -> None:
        """Free what is held."""
        self._fixed = self._memory = None
        self._copy = self._largest = None
        self._release()

    def _needed(self, rows: int, inputs: StepInputs) -> NDArray[np.int32] | None:
        """How many logits of each row decide; None: all of some row, or too few to select from."""
        exact = inputs.exact_logits
        if exact is None or rows * self._vocab_size < self._fewest:
            return None
        if inputs.allowed_tokens is not None or exact.min() < 1 or exact.max() >= COUNTS[-1]:
            return None
        if inputs.races is not None and inputs.races[:, 1].any():
            return None
        return exact

    def _select(
        self, rows: int, needed: NDArray[np.int32], inputs: StepInputs
    ) -> NDArray[np.float32] | None:
        """The largest logits of each row among LEAST; None where more than these may decide."""
        most = int(needed.max())
        count = next(one for one in COUNTS if one > most)
        if count > self._vocab_size:
            return None
        values = np.empty((rows, count), np.float32)
        tokens = np.empty((rows, count), np.int64)
        sums = np.empty(rows, np.float32)
        binding = self._bound(self._largest, rows)
        binding.bind_cpu_input(COUNT, np.array([count], np.int64))
        for name, array in ((VALUES, values), (TOKENS, tokens), (SUMS, sums)):
            kind, shape, address = array.dtype.type, array.shape, array.ctypes.data
            binding.bind_output(name, "cpu", 0, kind, shape, address)
        self._largest.run_with_iobinding(binding)
        if np.isnan(sums).any() or not np.isfinite(values[:, 0]).all():
            return None
        # More may equal the last, and so be needed.
        last = values[np.arange(rows), needed - 1]
        if not ((last > values[:, -1]) & (last > LEAST)).all():
            return None
        return self._spread(values, tokens, inputs)

    def _spread(
        self, values: NDArray[np.float32], tokens: NDArray[np.int64], inputs: StepInputs
    ) -> NDArray[np.float32]:
        rows = len(values)
        if len(self._few) < rows:
            room = _room(rows, len(self._few), self._vocab_size)
            self._few = np.full((room, self._vocab_size), LEAST, np.float32)
            self._row_numbers = np.arange(room)[:, None]
            self._selected = None
        if self._selected is not None:
            self._few[self._selected] = LEAST
        self._selected = self._row_numbers[:rows], tokens
        self._few[self._selected] = values
        if inputs.summaries is not None:
            self._summarize(values, tokens, inputs.summaries)
            told = contract.NO_SUMMARY if inputs.summary_scales is None else inputs.summary_scales
            inputs.summaries[:, -1] = np.minimum(told, contract.NO_SUMS)
        return self._few[:rows]

    def _summarize(
        self,
        values: NDArray[np.float32],
        tokens: NDArray[np.int64],
        summaries: NDArray[np.float32],
    ) -> None:
        """Tell of rows of LEAST with few other values what contract.LOGITS_SUMMARIES does."""
        chunks = -(-self._vocab_size // CHUNK)
        groups = chunks * (CHUNK // GROUP)
        summaries[:, :-1] = LEAST
        summaries[:, -(-self._vocab_size // GROUP) : groups] = -np.inf  # of no logits
        # The largest last: of several values that are written to one place, it stays.
        rows, backwards = self._row_numbers[: len(values)], values[:, ::-1]
        summaries[rows, tokens[:, ::-1] // GROUP] = backwards
        summaries[rows, groups + tokens[:, ::-1] // CHUNK] = backwards

    def _copied(self, rows: int) -> NDArray[np.float32]:
        """All logits."""
        if rows > MOST_LOCKED // (4 * self._vocab_size):
            found = self._copied_to(np.empty((rows, self._vocab_size), np.float32))
            if rows > _rows_of(self._fixed):
                self._memory = None
            return found
        if len(self._all) < rows:
            self._release()
            room = _room(rows, len(self._all), self._vocab_size)
            self._all = np.empty((room, self._vocab_size), np.float32)
            if self._page_lock is not None:
                self._unlock = self._page_lock(self._all)
        return self._copied_to(self._all[:rows])

    def _copied_to(self, found: NDArray[np.float32]) -> NDArray[np.float32]:
        binding = self._bound(self._copy, len(found))
        binding.bind_output(COPY, "cpu", 0, np.float32, found.shape, found.ctypes.data)
        self._copy.run_with_iobinding(binding)
        return found

    def _bound(self, session: Any, rows: int) -> Any:
        """A binding of a session to the first rows."""
        binding = session.io_binding()
        place = (self._target.memory, self._target.device_id)
        shape, address = (rows, self._vocab_size), self._memory_of(rows).data_ptr()
        binding.bind_input(contract.LOGITS, *place, np.float32, shape, address)
        return binding

    def _memory_of(self, rows: int) -> Any:
        """Where a step of so many rows has its logits."""
        return self._fixed if rows <= _rows_of(self._fixed) else self._memory

    def _allocated(self, rows: int) -> Any:
        import onnxruntime as ort

        return ort.OrtValue.ortvalue_from_shape_and_type(
            (rows, self._vocab_size), np.float32, self._target.memory, self._target.device_id
        )

    def _release(self) -> None:
        if self._unlock is not None:
            self._unlock()
            self._unlock = None


def _rows_of(memory: Any) -> int:
    return 0 if memory is None else int(memory.shape()[0])


def _room(rows: int, had: int, vocab_size: int) -> int:
    """Rows to make room for where there was room for fewer: twice as many, up to 64 MiB."""
    return max(rows, min(2 * had, (64 << 20) // (4 * vocab_size)))
