"""Models with attention of latents: one cache a layer, and what refuses them says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from onnxport.errors import OptionError, ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.providers import registry
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu.library import find_library
from tests.conformance.make import make_artifact
from tests.conformance.workload import serve

ROW = 48  # channels: 32 of a latent, and 16 that rotate
LAYERS = 3


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("latents")
    return Artifact.read(make_artifact(folder, "deepseek-v2-lite", "int4"))


def options(**changes: object) -> LoadOptions:
    return LoadOptions(**{"threads": 1, "kv_cache_tokens": 256, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16", "bfloat16", "int8"])
def test_a_token_takes_one_row_a_layer(artifact: Artifact, dtype: str) -> None:
    if find_library() is None:
        pytest.skip("the C++ kernel was not built")
    model = registry.get_provider("cpu").load(artifact, options(kv_cache_dtype=dtype))
    limits, form = model.capabilities, model.capabilities.kv_format
    assert limits.attention == "custom"
    assert (form.parts, form.num_kv_heads, form.head_size) == (1, 1, ROW)
    content = model.read_blocks([3, 0])
    elements = ROW + (4 if limits.kv_cache_dtype == "int8" else 0)
    assert content.shape == (2, LAYERS, 1, 1, limits.block_size, elements)
    assert content.nbytes == 2 * limits.kv_block_bytes
    model.close()


def test_there_is_no_int4_cache_of_latents(artifact: Artifact) -> None:
    if find_library() is None:
        pytest.skip("the C++ kernel was not built")
    with pytest.raises(OptionError, match="attention of latents stores"):
        registry.get_provider("cpu").load(artifact, options(kv_cache_dtype="int4"))


def test_openvino_refuses_them_and_names_those_that_do_not(artifact: Artifact) -> None:
    provider = registry.get_provider("openvino")
    if reason := provider.probe().reason:
        pytest.skip(reason)
    with pytest.raises(ProviderError, match=r"openvino .* does not compute; cpu, cuda, webgpu"):
        provider.load(artifact, options())


@pytest.mark.parametrize("name", registry.EMULATED)
def test_devices_decompose_them(artifact: Artifact, name: str) -> None:
    provider = registry.get_provider(name, emulate=True)
    model = provider.load(artifact, options())
    assert model.capabilities.attention == "decomposed"
    assert model.capabilities.kv_format.parts == 1
    model.close()
    with pytest.raises(ProviderError, match="native attention was asked for"):
        provider.load(artifact, options(attention="native"))


@pytest.mark.parametrize("name", ["cpu", *registry.EMULATED])
def test_they_have_no_slots_for_adapters(artifact: Artifact, name: str) -> None:
    provider = registry.get_provider(name, emulate=name != "cpu")
    with pytest.raises(ProviderError, match=r"max_adapters is 2, and .*kv_b_proj"):
        provider.load(artifact, options(max_adapters=2))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_rows_come_back_from_disk(artifact: Artifact, tmp_path: Path, dtype: str) -> None:
    """What one engine leaves there another goes on from, with the same tokens."""
    if find_library() is None:
        pytest.skip("the C++ kernel was not built")
    changes: dict[str, object] = {"kv_cache_dtype": dtype, "block_size": 16}
    outcomes = []
    for _ in range(2):
        model = registry.get_provider("cpu").load(artifact, options(**changes))
        outcomes.append(serve(model, kv_disk=tmp_path, preemption="recompute"))
        model.close()
    assert [one.stats.num_blocks_loaded > 0 for one in outcomes] == [False, True]
    assert outcomes[0].tokens == outcomes[1].tokens


def test_a_lowered_graph_is_kept(artifact: Artifact, tmp_path: Path) -> None:
    """With weights of heads that are read as they are stored, another start finds it whole."""
    if find_library() is None:
        pytest.skip("the C++ kernel was not built")
    found = []
    for _ in range(2):
        model = registry.get_provider("cpu").load(artifact, options(graph_cache=tmp_path))
        found.append(serve(model).tokens)
        model.close()
    assert any(tmp_path.iterdir())
    assert found[0] == found[1]
