"""onnxport.MatMulNBits with `exact`: few outputs of a row have the bits of the whole product."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from tests.kernels import coarse_cases as cases
from tests.kernels import matmul_cases, norm_cases
from tests.kernels.coarse_cases import ALL_ALLOWED, Asked, numbers
from tests.kernels.matmul_cases import Floats, MatMulCase
from tests.kernels.test_matmul import available_isas
from tests.tiers import every

__all__ = ["available_isas"]  # a fixture

NUM_CASES = 80
GROUP = 20


class Pair:
    """Sessions of a case with `exact`, and without; the last one's end, with all they made.

    Otherwise those of the same weights would share four bits of them.
    """

    _last: ClassVar[Pair | None] = None

    def __init__(self, library_path: Path, case: MatMulCase) -> None:
        if Pair._last is not None:
            del Pair._last.coarse, Pair._last.plain
        Pair._last = self
        serialized = matmul_cases.model(case)
        self.coarse = matmul_cases.session(library_path, cases.add_asked(serialized))
        self.plain = matmul_cases.session(library_path, serialized)

    def run(
        self,
        x: Floats,
        exact: NDArray[np.int32],
        allowed: NDArray[np.int32] | None = None,
        races: NDArray[np.float64] | None = None,
    ) -> Floats:
        feeds = Asked(exact, allowed, races).feeds()
        found: Floats = self.coarse.run(["y"], {"x": x, **feeds})[0]
        return found

    def whole(self, x: Floats) -> Floats:
        found: Floats = self.plain.run(["y"], {"x": x})[0]
        return found

    def check(
        self,
        x: Floats,
        exact: NDArray[np.int32],
        allowed: NDArray[np.int32] | None = None,
        races: NDArray[np.float64] | None = None,
    ) -> Floats:
        found = self.run(x, exact, allowed, races)
        cases.check(found, self.whole(x), exact, allowed, races)
        return found

    def grow(self, x: Floats) -> None:
        """Calls until four bits of all weights are there."""
        for _ in range(cases.GROWING_CALLS):
            self.run(x[:1], numbers([1]))


@pytest.mark.parametrize("first", every(4, range(0, NUM_CASES, GROUP)))
def test_random_cases(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], first: int
) -> None:
    for seed in range(first, first + GROUP):
        case = cases.random_case(seed)
        for isa in available_isas:
            rng = np.random.default_rng(seed)
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            pair = Pair(library_path, case)
            for _ in range(cases.GROWING_CALLS + 3):
                count = int(rng.integers(1, len(case.x) + 1))
                x = case.x[rng.permutation(len(case.x))[:count]]
                pair.check(x, *cases.random_asked(rng, count, case.n))


def test_all_outputs_are_exact_beside_zero_points(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    case = matmul_cases.with_zero_points(1, cases.gaussian_case(1, 20_000, 256, 4))
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        pair = Pair(library_path, case)
        pair.grow(case.x)
        found = pair.run(case.x, numbers([1] * len(case.x)))
        assert found.tobytes() == pair.whole(case.x).tobytes(), isa


def test_a_vocabulary(library_path: Path, library: ctypes.CDLL, available_isas: list[str]) -> None:
    """Most of it is not computed again; how many panels have four bits grows call by call."""
    rng = np.random.default_rng(5)
    case = cases.gaussian_case(1, 20_000, 256, 7)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        pair = Pair(library_path, case)
        shares = []
        for _ in range(cases.GROWING_CALLS + 1):
            found, whole = pair.check(case.x[:1], numbers([1])), pair.whole(case.x[:1])
            shares.append(float(np.mean(found != whole)))
        assert shares[0] == 0
        # Other models of this process may have a thread that makes some between calls.
        assert shares[1] > 0.05
        assert all(more >= less for less, more in itertools.pairwise(shares))
        assert shares[-1] > 0.7
        for rows in range(1, 18):
            for _ in range(2):
                x = rng.standard_normal((rows, case.k)).astype(np.float32)
                found = pair.check(x, cases.random_exact(rng, rows))
        everything = pair.check(case.x[:1], numbers([cases.MOST]))
        assert np.mean(everything != pair.whole(case.x[:1])) < 1


@pytest.mark.parametrize("k", every(2, [256, 1024]))
def test_near_ties(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], k: int
) -> None:
    """What four bits say of the largest outputs is wrong, and how far off it is must be known."""
    for seed in range(3):
        case = cases.near_ties(seed, 20_000, k, 64)
        rng = np.random.default_rng(seed)
        for isa in available_isas:
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            pair = Pair(library_path, case)
            pair.grow(case.x)
            for first in range(0, len(case.x), 4):
                x = case.x[first : first + 4]
                found = pair.check(x, cases.random_exact(rng, len(x)))
                assert np.mean(found != pair.whole(x)) > 0.4


def words_of(bits: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Words, [rows, N / 32], with these bits, [rows, N]; N is a multiple of 32."""
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def test_what_is_not_allowed_is_not_computed(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    """Nor does it take the place of what is; rows with other masks get their own."""
    rng = np.random.default_rng(5)
    case = cases.gaussian_case(1, 20_000, 256, 8)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        pair = Pair(library_path, case)
        whole = pair.whole(case.x)
        for calls in (1, cases.GROWING_CALLS):  # before there are four bits, and with them
            few = words_of(rng.random((8, case.n)) < 0.0005)
            for count in (1, 5, ALL_ALLOWED):
                found = pair.check(case.x, numbers([count] * 8), few)
                assert np.mean(found != whole) > 0.8
            for _ in range(calls):
                pair.check(case.x[:1], numbers([1]))
        best = whole.argmax(axis=1)
        most = rng.random(whole.shape) < 0.9
        most[np.arange(8), best] = False
        for rows in (1, 3, 8):
            found = pair.check(case.x[:rows], numbers([1] * rows), words_of(most[:rows]))
            assert np.mean(found != whole[:rows]) > 0.4
            allowed = np.where(most, whole, -np.inf)[:rows]
            assert (found.argmax(axis=1) == allowed.argmax(axis=1)).all()
        # One row may get anything, and one nothing.
        mixed = words_of(np.stack([np.ones(case.n, bool), np.zeros(case.n, bool), most[2]]))
        pair.check(case.x[:3], numbers([1, 7, 2]), mixed)
        pair.check(case.x[:3], numbers([2, ALL_ALLOWED, 1]), mixed)


def test_fewer_are_allowed_than_must_be_exact(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    case = cases.gaussian_case(1, 8192, 256, 2)
    bits = np.zeros((2, case.n), bool)
    bits[0, [7, 400, 401, 8191]] = True
    bits[1, 5000:5010] = True
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        pair = Pair(library_path, case)
        pair.grow(case.x)
        for counts in ([1, 1], [4, 10], [64, 64], [ALL_ALLOWED, 64], [3, ALL_ALLOWED]):
            found = pair.check(case.x, numbers(counts), words_of(bits))
            assert (found[~bits] == np.finfo(np.float32).min).all()


@pytest.mark.parametrize("temperature", every(2, [0.05, 0.5, 1.0, 4.0, 100.0]))
def test_what_is_drawn(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], temperature: float
) -> None:
    """From all outputs, or what is allowed; most others are not computed."""
    rng = np.random.default_rng(5)
    case = cases.gaussian_case(1, 20_000, 256, 7)
    case = case.replace(scales=case.scales / np.float32(3))
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        pair = Pair(library_path, case)
        pair.grow(case.x)
        for rows in (1, 2, 7):
            for count in (1, 6):
                for share in (None, 0.9, 0.01):
                    races = np.stack([rng.random(rows), np.full(rows, 1 / temperature)], axis=1)
                    bits = rng.random((rows, case.n)) < (share or 1)
                    x, exact = case.x[:rows], numbers([count] * rows)
                    found = pair.check(x, exact, None if share is None else words_of(bits), races)
                    if rows == count == 1:
                        assert np.mean(found != pair.whole(x)) > 0.4
        mixed = np.array([[0.3, 1.0], [0.0, 0.0], [0.9, 1.0]])
        pair.check(case.x[:3], numbers([1, 2, 3]), None, mixed)


@pytest.mark.parametrize("k", every(2, [256, 1024]))
def test_near_ties_of_what_is_allowed(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], k: int
) -> None:
    for seed in range(2):
        case = cases.near_ties(seed, 20_000, k, 16)
        rng = np.random.default_rng(seed)
        for isa in available_isas:
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            pair = Pair(library_path, case)
            pair.grow(case.x)
            for first in range(0, len(case.x), 4):
                x = case.x[first : first + 4]
                allowed = words_of(rng.random((len(x), case.n)) < rng.choice([0.1, 0.5, 0.9]))
                pair.check(x, cases.random_exact(rng, len(x)), allowed)
                races = np.stack([rng.random(len(x)), 10.0 ** rng.uniform(-2, 1, len(x))], axis=1)
                pair.check(x, cases.random_exact(rng, len(x)), allowed, races)


@pytest.mark.parametrize("errors", [[6.7, 0], [3, -6], [-6, 3], [-6, 6], [3, -3, -6, 0, 6.7]])
def test_what_misleads(
    library_path: Path,
    library: ctypes.CDLL,
    available_isas: list[str],
    errors: list[float],
) -> None:
    """As far as seven standard deviations, outputs are found where four bits say otherwise."""
    case = cases.misleading(errors)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        pair = Pair(library_path, case)
        pair.grow(case.x)
        for count in range(1, len(errors) + 1):
            found = pair.check(case.x, numbers([count]))[0]
            assert list(np.argsort(-found)[:count]) == [7 + 320 * i for i in range(count)]


@pytest.mark.parametrize("kind", ["gaussian", "constant", "rising"])
def test_errors_are_those_of_theory(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], kind: str
) -> None:
    """Their variance does not depend on the weights, nor do they lean to one side."""
    rng = np.random.default_rng(3)
    case = cases.gaussian_case(4, 8192, 512, 40)
    if kind != "gaussian":
        levels = np.repeat(rng.integers(-127, 120, (8192, 1)), 512, 1)
        if kind == "rising":
            levels += np.arange(512) % 8
        case = cases.case_of(levels, rng.uniform(0.5, 1, (40, 512)))
    theory = cases.deviations(case)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        pair = Pair(library_path, case)
        pair.grow(case.x)
        errors = []
        for row, sigma in zip(case.x, theory, strict=True):
            found = pair.check(row[None], numbers([1]))[0].astype(np.float64)
            error = (found - pair.whole(row[None])[0]) / sigma
            errors.append(error[error != 0])
        some = np.concatenate(errors)
        assert len(some) > theory.size / 2
        assert np.abs(some).max() < 6
        # Of weights that repeat there are 17 different errors, in which chance has more of a say.
        low, high = (0.9, 1.1) if kind == "gaussian" else (0.4, 2)
        assert low < np.sqrt(np.mean(some**2)) < high
        assert abs(np.mean(some)) < 0.1


def odd_cases() -> dict[str, MatMulCase]:
    """Weights and inputs that no model has, or few of its rows."""
    rng = np.random.default_rng(8)
    n, k = 3000, 256
    levels, x = rng.integers(-127, 128, (n, k)), rng.standard_normal((3, k))
    scales = (rng.standard_normal((n, 2)) * 0.02).astype(np.float32)
    outlier, hollow, blank = x.copy(), levels.copy(), scales.copy()
    outlier[:, 7] = 1e6
    hollow[:, 128:] = 0
    blank[rng.random(blank.shape) < 0.5] = 0
    aligned = levels.copy()
    aligned[::100] = 127 * np.sign(x[0])
    steps = np.repeat(rng.integers(-127, 128, (n, 1)), k, 1)
    close = cases.near_ties(2, n, k, 3)
    return {
        "constant rows": cases.case_of(steps, x),
        "ones": cases.case_of(steps, np.ones_like(x)),
        "equal rows": cases.case_of(np.tile(levels[:60], (50, 1)), x),
        "all equal": cases.case_of(np.tile(levels[:1], (n, 1)), x),
        "aligned": cases.case_of(aligned, x),
        "extremes": cases.case_of(127 * np.sign(levels), np.sign(x)),
        "outlier": cases.case_of(levels, outlier, scales),
        "blocks of zeros": cases.case_of(hollow, x, scales),
        "scales of zero": cases.case_of(levels, x, blank),
        "no scales": cases.case_of(levels, x, 0.0),
        "negative scales": cases.case_of(levels, x, -np.abs(scales)),
        "inputs of zero": cases.case_of(levels, np.zeros_like(x), scales),
        "denormal inputs": cases.case_of(levels, x * 1e-39, scales),
        "small inputs": close.replace(x=close.x * np.float32(1e-25)),
        "smallest inputs": close.replace(x=close.x * np.float32(1e-35)),
        "small scales": close.replace(scales=close.scales * np.float32(1e-25)),
        "denormal outputs": close.replace(
            x=close.x * np.float32(1e-25), scales=close.scales * np.float32(1e-18)
        ),
    }


@pytest.mark.parametrize("kind", every(2, odd_cases()))
def test_odd_cases(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], kind: str
) -> None:
    case = odd_cases()[kind]
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        for counts in ((1, 1, 1), (1, 20, 64), (64, 64, 64)):
            pair = Pair(library_path, case)
            for _ in range(cases.GROWING_CALLS + 2):
                pair.check(case.x, numbers(counts))


@pytest.mark.parametrize("make", [cases.swallowed, cases.overflowing])
def test_what_floats_cannot_tell(
    library_path: Path,
    library: ctypes.CDLL,
    available_isas: list[str],
    make: Callable[[], MatMulCase],
) -> None:
    """The error of four bits' sums is what rounding makes of them, not what the theory says."""
    case = make()
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        pair = Pair(library_path, case)
        whole = pair.whole(case.x)[0]
        assert list(np.argsort(-whole)[:2]) == [7, 39]
        for _ in range(cases.GROWING_CALLS + 1):
            pair.check(case.x, numbers([1]))


@pytest.mark.parametrize("factor", [1e-25, 1e25])
def test_what_floats_can_tell(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], factor: float
) -> None:
    """Outputs that are small or large, but not that much, are not all computed."""
    case = cases.gaussian_case(1, 3000, 256, 1)
    x = case.x * np.float32(factor)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        pair = Pair(library_path, case)
        pair.grow(case.x)
        assert np.mean(pair.check(x, numbers([1])) != pair.whole(x)) > 0.3


def test_what_is_not_finite(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    """In a row's inputs: it is all NaN. In outputs: all are exact. The other rows are, too."""
    case = cases.gaussian_case(2, 3000, 256, 3)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        pair = Pair(library_path, case)
        for calls in (1, cases.GROWING_CALLS):
            for _ in range(calls):
                pair.check(case.x, numbers([5, 5, 5]))
            for value in (np.nan, np.inf, -np.inf):
                x = case.x.copy()
                x[1, 200] = value
                found = pair.run(x, numbers([5, 5, 5]))
                assert np.isnan(found[1]).all()
                assert found.tobytes() == pair.whole(x).tobytes()
                allowed = cases.random_allowed(np.random.default_rng(1), 3, case.n)
                found, whole = pair.run(x, numbers([5, -1, 5]), allowed), pair.whole(x)
                for row in (0, 2):
                    bits = cases.bits_of(allowed[row], case.n)
                    assert found[row][bits].tobytes() == whole[row][bits].tobytes()
                assert np.isnan(found[1][cases.bits_of(allowed[1], case.n)]).all()
        # So large that sums overflow, some of them on the way alone.
        x = case.x * np.float32(3e36)
        x[:, 128:] *= -1
        whole = pair.whole(x)
        assert np.isinf(whole).any()
        assert np.isfinite(whole).any()
        assert pair.run(x, numbers([5, 5, 5])).tobytes() == whole.tobytes()


@pytest.mark.parametrize("output", [0, 10_007, 19_999])
def test_a_weight_of_minus_128(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], output: int
) -> None:
    """Four bits cannot stand for it: of its panel all eight are read at once, of others are not."""
    case = cases.gaussian_case(3, 20_000, 256, 2)
    case.quants[output, 1, 77] = 0
    panel = slice(output // 32 * 32, output // 32 * 32 + 32)
    allowed = cases.random_allowed(np.random.default_rng(1), 2, case.n)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        pair = Pair(library_path, case)
        pair.grow(case.x)
        found, whole = pair.check(case.x, numbers([1, 1])), pair.whole(case.x)
        assert found[:, panel].tobytes() == whole[:, panel].tobytes()
        assert np.mean(found != whole) > 0.4
        levels = case.quants[output].astype(np.float32) - 128  # of which it is the largest output
        x = (levels * case.scales[output][:, None]).reshape(1, case.k)
        found = pair.check(x, numbers([1]))
        assert int(found[0].argmax()) == output
        found = pair.run(case.x, numbers([1, -1]), allowed)
        bits = cases.bits_of(allowed[1], case.n)
        assert found[1][bits].tobytes() == whole[1][bits].tobytes()


def test_many_weights_of_minus_128(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    """With one in more than a third of the panels nothing would be gained: the product is whole."""
    case = cases.gaussian_case(3, 3000, 256, 2)
    case.quants[np.arange(0, 3000, 64), 1, 77] = 0
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        pair = Pair(library_path, case)
        for _ in range(cases.GROWING_CALLS):
            pair.check(case.x, numbers([1, 3]))
        assert pair.run(case.x, numbers([1, 3])).tobytes() == pair.whole(case.x).tobytes()


def test_input_norms(library_path: Path, library: ctypes.CDLL, available_isas: list[str]) -> None:
    """What is added up and normalized is as without `exact`."""
    for seed, k in enumerate((128, 256, 896)):
        case = cases.gaussian_case(seed, 5000, k, 4)
        norm = norm_cases.random_norm(seed, case.x)
        serialized = norm_cases.add_norm(matmul_cases.model(case), norm, more=["normalized"])
        for isa in available_isas:
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            plain = matmul_cases.session(library_path, serialized)
            coarse = matmul_cases.session(library_path, cases.add_exact(serialized))
            feeds = {"x": case.x, "skip": norm.skip}
            whole, *wanted = plain.run(None, feeds)
            exact = numbers([1, 2, 3, 40])
            for _ in range(cases.GROWING_CALLS + 2):
                found, *more = coarse.run(None, feeds | {"exact": exact})
                cases.check(found, whole, exact)
                assert [a.tobytes() for a in more] == [a.tobytes() for a in wanted]


def test_rows_that_want_all_outputs(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    """All outputs of all rows are exact if one asks for none, or too many, or rows are many."""
    case = cases.gaussian_case(6, 3000, 256, 17)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        pair = Pair(library_path, case)
        pair.grow(case.x)
        assert pair.run(case.x[:2], numbers([1, 1])).tobytes() != pair.whole(case.x[:2]).tobytes()
        for exact in ([0], [-1], [65], [2**31 - 1], [-(2**31)], [1, 0], [65, 1], [1, -5, 1]):
            x = case.x[: len(exact)]
            assert pair.run(x, numbers(exact)).tobytes() == pair.whole(x).tobytes(), exact
        assert pair.run(case.x, numbers([1] * 17)).tobytes() == pair.whole(case.x).tobytes()
        assert pair.run(case.x[:0], numbers([])).shape == (0, case.n)


@pytest.mark.parametrize("exact", [[], [1], [1, 1, 1], [[1, 1], [1, 1]]])
def test_another_number_of_rows_is_refused(
    library_path: Path, available_isas: list[str], exact: list[int]
) -> None:
    assert available_isas
    case = cases.gaussian_case(6, 64, 128, 2)
    pair = Pair(library_path, case)
    count = np.size(exact)
    with pytest.raises(Exception, match=f"a number for each of 2 rows, found {count}|Invalid rank"):
        pair.run(case.x, numbers(exact))


def test_masks_that_do_not_fit_are_refused(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    case = cases.gaussian_case(6, 100, 128, 2)
    pair = Pair(library_path, case)
    for shape in ((1, 4), (2, 3), (3, 4), (2, 100)):
        with pytest.raises(Exception, match=r"a bit for each output for each of 2 rows, found \d"):
            pair.run(case.x, numbers([1, 1]), np.full(shape, -1, np.int32))
    serialized = cases.add_asked(matmul_cases.model(case))
    with pytest.raises(Exception, match="two numbers for each of 2 rows, found 6"):
        pair.run(case.x, numbers([1, 1]), None, np.ones((3, 2)))
    for place, name in ((13, "allowed"), (12, "races")):
        without = onnx.load_from_string(serialized)
        without.graph.node[0].input[6] = without.graph.node[0].input[place] = ""
        session = matmul_cases.session(library_path, without.SerializeToString())
        with pytest.raises(Exception, match=f"the input {name} needs exact"):
            session.run(["y"], {"x": case.x, **Asked(numbers([])).feeds()})


def test_products_that_have_no_four_bits(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    """Weights that have four bits anyway, and a bias, which is added to them."""
    case = cases.gaussian_case(7, 3000, 256, 2)
    four = matmul_cases.make_case(7, 4, 128, 256, 3000, 2)
    bias = np.random.default_rng(7).standard_normal(case.n).astype(np.float32)
    models = {
        "4 bits": (four, matmul_cases.model(four)),
        "bias": (case, matmul_cases.add_bias(matmul_cases.model(case), bias)),
    }
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        for name, (of, serialized) in models.items():
            plain = matmul_cases.session(library_path, serialized)
            coarse = matmul_cases.session(library_path, cases.add_exact(serialized))
            whole = plain.run(["y"], {"x": of.x})[0]
            for _ in range(cases.GROWING_CALLS + 2):
                found = coarse.run(["y"], {"x": of.x, "exact": numbers([1, 1])})[0]
                assert found.tobytes() == whole.tobytes(), name


def test_four_bits_are_made_between_calls(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    """Once a call has begun; in any thread, whatever calls do; then nothing is left."""
    rng = np.random.default_rng(6)
    case = cases.gaussian_case(2, 20_000, 256, 7)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        pair = Pair(library_path, case)
        while library.onnxport_cpu_make_plane_part():
            pass
        found, whole = pair.check(case.x[:1], numbers([1])), pair.whole(case.x[:1])
        assert found.tobytes() == whole.tobytes(), "made before any call"
        left = library.onnxport_cpu_plane_parts_left()
        assert left > 8
        with ThreadPoolExecutor(2) as pool:
            making = [pool.submit(library.onnxport_cpu_make_plane_part) for _ in range(left // 2)]
            for _ in range(3):
                count = int(rng.integers(1, 5))
                pair.check(case.x[:count], cases.random_exact(rng, count))
            assert all(one.result() in (0, 1) for one in making)
        while library.onnxport_cpu_make_plane_part():
            pass
        assert library.onnxport_cpu_plane_parts_left() == 0
        found = pair.check(case.x[:1], numbers([1]))
        assert np.mean(found != whole) > 0.7
        pair.check(case.x, numbers([1] * len(case.x)))


def test_each_session_rests_by_itself(library_path: Path) -> None:
    """Though four bits are those of all with these weights."""
    case = cases.gaussian_case(1, 20_000, 256, 2)
    pair = Pair(library_path, case)
    other = matmul_cases.session(library_path, cases.add_asked(matmul_cases.model(case)))
    pair.grow(case.x)
    broken = case.x[:1].copy()
    broken[0, 5] = np.nan
    pair.run(broken, numbers([1]))  # computes all twice, and does without four bits from now on
    whole = pair.whole(case.x[:1])
    assert pair.run(case.x[:1], numbers([1])).tobytes() == whole.tobytes()
    feeds = {"x": case.x[:1], **Asked(numbers([1])).feeds()}
    assert np.mean(other.run(["y"], feeds)[0] != whole) > 0.7


def test_concurrent_calls(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    """While four bits are made, and after calls that computed too much twice and made it rest."""
    calls = 12
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        for seed in range(3):
            case = cases.gaussian_case(seed, 6000, 256, calls)
            pair = Pair(library_path, case)
            whole = pair.whole(case.x)

            def call(
                seed: int, pair: Pair = pair, x: Floats = case.x, all_of: Floats = whole
            ) -> None:
                rng = np.random.default_rng(seed)
                rows = rng.permutation(calls)[: rng.integers(1, 5)]
                exact = cases.random_exact(rng, len(rows))
                cases.check(pair.run(x[rows], exact), all_of[rows], exact)

            with ThreadPoolExecutor(4) as pool:
                for done in [pool.submit(call, i) for i in range(150)]:
                    done.result()
