"""K/V in host memory: the tier that takes what leaves the device's pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from onnxport.errors import CapacityError


class HostTier:
    """Contents by key, the least recently used of which leave when the bytes run out.

    Only contents count against the capacity; keys and bookkeeping, some 200 bytes an entry, come
    on top. Not thread-safe.
    """

    __slots__ = ("_contents", "_num_bytes", "capacity_bytes")

    def __init__(self, capacity_bytes: int) -> None:
        """Make an empty tier; one of 0 bytes is allowed, and hands everything straight back.

        Raises:
            CapacityError: the capacity is negative.
        """
        if capacity_bytes < 0:
            raise CapacityError(
                f"the host tier was given {capacity_bytes} bytes; it must be 0 or more"
            )
        self.capacity_bytes = capacity_bytes
        self._contents: OrderedDict[bytes, bytes] = OrderedDict()  # least recently used first
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all contents, never more than the capacity."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._contents)

    def __contains__(self, key: bytes) -> bool:
        return key in self._contents

    def put(self, key: bytes, content: bytes) -> list[tuple[bytes, bytes]]:
        """Keep `content`, as the most recently used, in the place of what `key` had.

        Returns:
            The entries that had to leave, the least recently used first. An entry that is larger
            than the whole tier is itself returned, alone.
        """
        self.discard(key)
        if len(content) > self.capacity_bytes:
            return [(key, content)]
        self._contents[key] = content
        self._num_bytes += len(content)
        left = []
        while self._num_bytes > self.capacity_bytes:
            oldest = self._contents.popitem(last=False)
            self._num_bytes -= len(oldest[1])
            left.append(oldest)
        return left

    def get(self, key: bytes) -> bytes | None:
        """The content of `key`, which counts as a use; None when it is not here."""
        content = self._contents.get(key)
        if content is not None:
            self._contents.move_to_end(key)
        return content

    def items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every key and content, the least recently used first; not a use."""
        return iter(self._contents.items())

    def recent_items(self) -> Iterator[tuple[bytes, bytes]]:
        """Every key and content, the most recently used first; not a use."""
        return reversed(self._contents.items())

    def discard(self, key: bytes) -> None:
        """Forget `key`, if it is here."""
        content = self._contents.pop(key, None)
        if content is not None:
            self._num_bytes -= len(content)

    def clear(self) -> None:
        """Forget everything."""
        self._contents.clear()
        self._num_bytes = 0
