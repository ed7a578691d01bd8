"""What memory is really free, in and out of containers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

from onnxport.providers import memory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 1,000 of 2,000 MiB free; returns where it would be told of a container."""
    sizes = {"MemTotal": 2000, "MemFree": 10, "MemAvailable": 1000}
    lines = [f"{name}:{size << 10:>12} kB" for name, size in sizes.items()]
    (tmp_path / "meminfo").write_text("\n".join([*lines, "HugePages_Total:       0", ""]))
    monkeypatch.setattr(memory, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    return tmp_path


def write(folder: Path, limit: str, usage: int, stat: str, *, version: int = 2) -> None:
    names = ("memory.max", "memory.current", "memory.stat")
    if version == 1:
        folder = folder / "memory"
        folder.mkdir()
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    for name, text in zip(names, (limit, str(usage), stat), strict=True):
        (folder / name).write_text(text + "\n")


def test_without_a_container_it_is_the_machine_s() -> None:
    assert memory.available_bytes() == 1000 * MIB
    assert memory.total_bytes() == 2000 * MIB


def test_a_container_s_limit_counts_less_what_is_used(machine: Path) -> None:
    write(machine, str(600 * MIB), 100 * MIB, "anon 0\nfile 0")
    assert memory.available_bytes() == 500 * MIB
    assert memory.total_bytes() == 600 * MIB


def test_cached_files_can_be_taken_back(machine: Path) -> None:
    write(machine, str(600 * MIB), 500 * MIB, f"anon 1\ninactive_file {300 * MIB}\nfile 9")
    assert memory.available_bytes() == 400 * MIB


def test_the_machine_may_have_less_than_the_container_may_take(machine: Path) -> None:
    write(machine, str(9000 * MIB), 100 * MIB, "anon 0")
    assert memory.available_bytes() == 1000 * MIB
    assert memory.total_bytes() == 2000 * MIB


def test_a_container_that_is_full_leaves_nothing(machine: Path) -> None:
    write(machine, str(100 * MIB), 120 * MIB, "anon 0")
    assert memory.available_bytes() == 0


@pytest.mark.parametrize(("limit", "version"), [("max", 2), (str((1 << 63) - 4096), 1)])
def test_no_limit(machine: Path, limit: str, version: int) -> None:
    write(machine, limit, 100 * MIB, "anon 0", version=version)
    assert memory.available_bytes() == 1000 * MIB
    assert memory.total_bytes() == 2000 * MIB


def test_version_1(machine: Path) -> None:
    stat = f"inactive_file 7\ntotal_inactive_file {50 * MIB}"
    write(machine, str(600 * MIB), 100 * MIB, stat, version=1)
    assert memory.available_bytes() == 550 * MIB
    assert memory.total_bytes() == 600 * MIB


@pytest.mark.parametrize("text", [None, "MemTotal: 5 kB\n", "MemTotal: 5 kB\nMemAvailable: x kB\n"])
def test_a_system_that_does_not_tell_is_asked_otherwise(
    machine: Path, monkeypatch: pytest.MonkeyPatch, text: str | None
) -> None:
    class Memory:
        available = 700 * MIB
        total = 900 * MIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    if text is None:
        (machine / "meminfo").unlink()
    else:
        (machine / "meminfo").write_text(text)
    assert memory.available_bytes() == 700 * MIB
    assert memory.total_bytes() == 900 * MIB


def cores(folder: Path, shared: list[str]) -> None:
    for number, together in enumerate(shared):
        topology = folder / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "core_cpus_list").write_text(f"{together}\n")
    (folder / "cpufreq").mkdir()


@pytest.mark.parametrize(
    ("shared", "usable", "wanted"),
    [(["0,2", "1,3", "0,2", "1,3"], 4, 2), (["0", "1", "2"], 2, 2), (["0-1", "0-1"], 1, 1)],
)
def test_cores_are_counted_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: list[str], usable: int, wanted: int
) -> None:
    cores(tmp_path / "cpus", shared)
    monkeypatch.setattr(memory, "PROCESSORS", tmp_path / "cpus")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(usable)), raising=False)
    assert memory.physical_cores() == wanted


@pytest.mark.parametrize(("mine", "wanted"), [({0, 2}, 1), ({0, 1}, 2), ({3}, 1)])
def test_cores_of_others_are_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mine: set[int], wanted: int
) -> None:
    cores(tmp_path / "cpus", ["0,2", "1,3", "0,2", "1,3"])
    monkeypatch.setattr(memory, "PROCESSORS", tmp_path / "cpus")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: mine, raising=False)
    assert memory.physical_cores() == wanted


def test_cores_that_the_system_does_not_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PROCESSORS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(9)), raising=False)
    for found, wanted in ((3, 3), (None, 1)):
        monkeypatch.setattr(psutil, "cpu_count", lambda logical, found=found: found)
        assert memory.physical_cores() == wanted


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        ({"cpu.max": "max 100000"}, 4),
        ({"cpu.max": "200000 100000"}, 2),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "900000 100000"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"}, 3),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ({"cpu.max": "nonsense"}, 4),
        ({}, 4),
    ],
)
def test_a_container_has_as_many_cores_as_it_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], wanted: int
) -> None:
    cores(tmp_path / "cpus", ["0", "1", "2", "3"])
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(memory, "PROCESSORS", tmp_path / "cpus")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)), raising=False)
    assert memory.physical_cores() == wanted


LINUX_ONLY = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="huge pages as Linux has them"
)


def mappings(begin: int, end: int) -> list[tuple[int, str, bool]]:
    """Bytes, rights, and whether huge pages are wanted, of what is mapped between two places."""
    found: list[tuple[int, str, bool]] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if words[0].endswith(":"):
            if inside and words[0] == "VmFlags:":
                found[-1] = (*found[-1][:2], "hg" in words)
            continue
        first, last = (int(place, 16) for place in words[0].split("-"))
        inside = first < end and last > begin
        if inside:
            found.append((min(last, end) - max(first, begin), words[1], False))
    return found


@LINUX_ONLY
def test_zeros_are_memory_of_this_process_alone() -> None:
    """Linux has huge pages for shared memory only where it was told so."""
    array = memory.huge_page_zeros((3, 1 << 20), np.float32)
    assert array.shape == (3, 1 << 20)
    assert not array.any()
    array[1] = 1
    begin = array.ctypes.data
    assert mappings(begin, begin + array.nbytes) == [(array.nbytes, "rw-p", True)]


@LINUX_ONLY
def test_the_start_may_have_small_pages() -> None:
    small = 1 << 20
    array = memory.huge_page_zeros((3, 1 << 20), np.float32, small_bytes=small)
    begin = array.ctypes.data
    assert mappings(begin, begin + array.nbytes) == [
        (small, "rw-p", False),
        (array.nbytes - small, "rw-p", True),
    ]
    none = memory.huge_page_zeros((small,), np.int8, small_bytes=small)
    begin = none.ctypes.data
    assert not any(is_huge for _, _, is_huge in mappings(begin, begin + none.nbytes))


def test_the_peak_is_what_this_program_had(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "status"
    monkeypatch.setattr(memory, "STATUS", status)
    of_the_process = memory.peak_bytes()  # such as another Unix tells it
    assert of_the_process is None or of_the_process >= psutil.Process().memory_info().rss // 2
    status.write_text("Name:\tpython\nVmPeak:\t  999999 kB\nVmHWM:\t   54321 kB\n")
    assert memory.peak_bytes() == 54_321 * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux has /proc")
def test_the_peak_of_the_program_before_does_not_count() -> None:
    """A process goes on with its rusage when it becomes another program."""
    shows = "from onnxport.providers.memory import peak_bytes; print(peak_bytes())"
    again = [sys.executable, "-c", shows]  # by its name it finds its environment
    large = f"import os, sys; x = b'1' * (400 << 20); os.execv(sys.executable, {again})"
    done = subprocess.run([sys.executable, "-c", large], capture_output=True, text=True, check=True)
    assert 4 * MIB < int(done.stdout) < 300 * MIB
