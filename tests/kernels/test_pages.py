"""Memory of weights: tensors beside each other, each freed on its own."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernels.standalone import CSRC, INCLUDES

COMPILER = "g++"
HUGE_MIB = 2

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.system() != "Linux", reason="builds a driver as Linux does"),
    pytest.mark.skipif(not shutil.which(COMPILER), reason=f"needs {COMPILER}"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    executable = tmp_path_factory.mktemp("pages") / "driver"
    sources = [CSRC / "pages.cpp", Path(__file__).with_name("pages_driver.cpp")]
    command = [COMPILER, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([*command, *INCLUDES, *map(str, sources), "-o", str(executable)], check=True)
    return executable


def run(driver: Path, *arguments: str) -> tuple[dict[str, tuple[int, ...]], list[str], str]:
    """Pairs of numbers by name, the names of what was whole, and all that was printed."""
    command = [str(driver), *arguments]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    found = {name: tuple(map(int, values)) for name, *values in lines if len(values) == 2}
    whole = [name for name, *values in lines if values == ["1"]]
    assert len(found) + len(whole) == len(lines), done.stdout
    return found, whole, done.stdout


def test_memory_of_weights(driver: Path) -> None:
    found, whole, out = run(driver)
    assert whole == ["taken", "left", "few", "second", "last", *["threads"] * 8], out
    resident = {name: sizes[0] for name, sizes in found.items()}
    space = {name: sizes[1] for name, sizes in found.items()}
    assert 404 <= resident["full"] - resident["before"] <= 404 + 3 * HUGE_MIB
    # Pages that it shared with its neighbours stay.
    assert 90 - 2 * HUGE_MIB <= resident["full"] - resident["freed"] <= 90
    assert space["freed"] == space["full"]
    assert resident["after"] - resident["before"] <= HUGE_MIB
    assert space["after"] - space["before"] <= HUGE_MIB
    # 38 MiB of small tensors, none of which has a page to itself, and 19 MiB of others.
    assert 38 - 2 * HUGE_MIB <= resident["both"] - resident["one"] <= 39
    assert resident["none"] - resident["before"] <= 2 * HUGE_MIB + 1


def test_pages_that_take_long_are_small_at_first(driver: Path) -> None:
    if not can_settle():
        pytest.skip("before 6.1 Linux cannot make huge pages of small ones when asked to")
    found, whole, out = run(driver, "slow")
    assert set(whole) == {"read"}, out
    pages, huge_before = found["small"]
    settled, huge_after = found["settled"]
    # Three were tried in the first region, which 93 MiB are in, and one in the next, of 191 MiB.
    assert pages == 46 - 3 + 95 - 1
    # 24 were freed before, and are passed over in one call, so that they do not come again.
    assert settled == pages - 24 + 1
    assert 0 <= found["huge"][0] - found["unsettled"][0] <= 2 * HUGE_MIB
    if huge_before >= 0 and huge_pages_can_be_made():
        assert huge_before <= 4 * HUGE_MIB
        assert huge_after - huge_before >= 0.5 * HUGE_MIB * (settled - 1)


def huge_pages_can_be_made() -> bool:
    """Whether Linux has them, and was not told to do without."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return enabled.is_file() and "[never]" not in enabled.read_text()


def can_settle() -> bool:
    """Whether Linux makes huge pages of small ones when asked to."""
    return tuple(int(part) for part in platform.release().split(".")[:2]) >= (6, 1)
