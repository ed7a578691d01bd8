"""Caches in OpenVINO's tensors: the same content as caches in NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxport.providers.base import Model
from onnxport.providers.blocks import CacheLayout, HostBlocks, tiled_layout
from onnxport.providers.openvino.caches import DTYPES, CacheFormat
from onnxport.providers.openvino.model import OpenVinoModel
from onnxport.providers.openvino.tensors import TensorBlocks, _runs, allocate_remote
from tests.providers import models
from tests.providers.conftest import ArtifactMaker
from tests.providers.models import run_rows
from tests.tiers import examples

ov = pytest.importorskip("openvino", reason="openvino is not installed: pip install '.[openvino]'")

NUM_BLOCKS, BLOCK_SIZE, LAYERS, HEADS, WIDTH = 12, 4, 2, 3, 8


class HostContext:
    """Hands out host memory full of garbage, where a device's context hands out its own."""

    def create_tensor(self, kind: Any, shape: Any, properties: dict[str, Any]) -> Any:
        tensor = ov.Tensor(kind, shape)
        tensor.data[...] = 7
        return tensor


def cache_format(dtype: str, transposed: bool) -> CacheFormat:
    value = (HEADS, BLOCK_SIZE, WIDTH)
    key = (HEADS, WIDTH, BLOCK_SIZE) if transposed else value
    return CacheFormat(dtype, BLOCK_SIZE, key, value, transposed)


class Both:
    """The same caches twice: in tensors, and in plain arrays as the reference."""

    def __init__(self, dtype: str, transposed: bool) -> None:
        form = cache_format(dtype, transposed)
        self.dtype = DTYPES[dtype]
        self.pairs = allocate_remote(HostContext(), form, LAYERS, NUM_BLOCKS)
        self.tensors = TensorBlocks(self.pairs, form)
        dims = (NUM_BLOCKS, BLOCK_SIZE, HEADS, WIDTH)
        self.arrays = [
            (np.zeros(dims, self.dtype), np.zeros(dims, self.dtype)) for _ in range(LAYERS)
        ]
        # Keys of one tile a block lie as channels of tokens; values always as tokens of channels.
        tiled = tiled_layout(BLOCK_SIZE)
        key = tiled.key if transposed else tiled.value
        self.host = HostBlocks(self.arrays, CacheLayout(key, tiled.value))

    def content(self, count: int, seed: int) -> NDArray[Any]:
        random = np.random.default_rng(seed)
        shape = (count, LAYERS, 2, HEADS, BLOCK_SIZE, WIDTH)
        return random.standard_normal(shape).astype(self.dtype)

    def check(self) -> None:
        every = list(range(NUM_BLOCKS))
        expected, found = self.host.read(every), self.tensors.read(every)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        for pair, arrays in zip(self.pairs, self.arrays, strict=True):  # byte by byte
            for tensor, array in zip(pair, arrays, strict=True):
                assert (tensor.data.reshape(-1) == array.reshape(-1)).all()


CASES = [(dtype, transposed) for dtype in ("float16", "float32") for transposed in (False, True)]
BLOCKS = st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=NUM_BLOCKS, unique=True)


@pytest.mark.parametrize(("dtype", "transposed"), CASES)
def test_transfers_are_those_of_the_host(dtype: str, transposed: bool) -> None:
    both = Both(dtype, transposed)
    both.check()  # zeros

    @settings(max_examples=examples(40), deadline=None)
    @given(BLOCKS, BLOCKS, st.integers(0, 1000))
    def moves(written: list[int], copied: list[int], seed: int) -> None:
        content = both.content(len(written), seed)
        both.tensors.write(written, content)
        both.host.write(written, content)
        half = len(copied) // 2
        sources, targets = copied[:half], copied[half : 2 * half]
        both.tensors.copy(sources, targets)
        both.host.copy(sources, targets)
        both.check()

    moves()
    twice = [3, 1, 2, 3, 4]
    np.testing.assert_array_equal(both.tensors.read(twice), both.host.read(twice))


def test_neighbours_move_together() -> None:
    at, to = np.array([4, 5, 6, 2, 3]), np.array([0, 1, 9, 10, 11])
    assert _runs(at) == [slice(0, 3), slice(3, 5)]
    assert _runs(at, to) == [slice(0, 2), slice(2, 3), slice(3, 5)]
    assert _runs(at[:1]) == [slice(0, 1)]
    assert _runs(at[:0]) == []


def test_misuse_fails_before_anything_changes() -> None:
    both = Both("float16", True)
    content = both.content(2, 2)
    for wrong in (
        lambda: both.tensors.write([0, 0], content),
        lambda: both.tensors.write([0, NUM_BLOCKS], content),
        lambda: both.tensors.write([0, 1, 2], content),
        lambda: both.tensors.write([0, 1], content.astype(np.float32)),
        lambda: both.tensors.copy([0, 1], [1, 2]),
        lambda: both.tensors.copy([0], [1, 2]),
        lambda: both.tensors.read([-1]),
    ):
        with pytest.raises(AssertionError):
            wrong()
    both.check()


def test_they_read_and_write_what_a_plugin_does(tiny_artifact: ArtifactMaker) -> None:
    """The CPU plugin's own caches, moved by ranges of its tensors."""
    prompt = np.random.default_rng(3).integers(3, 160, 64).tolist()
    options = {"kv_cache_dtype": "float32", "matmul_accuracy_level": 1}
    path = tiny_artifact("qwen3", "int4")
    with models.opened(path, None, provider="openvino", **options) as model:
        blocks = tensor_blocks(model)
        run_rows(model, [(prompt, 0, [3, 8])])
        content = model.read_blocks([3, 8])
        assert content.any()
        np.testing.assert_array_equal(blocks.read([3, 8]), content)
        blocks.write([6, 2], content)
        blocks.copy([3, 8], [5, 1])
        np.testing.assert_array_equal(
            model.read_blocks([6, 2, 5, 1]), np.tile(content, (2, 1, 1, 1, 1, 1))
        )
        here, written, copied = (
            run_rows(model, [([9], len(prompt), [*ids, last])])
            for ids, last in (([3, 8], 10), ([6, 2], 11), ([5, 1], 12))
        )
        assert (written == here).all()
        assert (copied == here).all()


def tensor_blocks(model: Model) -> TensorBlocks:
    assert isinstance(model, OpenVinoModel)
    size, form = model.capabilities.block_size, model.capabilities.kv_format
    shape = (form.num_kv_heads, size, form.head_size)
    return TensorBlocks(model._kept[0], CacheFormat(form.dtype, size, shape, shape))
