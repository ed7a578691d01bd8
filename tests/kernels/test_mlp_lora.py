"""onnxport.GatedMlp with adapters: what they add, to whom, and what is refused."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from tests.kernels import matmul_cases, mlp_cases, mlp_lora_cases, norm_cases
from tests.kernels.mlp_lora_cases import RANKS, AdaptedMlp, errors, make_case
from tests.kernels.norm_cases import add_norm, random_norm
from tests.kernels.test_mlp import Sets, available_sets, use
from tests.tiers import crossed

__all__ = ["available_sets"]  # a fixture


@pytest.mark.parametrize(("rows", "dtype"), crossed(4, [9, 1, 40, 2, 300], ["int8", "int4"]))
def test_every_row_gets_its_own_adapter(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, dtype: str, rows: int
) -> None:
    case = make_case(rows, rows, dtype)
    adapted = case.slots > 0
    for sets in available_sets:
        use(library, sets)
        plain = mlp_cases.run(library_path, case.layer, mlp_cases.fused(case.layer))
        found = mlp_lora_cases.run(library_path, case, mlp_lora_cases.fused(case))
        mlp_lora_cases.check(case, found)
        assert found[~adapted].tobytes() == plain[~adapted].tobytes()
        changed = errors(found[adapted], plain[adapted])
        assert changed.min(initial=1) > 0.05, "the adapters change too little to be seen"


@pytest.mark.parametrize(("rows", "dtype"), crossed(4, [16, 1, 17, 9, 300], ["int8", "int4"]))
def test_it_is_what_it_is_made_of(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, dtype: str, rows: int
) -> None:
    case = make_case(7, rows, dtype)
    case = replace(case, layer=replace(case.layer, is_gelu=rows % 2 == 0))
    for sets in available_sets:
        use(library, sets)
        together, apart = (
            mlp_lora_cases.run(library_path, case, of)
            for of in (mlp_lora_cases.fused(case), mlp_lora_cases.separate(case))
        )
        assert together.tobytes() == apart.tobytes(), sets


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_row_is_the_same_alone_and_in_any_batch(
    library_path: Path, library: ctypes.CDLL, available_sets: Sets, dtype: str
) -> None:
    case = make_case(1, 300, dtype)
    random = np.random.default_rng(1)
    serialized = mlp_lora_cases.fused(case)
    for sets in available_sets:
        use(library, sets)
        two, one = (matmul_cases.session(library_path, serialized, threads) for threads in (2, 1))
        whole = two.run(["y"], case.feeds())[0]
        assert one.run(["y"], case.feeds())[0].tobytes() == whole.tobytes()
        for count in (1, 1, 8, 16, *random.integers(2, 300, 5)):
            rows = random.permutation(300)[:count]
            part = two.run(["y"], case.rows(rows).feeds())[0]
            assert part.tobytes() == whole[rows].tobytes(), (sets, count)


@pytest.mark.parametrize("slot", range(len(RANKS)))
def test_one_adapter_for_all(library_path: Path, available_sets: Sets, slot: int) -> None:
    assert available_sets
    case = make_case(2, 21)
    case = AdaptedMlp(case.layer, np.full(21, slot, np.int32))
    found = mlp_lora_cases.run(library_path, case, mlp_lora_cases.fused(case))
    mlp_lora_cases.check(case, found)


@pytest.mark.parametrize("is_asked", [False, True])
def test_with_a_norm(library_path: Path, available_sets: Sets, is_asked: bool) -> None:
    """The bits of the layer without one, whose input is what was normalized."""
    assert available_sets
    case = make_case(3, 40)
    norm = random_norm(3, case.layer.x)
    of = onnx.load_from_string(add_norm(mlp_lora_cases.fused(case), norm, more=["normalized"]))
    (node,) = of.graph.node
    feeds = case.feeds() | {"skip": norm.skip}
    asked = matmul_cases.session(library_path, of.SerializeToString())
    y, residual, normalized = asked.run(None, feeds)
    np.testing.assert_allclose(
        normalized, norm_cases.normalized(case.layer.x, norm), rtol=1e-5, atol=1e-6
    )
    plain = matmul_cases.session(library_path, mlp_lora_cases.fused(case))
    wanted = plain.run(["y"], case.feeds() | {"x": normalized})[0]
    if not is_asked:
        node.output.pop()
        of.graph.output.pop()
        y, residual = matmul_cases.session(library_path, of.SerializeToString()).run(None, feeds)
    assert y.tobytes() == wanted.tobytes()
    assert residual.tobytes() == (case.layer.x + norm.skip).tobytes()


@pytest.mark.parametrize("given", ["none", "no slots"])
def test_part_of_what_adapters_need_is_refused(
    library_path: Path, available_sets: Sets, given: str
) -> None:
    assert available_sets
    case = make_case(4, 5)
    message = "adapters need slots, ranks, weights, scales and max_rank; there is no"
    without = mlp_lora_cases.fused(case, max_rank=None)
    with pytest.raises(Exception, match=f"GatedMlp: {message} max_rank"):
        mlp_lora_cases.run(library_path, case, without)
    of = onnx.load_from_string(mlp_lora_cases.fused(case))
    names = list(of.graph.node[0].input)
    del of.graph.node[0].input[:]
    of.graph.node[0].input.extend(names[:5] if given == "none" else [*names[:7], "", *names[8:]])
    with pytest.raises(Exception, match=f"GatedMlp: {message} slots"):
        mlp_lora_cases.run(library_path, case, of.SerializeToString())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"slots": np.full(5, 5, np.int32)}, "slot 5; there are 0 to 4"),
        ({"slots": np.full(5, -1, np.int32)}, "slot -1; there are 0 to 4"),
        ({"slots": np.zeros(4, np.int32)}, "number of token slots must be 5, found 4"),
        ({"ranks": np.full((5, 1, 6), 21, np.int32)}, "rank 21; there are 0 to 20"),
        ({"ranks": np.full((5, 1, 6), -1, np.int32)}, "rank -1; there are 0 to 20"),
        ({"ranks": np.zeros((5, 1, 4), np.int32)}, "ranks of a slot, at least, must be 5, found 4"),
        ({"weights": np.zeros((4, 99), np.int8)}, "the numbers of a slot, at least, must be"),
        ({"scales": np.zeros((5, 1, 6, 19), np.float32)}, "scales of a projection must be 20"),
    ],
)
def test_what_would_read_elsewhere_is_refused(
    library_path: Path, available_sets: Sets, change: dict[str, NDArray[Any]], said: str
) -> None:
    assert available_sets
    case = make_case(5, 5)
    case = AdaptedMlp(case.layer, np.ones(5, np.int32))
    session = matmul_cases.session(library_path, mlp_lora_cases.fused(case))
    with pytest.raises(Exception, match=f"GatedMlp: .*{said}"):
        session.run(["y"], case.feeds() | change)


@pytest.mark.parametrize("change", [{"gate_up_offset": -1}, {"down_ranks": -1}, {"max_rank": 0}])
def test_wrong_attributes_are_refused(
    library_path: Path, available_sets: Sets, change: dict[str, int]
) -> None:
    assert available_sets
    with pytest.raises(Exception, match="GatedMlp: an attribute is negative, or there are no"):
        matmul_cases.session(library_path, mlp_lora_cases.fused(make_case(6, 1), **change))
