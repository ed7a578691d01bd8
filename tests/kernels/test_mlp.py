"""onnxport.GatedMlp: the bits of the operators that it is made of, whatever is asked of it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.kernels import matmul_cases, mlp_cases
from tests.kernels.conftest import ISAS
from tests.kernels.mlp_cases import MlpCase
from tests.kernels.test_matmul import ISAS as MATMUL_ISAS
from tests.tiers import every

NUM_CASES = 80
GROUP = 20
INT4 = (4, 32)

Sets = list[tuple[str, str]]  # of vectors, and of products


@pytest.fixture
def available_sets(library: ctypes.CDLL) -> Iterator[Sets]:
    """The instruction sets that this processor runs; the best are in use again afterwards."""
    products = [n for n in MATMUL_ISAS if library.onnxport_cpu_set_matmul_isa(n.encode())]
    if not products:
        pytest.skip("this processor has none of the sets that the products need")
    vectors = [name for name in ISAS if library.onnxport_cpu_set_isa(name.encode())]
    count = max(len(vectors), len(products))
    yield [(vectors[i % len(vectors)], products[i % len(products)]) for i in range(count)]
    library.onnxport_cpu_set_matmul_isa(None)
    library.onnxport_cpu_set_isa(None)


def use(library: ctypes.CDLL, sets: tuple[str, str]) -> None:
    assert library.onnxport_cpu_set_isa(sets[0].encode())
    assert library.onnxport_cpu_set_matmul_isa(sets[1].encode())


def small_case(rows: int = 3) -> MlpCase:
    return mlp_cases.make_case(3, INT4, (8, 64), (96, 70, 40), rows)


@pytest.mark.parametrize("first", every(2, range(0, NUM_CASES, GROUP)))
def test_random_cases(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, first: int
) -> None:
    for seed in range(first, first + GROUP):
        case = replace(mlp_cases.random_case(seed), is_gelu=seed // 10 % 2 == 1)
        for sets in available_sets:
            use(library, sets)
            found = mlp_cases.run(library_path, case, mlp_cases.fused(case))
            wanted = mlp_cases.run(library_path, case, mlp_cases.separate(case))
            assert found.tobytes() == wanted.tobytes(), (seed, sets)


@pytest.mark.parametrize("is_gelu", [False, True])
def test_it_is_what_it_says(library_path: Path, available_sets: Sets, is_gelu: bool) -> None:
    """Against NumPy; the operators that it is made of could be wrong together."""
    assert available_sets
    case = replace(mlp_cases.make_case(8, INT4, INT4, (384, 200, 64), 40), is_gelu=is_gelu)
    found = mlp_cases.run(library_path, case, mlp_cases.fused(case))
    mlp_cases.check(case, found)


@pytest.mark.parametrize("second", [(4, 16), (4, 32), (8, 128), (4, 256)])
def test_a_row_is_the_same_alone_and_in_any_batch(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, second: tuple[int, int]
) -> None:
    rng = np.random.default_rng(second[1])
    case = mlp_cases.make_case(1, (4, 128), second, (384, 300, 96), 400)
    serialized = mlp_cases.fused(case)
    for sets in available_sets:
        use(library, sets)
        two, one = (matmul_cases.session(library_path, serialized, threads) for threads in (2, 1))
        whole = two.run(["y"], {"x": case.x})[0]
        assert one.run(["y"], {"x": case.x})[0].tobytes() == whole.tobytes()
        for count in (1, 16, *rng.integers(1, 70, 8), *rng.integers(70, 300, 6)):
            rows = rng.permutation(len(case.x))[:count]
            part = two.run(["y"], {"x": case.x[rows]})[0]
            assert part.tobytes() == whole[rows].tobytes(), (sets, count)


@pytest.mark.parametrize("rows", [1, 40])
def test_what_is_not_finite_spoils_its_own_row_alone(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, rows: int
) -> None:
    case = small_case(rows)
    for sets in available_sets:
        use(library, sets)
        together = matmul_cases.session(library_path, mlp_cases.fused(case))
        apart = matmul_cases.session(library_path, mlp_cases.separate(case))
        plain = together.run(["y"], {"x": case.x})[0]
        # The last one is finite, but its SiLU overflows.
        for value in (np.nan, np.inf, -np.inf, 3e38):
            x = case.x.copy()
            x[-1, 50] = value
            found = together.run(["y"], {"x": x})[0]
            assert np.isnan(found[-1]).all()
            assert found[:-1].tobytes() == plain[:-1].tobytes()
            assert np.array_equal(apart.run(["y"], {"x": x})[0], found, equal_nan=True)
        for value in (0.0, -0.0, 1e-40, 1e-20):
            x = np.full_like(case.x, value)
            found = together.run(["y"], {"x": x})[0]
            assert found.tobytes() == apart.run(["y"], {"x": x})[0].tobytes()


def test_concurrent_sessions(library_path: Path, available_sets: Sets) -> None:
    assert available_sets
    made = [mlp_cases.random_case(seed) for seed in range(12)]
    sessions = [matmul_cases.session(library_path, mlp_cases.fused(case)) for case in made]
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


def test_other_ranks(library_path: Path, available_sets: Sets) -> None:
    assert available_sets
    case = small_case(6)

    def run(x: np.ndarray) -> np.ndarray:
        of = MlpCase(case.gate_up.replace(x=x), case.down)
        return mlp_cases.run(library_path, of, mlp_cases.fused(of))

    wanted = run(case.x)
    assert run(case.x[0]).tobytes() == wanted[0].tobytes()
    cube = run(case.x.reshape(2, 3, 96))
    assert cube.shape == (2, 3, 40)
    assert cube.tobytes() == wanted.tobytes()
    assert run(case.x[:0]).shape == (0, 40)


@pytest.mark.parametrize(
    ("attributes", "message"),
    [
        ({"bits": 2}, "4 or 8 bits"),
        ({"down_bits": 5}, "4 or 8 bits"),
        ({"down_block_size": 48}, "blocks of 16, 32, 64, 128 or 256"),
        ({"block_size": 8}, "blocks of 16, 32, 64, 128 or 256"),
        ({"K": 0}, "found K 0"),
        ({"inner": 0}, "found K 96, N 0"),
        ({"N": -1}, "N -1"),
        ({"inner": 69}, "gate_up must have"),
        ({"N": 39}, "down must have"),
    ],
)
def test_what_it_cannot_compute_is_refused(
    library_path: Path, available_sets: Sets, attributes: dict[str, int], message: str
) -> None:
    assert available_sets
    serialized = mlp_cases.fused(small_case(), **attributes)
    with pytest.raises(Exception, match=f"GatedMlp.*{message}"):
        matmul_cases.session(library_path, serialized)


def test_weights_that_may_change_are_refused(library_path: Path, available_sets: Sets) -> None:
    assert available_sets
    with pytest.raises(Exception, match="gate_up must be an initializer"):
        matmul_cases.session(library_path, mlp_cases.fused(small_case(), constant=False))


def test_activations_of_another_width_are_refused(library_path: Path, available_sets: Sets) -> None:
    assert available_sets
    session = matmul_cases.session(library_path, mlp_cases.fused(small_case()))
    with pytest.raises(Exception, match="GatedMlp: A's last dimension must be 96, found 95"):
        session.run(["y"], {"x": np.zeros((2, 95), np.float32)})
