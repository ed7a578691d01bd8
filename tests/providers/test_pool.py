"""How large the KV pool is, to the byte, and how it says that it cannot be."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxport.errors import CapacityError, ProviderError
from onnxport.graphs.artifact import WEIGHTS_FILE, Artifact
from onnxport.graphs.cache_groups import LayerGroups, group_layers
from onnxport.graphs.tensors import TensorRef
from onnxport.providers import memory
from onnxport.providers.base import LoadOptions
from onnxport.providers.ort import weight_bytes
from onnxport.providers.pool import MOST_SEQUENCES, PoolPlan, check_made, plan_pool
from tests.graphs.artifacts import OF_LATENTS, SPEC
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


def plan_groups(options: LoadOptions, groups: LayerGroups, free: int = WEIGHTS + 2**40) -> PoolPlan:
    """As `plan`, with blocks of 16 tokens of so many layers."""
    return plan_pool(
        SPEC,
        options,
        block_size=16,
        item_bytes=4,
        free_bytes=free,
        weight_bytes=WEIGHTS,
        groups=groups,
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


def test_of_latents_a_token_takes_one_row_a_layer() -> None:
    options = LoadOptions(kv_cache_tokens=160)
    found = plan_pool(
        OF_LATENTS, options, block_size=16, item_bytes=2, free_bytes=2**30, weight_bytes=WEIGHTS
    )
    layers, row = OF_LATENTS.num_layers, OF_LATENTS.head_size
    assert (found.num_blocks, found.block_bytes) == (10, 16 * layers * row * 2)
    with pytest.raises(CapacityError, match=f"1 x {layers} layers x 1 KV heads x {row} channels"):
        plan_pool(OF_LATENTS, options, block_size=16, item_bytes=2, free_bytes=2, weight_bytes=0)


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


PLACE = BLOCK // 2  # bytes of a block of one layer
TWO = group_layers((16, None), CONTEXT)  # groups of one layer each


@pytest.mark.parametrize(("tokens", "num_blocks"), [(16, 2), (31, 2), (32, 4), (47, 4), (48, 6)])
def test_so_many_tokens_fit_in_the_blocks_of_every_group(tokens: int, num_blocks: int) -> None:
    assert TWO.windows == (None, 16)
    found = plan_groups(LoadOptions(kv_cache_tokens=tokens), TWO)
    assert (found.block_bytes, found.num_blocks) == (PLACE, num_blocks)
    assert found.num_blocks // 2 == tokens // 16


@pytest.mark.parametrize(("num_blocks", "columns"), [(2, 1), (3, 1), (4, 2), (5, 3)])
def test_a_sequence_may_take_what_it_gave_up(num_blocks: int, columns: int) -> None:
    """A window of 16 tokens is in two blocks at most."""
    found = plan_groups(LoadOptions(kv_memory=num_blocks * PLACE + 1), TWO)
    assert found == PoolPlan(16, num_blocks, PLACE, columns * 16)
    options = LoadOptions(kv_memory=num_blocks * PLACE, max_model_len=columns * 16)
    assert plan_groups(options, TWO).max_model_len == columns * 16
    options = LoadOptions(kv_memory=num_blocks * PLACE, max_model_len=columns * 16 + 1)
    with pytest.raises(CapacityError) as caught:
        plan_groups(options, TWO)
    assert (
        f"is {columns * 16 + 1} tokens, but the KV cache holds {num_blocks} blocks of 16, for 2 "
        f"groups of layers, which is a sequence of {columns * 16} tokens; lower"
        in str(caught.value)
    )


def test_a_window_of_all_layers_lets_a_sequence_be_longer_than_the_pool() -> None:
    window = LayerGroups.single(2, 32)
    found = plan_groups(LoadOptions(kv_memory=3 * BLOCK), window)
    assert found == PoolPlan(16, 3, BLOCK, CONTEXT)
    assert plan_groups(LoadOptions(kv_memory=2 * BLOCK), window).max_model_len == 32
    with pytest.raises(CapacityError, match=r"holds 2 blocks of 16, 32 tokens; lower"):
        plan_groups(LoadOptions(kv_memory=2 * BLOCK, max_model_len=33), window)


def test_the_default_is_cut_to_what_sequences_of_all_groups_can_fill() -> None:
    assert plan_groups(LoadOptions(), TWO).num_blocks == 2 * MOST_SEQUENCES * CONTEXT // 16


def test_a_pool_that_does_not_fit_says_what_groups_take() -> None:
    with pytest.raises(CapacityError) as caught:
        plan_groups(LoadOptions(kv_memory=2 * PLACE - 1), TWO)
    text = str(caught.value)
    assert "2 x 2 groups of 1 layers x 2 KV heads x 32 channels x 4 bytes = 1024 bytes" in text
    assert "the smallest cache is one block of 16 tokens for each group, 16384 bytes" in text
    with pytest.raises(
        CapacityError, match=r"kv_cache_tokens is 4096, 4\.0 MiB, and 4\.0 MiB are left"
    ):
        plan_groups(LoadOptions(kv_cache_tokens=4096), TWO, WEIGHTS + 2**22 - 1)
    assert plan_groups(LoadOptions(kv_cache_tokens=4096), TWO, WEIGHTS + 2**22).num_blocks == 512


def test_a_buffer_of_the_device_holds_a_layer_of_a_group() -> None:
    kept = {"item_bytes": 4, "free_bytes": 2**30, "weight_bytes": 0, "groups": TWO}
    options = LoadOptions(kv_cache_tokens=80)
    size = 16 * 2 * 32 * 4  # of a block's keys, in one layer
    with pytest.raises(CapacityError, match=r"can be 9 blocks of 16 tokens; ask for 64 tokens"):
        plan_pool(SPEC, options, block_size=16, buffer_bytes=10 * size - 1, **kept)
    found = plan_pool(SPEC, options, block_size=16, buffer_bytes=10 * size, **kept)
    assert found.num_blocks == 10


@pytest.mark.parametrize(("share", "asked"), [(0.4, 2 << 30), (0.1, 1 << 29)])
def test_a_share_of_memory_that_is_not_told(share: float, asked: int) -> None:
    """A draft model's is a quarter of a model's, whatever there is."""
    found = plan_pool(
        replace(SPEC, context_length=1 << 20),
        LoadOptions(kv_share=share),
        block_size=16,
        item_bytes=4,
        free_bytes=None,
        weight_bytes=WEIGHTS,
    )
    assert asked - found.block_bytes < found.num_blocks * found.block_bytes <= asked


def test_a_share_of_what_is_free() -> None:
    blocks = plan(LoadOptions(kv_share=0.1), WEIGHTS + 100 * BLOCK).num_blocks
    assert blocks == 10
    with pytest.raises(ProviderError, match=r"kv_share is 1\.5"):
        LoadOptions(kv_share=1.5)


def test_what_is_made_on_the_host_may_take_what_the_system_can_let_go_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check_made(0, 100, 0, "none of them", "go")
    check_made(50, 100, 49, "some", "go")
    assert not caplog.records
    check_made(50, 100, 99, "most of them", "go")
    (told,) = caplog.messages
    assert told == "most of them take 99 bytes of the host's memory, of which 50 bytes are free"
    with pytest.raises(
        CapacityError, match="all take 100 bytes of the host's memory, which is 100"
    ):
        check_made(50, 100, 100, "all", "go")
