"""Memory that a provider may use, and host buffers for KV caches."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path

import numpy as np
import psutil
from numpy.typing import DTypeLike, NDArray

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
CGROUP_USAGE = Path("/sys/fs/cgroup/memory.current")


def available_bytes() -> int:
    """Host memory that can be taken without swapping, the container's limit included."""
    free = int(psutil.virtual_memory().available)
    try:
        limit, usage = CGROUP_LIMIT.read_text().strip(), int(CGROUP_USAGE.read_text())
    except (OSError, ValueError):
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - usage))


def physical_cores() -> int:
    """Physical cores that this process may run on."""
    cores = psutil.cpu_count(logical=False) or 1
    process = psutil.Process()
    usable = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else cores
    return max(1, min(cores, usable))


def huge_page_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[np.generic]:
    """A zeroed array on huge pages where the system has them.

    Pages are taken from the system when they are first written, so a pool that is larger than
    what is used costs address space alone.
    """
    wanted = np.dtype(dtype)
    count = int(np.prod(shape))
    region = mmap.mmap(-1, max(1, count * wanted.itemsize))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, wanted, count).reshape(shape)
