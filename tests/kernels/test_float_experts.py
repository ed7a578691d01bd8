"""onnxport.FloatExperts: right, and the same bits for a row whatever else there is."""

from __future__ import annotations

import ctypes
import platform
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.kernels import float_experts_cases, matmul_cases, matmul_standalone
from tests.kernels.conftest import ISAS
from tests.kernels.float_experts_cases import DTYPES, FloatExpertsCase
from tests.kernels.test_neon import COMPILER, EMULATOR, ON_ARM
from tests.tiers import every

NUM_CASES = 54
GROUPS = 6
PARTS = [slice(0, 1), slice(69, 70), slice(3, 5), slice(1, 4), slice(5, 22), slice(2, 70)]


@pytest.fixture
def isas(library: ctypes.CDLL) -> Iterator[list[str]]:
    """The sets that this processor runs; the best is in use again afterwards."""
    yield [name for name in ISAS if library.onnxport_cpu_set_isa(name.encode())]
    library.onnxport_cpu_set_isa(None)


def small_case(rows: int = 3) -> FloatExpertsCase:
    return float_experts_cases.make_case(3, np.float16, (96, 70, 40), rows, (6, 2))


@pytest.mark.parametrize("first", every(GROUPS, range(GROUPS)))
def test_random_cases(
    library_path: Path, library: ctypes.CDLL, isas: list[str], first: int
) -> None:
    for seed in range(first, NUM_CASES, GROUPS):
        case = float_experts_cases.random_case(seed)
        for isa in isas:
            assert library.onnxport_cpu_set_isa(isa.encode())
            found = float_experts_cases.run(library_path, case)
            float_experts_cases.check(case, found)


@pytest.mark.parametrize("with_extras", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_in_any_batch(
    library_path: Path, library: ctypes.CDLL, isas: list[str], dtype: type, with_extras: bool
) -> None:
    case = float_experts_cases.make_case(5, dtype, (203, 75, 67), 70, (5, 2))
    case.logits[:, 2] += 9  # an expert that all rows have
    if with_extras:
        case = float_experts_cases.with_extras(case)
    for isa in isas:
        assert library.onnxport_cpu_set_isa(isa.encode())
        session = matmul_cases.session(library_path, float_experts_cases.model(case))
        whole = session.run(["y"], case.feeds())[0]
        float_experts_cases.check(case, whole)
        for part in PARTS:
            found = session.run(["y"], case.rows(part).feeds())[0]
            assert found.tobytes() == whole[part].tobytes(), (isa, part)
        alone = float_experts_cases.run(library_path, case, threads=1)
        assert alone.tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gelu_in_the_place_of_the_silu(
    library_path: Path, library: ctypes.CDLL, isas: list[str], dtype: type
) -> None:
    case = float_experts_cases.make_case(5, dtype, (64, 75, 67), 9, (5, 2)).replace(is_gelu=True)
    for isa in isas:
        assert library.onnxport_cpu_set_isa(isa.encode())
        found = float_experts_cases.run(library_path, case)
        float_experts_cases.check(case, found)
        silu = float_experts_cases.run(library_path, case.replace(is_gelu=False))
        assert (np.abs(found - silu) > 1e-3).any()


@pytest.mark.parametrize("first", every(GROUPS, range(GROUPS)))
def test_random_cases_without_gates(
    library_path: Path, library: ctypes.CDLL, isas: list[str], first: int
) -> None:
    for seed in range(first, NUM_CASES, GROUPS):
        case = float_experts_cases.random_case(seed)
        case = float_experts_cases.without_gates(case, seed if seed % 2 else None)
        for isa in isas:
            assert library.onnxport_cpu_set_isa(isa.encode())
            found = float_experts_cases.run(library_path, case)
            float_experts_cases.check(case, found)
            last = float_experts_cases.run(library_path, case.rows(slice(-1, None)))
            assert last.tobytes() == found[-1:].tobytes(), (seed, isa)


def test_more_rows_than_are_computed_at_once(library_path: Path) -> None:
    case = float_experts_cases.make_case(1, np.float16, (64, 40, 33), 2100, (9, 2))
    found = float_experts_cases.run(library_path, case)
    float_experts_cases.check(case, found)
    last = float_experts_cases.run(library_path, case.rows(slice(2090, 2100)))
    assert last.tobytes() == found[2090:].tobytes()


def test_weights_differ_by_what_their_types_round(library_path: Path) -> None:
    """Weights that all types hold: the same bits from each."""
    case = small_case(9)
    narrow = [of.astype(DTYPES[2]) for of in (case.gate_up, case.down)]
    found = []
    for dtype in DTYPES:
        gate_up, down = (of.astype(np.float32).astype(dtype) for of in narrow)
        held = case.replace(gate_up=gate_up, down=down)
        found.append(float_experts_cases.run(library_path, held).tobytes())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("with_extras", [False, True])
@pytest.mark.parametrize("rows", [1, 40])
def test_what_is_not_finite_spoils_its_own_row_alone(
    library_path: Path, library: ctypes.CDLL, isas: list[str], rows: int, with_extras: bool
) -> None:
    case = small_case(rows)
    if with_extras:
        case = float_experts_cases.with_extras(case)
    for isa in isas:
        assert library.onnxport_cpu_set_isa(isa.encode())
        session = matmul_cases.session(library_path, float_experts_cases.model(case))
        plain = session.run(["y"], case.feeds())[0]
        x = case.x.copy()
        x[-1, 50] = np.nan
        logits = case.logits.copy()
        logits[-1, 0] = np.nan
        for changed in (case.replace(x=x), case.replace(logits=logits)):
            found = session.run(["y"], changed.feeds())[0]
            assert np.isnan(found[-1]).all()
            assert found[:-1].tobytes() == plain[:-1].tobytes()


def test_concurrent_sessions(library_path: Path) -> None:
    made = [float_experts_cases.random_case(seed) for seed in range(7, 47, 5)]
    sessions = [matmul_cases.session(library_path, float_experts_cases.model(of)) for of in made]
    alone = [of.run(["y"], case.feeds())[0] for of, case in zip(sessions, made, strict=True)]

    def repeat(i: int) -> bool:
        return all(
            sessions[i].run(["y"], made[i].feeds())[0].tobytes() == alone[i].tobytes()
            for _ in range(10)
        )

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(repeat, range(len(made))))


def test_other_ranks(library_path: Path) -> None:
    case = small_case(6)

    def run(x: np.ndarray, logits: np.ndarray) -> np.ndarray:
        return float_experts_cases.run(library_path, case.replace(x=x, logits=logits))

    wanted = run(case.x, case.logits)
    assert run(case.x[0], case.logits[:1]).tobytes() == wanted[0].tobytes()
    cube = run(case.x.reshape(2, 3, 96), case.logits)
    assert cube.shape == (2, 3, 40)
    assert cube.tobytes() == wanted.tobytes()
    assert run(case.x[:0], case.logits[:0]).shape == (0, 40)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"K": 0}, "K must be 1 or more, found 0"),
        ({"inner": 0}, "inner must be 1 or more, found 0"),
        ({"N": -1}, "N must be 1 or more, found -1"),
        ({"inner": 69}, "gate_up must have 79488 elements, found 80640"),
        ({"N": 39}, "down must have 16380 elements, found 16800"),
        ({"num_experts": 0, "top_k": 0}, "num_experts must be 1 or more, found 0"),
        ({"num_experts": 5}, "gate_up must have 67200 elements, found 80640"),
        ({"top_k": 7}, "top_k must be 1 to num_experts, 6, found 7"),
        ({"normalize": 2}, "normalize must be 0 or 1, found 2"),
        ({"alpha": 0.0}, "alpha must be positive, found 0"),
        ({"up_offset": float("inf")}, "up_offset must be finite, found inf"),
        ({"limit": -7.0}, "limit must be positive, found -7"),
        ({"is_gelu": 1, "alpha": 2.0}, "is_gelu excludes alpha, up_offset and limit"),
        ({"is_relu2": 1}, "gate_up must have 40320 elements, found 80640"),
    ],
)
def test_what_it_cannot_compute_is_refused(
    library_path: Path, attributes: dict[str, float], message: str
) -> None:
    serialized = float_experts_cases.model(small_case(), **attributes)
    with pytest.raises(Exception, match=f"FloatExperts: {message}"):
        matmul_cases.session(library_path, serialized)


@pytest.mark.parametrize(
    "attributes", [{"is_gelu": 1}, {"alpha": 2.0}, {"up_offset": 1.0}, {"limit": 2.0}]
)
def test_what_gates_have_is_refused_without_them(
    library_path: Path, attributes: dict[str, float]
) -> None:
    serialized = float_experts_cases.model(
        float_experts_cases.without_gates(small_case()), **attributes
    )
    with pytest.raises(Exception, match="FloatExperts: is_relu2 excludes is_gelu, alpha"):
        matmul_cases.session(library_path, serialized)


def test_weights_that_may_change_are_refused(library_path: Path) -> None:
    with pytest.raises(Exception, match="gate_up must be an initializer"):
        matmul_cases.session(library_path, float_experts_cases.model(small_case(), constant=False))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gate_up_bias", "gate_up_bias must have 840 elements, found 700"),
        ("down_bias", "down_bias must have 240 elements, found 200"),
    ],
)
def test_biases_that_do_not_fit_or_may_change(library_path: Path, name: str, message: str) -> None:
    case = float_experts_cases.with_extras(small_case())
    short = case.replace(**{name: getattr(case, name)[:5]})
    with pytest.raises(Exception, match=f"FloatExperts: {message}"):
        matmul_cases.session(library_path, float_experts_cases.model(short))
    of = onnx.ModelProto.FromString(float_experts_cases.model(case))
    (tensor,) = [one for one in of.graph.initializer if one.name == name]
    of.graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    session = matmul_cases.session(library_path, of.SerializeToString())
    with pytest.raises(Exception, match=f"FloatExperts: {name} must be an initializer"):
        session.run(["y"], case.feeds())


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 95), (2, 6)), "A's last dimension must be 96, found 95"),
        (((2, 96), (2, 7)), "router_logits must have 6 experts of each of A's 2 rows"),
        (((2, 96), (3, 6)), "found 18 elements with a last dimension of 6"),
    ],
)
def test_inputs_of_other_sizes_are_refused(
    library_path: Path, shapes: tuple[tuple[int, ...], tuple[int, ...]], message: str
) -> None:
    session = matmul_cases.session(library_path, float_experts_cases.model(small_case()))
    x, logits = (np.zeros(shape, np.float32) for shape in shapes)
    with pytest.raises(Exception, match=f"FloatExperts: .*{message}"):
        session.run(["y"], {"x": x, "logits": logits})


def check_standalone(command: list[str], isa: str) -> None:
    """Right, and the same bits for a row alone, without ONNX Runtime."""
    cases = [float_experts_cases.random_case(seed) for seed in range(NUM_CASES // 2)]
    whole = float_experts_cases.make_case(5, np.float16, (203, 75, 67), 70, (5, 2))
    cases += [whole, *(whole.rows(part) for part in PARTS)]
    found = float_experts_cases.run_standalone(command, isa, cases)
    for case, output in zip(cases, found, strict=True):
        float_experts_cases.check(case, output)
    everything = found[NUM_CASES // 2]
    for part, rows in zip(PARTS, found[NUM_CASES // 2 + 1 :], strict=True):
        assert rows.tobytes() == everything[part].tobytes()


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="links the driver statically")
@pytest.mark.skipif(not shutil.which(COMPILER), reason=f"needs {COMPILER}")
@pytest.mark.skipif(not ON_ARM and EMULATOR is None, reason="needs qemu-aarch64 (qemu-user)")
def test_on_arm(tmp_path: Path) -> None:
    sets = {
        "matmul_dotprod": "-march=armv8.2-a+dotprod",
        "matmul_i8mm": "-march=armv8.2-a+dotprod+i8mm",
    }
    driver = matmul_standalone.build(
        COMPILER, tmp_path, sets, "-static", driver="float_experts_driver"
    )
    command = [str(driver)] if EMULATOR is None else [EMULATOR, "-cpu", "max", str(driver)]
    check_standalone(command, "neon")
