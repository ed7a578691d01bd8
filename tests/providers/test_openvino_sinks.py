"""Attention sinks on OpenVINO, against the NumPy reference of PagedAttention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxport.errors import ProviderError
from onnxport.graphs import contract as c
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.passes.flat_paged import flatten_paged
from onnxport.providers.base import StepInputs
from onnxport.providers.openvino.checks import check_sinks
from onnxport.providers.openvino.compiled import bind_caches, cache_format
from onnxport.providers.openvino.convert import convert
from onnxport.providers.openvino.core import new_core
from onnxport.providers.openvino.cpu import CpuPlugin
from onnxport.providers.openvino.gpu import GpuPlugin
from onnxport.providers.openvino.model import flat_inputs
from tests.kernels.reference import Case, attend, write_cache

ov = pytest.importorskip("openvino", reason="openvino is not installed: pip install '.[openvino]'")

HEADS, KV_HEADS, SIZE, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 32, 32, 12
WIDTH = (HEADS + 2 * KV_HEADS) * SIZE
SINKS = np.array([-4, 0.5, 2, 6], np.float32)  # from hardly any to most of the weight
TABLE = np.array([[3, 1, 4, 9], [7, 0, 11, 2], [5, 8, 6, 10]], np.int32)
# Past and new tokens of each sequence, step by step.
STEPS: dict[str, list[list[tuple[int, int]]]] = {
    "prefill": [[(0, 70)]],
    "decode": [[(0, 40)], [(40, 1)], [(41, 1)]],
    "sequences": [[(0, 40), (0, 33), (0, 1)], [(40, 1), (33, 20), (1, 1)], [(41, 1), (53, 1)]],
}


def graph(window: int | None, sinks: NDArray[np.float32] | None) -> onnx.ModelProto:
    """One PagedAttention without rotation."""
    g = GraphBuilder("sinks")
    qkv = g.input("qkv", TensorProto.FLOAT, [c.NUM_TOKENS, WIDTH])
    for name, dims in (
        (c.CUMULATIVE_SEQUENCE_LENGTHS, [c.BATCH_PLUS_ONE]),
        (c.PAST_SEQUENCE_LENGTHS, [c.BATCH]),
        (c.BLOCK_TABLE, [c.BATCH, c.MAX_NUM_BLOCKS]),
        (c.ATTENTION_METADATA, [3]),
    ):
        g.input(name, TensorProto.INT32, dims)
    shape = [c.NUM_BLOCKS, c.BLOCK_SIZE, KV_HEADS, SIZE]
    caches = [g.input(name(0), TensorProto.FLOAT, shape) for name in (c.past_key, c.past_value)]
    presents = [
        g.output(name(0), TensorProto.FLOAT, shape) for name in (c.present_key, c.present_value)
    ]
    out = g.output("out", TensorProto.FLOAT, [c.NUM_TOKENS, HEADS * SIZE])
    sink = "" if sinks is None else g.constant(sinks, "sinks")
    g.node(
        "PagedAttention",
        [qkv, "", "", *caches, c.CUMULATIVE_SEQUENCE_LENGTHS, c.PAST_SEQUENCE_LENGTHS,
         c.BLOCK_TABLE, "", "", "", sink, "", "", "", "", c.ATTENTION_METADATA],
        outputs=[out, *presents],
        domain=c.MICROSOFT,
        name="attention",
        num_heads=HEADS,
        kv_num_heads=KV_HEADS,
        **({} if window is None else {"local_window_size": window}),
    )  # fmt: skip
    return g.build()


def cases(steps: Sequence[list[tuple[int, int]]], window: int | None) -> list[Case]:
    """The steps for the reference, each with the cache that the one before it left."""
    random = np.random.default_rng(5)
    cache = np.zeros((NUM_BLOCKS, BLOCK_SIZE, KV_HEADS, SIZE), np.float32)
    key_cache, value_cache, found = cache, cache, []
    for rows in steps:
        past, new = ([row[at] for row in rows] for at in (0, 1))
        heads = random.standard_normal((sum(new), HEADS + 2 * KV_HEADS, SIZE)).astype(np.float32)
        case = Case(
            HEADS, KV_HEADS, SIZE, *np.split(heads, [HEADS, HEADS + KV_HEADS], axis=1),
            key_cache, value_cache, past, new, TABLE[: len(rows)], window=window, head_sink=SINKS,
        )  # fmt: skip
        key_cache, value_cache = write_cache(case)
        found.append(case)
    return found


def run(
    model: onnx.ModelProto, steps: Sequence[Case], config: dict[str, Any]
) -> list[NDArray[np.float32]]:
    """What OpenVINO makes of the steps in turn."""
    flat = flatten_paged(model).model
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in flat.graph.initializer}
    core, plugin = new_core(), CpuPlugin()
    converted = convert(flat, weights)
    compiled = core.compile_model(converted.model, "CPU", config)
    form = cache_format(compiled, (KV_HEADS, SIZE))
    pairs, _ = plugin.allocate(core, form, 1, NUM_BLOCKS)
    request = compiled.create_infer_request()
    bind_caches(request, pairs)
    known = {name for port in compiled.inputs for name in port.get_names()}
    found = []
    for case in steps:
        tokens = len(case.query)
        totals = [past + new for past, new in zip(case.past_lengths, case.new_lengths, strict=True)]
        qkv = np.concatenate([case.query, case.key, case.value], axis=1).reshape(tokens, WIDTH)
        inputs = StepInputs(
            np.zeros(tokens, np.int64),
            case.block_table,
            case.cumulative_lengths,
            np.array(case.past_lengths, np.int32),
            np.array([max(case.new_lengths), max(totals), max(totals)], np.int32),
            np.empty(0, np.int32),
        )
        for name, array in {"qkv": qkv, **flat_inputs(inputs, form.block_size)}.items():
            if name in known:
                request.set_tensor(name, ov.Tensor(array))
        request.infer()
        found.append(np.array(request.get_tensor("out").data))
    return found


def test_a_device_where_they_were_not_tried_refuses_them() -> None:
    with_sinks, without = (flatten_paged(graph(None, sinks)).model for sinks in (SINKS, None))
    check_sinks(with_sinks, CpuPlugin())
    check_sinks(without, GpuPlugin("GPU.1"))
    with pytest.raises(ProviderError, match=r"sinks.*never tried on OpenVINO's GPU\.1; use"):
        check_sinks(with_sinks, GpuPlugin("GPU.1"))


@pytest.mark.parametrize("window", [None, 9, 40])
@pytest.mark.parametrize("steps", sorted(STEPS))
@pytest.mark.parametrize(("cache", "tolerance"), [("f32", 1e-5), ("u8", 0.02)])
def test_sinks_take_their_part_of_each_head(
    steps: str, window: int | None, cache: str, tolerance: float
) -> None:
    made = cases(STEPS[steps], window)
    config = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": cache}
    found = run(graph(window, SINKS), made, config)
    without = run(graph(window, None), made, config)
    for case, out, plain in zip(made, found, without, strict=True):
        expected = attend(case, *write_cache(case))
        assert np.abs(plain - expected).max() > 10 * tolerance  # it matters that they are there
        np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance)
