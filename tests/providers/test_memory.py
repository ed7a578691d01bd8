"""What memory is really free, in and out of containers."""

from pathlib import Path

import psutil
import pytest

from onnxport.providers import memory

MIB = 1 << 20


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with 1,000 of 2,000 MiB free; returns where it would be told of a container."""

    class Memory:
        available = 1000 * MIB
        total = 2000 * MIB

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
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
