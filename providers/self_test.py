"""Whether a device's own PagedAttention can be trusted: a known answer, before it is used.

A kernel that a driver compiles badly returns wrong numbers, not errors. One layer with random
content is run on the device and, decomposed and in float32, on the CPU: a prompt that is longer
than the tiles of known kernels, more of it, single tokens, and both kinds in one batch; all that
with a sliding window too. Where a model has head sinks, so does the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.errors import ProviderError
from onnxport.graphs import contract, ops
from onnxport.graphs.block_transfers import CacheShape
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.passes.decompose import decompose
from onnxport.graphs.tensors import numpy_dtype
from onnxport.providers.device_blocks import device_caches
from onnxport.providers.ort import CPU, Target, quiet_options, start_session

HEADS: Final = 4
KV_HEADS: Final = 2
HEAD_SIZE: Final = 32
NUM_BLOCKS: Final = 16
REFERENCE_BLOCK_SIZE: Final = 16  # tokens; the numbers do not depend on it
QKV: Final = "qkv"
OUT: Final = "out"
WIDTH: Final = (HEADS + 2 * KV_HEADS) * HEAD_SIZE
SINKS: Final = (2.0, -1.0, 4.0, 0.5)  # logits of the heads; what is seen has about 0
TOLERANCE: Final = 0.05  # of outputs that are about 1; bfloat16 rounds such by 0.004
TYPES: Final = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
# Runs all STEPS of a graph on a device; returns the outputs, float32 [tokens, heads * head_size].
Runner = Callable[[onnx.ModelProto], list[NDArray[np.float32]]]
# The batches, one after the other: new tokens and past tokens of every row.
STEPS: Final = (((70, 0),), ((33, 70), (40, 0)), ((1, 103), (1, 40)), ((1, 104), (20, 41)))
WINDOWS: Final = (None, 9)  # tokens that a query sees; None: all
TABLES: Final = ((3, 1, 4, 15, 9, 7, 0, 11), (2, 6, 5, 8, 10, 12, 13, 14))  # blocks of the rows


def distrust(target: Target, dtype: str, block_size: int, *, sinks: bool = False) -> str:
    """Return why the PagedAttention of a device is not to be used; "" where it may be.

    Args:
        target: the device.
        dtype: of activations and cache: float16 or bfloat16.
        block_size: tokens of a block, at least 16.
        sinks: whether it is to be used with head sinks.
    """
    kind = TYPES[dtype]
    run = partial(_run, kind=kind, target=target, block_size=block_size)
    return distrust_runner(run, kind, dtype, sinks=sinks)


def distrust_runner(run: Runner, kind: int, dtype: str, *, sinks: bool = False) -> str:
    """Like `distrust`, of anything that runs a graph.

    Args:
        run: the device.
        kind: TensorProto type of the graph that it is given.
        dtype: in which the device computes.
        sinks: see `distrust`.
    """
    for window in WINDOWS:
        if reason := _distrust(run, kind, dtype, window, sinks=sinks):
            return reason
    return ""


def _distrust(run: Runner, kind: int, dtype: str, window: int | None, *, sinks: bool) -> str:
    """See `distrust_runner`; with one window."""
    try:
        found = run(_graph(kind, window, sinks=sinks))
    except ProviderError as error:
        return f"it has no PagedAttention in {dtype} ({error})"
    except Exception as error:  # ONNX Runtime's own classes derive from Exception alone
        return f"its PagedAttention fails in {dtype}: {error}"
    reference = decompose(_graph(TensorProto.FLOAT, window, sinks=sinks)).model
    expected = _run(reference, TensorProto.FLOAT, CPU, REFERENCE_BLOCK_SIZE)
    with np.errstate(all="ignore"):  # what was found may be anything
        off = float(np.max([np.abs(a - b).max() for a, b in zip(expected, found, strict=True)]))
    if off <= TOLERANCE:
        return ""
    where = f"{' with head sinks' if sinks else ''}{' with a sliding window' if window else ''}"
    return (  # not-a-number comes here too
        f"its PagedAttention computes wrongly here{where}: outputs of about 1 are off by {off:.2g} "
        f"in {dtype}, where {TOLERANCE} may be"
    )


def _graph(kind: int, window: int | None, *, sinks: bool = False) -> onnx.ModelProto:
    """One PagedAttention in a type, between activations in float32."""
    g = GraphBuilder("self_test")
    int32, batch = TensorProto.INT32, contract.BATCH
    qkv = g.input(QKV, TensorProto.FLOAT, [contract.NUM_TOKENS, WIDTH])
    lengths = g.input(contract.CUMULATIVE_SEQUENCE_LENGTHS, int32, [contract.BATCH_PLUS_ONE])
    past = g.input(contract.PAST_SEQUENCE_LENGTHS, int32, [batch])
    table = g.input(contract.BLOCK_TABLE, int32, [batch, contract.MAX_NUM_BLOCKS])
    metadata = g.input(contract.ATTENTION_METADATA, int32, [3])
    dims: list[int | str] = [contract.NUM_BLOCKS, contract.BLOCK_SIZE, KV_HEADS, HEAD_SIZE]
    key, value = (g.input(name(0), kind, dims) for name in (contract.past_key, contract.past_value))
    presents = (
        g.output(contract.present_key(0), kind, dims),
        g.output(contract.present_value(0), kind, dims),
    )
    angles = np.outer(np.arange(128), 0.1 ** np.linspace(0, 3, HEAD_SIZE // 2))
    typed = numpy_dtype(kind)
    attention = ops.paged_attention(
        g,
        ops.cast(g, qkv, kind),
        key,
        value,
        presents,
        cumulative_sequence_lengths=lengths,
        past_sequence_lengths=past,
        block_table=table,
        attention_metadata=metadata,
        attributes=ops.AttentionAttributes(
            num_heads=HEADS, kv_num_heads=KV_HEADS, local_window_size=window
        ),
        cos=g.constant(np.cos(angles).astype(typed), "cos"),
        sin=g.constant(np.sin(angles).astype(typed), "sin"),
        sinks=g.constant(np.array(SINKS, typed), "sinks") if sinks else "",
    )
    g.output(OUT, TensorProto.FLOAT, [contract.NUM_TOKENS, HEADS * HEAD_SIZE])
    g.node("Cast", [attention], outputs=[OUT], to=TensorProto.FLOAT)
    return g.build()


def _run(
    model: onnx.ModelProto, kind: int, target: Target, block_size: int
) -> list[NDArray[np.float32]]:
    """The outputs of all steps, float32 [tokens, heads * head_size]."""
    session = start_session(model.SerializeToString(), None, quiet_options(), target)
    shape = CacheShape(1, KV_HEADS, HEAD_SIZE, kind)
    binding = session.io_binding()
    for cache in device_caches(shape, NUM_BLOCKS, block_size, target):
        binding.bind_ortvalue_input(cache.input_name, cache.value)
        binding.bind_ortvalue_output(cache.output_name, cache.value)
    return [_step(session, binding, inputs) for inputs in step_inputs()]


def step_inputs() -> list[dict[str, NDArray[Any]]]:
    """What the graph takes in each of the STEPS, by name and without the caches."""
    random = np.random.default_rng(0)
    return [_inputs(rows, random) for rows in STEPS]


def _inputs(
    rows: tuple[tuple[int, int], ...], random: np.random.Generator
) -> dict[str, NDArray[Any]]:
    new, past = zip(*rows, strict=True)
    total = [a + b for a, b in rows]
    return {
        QKV: random.standard_normal((sum(new), WIDTH)).astype(np.float32),
        contract.CUMULATIVE_SEQUENCE_LENGTHS: np.cumsum([0, *new]).astype(np.int32),
        contract.PAST_SEQUENCE_LENGTHS: np.array(past, np.int32),
        contract.BLOCK_TABLE: np.array(TABLES[: len(rows)], np.int32),
        contract.ATTENTION_METADATA: np.array([max(new), max(total), min(total)], np.int32),
    }


def _step(session: Any, binding: Any, inputs: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    out = np.empty((len(inputs[QKV]), HEADS * HEAD_SIZE), np.float32)
    binding.bind_output(OUT, "cpu", 0, np.float32, out.shape, out.ctypes.data)
    session.run_with_iobinding(binding)
    return out
