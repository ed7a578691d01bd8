"""Paged graphs around the cases of the kernel's tests, and how to run them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxport.graphs import contract as c
from onnxport.graphs.builder import GraphBuilder
from tests.kernels import latent_cases, run_ort
from tests.kernels.cases import random_case
from tests.kernels.reference import Case

INT32 = TensorProto.INT32

# Inputs by schema name that change from run to run; the others become initializers.
PER_RUN = {
    "query": [c.NUM_TOKENS, "width"],
    "key": [c.NUM_TOKENS, "kv_width"],
    "value": [c.NUM_TOKENS, "kv_width"],
    "cumulative_sequence_length": [c.BATCH_PLUS_ONE],
    "past_seqlens": [c.BATCH],
    "block_table": [c.BATCH, c.MAX_NUM_BLOCKS],
    "slot_mapping": [c.NUM_TOKENS],
    "attention_metadata": [3],
}


def paged_case(seed: int, **changes: object) -> Case:
    """A random case of the kernel's tests, its cache in the canonical layout.

    One in four has an int8 cache, which standard operators do not read: give another seed.
    """
    case = random_case(seed)
    assert case.cache_type != "int8", "the scales of an int8 cache lie in our kernel's own layout"
    return case.replace(layout="canonical", **changes)


def latent_case(seed: int, **changes: object) -> Case:
    """A random case over one cache of latent rows; one in five has an int8 cache, see above."""
    case = latent_cases.random_case(seed)
    assert case.cache_type != "int8", "standard operators do not read an int8 cache"
    return case.replace(layout="canonical", **changes)


def paged_model(
    case: Case, *, dtype: int = TensorProto.FLOAT, layers: int = 1, **attributes: Any
) -> onnx.ModelProto:
    """PagedAttention nodes side by side, each over the same q, k and v and caches of its own."""
    g = GraphBuilder("test")
    kind = onnx.helper.tensor_dtype_to_np_dtype(dtype)
    values: dict[str, str] = {}
    for name, value in run_ort.inputs(case).items():
        if name in PER_RUN:
            is_int = name in run_ort.INT32_INPUTS
            values[name] = g.input(name, INT32 if is_int else dtype, PER_RUN[name])
        else:
            values[name] = g.constant(value.astype(kind), name)
    shape = [c.NUM_BLOCKS, c.BLOCK_SIZE, case.kv_heads, case.head_size]
    cache_type = dtype if case.cache_type == "float" else run_ort.ONNX_TYPES[case.cache_type]
    for layer in range(layers):
        caches = c.cache_names(layer, len(run_ort.caches(case)))
        for name, (past, _) in zip(run_ort.caches(case), caches, strict=True):
            values[name] = g.input(past, cache_type, shape)
        presents = [g.output(present, cache_type, shape) for _, present in caches]
        out = g.output(f"out{layer}", dtype, [c.NUM_TOKENS, case.num_heads * case.value_size])
        with g.scope(f"layers.{layer}"):
            g.node(
                "PagedAttention",
                [values.get(name, "") for name in run_ort.INPUT_NAMES],
                outputs=[out, *presents],
                domain=c.MICROSOFT,
                name="attention",
                **(run_ort.attributes(case) | attributes),
            )
    return g.build()


def feeds(
    case: Case, model: onnx.ModelProto, query_tile: int | None = None
) -> dict[str, NDArray[Any]]:
    """A case's values for the inputs that a model has, in its types."""
    tile = max(1, *case.new_lengths) if query_tile is None else query_tile
    values = run_ort.inputs(case) | {c.QUERY_TILE: np.zeros(tile, np.int8)}
    found = {}
    for info in model.graph.input:
        if info.name.startswith("past_key_values."):
            value = case.key_cache if info.name.endswith(".key") else case.value_cache
        else:
            value = values[info.name]
        kind = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        found[info.name] = value.astype(kind)
    return found


def run(
    model: onnx.ModelProto, inputs: Mapping[str, NDArray[Any]], library: Path | None = None
) -> dict[str, NDArray[Any]]:
    """Run on ONNX Runtime's CPU provider, in any type; returns outputs by name."""
    session = start(model, library)
    binding = session.io_binding()
    for info in model.graph.input:
        kind, value = info.type.tensor_type.elem_type, inputs[info.name]
        raw = value.view(np.uint16) if kind == TensorProto.BFLOAT16 else value
        ort_value = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, kind)
        binding.bind_ortvalue_input(info.name, ort_value)
    numpy_kinds = {}
    for info in model.graph.output:
        kind = info.type.tensor_type.elem_type
        numpy_kinds[info.name] = onnx.helper.tensor_dtype_to_np_dtype(kind)
        if kind == TensorProto.BFLOAT16:  # ORT's Python has no NumPy type to return it in
            past = inputs[info.name.replace("present", "past_key_values")]
            buffer = np.empty(past.shape, np.uint16)
            numpy_kinds[info.name] = buffer
            target = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(buffer, kind)
            binding.bind_ortvalue_output(info.name, target)
        else:
            binding.bind_output(info.name, "cpu")
    session.run_with_iobinding(binding)
    found = {}
    for info, value in zip(model.graph.output, binding.get_outputs(), strict=True):
        buffer = numpy_kinds[info.name]
        is_buffer = isinstance(buffer, np.ndarray)
        bfloat16 = onnx.helper.tensor_dtype_to_np_dtype(TensorProto.BFLOAT16)
        found[info.name] = buffer.view(bfloat16) if is_buffer else value.numpy()
    return found


def start(model: onnx.ModelProto, library: Path | None = None) -> ort.InferenceSession:
    """A session on the CPU, one thread, with our operators where their library is given."""
    options = ort.SessionOptions()
    if library is not None:
        options.register_custom_ops_library(str(library))
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
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
