"""Memory of weights: tensors beside each other, each freed on its own."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kernels.standalone import ROOT

COMPILER = "g++"
HUGE_MIB = 2

pytestmark = [
    pytest.mark.skipif(platform.system() != "Linux", reason="builds a driver as Linux does"),
    pytest.mark.skipif(not shutil.which(COMPILER), reason=f"needs {COMPILER}"),
]


@pytest.mark.slow
def test_memory_of_weights(tmp_path: Path) -> None:
    csrc, executable = ROOT / "providers/cpu/csrc", tmp_path / "driver"
    sources = [csrc / "pages.cpp", Path(__file__).with_name("pages_driver.cpp")]
    command = [COMPILER, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([*command, f"-I{csrc}", *map(str, sources), "-o", str(executable)], check=True)
    done = subprocess.run([str(executable)], capture_output=True, check=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines()]
    found = {name: tuple(map(int, values)) for name, *values in lines if len(values) == 2}
    whole = [name for name, *values in lines if values == ["1"]]
    assert whole == ["taken", "left", *["threads"] * 8], done.stdout
    resident = {name: sizes[0] for name, sizes in found.items()}
    space = {name: sizes[1] for name, sizes in found.items()}
    assert 404 <= resident["full"] - resident["before"] <= 404 + 3 * HUGE_MIB
    # Pages that it shared with its neighbours stay.
    assert 90 - 2 * HUGE_MIB <= resident["full"] - resident["freed"] <= 90
    assert space["freed"] == space["full"]
    assert resident["after"] - resident["before"] <= HUGE_MIB
    assert space["after"] - space["before"] <= HUGE_MIB
