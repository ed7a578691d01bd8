"""Huge pages in place of small ones, later, while the model has nothing to do.

On a virtual machine whose host took back what was free, a huge page can take ten milliseconds to
get: more than all else of a start. `csrc/pages.cpp` sees that and goes on with small pages, which
are read a tenth to a seventh slower. And KV caches begin on small ones everywhere, as long as they
are short (`cache_pages.py`). So a thread makes huge ones of both after the start.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from onnxport.providers.cpu.cache_pages import CachePages
from onnxport.providers.cpu.library import load_library
from onnxport.providers.ort_model import OrtModel

logger = logging.getLogger(__name__)

START_S = 1.0  # before the first page: a request may have waited for the start
IDLE_S = 0.1  # without a step, or between two pages at least
# Between two pages while steps run, which wait for each: so many times what the last one took.
BUSY_TIMES = 50
CHECK_S = 1.0  # until pages that are not worth it yet are looked at again


class Pages(Protocol):
    """Small pages, of which huge ones can be made."""

    def __len__(self) -> int:
        """How many are left."""
        ...

    def settle(self) -> bool:
        """Make one; False if none is worth it yet."""
        ...


class WeightPages:
    """Those of all weights that a kernel library has packed."""

    def __init__(self, library: ctypes.CDLL) -> None:
        """Ask that library."""
        self._library = library

    def __len__(self) -> int:
        """How many are left."""
        return int(self._library.onnxport_cpu_unsettled_pages())

    def settle(self) -> bool:
        """Make one."""
        self._library.onnxport_cpu_settle()
        return True


def settle_later(model: OrtModel, kernel: Path, caches: CachePages) -> threading.Thread | None:
    """Start a thread that makes huge pages until there are no more to make, or `model` is gone.

    Args:
        model: whose steps come first.
        kernel: the operator library that packed its weights.
        caches: its KV caches' beginnings.

    Returns:
        The thread; None where all lies on huge pages, or nothing can be made one.
    """
    weights = WeightPages(load_library(kernel))
    if num_weights := len(weights):
        logger.info("%d huge pages of weights are made later, for they take long here", num_weights)
    if not num_weights and not len(caches):
        return None
    thread = threading.Thread(
        target=_settle,
        args=(weakref.ref(model), (weights, caches)),
        name="huge-pages",
        daemon=True,
    )
    thread.start()
    return thread


def _settle(model: weakref.ref[OrtModel], kinds: Sequence[Pages]) -> None:
    pause = threading.Event()  # that nobody sets
    pause.wait(START_S)
    looked = -1  # after so many steps nothing was worth it
    while any(map(len, kinds)):
        before = _steps(model)
        pause.wait(IDLE_S)
        steps = _steps(model)
        if steps is None:
            return
        if steps == looked:  # nothing was written since
            pause.wait(CHECK_S)
            continue
        is_idle = steps == before and steps % 2 == 0
        took_s = _settle_one(kinds)
        # One while steps run; while nothing happens, one after the other.
        while is_idle and took_s is not None and _steps(model) == steps:
            took_s = _settle_one(kinds)
        if took_s is None:
            looked = steps
            pause.wait(CHECK_S)
        elif not is_idle:
            pause.wait(BUSY_TIMES * took_s)


def _settle_one(kinds: Sequence[Pages]) -> float | None:
    """Make one page; the seconds that it took, or None if none was worth it."""
    start = time.perf_counter()
    is_made = any(len(pages) and pages.settle() for pages in kinds)
    return time.perf_counter() - start if is_made else None


def _steps(model: weakref.ref[OrtModel]) -> int | None:
    """What the model has done so far; None: it is gone."""
    living = model()
    return None if living is None else living.progress
