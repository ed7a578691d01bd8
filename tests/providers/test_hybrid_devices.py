"""Layers in groups with block tables of their own, on devices that ONNX Runtime drives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxport.errors import CapacityError
from onnxport.graphs.artifact import Artifact
from onnxport.providers import device, device_blocks, device_lowering, directml, migraphx, webgpu
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.cpu.library import find_library
from onnxport.providers.ort import CPU
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.recipe import Recipe
from onnxport.providers.registry import get_provider
from tests.providers.conftest import ArtifactMaker
from tests.providers.hybrid import Sequences
from tests.providers.test_hybrid import STEPS, check_steps, tokens
from tests.tiers import crossed

Finder = Callable[[str], Path]
WINDOWS: Mapping[str, tuple[int | None, ...]] = {
    "alternating": (None, 20),
    "gemma3": (None, 6, 6),
    "gpt-oss": (None, 6, 6),
    "mistral-window": (7,),
}
WAYS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "cuda": ("cuda", {"capture_graphs": False}),
    "cuda replayed": ("cuda", {"capture_graphs": True}),
    "cuda float32": ("cuda", {"dtype": "float32"}),
    "webgpu": ("webgpu", {}),
    "webgpu decomposed": ("webgpu", {"attention": "decomposed"}),
}
NATIVE = replace(webgpu.NATIVE, qk_norm=True)  # of a device that takes gemma3
BLOCKS = {"block_size": 16, "matmul_accuracy_level": 1}


def load(path: Path, provider: str, **options: Any) -> Model:
    chosen = LoadOptions(**{"kv_cache_tokens": 1024, "threads": 1, **BLOCKS, **options})
    return get_provider(provider, emulate=True).load(Artifact.read(path), chosen)


@pytest.fixture
def find(tiny_artifact: ArtifactMaker, alternating_artifact: Path) -> Finder:
    """Returns `find(case) -> artifact folder`."""
    return lambda case: (
        alternating_artifact if case == "alternating" else tiny_artifact(case, "int4")
    )


@pytest.fixture
def compiled_graphs_share_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let devices that compile graphs for shapes have groups; where emulated, they can."""
    for module in (migraphx, directml):
        monkeypatch.setattr(module, "Recipe", partial(sharing, module.Recipe))


def sharing(recipe: type[Recipe], **given: Any) -> Recipe:
    return recipe(**given | {"shares_caches": True})


def check(path: Path, provider: str, windows: tuple[int | None, ...], **options: Any) -> None:
    """Bit for bit what the model with one table for all layers computes."""
    hybrid = load(path, provider, **options)
    plain = load(path, provider, hybrid_kv_cache=False, **options)
    try:
        assert hybrid.capabilities.windows == windows
        check_steps(hybrid, plain)
    finally:
        hybrid.close()
        plain.close()


@pytest.mark.parametrize(("way", "case"), crossed(3, list(WAYS), list(WINDOWS)))
def test_logits_and_caches_are_the_same_bit_for_bit(find: Finder, way: str, case: str) -> None:
    provider, options = WAYS[way]
    if options.get("capture_graphs") and find_library() is None:
        pytest.skip("the C++ kernel was not built: no C++17 compiler on this machine")
    check(find(case), provider, WINDOWS[case], **options)


@pytest.mark.usefixtures("compiled_graphs_share_caches")
@pytest.mark.parametrize("provider", ["migraphx", "directml"])
def test_padded_steps_have_all_tables(find: Finder, provider: str) -> None:
    check(find("alternating"), provider, (None, 20))
    check(find("gemma3"), provider, (None, 6, 6), dtype="float32")


@pytest.mark.parametrize("provider", ["migraphx", "directml"])
def test_a_compiled_graph_shares_no_cache(
    find: Finder, provider: str, caplog: pytest.LogCaptureFixture
) -> None:
    """One group alone gives blocks up there: its layers have caches of their own."""
    caplog.set_level("INFO", logger=device_lowering.logger.name)
    limits = load(find("alternating"), provider).capabilities
    assert (limits.windows, limits.kv_format.places) == ((None,), ())
    assert "K/V behind sliding windows are kept, for " in caplog.text
    assert "is not known to take one memory for caches of two layers" in caplog.text
    caplog.clear()
    check(find("mistral-window"), provider, (7,))
    assert "sliding windows" not in caplog.text


def test_memory_is_of_as_many_layers_as_a_group_has(
    find: Finder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of the same place are bound to the same memory."""
    made: list[int] = []
    allocate = device_blocks.device_caches

    def note(*arguments: Any) -> Any:
        caches = allocate(*arguments)
        made.append(len(caches))
        return caches

    monkeypatch.setattr(device_blocks, "device_caches", note)
    limits = load(find("alternating"), "cuda").capabilities
    whole = load(find("alternating"), "cuda", hybrid_kv_cache=False).capabilities
    assert made == [4, 8]
    assert (limits.num_blocks, whole.num_blocks) == (128, 64)
    assert limits.kv_block_bytes * 2 == whole.kv_block_bytes
    assert limits.kv_tokens == whole.kv_tokens == 1024
    assert limits.kv_format.num_layers == 2


def test_a_buffer_holds_blocks_of_all_groups(find: Finder) -> None:
    """The keys of a place are a buffer, which has as many blocks whatever takes them."""
    path = find("alternating")
    unbounded = load(path, "webgpu", kv_cache_tokens=None).capabilities
    spec = unbounded.kv_format
    row = 2 * spec.num_kv_heads * spec.head_size  # bytes of a token in float16
    assert unbounded.num_blocks * 16 * row <= webgpu.BUFFER_BYTES
    most = webgpu.BUFFER_BYTES // row // 2
    with pytest.raises(CapacityError, match=rf"buffers hold .* ask for {most} tokens or fewer"):
        load(path, "webgpu", kv_cache_tokens=most + 16)


def test_a_step_in_parts_has_all_tables(find: Finder) -> None:
    models = [load(find("alternating"), "cuda", dtype="float32") for _ in range(2)]
    whole, parts = models
    assert isinstance(parts, OrtModel)
    assert parts._step_memory is not None
    parts._step_memory = replace(parts._step_memory, most_bytes=0)
    found, expected = Sequences(parts, 3, seed=1), Sequences(whole, 3, seed=2)
    for number, counts in enumerate(STEPS):
        new = [tokens(3 * number + row, count) for row, count in enumerate(counts)]
        np.testing.assert_allclose(found.run(new), expected.run(new), rtol=1e-4, atol=1e-4)
    assert found.num_given_away > 3


@pytest.mark.parametrize("case", ["llama", "mistral-window"])
@pytest.mark.parametrize("provider", ["cuda", "directml"])
def test_one_table_changes_no_graph(
    find: Finder, monkeypatch: pytest.MonkeyPatch, case: str, provider: str
) -> None:
    models: list[bytes] = []
    start = device.start_session

    def note(model: bytes, *others: Any) -> Any:
        models.append(model)
        return start(model, *others)

    monkeypatch.setattr(device, "start_session", note)
    for hybrid in (True, False):
        load(find(case), provider, hybrid_kv_cache=hybrid).close()
    assert models[0] == models[1]
    inputs = [info.name for info in onnx.ModelProto.FromString(models[0]).graph.input]
    assert [name for name in inputs if "table" in name] == ["block_table"]


@pytest.mark.parametrize(("reason", "windows"), [("", (None, 6, 6)), ("it reads", (None,))])
def test_native_attention_is_tried_before_it_has_several_tables(
    find: Finder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    reason: str,
    windows: tuple[int | None, ...],
) -> None:
    """A device that is there: here only what is decided, for the CPU cannot run its graph."""
    asked: list[tuple[Any, ...]] = []

    def tried(*arguments: Any) -> str:
        asked.append(arguments)
        return reason

    monkeypatch.setattr(device_lowering, "reads_behind_windows", tried)
    monkeypatch.setattr(device_lowering, "distrust", lambda *_: "")
    caplog.set_level("INFO", logger=device_lowering.logger.name)
    artifact = Artifact.read(find("gemma3"))
    recipe = replace(webgpu.WebGpuProvider(emulate=True)._recipe(), native=NATIVE)

    def lowered(**options: Any) -> device_lowering.DeviceLowering:
        chosen = LoadOptions(**options)
        return device_lowering.DeviceLowering(artifact, chosen, recipe, CPU, emulate=False)

    assert lowered().groups.windows == windows
    assert ("K/V behind sliding windows are kept, for it reads" in caplog.text) == bool(reason)
    assert len(asked) == 1
    target, dtype, layers, block_size = asked[0]
    assert (target, dtype, block_size) == (CPU, "float16", 16)
    assert sorted(one.local_window_size or 0 for one in layers) == [0, 6, 6]
    assert lowered(hybrid_kv_cache=False).groups.windows == (None,)
    assert lowered(attention="decomposed").groups.windows == (None, 6, 6)
    assert len(asked) == 1, "it was tried where nothing depends on it"
