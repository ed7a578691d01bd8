"""MatMulNBits and GatedMlp of ours that add a residual and normalize the sum themselves."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import numpy as np
import pytest

from tests.kernels import matmul_cases, mlp_cases, norm_cases
from tests.kernels.matmul_cases import Floats
from tests.kernels.mlp_cases import MlpCase
from tests.kernels.norm_cases import Norm, add_norm, random_norm
from tests.kernels.test_mlp import Sets, available_sets, use
from tests.tiers import every

__all__ = ["available_sets"]  # a fixture

NUM_CASES = 60
GROUP = 20
OPERATORS = ("MatMulNBits", "GatedMlp")


def small(operator: str, rows: int = 6) -> tuple[bytes, Floats]:
    """A model of the node without a norm, and its input."""
    layer = mlp_cases.make_case(3, (4, 32), (8, 64), (100, 70, 40), rows)
    if operator == "GatedMlp":
        return mlp_cases.fused(layer), layer.x
    return matmul_cases.model(layer.gate_up), layer.x


@pytest.mark.parametrize("first", every(3, range(0, NUM_CASES, GROUP)))
def test_products(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, first: int
) -> None:
    for seed in range(first, first + GROUP):
        case = matmul_cases.random_case(seed)
        norm = random_norm(seed, case.x)
        outputs = set()
        for sets in available_sets:
            use(library, sets)
            serialized = add_norm(matmul_cases.model(case), norm)
            found, residual = norm_cases.run(library_path, serialized, case.x, norm)
            norm_cases.check_product(case, norm, found)
            assert residual.tobytes() == (case.x + norm.skip).tobytes(), seed
            outputs.add(found.tobytes())
        assert len(outputs) == 1, f"seed {seed} has other bits on another instruction set"


@pytest.mark.parametrize("first", every(3, range(0, NUM_CASES, GROUP)))
def test_layers(library_path: Path, library: ctypes.CDLL, available_sets: Sets, first: int) -> None:
    """The bits of a product with the norm, GatedSilu and a product; and what NumPy gives."""
    for seed in range(first, first + GROUP):
        case = mlp_cases.random_case(seed)
        norm = random_norm(seed, case.x)
        for sets in available_sets:
            use(library, sets)
            together, apart = (
                norm_cases.run(library_path, add_norm(of, norm), case.x, norm)
                for of in (mlp_cases.fused(case), mlp_cases.separate(case))
            )
            assert together[0].tobytes() == apart[0].tobytes(), (seed, sets)
            assert together[1].tobytes() == (case.x + norm.skip).tobytes(), (seed, sets)
    case = mlp_cases.make_case(8, (4, 32), (4, 32), (384, 200, 64), 40)
    norm = random_norm(first, case.x)
    found, _ = norm_cases.run(library_path, add_norm(mlp_cases.fused(case), norm), case.x, norm)
    x = norm_cases.normalized(case.x, norm)
    mlp_cases.check(MlpCase(case.gate_up.replace(x=x), case.down), found)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_what_was_normalized(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, operator: str, rows: int
) -> None:
    """It is what is multiplied: the same bits as without asking for it, and as a product of it."""
    serialized, x = small(operator, rows)
    norm = random_norm(7, x)
    for sets in available_sets:
        use(library, sets)
        y, residual = norm_cases.run(library_path, add_norm(serialized, norm), x, norm)
        asked = add_norm(serialized, norm, more=["normalized"])
        session = matmul_cases.session(library_path, asked)
        found = session.run(None, {"x": x, "skip": norm.skip})
        assert [one.tobytes() for one in found[:2]] == [y.tobytes(), residual.tobytes()]
        plain = matmul_cases.session(library_path, serialized).run(["y"], {"x": found[2]})[0]
        assert plain.tobytes() == y.tobytes()
        np.testing.assert_allclose(found[2], norm_cases.normalized(x, norm), rtol=2e-6)


@pytest.mark.parametrize("k", [96, 700, 897])
def test_a_row_is_the_same_alone_and_in_any_batch(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, k: int
) -> None:
    rng = np.random.default_rng(k)
    case = matmul_cases.make_case(1, 4, 128, k, 40, 300)
    norm = random_norm(1, case.x)
    serialized = add_norm(matmul_cases.model(case), norm)
    for sets in available_sets:
        use(library, sets)
        two, one = (matmul_cases.session(library_path, serialized, threads) for threads in (2, 1))
        whole = two.run(None, {"x": case.x, "skip": norm.skip})
        for count in (len(case.x), 1, 1, 16, *rng.integers(2, 300, 6)):
            rows = rng.permutation(len(case.x))[:count]
            for session in (one, two):
                part = session.run(None, {"x": case.x[rows], "skip": norm.skip[rows]})
                for found, wanted in zip(part, whole, strict=True):
                    assert found.tobytes() == wanted[rows].tobytes(), (sets, count)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("rows", [1, 40])
def test_what_is_not_finite_spoils_its_own_row_alone(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, operator: str, rows: int
) -> None:
    serialized, x = small(operator, rows)
    norm = random_norm(2, x)
    for sets in available_sets:
        use(library, sets)
        session = matmul_cases.session(library_path, add_norm(serialized, norm))
        plain, total = session.run(None, {"x": x, "skip": norm.skip})
        assert np.isfinite(plain).all()
        # Of whole vectors, and of the four features after them.
        for value, column, name in itertools.product(
            (np.nan, np.inf, -np.inf), (5, 99), ("x", "skip")
        ):
            feeds = {"x": x.copy(), "skip": norm.skip.copy()}
            feeds[name][-1, column] = value
            found, residual = session.run(None, feeds)
            assert np.isnan(found[-1]).all()
            assert found[:-1].tobytes() == plain[:-1].tobytes()
            assert residual[:-1].tobytes() == total[:-1].tobytes()
            assert np.array_equal(residual[-1], feeds["x"][-1] + feeds["skip"][-1], equal_nan=True)


@pytest.mark.parametrize("operator", OPERATORS)
def test_epsilon_keeps_nothing_at_nothing(
    library_path: Path, available_sets: Sets, operator: str
) -> None:
    """And where the sum is small beside it, what is normalized is its share, no row of size one."""
    assert available_sets
    serialized, x = small(operator)
    norm = Norm(-x, np.ones(100, np.float32), 1e-6)
    found, residual = norm_cases.run(library_path, add_norm(serialized, norm), x, norm)
    assert not residual.any()
    assert not found.any()
    plain = matmul_cases.session(library_path, serialized)
    x = np.full_like(x, 1e-5)
    norm = Norm(np.zeros_like(x), np.ones(100, np.float32), 1e-2)
    found, _ = norm_cases.run(library_path, add_norm(serialized, norm), x, norm)
    wanted = plain.run(["y"], {"x": x / np.float32(0.1)})[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("operator", OPERATORS)
def test_other_ranks(library_path: Path, available_sets: Sets, operator: str) -> None:
    assert available_sets

    def run(shape: tuple[int, ...], rows: int) -> list[Floats]:
        serialized, x = small(operator)
        norm = random_norm(4, x)
        layer = mlp_cases.make_case(3, (4, 32), (8, 64), (100, 70, 40), 6)
        shaped = MlpCase(layer.gate_up.replace(x=x[:rows].reshape(shape)), layer.down)
        serialized = (
            mlp_cases.fused(shaped)
            if operator == "GatedMlp"
            else matmul_cases.model(shaped.gate_up)
        )
        norm = Norm(norm.skip[:rows].reshape(shape), norm.gamma, norm.epsilon)
        return norm_cases.run(library_path, add_norm(serialized, norm), shaped.x, norm)

    wanted = run((6, 100), 6)
    for found, flat in zip(run((2, 3, 100), 6), wanted, strict=True):
        assert found.shape[:2] == (2, 3)
        assert found.tobytes() == flat.tobytes()
    for found, flat in zip(run((100,), 1), wanted, strict=True):
        assert found.tobytes() == flat[0].tobytes()
    assert [found.shape[0] for found in run((0, 100), 0)] == [0, 0]


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize(
    ("without", "named"),
    [
        (["skip"], "skip"),
        (["gamma"], "gamma"),
        (["epsilon"], "epsilon"),
        (["residual"], "second output"),
        (["skip", "gamma"], "skip"),
        (["skip", "gamma", "epsilon"], "skip"),
        (["skip", "gamma", "residual"], "skip"),
    ],
)
def test_part_of_a_norm_is_refused(
    library_path: Path, available_sets: Sets, operator: str, without: list[str], named: str
) -> None:
    assert available_sets
    serialized, x = small(operator)
    norm = random_norm(5, x)
    session = matmul_cases.session(library_path, add_norm(serialized, norm, without))
    feeds = {"x": x, "skip": norm.skip}
    with pytest.raises(Exception, match=f"{operator}: a norm needs skip.*; there is no {named}"):
        session.run(None, {info.name: feeds[info.name] for info in session.get_inputs()})


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("epsilon", [-1e-6, np.nan])
def test_no_epsilon_is_refused(
    library_path: Path, available_sets: Sets, operator: str, epsilon: float
) -> None:
    assert available_sets
    serialized, x = small(operator)
    norm = Norm(x, np.ones(100, np.float32), epsilon)
    with pytest.raises(Exception, match=f"{operator}: epsilon must be zero or more, found"):
        matmul_cases.session(library_path, add_norm(serialized, norm))


@pytest.mark.parametrize("operator", OPERATORS)
def test_other_shapes_are_refused(library_path: Path, available_sets: Sets, operator: str) -> None:
    assert available_sets
    serialized, x = small(operator)
    norm = random_norm(6, x)
    session = matmul_cases.session(library_path, add_norm(serialized, norm))
    for skip in (norm.skip[:5], norm.skip[:, :99]):
        with pytest.raises(Exception, match="skip must have the shape of A, 600 elements, found"):
            session.run(None, {"x": x, "skip": np.ascontiguousarray(skip)})
    narrow = Norm(norm.skip, norm.gamma[:99], 1e-6)
    with pytest.raises(Exception, match="gamma must have 100 elements, found 99"):
        norm_cases.run(library_path, add_norm(serialized, narrow), x, narrow)
