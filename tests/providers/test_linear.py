"""Models whose layers keep states on the `cpu` provider."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from onnxport.errors import CapacityError, ProviderError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.linear_spec import ShortConvSpec
from onnxport.providers import memory, states
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu import cache_pages, choices
from onnxport.providers.cpu.provider import CpuProvider
from onnxport.providers.cpu.state_pools import allocate_states
from onnxport.providers.features import Attention
from onnxport.providers.memory import HUGE_PAGE
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.pool import plan_pool
from onnxport.providers.states import StatePlan, plan_states, state_bytes
from tests.exporter import checkpoints
from tests.exporter.checkpoints import HYBRID, SPACES, UNGATED_EXPERTS
from tests.providers.conftest import ArtifactMaker
from tests.providers.linear import Stateful
from tests.providers.models import opened

Made = tuple[Path, PreTrainedModel]
Maker = Callable[[str, str], Made]
KINDS: tuple[Attention, ...] = ("custom", "decomposed")
CASES = (
    *("qwen3.5", "qwen3.5-tied", "qwen3-next", "qwen3-next-dense-layers"),
    *("granite-4", "granite-4-dense", "bamba", "nemotron-h", "nemotron-h-biases"),
    "falcon-h1",
    *UNGATED_EXPERTS,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Returns `make(case, precision) -> artifact folder, transformers' model`."""
    found: dict[tuple[str, str], Made] = {}

    def make(case: str, precision: str) -> Made:
        if (case, precision) not in found:
            folder = tmp_path_factory.mktemp(f"{case}-{precision}")
            known = {**HYBRID, **SPACES, **UNGATED_EXPERTS}
            model = checkpoints.make(known[case], folder / "checkpoint")
            options = ExportOptions(precision=precision, threads=1, group_size=32)
            path = export_model(folder / "checkpoint", folder / "artifact", options)
            found[case, precision] = path, model
        return found[case, precision]

    return make


def prompts(count: int = 3) -> list[list[int]]:
    return [checkpoints.tokens(seed, 24 + 9 * seed).tolist() for seed in range(count)]


@pytest.mark.parametrize("attention", KINDS)
@pytest.mark.parametrize("case", CASES)
def test_logits_are_transformers(made: Maker, case: str, attention: Attention) -> None:
    """Of prompts in a batch, in chunks of any size beside one another, and of single tokens."""
    path, peer = made(case, "fp32")
    tokens = prompts()
    wanted = [checkpoints.logits(peer, np.array(ids)) for ids in tokens]
    with opened(path, attention, state_slots=8) as model:
        assert model.capabilities.attention == attention
        run = Stateful(model, 6)
        together = run.run(dict(enumerate(tokens)))
        for row, logits in together.items():
            np.testing.assert_allclose(logits, wanted[row], atol=1e-4)
        for cuts in ([0, 7, 8, 9, 20], [0, 16, 17, 32], list(range(24))):
            run = Stateful(model, 3, seed=1)
            found: list[list[np.ndarray]] = [[], [], []]
            for first, last in zip(cuts, [*cuts[1:], None], strict=True):
                for row, logits in run.run({r: tokens[r][first:last] for r in range(3)}).items():
                    found[row].append(logits)
            for row, parts in enumerate(found):
                np.testing.assert_allclose(np.concatenate(parts), wanted[row], atol=1e-4)


@pytest.mark.parametrize(
    ("case", "precision"),
    [
        ("qwen3.5", "int4"),
        ("qwen3-next", "int4"),
        ("granite-4", "int4"),
        ("nemotron-h", "int4"),
        ("nemotron-3", "int4"),
        ("nemotron-3-groups", "fp32"),
        ("falcon-h1", "int4"),
        ("granite-4-dense", "fp32"),  # where no rounding to int8 hides a last bit
    ],
)
def test_a_sequence_has_the_same_bits_alone_and_in_a_batch_whole_and_in_chunks(
    made: Maker, case: str, precision: str
) -> None:
    """Where products are ours, or of floats, nothing depends on what else there is."""
    path, _ = made(case, precision)
    tokens = prompts()
    with opened(path, "custom", state_slots=8) as model:
        alone = [Stateful(model, 3).run({row: tokens[row]})[row] for row in range(3)]
        together = Stateful(model, 3).run(dict(enumerate(tokens)))
        for in_place in (False, True):
            mixed = Stateful(model, 3)
            parts: list[list[np.ndarray]] = [[], [], []]
            for step in (
                {0: (0, 5)},
                {0: (5, 6), 1: (0, 17)},
                {2: (0, 42), 0: (6, 24), 1: (17, 33)},
            ):
                new = {row: tokens[row][first:last] for row, (first, last) in step.items()}
                for row, logits in mixed.run(new, in_place=in_place).items():
                    parts[row].append(logits)
            for row in range(3):
                assert together[row].tobytes() == alone[row].tobytes()
                assert np.concatenate(parts[row]).tobytes() == alone[row].tobytes()


@pytest.mark.parametrize("attention", KINDS)
def test_precisions(made: Maker, attention: Attention) -> None:
    """The pools of convolutions are float16 in these artifacts, and float32 here."""
    for precision, level in (("fp16", None), ("int8", 1), ("int4", 1)):
        path, _ = made("qwen3.5", precision)
        opening = opened(path, attention, matmul_accuracy_level=level)
        with np.load(path / "golden.npz") as golden, opening as model:
            token_ids, indices = golden["token_ids"], golden["logits_indices"]
            found = Stateful(model, 1).run({0: token_ids.tolist()})[0][indices]
            np.testing.assert_allclose(found, golden["logits"], atol=1e-3)


@pytest.mark.parametrize("attention", KINDS)
def test_a_step_can_be_thrown_away_and_run_again(made: Maker, attention: Attention) -> None:
    """What a step writes is nothing to those that read what was there before."""
    path, peer = made("qwen3.5", "fp32")
    first, second, _ = prompts()
    with opened(path, attention, state_slots=5) as model:
        run = Stateful(model, 2)
        parts: list[list[np.ndarray]] = [[], []]
        for at in range(0, 24, 6):
            new = {0: first[at : at + 6], 1: second[at : at + 6]}
            for row, logits in run.run(new, tries=3).items():
                parts[row].append(logits)
    for ids, found in zip((first, second), parts, strict=True):
        wanted = checkpoints.logits(peer, np.array(ids[:24]))
        np.testing.assert_allclose(np.concatenate(found), wanted, atol=1e-4)


@pytest.mark.parametrize("attention", KINDS)
def test_a_state_is_written_where_it_was_read(made: Maker, attention: Attention) -> None:
    path, _ = made("qwen3.5", "fp32")
    first, second, _ = prompts()
    with opened(path, attention, state_slots=5) as model:
        assert model.capabilities.host_states
        logits: list[list[bytes]] = []
        for in_place in (False, True):
            run = Stateful(model, 2)
            logits.append([])
            for at in range(0, 12, 3):
                new = {0: first[at : at + 3], 1: second[at : at + 3]}
                found = run.run(new, in_place=in_place)
                logits[-1] += [found[row].tobytes() for row in new]
        assert logits[0] == logits[1]


@pytest.mark.skipif(not cache_pages.can_collapse(), reason="this system has no huge pages")
def test_slots_take_memory_when_they_are_written(made: Maker) -> None:
    spec = Artifact.read(made("qwen3.5", "fp32")[0]).manifest.model
    assert spec.linear is not None
    assert spec.linear.recurrent_state is not None
    num_slots = 2 * HUGE_PAGE // (4 * math.prod(spec.linear.recurrent_state))
    tensors, matrices = allocate_states(spec, StatePlan(num_slots, state_bytes(spec)))
    assert len(tensors) == 2 * len(matrices) == 2 * len(spec.linear_layers)
    for matrix in matrices:
        assert len(matrix) == num_slots
        assert matrix.ctypes.data % HUGE_PAGE == 0
        matrix[0] = 1.0
        used = -(-matrix[0].nbytes // mmap.PAGESIZE)
        assert cache_pages._num_resident(matrix.ctypes.data) == used


@pytest.mark.parametrize("attention", KINDS)
def test_two_sequences_go_on_from_one_slot(made: Maker, attention: Attention) -> None:
    path, peer = made("qwen3.5", "fp32")
    shared, one, _ = prompts()
    other = one[::-1]
    with opened(path, attention, state_slots=3) as model:
        run = Stateful(model, 2)
        run.run({0: shared})
        run.fork(0, 1)
        found = run.run({0: one, 1: other})
    for row, ids in enumerate((one, other)):
        wanted = checkpoints.logits(peer, np.array(shared + ids))[len(shared) :]
        np.testing.assert_allclose(found[row], wanted, atol=1e-4)


def test_a_step_in_parts(made: Maker) -> None:
    """Rows that run one after the other have the slots that are theirs."""
    path, _ = made("qwen3.5", "fp32")
    tokens = dict(enumerate(prompts()))
    with opened(path, "decomposed", state_slots=8) as model:
        assert isinstance(model, OrtModel)
        assert model._step_memory is not None
        runs = [Stateful(model, 3, seed=3) for _ in range(2)]
        found = []
        for run, most_bytes in zip(runs, (1 << 30, 0), strict=True):
            model._step_memory = replace(model._step_memory, most_bytes=most_bytes)
            found.append([run.run(tokens), run.run({row: [5] for row in tokens})])
    for one, other in zip(*found, strict=True):
        for row in tokens:
            np.testing.assert_allclose(one[row], other[row], atol=1e-5)


@pytest.mark.parametrize("attention", KINDS)
def test_what_layers_read_is_told(made: Maker, attention: Attention) -> None:
    """Those with a state and those without."""
    path, peer = made("qwen3.5", "fp32")
    ids = prompts()[0]
    with torch.no_grad():
        every = peer(torch.tensor([ids]), output_hidden_states=True).hidden_states
    wanted = np.concatenate([every[layer][0].numpy() for layer in (1, 3)], axis=1)
    with opened(path, attention, hidden_layers=(1, 3)) as model:
        inputs = Stateful(model, 1).inputs({0: ids}, [1])
        told = np.zeros((len(ids), model.capabilities.features), np.float32)
        model.run(replace(inputs, hidden_states=told))
    np.testing.assert_allclose(told, wanted, atol=1e-4)


def test_what_is_loaded(made: Maker) -> None:
    path, _ = made("qwen3.5", "fp32")
    spec = Artifact.read(path).manifest.model
    assert spec.linear is not None
    conv, matrix = spec.linear.conv_state, spec.linear.recurrent_state
    each = 4 * (conv[0] * conv[1] + matrix[0] * matrix[1] * matrix[2])
    for slots, wanted in ((None, 64), (5, 5)):
        with opened(path, "custom", state_slots=slots) as model:
            limits = model.capabilities
            assert limits.state_slots == wanted
            assert limits.state_bytes == each * len(spec.linear_layers) == state_bytes(spec)
            assert limits.kv_format.num_layers == len(spec.cached_layers) < spec.num_layers
            row = 2 * spec.num_kv_heads * spec.head_size * 4
            assert limits.kv_block_bytes == limits.block_size * row * len(spec.cached_layers)
            content = model.read_blocks([0, 3])
            assert content.shape[:3] == (2, len(spec.cached_layers), 2)
            assert set(limits.placement) == {"CPUExecutionProvider"}


def test_a_graph_that_was_kept(made: Maker, tmp_path: Path) -> None:
    path, _ = made("qwen3.5", "int4")
    found = []
    for _ in range(2):
        with opened(path, "custom", graph_cache=tmp_path / "graphs") as model:
            found.append(Stateful(model, 1).run({0: prompts()[0]})[0].tobytes())
    assert len(list((tmp_path / "graphs").rglob("*.*"))) == 1
    assert found[0] == found[1]


@pytest.mark.parametrize("attention", KINDS)
def test_a_step_names_its_slots(made: Maker, attention: Attention) -> None:
    path, _ = made("qwen3.5", "fp32")
    with opened(path, attention, state_slots=4) as model:
        run = Stateful(model, 2)
        inputs = run.inputs({0: [1, 2], 1: [3]}, [1, 2])
        for name in ("state_reads", "state_writes"):
            with pytest.raises(
                ProviderError, match="needs state_reads and state_writes, slots 1 to 4"
            ):
                model.run(replace(inputs, **{name: None}))


def test_slots_that_are_not_there(made: Maker) -> None:
    path, peer = made("qwen3.5", "fp32")
    with opened(path, "custom", state_slots=4) as model:
        run = Stateful(model, 2)
        for writes in ([1, 5], [0, 1], [2, 2]):
            with pytest.raises(ProviderError, match="state_writes"):
                model.run(run.inputs({0: [1, 2], 1: [3]}, writes))
        found = run.run({0: prompts()[0]})[0]
    np.testing.assert_allclose(found, checkpoints.logits(peer, np.array(prompts()[0])), atol=1e-4)


def test_other_models_have_no_states(tiny_artifact: ArtifactMaker) -> None:
    with opened(tiny_artifact("llama", "fp32"), None, state_slots=4) as model:
        assert (model.capabilities.state_slots, model.capabilities.state_bytes) == (0, 0)
        inputs = Stateful(model, 1).inputs({0: [1, 2]}, [1])
        with pytest.raises(ProviderError, match="keeps no states of sequences"):
            model.run(inputs)


@pytest.mark.parametrize("changes", [{"key_size": 512}, {"kernel": 9}])
def test_sizes_that_the_kernels_have_no_room_for(
    made: Maker, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = made("qwen3.5", "fp32")
    spec = Artifact.read(path).manifest.model
    assert spec.linear is not None
    monkeypatch.setattr(choices.library, "find_library", lambda: Path("there"))
    assert choices.choose_kernel(LoadOptions(), spec) == Path("there")
    spec = replace(spec, linear=replace(spec.linear, **changes))
    assert choices.choose_kernel(LoadOptions(), spec) is None
    with pytest.raises(ProviderError, match="custom attention was asked for, but the keys of"):
        choices.choose_kernel(LoadOptions(attention="custom"), spec)


def test_what_keeps_a_convolution_alone(made: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = Artifact.read(made("qwen3.5", "fp32")[0]).manifest.model
    linear = ShortConvSpec(
        channels=spec.hidden_size, kernel=3, bias=False, layers=(True, False, True, False)
    )
    spec = replace(spec, linear=linear, attention_gate=None)
    assert state_bytes(spec) == 2 * spec.hidden_size * 2 * 4
    pools, matrices = allocate_states(spec, StatePlan(5, state_bytes(spec)))
    assert matrices == []
    assert [pool.input_name for pool in pools] == ["past_conv_state.0", "past_conv_state.2"]
    assert [pool.value.shape() for pool in pools] == [[6, spec.hidden_size, 2]] * 2
    monkeypatch.setattr(choices.library, "find_library", lambda: Path("there"))
    assert choices.choose_kernel(LoadOptions(), spec) == Path("there")
    wide = replace(spec, linear=replace(linear, kernel=9))
    assert choices.choose_kernel(LoadOptions(), wide) is None


def test_states_take_a_share_of_what_weights_leave(made: Maker) -> None:
    spec = Artifact.read(made("qwen3.5", "fp32")[0]).manifest.model
    size = state_bytes(spec)
    for slots in (None, 64, 100):
        options = LoadOptions(state_slots=slots)
        assert plan_states(spec, options, 1 << 40, 1000) == StatePlan(slots or 64, size)
    fits = 1000 + 2 * 11 * size
    found = plan_states(spec, LoadOptions(), fits, 1000)
    assert (found.num_slots, found.num_bytes) == (10, 11 * size)
    assert plan_states(spec, LoadOptions(), fits - 1, 1000).num_slots == 9
    assert plan_states(spec, LoadOptions(state_slots=7), fits, 1000).num_slots == 7
    assert plan_states(spec, LoadOptions(), 1000 + 6 * size, 1000).num_slots == 2
    assert plan_states(spec, LoadOptions(), fits + 500, 1000, kv_bytes=500).num_slots == 10
    with pytest.raises(CapacityError, match=f"each sequence needs 2 of {size} bytes"):
        plan_states(spec, LoadOptions(), 1000 + 6 * size - 1, 1000)
    with pytest.raises(CapacityError, match="state_slots is 1"):
        plan_states(spec, LoadOptions(state_slots=1), 1 << 40, 1000)
    plain = replace(spec, linear=None)
    assert plan_states(plain, LoadOptions(state_slots=9), 10, 1000) == StatePlan(0, 0)
    assert StatePlan(0, 0).num_bytes == 0


def test_the_pool_of_kv_is_in_what_states_leave(made: Maker) -> None:
    spec = Artifact.read(made("qwen3.5", "fp32")[0]).manifest.model
    options = LoadOptions(kv_memory=1.0)
    sizes = {"block_size": 16, "item_bytes": 4.0, "free_bytes": 10 << 20, "weight_bytes": 1 << 20}
    without = plan_pool(spec, options, **sizes)  # type: ignore[arg-type]
    assert without.block_bytes == 16 * 2 * spec.num_kv_heads * spec.head_size * 4
    beside = plan_pool(spec, options, **sizes, state_bytes=3 << 20)  # type: ignore[arg-type]
    taken = (without.num_blocks - beside.num_blocks) * without.block_bytes
    assert abs(taken - (3 << 20)) <= without.block_bytes
    exact = LoadOptions(kv_memory=8 << 20)
    words = r"states of sequences 3\.0 MiB \(state_slots\).*lower max_num_seqs \(--max-num-seqs\)"
    with pytest.raises(CapacityError, match=words):
        plan_pool(spec, exact, **sizes, state_bytes=3 << 20)  # type: ignore[arg-type]
    with pytest.raises(CapacityError) as refused:
        plan_pool(spec, LoadOptions(kv_memory=10 << 20), **sizes)  # type: ignore[arg-type]
    assert "max_num_seqs" not in str(refused.value)
    short = {**sizes, "free_bytes": (4 << 20) + 5 * 16384, "state_bytes": 3 << 20}
    with pytest.raises(CapacityError, match=r"lower max_model_len, lower max_num_seqs \(--max-"):
        plan_pool(spec, LoadOptions(max_model_len=100), **short)  # type: ignore[arg-type]


@pytest.mark.parametrize("asked", ["kv_memory", "kv_cache_tokens"])
def test_states_leave_room_for_the_kv_that_was_asked_for(
    made: Maker, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    path, _ = made("qwen3.5", "fp32")
    spec = Artifact.read(path).manifest.model
    size, token_bytes = state_bytes(spec), 2 * spec.num_kv_heads * spec.head_size * 4
    weights = json.loads((path / "manifest.json").read_text())["files"]["model.onnx.data"]["size"]
    kv_bytes = (1000 * size // token_bytes // 16) * 16 * token_bytes
    given = kv_bytes if asked == "kv_memory" else kv_bytes // token_bytes
    options = {asked: given, "block_size": 16, "state_slots": 2000}
    spare = 2 * weights + (1 << 20) + 20 * size
    assert spare < kv_bytes  # half of what weights leave is less than what was asked for
    monkeypatch.setattr(memory, "available_bytes", lambda: kv_bytes + spare)
    with opened(path, "custom", **options) as model:
        assert model.capabilities.num_blocks * model.capabilities.kv_block_bytes == kv_bytes
        assert 9 <= model.capabilities.state_slots <= spare // (2 * size)
    monkeypatch.setattr(memory, "available_bytes", lambda: kv_bytes + weights)
    with pytest.raises(CapacityError, match=f"the KV cache {kv_bytes} .*Ask for .* a smaller KV"):
        CpuProvider().load(Artifact.read(path), LoadOptions(attention="custom", **options))


def test_what_does_not_fit_is_refused_before_it_is_lowered(
    made: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = made("qwen3.5", "fp32")
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    monkeypatch.setattr("onnxport.providers.cpu.graph_source.GraphSource.lowered", None)
    with pytest.raises(CapacityError, match="the states of sequences do not fit"):
        CpuProvider().load(Artifact.read(path), LoadOptions())


def test_fewer_slots_where_there_is_no_memory(made: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = made("qwen3.5", "fp32")
    size = state_bytes(Artifact.read(path).manifest.model)
    weights = json.loads((path / "manifest.json").read_text())["files"]["model.onnx.data"]["size"]
    monkeypatch.setattr(memory, "available_bytes", lambda: 2 * weights + (1 << 20) + 20 * size)
    monkeypatch.setattr(states, "STATE_SHARE", 0.1)
    with opened(path, "custom", kv_cache_tokens=64) as model:
        assert 2 <= model.capabilities.state_slots < 64
