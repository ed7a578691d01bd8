"""Packed weights, byte by byte, alone and in parts on several threads."""

from __future__ import annotations

import itertools
import platform
import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.matmul_cases import BITS, BLOCK_SIZES, MatMulCase, make_case
from tests.kernels.standalone import ROOT

COMPILER = "g++"
PANEL = 32
# Less than a tile of 4, less than a panel, whole ones and what is left over.
WIDTHS = (1, 3, 5, 31, 32, 33, 70)
DEPTHS = (1, 100, 384)

pytestmark = [
    pytest.mark.skipif(platform.system() != "Linux", reason="builds a driver as Linux does"),
    pytest.mark.skipif(not shutil.which(COMPILER), reason=f"needs {COMPILER}"),
]


def packed(case: MatMulCase) -> NDArray[np.uint8]:
    """The layout that matmul.h draws: panels, blocks, words of 32 outputs, then their scales."""
    blocks = case.quants.shape[1]
    flipped = case.quants ^ np.uint8(0x80 if case.bits == 8 else 0)
    words = flipped.view(np.uint32)  # [N, blocks, words]
    panels = -(-case.n // PANEL)
    both = np.concatenate([words, case.scales.view(np.uint32)[:, :, None]], axis=2)
    whole = np.zeros((panels * PANEL, blocks, both.shape[2]), np.uint32)
    whole[: case.n] = both
    by_panel = whole.reshape(panels, PANEL, blocks, -1).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(by_panel).reshape(-1).view(np.uint8)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    csrc, executable = ROOT / "providers/cpu/csrc", tmp_path_factory.mktemp("pack") / "driver"
    sources = [csrc / "pack.cpp", csrc / "pages.cpp", Path(__file__).with_name("pack_driver.cpp")]
    command = [COMPILER, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([*command, f"-I{csrc}", *map(str, sources), "-o", str(executable)], check=True)
    return executable


def check(driver: Path, cases: list[MatMulCase]) -> None:
    parts = [struct.pack("q", len(cases))]
    for case in cases:
        parts.append(struct.pack("4q", case.k, case.n, case.bits, case.block_size))
        halves = case.scales.astype(np.float16)
        parts += [case.quants.tobytes(), case.scales.tobytes(), halves.tobytes()]
    done = subprocess.run([str(driver)], input=b"".join(parts), capture_output=True, check=True)
    found = np.frombuffer(done.stdout, np.uint8)
    for case in cases:
        rounded = case.replace(scales=case.scales.astype(np.float16).astype(np.float32))
        ways = ("alone", "in parts", "alone, halves", "in parts, halves")
        for way in ways:
            expected = packed(rounded if "halves" in way else case)
            what = f"{way}: k {case.k}, n {case.n}, bits {case.bits}, block {case.block_size}"
            assert np.array_equal(found[: expected.size], expected), what
            found = found[expected.size :]
    assert found.size == 0


def test_every_size_of_block(driver: Path) -> None:
    shapes = itertools.product(BITS, BLOCK_SIZES, DEPTHS, WIDTHS)
    check(driver, [make_case(seed, *shape, rows=1) for seed, shape in enumerate(shapes)])


def test_more_parts_than_threads(driver: Path) -> None:
    """Packed, it has over 5 MB, and parts have 1 MB; the last panel is not whole."""
    check(driver, [make_case(0, 4, 32, k=1024, n=9001, rows=1)])


def test_every_half(driver: Path) -> None:
    """Subnormal numbers, zeros of both signs, infinities and NaNs among them."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    of = make_case(0, 4, 16, k=1024, n=1024, rows=1)
    check(driver, [of.replace(scales=halves.astype(np.float32).reshape(of.scales.shape))])


def test_what_is_packed_leaves_memory_if_it_is_a_file(driver: Path, tmp_path: Path) -> None:
    """Part by part, so only pages at the ends of parts are left, and what the system read ahead."""
    of = make_case(0, 8, 32, k=1024, n=32 * 1024, rows=1)
    (tmp_path / "quants").write_bytes(of.quants.tobytes())
    command = [str(driver), str(tmp_path / "quants"), str(of.n), str(of.k)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    whole, packed_once, packed_in_parts = map(int, done.stdout.split())
    assert whole >= of.quants.nbytes >> 10  # KiB
    assert packed_once >= whole
    assert packed_in_parts < whole / 4
