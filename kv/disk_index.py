"""What the disk tier knows of its files without asking the disk."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable


class DiskIndex:
    """File names with their sizes, the least recently used first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    def use(self, name: str, size: int) -> None:
        """Make `name`, a file of `size` bytes, the most recently used; it may be new."""
        with self._lock:
            self._num_bytes += size - self._sizes.pop(name, 0)
            self._sizes[name] = size

    def forget(self, name: str) -> None:
        """Drop `name`, if it is known."""
        with self._lock:
            self._num_bytes -= self._sizes.pop(name, 0)

    def oldest(self) -> str | None:
        """The least recently used file; None when there is no file."""
        with self._lock:
            return next(iter(self._sizes), None)

    def replace(self, files: Iterable[tuple[str, int]]) -> None:
        """Know `files`, name and size, the least recently used first, and nothing else."""
        sizes = OrderedDict(files)
        with self._lock:
            self._sizes = sizes
            self._num_bytes = sum(sizes.values())
