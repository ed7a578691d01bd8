"""K/V of a real model, moved: decoding goes on as if nothing had happened."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxport.errors import ProviderError
from onnxport.providers.base import Model
from onnxport.providers.blocks import HostBlocks
from onnxport.providers.features import Attention
from onnxport.providers.rows import convert, element_type
from tests.exporter.checkpoints import VOCAB
from tests.providers.conftest import ArtifactMaker
from tests.providers.models import opened, run_rows

FAMILIES = ("llama", "mistral-window", "qwen3")
POOLS: list[tuple[Attention, str, int]] = [
    *(
        ("custom", dtype, size)
        for dtype in ("float32", "float16", "bfloat16", "int8", "int4")
        for size in (16, 32)
    ),
    *(("decomposed", "float32", size) for size in (3, 5, 16, 32)),
]
PROMPT = np.random.default_rng(5).integers(3, VOCAB, 41).tolist()
NEXT = [7, 30, 90]  # tokens to decode, given rather than chosen


def decode(model: Model, past: int, blocks: list[int]) -> Any:
    """Logits after each token of NEXT, float32 [3, vocab]."""
    steps = [run_rows(model, [([token], past + i, blocks)]) for i, token in enumerate(NEXT)]
    return np.concatenate(steps)


@pytest.mark.parametrize(("attention", "dtype", "block_size"), POOLS)
def test_blocks_are_read_as_they_were_written(
    tiny_artifact: ArtifactMaker, attention: Attention, dtype: str, block_size: int
) -> None:
    path = tiny_artifact("llama", "fp32")
    with opened(path, attention, kv_cache_dtype=dtype, block_size=block_size) as model:
        capabilities = model.capabilities
        form = capabilities.kv_format
        assert form.dtype == dtype
        shape = (4, form.num_layers, 2, form.num_kv_heads, block_size, form.head_size)
        numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        random = convert(numbers, element_type(dtype))
        last = capabilities.num_blocks - 1
        model.write_blocks([3, 1, last, 0], random)
        found = model.read_blocks([last, 2, 3])
        assert found.dtype == element_type(dtype)
        expected = np.stack([random[2], np.zeros_like(random[0]), random[0]])
        assert found.nbytes == 3 * capabilities.kv_block_bytes
        assert (found == expected).all()


@pytest.mark.parametrize(
    ("writer", "reader"),
    [("custom", "decomposed"), ("decomposed", "custom")],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_lowering_goes_on_where_one_stopped(
    tiny_artifact: ArtifactMaker, family: str, writer: Attention, reader: Attention
) -> None:
    path = tiny_artifact(family, "fp32")
    with opened(path, writer) as first, opened(path, reader) as second:
        run_rows(first, [(PROMPT, 0, [9, 4, 7])])
        content = first.read_blocks([9, 4, 7])
        expected = decode(first, len(PROMPT), [9, 4, 7])
        cold = decode(second, len(PROMPT), [2, 30, 11])
        assert not np.allclose(cold, expected, atol=1e-2)
        second.write_blocks([2, 30, 11], content)
        found = decode(second, len(PROMPT), [2, 30, 11])
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
        # and what the second one writes is what the first one would have written
        np.testing.assert_allclose(
            second.read_blocks([11])[..., : len(PROMPT) + len(NEXT) - 32, :],
            first.read_blocks([7])[..., : len(PROMPT) + len(NEXT) - 32, :],
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize(("attention", "dtype", "block_size"), POOLS)
def test_the_same_lowering_goes_on_bit_by_bit(
    tiny_artifact: ArtifactMaker, attention: Attention, dtype: str, block_size: int
) -> None:
    path = tiny_artifact("qwen3", "int4")
    count = -(-(len(PROMPT) + len(NEXT)) // block_size)
    here, there = list(range(count, 0, -1)), list(range(5, 5 + count))
    options = {"kv_cache_dtype": dtype, "block_size": block_size}
    with opened(path, attention, **options) as first, opened(path, attention, **options) as second:
        run_rows(first, [(PROMPT, 0, here)])
        content = first.read_blocks(here)
        expected = decode(first, len(PROMPT), here)
        assert (decode(second, len(PROMPT), there) != expected).any()
        second.write_blocks(there, content)
        assert (decode(second, len(PROMPT), there) == expected).all()


@pytest.mark.parametrize(("attention", "dtype", "block_size"), POOLS)
def test_a_copied_half_filled_block_forks_a_sequence(
    tiny_artifact: ArtifactMaker, attention: Attention, dtype: str, block_size: int
) -> None:
    prompt = PROMPT[: block_size + block_size // 2]
    with opened(
        tiny_artifact("llama", "fp32"), attention, kv_cache_dtype=dtype, block_size=block_size
    ) as model:

        def continue_both(left: list[int], right: list[int]) -> Any:
            pairs = [(5, 6), (50, 60), (8, 8)]
            return np.stack(
                [
                    run_rows(model, [([a], len(prompt) + i, left), ([b], len(prompt) + i, right)])
                    for i, (a, b) in enumerate(pairs)
                ]
            )

        for blocks in ([1, 2, 3], [4, 5, 6]):
            run_rows(model, [(prompt, 0, blocks[:2])])
        expected = continue_both([1, 2, 3], [4, 5, 6])
        assert (expected[-1, 0] != expected[-1, 1]).any()
        run_rows(model, [(prompt, 0, [7, 8])])
        model.copy_blocks([8], [10])
        assert (continue_both([7, 8, 9], [7, 10, 11]) == expected).all()


def test_a_closed_model_moves_no_blocks(tiny_artifact: ArtifactMaker) -> None:
    with opened(tiny_artifact("llama", "fp32"), None) as model:
        content = model.read_blocks([0])
        model.close()
        for transfer in (
            lambda: model.read_blocks([0]),
            lambda: model.write_blocks([0], content),
            lambda: model.copy_blocks([0], [1]),
        ):
            with pytest.raises(ProviderError, match="closed"):
                transfer()


def test_a_lack_of_memory_is_the_devices_error_and_misuse_is_not(
    tiny_artifact: ArtifactMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: HostBlocks, blocks: object) -> None:
        raise MemoryError

    with opened(tiny_artifact("llama", "fp32"), None) as model:
        with pytest.raises(AssertionError, match="not in a pool"):
            model.read_blocks([10**6])
        monkeypatch.setattr(HostBlocks, "read", full)
        size = model.capabilities.kv_block_bytes
        with pytest.raises(ProviderError, match=f"reading 3 KV blocks of {size} bytes") as caught:
            model.read_blocks([0, 1, 2])
    assert isinstance(caught.value.__cause__, MemoryError)
