"""Moving K/V blocks in and out of caches that lie in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ProviderError

CLOSED = "the model was closed; load it again"


class Blocks(Protocol):
    """Caches in some layout; see `providers.base.Model` for what the methods do."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole blocks."""
        ...

    def read(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        """Return blocks in canonical form."""
        ...

    def write(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        """Replace the content of blocks."""
        ...


class HostTransfers:
    """The part of `providers.base.Model` that moves blocks, for models on the host."""

    def __init__(self, blocks: Blocks, block_bytes: int) -> None:
        """Take the caches; setting `_blocks` to None closes them.

        Args:
            blocks: the caches.
            block_bytes: of one block, for messages.
        """
        self._blocks: Blocks | None = blocks
        self._block_bytes = block_bytes

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `providers.base.Model.copy_blocks`."""
        with self._transfer("copying", len(sources)) as caches:
            caches.copy(sources, targets)

    def read_blocks(self, blocks: Sequence[int]) -> NDArray[np.generic]:
        """See `providers.base.Model.read_blocks`."""
        with self._transfer("reading", len(blocks)) as caches:
            return caches.read(blocks)

    def write_blocks(self, blocks: Sequence[int], content: NDArray[np.generic]) -> None:
        """See `providers.base.Model.write_blocks`."""
        with self._transfer("writing", len(blocks)) as caches:
            caches.write(blocks, content)

    @contextmanager
    def _transfer(self, doing: str, count: int) -> Iterator[Blocks]:
        """The caches, if the model is open; what can fail in host memory becomes our error."""
        if self._blocks is None:
            raise ProviderError(CLOSED)
        try:
            yield self._blocks
        except MemoryError as error:
            raise ProviderError(
                f"no memory was left while {doing} {count} KV blocks of "
                f"{self._block_bytes} bytes each"
            ) from error
