"""Products on Arm, cross-compiled and run by an emulator where this is no Arm machine."""

from __future__ import annotations

import ctypes
import itertools
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from onnxport.providers.cpu.library import find_library, load_library
from tests.kernels import (
    coarse_cases,
    experts_cases,
    fp4_cases,
    matmul_cases,
    matmul_standalone,
    mlp_cases,
    norm_cases,
)
from tests.kernels.mlp_cases import MlpCase
from tests.kernels.test_neon import COMPILER, EMULATOR, ON_ARM

SETS = {
    "matmul_dotprod": "-march=armv8.2-a+dotprod",
    "matmul_i8mm": "-march=armv8.2-a+dotprod+i8mm",
}
NUM_CASES = 60
FEW_POWERS = (115, 124)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(platform.system() != "Linux", reason="links the driver statically"),
    pytest.mark.skipif(not shutil.which(COMPILER), reason=f"needs {COMPILER}"),
    pytest.mark.skipif(not ON_ARM and EMULATOR is None, reason="needs qemu-aarch64 (qemu-user)"),
]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return matmul_standalone.build(COMPILER, tmp_path_factory.mktemp("driver"), SETS, "-static")


@pytest.fixture
def library() -> ctypes.CDLL | None:
    """This machine's own kernels, if it has any."""
    path = find_library()
    return None if path is None else load_library(path)


def command(driver: Path, processor: str = "max") -> list[str]:
    return [str(driver)] if EMULATOR is None else [EMULATOR, "-cpu", processor, str(driver)]


@pytest.mark.parametrize("isa", ["dotprod", "i8mm"])
def test_random_cases(driver: Path, library: ctypes.CDLL | None, isa: str) -> None:
    """Right, and where this is another machine, the same bits as its instruction set's."""
    cases = [matmul_cases.random_case(seed) for seed in range(NUM_CASES)]
    path = find_library()
    native = library is not None and library.onnxport_cpu_matmul_isa() is not None
    for case, found in zip(cases, matmul_standalone.run(command(driver), isa, cases), strict=True):
        matmul_cases.check(case, found)
        if native and path is not None:
            assert matmul_cases.run(path, case).tobytes() == found.tobytes()


@pytest.mark.parametrize("isa", ["dotprod", "i8mm"])
@pytest.mark.parametrize("bits", matmul_cases.BITS)
def test_a_row_is_the_same_alone_and_in_any_batch(driver: Path, isa: str, bits: int) -> None:
    whole = matmul_cases.make_case(bits, bits, 32, 100, 40, 37)
    parts = [slice(0, 1), slice(36, 37), slice(3, 5), slice(1, 4), slice(5, 22), slice(2, 37)]
    cases = [whole, *(whole.replace(x=whole.x[part]) for part in parts)]
    everything, *found = matmul_standalone.run(command(driver), isa, cases)
    for part, rows in zip(parts, found, strict=True):
        assert rows.tobytes() == everything[part].tobytes()


@pytest.mark.parametrize("isa", ["dotprod", "i8mm"])
def test_feed_forward_layers(driver: Path, isa: str) -> None:
    cases = [mlp_cases.random_case(seed) for seed in range(NUM_CASES // 3)]
    whole = mlp_cases.make_case(1, (4, 32), (8, 64), (100, 70, 40), 37)
    parts = [slice(0, 1), slice(36, 37), slice(3, 5), slice(5, 22)]
    cuts = [MlpCase(whole.gate_up.replace(x=whole.x[part]), whole.down) for part in parts]
    found = matmul_standalone.run_layers(command(driver), [isa], [*cases, whole, *cuts])
    for case, output in zip(cases, found, strict=False):
        mlp_cases.check(case, output)
    everything, *rest = found[len(cases) :]
    for part, rows in zip(parts, rest, strict=True):
        assert rows.tobytes() == everything[part].tobytes()


@pytest.mark.parametrize("isa", ["dotprod", "i8mm"])
def test_layers_of_experts(driver: Path, isa: str) -> None:
    for seed in range(NUM_CASES // 5):
        case = experts_cases.random_case(seed * 5).replace(half=False)
        layers = experts_cases.layers_of(case)
        outputs = matmul_standalone.run_layers(command(driver), [isa], layers)
        (found,) = matmul_standalone.run_experts(command(driver), [isa], [case])
        assert found.tobytes() == experts_cases.add_up(case, outputs).tobytes()


@pytest.mark.parametrize("isa", ["dotprod", "i8mm"])
def test_products_in_mxfp4(driver: Path, isa: str) -> None:
    """The bits of exact sums of integers, the largest ones among them."""
    shapes = itertools.product(matmul_cases.ROWS, (1, 33, 96), (1, 64, 257))
    made = [
        matmul_cases.as_fp4(seed, matmul_cases.make_case(seed, 4, 32, k, n, rows), FEW_POWERS)
        for seed, (rows, n, k) in enumerate(shapes)
    ]
    extreme = [
        matmul_cases.as_fp4(0, matmul_cases.make_case(0, 4, 32, 64, 40, rows), FEW_POWERS).replace(
            x=np.full((rows, 64), sign, np.float32), quants=np.full((40, 2, 16), six, np.uint8)
        )
        for rows in (1, 7, 16)
        for sign in (1, -1)
        for six in (0x77, 0xFF)
    ]
    cases = made + extreme
    for case, found in zip(cases, matmul_standalone.run(command(driver), isa, cases), strict=True):
        assert found.tobytes() == matmul_cases.product_bits(case).tobytes()


@pytest.mark.parametrize("isa", ["dotprod", "i8mm"])
def test_experts_in_mxfp4(driver: Path, isa: str) -> None:
    case = fp4_cases.make_case(8, (384, 200, 64), 40, (4, 2))
    case = case.replace(extras=experts_cases.random_extras(8, case))
    parts = [slice(0, 1), slice(39, 40), slice(3, 5), slice(5, 22)]
    cuts = [case.with_x(case.x[part], case.logits[part]) for part in parts]
    whole, *rest = matmul_standalone.run_experts(command(driver), [isa], [case, *cuts])
    experts_cases.check(case, whole)
    for part, rows in zip(parts, rest, strict=True):
        assert rows.tobytes() == whole[part].tobytes()


@pytest.mark.parametrize("isa", ["dotprod", "i8mm"])
def test_experts_with_biases_and_another_activation(driver: Path, isa: str) -> None:
    case = experts_cases.case_with_extras()
    parts = [slice(0, 1), slice(39, 40), slice(3, 5), slice(5, 22)]
    cuts = [case.with_x(case.x[part], case.logits[part]) for part in parts]
    whole, *rest = matmul_standalone.run_experts(command(driver), [isa], [case, *cuts])
    experts_cases.check(case, whole)
    for part, rows in zip(parts, rest, strict=True):
        assert rows.tobytes() == whole[part].tobytes()


@pytest.mark.parametrize("isa", ["dotprod", "i8mm"])
def test_input_norms(driver: Path, library: ctypes.CDLL | None, isa: str) -> None:
    cases = [matmul_cases.random_case(seed) for seed in range(NUM_CASES)]
    normed = [(case, norm_cases.random_norm(seed, case.x)) for seed, case in enumerate(cases)]
    found = matmul_standalone.run_normalized(command(driver), isa, normed)
    path = find_library()
    native = library is not None and library.onnxport_cpu_matmul_isa() is not None
    for (case, norm), output, residual in zip(normed, found[::2], found[1::2], strict=True):
        norm_cases.check_product(case, norm, output)
        assert residual.tobytes() == (case.x + norm.skip).tobytes()
        if native and path is not None:
            serialized = norm_cases.add_norm(matmul_cases.model(case), norm)
            wanted, _ = norm_cases.run(path, serialized, case.x, norm)
            assert output.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("isa", ["dotprod", "i8mm"])
def test_products_of_few_outputs(driver: Path, library: ctypes.CDLL | None, isa: str) -> None:
    """The largest ones have the bits of the whole product, and so those of other machines."""
    cases = [coarse_cases.random_case(seed) for seed in range(NUM_CASES // 3)]
    cases += [coarse_cases.near_ties(1, 4096, 256, 4), coarse_cases.gaussian_case(1, 8000, 128, 3)]
    called = [coarse_cases.with_calls(case, seed) for seed, case in enumerate(cases)]
    whole = matmul_standalone.run(command(driver), isa, cases)
    found = matmul_standalone.run_coarse(command(driver), isa, called)
    path = find_library()
    native = library is not None and library.onnxport_cpu_matmul_isa() is not None
    for (case, calls), outputs, wanted in zip(called, found, whole, strict=True):
        both = list(outputs)
        if native and path is not None:
            serialized = coarse_cases.add_asked(matmul_cases.model(case))
            session = matmul_cases.session(path, serialized)
            both += [session.run(["y"], {"x": case.x, **asked.feeds()})[0] for asked in calls]
        for asked, output in zip(calls * 2, both, strict=False):
            coarse_cases.check(output, wanted, *asked)
    assert max(np.mean(output != whole[-1]) for output in found[-1]) > 0.1


@pytest.mark.parametrize("isa", ["dotprod", "i8mm"])
def test_input_norms_of_layers(driver: Path, isa: str) -> None:
    case = mlp_cases.make_case(8, (4, 32), (4, 32), (387, 200, 64), 40)
    norm = norm_cases.random_norm(1, case.x)
    output, residual = matmul_standalone.run_normalized_layers(
        command(driver), [isa], [(case, norm)]
    )
    x = norm_cases.normalized(case.x, norm)
    mlp_cases.check(MlpCase(case.gate_up.replace(x=x), case.down), output)
    assert residual.tobytes() == (case.x + norm.skip).tobytes()


@pytest.mark.skipif(ON_ARM, reason="asks for an emulator's processors")
@pytest.mark.parametrize(
    ("processor", "best"), [("max", "i8mm"), ("neoverse-n1", "dotprod"), ("cortex-a72", "none")]
)
def test_each_processor_gets_the_best_that_it_runs(driver: Path, processor: str, best: str) -> None:
    done = subprocess.run(command(driver, processor), capture_output=True, text=True, check=True)
    assert done.stdout == f"{best}\n"


def test_adapters_in_integers(tmp_path: Path) -> None:
    """The same bits with both sets, and for a row alone; off by what rounding inputs makes."""
    driver = matmul_standalone.build(COMPILER, tmp_path, SETS, "-static", driver="lora_driver")
    found = {
        isa: subprocess.run(
            [*command(driver), isa], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        for isa in ("dotprod", "i8mm")
    }
    assert found["dotprod"] == found["i8mm"]
    assert len(found["i8mm"]) == 44
    for line in found["i8mm"]:
        _, _, _, _, changed, off = line.split()
        assert (int(changed), float(off) < 0.02) == (0, True), line
