"""What a step of decomposed attention takes, and that one which takes too much runs in parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.providers import device, step_memory
from onnxport.providers.base import LoadOptions, StepInputs
from onnxport.providers.buckets import Buckets, pad
from onnxport.providers.ort import CPU
from onnxport.providers.ort_model import OrtModel
from onnxport.providers.pool import UNKNOWN_BYTES, PoolPlan
from onnxport.providers.recipe import Recipe
from onnxport.providers.registry import get_provider
from onnxport.providers.step_memory import LEAST_BYTES, StepMemory, parts_of
from tests.graphs.artifacts import SPEC
from tests.providers.conftest import ArtifactMaker
from tests.tiers import crossed

MEMORY = StepMemory(key_bytes=1024, score_bytes=32, block_size=16, most_bytes=1 << 20)
BUCKETS = Buckets(max_tokens=256, max_rows=32, max_model_len=16_000, block_size=16)
PADDED = replace(MEMORY, buckets=BUCKETS)
ROWS = ((1, 30), (1, 3), (5, 5), (2, 17), (1, 9))  # new tokens and length of each sequence
WIDTH = 2  # blocks of 16 tokens


def step(wanted: list[int]) -> StepInputs:
    """A step of ROWS whose logits after the tokens `wanted` are asked for."""
    new, lengths = (np.array(one, np.int32) for one in zip(*ROWS, strict=True))
    blocks = np.arange(len(ROWS) * WIDTH, dtype=np.int32)[::-1].reshape(len(ROWS), WIDTH)
    return StepInputs(
        input_ids=np.arange(10, 10 + new.sum(), dtype=np.int64),
        block_table=np.ascontiguousarray(blocks),
        cumulative_sequence_lengths=np.cumsum([0, *new], dtype=np.int32),
        past_sequence_lengths=lengths - new,
        attention_metadata=np.array([new.max(), lengths.max(), lengths.max()], np.int32),
        logits_indices=np.array(wanted, np.int32),
    )


def test_one_long_sequence_makes_all_rows_as_large() -> None:
    keys = 24 * 16_000
    assert MEMORY.step_bytes(24, 24, 1, 16_000) == keys * (4 * 1024 + 3 * 32)
    assert MEMORY.step_bytes(24, 24, 1, 15_985) == keys * (4 * 1024 + 3 * 32)  # whole blocks
    assert MEMORY.step_bytes(1, 512, 512, 640) == 8 * 640 * (4 * 1024 + 3 * 64 * 32)
    assert MEMORY.step_bytes(3, 130, 128, 640) == (3 + 1) * 640 * (4 * 1024 + 3 * 64 * 32)


def test_a_padded_step_takes_what_its_shape_does() -> None:
    """Tokens, rows and table grow, and chunks of two tokens get tiles of eight."""
    decode, key = 4 * 1024 + 3 * 32, 4 * 1024 + 3 * 8 * 32
    assert PADDED.step_bytes(24, 24, 1, 15_985) == 32 * 16_000 * decode
    assert PADDED.step_bytes(3, 3, 1, 16) == 4 * 16 * decode
    assert MEMORY.step_bytes(9, 18, 2, 40) == (9 + 9 // 2) * 48 * (4 * 1024 + 3 * 2 * 32)
    # 32 tokens in 16 rows, some of them padding, and 4 blocks
    assert PADDED.step_bytes(9, 18, 2, 40) == (16 + 16 // 8) * 64 * key


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 500)), min_size=1, max_size=32).filter(
        lambda rows: sum(count for count, _ in rows) <= BUCKETS.max_tokens
    )
)
def test_what_a_padded_step_takes_is_what_is_run(rows: list[tuple[int, int]]) -> None:
    new, past = (np.array(one, np.int32) for one in zip(*rows, strict=True))
    lengths = new + past
    width = -(-int(lengths.max()) // BUCKETS.block_size)
    inputs = StepInputs(
        input_ids=np.zeros(new.sum(), np.int64),
        block_table=np.zeros((len(rows), width), np.int32),
        cumulative_sequence_lengths=np.cumsum([0, *new], dtype=np.int32),
        past_sequence_lengths=past,
        attention_metadata=np.array([new.max(), lengths.max(), lengths.max()], np.int32),
        logits_indices=np.zeros(1, np.int32),
    )
    shape = pad(inputs, BUCKETS, 4096).shape
    count, tile = min(shape.num_rows, shape.num_tokens), min(shape.query_tile, shape.num_tokens)
    tiles = count + (shape.num_tokens - count) // tile
    expected = tiles * shape.table_width * 16 * (4 * 1024 + 3 * tile * 32)
    found = PADDED.step_bytes(len(rows), int(new.sum()), int(new.max()), int(lengths.max()))
    assert found == expected


def test_a_step_that_is_larger_than_the_shapes_is_refused_as_ever() -> None:
    with pytest.raises(
        ProviderError, match=r"a step of 257 tokens .* lower max_num_batched_tokens"
    ):
        PADDED.step_bytes(3, 257, 200, 300)


def test_where_memory_is_not_told_steps_get_half_of_an_assumed_one() -> None:
    pool = PoolPlan(16, 10, 1 << 20, 128)
    assert StepMemory.plan(SPEC, pool, 2, None).most_bytes == UNKNOWN_BYTES // 2


@pytest.mark.parametrize("provider", ["directml", "webgpu"])
def test_a_device_that_does_not_tell_its_memory_has_a_limit(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    recipes: list[Recipe] = []
    monkeypatch.setattr(
        f"onnxport.providers.{provider}.load_on_device",
        lambda artifact, options, recipe, target, *, emulate: recipes.append(recipe),
    )
    artifact = Artifact.read(tiny_artifact("llama", "fp32"))
    get_provider(provider, emulate=True).load(artifact, LoadOptions())
    (recipe,) = recipes
    assert recipe.free_bytes is None
    monkeypatch.setattr(device, "check_host_operators", lambda *_: None)
    options = LoadOptions(kv_cache_tokens=512, attention="decomposed", threads=1)
    model = device.load_on_device(artifact, options, recipe, CPU, emulate=False)
    assert model._step_memory is not None
    assert model._step_memory.most_bytes == UNKNOWN_BYTES // 2
    model.close()


def test_the_long_one_goes_alone() -> None:
    lengths = [16] * 12 + [16_000] + [16] * 11
    parts = replace(MEMORY, most_bytes=MEMORY.step_bytes(1, 1, 1, 16_000)).parts([1] * 24, lengths)
    assert parts == [(0, 12), (12, 13), (13, 24)]


@given(st.lists(st.tuples(st.integers(1, 80), st.integers(0, 500)), min_size=1, max_size=40))
def test_parts_are_all_rows_and_none_is_too_large(rows: list[tuple[int, int]]) -> None:
    new, lengths = [count for count, _ in rows], [count + past for count, past in rows]

    def size(first: int, end: int) -> int:
        some = slice(first, end)
        return MEMORY.step_bytes(end - first, sum(new[some]), max(new[some]), max(lengths[some]))

    parts = MEMORY.parts(new, lengths)
    assert [row for part in parts for row in range(*part)] == list(range(len(rows)))
    assert all(size(*part) <= MEMORY.most_bytes for part in parts if part[1] - part[0] > 1)
    assert all(size(first, end + 1) > MEMORY.most_bytes for first, end in parts[:-1])


def test_a_part_is_a_step_of_its_own() -> None:
    inputs = replace(step([0, 1, 8, 9]), adapter_slots=np.array([0, 1, 2, 0, 1], np.int32))
    (first, own), (second, others) = parts_of(inputs, [(0, 2), (2, 5)], 16)
    assert (own.tolist(), others.tolist()) == ([0, 1], [2, 3])
    assert (first.block_table.tolist(), second.block_table.shape) == ([[9, 8], [7, 6]], (3, 2))
    assert second.input_ids.tolist() == [12, 13, 14, 15, 16, 17, 18, 19]
    assert second.cumulative_sequence_lengths.tolist() == [0, 5, 7, 8]
    assert second.past_sequence_lengths.tolist() == [0, 15, 8]
    assert second.attention_metadata.tolist() == [5, 17, 17]
    assert second.logits_indices.tolist() == [6, 7]
    assert second.adapter_slots is not None
    assert second.adapter_slots.tolist() == [2, 0, 1]
    (alone, nothing), _ = parts_of(inputs, [(2, 3), (3, 5)], 16)
    assert (alone.block_table.tolist(), alone.logits_indices.tolist()) == ([[5]], [4])
    assert len(nothing) == 0


def test_a_part_has_its_rows_of_all_block_tables() -> None:
    inputs = step([0, 9])
    other = replace(inputs, more_block_tables=(inputs.block_table + 10, inputs.block_table + 20))
    parts = list(parts_of(other, [(0, 2), (2, 3), (3, 5)], 16))
    assert [part.block_table.shape for part, _ in parts] == [(2, 2), (1, 1), (2, 2)]
    for part, _ in parts:
        for number, table in enumerate(part.more_block_tables, 1):
            assert table.tolist() == (part.block_table + 10 * number).tolist()
            assert table.flags.c_contiguous
        assert len(part.more_block_tables) == 2


def loaded(path: Any, provider: str, **options: Any) -> OrtModel:
    chosen = LoadOptions(kv_cache_tokens=512, threads=2, block_size=16, **options)
    model = get_provider(provider, emulate=provider != "cpu").load(Artifact.read(path), chosen)
    assert isinstance(model, OrtModel)
    return model


@pytest.mark.parametrize(
    ("provider", "wanted"),
    crossed(2, ["cpu", "cuda", "migraphx", "webgpu"], [[0, 1, 6, 8, 9], [0, 9], [6]]),
)
def test_parts_give_what_the_whole_step_does(
    tiny_artifact: ArtifactMaker, provider: str, wanted: list[int]
) -> None:
    path, results = tiny_artifact("llama", "fp32"), []
    for most_bytes in (1 << 30, 0):
        model = loaded(path, provider, attention="decomposed", dtype="float32")
        assert model._step_memory is not None
        model._step_memory = replace(model._step_memory, most_bytes=most_bytes)
        runs: list[NDArray[Any]] = [model.run(step(wanted)).copy() for _ in range(2)]
        results.append((np.stack(runs), model.read_blocks(range(len(ROWS) * WIDTH))))
        model.close()
    for whole, parts in zip(*results, strict=True):
        np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-5)


def test_parts_give_all_logits_and_tell_nothing(tiny_artifact: ArtifactMaker) -> None:
    """Also where a few would do, and summaries are asked for."""
    model = loaded(tiny_artifact("llama", "fp32"), "cuda", dtype="float32")
    assert model.capabilities.summarizes_logits
    assert model._step_memory is not None
    whole = model.run(step([1, 6])).copy()
    model._step_memory = replace(model._step_memory, most_bytes=0)
    told = np.zeros((2, contract.summary_floats(model.capabilities.vocab_size)), np.float32)
    wanted = {"exact_logits": np.ones(2, np.int32), "summaries": told}
    wanted["summary_scales"] = np.full(2, contract.NO_SUMS, np.float32)
    found = model.run(replace(step([1, 6]), **wanted))
    np.testing.assert_allclose(found, whole, rtol=1e-4, atol=1e-5)
    assert (told[:, -1] == contract.NO_SUMMARY).all()
    model.close()


def test_steps_get_half_of_what_weights_and_pool_leave() -> None:
    pool, left = PoolPlan(16, 10, 1 << 20, 128), 1 << 40
    found = StepMemory.plan(SPEC, pool, 2, left)
    assert found.most_bytes == (left - (10 << 20)) // 2
    assert found.key_bytes == SPEC.num_kv_heads * SPEC.head_size * 2
    assert StepMemory.plan(SPEC, pool, 2, left, BUCKETS).buckets is BUCKETS
    assert StepMemory.plan(SPEC, pool, 2, 10 << 20).most_bytes == LEAST_BYTES


@pytest.mark.parametrize("provider", ["cpu", "migraphx"])
def test_a_load_plans_for_decomposed_attention(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch, provider: str
) -> None:
    monkeypatch.setattr(step_memory, "LEAST_BYTES", 0)
    monkeypatch.setattr("onnxport.providers.memory.available_bytes", lambda: 1 << 30)
    model = loaded(tiny_artifact("llama", "fp32"), provider, attention="decomposed")
    limits, found = model.capabilities, model._step_memory
    assert found is not None
    assert (found.buckets is not None) == (provider == "migraphx")
    pool_bytes = limits.num_blocks * limits.kv_block_bytes
    assert found.most_bytes == pytest.approx(((1 << 30) - pool_bytes) * 0.5, rel=0.01)
    model.close()


def test_other_attention_gathers_nothing(tiny_artifact: ArtifactMaker) -> None:
    model = loaded(tiny_artifact("llama", "fp32"), "cpu")
    if model.capabilities.attention == "custom":
        assert model._step_memory is None
    model.close()
