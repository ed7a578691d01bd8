"""Runs a case as a one-node ONNX model through ONNX Runtime, caches bound in place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from tests.kernels.reference import Case, from_layout, to_layout

ONNX_TYPES = {
    "float": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "int4": TensorProto.UINT8,
    "float8e4m3fn": TensorProto.FLOAT8E4M3FN,
}
INPUT_NAMES = (
    "query",
    "key",
    "value",
    "key_cache",
    "value_cache",
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "cos_cache",
    "sin_cache",
    "slot_mapping",
    "head_sink",
    "q_norm_weight",
    "k_norm_weight",
    "k_scale",
    "v_scale",
    "attention_metadata",
)
INT32_INPUTS = {
    "cumulative_sequence_length",
    "past_seqlens",
    "block_table",
    "slot_mapping",
    "attention_metadata",
}


def attributes(case: Case) -> dict[str, object]:
    """The node's attributes; those at their defaults are left out."""
    found: dict[str, object] = {"num_heads": case.num_heads, "kv_num_heads": case.kv_heads}
    if case.scale is not None:
        found["scale"] = case.scale
    if case.softcap:
        found["softcap"] = case.softcap
    if case.window is not None:
        found["local_window_size"] = case.window
    if case.chunked:
        found["local_window_chunked"] = 1
    if not case.causal:
        found["is_causal"] = 0
    if case.cosine is not None:
        found["do_rotary"] = 1
        found["rotary_interleaved"] = int(case.interleaved)
    if case.rotary_offset:
        found["rotary_offset"] = case.rotary_offset
    if case.q_norm is not None:
        found["qk_norm_epsilon"] = case.epsilon
    if case.latent:
        found |= {"kv_cache_layout": "LATENT", "v_head_size": case.latent}
    if case.layout != "canonical":
        found["cache_layout"] = case.layout
    if case.cache_type == "int8":
        found |= {"k_quant_type": "PER_TOKEN", "v_quant_type": "PER_TOKEN"}
        if case.latent:
            del found["v_quant_type"]
    if case.cache_type == "int4":
        found |= {"k_quant_type": "PER_GROUP", "v_quant_type": "PER_GROUP"}
    return found


def inputs(case: Case) -> dict[str, np.ndarray]:
    """The node's inputs but the caches, by schema name; absent ones are left out."""
    tokens = case.query.shape[0]
    query, key, value = (
        None if x is None else x.reshape(tokens, x.shape[1] * x.shape[2])
        for x in (case.query, case.key, case.value)
    )
    found: dict[str, np.ndarray | None] = {"query": query, "key": key, "value": value}
    if case.packed:
        found = {"query": np.concatenate([query, key, value], axis=1)}
    found |= {
        "cumulative_sequence_length": case.cumulative_lengths,
        "past_seqlens": np.array(case.past_lengths, np.int32),
        "block_table": case.block_table,
        "cos_cache": case.cosine,
        "sin_cache": case.sine,
        "slot_mapping": case.slot_mapping,
        "head_sink": case.head_sink,
        "q_norm_weight": case.q_norm,
        "k_norm_weight": case.k_norm,
        "attention_metadata": case.metadata,
    }
    return {name: np.ascontiguousarray(x) for name, x in found.items() if x is not None}


@lru_cache(maxsize=32)  # each has threads of its own
def session(
    library: Path,
    present: frozenset[str],
    cache_type: str,
    attribute_items: tuple[tuple[str, object], ...],
    threads: int,
) -> ort.InferenceSession:
    """A session over one node. All dimensions are symbolic, so it serves every shape."""
    names = [name if name in present else "" for name in INPUT_NAMES]
    while not names[-1]:
        names.pop()
    caches = [name for name in ("key_cache", "value_cache") if name in present]
    node = helper.make_node(
        "PagedAttention",
        names,
        ["output", *(f"{name}_out" for name in caches)],
        domain="com.microsoft",
        **dict(attribute_items),
    )
    ranks = {"key_cache": 4, "value_cache": 4, "k_scale": None, "v_scale": None}
    ranks |= dict.fromkeys(("query", "key", "value", "block_table", "cos_cache", "sin_cache"), 2)
    values = []
    for name in filter(None, names):
        rank = ranks.get(name, 1)
        kind = TensorProto.INT32 if name in INT32_INPUTS else TensorProto.FLOAT
        if name in caches:
            kind = ONNX_TYPES[cache_type]
        shape = None if rank is None else [f"{name}_{i}" for i in range(rank)]
        values.append(helper.make_tensor_value_info(name, kind, shape))
    results = [helper.make_tensor_value_info("output", TensorProto.FLOAT, ["tokens", "hidden"])]
    for name in caches:
        shape = [f"{name}_out_{i}" for i in range(4)]
        results.append(helper.make_tensor_value_info(f"{name}_out", ONNX_TYPES[cache_type], shape))
    graph = helper.make_graph([node], "paged_attention", values, results)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # errors are raised anyway
    options.register_custom_ops_library(str(library))
    return ort.InferenceSession(
        onnx.ModelProto.SerializeToString(model), options, providers=["CPUExecutionProvider"]
    )


def session_for(
    library: Path, case: Case, threads: int = 2, extra: Mapping[str, object] = MappingProxyType({})
) -> ort.InferenceSession:
    """The session that serves the case; `extra` replaces or adds node attributes."""
    present = frozenset((*inputs(case), *caches(case)))
    items = tuple(sorted((attributes(case) | dict(extra)).items()))
    return session(library, present, case.cache_type, items, threads)


def caches(case: Case) -> dict[str, np.ndarray]:
    """The caches by schema name, in canonical layout."""
    both = {"key_cache": case.key_cache, "value_cache": case.value_cache}
    return {name: cache for name, cache in both.items() if cache is not None}


def ort_value(array: np.ndarray, cache_type: str) -> ort.OrtValue:
    """An OrtValue over the array's own memory."""
    raw = array.view(np.uint16) if cache_type == "bfloat16" else array
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, ONNX_TYPES[cache_type])


def run(
    library: Path,
    case: Case,
    threads: int = 2,
    feeds: Mapping[str, np.ndarray] = MappingProxyType({}),
    in_place: bool = True,
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns the output and both caches afterwards, the caches in canonical layout; None: no such.

    `feeds` replaces inputs. Without `in_place` the cache outputs have memory of their own.
    """
    binding = session_for(library, case, threads).io_binding()
    # Not memory that a run before left, in which a number that nobody writes could be right.
    width = case.num_heads * case.value_size
    output = np.full((len(case.query), width), np.nan, np.float32)
    binding.bind_ortvalue_output("output", ort_value(output, "float"))
    for name, array in (inputs(case) | dict(feeds)).items():
        binding.bind_cpu_input(name, array)
    arrays, held = {}, []
    for name, canonical in caches(case).items():
        before = to_layout(canonical, case.memory_layout, name == "key_cache")
        after = before if in_place else np.zeros_like(before)
        held += [ort_value(before, case.cache_type), ort_value(after, case.cache_type)]
        binding.bind_ortvalue_input(name, held[-2])
        binding.bind_ortvalue_output(f"{name}_out", held[-1])
        arrays[name] = after
    session_for(library, case, threads).run_with_iobinding(binding)
    found = {
        name: from_layout(array, case.memory_layout, name == "key_cache")
        for name, array in arrays.items()
    }
    return output, found["key_cache"], found.get("value_cache")
