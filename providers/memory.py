"""Memory that a provider may use, and host buffers for KV caches."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import DTypeLike, NDArray

CGROUPS = Path("/sys/fs/cgroup")
MEMORY = Path("/proc/meminfo")
STATUS = Path("/proc/self/status")
PROCESSORS = Path("/sys/devices/system/cpu")
HUGE_PAGE = 2 << 20  # bytes, on most processors
NO_LIMIT = 1 << 60  # cgroup v1 writes a number above this for none


@dataclass(frozen=True, slots=True)
class _Cgroup:
    """Where one version of cgroups says what a container may take, and has taken."""

    limit: str
    usage: str
    stat: str
    reclaimable: str  # the line of `stat` that counts cached file pages which were not used lately


_VERSIONS = (
    _Cgroup("memory.max", "memory.current", "memory.stat", "inactive_file"),
    _Cgroup(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_bytes() -> int:
    """Host memory that can be taken without swapping, the container's limit included."""
    free, _ = _system_bytes()
    limits = [left for version in _VERSIONS if (left := _cgroup_left(version)) is not None]
    return min([free, *limits])


def total_bytes() -> int:
    """Host memory that there is, or that the container may take of it."""
    _, total = _system_bytes()
    limits = [limit for version in _VERSIONS if (limit := _cgroup_limit(version)) is not None]
    return min([total, *limits])


def peak_bytes() -> int | None:
    """The most memory that this process had resident; None where the system does not say.

    Linux is asked for what this program had: its rusage goes on from what the process had before
    it became this program, which may be more.
    """
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _system_bytes() -> tuple[int, int]:
    """What is available and what there is, without a container's limit.

    Linux is asked itself: importing psutil takes as long as much of a start.
    """
    try:
        sizes = dict(line.split(":") for line in MEMORY.read_text().splitlines())
        available, total = (
            int(sizes[name].removesuffix(" kB")) << 10 for name in ("MemAvailable", "MemTotal")
        )
    except (OSError, KeyError, ValueError):
        import psutil

        memory = psutil.virtual_memory()
        return int(memory.available), int(memory.total)
    return available, total


def _cgroup_limit(version: _Cgroup) -> int | None:
    """What the container may take in all; None without a limit."""
    try:
        limit = int((CGROUPS / version.limit).read_text())
    except (OSError, ValueError):  # version 2 writes "max" for none
        return None
    return limit if limit < NO_LIMIT else None


def _cgroup_left(version: _Cgroup) -> int | None:
    """What the container may still take; None without a limit.

    Usage counts cached files, such as weights that were just written; what of that was not used
    lately is given back when it is needed, as the kernel's own estimate of free memory assumes.
    """
    limit = _cgroup_limit(version)
    if limit is None:
        return None
    try:
        usage = int((CGROUPS / version.usage).read_text())
        stat = dict(line.split() for line in (CGROUPS / version.stat).read_text().splitlines())
    except (OSError, ValueError):
        return None
    return max(0, limit - usage + int(stat.get(version.reclaimable, 0)))


def physical_cores() -> int:
    """Physical cores that this process may run on, no more than a container's share of time."""
    quota = _cpu_quota()
    cores = _usable_cores()
    return cores if quota is None else min(cores, quota)


def _cpu_quota() -> int | None:
    """Processors whose time a container may take, rounded up; None without a limit."""
    version_2, version_1 = CGROUPS / "cpu.max", CGROUPS / "cpu"
    try:
        if version_2.is_file():
            texts = version_2.read_text().split()
        else:
            texts = [
                (version_1 / name).read_text() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            ]
        quota, period = map(int, texts)
    except (OSError, ValueError):  # version 2 writes "max" for none
        return None
    return -(-quota // period) if quota > 0 and period > 0 else None


def _usable_cores() -> int:
    """Physical cores that this process may run on."""
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    # Each file names the processors that share a core.
    shared = PROCESSORS.glob("cpu[0-9]*/topology/core_cpus_list")
    try:
        cores = len(
            {path.read_text() for path in shared if mine is None or _processor(path) in mine}
        )
    except OSError:  # a processor is taken offline
        cores = 0
    if not cores:
        import psutil

        cores = psutil.cpu_count(logical=False) or 1
    return max(1, min(cores, cores if mine is None else len(mine)))


def _processor(path: Path) -> int:
    """The number of the processor that a file of its topology is of."""
    return int(path.parts[-3].removeprefix("cpu"))


def huge_page_zeros(
    shape: tuple[int, ...], dtype: DTypeLike, *, small_bytes: int = 0, lead_bytes: int = 0
) -> NDArray[np.generic]:
    """A zeroed array on huge pages where the system has them.

    Pages are taken from the system when they are first written, so a pool that is larger than
    what is used costs address space alone.

    Args:
        shape: of the array.
        dtype: of the array.
        small_bytes: so much at the start has small pages, a multiple of their size: for arrays of
            which there are many, and often only little is used.
        lead_bytes: so much lies before the first huge page's place, which is for what follows.
    """
    wanted = np.dtype(dtype)
    count = int(np.prod(shape))
    size = max(1, count * wanted.itemsize)
    if not hasattr(mmap, "MAP_PRIVATE"):
        return np.frombuffer(mmap.mmap(-1, size), wanted, count).reshape(shape)
    # Shared memory, as is the default, has huge pages only where a system was told so. An array
    # that has room for one begins where one does.
    extra = HUGE_PAGE if size >= HUGE_PAGE else 0
    region = mmap.mmap(-1, size + extra, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = np.frombuffer(region, np.uint8, 1).ctypes.data
    start = -(address + lead_bytes) % HUGE_PAGE if extra else 0
    if hasattr(mmap, "MADV_HUGEPAGE") and size > small_bytes:
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            region.madvise(mmap.MADV_HUGEPAGE, start + small_bytes, size - small_bytes)
    return np.frombuffer(region, wanted, count, start).reshape(shape)
