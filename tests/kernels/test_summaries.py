"""onnxport.MatMulNBits with `summary_scales`: what it says of outputs, which stay as they are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from onnxport.serving.row_params import LOG2_E
from tests.kernels import coarse_cases, matmul_cases, norm_cases
from tests.kernels.matmul_cases import Floats, MatMulCase
from tests.kernels.summary_cases import GROUPS, add_summaries, check
from tests.kernels.test_matmul import ISAS
from tests.serving.samplers import native
from tests.tiers import every

SCALES = (-1.0, 0.0, LOG2_E, 3.7, 1e-3)
# Less than a group, both sides of a panel and of a chunk, tasks of several chunks.
WIDTHS = (1, 15, 31, 33, 1000, 1023, 1024, 1025, 2048, 5000, 40_000)
NUM_CASES = 44
GROUP = 11
MOST_SUMMED = 32  # rows of a product with whose outputs sums are made


@pytest.fixture
def available_isas(library: ctypes.CDLL) -> Iterator[list[str]]:
    """The instruction sets that this processor runs; the best one is in use again afterwards."""
    found = [isa for isa in ISAS if library.onnxport_cpu_set_matmul_isa(isa.encode())]
    if not found or not library.onnxport_cpu_summarizes():
        pytest.skip("this processor or this compiler lacks what summaries need")
    yield found
    library.onnxport_cpu_set_matmul_isa(None)


def random_case(seed: int) -> tuple[MatMulCase, Floats]:
    """A case, and scales for its rows."""
    rng = np.random.default_rng(seed)
    bits, block_size = matmul_cases.BITS[seed % 2], (16, 32, 64)[seed % 3]
    n, rows = WIDTHS[seed % len(WIDTHS)], int(rng.choice([1, 2, 4, 5, 16, 17, 33, 260]))
    rows = min(rows, 40) if n > 10_000 else rows
    case = matmul_cases.make_case(seed, bits, block_size, int(rng.choice([5, 64, 100])), n, rows)
    scales = rng.choice(SCALES if seed % 4 else SCALES[:2], rows)
    if seed % 5 == 3:
        case = matmul_cases.with_zero_points(seed, case)
    return case, scales.astype(np.float32)


def told(scales: Floats) -> Floats:
    """What is told where that is asked for."""
    return scales if len(scales) <= MOST_SUMMED else np.minimum(scales, 0)


def run(
    library_path: Path, model: bytes, threads: int = 2, **inputs: object
) -> tuple[Floats, Floats]:
    """The outputs, and what is said of them."""
    session = matmul_cases.session(library_path, model, threads)
    found, summaries = session.run(["y", "summaries"], inputs)
    return found, summaries


@pytest.mark.parametrize("first", every(2, range(0, NUM_CASES, GROUP)))
def test_random_cases(
    library_path: Path, available_isas: list[str], library: ctypes.CDLL, first: int
) -> None:
    for seed in range(first, first + GROUP):
        case, scales = random_case(seed)
        plain = matmul_cases.model(case)
        told_by = set()
        for isa in available_isas:
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            for threads in (1, 2):
                found, summaries = run(
                    library_path, add_summaries(plain), threads, x=case.x, scales=scales
                )
                whole = matmul_cases.session(library_path, plain).run(["y"], {"x": case.x})[0]
                assert found.tobytes() == whole.tobytes()
                check(summaries, found, told(scales))
                told_by.add(known(summaries, told(scales)).tobytes())
        assert len(told_by) == 1, f"seed {seed} has other bits on another instruction set"


def known(summaries: Floats, scales: Floats) -> Floats:
    """Summaries with zeros where there may be anything."""
    summaries = summaries.copy()
    summaries[scales < 0, :-1] = 0
    chunks = (summaries.shape[1] - 1) // 19
    summaries[scales == 0, chunks * 18 : -1] = 0
    return summaries


def test_the_sampler_says_the_same(library_path: Path, available_isas: list[str]) -> None:
    assert available_isas
    for seed in range(12):
        case, scales = random_case(seed)
        model = add_summaries(matmul_cases.model(case))
        found, summaries = run(library_path, model, x=case.x, scales=scales)
        own = native().summarize(found, told(scales).tolist())
        assert known(own, told(scales)).tobytes() == known(summaries, told(scales)).tobytes()


def test_rows_that_are_not_finite(
    library_path: Path, available_isas: list[str], library: ctypes.CDLL
) -> None:
    case = matmul_cases.make_case(3, 8, 32, 64, 3000, 6)
    x = case.x.copy()
    x[1, 5], x[4, 6] = np.inf, np.nan
    scales = np.full(6, LOG2_E, np.float32)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        model = add_summaries(matmul_cases.model(case))
        found, summaries = run(library_path, model, x=x, scales=scales)
        assert np.isnan(found[[1, 4]]).all()
        check(summaries, found, told(scales))


@pytest.mark.parametrize("rows", every(2, [9, 16, 17, 32, 33, 64, 256, 257]))
def test_maxima_of_many_rows(
    library_path: Path, available_isas: list[str], library: ctypes.CDLL, rows: int
) -> None:
    """AMX tells of whole groups while it makes them, and not of others, nor with a bias."""
    rng = np.random.default_rng(rows)
    for n, k, bits, block_size in ((4096, 200, 8, 128), (3072 + 64, 70, 4, 32), (1088, 64, 8, 64)):
        case = matmul_cases.make_case(rows, bits, block_size, k, n, rows)
        plain = matmul_cases.model(case)
        bias = rng.standard_normal(n).astype(np.float32)
        scales = rng.choice(SCALES[:2], rows).astype(np.float32)
        x = case.x.copy()
        x[rows // 2] = 0  # zeros of either sign
        spoiled = x.copy()
        spoiled[rows // 3, 3] = np.nan
        seen = set()
        for isa in available_isas:
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            for model in (plain, matmul_cases.add_bias(plain, bias)):
                for inputs in (x, spoiled):
                    whole = matmul_cases.session(library_path, model).run(["y"], {"x": inputs})[0]
                    found, summaries = run(
                        library_path, add_summaries(model), x=inputs, scales=scales
                    )
                    assert found.tobytes() == whole.tobytes()
                    check(summaries, found, scales)
                    if inputs is x:
                        seen.add((model, known(summaries, scales).tobytes()))
        assert len(seen) == 2, "other bits on another instruction set"


def test_beside_a_norm(library_path: Path, available_isas: list[str]) -> None:
    assert available_isas
    case, scales = random_case(9)
    norm = norm_cases.random_norm(1, case.x)
    plain = norm_cases.add_norm(matmul_cases.model(case), norm)
    inputs = {"x": case.x, "skip": norm.skip}
    session = matmul_cases.session(library_path, plain)
    names = [one.name for one in session.get_outputs()]
    wanted = session.run(names, inputs)
    session = matmul_cases.session(library_path, add_summaries(plain))
    *found, summaries = session.run([*names, "summaries"], {**inputs, "scales": scales})
    for one, other in zip(found, wanted, strict=True):
        assert one.tobytes() == other.tobytes()
    check(summaries, found[0], scales)


def is_all_told(summary: Floats) -> bool:
    """Whether the smallest values are there."""
    chunks = len(summary) // (GROUPS + 3)
    return not np.isneginf(summary[(GROUPS + 1) * chunks : (GROUPS + 2) * chunks]).all()


def test_of_rows_that_are_not_all_exact_no_sums_and_smallest_values_are_told(
    library_path: Path, available_isas: list[str], library: ctypes.CDLL
) -> None:
    case = coarse_cases.gaussian_case(1, 20_000, 256, 40)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        model = add_summaries(coarse_cases.add_exact(matmul_cases.model(case)))
        session = matmul_cases.session(library_path, model)
        plain = matmul_cases.session(library_path, matmul_cases.model(case))
        coarse = 0
        for call in range(coarse_cases.GROWING_CALLS + 3):
            rows = (1, 2, 40)[call % 3]
            x, scales = case.x[:rows], np.full(rows, LOG2_E, np.float32)
            if rows > 1:
                scales[0] = (LOG2_E, 0, -1)[call % 5 % 3]
            exact = np.full(rows, 0 if call % 4 == 3 else 3, np.int32)
            inputs = {"x": x, "exact": exact, "scales": scales}
            found, summaries = session.run(["y", "summaries"], inputs)
            whole = plain.run(["y"], {"x": x})[0]
            if is_all_told(summaries[-1]):
                assert found.tobytes() == whole.tobytes()
                check(summaries, found, told(scales))
                continue
            assert rows <= 16
            assert exact[0]
            coarse += int((found != whole).sum())
            check(summaries, found, np.minimum(scales, 0), has_least=False)
        assert coarse


def test_of_rows_that_are_no_numbers_nothing_is_told(
    library_path: Path, available_isas: list[str], library: ctypes.CDLL
) -> None:
    case = coarse_cases.gaussian_case(1, 20_000, 256, 2)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        model = add_summaries(coarse_cases.add_exact(matmul_cases.model(case)))
        session = matmul_cases.session(library_path, model)
        for call in range(coarse_cases.GROWING_CALLS):
            x = case.x[:2].copy()
            x[call % 2, 5] = np.nan
            given = {"exact": np.ones(2, np.int32), "scales": np.zeros(2, np.float32)}
            found, summaries = session.run(["y", "summaries"], {"x": x, **given})
            assert np.isnan(found[call % 2]).all()
            assert (summaries[:, -1] == -1).all()
        del session  # or the next one has its four bits of the weights, and does without after NaN


def test_no_rows(library_path: Path, available_isas: list[str]) -> None:
    assert available_isas
    case = matmul_cases.make_case(1, 8, 32, 64, 2000, 1)
    model = add_summaries(matmul_cases.model(case))
    none = {"x": case.x[:0], "scales": np.zeros(0, np.float32)}
    found, summaries = run(library_path, model, **none)
    assert (found.shape, summaries.shape) == ((0, 2000), (0, 39))


def test_what_does_not_fit_is_refused(library_path: Path, available_isas: list[str]) -> None:
    assert available_isas
    case = matmul_cases.make_case(1, 8, 32, 64, 2000, 3)
    plain = matmul_cases.model(case)
    session = matmul_cases.session(library_path, add_summaries(plain))
    with pytest.raises(Exception, match="a number for each of 3 rows, found 2"):
        session.run(["summaries"], {"x": case.x, "scales": np.zeros(2, np.float32)})
    session = matmul_cases.session(library_path, add_summaries(plain, output=False))
    with pytest.raises(Exception, match="there is no fourth output"):
        session.run(["y"], {"x": case.x, "scales": np.zeros(3, np.float32)})
    session = matmul_cases.session(library_path, add_summaries(plain, scales=False))
    with pytest.raises(Exception, match="there is no summary_scales"):
        session.run(["y"], {"x": case.x})
