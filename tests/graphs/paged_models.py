"""Small paged graphs for the passes' tests, and how to run them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxport.graphs import contract as c
from onnxport.graphs.builder import GraphBuilder
from tests.graphs.paged_reference import Case

INT32 = TensorProto.INT32


def paged_model(
    case: Case,
    *,
    packed: bool = True,
    dtype: int = TensorProto.FLOAT,
    cache_dtype: int | None = None,
    metadata: bool = True,
    layers: int = 1,
    **attributes: Any,
) -> onnx.ModelProto:
    """PagedAttention nodes in a row; each further layer attends with the same q, k and v."""
    g = GraphBuilder("test")
    q, k = case.heads * case.head_size, case.kv_heads * case.head_size
    widths = [("query", q + 2 * k)] if packed else [("query", q), ("key", k), ("value", k)]
    qkv = [g.input(name, dtype, [c.NUM_TOKENS, width]) for name, width in widths]
    lengths = [
        g.input(c.CUMULATIVE_SEQUENCE_LENGTHS, INT32, [c.BATCH_PLUS_ONE]),
        g.input(c.PAST_SEQUENCE_LENGTHS, INT32, [c.BATCH]),
        g.input(c.BLOCK_TABLE, INT32, [c.BATCH, c.MAX_NUM_BLOCKS]),
    ]
    extras = {
        8: case.cos,
        9: case.sin,
        11: case.sink,
        12: None if case.norm is None else case.norm[0],
        13: None if case.norm is None else case.norm[1],
    }
    tail = [""] * 17
    kind = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    for position, table in extras.items():
        if table is not None:
            tail[position] = g.constant(table.astype(kind), f"input{position}")
    if metadata:
        tail[16] = g.input(c.ATTENTION_METADATA, INT32, [3])
    shape = [c.NUM_BLOCKS, c.BLOCK_SIZE, case.kv_heads, case.head_size]
    for layer in range(layers):
        cache_type = dtype if cache_dtype is None else cache_dtype
        caches = [g.input(n(layer), cache_type, shape) for n in (c.past_key, c.past_value)]
        presents = [g.output(n(layer), cache_type, shape) for n in (c.present_key, c.present_value)]
        out = g.output(f"out{layer}", dtype, [c.NUM_TOKENS, q])
        with g.scope(f"layers.{layer}"):
            g.node(
                "PagedAttention",
                [*qkv, *[""] * (3 - len(qkv)), *caches, *lengths, *tail[8:]],
                outputs=[out, *presents],
                domain=c.MICROSOFT,
                name="attention",
                num_heads=case.heads,
                kv_num_heads=case.kv_heads,
                scale=case.scale,
                softcap=case.softcap or None,
                local_window_size=case.window,
                do_rotary=int(case.cos is not None),
                rotary_interleaved=int(case.interleaved),
                qk_norm_epsilon=case.epsilon,
                **attributes,
            )
    return g.build()


def feeds(
    case: Case, model: onnx.ModelProto, metadata: tuple[int, int, int] | None = None
) -> dict[str, Any]:
    """Inputs for the inputs that a model has."""
    longest = [n + p for n, p in zip(case.new, case.past, strict=True)]
    exact = (max(case.new), max(longest), min(longest))
    packed = not any(info.name == "key" for info in model.graph.input)
    columns = [case.query, case.key, case.value] if packed else [case.query]
    values = {
        "query": np.concatenate(columns, axis=1),
        "key": case.key,
        "value": case.value,
        c.CUMULATIVE_SEQUENCE_LENGTHS: case.cumulative,
        c.PAST_SEQUENCE_LENGTHS: np.array(case.past, np.int32),
        c.BLOCK_TABLE: case.block_table,
        c.ATTENTION_METADATA: np.array(metadata or exact, np.int32),
    }
    found = {}
    for info in model.graph.input:
        is_key = info.name.endswith(".key")
        cache = case.key_cache if is_key else case.value_cache
        value = cache if info.name.startswith("past_") and "." in info.name else values[info.name]
        kind = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        found[info.name] = value.astype(kind)
    return found


def run(
    model: onnx.ModelProto,
    inputs: dict[str, Any],
    attached: dict[str, NDArray[Any]] | None = None,
) -> dict[str, NDArray[Any]]:
    """Run on ONNX Runtime's CPU provider; returns outputs by name."""
    session = start(model, attached)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, inputs), strict=True))


def start(
    model: onnx.ModelProto, attached: dict[str, NDArray[Any]] | None = None
) -> ort.InferenceSession:
    """A session on the CPU, with attached initializers."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    if attached:
        values = [ort.OrtValue.ortvalue_from_numpy(value) for value in attached.values()]
        options.add_external_initializers(list(attached), values)
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def op_types(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def inline(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    """The inline initializers."""
    return {
        t.name: numpy_helper.to_array(t)
        for t in model.graph.initializer
        if t.data_location != TensorProto.EXTERNAL
    }
