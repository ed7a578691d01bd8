"""What a start puts off, done later, while the model has nothing to do.

On a virtual machine whose host took back what was free, a huge page can take ten milliseconds to
get: more than all else of a start. `csrc/pages.cpp` sees that and goes on with small pages, which
are read a tenth to a seventh slower. And KV caches begin on small ones everywhere, as long as they
are short (`cache_pages.py`). So a thread makes huge ones of both after the start.

Where the largest logits are found by four bits of a head's weights (`csrc/coarse.h`), the first
steps make these, which takes them twice their time. What the first request leaves, that thread
makes, too.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from onnxport.providers.cpu.cache_pages import CachePages
from onnxport.providers.cpu.library import load_library
from onnxport.providers.ort_model import OrtModel

logger = logging.getLogger(__name__)

START_S = 1.0  # before the first piece: a request may have waited for the start
IDLE_S = 0.1  # without a step, or between two pieces at least
# Between two pieces while steps run, which wait for each: so many times what the last one took.
BUSY_TIMES = 50
CHECK_S = 1.0  # until what is not worth it yet is looked at again

_models: weakref.WeakSet[OrtModel] = weakref.WeakSet()  # of this process
_lock = threading.Lock()  # of these


class Work(Protocol):
    """What can be done piece by piece, such as making huge pages of small ones."""

    @property
    def waits(self) -> bool:
        """Whether it is done only while nothing runs."""
        ...

    def __len__(self) -> int:
        """How many pieces are left."""
        ...

    def settle(self) -> bool:
        """Do one; False if none is worth it yet."""
        ...


class WeightPages:
    """The small pages of all weights that a kernel library has packed."""

    waits = False

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


class Planes:
    """Four bits of the weights of heads, as far as steps have not made them.

    Steps that need them make them faster, on all threads, so these are not disturbed.
    """

    waits = True

    def __init__(self, library: ctypes.CDLL) -> None:
        """Ask that library."""
        self._library = library

    def __len__(self) -> int:
        """How many parts are left; it counts as one that no step has needed any yet."""
        left = int(self._library.onnxport_cpu_plane_parts_left())
        return 1 if left < 0 else left

    def settle(self) -> bool:
        """Make one; False if no step has needed any yet."""
        return bool(self._library.onnxport_cpu_make_plane_part())


def settle_later(
    model: OrtModel, kernel: Path, caches: Iterable[CachePages], *, has_planes: bool = False
) -> threading.Thread | None:
    """Start a thread that works until there is nothing left to do, or `model` is gone.

    Args:
        model: whose steps come first.
        kernel: the operator library that packed its weights.
        caches: its KV caches' beginnings, and its states.
        has_planes: whether its largest logits are found by four bits of the weights.

    Returns:
        The thread; None where there is nothing to do: all lies on huge pages, or nothing can be
        made one.
    """
    _note(model)
    library = load_library(kernel)
    weights = WeightPages(library)
    kinds: tuple[Work, ...] = (weights, *((Planes(library),) if has_planes else ()), *caches)
    if num_weights := len(weights):
        logger.info("%d huge pages of weights are made later, for they take long here", num_weights)
    if not any(map(len, kinds)):
        return None
    thread = threading.Thread(
        target=_settle,
        args=(weakref.ref(model), kinds),
        name="settling",
        daemon=True,
    )
    thread.start()
    return thread


def _settle(model: weakref.ref[OrtModel], kinds: Sequence[Work]) -> None:
    _note(model())
    pause = threading.Event()  # that nobody sets
    pause.wait(START_S)
    looked: tuple[int, ...] | None = None  # after these steps nothing was worth it
    while any(map(len, kinds)):
        before = _steps()
        pause.wait(IDLE_S)
        if model() is None:
            return
        steps = _steps()
        if steps == looked:  # nothing was written since
            pause.wait(CHECK_S)
            continue
        is_idle = steps == before and not any(count % 2 for count in steps)
        took_s = _settle_one([kind for kind in kinds if is_idle or not kind.waits])
        # One while steps run; while nothing happens, one after the other.
        while is_idle and took_s is not None and _steps() == steps:
            took_s = _settle_one(kinds)
        if took_s is None:
            looked = steps
            pause.wait(CHECK_S)
        elif not is_idle:
            pause.wait(BUSY_TIMES * took_s)


def _settle_one(kinds: Sequence[Work]) -> float | None:
    """Do one piece; the seconds that it took, or None if none was worth it."""
    start = time.perf_counter()
    is_made = any(len(kind) and kind.settle() for kind in kinds)
    return time.perf_counter() - start if is_made else None


def _note(model: OrtModel | None) -> None:
    if model is not None:
        with _lock:
            _models.add(model)


def _steps() -> tuple[int, ...]:
    """What all models have done so far: one that has nothing to do shares its processor."""
    with _lock:
        return tuple(model.progress for model in _models)
