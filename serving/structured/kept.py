"""Masks that were computed before, by where a text stands in its expression, or in JSON."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MOST_BYTES = 32 << 20


class Places(Protocol):
    """What tells where a text stands in a form; a place is a value that never changes."""

    @property
    def start(self) -> Any | None:
        """The place of the empty text; None: not known, here as below."""
        ...

    def after(self, place: Any, text: bytes) -> Any | None:
        """Return the place of a text after `text` more."""
        ...

    def key(self, place: Any) -> Hashable:
        """Return what is the same for places after which the same tokens may come."""
        ...


class KeptMasks:
    """The masks that were used last, of all grammars of a model. Safe to use from any thread."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """Keep at most so many bytes of masks."""
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._masks: OrderedDict[tuple[Places, Hashable], NDArray[np.int32]] = OrderedDict()
        self._num_bytes = 0

    def get(self, places: Places, place: Hashable) -> NDArray[np.int32] | None:
        """Return the mask of a place's key, if it is there: int32 [words], not to be changed."""
        key = places, place
        with self._lock:
            mask = self._masks.get(key)
            if mask is not None:
                self._masks.move_to_end(key)
            return mask

    def put(self, places: Places, place: Hashable, mask: NDArray[np.int32]) -> None:
        """Keep a copy of a mask, and forget those that were not used for longest."""
        with self._lock:
            before = self._masks.pop((places, place), None)
            self._num_bytes += mask.nbytes - (0 if before is None else before.nbytes)
            self._masks[places, place] = mask.copy()
            while self._num_bytes > self._most_bytes:
                _, oldest = self._masks.popitem(last=False)
                self._num_bytes -= oldest.nbytes


class MaskMemory:
    """The masks of one form, by where a text ends."""

    def __init__(self, places: Places, tokens: LLTokenizer, kept: KeptMasks) -> None:
        self._places = places
        self._tokens = tokens
        self._ends = frozenset(tokens.eos_tokens)
        self._kept = kept

    @property
    def start(self) -> Any | None:
        """Where a text begins; None: not known, here as below."""
        return self._places.start

    def after(self, place: Any | None, token_ids: Sequence[int]) -> Any | None:
        """Return where a text ends with some tokens more."""
        if place is None or not self._ends.isdisjoint(token_ids):
            return None
        return self._places.after(place, self._tokens.decode_bytes(list(token_ids)))

    def read(self, place: Any | None, row: NDArray[np.int32]) -> bool:
        """Write the mask of a place into `row`, if it is there; returns whether it is."""
        if place is None:
            return False
        mask = self._kept.get(self._places, self._places.key(place))
        if mask is None:
            return False
        row[:] = mask
        return True

    def write(self, place: Any | None, row: NDArray[np.int32]) -> None:
        """Keep a mask."""
        if place is not None:
            self._kept.put(self._places, self._places.key(place), row)
