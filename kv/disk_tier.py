"""K/V on disk: the tier that outlives the process, and that other providers read."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from onnxport.kv.disk_file import KEY_BYTES, DiskFormat, Entry
from onnxport.kv.disk_folder import DiskFolder, FindFault, no_fault

QUEUE_BYTES: Final = 64 << 20
LAST_WRITE_S: Final = 5.0  # that `close` gives the write in progress, of one entry


@dataclass(frozen=True, slots=True)
class _Queued:
    entry: Entry
    used_ns: int


class DiskTier:
    """Entries in a folder, written by a thread of its own so that `put` never waits for the disk.

    All methods belong to one thread. `get` reads on that thread, some 0.5 ms for 400 KB. What is
    queued is found by `get` and `in` as if it were written; a process that ends without `close`
    loses it. The folder and its rules are `disk_folder`'s, a file's bytes `disk_file`'s.
    """

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        format_: DiskFormat,
        *,
        queue_bytes: int = QUEUE_BYTES,
        find_fault: FindFault = no_fault,
    ) -> None:
        """Open the folder and start the writer.

        Args:
            folder: shared by any number of models and processes; created where it is missing.
            capacity_bytes: most bytes of entries in it, of all models.
            format_: of the entries.
            queue_bytes: contents that may wait to be written; the queue takes one more entry
                until it holds that many.
            find_fault: returns why an entry that was read is of no use; None: it is.

        Raises:
            CapacityError: the capacity is below one entry.
            OnnxportError: the folder cannot be created, read or written.
        """
        self._folder = DiskFolder(folder, capacity_bytes, format_, find_fault)
        self._queue_bytes = queue_bytes
        self._changed = threading.Condition()  # over all below
        self._queue: OrderedDict[bytes, _Queued] = OrderedDict()  # the first is being written
        self._queued_bytes = 0
        self._closed = False
        self.num_dropped = 0  # entries that found the queue full, or that `close` had no time for
        self._thread = threading.Thread(
            target=self._write_all, name="onnxport-kv-disk", daemon=True
        )
        self._thread.start()

    @property
    def format(self) -> DiskFormat:
        """Of the entries."""
        return self._folder.format

    @property
    def capacity_bytes(self) -> int:
        """Most bytes of entries in the folder, of all models."""
        return self._folder.capacity_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the entries in the folder, of all models, as far as this process knows."""
        return self._folder.num_bytes

    @property
    def num_errors(self) -> int:
        """Files that were corrupt or foreign, and reads and writes that failed."""
        return self._folder.num_errors

    def __contains__(self, key: bytes) -> bool:
        """Whether the entry is queued, or on disk as far as this process knows; no disk access.

        What another process wrote since the last look at the folder is not seen here; `get`
        finds it.
        """
        return key in self._queue or key in self._folder

    def path(self, key: bytes) -> Path:
        """The file of the entry of `key`, which need not be there."""
        return self._folder.path(key)

    def get(self, key: bytes) -> Entry | None:
        """The entry, checked in every field, which counts as a use; None when there is none.

        Its dtype may differ from the format's where both are floats.
        """
        with self._changed:
            queued = self._queue.get(key)
        return queued.entry if queued else self._folder.get(key)

    def put(
        self, key: bytes, entry: Entry, *, used_ns: int | None = None, wait_s: float = 0.0
    ) -> bool:
        """Queue the entry; where its file is there already, that is marked as used.

        Args:
            key: of the entry, 32 bytes.
            entry: what to write; nothing refuses it later but the disk.
            used_ns: time of its last use, in nanoseconds since the epoch; None: now.
            wait_s: how long to wait for room in the queue.

        Returns:
            False when the queue is full and the entry, which is not on disk, is dropped.
        """
        assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
        expected = self.format.content_bytes(entry.dtype)
        assert len(entry.content) == expected, f"{len(entry.content)} bytes, {expected} expected"
        with self._changed:
            assert not self._closed, "the disk tier is closed"
            if key in self._queue:
                return True
            if not self._changed.wait_for(self._has_room, max(0.0, wait_s)):
                if key in self._folder:
                    return True  # it has only missed its turn in the order of use
                self.num_dropped += 1
                return False
            self._queue[key] = _Queued(entry, time.time_ns() if used_ns is None else used_ns)
            self._queued_bytes += len(entry.content)
            self._changed.notify_all()
        return True

    def flush(self, timeout_s: float) -> bool:
        """Wait until the queue is written; False when `timeout_s` was not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue, max(0.0, timeout_s))

    def close(self, timeout_s: float) -> bool:
        """Write what is queued for up to `timeout_s`, drop the rest, and end the thread.

        A write in progress gets `LAST_WRITE_S` more. `get` goes on working. Idempotent.

        Returns:
            False when something was dropped.
        """
        in_time = self.flush(timeout_s)
        with self._changed:
            self._closed = True
            self.num_dropped += len(self._queue)
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join(LAST_WRITE_S)
        return in_time

    def _has_room(self) -> bool:
        return self._queued_bytes < self._queue_bytes

    def _write_all(self) -> None:
        """The thread: write entries in the order they came, until the tier is closed."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                key, queued = next(iter(self._queue.items()))
            entry = queued.entry
            self._folder.put(key, entry.content, entry.dtype, queued.used_ns)
            with self._changed:
                self._queue.pop(key, None)  # `close` may have dropped all
                self._queued_bytes -= len(entry.content)
                self._changed.notify_all()
