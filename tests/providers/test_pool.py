"""How large the KV pool is, to the byte, and how it says that it cannot be."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.errors import CapacityError, ProviderError
from onnxport.graphs.artifact import WEIGHTS_FILE, Artifact
from onnxport.graphs.tensors import TensorRef
from onnxport.providers import memory
from onnxport.providers.base import LoadOptions
from onnxport.providers.ort import weight_bytes
from onnxport.providers.pool import MOST_SEQUENCES, PoolPlan, plan_pool
from tests.graphs.artifacts import SPEC
from tests.providers.conftest import ArtifactMaker
from tests.providers.models import opened

TOKEN = 2 * 2 * 2 * 32 * 4  # bytes: keys and values, layers, heads, channels, float32
BLOCK = 16 * TOKEN
WEIGHTS = 10 * 2**20
CONTEXT = SPEC.context_length


def plan(options: LoadOptions, free: int, *, item_bytes: int = 4, block_size: int = 16) -> PoolPlan:
    return plan_pool(
        SPEC,
        options,
        block_size=block_size,
        item_bytes=item_bytes,
        free_bytes=free,
        weight_bytes=WEIGHTS,
    )


@pytest.mark.parametrize(
    ("asked", "left", "num_blocks"),
    [
        (BLOCK, BLOCK, 1),
        (5 * BLOCK - 1, 10 * BLOCK, 4),
        (5 * BLOCK, 10 * BLOCK, 5),
        (0.5, 10 * BLOCK, 5),
        (0.5, 10 * BLOCK - 2, 4),
        (1.0, 10 * BLOCK, 10),
        (None, 10 * BLOCK, 4),
    ],
)
def test_memory_is_rounded_down_to_blocks(asked: float | None, left: int, num_blocks: int) -> None:
    found = plan(LoadOptions(kv_memory=asked), WEIGHTS + left)
    assert found == PoolPlan(16, num_blocks, BLOCK, min(CONTEXT, 16 * num_blocks))


@pytest.mark.parametrize(("item_bytes", "block_size"), [(4, 16), (2, 16), (4, 5), (2, 32)])
def test_a_block_takes_what_its_elements_do(item_bytes: int, block_size: int) -> None:
    found = plan(
        LoadOptions(kv_memory=2**20), WEIGHTS + 2**20, item_bytes=item_bytes, block_size=block_size
    )
    assert found.block_bytes == block_size * TOKEN * item_bytes // 4
    assert found.num_blocks == 2**20 // found.block_bytes


def test_only_the_default_is_cut_to_what_can_be_used() -> None:
    plenty = WEIGHTS + 2**40
    most = MOST_SEQUENCES * CONTEXT // 16
    assert plan(LoadOptions(), plenty).num_blocks == most
    assert plan(LoadOptions(max_model_len=32), plenty).num_blocks == most // 2
    assert plan(LoadOptions(kv_memory=0.4), plenty).num_blocks == int(2**40 * 0.4) // BLOCK
    assert plan(LoadOptions(kv_memory=2**30), plenty).num_blocks == 2**30 // BLOCK
    assert plan(LoadOptions(kv_cache_tokens=2**20), plenty).num_blocks == 2**16


@pytest.mark.parametrize(
    ("options", "left", "asked"),
    [
        (LoadOptions(kv_memory=BLOCK - 1), 2 * BLOCK, "kv_memory is 16383 bytes, and 32768 bytes"),
        (LoadOptions(kv_memory=2**30), 2**20, "kv_memory is 1,024.0 MiB, and 1.0 MiB are left"),
        (
            LoadOptions(kv_memory=0.25),
            2 * BLOCK,
            "kv_memory is 0.25 of what the weights leave free, 8192 bytes, and 32768 bytes",
        ),
        (
            LoadOptions(kv_cache_tokens=4096),
            2**20,
            "kv_cache_tokens is 4096, 4.0 MiB, and 1.0 MiB are left",
        ),
        (LoadOptions(kv_cache_tokens=15), 2**20, "kv_cache_tokens is 15, 15360 bytes, and 1.0 MiB"),
        (
            LoadOptions(),
            2 * BLOCK,
            "it takes 0.4 of what the weights leave free, 13107 bytes, and 32768 bytes are left",
        ),
        (LoadOptions(), -(2**20), "0 bytes, and 0 bytes are left, for 9.0 MiB are free"),
    ],
)
def test_a_pool_that_does_not_fit_states_the_arithmetic(
    options: LoadOptions, left: int, asked: str
) -> None:
    with pytest.raises(CapacityError) as caught:
        plan(options, WEIGHTS + left)
    text = str(caught.value)
    assert text.startswith("the KV cache does not fit: ")
    assert asked in text
    assert "the weights take 10.0 MiB" in text
    assert "2 x 2 layers x 2 KV heads x 32 channels x 4 bytes = 1024 bytes" in text
    assert "one block of 16 tokens, 16384 bytes" in text


def test_a_context_that_the_pool_cannot_hold_names_both_ways_out() -> None:
    with pytest.raises(CapacityError, match=r"48 tokens; .* kv_cache_tokens or kv_memory"):
        plan(LoadOptions(kv_memory=3 * BLOCK, max_model_len=49), WEIGHTS + 10 * BLOCK)
    held = plan(LoadOptions(kv_memory=3 * BLOCK, max_model_len=48), WEIGHTS + 10 * BLOCK)
    assert held.max_model_len == 48


@pytest.mark.parametrize("value", [True, False, 0, -1, 0.0, -0.5, 1.5, math.nan, math.inf, "4G"])
def test_memory_out_of_range_is_refused(value: object) -> None:
    with pytest.raises(ProviderError, match=f"^kv_memory is {value!r}; it must be bytes"):
        LoadOptions(kv_memory=value)  # type: ignore[arg-type]


def test_the_pool_has_one_size() -> None:
    with pytest.raises(ProviderError, match=r"is 64 and kv_memory is 0.5; .* give one of them"):
        LoadOptions(kv_cache_tokens=64, kv_memory=0.5)


def test_shared_weights_count_once_and_converted_ones_twice() -> None:
    a = TensorRef("a", TensorProto.UINT8, (4, 8), 0, 32)
    b = TensorRef("b", TensorProto.FLOAT16, (8,), 64, 16)
    stored = [a.initializer(), a.view("also a", (32,)).initializer(), b.initializer()]
    converted = TensorProto(name="c", data_type=TensorProto.FLOAT, dims=(5,))
    inline = numpy_helper.from_array(np.zeros(3, np.int64), "d")
    graph = helper.make_graph([], "weights", [], [], [*stored, converted, inline])
    attached = {"c": np.zeros(5, np.float32)}
    assert weight_bytes(helper.make_model(graph), attached) == 32 + 16 + 2 * 20 + 24


def test_a_share_is_of_what_the_weights_leave_as_they_run(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    path: Path = tiny_artifact("llama", "fp16")  # runs in float32
    stored = Artifact.read(path).manifest.files[WEIGHTS_FILE].size
    free = 2**24
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    with opened(path, None, kv_memory=1.0) as model:
        capabilities = model.capabilities
    weights = free - capabilities.num_blocks * capabilities.kv_block_bytes
    assert 1.5 * stored < weights < 4 * stored


def test_a_pool_of_given_bytes_is_loaded(tiny_artifact: ArtifactMaker) -> None:
    with opened(tiny_artifact("llama", "int4"), None, kv_memory=100_000) as model:
        capabilities = model.capabilities
    assert capabilities.num_blocks == 100_000 // capabilities.kv_block_bytes


def test_slots_of_adapters_are_named_where_memory_is_short() -> None:
    with pytest.raises(CapacityError, match="slots for 5 adapters of rank 99 included"):
        plan(LoadOptions(max_adapters=5, max_adapter_rank=99), WEIGHTS)
    with pytest.raises(CapacityError) as caught:
        plan(LoadOptions(), WEIGHTS)
    assert "adapters" not in str(caught.value)
