"""Huge pages for the beginnings of KV caches, and for states, once these are in use.

Each layer's keys and values begin on small pages (`caches.SMALL_BYTES`): most sequences are short,
and a huge page is made whole. But attention over thousands of tokens reads huge ones faster. Linux
makes one in place of small ones, with what they hold, whatever is read or written meanwhile
(MADV_COLLAPSE, since 6.1). Pools of states are on small ones as a whole.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.providers.memory import HUGE_PAGE

logger = logging.getLogger(__name__)

SETTINGS: Final = Path("/sys/kernel/mm/transparent_hugepage")
MADV_COLLAPSE: Final = 25
# Of a huge page's small ones, how many there have to be: more memory than a third is never added.
NEEDED: Final = HUGE_PAGE // mmap.PAGESIZE * 3 // 4
# Why Linux may refuse one and give it later: none is free, a container may not take it (madvise(2)
# calls that EBUSY), or one of the small pages is being moved.
FOR_NOW: Final = frozenset((errno.EAGAIN, errno.EBUSY, errno.ENOMEM))
TRIES: Final = 3


@dataclass(frozen=True, slots=True)
class _Place:
    """A huge page's place in a cache."""

    memory: weakref.ref[NDArray[Any]]  # an array that lives as long as any view of the cache
    address: int
    tries: int = 0  # that were refused


class CachePages:
    """The huge pages that could be at the beginnings of caches, and are not yet."""

    waits = False

    def __init__(self, caches: Iterable[NDArray[Any]], small_bytes: int | None = None) -> None:
        """Remember where small pages are.

        Args:
            caches: arrays of `memory.huge_page_zeros`, of one size; they are not kept alive.
            small_bytes: at the beginning of each, on small pages; None: all.
        """
        arrays = list(caches) if can_collapse() else []
        # Sequences fill all caches alike, so that no other one is full before the first.
        self._left = deque(
            _Place(weakref.ref(_owner(array)), array.ctypes.data + offset)
            for offset in range(0, _small(arrays, small_bytes), HUGE_PAGE)
            for array in arrays
            if offset + HUGE_PAGE <= array.nbytes
        )
        self._num_places = len(self._left)
        self._refused: list[int] = []  # why, of each that is not tried again, as in `errno`

    def __len__(self) -> int:
        """How many are left; none once the caches are gone."""
        if self._left and self._left[0].memory() is None:
            self._left.clear()
        return len(self._left)

    def settle(self) -> bool:
        """Make the next a huge one, once it is nearly full of small pages.

        Returns:
            Whether one was made. If not, it is too early for it, or Linux refused it: for now, then
            others come first, or for good, then small ones remain.
        """
        place = self._left[0]
        memory = place.memory()  # stays until this is done, whoever closes the model
        if memory is None or _num_resident(place.address) < NEEDED:
            return False
        self._left.popleft()
        error = _collapse(place.address)
        if error in FOR_NOW and place.tries + 1 < TRIES:
            self._left.append(_Place(place.memory, place.address, place.tries + 1))
        elif error:
            self._refused.append(error)
        if self._refused and not self._left:
            logger.info(
                "Linux refused %d of %d huge pages for caches, the last one with: %s",
                len(self._refused),
                self._num_places,
                os.strerror(self._refused[-1]),
            )
        return not error


@cache
def can_collapse() -> bool:
    """Whether small pages can become huge ones of 2 MiB, and may."""
    try:
        # The advice is taken whatever the setting is, but who set that wants none.
        if "[never]" in (SETTINGS / "enabled").read_text():
            return False
        # Where pages have 16 or 64 KiB, as on some Arm systems, huge ones have 32 or 512 MiB.
        if int((SETTINGS / "hpage_pmd_size").read_text()) != HUGE_PAGE:
            return False
        # An advice that is not known is an error even for nothing.
        return bool(_libc().madvise(None, 0, MADV_COLLAPSE) == 0)
    except (OSError, ValueError, AttributeError):  # not Linux
        return False


def _small(arrays: Sequence[NDArray[Any]], small_bytes: int | None) -> int:
    """How much of each array is on small pages."""
    most = max((array.nbytes for array in arrays), default=0)
    return most if small_bytes is None else small_bytes


def _owner(array: NDArray[Any]) -> NDArray[Any]:
    """Of arrays that are views, what they are views of: what NumPy keeps alive for each view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _num_resident(address: int) -> int:
    """How many small pages of the huge one at an address there are, which were written to."""
    pages = (ctypes.c_ubyte * (HUGE_PAGE // mmap.PAGESIZE))()
    if _libc().mincore(address, HUGE_PAGE, pages):
        return 0
    return sum(page & 1 for page in pages)  # the other bits are reserved


def _collapse(address: int) -> int:
    """Make a huge page of small ones; 0, or why not, as in `errno`."""
    # Linux may also do it later by itself then, and what is given back comes as a huge page again.
    _libc().madvise(address, HUGE_PAGE, mmap.MADV_HUGEPAGE)
    if _libc().madvise(address, HUGE_PAGE, MADV_COLLAPSE) == 0:
        return 0
    return ctypes.get_errno()


@cache
def _libc() -> ctypes.CDLL:
    library = ctypes.CDLL(None, use_errno=True)
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return library
