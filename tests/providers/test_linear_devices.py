"""Models whose layers keep states on devices that ONNX Runtime drives, emulated here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from onnxport.errors import CapacityError, OptionError, ProviderError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.passes.chunk_linear import CHUNK_TOKENS
from onnxport.providers import device, webgpu
from onnxport.providers.base import LoadOptions, StepInputs
from onnxport.providers.features import Attention
from onnxport.providers.ort import CacheTensor
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.recipe import Recipe
from onnxport.providers.registry import get_provider
from onnxport.providers.states import StatePlan, plan_states, state_bytes
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from tests.conformance.reference import Reference
from tests.exporter import checkpoints
from tests.exporter.checkpoints import HYBRID, SPACES, UNGATED_EXPERTS
from tests.providers.linear import Stateful

Finder = Callable[[str, str], Path]
Logits = NDArray[np.float32]
DEVICES = ("cuda", "webgpu", "migraphx", "directml")
EXACT: Mapping[str, Any] = {"dtype": "float32", "matmul_accuracy_level": 1}
# One is as long as a chunk, and one is longer.
PROMPTS = [checkpoints.tokens(seed, count).tolist() for seed, count in enumerate((24, 64, 90))]


@pytest.fixture(scope="module")
def find(tmp_path_factory: pytest.TempPathFactory) -> Finder:
    """Returns `find(case, precision) -> artifact folder`."""
    found: dict[tuple[str, str], Path] = {}

    def make(case: str, precision: str) -> Path:
        if (case, precision) not in found:
            folder = tmp_path_factory.mktemp(f"{case}-{precision}")
            checkpoints.make(HYBRID[case], folder / "checkpoint")
            options = ExportOptions(precision=precision, threads=1, group_size=32)
            found[case, precision] = export_model(
                folder / "checkpoint", folder / "artifact", options
            )
        return found[case, precision]

    return make


@contextmanager
def loaded(path: Path, provider: str, **options: Any) -> Iterator[OrtModel]:
    chosen = {"kv_cache_tokens": 1024, "threads": 1, "state_slots": 8, **options}
    model = get_provider(provider, emulate=True).load(Artifact.read(path), LoadOptions(**chosen))
    assert isinstance(model, OrtModel)
    try:
        yield model
    finally:
        model.close()


def in_steps(model: OrtModel, cuts: list[int], seed: int = 1) -> list[Logits]:
    """All prompts beside one another, cut at the same places."""
    run, found = Stateful(model, len(PROMPTS), seed), [[] for _ in PROMPTS]  # type: ignore[var-annotated]
    for first, last in zip(cuts, [*cuts[1:], None], strict=True):
        new = {row: ids[first:last] for row, ids in enumerate(PROMPTS) if ids[first:last]}
        for row, logits in run.run(new).items():
            found[row].append(logits)
    return [np.concatenate(parts) for parts in found]


@pytest.mark.parametrize(
    ("provider", "case"),
    [
        *((provider, "qwen3.5") for provider in DEVICES),
        ("webgpu", "qwen3-next"),
        ("migraphx", "qwen3-next-dense-layers"),
    ],
)
def test_logits_are_the_references(find: Finder, provider: str, case: str) -> None:
    """Of prompts in a batch, in chunks of any size beside one another, and of single tokens."""
    path = find(case, "int4")
    reference = Reference(path)
    wanted = [reference.logits(ids) for ids in PROMPTS]
    with loaded(path, provider, **EXACT) as model:
        for cuts in ([0], [0, 7, 8, 9, 20], [0, 16, 81], list(range(24))):
            for found, logits in zip(in_steps(model, cuts), wanted, strict=True):
                np.testing.assert_allclose(found, logits, atol=1e-4 * logits.std(), rtol=0)


@pytest.mark.parametrize(
    ("provider", "case"),
    [
        ("cuda", "granite-4"),
        ("migraphx", "nemotron-h"),
        pytest.param("webgpu", "falcon-h1", marks=pytest.mark.slow),
        ("cuda", "nemotron-3"),
        ("webgpu", "nemotron-3-groups"),
    ],
)
def test_state_spaces(provider: str, case: str, tmp_path: Path) -> None:
    """Which have no delta rule."""
    peer = checkpoints.make({**SPACES, **UNGATED_EXPERTS}[case], tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    with loaded(path, provider) as model:
        found = in_steps(model, [0, 20, 21])
    for ids, logits in zip(PROMPTS, found, strict=True):
        wanted = checkpoints.logits(peer, np.array(ids))
        np.testing.assert_allclose(logits, wanted, atol=1e-4 * wanted.std(), rtol=0)


@pytest.mark.parametrize("provider", ["cuda", "directml"])
def test_16_bits(find: Finder, provider: str) -> None:
    """Convolutions keep what they read in the type of the activations, matrices are float32."""
    path = find("qwen3.5", "fp16")
    reference, spec = Reference(path), Artifact.read(path).manifest.model
    with loaded(path, provider) as model:
        limits = model.capabilities
        assert limits.compute_dtype == "float16"
        assert limits.state_bytes == state_bytes(spec, 2) < state_bytes(spec)
        for ids, found in zip(PROMPTS, in_steps(model, [0, 30, 31]), strict=True):
            wanted = reference.logits(ids)
            np.testing.assert_allclose(found, wanted, atol=0.1 * wanted.std(), rtol=0)


def test_experts_without_a_gate_in_16_bits(tmp_path: Path) -> None:
    checkpoints.make(UNGATED_EXPERTS["nemotron-3"], tmp_path / "checkpoint")
    options = ExportOptions(precision="int4", threads=1, group_size=32)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    with np.load(path / "golden.npz") as golden:
        ids, rows, wanted = (golden[key] for key in ("token_ids", "logits_indices", "logits"))
    with loaded(path, "cuda") as model:
        assert model.capabilities.compute_dtype == "float16"
        found = Stateful(model, 1).run({0: ids.tolist()})[0][rows]
    np.testing.assert_allclose(found, wanted, atol=0.1 * wanted.std(), rtol=0)


def test_16_bits_of_what_is_stored_in_32_are_refused(find: Finder) -> None:
    path = find("qwen3.5", "fp32")
    with pytest.raises(OptionError, match="stored in float32 and has layers that keep states"):
        get_provider("cuda", emulate=True).load(Artifact.read(path), LoadOptions(dtype="float16"))
    with loaded(path, "cuda") as model:
        assert model.capabilities.compute_dtype == "float32"


@pytest.mark.parametrize("provider", ["cuda", "migraphx"])
def test_a_step_can_be_thrown_away_and_slots_be_shared(find: Finder, provider: str) -> None:
    """What a step writes is nothing to those that read what was there before, at any length."""
    path = find("qwen3.5", "int4")
    reference = Reference(path)
    with loaded(path, provider, **{**EXACT, "state_slots": 5}) as model:
        run = Stateful(model, 2)
        run.run({0: PROMPTS[0]}, tries=2)
        run.fork(0, 1)
        found = run.run({0: PROMPTS[2], 1: PROMPTS[1]}, tries=2)
        again = run.run({0: [5], 1: [6]}, tries=3)
    for row, ids in enumerate((PROMPTS[2], PROMPTS[1])):
        wanted = reference.logits([*PROMPTS[0], *ids, 5 + row])[len(PROMPTS[0]) :]
        both = np.concatenate([found[row], again[row]])
        np.testing.assert_allclose(both, wanted, atol=1e-4 * wanted.std(), rtol=0)


@pytest.mark.parametrize("provider", ["cuda", "directml"])
def test_nothing_but_its_own_slots_is_written(
    find: Finder, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a step is padded, too: one slot behind all others is for that, if there is."""
    made: list[CacheTensor] = []
    allocate = device.device_states

    def note(*arguments: Any) -> list[CacheTensor]:
        made[:] = allocate(*arguments)
        return made[:]

    monkeypatch.setattr(device, "device_states", note)
    spare = {9} if provider == "directml" else set()
    with loaded(find("qwen3.5", "int4"), provider, **EXACT) as model:
        run = Stateful(model, 3)
        for new in ({0: PROMPTS[0]}, {0: [1], 1: PROMPTS[2]}, {0: [4], 1: [5], 2: [6]}):
            before, held = [pool.value.numpy().copy() for pool in made], list(run.slots)
            run.run(new)
            written = {slot for slot, old in zip(run.slots, held, strict=True) if slot != old}
            assert len(written) == len(new)
            for old, pool in zip(before, made, strict=True):
                found = pool.value.numpy()
                assert len(found) == 9 + len(spare)
                assert not found[0].any()
                changed = (found != old).any(axis=tuple(range(1, found.ndim)))
                assert written <= set(np.flatnonzero(changed)) <= written | spare
    assert len(made) == 2 * 3


def test_hidden_states_of_a_step_that_is_cut(find: Finder) -> None:
    path, ids = find("qwen3.5", "int4"), PROMPTS[2]
    told = []
    for provider, most in (("cuda", 1000), ("cuda", None), ("migraphx", None)):
        with loaded(path, provider, **EXACT, hidden_layers=(1, 3)) as model:
            inputs = Stateful(model, 2).inputs({0: ids, 1: ids[:5]}, [1, 2])
            features = np.zeros((len(inputs.input_ids), model.capabilities.features), np.float32)
            if most:
                model._most_row_tokens = CHUNK_TOKENS // 2
            model.run(replace(inputs, hidden_states=features))
            told.append(features)
    for other in told[1:]:
        np.testing.assert_allclose(other, told[0], atol=1e-4)
    np.testing.assert_allclose(told[0][-5:], told[0][:5], atol=1e-4)


def test_a_cut_step_tells_no_summaries(find: Finder) -> None:
    """As one that runs in parts: who asks computes from the logits, which are all there."""
    with loaded(find("qwen3.5", "int4"), "cuda", **EXACT) as model:
        inputs = Stateful(model, 1).inputs({0: PROMPTS[2]}, [1])
        rows = len(inputs.logits_indices)
        summaries = np.zeros((rows, 20), np.float32)
        scales = np.ones(rows, np.float32)
        model.run(replace(inputs, summary_scales=scales, summaries=summaries))
        assert (summaries[:, -1] == -1).all()


@pytest.mark.parametrize(("provider", "wanted"), [("webgpu", [18]), ("migraphx", [16, 2])])
def test_rows_run_together_by_what_they_are_padded_to(
    find: Finder, monkeypatch: pytest.MonkeyPatch, provider: str, wanted: list[int]
) -> None:
    """Of 9 tokens on webgpu, and of 64 where shapes are few."""
    with loaded(find("qwen3.5", "int4"), provider, **{**EXACT, "state_slots": 40}) as model:
        run, rows = model._run_rows, []

        def note(inputs: StepInputs) -> Logits:
            rows.append(len(inputs.block_table))
            return run(inputs)

        monkeypatch.setattr(model, "_run_rows", note)
        new = {0: PROMPTS[0][:9]} | {row: [row] for row in range(1, 18)}
        assert len(Stateful(model, 18).run(new)) == 18
    assert rows == wanted


@pytest.mark.parametrize("provider", ["webgpu", "migraphx"])
def test_an_engine_serves_them(find: Finder, provider: str) -> None:
    """Prefixes are found again, and what is answered is the same as without."""
    path = find("qwen3.5", "int4")
    reference = Reference(path)
    prompts = [PROMPTS[1], [*PROMPTS[1], 7], [*PROMPTS[1][:40], 9], PROMPTS[0]]
    with loaded(path, provider, **{**EXACT, "block_size": 16, "state_slots": 24}) as model:
        engine = Engine(model, config=EngineConfig(4, 48))
        cached = 0
        for _ in range(2):
            for number, prompt in enumerate(prompts):
                params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
                engine.submit(engine.prepare(str(number), prompt, params))
            tokens: dict[str, list[int]] = {}
            while engine.has_work:
                for delta in engine.step():
                    tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
                    cached += delta.num_cached_tokens * (delta.finish_reason is not None)
                engine.check()
            for number, prompt in enumerate(prompts):
                answer = tokens[str(number)]
                logits = reference.logits([*prompt, *answer[:-1]])[len(prompt) - 1 :]
                best = logits.max(axis=1) - logits[range(6), answer]
                assert (best <= 2e-4 * logits.std()).all()
        engine.close()
    assert cached > 64


def test_what_is_loaded(find: Finder) -> None:
    path = find("qwen3.5", "int4")
    spec = Artifact.read(path).manifest.model
    for slots, wanted in ((None, 64), (5, 5)):
        with loaded(path, "webgpu", **{**EXACT, "state_slots": slots}) as model:
            limits = model.capabilities
            assert (limits.state_slots, limits.state_bytes) == (wanted, state_bytes(spec))
            assert limits.kv_format.num_layers == len(spec.cached_layers) < spec.num_layers
            content = model.read_blocks([0, 3])
            model.write_blocks([3, 0], content[::-1].copy())
            assert content.shape[:3] == (2, len(spec.cached_layers), 2)


def test_a_step_names_its_slots(find: Finder) -> None:
    with loaded(find("qwen3.5", "int4"), "directml", state_slots=4) as model:
        inputs = Stateful(model, 2).inputs({0: [1, 2], 1: [3]}, [1, 2])
        with pytest.raises(ProviderError, match="needs state_reads and state_writes, slots 1 to 4"):
            model.run(replace(inputs, state_reads=None))


def test_steps_are_not_replayed(find: Finder) -> None:
    artifact = Artifact.read(find("qwen3.5", "int4"))
    message = "steps of a model that has layers with a state are not replayed"
    with pytest.raises(ProviderError, match=message):
        get_provider("cuda", emulate=True).load(artifact, LoadOptions(capture_graphs=True))


def test_decoding_is_not_replayed_unasked(find: Finder) -> None:
    recipe = Recipe(
        provider="cuda",
        device="a GPU",
        dtypes=("float16",),
        native=None,
        native_block_size=lambda size: 256,
        capture_options={"enable_cuda_graph": "1"},
    )
    stateful = Artifact.read(find("qwen3.5", "int4")).manifest.model
    spec = replace(stateful, linear=None)  # which has attention in all layers
    rope = replace(spec.rope, rotary_dim=spec.head_size)
    last = replace(spec, qk_norm_last=True, rope=rope)

    def can(attention: Attention = "native", *, tells: bool = False, **given: Any) -> bool:
        values: dict[str, Any] = {"spec": spec, "options": LoadOptions(), "recipe": recipe, **given}
        return device.can_capture(**values, attention=attention, tells=tells)

    assert can()
    assert not can(spec=stateful)
    assert not can(spec=last)
    assert not can("decomposed")
    assert not can(tells=True)
    assert not can(options=LoadOptions(allowed_on_host=("Gather",)))
    assert not can(recipe=replace(recipe, capture_options=None))


def test_the_graph_has_no_control_flow(find: Finder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which could not be on most devices."""
    models: list[bytes] = []
    begin = device.start_session

    def note(model: bytes, *others: Any) -> Any:
        models.append(model)
        return begin(model, *others)

    monkeypatch.setattr(device, "start_session", note)
    with loaded(find("qwen3.5", "int4"), "cuda"):
        pass
    (graph,) = (onnx.ModelProto.FromString(one).graph for one in models)
    kinds = {node.op_type for node in graph.node}
    assert not kinds & {"Loop", "Scan", "If", "GatedDeltaNet", "VarlenCausalConvWithState"}


def test_slots_that_a_buffer_holds(find: Finder) -> None:
    spec = Artifact.read(find("qwen3.5", "int4")).manifest.model
    assert spec.linear is not None
    heads, value_size, key_size = spec.linear.recurrent_state
    largest = 4 * heads * value_size * key_size
    for fits, wanted in ((66, 64), (65, 64), (64, 63), (3, 2)):
        found = plan_states(spec, LoadOptions(), None, 0, buffer_bytes=fits * largest)
        assert found == StatePlan(wanted, state_bytes(spec))
    with pytest.raises(CapacityError, match="the device's buffers hold"):
        plan_states(spec, LoadOptions(), None, 0, buffer_bytes=3 * largest - 1)
    spare = plan_states(spec, LoadOptions(), None, 0, num_spare=1, buffer_bytes=66 * largest)
    assert (spare.num_slots, spare.pool_slots) == (64, 66)
    assert spare.num_bytes == 66 * state_bytes(spec)
    assert webgpu.BUFFER_BYTES // largest > 66


def test_memory_that_a_device_does_not_tell(find: Finder) -> None:
    spec = Artifact.read(find("qwen3.5", "int4")).manifest.model
    many = LoadOptions(state_slots=10**9)
    found = plan_states(spec, many, None, 1 << 40)
    assert found.num_bytes <= 1 << 30 < found.num_bytes + found.slot_bytes
    with pytest.raises(CapacityError, match="for the device does not tell its memory"):
        plan_states(spec, LoadOptions(state_slots=1), None, 0)
