"""Huge pages for weights that got small ones, later, while the model has nothing to do.

On a virtual machine whose host took back what was free, a huge page can take ten milliseconds to
get: more than all else of a start. `csrc/pages.cpp` sees that and goes on with small pages, which
are read a tenth to a seventh slower. So a thread makes huge ones of them after the start.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from pathlib import Path

from onnxport.providers.cpu.library import load_library
from onnxport.providers.ort_model import OrtModel

logger = logging.getLogger(__name__)

START_S = 1.0  # before the first page: a request may have waited for the start
# Between two pages while steps run: each makes them wait for some milliseconds.
BUSY_S = 0.5
IDLE_S = 0.1  # without a step


def settle_later(model: OrtModel, kernel: Path) -> threading.Thread | None:
    """Start a thread that makes huge pages until there are no more to make, or `model` is gone.

    Args:
        model: whose steps come first.
        kernel: the operator library that packed its weights.

    Returns:
        The thread; None where weights lie on huge pages, or there are none at all.
    """
    library = load_library(kernel)
    pages = int(library.onnxport_cpu_unsettled_pages())
    if not pages:
        return None
    logger.info("%d huge pages of weights are made after the start, for they take long here", pages)
    thread = threading.Thread(
        target=_settle, args=(weakref.ref(model), library), name="huge-pages", daemon=True
    )
    thread.start()
    return thread


def _settle(model: weakref.ref[OrtModel], library: ctypes.CDLL) -> None:
    pause = threading.Event()  # that nobody sets
    pause.wait(START_S)
    seen = _steps(model)
    while seen is not None:
        pause.wait(IDLE_S)
        steps = _steps(model)
        if steps is None:
            return
        if steps != seen or steps % 2:
            pause.wait(BUSY_S - IDLE_S)
        # One while steps run; while nothing happens, one after the other.
        while library.onnxport_cpu_settle():
            if steps % 2 or _steps(model) != steps:
                break
        else:
            return
        seen = _steps(model)


def _steps(model: weakref.ref[OrtModel]) -> int | None:
    """What the model has done so far; None: it is gone."""
    living = model()
    return None if living is None else living.progress
