"""onnxport.GatedExperts with weights in MXFP4: the bits of exact sums of integers."""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from onnxport.exporter import mxfp4
from tests.kernels import experts_cases, fp4_cases, matmul_cases
from tests.kernels.experts_cases import ExpertsCase, Extras
from tests.kernels.matmul_cases import Floats, MatMulCase
from tests.kernels.mlp_cases import MlpCase
from tests.kernels.test_mlp import Sets, available_sets, use
from tests.tiers import every

__all__ = ["available_sets"]

NUM_CASES = 42
GROUPS = 7  # cases of one, so far apart, have all ranges of exponents
BLOCK = 32
# Both sides of what is done with one row, with few, with many and with whole tiles of them.
ROWS = (1, 2, 3, 4, 7, 8, 9, 11, 16, 40, 70)
SIX, MINUS_SIX = 0x77, 0xFF  # two of them in a byte


def check(library_path: Path, library: ctypes.CDLL, sets: Sets, case: ExpertsCase) -> Floats:
    """Whether all sets give the bits that there should be, which are returned."""
    for one in sets:
        use(library, one)
        found = experts_cases.run(library_path, case)
        wanted = experts_cases.expected(library_path, case)
        assert np.array_equal(np.isnan(found), np.isnan(wanted)), one
        numbers = ~np.isnan(wanted)
        assert found[numbers].tobytes() == wanted[numbers].tobytes(), one
    return found


def single(
    first: MatMulCase, second: MatMulCase, extras: Extras = experts_cases.NONE
) -> ExpertsCase:
    """A layer of one expert."""
    logits = np.zeros((len(first.x), 1), np.float32)
    return ExpertsCase([MlpCase(first, second)], logits, 1, normalize=True, extras=extras)


def product(quants: NDArray[np.uint8], scales: Floats, x: Floats) -> MatMulCase:
    return MatMulCase(4, BLOCK, x, quants, scales.astype(np.float32), is_fp4=True)


def packed(nibbles: NDArray[np.integer]) -> NDArray[np.uint8]:
    """Nibbles [N, K] as quants."""
    pairs = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    return pairs.astype(np.uint8).reshape(len(nibbles), -1, BLOCK // 2)


def passing(rows: int, blocks: int) -> tuple[MatMulCase, Extras]:
    """Gate and up that give every row SiLU of 1 and no more: weights of zero, and biases."""
    inner = blocks * BLOCK
    biases = np.ones((1, 2 * inner), np.float32)
    quants = np.zeros((2 * inner, 1, BLOCK // 2), np.uint8)
    x = np.ones((rows, BLOCK), np.float32)
    return product(quants, np.ones((2 * inner, 1)), x), Extras(gate_up_bias=biases)


def test_the_reference_is_what_the_exporter_reads() -> None:
    quants = np.arange(256, dtype=np.uint8).repeat(2).reshape(32, 1, 16)
    for exponent in (0, 1, 100, 127, 252, 255):
        with np.errstate(under="ignore"):
            scale = np.ldexp(np.float32(1), exponent - 128) if exponent < 255 else np.nan
        case = product(quants, np.full((32, 1), scale), np.zeros((1, BLOCK), np.float32))
        assert (case.stored_scales == exponent).all()
        wanted = mxfp4.decode(quants, np.full((32, 1), exponent, np.uint8))
        np.testing.assert_array_equal(matmul_cases.weights_of(case)[:, 0], wanted)


@pytest.mark.parametrize("first", every(GROUPS, range(GROUPS)))
def test_random_cases(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, first: int
) -> None:
    for seed in range(first, NUM_CASES, GROUPS):
        check(library_path, library, available_sets, fp4_cases.random_case(seed))


def test_it_is_what_it_says(library_path: Path, library: ctypes.CDLL, available_sets: Sets) -> None:
    """With GPT-OSS's activation, against NumPy in float64."""
    case = fp4_cases.make_case(8, (384, 200, 64), 40, (4, 2))
    case = case.replace(extras=experts_cases.random_extras(8, case))
    for sets in available_sets:
        use(library, sets)
        experts_cases.check(case, experts_cases.run(library_path, case))


def test_every_number_in_every_place(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets
) -> None:
    """Of each row the levels of one input, of 16 features that differ in every place."""
    places = 2 * BLOCK
    x = np.eye(places, dtype=np.float32)
    nibbles = np.zeros((2 * places, places), np.uint8)
    nibbles[:places] = 7 * np.eye(places)  # a row's only gate is 24, which is its SiLU
    gate_up = product(packed(nibbles), np.full((2 * places, 2), 2), x)
    ones = Extras(gate_up_bias=np.repeat([0, 1], places)[None].astype(np.float32))
    nibbles = (np.arange(96)[:, None] + np.arange(places)) % 16
    case = single(gate_up, product(packed(nibbles), np.full((96, 2), 0.5), x), ones)
    whole = check(library_path, library, available_sets, case)
    levels = matmul_cases.twice_e2m1(nibbles.astype(np.int64))
    np.testing.assert_allclose(whole, 12.0 * levels.T, rtol=1e-6)
    assert all(len(set(column)) == 15 for column in levels.T)  # with a zero of either sign
    for sets in available_sets:
        use(library, sets)
        session = matmul_cases.session(library_path, experts_cases.model(case))
        for count in ROWS:
            for first in range(0, places, count):
                rows = slice(first, first + count)
                found = session.run(["y"], {"x": x[rows], "logits": case.logits[rows]})[0]
                np.testing.assert_allclose(found, 12.0 * levels.T[rows], rtol=1e-6)


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("rows", ROWS)
def test_the_largest_sums(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, rows: int, blocks: int
) -> None:
    """Weights of 6 and -6 and quants of 127 and -127: twice as much as 16 bits would hold."""
    rng = np.random.default_rng(rows)
    patterns = np.array([[SIX] * 16, [MINUS_SIX] * 16, [SIX, MINUS_SIX] * 8, [0x7F] * 16], np.uint8)
    both = np.arange(70) % 4
    quants = patterns[both][:, None].repeat(blocks, 1)
    signs = np.array(
        [np.ones(BLOCK), -np.ones(BLOCK), np.tile([1, -1], 16), rng.choice([1, -1], 32)]
    )
    x = np.tile(signs, blocks)[np.arange(rows) % 4].astype(np.float32)
    scales = np.full((70, blocks), 2.0**-16, np.float32)
    # Gates and ups of 35 features; then down, to which each sign comes by ups of equal size.
    gate_up = product(quants, scales, x)
    largest = abs(matmul_cases.product_bits(gate_up)).max()
    np.testing.assert_allclose(largest, BLOCK * 12 * blocks * 2.0**-16, rtol=1e-6)
    down = product(quants[:, :1].repeat(2, 1), scales[:, :1].repeat(2, 1), x[:1, :1].repeat(35, 1))
    check(library_path, library, available_sets, single(gate_up, down))
    passed, extras = passing(rows, blocks)
    assert extras.gate_up_bias is not None
    for ups in signs:
        extras.gate_up_bias[0, blocks * BLOCK :] = np.tile(ups, blocks)
        down = product(quants, scales, np.zeros((1, blocks * BLOCK), np.float32))
        check(library_path, library, available_sets, single(passed, down, extras))


@pytest.mark.parametrize("last", [143, 254])
@pytest.mark.parametrize("rows", [1, 9, 17])
def test_every_power_of_two(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, rows: int, last: int
) -> None:
    """Those of which half is a float16, and all: from subnormal floats to what becomes infinite."""
    exponents = np.arange(104 if last == 143 else 0, last + 1)
    quants = np.random.default_rng(1).integers(0, 256, (len(exponents), 1, 16), np.uint8)
    with np.errstate(under="ignore"):
        scales = np.ldexp(np.float32(1), (exponents - 128)[:, None].astype(np.int32))
    gate_up, extras = passing(rows, 1)
    down = product(quants, scales, np.zeros((1, BLOCK), np.float32))
    found = check(library_path, library, available_sets, single(gate_up, down, extras))
    assert np.isfinite(found).all() == (last == 143)
    assert (found != 0).mean() > 0.9


@pytest.mark.parametrize("rows", [1, 9, 17])
def test_a_scale_that_is_no_number(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, rows: int
) -> None:
    """Its output is none, and with an output of the first product all of the row's."""
    case = fp4_cases.make_case(1, (96, 70, 40), rows, (1, 1))
    (expert,) = case.experts
    expert.down.scales[[5, 39], 1] = np.nan
    found = check(library_path, library, available_sets, case)
    assert np.isnan(found).all(0).tolist() == [i in (5, 39) for i in range(40)]
    expert.gate_up.scales[17, 0] = np.nan
    assert np.isnan(check(library_path, library, available_sets, case)).all()


def test_a_row_is_the_same_alone_and_in_any_batch(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets
) -> None:
    rng = np.random.default_rng(2)
    case = fp4_cases.make_case(1, (256, 150, 96), 300, (12, 3))
    case = case.replace(extras=experts_cases.random_extras(1, case))
    serialized = experts_cases.model(case)
    outputs = set()
    for products in {products for _, products in available_sets}:
        use(library, (available_sets[0][0], products))
        two, one = (matmul_cases.session(library_path, serialized, threads) for threads in (2, 1))
        whole = two.run(["y"], case.feeds())[0]
        outputs.add(whole.tobytes())
        assert one.run(["y"], case.feeds())[0].tobytes() == whole.tobytes()
        for count in (1, 16, *rng.integers(1, 70, 8), *rng.integers(70, 300, 4)):
            rows = rng.permutation(len(case.x))[:count]
            part = two.run(["y"], {"x": case.x[rows], "logits": case.logits[rows]})[0]
            assert part.tobytes() == whole[rows].tobytes(), (products, count)
    assert len(outputs) == 1, "other bits with another instruction set"


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"quant_type": "nf4"}, 'quant_type must be "int" or "fp4", found "nf4"'),
        ({"quant_type": "fp4" * 30}, "quant_type is 90 characters long"),
        ({"quant_type": 4}, "quant_type must be a string"),
        ({"quant_type": 4.0}, "quant_type must be a string"),
        ({"bits": 8}, '"fp4" has 4 bits in blocks of 32, found bits 8, block_size 32, down_bits 4'),
        ({"down_bits": 8}, '"fp4" has 4 bits in blocks of 32, .*down_bits 8, down_block_size 32'),
        ({"block_size": 64}, '"fp4" has 4 bits in blocks of 32, found bits 4, block_size 64'),
        ({"down_block_size": 16}, '"fp4" has 4 bits in blocks of 32, .*down_block_size 16'),
        ({"quant_type": "int"}, 'scales are uint8.*with .*"fp4".* found uint8 with "int"'),
        ({"inner": 69}, "gate_up must have 39744 elements, found 40320"),
        ({"K": 97}, "gate_up must have 53760 elements, found 40320"),
    ],
)
def test_what_it_cannot_compute_is_refused(
    library_path: Path, available_sets: Sets, attributes: dict[str, float | str], message: str
) -> None:
    assert available_sets
    case = fp4_cases.make_case(1, (96, 70, 40), 3, (6, 2))
    with pytest.raises(Exception, match=f"GatedExperts: .*{message}"):
        matmul_cases.session(library_path, experts_cases.model(case, **attributes))


@pytest.mark.parametrize("half", [False, True])
def test_other_scales_are_refused(library_path: Path, available_sets: Sets, half: bool) -> None:
    assert available_sets
    case = experts_cases.make_case(1, (experts_cases.INT4,) * 2, (96, 70, 40), 3, (6, 2))
    serialized = experts_cases.model(case.replace(half=half), quant_type="fp4")
    found = "float16" if half else "float"
    with pytest.raises(Exception, match=f'GatedExperts: scales are .*found {found} with "fp4"'):
        matmul_cases.session(library_path, serialized)


def test_integers_may_say_what_they_are(library_path: Path, available_sets: Sets) -> None:
    assert available_sets
    case = experts_cases.make_case(1, (experts_cases.INT4,) * 2, (96, 70, 40), 3, (6, 2))
    named = onnx.ModelProto.FromString(experts_cases.model(case, quant_type="int"))
    session = matmul_cases.session(library_path, named.SerializeToString())
    wanted = experts_cases.run(library_path, case)
    assert session.run(["y"], case.feeds())[0].tobytes() == wanted.tobytes()
