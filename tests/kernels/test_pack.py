"""Packed weights, byte by byte, alone and in parts on several threads."""

from __future__ import annotations

import itertools
import platform
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.kernels.matmul_cases import BITS, BLOCK_SIZES, Floats, MatMulCase, make_case
from tests.kernels.standalone import CSRC, INCLUDES

COMPILER = "g++"
PANEL = 32
# Less than a tile of 4, less than a panel, whole ones and what is left over.
WIDTHS = (1, 3, 5, 31, 32, 33, 70)
DEPTHS = (1, 100, 384)

pytestmark = [
    pytest.mark.skipif(platform.system() != "Linux", reason="builds a driver as Linux does"),
    pytest.mark.skipif(not shutil.which(COMPILER), reason=f"needs {COMPILER}"),
]


def are_halves(scales: Floats) -> bool:
    """Whether all are zero or in the normal range of float16, and none has bits that it lacks."""
    limits = np.finfo(np.float16)
    magnitudes = np.abs(scales)
    in_range = (magnitudes >= limits.smallest_normal) & (magnitudes <= limits.max)
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    return bool(((in_range & (halves == scales)) | (scales == 0)).all())


def packed(case: MatMulCase, scales: NDArray[Any]) -> NDArray[np.uint8]:
    """The layout that matmul.h draws: panels, blocks, words of 32 outputs, then their scales."""
    flipped = case.quants ^ np.uint8(0x80 if case.bits == 8 else 0)
    parts = by_panel(flipped.view(np.uint32)), by_panel(scales[:, :, None])
    return np.concatenate(parts, axis=2).reshape(-1)


def by_panel(values: NDArray[Any]) -> NDArray[np.uint8]:
    """[N, blocks, values] as bytes [panels, blocks, those of each value of a panel's outputs]."""
    n, blocks, count = values.shape
    panels = -(-n // PANEL)
    whole = np.zeros((panels * PANEL, blocks, count), values.dtype)
    whole[:n] = values
    turned = whole.reshape(panels, PANEL, blocks, count).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(turned).view(np.uint8).reshape(panels, blocks, -1)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    executable = tmp_path_factory.mktemp("pack") / "driver"
    sources = [CSRC / "pack.cpp", CSRC / "pages.cpp", Path(__file__).with_name("pack_driver.cpp")]
    command = [COMPILER, "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-pthread"]
    subprocess.run([*command, *INCLUDES, *map(str, sources), "-o", str(executable)], check=True)
    return executable


def half_powers(exponents: NDArray[np.uint8]) -> Floats | NDArray[np.float16]:
    """Half of what E8M0 stand for, as they are packed."""
    with np.errstate(over="ignore", under="ignore"):
        powers = np.ldexp(np.float32(1), exponents.astype(np.int32) - 128)
        powers[exponents == 255] = np.nan
        halves = powers.astype(np.float16)
    return halves if (halves == powers).all() else powers


def check(
    driver: Path, cases: list[MatMulCase], exponents: NDArray[np.uint8] | None = None
) -> None:
    """Packs all cases, with their own scales and with E8M0, which are random if there are none."""
    parts = [struct.pack("q", len(cases))]
    powers = [
        np.random.default_rng(i).integers(95 + i % 20, 143, case.scales.shape, np.uint8)
        if exponents is None
        else exponents
        for i, case in enumerate(cases)
    ]
    with np.errstate(over="ignore"):
        halves = [case.scales.astype(np.float16) for case in cases]
    for case, half, power in zip(cases, halves, powers, strict=True):
        parts.append(struct.pack("4q", case.k, case.n, case.bits, case.block_size))
        parts += [array.tobytes() for array in (case.quants, case.scales, half, power)]
    done = subprocess.run([str(driver)], input=b"".join(parts), capture_output=True, check=True)
    found = np.frombuffer(done.stdout, np.uint8)
    for case, half, power in zip(cases, halves, powers, strict=True):
        from_floats = half if are_halves(case.scales) else case.scales
        kinds = {"floats": from_floats, "halves": half, "E8M0": half_powers(power)}
        for kind, way in itertools.product(kinds, ("alone", "in parts")):
            expected = packed(case, kinds[kind])
            what = f"{kind}, {way}: {case.k}, {case.n}, {case.bits} bits, {case.block_size}"
            assert np.array_equal(found[: expected.size], expected), what
            found = found[expected.size :]
    assert found.size == 0


@pytest.mark.slow
def test_every_size_of_block(driver: Path) -> None:
    shapes = itertools.product(BITS, BLOCK_SIZES, DEPTHS, WIDTHS)
    check(driver, [make_case(seed, *shape, rows=1) for seed, shape in enumerate(shapes)])


def test_more_parts_than_threads(driver: Path) -> None:
    """Packed, it has over 5 MB, and parts have 1 MB; the last panel is not whole."""
    check(driver, [make_case(0, 4, 32, k=1024, n=9001, rows=1)])


@pytest.mark.parametrize("odd", [0.1, -6.1e-5, 2.0**-15, 2.0**-24, 65536.0, 1e-30, np.inf, np.nan])
def test_one_scale_that_is_no_float16(driver: Path, odd: float) -> None:
    """All of the product's are floats then; with a zero in its place none is."""
    case = make_case(1, 4, 32, k=96, n=40, rows=1)
    assert are_halves(case.scales)
    scales = case.scales.copy()
    scales[17, 1] = odd
    check(driver, [case, case.replace(scales=scales), case])


@pytest.mark.parametrize(
    ("first", "last", "is_half"),
    [(104, 143, True), (103, 143, False), (104, 144, False), (0, 254, False)],
)
def test_every_e8m0(driver: Path, first: int, last: int, is_half: bool) -> None:
    """A float16 if half of each of them is one, subnormal ones among them; else floats."""
    of = make_case(0, 4, 32, k=96, n=100, rows=1)
    exponents = np.resize(np.arange(first, last + 1, dtype=np.uint8), of.scales.shape)
    assert half_powers(exponents).dtype == (np.float16 if is_half else np.float32)
    check(driver, [of], exponents)


def test_an_e8m0_that_is_no_number(driver: Path) -> None:
    of = make_case(0, 4, 32, k=96, n=100, rows=1)
    exponents = np.full(of.scales.shape, 120, np.uint8)
    exponents[7, 1] = 255
    check(driver, [of], exponents)


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
