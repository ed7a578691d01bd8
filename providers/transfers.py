"""Moving K/V blocks in and out of caches, wherever they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.graphs.lora import LoraAdapter
from onnxport.providers.failures import device_error

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


class Transfers:
    """The part of `providers.base.Model` that moves blocks."""

    def __init__(self, blocks: Blocks, block_bytes: int, device: str) -> None:
        """Take the caches; setting `_blocks` to None closes them.

        Args:
            blocks: the caches.
            block_bytes: of one block, for messages.
            device: that holds them, for messages.
        """
        self._blocks: Blocks | None = blocks
        self._block_bytes = block_bytes
        self._device = device

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

    def set_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        """See `providers.base.Model.set_adapter`."""
        raise ProviderError(
            f"slot {slot} for a LoRA adapter was asked for, and this model was loaded without any; "
            "load it with max_adapters"
        )

    @contextmanager
    def _transfer(self, doing: str, count: int) -> Iterator[Blocks]:
        """The caches, if the model is open; what can fail on the way becomes our error."""
        if self._blocks is None:
            raise ProviderError(CLOSED)
        try:
            yield self._blocks
        except (ProviderError, AssertionError):
            raise
        except Exception as error:
            what = f"{doing} {count} KV blocks of {self._block_bytes} bytes each"
            raise device_error(error, what, self._device) from error
