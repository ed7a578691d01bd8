"""onnxport.MatMulNBits: right, and the same bits whatever else is computed with a row."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tests.kernels import matmul_cases as cases
from tests.tiers import every, examples

ISAS = ("amx", "avx512vnni", "avxvnni", "avx2", "i8mm", "dotprod")
NUM_CASES = 120
GROUP = 20


@pytest.fixture
def available_isas(library: ctypes.CDLL) -> Iterator[list[str]]:
    """The instruction sets that this processor runs; the best one is in use again afterwards."""
    found = [isa for isa in ISAS if library.onnxport_cpu_set_matmul_isa(isa.encode())]
    if not found:
        pytest.skip("this processor has none of the sets that the products need")
    yield found
    library.onnxport_cpu_set_matmul_isa(None)


@pytest.mark.parametrize("first", every(2, range(0, NUM_CASES, GROUP)))
def test_random_cases(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], first: int
) -> None:
    for seed in range(first, first + GROUP):
        case = cases.random_case(seed)
        outputs = set()
        for isa in available_isas:
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            found = cases.run(library_path, case)
            cases.check(case, found)
            outputs.add(found.tobytes())
        assert len(outputs) == 1, f"seed {seed} has other bits on another instruction set"


def test_a_bias_is_added_last(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    for seed in range(examples(63)):
        case = cases.random_case(seed)
        bias = np.random.default_rng(seed).standard_normal(case.n).astype(np.float32)
        for isa in available_isas:
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            apart = cases.run(library_path, case) + bias
            session = cases.session(library_path, cases.add_bias(cases.model(case), bias))
            assert session.run(["y"], {"x": case.x})[0].tobytes() == apart.tobytes(), (isa, seed)


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_zero_points_are_subtracted(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], rows: int, bits: int
) -> None:
    """Integers all along, of which each result is a float32: nothing is rounded."""
    case = cases.with_zero_points(rows, cases.make_case(0, bits, 32, 160, 70, rows))
    x = np.random.default_rng(rows).integers(-127, 128, case.x.shape)
    x[:, ::32] = 127  # so that each is its own quant
    case.scales[:] = 1
    case = case.replace(x=x.astype(np.float32))
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        assert np.array_equal(cases.run(library_path, case), cases.expected(case)), isa


def test_zero_points_in_the_middle_change_nothing(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    for seed in range(0, examples(40), 2):
        case = cases.random_case(seed).replace(zero_points=None, offsets=None)
        middle = np.full(case.scales.shape, 1 << (case.bits - 1), np.uint8)
        for isa in available_isas:
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            wanted = cases.run(library_path, case)
            found = cases.run(library_path, case.replace(zero_points=middle))
            assert np.array_equal(found, wanted), (isa, seed)


def test_zero_points_that_do_not_fit_or_may_change(
    library_path: Path, library: ctypes.CDLL
) -> None:
    if library.onnxport_cpu_matmul_isa() is None:
        pytest.skip("this processor has none of the sets that the products need")
    case = cases.with_zero_points(1, cases.make_case(1, 4, 32, 96, 40, 3))
    of = onnx.load_from_string(cases.model(case))
    stored = of.graph.initializer.pop()
    wrong = numpy_helper.from_array(case.stored_zero_points[:, :1], "z")
    of.graph.initializer.append(wrong)
    with pytest.raises(Exception, match="zero_points must have 80 elements, found 40"):
        cases.session(library_path, of.SerializeToString())
    of.graph.initializer.pop()
    of.graph.input.append(helper.make_tensor_value_info("z", TensorProto.UINT8, stored.dims))
    session = cases.session(library_path, of.SerializeToString())
    with pytest.raises(Exception, match="zero_points must be an initializer"):
        session.run(["y"], {"x": case.x, "z": case.stored_zero_points})


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_offsets_are_added(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], rows: int, bits: int
) -> None:
    """Integers all along, but offsets of halves, of which each result is a float32."""
    case = cases.make_case(0, bits, 32, 160, 70, rows)
    random = np.random.default_rng(rows)
    x = random.integers(-127, 128, case.x.shape)
    x[:, ::32] = 127  # so that each is its own quant
    case.scales[:] = 1
    case.scales[:9, 1] = 0  # blocks that are nothing but their offsets
    offsets = random.integers(-99, 100, case.scales.shape) / 2
    case = case.replace(x=x.astype(np.float32), offsets=offsets.astype(np.float16))
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        assert np.array_equal(cases.run(library_path, case), cases.expected(case)), isa


def test_offsets_of_zero_change_nothing(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    for seed in range(0, examples(40), 2):
        case = cases.random_case(seed).replace(zero_points=None, offsets=None)
        none = np.zeros(case.scales.shape, np.float16)
        for isa in available_isas:
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            wanted = cases.run(library_path, case)
            found = cases.run(library_path, case.replace(offsets=none))
            assert np.array_equal(found, wanted), (isa, seed)


def test_zero_points_in_the_place_of_offsets(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str]
) -> None:
    """Both are the same bits where the offset is the scale times what zero is moved by."""
    case = cases.with_zero_points(2, cases.make_case(2, 4, 32, 160, 70, 9))
    assert case.zero_points is not None
    case.scales[:] = np.float32(2) ** np.random.default_rng(3).integers(-6, -2, case.scales.shape)
    offsets = (8 - case.zero_points.astype(np.float32)) * case.scales
    moved = case.replace(zero_points=None, offsets=offsets.astype(np.float16))
    np.testing.assert_array_equal(moved.offsets, offsets)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        found, wanted = (cases.run(library_path, one) for one in (moved, case))
        assert found.tobytes() == wanted.tobytes(), isa


def test_offsets_that_do_not_fit_or_may_change(library_path: Path, library: ctypes.CDLL) -> None:
    if library.onnxport_cpu_matmul_isa() is None:
        pytest.skip("this processor has none of the sets that the products need")
    case = cases.with_offsets(1, cases.make_case(1, 4, 32, 96, 40, 3))
    assert case.offsets is not None
    of = onnx.load_from_string(cases.model(case))
    stored = of.graph.initializer.pop()
    of.graph.initializer.append(numpy_helper.from_array(case.offsets[:, :1], "o"))
    with pytest.raises(Exception, match="offsets must have 120 elements, found 40"):
        cases.session(library_path, of.SerializeToString())
    of.graph.initializer.pop()
    of.graph.input.append(helper.make_tensor_value_info("o", TensorProto.FLOAT16, stored.dims))
    session = cases.session(library_path, of.SerializeToString())
    with pytest.raises(Exception, match="offsets must be an initializer"):
        session.run(["y"], {"x": case.x, "o": case.offsets})
    both = cases.model(cases.with_zero_points(1, case))
    with pytest.raises(Exception, match="both zero_points and offsets, which exclude each other"):
        cases.session(library_path, both)


def test_a_bias_that_does_not_fit_or_may_change(library_path: Path, library: ctypes.CDLL) -> None:
    if library.onnxport_cpu_matmul_isa() is None:
        pytest.skip("this processor has none of the sets that the products need")
    case = cases.make_case(1, 4, 32, 64, 40, 3)
    serialized = cases.model(case)
    with pytest.raises(Exception, match="bias must have 40 elements, found 41"):
        cases.session(library_path, cases.add_bias(serialized, np.ones(41, np.float32)))
    bias = np.ones(40, np.float32)
    session = cases.session(library_path, cases.add_bias(serialized, bias, constant=False))
    with pytest.raises(Exception, match="bias must be an initializer"):
        session.run(["y"], {"x": case.x, "bias": bias})


@pytest.mark.parametrize("bits", cases.BITS)
@pytest.mark.parametrize("block_size", cases.BLOCK_SIZES)
def test_a_row_is_the_same_alone_and_in_any_batch(
    library_path: Path,
    library: ctypes.CDLL,
    available_isas: list[str],
    bits: int,
    block_size: int,
) -> None:
    rng = np.random.default_rng(bits * block_size)
    case = cases.make_case(1, bits, block_size, 700, 200, 600)
    serialized = cases.model(case)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        two, one = (cases.session(library_path, serialized, threads) for threads in (2, 1))
        whole = two.run(["y"], {"x": case.x})[0]
        assert one.run(["y"], {"x": case.x})[0].tobytes() == whole.tobytes()
        for count in (1, 16, *rng.integers(1, 70, 8), *rng.integers(70, 300, 6)):
            rows = rng.permutation(len(case.x))[:count]
            part = two.run(["y"], {"x": case.x[rows]})[0]
            assert part.tobytes() == whole[rows].tobytes(), (isa, count)
        for row in rng.integers(0, len(case.x), 8):
            alone = two.run(["y"], {"x": case.x[row : row + 1]})[0]
            assert alone.tobytes() == whole[row : row + 1].tobytes(), (isa, row)


def test_concurrent_sessions(library_path: Path, available_isas: list[str]) -> None:
    assert available_isas
    made = [cases.random_case(seed) for seed in range(12)]
    sessions = [cases.session(library_path, cases.model(case)) for case in made]
    alone = [
        session.run(["y"], {"x": case.x})[0] for session, case in zip(sessions, made, strict=True)
    ]

    def repeat(i: int) -> bool:
        return all(
            sessions[i].run(["y"], {"x": made[i].x})[0].tobytes() == alone[i].tobytes()
            for _ in range(10)
        )

    with ThreadPoolExecutor(6) as executor:
        assert all(executor.map(repeat, range(len(made))))


def test_other_ranks(library_path: Path, available_isas: list[str]) -> None:
    assert available_isas
    flat = cases.make_case(0, 4, 32, 64, 48, 6)
    wanted = cases.run(library_path, flat)
    assert cases.run(library_path, flat.replace(x=flat.x[0])).tobytes() == wanted[0].tobytes()
    cube = cases.run(library_path, flat.replace(x=flat.x.reshape(2, 3, 64)))
    assert cube.shape == (2, 3, 48)
    assert cube.tobytes() == wanted.tobytes()
    assert cases.run(library_path, flat.replace(x=flat.x[:0])).shape == (0, 48)


@pytest.mark.parametrize("rows", [1, 40])
def test_extremes(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], rows: int
) -> None:
    """Zeros, denormals and the largest floats; what is not finite spoils its own row alone."""
    case = cases.make_case(2, 4, 32, 96, 40, rows)
    for isa in available_isas:
        library.onnxport_cpu_set_matmul_isa(isa.encode())
        serialized = cases.session(library_path, cases.model(case))
        plain = serialized.run(["y"], {"x": case.x})[0]
        for value in (0.0, -0.0, 1e-40, 1e-37):
            small = np.full_like(case.x, value)
            assert np.abs(serialized.run(["y"], {"x": small})[0]).max() < 1e-34
        large = np.full_like(case.x, 3e38)
        assert not np.isnan(serialized.run(["y"], {"x": large * np.float32(1e-4)})[0]).any()
        for value in (np.nan, np.inf, -np.inf):
            spoilt = case.x.copy()
            spoilt[-1, 50] = value
            found = serialized.run(["y"], {"x": spoilt})[0]
            assert np.isnan(found[-1]).all()
            assert found[:-1].tobytes() == plain[:-1].tobytes()


@pytest.mark.parametrize("rows", [4, 11])
@pytest.mark.parametrize("block_size", cases.BLOCK_SIZES)
def test_the_largest_sums_are_exact(
    library_path: Path, library: ctypes.CDLL, available_isas: list[str], block_size: int, rows: int
) -> None:
    """All weights and inputs at an end of their range: nothing saturates or wraps around."""
    signs = np.where(np.random.default_rng(4).integers(0, 2, (rows, 512)), 1, -1)
    signs[0], signs[1] = 1, -1
    for bits, byte in itertools.product(cases.BITS, (0x00, 0x0F, 0x80, 0xF0, 0xFF)):
        case = cases.make_case(4, bits, block_size, 512, 40, rows)
        case.quants[:] = byte
        case.scales[:] = 1
        case.scales[7] = 0
        case = case.replace(x=(127 * signs).astype(np.float32))
        wanted = cases.expected(case)
        for isa in available_isas:
            library.onnxport_cpu_set_matmul_isa(isa.encode())
            # 127 is its own quant, and these integers are float32's, too.
            assert np.array_equal(cases.run(library_path, case), wanted), (isa, bits, byte)


@pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() != "x86_64", reason="masks CPUID"
)
@pytest.mark.skipif(not shutil.which("cc"), reason="needs cc")
@pytest.mark.parametrize(("vnni", "best"), [(0, "avx2"), (1, "avxvnni")])
def test_an_older_processor_gets_what_it_runs(
    library_path: Path, library: ctypes.CDLL, tmp_path: Path, vnni: int, best: str
) -> None:
    if not library.onnxport_cpu_set_matmul_isa(best.encode()):
        pytest.skip(f"this processor has no {best} either")
    library.onnxport_cpu_set_matmul_isa(None)
    mask = tmp_path / "older_cpu.so"
    source = Path(__file__).parents[2] / "benchmarks/older_cpu.c"
    options = ["-shared", "-fPIC", "-O2", "-Wall", "-Wextra", "-Werror", f"-DAVXVNNI={vnni}"]
    subprocess.run(["cc", *options, str(source), "-o", str(mask)], check=True)
    program = (
        "import ctypes, sys; library = ctypes.CDLL(sys.argv[1]); "
        "library.onnxport_cpu_matmul_isa.restype = ctypes.c_char_p; "
        "print(library.onnxport_cpu_matmul_isa().decode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(library_path)],
        env=os.environ | {"LD_PRELOAD": str(mask)},
        capture_output=True,
        text=True,
        check=False,
    )
    if "cannot let CPUID fault" in done.stderr:
        pytest.skip(done.stderr)
    assert done.stdout == f"{best}\n", done.stderr


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"bits": 2}, "4 or 8 bits"),
        ({"block_size": 8}, "blocks of 16, 32, 64, 128 or 256"),
        ({"block_size": 48}, "blocks of 16, 32, 64, 128 or 256"),
        ({"block_size": 512}, "blocks of 16, 32, 64, 128 or 256"),
        ({"K": 0}, "found K 0"),
        ({"N": 39}, "B must have"),
    ],
)
def test_what_it_cannot_compute_is_refused(
    library_path: Path, available_isas: list[str], attributes: dict[str, int], message: str
) -> None:
    assert available_isas
    case = cases.make_case(3, 4, 32, 96, 40, 1)
    with pytest.raises(Exception, match=message):
        cases.session(library_path, cases.model(case, **attributes))


def test_weights_that_may_change_are_refused(library_path: Path, available_isas: list[str]) -> None:
    assert available_isas
    case = cases.make_case(3, 4, 32, 96, 40, 1)
    with pytest.raises(Exception, match="B must be an initializer"):
        cases.session(library_path, cases.model(case, constant=False))


def test_activations_of_another_width_are_refused(
    library_path: Path, available_isas: list[str]
) -> None:
    assert available_isas
    session = cases.session(library_path, cases.model(cases.make_case(3, 4, 32, 96, 40, 1)))
    with pytest.raises(Exception, match="last dimension must be 96, found 95"):
        session.run(["y"], {"x": np.zeros((2, 95), np.float32)})
