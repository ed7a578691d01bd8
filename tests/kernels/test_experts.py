"""onnxport.GatedExperts: the bits of what each expert is made of, whatever is asked of it."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.kernels import experts_cases, matmul_cases, mlp_cases
from tests.kernels.experts_cases import ExpertsCase
from tests.kernels.mlp_cases import MlpCase
from tests.kernels.test_mlp import Sets, available_sets, use
from tests.tiers import every

__all__ = ["available_sets"]

NUM_CASES = 60
GROUPS = 7  # cases of one, so far apart, have all numbers of experts
INT4 = (4, 32)


def small_case(rows: int = 3) -> ExpertsCase:
    return experts_cases.make_case(3, (INT4, (8, 64)), (96, 70, 40), rows, (6, 2))


@pytest.mark.parametrize("first", every(GROUPS, range(GROUPS)))
def test_random_cases(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, first: int
) -> None:
    for seed in range(first, NUM_CASES, GROUPS):
        case = experts_cases.random_case(seed)
        for sets in available_sets:
            use(library, sets)
            found = experts_cases.run(library_path, case)
            wanted = experts_cases.expected(library_path, case)
            assert found.tobytes() == wanted.tobytes(), (seed, sets)


@pytest.mark.parametrize("first", every(GROUPS, range(GROUPS)))
def test_random_cases_with_biases_and_other_activations(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, first: int
) -> None:
    for seed in range(first, NUM_CASES, 2 * GROUPS):
        case = experts_cases.random_case_with_extras(seed)
        for sets in available_sets:
            use(library, sets)
            found = experts_cases.run(library_path, case)
            wanted = experts_cases.expected(library_path, case)
            assert found.tobytes() == wanted.tobytes(), (seed, sets)


def test_it_is_what_it_says_with_biases_and_another_activation(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets
) -> None:
    case = experts_cases.case_with_extras()
    for sets in available_sets:
        use(library, sets)
        experts_cases.check(case, experts_cases.run(library_path, case))


def test_a_gelu_in_the_place_of_the_silu(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets
) -> None:
    case = experts_cases.case_with_extras()
    case = case.replace(extras=experts_cases.NONE.replace(is_gelu=True))
    silu = case.replace(extras=experts_cases.NONE)
    for sets in available_sets:
        use(library, sets)
        found = experts_cases.run(library_path, case)
        experts_cases.check(case, found)
        assert (found != experts_cases.run(library_path, silu)).any()


@pytest.mark.parametrize("first", every(GROUPS, range(GROUPS)))
def test_random_cases_without_gates(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, first: int
) -> None:
    for seed in range(first, NUM_CASES, 2 * GROUPS):
        case = experts_cases.random_case(seed)
        case = experts_cases.without_gates(case, seed if seed % 3 else None)
        for sets in available_sets:
            use(library, sets)
            found = experts_cases.run(library_path, case)
            wanted = experts_cases.expected(library_path, case)
            assert found.tobytes() == wanted.tobytes(), (seed, sets)


@pytest.mark.parametrize("seed", [None, 8])
def test_it_is_what_it_says_without_gates(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, seed: int | None
) -> None:
    case = experts_cases.without_gates(experts_cases.case_with_extras(), seed)
    for sets in available_sets:
        use(library, sets)
        experts_cases.check(case, experts_cases.run(library_path, case))


@pytest.mark.parametrize("rows", [1, 40])
def test_without_gates_a_row_is_its_own(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, rows: int
) -> None:
    """The same bits alone as in a batch, and beside a row of what is no number."""
    case = experts_cases.without_gates(small_case(rows), 1)
    for sets in available_sets:
        use(library, sets)
        session = matmul_cases.session(library_path, experts_cases.model(case))
        plain = session.run(["y"], case.feeds())[0]
        for row in (0, rows - 1):
            alone = {"x": case.x[row : row + 1], "logits": case.logits[row : row + 1]}
            assert session.run(["y"], alone)[0].tobytes() == plain[row].tobytes()
        x = case.x.copy()
        x[-1, 50] = np.nan
        found = session.run(["y"], {"x": x, "logits": case.logits})[0]
        assert np.isnan(found[-1]).all()
        assert found[:-1].tobytes() == plain[:-1].tobytes()


@pytest.mark.parametrize("name", ["gate_up_bias", "down_bias", "alpha", "up_offset", "limit"])
def test_each_of_them_tells(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, name: str
) -> None:
    case = experts_cases.case_with_extras()
    without = case.replace(extras=case.extras.replace(**{name: getattr(experts_cases.NONE, name)}))
    for sets in available_sets:
        use(library, sets)
        found = experts_cases.run(library_path, without)
        experts_cases.check(without, found)
        largest = np.abs(found).max(1)
        difference = np.abs(found - experts_cases.run(library_path, case)).max(1)
        # Rows are from 0.01 to 100 times as large; some show it by more than rounding may change.
        assert (difference > 0.1 * largest).sum() > 5


@pytest.mark.parametrize("sign", [1, -1])
def test_beyond_the_limit_nothing_changes(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, sign: int
) -> None:
    case = small_case(5)
    for expert in case.experts:  # all gates are far above it, and ups, or as far below it
        expert.gate_up.quants[:] = 0xFF
        expert.gate_up.scales[: expert.inner] = 1
        expert.gate_up.scales[expert.inner :] = sign
    x = np.abs(case.x) + 1
    near = case.with_x(x, case.logits).replace(extras=experts_cases.Extras(limit=1.5))
    far = near.with_x(x * 1000, case.logits)
    for sets in available_sets:
        use(library, sets)
        found = experts_cases.run(library_path, near)
        assert found.tobytes() == experts_cases.run(library_path, far).tobytes()
        experts_cases.check(near, found)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("scale", [0.1, 3, 40])
def test_weights_are_those_of_a_softmax(normalize: bool, scale: float) -> None:
    """The reference's, whose bits the operator's outputs have."""
    rng = np.random.default_rng(1)
    logits = (rng.standard_normal((200, 77)) * scale).astype(np.float32)
    case = small_case().replace(logits=logits, top_k=9, normalize=normalize)
    found, wanted = experts_cases.route(case)[1], experts_cases.softmax_weights(case)
    # The difference of two logits is rounded, and an exponent's error is the power's relative one.
    np.testing.assert_allclose(found, wanted, rtol=3e-6 + 1e-7 * scale, atol=1e-37)


def test_it_is_what_it_says(library_path: Path, available_sets: Sets) -> None:
    """Against NumPy in float64; GatedMlp has its own tests."""
    assert available_sets
    case = experts_cases.make_case(8, (INT4, INT4), (384, 200, 64), 40, (4, 2))
    weights, chosen = experts_cases.softmax_weights(case), experts_cases.route(case)[0]
    wanted = np.zeros((40, 64))
    for number, expert in enumerate(case.experts):
        of = MlpCase(expert.gate_up.replace(x=case.x), expert.down)
        share = np.where(chosen == number, weights, 0).sum(1, keepdims=True)
        wanted += share * mlp_cases.expected(of)
    error = np.abs(experts_cases.run(library_path, case) - wanted).max(1) / np.abs(wanted).max(1)
    assert error.max() < 0.1
    assert np.median(error) < 2e-3


@pytest.mark.parametrize("with_extras", [False, True])
@pytest.mark.parametrize("second", [(4, 32), (8, 128)])
def test_a_row_is_the_same_alone_and_in_any_batch(
    library_path: Path,
    library: ctypes.CDLL,
    available_sets: Sets,
    second: tuple[int, int],
    with_extras: bool,
) -> None:
    rng = np.random.default_rng(second[1])
    case = experts_cases.make_case(1, ((4, 128), second), (256, 150, 96), 300, (12, 3))
    if with_extras:
        case = case.replace(extras=experts_cases.random_extras(1, case))
    serialized = experts_cases.model(case)
    for sets in available_sets:
        use(library, sets)
        two, one = (matmul_cases.session(library_path, serialized, threads) for threads in (2, 1))
        whole = two.run(["y"], case.feeds())[0]
        assert one.run(["y"], case.feeds())[0].tobytes() == whole.tobytes()
        for count in (1, 16, *rng.integers(1, 70, 8), *rng.integers(70, 300, 4)):
            rows = rng.permutation(len(case.x))[:count]
            part = two.run(["y"], {"x": case.x[rows], "logits": case.logits[rows]})[0]
            assert part.tobytes() == whole[rows].tobytes(), (sets, count)


def test_more_rows_than_are_computed_at_once(library_path: Path, available_sets: Sets) -> None:
    assert available_sets
    case = experts_cases.make_case(1, (INT4, INT4), (64, 40, 33), 2100, (9, 2))
    found = experts_cases.run(library_path, case)
    assert found.tobytes() == experts_cases.expected(library_path, case).tobytes()


def test_all_rows_on_the_same_experts(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets
) -> None:
    case = small_case(200)
    case.logits[:, [1, 4]] += 100
    for sets in available_sets:
        use(library, sets)
        found = experts_cases.run(library_path, case)
        assert found.tobytes() == experts_cases.expected(library_path, case).tobytes()


def test_of_equal_logits_the_first_ones_are_taken(library_path: Path, available_sets: Sets) -> None:
    assert available_sets
    case = small_case(4)
    case.logits[:] = [
        [0, 0, 0, 0, 0, 0],
        [0, 1, 0, 1, 1, 1],
        [0, -1, 5, 0, 0, 5],
        [3, 2, 1, 2, 2, 2],
    ]
    assert experts_cases.route(case)[0].tolist() == [[0, 1], [1, 3], [2, 5], [0, 1]]
    found = experts_cases.run(library_path, case)
    assert found.tobytes() == experts_cases.expected(library_path, case).tobytes()


@pytest.mark.parametrize(
    ("normalize", "with_extras"), [(False, False), (True, False), (True, True)]
)
@pytest.mark.parametrize("rows", [1, 40])
def test_what_is_not_finite_spoils_its_own_row_alone(
    library_path: Path,
    library: ctypes.CDLL,
    available_sets: Sets,
    rows: int,
    normalize: bool,
    with_extras: bool,
) -> None:
    case = small_case(rows).replace(normalize=normalize)
    if with_extras:
        case = case.replace(extras=experts_cases.random_extras(1, case))
    for sets in available_sets:
        use(library, sets)
        session = matmul_cases.session(library_path, experts_cases.model(case))
        plain = session.run(["y"], case.feeds())[0]
        spoiled = []
        for value in (np.nan, np.inf, -np.inf):
            x = case.x.copy()
            x[-1, 50] = value
            spoiled.append({"x": x, "logits": case.logits})
        for values in ([np.nan], [np.inf], [np.inf, np.inf, np.nan], [-np.inf] * 6, [np.nan] * 6):
            logits = case.logits.copy()
            logits[-1, : len(values)] = values
            spoiled.append({"x": case.x, "logits": logits})
        for feeds in spoiled:
            found = session.run(["y"], feeds)[0]
            assert np.isnan(found[-1]).all()
            assert found[:-1].tobytes() == plain[:-1].tobytes()


def test_experts_that_are_ruled_out(library_path: Path, available_sets: Sets) -> None:
    """Logits of minus infinity, and as far below the largest one: weights of zero."""
    assert available_sets
    case = small_case(3).replace(normalize=False)
    case.logits[0, 1:] = -np.inf
    case.logits[1] = [-3e38, 3e38, -3e38, -3e38, -3e38, -3e38]
    case.logits[2] = [-1e4, -1e4, 0, -1e4, -1e4, -88]
    found = experts_cases.run(library_path, case)
    assert np.isfinite(found).all()
    assert found.tobytes() == experts_cases.expected(library_path, case).tobytes()


def test_concurrent_sessions(library_path: Path, available_sets: Sets) -> None:
    assert available_sets
    made = [experts_cases.random_case(seed) for seed in range(7, 47, 5)]
    sessions = [matmul_cases.session(library_path, experts_cases.model(case)) for case in made]
    alone = [
        session.run(["y"], case.feeds())[0] for session, case in zip(sessions, made, strict=True)
    ]

    def repeat(i: int) -> bool:
        return all(
            sessions[i].run(["y"], made[i].feeds())[0].tobytes() == alone[i].tobytes()
            for _ in range(10)
        )

    with ThreadPoolExecutor(4) as executor:
        assert all(executor.map(repeat, range(len(made))))


def test_other_ranks(library_path: Path, available_sets: Sets) -> None:
    assert available_sets
    case = small_case(6)

    def run(x: np.ndarray, logits: np.ndarray) -> np.ndarray:
        return experts_cases.run(library_path, case.with_x(x, logits))

    wanted = run(case.x, case.logits)
    assert run(case.x[0], case.logits[:1]).tobytes() == wanted[0].tobytes()
    cube = run(case.x.reshape(2, 3, 96), case.logits)
    assert cube.shape == (2, 3, 40)
    assert cube.tobytes() == wanted.tobytes()
    assert run(case.x[:0], case.logits[:0]).shape == (0, 40)


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
        ({"inner": 69}, "gate_up must have 39744 elements, found 40320"),
        ({"N": 39}, "down must have"),
        ({"num_experts": 0, "top_k": 0}, "num_experts must be 1 or more, found 0"),
        ({"num_experts": 5}, "gate_up must have 33600 elements, found 40320"),
        ({"top_k": 0}, "top_k must be 1 to num_experts, 6, found 0"),
        ({"top_k": 7}, "top_k must be 1 to num_experts, 6, found 7"),
        ({"normalize": 2}, "normalize must be 0 or 1, found 2"),
        ({"alpha": 0.0}, "alpha must be positive, found 0"),
        ({"alpha": float("inf")}, "alpha must be positive, found inf"),
        ({"alpha": float("nan")}, "alpha must be positive, found -?nan"),
        ({"up_offset": float("inf")}, "up_offset must be finite, found inf"),
        ({"limit": -7.0}, "limit must be positive, found -7"),
        ({"is_gelu": 1, "alpha": 2.0}, "is_gelu excludes alpha, up_offset and limit"),
        ({"is_relu2": 1}, "gate_up must have 20160 elements, found 40320"),
    ],
)
def test_what_it_cannot_compute_is_refused(
    library_path: Path, available_sets: Sets, attributes: dict[str, float], message: str
) -> None:
    assert available_sets
    serialized = experts_cases.model(small_case(), **attributes)
    with pytest.raises(Exception, match=f"GatedExperts.*{message}"):
        matmul_cases.session(library_path, serialized)


@pytest.mark.parametrize(
    "attributes", [{"is_gelu": 1}, {"alpha": 2.0}, {"up_offset": 1.0}, {"limit": 2.0}]
)
def test_what_gates_have_is_refused_without_them(
    library_path: Path, available_sets: Sets, attributes: dict[str, float]
) -> None:
    assert available_sets
    serialized = experts_cases.model(experts_cases.without_gates(small_case()), **attributes)
    with pytest.raises(Exception, match="GatedExperts: is_relu2 excludes is_gelu, alpha"):
        matmul_cases.session(library_path, serialized)


def test_weights_that_may_change_are_refused(library_path: Path, available_sets: Sets) -> None:
    assert available_sets
    with pytest.raises(Exception, match="gate_up must be an initializer"):
        matmul_cases.session(library_path, experts_cases.model(small_case(), constant=False))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gate_up_bias", "gate_up_bias must have 840 elements, found 700"),
        ("down_bias", "down_bias must have 240 elements, found 200"),
    ],
)
def test_biases_that_do_not_fit_or_may_change(
    library_path: Path, available_sets: Sets, name: str, message: str
) -> None:
    assert available_sets
    case = small_case()
    extras = experts_cases.random_extras(1, case)
    short = case.replace(extras=extras.replace(**{name: getattr(extras, name)[:5]}))
    with pytest.raises(Exception, match=f"GatedExperts: {message}"):
        matmul_cases.session(library_path, experts_cases.model(short))
    of = onnx.ModelProto.FromString(experts_cases.model(case.replace(extras=extras)))
    (tensor,) = [one for one in of.graph.initializer if one.name == name]
    of.graph.input.append(onnx.helper.make_tensor_value_info(name, tensor.data_type, tensor.dims))
    session = matmul_cases.session(library_path, of.SerializeToString())
    with pytest.raises(Exception, match=f"GatedExperts: {name} must be an initializer"):
        session.run(["y"], case.feeds())


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 95), (2, 6)), "A's last dimension must be 96, found 95"),
        (((2, 96), (2, 7)), "router_logits must have 6 experts of each of A's 2 rows"),
        (((2, 96), (3, 6)), "found 18 elements with a last dimension of 6"),
        (((2, 96), (0, 6)), "found 0 elements"),
        (((3, 96), (6, 3)), "found 18 elements with a last dimension of 3"),
    ],
)
def test_inputs_of_other_sizes_are_refused(
    library_path: Path,
    available_sets: Sets,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    message: str,
) -> None:
    assert available_sets
    session = matmul_cases.session(library_path, experts_cases.model(small_case()))
    x, logits = (np.zeros(shape, np.float32) for shape in shapes)
    with pytest.raises(Exception, match=f"GatedExperts: .*{message}"):
        session.run(["y"], {"x": x, "logits": logits})
