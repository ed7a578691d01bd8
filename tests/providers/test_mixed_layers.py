"""Layers that differ in their heads, or read keys and values of others: Gemma 4."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from onnxport.cache_rows import row_bytes
from onnxport.errors import ArtifactError, CapacityError, OptionError, ProviderError
from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.cache_groups import LayerGroups, group_layers
from onnxport.graphs.paged import attention_nodes, is_paged_attention
from onnxport.graphs.passes.decompose import decompose
from onnxport.providers import registry
from onnxport.providers.base import LoadOptions, Probe
from onnxport.providers.features import Attention, Features
from onnxport.providers.layer_groups import cache_kinds, layer_groups
from onnxport.serving import loading
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.loading import open_engine
from tests.exporter import checkpoints
from tests.providers.conftest import ArtifactMaker
from tests.providers.hybrid import Sequences
from tests.providers.models import opened, run_rows
from tests.providers.test_hybrid import STEPS, tokens


@pytest.fixture
def windows(tiny_artifact: ArtifactMaker) -> Path:
    return tiny_artifact("gemma4-windows", "int4")


@pytest.mark.parametrize(
    ("attention", "dtype"),
    [
        *(("custom", dtype) for dtype in ("float32", "bfloat16", "int8", "int4")),
        ("decomposed", "float32"),
    ],
)
def test_windows_give_blocks_up_and_change_no_bit(
    windows: Path, attention: Attention, dtype: str
) -> None:
    with (
        opened(windows, attention, kv_cache_dtype=dtype) as hybrid,
        opened(windows, attention, kv_cache_dtype=dtype, hybrid_kv_cache=False) as plain,
    ):
        assert hybrid.capabilities.windows == (None, 6, 6, 6, 6, 6)
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


@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_a_block_has_room_for_each_kind_of_heads(windows: Path, dtype: str) -> None:
    with (
        opened(windows, "custom", kv_cache_dtype=dtype) as hybrid,
        opened(windows, "custom", kv_cache_dtype=dtype, hybrid_kv_cache=False) as plain,
    ):
        ours, theirs = hybrid.capabilities, plain.capabilities
        near, far = 4 * row_bytes(dtype, 16), row_bytes(dtype, 32)  # of a token's keys
        assert ours.kv_block_bytes == 2 * ours.block_size * (near + far)
        assert theirs.kv_block_bytes == 2 * theirs.block_size * (5 * near + far)
        assert ours.kv_tokens == theirs.kv_tokens == 1024
        assert not ours.moves_blocks
        with pytest.raises(ProviderError, match="1 blocks stay where they are"):
            hybrid.read_blocks([0])
        with pytest.raises(ProviderError, match=r"blocks of \(1,\) stay where they are"):
            hybrid.write_blocks([0], np.zeros(1, np.float32))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("hybrid", [True, False])
def test_a_pool_that_does_not_fit_states_the_arithmetic(
    windows: Path, dtype: str, hybrid: bool
) -> None:
    near, far = row_bytes(dtype, 16), row_bytes(dtype, 32)
    groups, count = (6, 1) if hybrid else (1, 5)
    total = 2 * groups * (far + count * 4 * near)
    told = (
        f"takes 2 x {'6 groups of ' if hybrid else ''}(1 layers x 1 KV heads x {far} bytes for 32 "
        f"channels + {count} layers x 4 KV heads x {near} bytes for 16 channels) = {total} bytes"
    )
    with (
        pytest.raises(CapacityError, match=re.escape(told)),
        opened(windows, "custom", kv_memory=1, kv_cache_dtype=dtype, hybrid_kv_cache=hybrid),
    ):
        pass


def test_layers_are_in_groups_where_that_takes_less(windows: Path) -> None:
    """By what layers really take: few wide ones without a window are not worth it."""
    spec = Artifact.read(windows).manifest.model
    groups = layer_groups(spec, LoadOptions())
    assert cache_kinds(spec, groups) == [*[(0, 4, 16)] * 5, (0, 1, 32)]
    kinds = [6, 6, 6, None]
    assert group_layers(kinds, 100).windows == (None, 6, 6, 6)
    assert group_layers(kinds, 100, [(1, 8)] * 3 + [(1, 24)]) == LayerGroups.single(4)
    assert len(group_layers(kinds, 100, [(1, 8)] * 3 + [(1, 1)]).windows) == 4


def test_what_keeps_blocks_elsewhere_is_refused(windows: Path, tmp_path: Path) -> None:
    config = EngineConfig(kv_host_memory=1 << 20, kv_disk=tmp_path)
    with pytest.raises(OptionError, match="leave out kv_host_memory and kv_disk"):
        open_engine(windows, "cpu", config=config)
    with (
        opened(windows, "custom") as model,
        pytest.raises(OptionError, match="leave out kv_host_memory and kv_disk"),
    ):
        Engine(model, config=config)


def test_a_fallback_that_would_refuse_it_is_refused_at_the_start(
    windows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = Features.one_type(("native",), ("float32",), runs_ours=False)
    provider = SimpleNamespace(probe=lambda: Probe(True, "", features=lacking))
    monkeypatch.setattr(loading, "get_provider", lambda name: provider)
    words = "other cannot be a fallback here: layers of the model differ"
    with pytest.raises(ProviderError, match=words):
        open_engine(windows, "cpu", fallback=("other",), needs_tokenizer=False)


@pytest.mark.parametrize("name", [*registry.HOSTS, *registry.EMULATED])
def test_adapters_are_refused(name: str, tiny_artifact: ArtifactMaker) -> None:
    provider = registry.get_provider(name, emulate=name not in registry.HOSTS)
    if reason := name in registry.HOSTS and provider.probe().reason:
        pytest.skip(reason)
    artifact = Artifact.read(tiny_artifact("gemma4", "int4"))
    options = LoadOptions(threads=1, kv_cache_tokens=256, max_adapters=1)
    with pytest.raises(ProviderError, match="merge the adapter"):
        provider.load(artifact, options)


@pytest.mark.parametrize(
    ("dtype", "allowed"), [("float32", 1e-4), ("bfloat16", 0.1), ("int8", 0.2)]
)
def test_heads_of_the_published_sizes(tmp_path: Path, dtype: str, allowed: float) -> None:
    """256 and 512 channels: our kernel, near what the decomposed graph gives."""
    sizes = {"head_dim": 256, "global_head_dim": 512, "num_kv_shared_layers": 0}
    case = checkpoints.CASES["gemma4-shared"]
    case = replace(
        case, config={**case.config, **sizes}, centres={"q_norm.weight": 0.1, "k_norm.weight": 0.1}
    )
    checkpoints.make(case, tmp_path / "checkpoint")
    options = ExportOptions(precision="fp32", threads=1)
    path = export_model(tmp_path / "checkpoint", tmp_path / "artifact", options)
    row = (tokens(1, 40), 0, [3, 1, 2])
    with opened(path, "decomposed") as plain, opened(path, "custom", kv_cache_dtype=dtype) as ours:
        assert ours.capabilities.attention == "custom"
        for rows in ([row], [([7], 40, [3, 1, 2]), ([5, 9], 0, [4, 5, 6])]):
            expected, found = run_rows(plain, rows), run_rows(ours, rows)
            assert np.abs(found - expected).max() <= allowed * expected.std()


def test_layers_that_read_others_write_the_same_bits_again(windows: Path) -> None:
    """So that which layer wrote last is no matter: keys and values are one value in the graph."""
    graph = Artifact.read(windows).load_graph("paged")
    nodes = attention_nodes(graph)
    assert [node.name for node in nodes if not node.writes] == [
        "layers.6.attention",
        "layers.7.attention",
    ]
    assert nodes[6].inputs[1:3] == nodes[4].inputs[1:3]
    assert nodes[7].inputs[1:3] == nodes[5].inputs[1:3]
    found = [node for node in graph.graph.node if is_paged_attention(node)]
    assert [len(node.output) for node in found] == [3] * 6 + [1] * 2
    # In standard operators they write nothing, which would copy the pool.
    written = [node.op_type for node in decompose(graph).model.graph.node].count("ScatterND")
    assert written == 2 * 6
    # A node that has no outputs for caches which it alone could write is none of these.
    for name, value in zip(("key", "value"), (3, 4), strict=True):
        found[6].input[value] = f"past_key_values.0.{name}"
    with pytest.raises(ArtifactError, match=r"or 1 output where it reads what another one has"):
        attention_nodes(graph)
