"""Where K/V goes that leaves the device's pool: to host memory, and from there to disk."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from onnxport import cache_rows
from onnxport.kv.disk_file import Entry
from onnxport.kv.host_tier import HostTier

if TYPE_CHECKING:
    from onnxport.kv.disk_tier import DiskTier


class TieredStore:
    """Entries by key, in host memory and on disk. One thread, the engine's, calls all methods.

    The store owns both tiers. It is a cache: an entry may be gone at any time, and what `get`
    returns is what was put, never anything else.
    """

    def __init__(self, host: HostTier, disk: DiskTier | None, dtype: str) -> None:
        """Join two empty or filled tiers.

        Args:
            host: takes what is put.
            disk: takes what leaves `host`; None: that is dropped.
            dtype: of the contents that are put, at first the disk's own when there is one.
        """
        assert disk is None or disk.format.dtype == dtype, "the tiers differ in dtype"
        self._host = host
        self._disk = disk
        self._dtype = dtype
        self._other_dtypes: dict[bytes, str] = {}  # of entries in `host` that are not of `dtype`

    @property
    def host_bytes(self) -> int:
        """Bytes of contents in host memory."""
        return self._host.num_bytes

    @property
    def disk_bytes(self) -> int:
        """Bytes of entries in the disk's folder, of all models."""
        return self._disk.num_bytes if self._disk else 0

    @property
    def num_errors(self) -> int:
        """Files that were corrupt or foreign, and reads and writes of the disk that failed."""
        return self._disk.num_errors if self._disk else 0

    @property
    def num_dropped(self) -> int:
        """Entries that the disk was too slow for."""
        return self._disk.num_dropped if self._disk else 0

    def __contains__(self, key: bytes) -> bool:
        """Whether a tier has the entry, as far as is known without asking the disk; not a use."""
        return key in self._host or (self._disk is not None and key in self._disk)

    def put(self, key: bytes, content: bytes) -> None:
        """Keep `content`, of the store's dtype, as the most recently used."""
        self._keep(key, Entry(content, self._dtype))

    def get(self, key: bytes) -> Entry | None:
        """The entry, which is in host memory then and the most recently used; None: it is gone.

        Its dtype is the store's own, or another one of numbers that the caller converts. An
        entry that only the disk has is read on this thread.
        """
        content = self._host.get(key)
        if content is not None:
            return Entry(content, self._other_dtypes.get(key, self._dtype))
        entry = self._disk.get(key) if self._disk else None
        if entry is not None:
            self._keep(key, entry)
        return entry

    def retype(self, dtype: str) -> None:
        """Contents are of `dtype` from now on; those that are here keep theirs.

        Both must be of numbers where they differ, so that whoever gets an entry can convert.
        """
        if dtype != self._dtype:
            assert {dtype, self._dtype} <= set(cache_rows.DTYPES), (
                f"{self._dtype} entries are no {dtype}"
            )
            found = {key: self._other_dtypes.get(key, self._dtype) for key, _ in self._host.items()}
            self._other_dtypes = {key: kept for key, kept in found.items() if kept != dtype}
            self._dtype = dtype

    def persist(self, timeout_s: float, items: Iterable[tuple[bytes, bytes]] = ()) -> bool:
        """Write `items`, then host memory, to disk, for a server that is about to end.

        The most recently used are written first and stop at the disk's capacity, so they are
        what is kept when time or space is short. Their order of use is kept too.

        Args:
            timeout_s: how long that may take; `items` are drawn one by one while there is time.
            items: what the device's pool holds, keys and contents of the store's dtype, the most
                recently used first.

        Returns:
            False when time ran out. Without a disk nothing is written, and that is True.
        """
        if self._disk is None:
            return True
        deadline = time.monotonic() + timeout_s
        own = self._dtype
        in_pool = ((key, Entry(content, own)) for key, content in items)
        in_host = (
            (key, Entry(content, self._other_dtypes.get(key, own)))
            for key, content in self._host.recent_items()
        )
        now_ns, room = time.time_ns(), self._disk.capacity_bytes
        seen: set[bytes] = set()
        for key, entry in chain(in_pool, in_host):
            if key in seen:
                continue
            room -= self._disk.format.file_bytes(entry.dtype)
            if room < 0:
                break
            left_s = deadline - time.monotonic()
            used_ns = now_ns - len(seen)
            if left_s <= 0 or not self._disk.put(key, entry, used_ns=used_ns, wait_s=left_s):
                return False
            seen.add(key)
        return self._disk.flush(deadline - time.monotonic())

    def close(self, timeout_s: float) -> bool:
        """Forget host memory, and close the disk once what it has queued is written. Idempotent.

        Returns:
            False when `timeout_s` was not enough for that.
        """
        self._host.clear()
        self._other_dtypes.clear()
        return self._disk.close(timeout_s) if self._disk else True

    def _keep(self, key: bytes, entry: Entry) -> None:
        """Put the entry into host memory, and on disk what leaves that."""
        if entry.dtype == self._dtype:
            self._other_dtypes.pop(key, None)
        else:
            self._other_dtypes[key] = entry.dtype
        for left, content in self._host.put(key, entry.content):
            dtype = self._other_dtypes.pop(left, self._dtype)
            if self._disk is not None:
                self._disk.put(left, Entry(content, dtype))
