"""Layers that differ in their heads, or read keys and values of others, on devices: Gemma 4."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import CapacityError, OptionError, ProviderError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.paged import is_paged_attention
from onnxport.providers import webgpu
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.device_lowering import DeviceLowering
from onnxport.providers.ort import CPU
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.registry import EMULATED, get_provider
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from tests.exporter import checkpoints
from tests.providers.conftest import ArtifactMaker
from tests.providers.hybrid import Sequences
from tests.providers.models import opened, run_rows
from tests.providers.test_hybrid import STEPS, tokens

EXACT = {"dtype": "float32", "block_size": 16, "matmul_accuracy_level": 1}
# Whole prompts of two lengths, then chunks and decoding behind them, in blocks that lie anywhere.
BATCHES = (
    [(tokens(1, 37), 0, [3, 1, 2, 5]), (tokens(2, 3), 0, [4])],
    [(tokens(3, 1), 37, [3, 1, 2, 5]), (tokens(4, 19), 3, [4, 9])],
    [(tokens(5, 1), 38, [3, 1, 2, 5]), (tokens(6, 1), 22, [4, 9])],
)


def load(path: Path, provider: str, **options: Any) -> Model:
    chosen = LoadOptions(**{"kv_cache_tokens": 1024, "threads": 1, **EXACT, **options})
    return get_provider(provider, emulate=True).load(Artifact.read(path), chosen)


@pytest.mark.parametrize("provider", EMULATED)
@pytest.mark.parametrize("case", ["gemma4", "gemma4-moe", "gemma4-shared"])
def test_numbers_are_those_of_the_processor(
    case: str, provider: str, tiny_artifact: ArtifactMaker
) -> None:
    path = tiny_artifact(case, "int4")
    model = load(path, provider)
    limits = model.capabilities
    assert (limits.attention, limits.moves_blocks) == ("decomposed", False)
    with opened(path, "decomposed", block_size=16, matmul_accuracy_level=1) as plain:
        assert limits.kv_block_bytes == plain.capabilities.kv_block_bytes
        for rows in BATCHES:
            expected, found = run_rows(plain, rows), run_rows(model, rows)
            assert np.abs(found - expected).max() <= 1e-4 * expected.std()
    model.close()


@pytest.mark.parametrize("provider", ["cuda", "webgpu"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_windows_give_blocks_up_and_change_no_bit(
    provider: str, dtype: str, tiny_artifact: ArtifactMaker
) -> None:
    """With blocks that are copied in between, caches of both shapes; all others hold NaN."""
    path = tiny_artifact("gemma4-windows", "int4")
    hybrid, plain = (
        load(path, provider, dtype=dtype, hybrid_kv_cache=kept) for kept in (True, False)
    )
    assert hybrid.capabilities.windows == (None, 6, 6, 6, 6, 6)
    assert plain.capabilities.windows == (None,)
    assert hybrid.capabilities.kv_tokens == plain.capabilities.kv_tokens == 1024
    found, expected = Sequences(hybrid, 3, seed=1), Sequences(plain, 3, seed=2)
    for number, counts in enumerate(STEPS):
        new = [tokens(3 * number + row, count) for row, count in enumerate(counts)]
        wanted = expected.run(new)
        assert np.isfinite(wanted).all()
        assert found.run(new).tobytes() == wanted.tobytes(), f"step {number}"
        if number in (2, 7):
            found.move()
    assert found.num_given_away > 3
    assert expected.num_given_away == 0


@pytest.mark.parametrize("provider", ["directml", "migraphx"])
def test_blocks_are_copied_a_few_at_a_time(provider: str, tiny_artifact: ArtifactMaker) -> None:
    """Where graphs are compiled for shapes, with what pads the last copy behind the pool."""
    model = load(tiny_artifact("gemma4-shared", "int4"), provider)
    first, then = [tokens(7, 120), tokens(8, 20)], [tokens(9, 1)] * 2
    still, going = Sequences(model, 2, seed=1), Sequences(model, 2, seed=2)
    still.run(first)
    expected = still.run(then)
    going.spoil(range(model.capabilities.num_blocks))
    going.run(first)
    going.move()  # ten blocks, of which eight go at a time
    assert going.run(then).tobytes() == expected.tobytes()
    model.close()


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-4), ("float16", 0.05)])
def test_heads_of_the_published_sizes(tmp_path: Path, dtype: str, allowed: float) -> None:
    """256 and 512 channels, and most of a step's rows read the caches of other layers."""
    case = checkpoints.CASES["gemma4-shared"]
    sizes = {"head_dim": 256, "global_head_dim": 512}
    gains = {"q_norm.weight": 0.1, "k_norm.weight": 0.1}
    checkpoints.make(
        replace(case, config={**case.config, **sizes}, centres=gains), tmp_path / "checkpoint"
    )
    options = ExportOptions(precision="fp32", threads=1)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    model = load(path, "webgpu", dtype=dtype)
    with opened(path, "decomposed", block_size=16) as plain:
        for rows in BATCHES:
            expected, found = run_rows(plain, rows), run_rows(model, rows)
            assert np.abs(found - expected).max() <= allowed * expected.std()
    model.close()


def test_a_step_that_takes_too_much_runs_in_parts(tiny_artifact: ArtifactMaker) -> None:
    """Layers that read others' caches see what this very part has written there."""
    path = tiny_artifact("gemma4-shared", "int4")
    whole, parts = load(path, "cuda"), load(path, "cuda")
    assert isinstance(parts, OrtModel)
    assert parts._step_memory is not None
    parts._step_memory = replace(parts._step_memory, most_bytes=0)
    for rows in BATCHES:
        expected, found = run_rows(whole, rows), run_rows(parts, rows)
        assert np.abs(found - expected).max() <= 1e-4 * expected.std()


def test_layers_that_read_others_write_nothing(tiny_artifact: ArtifactMaker) -> None:
    """A second write to the same cache would let a device copy the pool."""
    path = tiny_artifact("gemma4-shared", "int4")
    recipe = webgpu.WebGpuProvider(emulate=True)._recipe()
    lowering = DeviceLowering(Artifact.read(path), LoadOptions(), recipe, CPU, emulate=True)
    *_, last = lowering.steps()
    nodes = last.model.graph.node
    assert not [node for node in nodes if is_paged_attention(node)]
    assert [node.op_type for node in nodes].count("ScatterND") == 2 * 3  # of six layers


def test_what_is_not_done_is_refused(tiny_artifact: ArtifactMaker, tmp_path: Path) -> None:
    path = tiny_artifact("gemma4-windows", "int4")
    words = "it is decomposed here: layers differ in their heads, or read keys and values"
    with pytest.raises(ProviderError, match=f"capture_graphs was asked for; .*{words}"):
        load(path, "cuda", capture_graphs=True)
    with pytest.raises(ProviderError, match=r"native attention was asked for .*layers differ in"):
        load(path, "webgpu", attention="native")
    model = load(path, "cuda")
    with pytest.raises(ProviderError, match="1 blocks stay where they are"):
        model.read_blocks([0])
    with pytest.raises(ProviderError, match=r"blocks of \(1,\) stay where they are"):
        model.write_blocks([0], np.zeros(1, np.float32))
    config = EngineConfig(kv_host_memory=1 << 20, kv_disk=tmp_path)
    with pytest.raises(OptionError, match="leave out kv_host_memory and kv_disk"):
        Engine(model, config=config)


def test_the_widest_cache_fills_a_buffer_first(tiny_artifact: ArtifactMaker) -> None:
    """Four KV heads of 16 channels beside one of 32: the former need twice the memory."""
    path = tiny_artifact("gemma4-windows", "int4")
    limits = load(path, "webgpu", kv_cache_tokens=None, kv_memory=0.9, dtype="float16").capabilities
    row = 4 * 16 * 2  # bytes of a token's keys
    assert limits.num_blocks * limits.block_size * row <= webgpu.BUFFER_BYTES
    most = webgpu.BUFFER_BYTES // (row * len(limits.windows)) // 16 * 16
    with pytest.raises(CapacityError, match=rf"buffers hold .* ask for {most} tokens or fewer"):
        load(path, "webgpu", kv_cache_tokens=most + 16, dtype="float16")
