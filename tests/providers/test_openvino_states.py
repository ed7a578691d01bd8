"""Models whose layers keep states on OpenVINO, which takes the states of a step's rows."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.errors import CapacityError, ProviderError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.passes.chunk_linear import CHUNK_TOKENS
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.openvino import provider as openvino
from onnxport.providers.openvino.gpu import GpuPlugin
from onnxport.providers.openvino.model import OpenVinoModel
from onnxport.providers.openvino.states import RowStates
from onnxport.providers.states import StatePlan, plan_states, state_bytes
from tests.conformance.reference import Reference
from tests.exporter import checkpoints
from tests.exporter.checkpoints import HYBRID, SPACES, UNGATED_EXPERTS
from tests.providers.linear import Stateful
from tests.providers.models import opened

if importlib.util.find_spec("openvino") is None:
    pytest.skip("openvino is not installed", allow_module_level=True)

Finder = Callable[[str], Path]
EXACT: Mapping[str, Any] = {"matmul_accuracy_level": 1, "kv_cache_dtype": "float32"}
PROMPTS = [checkpoints.tokens(seed, count).tolist() for seed, count in enumerate((24, 64, 90))]


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Finder:
    """Returns `find(case) -> artifact folder`, in int4."""
    found: dict[str, Path] = {}

    def make(case: str) -> Path:
        if case not in found:
            folder = tmp_path_factory.mktemp(case)
            checkpoints.make(HYBRID[case], folder / "checkpoint")
            options = ExportOptions(precision="int4", threads=1, group_size=32)
            found[case] = export_model(folder / "checkpoint", folder / "artifact", options)
        return found[case]

    return make


def in_steps(model: Model, cuts: Sequence[int], which: Sequence[int]) -> list[NDArray[Any]]:
    """Prompts beside one another, cut at the same places."""
    run, found = Stateful(model, 3, 1), {row: [] for row in which}  # type: ignore[var-annotated]
    for first, last in zip(cuts, [*cuts[1:], None], strict=True):
        new = {row: PROMPTS[row][first:last] for row in which if PROMPTS[row][first:last]}
        for row, logits in run.run(new, tries=2).items():
            found[row].append(logits)
    return [np.concatenate(parts) for parts in found.values()]


@pytest.mark.parametrize("case", ["qwen3.5", "qwen3-next"])
def test_logits_are_the_references(find: Finder, case: str) -> None:
    """Alone, where states are read and written in their slots, and in batches, where they are not.

    Each step is thrown away once: nothing that it writes is read by its second try.
    """
    reference = Reference(find(case))
    with opened(find(case), None, provider="openvino", state_slots=8, **EXACT) as model:
        for cuts in ([0], [0, 7, 8, 9, 20], [0, 81]):
            for which in ([2], [0, 1, 2]):
                for row, found in zip(which, in_steps(model, cuts, which), strict=True):
                    wanted = reference.logits(PROMPTS[row])
                    np.testing.assert_allclose(found, wanted, atol=1e-4 * wanted.std(), rtol=0)


SLOW = pytest.param("falcon-h1-norm", marks=pytest.mark.slow)


@pytest.mark.parametrize("case", ["granite-4", "nemotron-3", SLOW])
def test_state_spaces(case: str, tmp_path: Path) -> None:
    """Which have no delta rule."""
    peer = checkpoints.make({**SPACES, **UNGATED_EXPERTS}[case], tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    with opened(path, None, provider="openvino", state_slots=8, **EXACT) as model:
        found = in_steps(model, [0, 20, 21], [0, 1, 2])
    for ids, logits in zip(PROMPTS, found, strict=True):
        wanted = checkpoints.logits(peer, np.array(ids))
        np.testing.assert_allclose(logits, wanted, atol=1e-4 * wanted.std(), rtol=0)


def test_nothing_but_its_own_slots_is_written(find: Finder) -> None:
    with opened(find("qwen3.5"), None, provider="openvino", state_slots=8, **EXACT) as model:
        assert isinstance(model, OpenVinoModel)
        assert model._states is not None
        pools = [pool.slots for pool in model._states._pools]
        assert len(pools) == 2 * 3
        run = Stateful(model, 3)
        long = PROMPTS[2][: CHUNK_TOKENS + 3]
        for new in ({0: long}, {0: [1], 1: long}, {2: [7]}, {0: [4], 1: [5], 2: [6]}):
            before, held = [pool.copy() for pool in pools], list(run.slots)
            run.run(new)
            written = {slot for slot, old in zip(run.slots, held, strict=True) if slot != old}
            for old, pool in zip(before, pools, strict=True):
                assert len(pool) == 9
                changed = (pool != old).any(axis=tuple(range(1, pool.ndim)))
                assert set(np.flatnonzero(changed)) == written
                assert not pool[0].any()


def test_copies_of_rows_are_planned(find: Finder) -> None:
    """And not made anew in each step."""
    path = find("qwen3.5")
    spec = Artifact.read(path).manifest.model
    size = state_bytes(spec)
    for slots, rows in ((9, 4), (2, 1)):
        told = StatePlan(slots, size, copies_rows=True)
        assert (told.most_rows, told.num_bytes) == (rows, (slots + 1 + 2 * rows) * size)
        states = RowStates(spec, told)
        arrays = [one for pool in states._pools for one in (pool.slots, pool.taken, pool.given)]
        assert sum(one.nbytes for one in arrays) == told.num_bytes
    with pytest.raises(AssertionError, match="no room"):
        RowStates(spec, StatePlan(9, size))
    free = 2 * 11 * size  # of which states may take half
    found = plan_states(spec, LoadOptions(), free, 0, copies_rows=True)
    assert found == StatePlan(5, size, copies_rows=True)
    assert found.num_bytes <= 11 * size
    with pytest.raises(CapacityError, match=f"needs 4 of {size} bytes, copies in steps of several"):
        plan_states(spec, LoadOptions(), 2 * 5 * size - 1, 0, copies_rows=True)


def test_steps_of_more_rows_than_copies_are_cut(find: Finder) -> None:
    """No engine makes them: sequences have two slots each."""
    path = find("qwen3.5")
    reference = Reference(path)
    prompts = [ids[:7] for ids in PROMPTS]
    with opened(path, None, provider="openvino", state_slots=3, **EXACT) as model:
        assert isinstance(model, OpenVinoModel)
        assert model._states is not None
        assert model._states.most_rows == 1
        found = Stateful(model, 3).run(dict(enumerate(prompts)))
    for row, logits in found.items():
        wanted = reference.logits(prompts[row])
        np.testing.assert_allclose(logits, wanted, atol=1e-4 * wanted.std(), rtol=0)


def test_what_is_loaded(find: Finder) -> None:
    path = find("qwen3.5")
    spec = Artifact.read(path).manifest.model
    for slots, wanted in ((None, 64), (5, 5)):
        with opened(path, None, provider="openvino", state_slots=slots) as model:
            limits = model.capabilities
            assert (limits.state_slots, limits.state_bytes) == (wanted, state_bytes(spec))
            assert limits.compute_dtype == "float32"
            assert limits.kv_format.num_layers == len(spec.cached_layers) < spec.num_layers
            content = model.read_blocks([0, 3])
            assert content.shape[:3] == (2, len(spec.cached_layers), 2)
            inputs = Stateful(model, 1).inputs({0: [1, 2]}, [1])
            model.run(inputs)
            object.__setattr__(inputs, "state_writes", None)
            with pytest.raises(ProviderError, match="needs state_reads and state_writes, slots 1"):
                model.run(inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16"}, "^dtype is 'bfloat16'; .* in float32 alone"),
        (
            {"kv_cache_dtype": "bfloat16"},
            "^kv_cache_dtype is 'bfloat16', which needs the same dtype; .* in float32 alone: "
            "ask for kv_cache_dtype int8, float16, float32 or auto$",
        ),
        (
            {"matmul_accuracy_level": 3},
            "^matmul_accuracy_level is 3, which computes in bfloat16; .* in float32 alone: "
            "ask for another matmul_accuracy_level, or none$",
        ),
        (
            {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
            "^dtype is 'bfloat16' and kv_cache_dtype is .* in float32 alone: "
            "ask for dtype float32 or auto, and for kv_cache_dtype int8",
        ),
        ({"hidden_layers": (1,)}, "hidden"),
    ],
)
def test_what_does_not_go_with_them(find: Finder, options: Mapping[str, Any], message: str) -> None:
    with (
        pytest.raises(ProviderError, match=message),
        opened(find("qwen3.5"), None, provider="openvino", **options),
    ):
        pass


def test_a_gpu_refuses_them(find: Finder) -> None:
    artifact = Artifact.read(find("qwen3.5"))
    wanted = "openvino on a GPU.1 does not run layers that keep states.*; use another provider"
    with pytest.raises(ProviderError, match=wanted):
        openvino._for_states(artifact, GpuPlugin("GPU.1"), LoadOptions())
