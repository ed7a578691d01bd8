"""Layers that differ in their heads, or read keys and values of others, on OpenVINO: Gemma 4."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnxport.errors import OptionError, ProviderError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.passes.flat_paged import FLAT_PAGED_ATTENTION, flatten_paged
from onnxport.providers.base import LoadOptions
from onnxport.providers.openvino import layer_caches, provider
from onnxport.providers.openvino.caches import CacheFormat
from onnxport.providers.openvino.convert import lower
from onnxport.providers.registry import get_provider
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from tests.exporter import checkpoints
from tests.providers.conftest import ArtifactMaker
from tests.providers.models import opened, run_rows
from tests.providers.test_hybrid import tokens

EXACT: dict[str, Any] = {"kv_cache_dtype": "float32", "matmul_accuracy_level": 1}
SIZE = 32  # tokens of a block, which the plugin chooses
# Whole prompts of two lengths, then chunks and decoding behind them, in blocks that lie anywhere.
BATCHES = (
    [(tokens(1, 37), 0, [3, 1]), (tokens(2, 3), 0, [4])],
    [(tokens(3, 1), 37, [3, 1]), (tokens(4, 40), 3, [4, 6])],
    [(tokens(5, 1), 38, [3, 1]), (tokens(6, 1), 43, [4, 6])],
)


@pytest.fixture(autouse=True)
def plugin() -> None:
    """Skip where OpenVINO is missing."""
    if reason := get_provider("openvino").probe().reason:
        pytest.skip(reason)


@pytest.mark.parametrize("case", ["gemma4-moe", "gemma4-shared", "gemma4-windows"])
def test_numbers_are_those_of_the_processor(case: str, tiny_artifact: ArtifactMaker) -> None:
    path = tiny_artifact(case, "int4")
    with (
        opened(path, None, provider="openvino", **EXACT) as model,
        opened(path, "decomposed", block_size=SIZE, matmul_accuracy_level=1) as plain,
    ):
        assert not model.capabilities.moves_blocks
        assert model.capabilities.block_size == SIZE
        for rows in BATCHES:
            expected, found = run_rows(plain, rows), run_rows(model, rows)
            assert np.abs(found - expected).max() <= 1e-4 * expected.std()


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 1e-4), ("int8", 0.1)])
def test_heads_of_the_published_sizes(tmp_path: Path, dtype: str, allowed: float) -> None:
    """256 and 512 channels; in int8 what readers round anew is what their layer has rounded."""
    case = checkpoints.CASES["gemma4-shared"]
    sizes = {"head_dim": 256, "global_head_dim": 512}
    gains = {"q_norm.weight": 0.1, "k_norm.weight": 0.1}
    checkpoints.make(
        replace(case, config={**case.config, **sizes}, centres=gains), tmp_path / "checkpoint"
    )
    options = ExportOptions(precision="fp32", threads=1)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    chosen = {**EXACT, "kv_cache_dtype": dtype}
    with (
        opened(path, None, provider="openvino", **chosen) as model,
        opened(path, "decomposed", block_size=SIZE) as plain,
    ):
        assert model.capabilities.kv_cache_dtype == dtype
        for rows in BATCHES:
            expected, found = run_rows(plain, rows), run_rows(model, rows)
            assert np.abs(found - expected).max() <= allowed * expected.std()


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_block_has_room_for_each_kind_of_heads(dtype: str, tiny_artifact: ArtifactMaker) -> None:
    """Five layers of 4 KV heads x 16 channels, one of 1 x 32; in int8 with scales and zeros."""
    path = tiny_artifact("gemma4-windows", "int4")
    chosen = {**EXACT, "kv_cache_dtype": dtype}
    with opened(path, None, provider="openvino", **chosen) as model:
        limits = model.capabilities
        if dtype == "float32":
            expected = 2 * SIZE * 4 * (5 * 4 * 16 + 32)
        else:
            near, far = ((SIZE + 8) * size + SIZE * (size + 8) for size in (16, 32))
            expected = 5 * 4 * near + far
        assert (limits.kv_block_bytes, limits.kv_tokens) == (expected, 1024)
        with pytest.raises(ProviderError, match="1 blocks stay where they are"):
            model.read_blocks([0])
        with pytest.raises(OptionError, match="leave out kv_host_memory"):
            Engine(model, config=EngineConfig(kv_host_memory=1 << 20))


def test_a_copied_block_has_all_layers(tiny_artifact: ArtifactMaker) -> None:
    path = tiny_artifact("gemma4-windows", "int4")
    first, then = BATCHES[:2]
    with opened(path, None, provider="openvino", **EXACT) as model:
        run_rows(model, first)
        model.copy_blocks([3, 1, 4], [7, 8, 9])
        expected = run_rows(model, then)
        moved = [(then[0][0], 37, [7, 8]), (then[1][0], 3, [9, 2])]
        assert run_rows(model, moved).tobytes() == expected.tobytes()


def test_readers_have_the_cache_of_their_layer(tiny_artifact: ArtifactMaker) -> None:
    graph = Artifact.read(tiny_artifact("gemma4-shared", "fp32")).load_graph("paged")
    flat = flatten_paged(graph).model.graph
    found = [node for node in flat.node if node.op_type == FLAT_PAGED_ATTENTION]
    caches = [
        [f"past_key_values.{layer}.{part}" for part in ("key", "value")] for layer in range(3)
    ]
    assert [list(node.input[3:5]) for node in found] == [*caches, *(caches[i] for i in (1, 2, 1))]
    assert [info.name for info in flat.output] == ["logits"]


@pytest.mark.parametrize(("case", "kept"), [("gemma4-moe", 0), ("qwen3-moe", 1)])
def test_experts_with_a_gelu_are_none_of_the_plugins(
    case: str, kept: int, tiny_artifact: ArtifactMaker
) -> None:
    """Its product of chosen experts knows a SiLU for a gate alone."""
    *_, last = lower(Artifact.read(tiny_artifact(case, "int4")), keep_experts=True)
    assert [node.op_type for node in last.model.graph.node].count("QMoE") == kept


def test_a_gpu_is_refused(tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "_plugin", lambda device: SimpleNamespace(device="GPU"))
    monkeypatch.setattr(provider.OpenVinoProvider, "probe", lambda self: SimpleNamespace(reason=""))
    artifact = Artifact.read(tiny_artifact("gemma4", "int4"))
    words = "which openvino on a GPU does not do; choose another provider, such as cpu"
    with pytest.raises(ProviderError, match=words):
        get_provider("openvino").load(artifact, LoadOptions())


def test_caches_of_several_types_are_refused(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which no version of the plugin that we know makes."""

    def formats(_: object, heads: tuple[int, int], **__: object) -> CacheFormat:
        shape = (heads[0], SIZE, heads[1])
        return CacheFormat("float32" if heads[1] == 16 else "bfloat16", SIZE, shape, shape)

    monkeypatch.setattr(layer_caches, "cache_format", formats)
    words = r"blocks of several kinds: \[\('bfloat16', 32\), \('float32', 32\)\]; use another"
    with (
        pytest.raises(ProviderError, match=words),
        opened(tiny_artifact("gemma4", "int4"), None, provider="openvino"),
    ):
        pass
