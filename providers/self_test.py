"""Whether a device's own PagedAttention can be trusted: a known answer, before it is used.

A kernel that a driver compiles badly returns wrong numbers, not errors. Layers with random content
are run on the device and, decomposed and in float32, on the CPU: a prompt of more than two blocks,
which is longer than the tiles of known kernels too, more of it, single tokens, and both kinds in
one batch. A model's own layers are tried, in its types, heads and blocks: what rotates of a head,
sliding windows, head sinks and softcaps make other kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.errors import ProviderError
from onnxport.graphs import attention_ops, contract, ops
from onnxport.graphs.block_transfers import CacheShape
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.inspect import initializers, producers
from onnxport.graphs.paged import PagedInput, attention_nodes, rotary_dim
from onnxport.graphs.passes.decompose import decompose
from onnxport.graphs.tensors import numpy_dtype
from onnxport.providers.device_blocks import device_caches
from onnxport.providers.ort import CPU, Target, quiet_options, start_session

NUM_BLOCKS: Final = 16
TABLES: Final = ((3, 1, 4, 15, 9, 7, 0, 11), (2, 6, 5, 8, 10, 12, 13, 14))  # blocks of the rows
QKV: Final = "qkv"
OUT: Final = "out"
SINKS: Final = (2.0, -1.0, 4.0, 0.5)  # logits of the heads in turn; what is seen has about 0
WINDOW: Final = 9  # tokens that a query sees, where a model has any window
# As much of a model as it takes to tell, so that a load takes little longer.
MOST_KV_HEADS: Final = 2
MOST_GROUP: Final = 8  # query heads of a KV head
MOST_BLOCK: Final = 256  # tokens
TYPES: Final = {"float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}
TOLERANCE: Final = 0.05  # of outputs that are about 1
# Measured where each operator rounds to it: 0.046, for numbers of 4 are rounded by 0.016.
BFLOAT16_TOLERANCE: Final = 0.15


@dataclass(frozen=True, slots=True)
class Tried:
    """A kind of layer."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_size: int = 32
    rotary_dim: int = 32  # channels of a head that rotate; 0: none do
    interleaved: bool = False  # RoPE
    softcap: float = 0.0  # 0: none
    window: int | None = None  # tokens that a query sees; None: all
    sinks: bool = False
    block_size: int = 16  # tokens

    @property
    def steps(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The batches, one after the other: new tokens and past tokens of every row."""
        long, short = max(70, 2 * self.block_size + 6), max(40, self.block_size + 8)
        return (
            ((long, 0),),
            ((33, long), (short, 0)),
            ((1, long + 33), (1, short)),
            ((1, long + 34), (20, short + 1)),
        )

    @property
    def width(self) -> int:
        """Of what a token brings: queries, keys and values."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_size


PLAIN: Final = (Tried(), Tried(window=WINDOW))  # where no model is known yet
# Runs all steps of a graph on a device; returns the outputs, float32 [tokens, heads * head_size].
Runner = Callable[[onnx.ModelProto, Tried], list[NDArray[np.float32]]]


def layers_like(model: onnx.ModelProto, block_size: int) -> tuple[Tried, ...]:
    """Return what to try for a model.

    Args:
        model: a paged graph.
        block_size: tokens of a block.
    """
    tables, makers = initializers(model), producers(model)
    found = set()
    for layer in attention_nodes(model):
        rotates = rotary_dim(layer, tables, makers) or 0 if layer.do_rotary else 0
        kv_heads = min(layer.kv_num_heads, MOST_KV_HEADS)
        group = min(layer.num_heads // layer.kv_num_heads, MOST_GROUP)
        found.add(
            Tried(
                num_heads=group * kv_heads,
                num_kv_heads=kv_heads,
                head_size=layer.head_size,
                rotary_dim=rotates,
                interleaved=layer.rotary_interleaved,
                softcap=layer.softcap,
                window=None if layer.local_window_size is None else WINDOW,
                sinks=bool(layer.input(PagedInput.HEAD_SINK)),
                block_size=min(block_size, MOST_BLOCK),
            )
        )
    return tuple(sorted(found, key=lambda tried: (tried.window is not None, str(tried))))


def distrust(target: Target, dtype: str, layers: Sequence[Tried] = PLAIN) -> str:
    """Return why the PagedAttention of a device is not to be used; "" where it may be.

    Args:
        target: the device.
        dtype: of activations and cache: float16 or bfloat16.
        layers: what to try.
    """
    kind = TYPES[dtype]
    return distrust_runner(partial(_run, kind=kind, target=target), kind, dtype, layers)


def distrust_runner(run: Runner, kind: int, dtype: str, layers: Iterable[Tried] = PLAIN) -> str:
    """Like `distrust`, of anything that runs a graph.

    Args:
        run: the device.
        kind: TensorProto type of the graph that it is given.
        dtype: in which the device computes.
        layers: see `distrust`.
    """
    for tried in layers:
        if reason := _distrust(run, kind, dtype, tried):
            return reason
    return ""


def _distrust(run: Runner, kind: int, dtype: str, tried: Tried) -> str:
    """See `distrust_runner`; of one kind of layer."""
    try:
        found = run(_graph(kind, tried), tried)
    except ProviderError as error:
        return f"it has no PagedAttention in {dtype} ({error})"
    except Exception as error:  # ONNX Runtime's own classes derive from Exception alone
        return f"its PagedAttention fails in {dtype}: {error}"
    reference = decompose(_graph(TensorProto.FLOAT, tried)).model
    expected = _run(reference, tried, kind=TensorProto.FLOAT, target=CPU)
    with np.errstate(all="ignore"):  # what was found may be anything
        off = float(np.max([np.abs(a - b).max() for a, b in zip(expected, found, strict=True)]))
    tolerance = BFLOAT16_TOLERANCE if dtype == "bfloat16" else TOLERANCE
    if off <= tolerance:
        return ""
    parts = [" with head sinks"] * tried.sinks + [" with a sliding window"] * bool(tried.window)
    return (  # not-a-number comes here too
        f"its PagedAttention computes wrongly here{''.join(parts)}: outputs of about 1 are off by "
        f"{off:.2g} in {dtype}, where {tolerance} may be, with {tried.num_heads} heads of "
        f"{tried.head_size} channels in blocks of {tried.block_size} tokens"
    )


def _graph(kind: int, tried: Tried) -> onnx.ModelProto:
    """One PagedAttention in a type, between activations in float32."""
    g = GraphBuilder("self_test")
    int32, batch = TensorProto.INT32, contract.BATCH
    qkv = g.input(QKV, TensorProto.FLOAT, [contract.NUM_TOKENS, tried.width])
    lengths = g.input(contract.CUMULATIVE_SEQUENCE_LENGTHS, int32, [contract.BATCH_PLUS_ONE])
    past = g.input(contract.PAST_SEQUENCE_LENGTHS, int32, [batch])
    table = g.input(contract.BLOCK_TABLE, int32, [batch, contract.MAX_NUM_BLOCKS])
    metadata = g.input(contract.ATTENTION_METADATA, int32, [3])
    dims: list[int | str] = [contract.NUM_BLOCKS, contract.BLOCK_SIZE]
    dims += [tried.num_kv_heads, tried.head_size]
    caches = tuple(
        (g.input(past, kind, dims), g.output(present, kind, dims))
        for past, present in contract.cache_names(0, 2)
    )
    typed = numpy_dtype(kind)
    positions = np.arange(max(new + past for rows in tried.steps for new, past in rows))
    angles = np.outer(positions, 0.1 ** np.linspace(0, 3, tried.rotary_dim // 2))
    sinks = np.resize(np.array(SINKS, typed), tried.num_heads)
    attention = attention_ops.paged_attention(
        g,
        ops.cast(g, qkv, kind),
        caches,
        cumulative_sequence_lengths=lengths,
        past_sequence_lengths=past,
        block_table=table,
        attention_metadata=metadata,
        attributes=attention_ops.AttentionAttributes(
            num_heads=tried.num_heads,
            kv_num_heads=tried.num_kv_heads,
            softcap=tried.softcap or None,
            local_window_size=tried.window,
            do_rotary=tried.rotary_dim > 0,
            rotary_interleaved=tried.interleaved,
        ),
        cos=g.constant(np.cos(angles).astype(typed), "cos") if tried.rotary_dim else "",
        sin=g.constant(np.sin(angles).astype(typed), "sin") if tried.rotary_dim else "",
        sinks=g.constant(sinks, "sinks") if tried.sinks else "",
    )
    g.output(OUT, TensorProto.FLOAT, [contract.NUM_TOKENS, tried.num_heads * tried.head_size])
    g.node("Cast", [attention], outputs=[OUT], to=TensorProto.FLOAT)
    return g.build()


def _run(
    model: onnx.ModelProto, tried: Tried, *, kind: int, target: Target
) -> list[NDArray[np.float32]]:
    """The outputs of all steps, float32 [tokens, heads * head_size]."""
    session = start_session(model.SerializeToString(), None, quiet_options(), target)
    shape = CacheShape(1, tried.num_kv_heads, tried.head_size, kind)
    binding = session.io_binding()
    for cache in device_caches(shape, NUM_BLOCKS, tried.block_size, target):
        binding.bind_ortvalue_input(cache.input_name, cache.value)
        binding.bind_ortvalue_output(cache.output_name, cache.value)
    width = tried.num_heads * tried.head_size
    return [run_step(session, binding, inputs, width) for inputs in step_inputs(tried)]


def step_inputs(tried: Tried) -> list[dict[str, NDArray[Any]]]:
    """What the graph takes in each of the steps, by name and without the caches."""
    random = np.random.default_rng(0)
    return [_inputs(rows, tried, random) for rows in tried.steps]


def _inputs(
    rows: tuple[tuple[int, int], ...], tried: Tried, random: np.random.Generator
) -> dict[str, NDArray[Any]]:
    new, past = zip(*rows, strict=True)
    total = [a + b for a, b in rows]
    return {
        QKV: random.standard_normal((sum(new), tried.width)).astype(np.float32),
        contract.CUMULATIVE_SEQUENCE_LENGTHS: np.cumsum([0, *new]).astype(np.int32),
        contract.PAST_SEQUENCE_LENGTHS: np.array(past, np.int32),
        contract.BLOCK_TABLE: np.array(TABLES[: len(rows)], np.int32),
        contract.ATTENTION_METADATA: np.array([max(new), max(total), max(total)], np.int32),
    }


def run_step(
    session: Any, binding: Any, inputs: dict[str, NDArray[Any]], width: int
) -> NDArray[np.float32]:
    """Run a graph of one layer; returns its output, float32 [num_tokens, width].

    Args:
        session: of the graph.
        binding: of the session, with its caches.
        inputs: by their names, in host memory.
        width: numbers of a token in the output.
    """
    for name, array in inputs.items():
        binding.bind_cpu_input(name, array)
    out = np.empty((len(inputs[QKV]), width), np.float32)
    binding.bind_output(OUT, "cpu", 0, np.float32, out.shape, out.ctypes.data)
    session.run_with_iobinding(binding)
    return out
