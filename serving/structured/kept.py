"""Masks that were computed before, by where a text stands in its expression."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.structured.automaton import Automaton, Places

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MOST_BYTES = 32 << 20


class KeptMasks:
    """The masks that were used last, of all grammars of a model. Safe to use from any thread."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        """Keep at most so many bytes of masks."""
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._masks: OrderedDict[tuple[Automaton, Places], NDArray[np.int32]] = OrderedDict()
        self._num_bytes = 0

    def get(self, automaton: Automaton, places: Places) -> NDArray[np.int32] | None:
        """Return the mask of some places, if it is there: int32 [words], not to be changed."""
        key = automaton, places
        with self._lock:
            mask = self._masks.get(key)
            if mask is not None:
                self._masks.move_to_end(key)
            return mask

    def put(self, automaton: Automaton, places: Places, mask: NDArray[np.int32]) -> None:
        """Keep a copy of a mask, and forget those that were not used for longest."""
        with self._lock:
            before = self._masks.pop((automaton, places), None)
            self._num_bytes += mask.nbytes - (0 if before is None else before.nbytes)
            self._masks[automaton, places] = mask.copy()
            while self._num_bytes > self._most_bytes:
                _, oldest = self._masks.popitem(last=False)
                self._num_bytes -= oldest.nbytes


class MaskMemory:
    """The masks of one expression, by the places where a text ends."""

    def __init__(self, automaton: Automaton, tokens: LLTokenizer, kept: KeptMasks) -> None:
        self._automaton = automaton
        self._tokens = tokens
        self._ends = frozenset(tokens.eos_tokens)
        self._kept = kept

    @property
    def start(self) -> Places | None:
        """Where a text begins; None: not known, here as below."""
        return self._automaton.start

    def after(self, places: Places | None, token_ids: Sequence[int]) -> Places | None:
        """Return where a text ends with some tokens more."""
        if places is None or not self._ends.isdisjoint(token_ids):
            return None
        return self._automaton.after(places, self._tokens.decode_bytes(list(token_ids)))

    def read(self, places: Places | None, row: NDArray[np.int32]) -> bool:
        """Write the mask of some places into `row`, if it is there; returns whether it is."""
        if places is None:
            return False
        mask = self._kept.get(self._automaton, self._automaton.key(places))
        if mask is None:
            return False
        row[:] = mask
        return True

    def write(self, places: Places | None, row: NDArray[np.int32]) -> None:
        """Keep a mask."""
        if places is not None:
            self._kept.put(self._automaton, self._automaton.key(places), row)
