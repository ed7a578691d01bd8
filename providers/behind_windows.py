"""Whether a device's own PagedAttention lets K/V behind a sliding window be anything.

Blocks behind a window are used again (`graphs.cache_groups`), so entries of the block table for
them are block 0, or blocks of others. A kernel that loads keys and values in tiles may load some of
these, and multiply them by weights of zero. Mostly that changes nothing; but what is no number
stays none, and takes the row with it. So this is tried with such, as `self_test` tries the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.graphs import attention_ops, contract, ops
from onnxport.graphs.block_transfers import CacheShape
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.paged import PagedAttentionNode, PagedInput
from onnxport.graphs.tensors import numpy_dtype
from onnxport.providers.device_blocks import DeviceBlocks, device_caches
from onnxport.providers.ort import Target, quiet_options, start_session
from onnxport.providers.self_test import OUT, QKV, TOLERANCE, TYPES, run_step

GIVEN_UP: Final = 2  # columns behind the window of the rows below
OLD: Final = 0  # block of what the window shows of the past
GONE: Final = 1  # block of what is behind it
OWN: Final = 2  # the first block that new tokens are written to
# The batches: new tokens of each row. Windows of the rows begin with a block, with the last token
# of one, and within one.
STEPS: Final = ((1, 1, 1), (5,), (70, 33), (1, 40, 1))


@dataclass(frozen=True, slots=True)
class _Case:
    """One kind of layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    window: int
    scale: float | None
    softcap: float
    has_sinks: bool
    block_size: int

    def rows(self, new: Sequence[int]) -> list[tuple[int, int]]:
        """New and past tokens of each row of a batch."""
        seen = self.window - 1 + GIVEN_UP * self.block_size
        offsets = (0, self.block_size - 1, self.block_size // 2)
        return [(count, seen + offset) for count, offset in zip(new, offsets, strict=False)]

    def columns(self, new: int, past: int) -> tuple[range, range]:
        """The columns that the window shows of the past, and those that are written."""
        first = (past - self.window + 1) // self.block_size
        return range(first, past // self.block_size), range(
            past // self.block_size, (past + new - 1) // self.block_size + 1
        )


def reads_behind_windows(
    target: Target, dtype: str, layers: Sequence[PagedAttentionNode], block_size: int
) -> str:
    """Return what of a device's PagedAttention keeps blocks from being used again; "" if nothing.

    Args:
        target: the device.
        dtype: of activations and cache: float16 or bfloat16.
        layers: of the model, in these types; those that have a window are tried.
        block_size: tokens of a block.
    """
    cases = {
        _Case(
            one.num_heads,
            one.kv_num_heads,
            one.head_size,
            one.local_window_size,
            one.scale,
            one.softcap,
            bool(one.input(PagedInput.HEAD_SINK)),
            block_size,
        )
        for one in layers
        if one.local_window_size is not None
    }
    for case in sorted(cases, key=str):
        if reason := _try(target, TYPES[dtype], case):
            return f"its PagedAttention {reason}"
    return ""


def _try(target: Target, kind: int, case: _Case) -> str:
    """What is wrong with one kind of layer."""
    try:
        outputs = _outputs(target, kind, case)
    except Exception as error:  # ONNX Runtime's own classes derive from Exception alone
        return f"could not be tried with a window of {case.window} tokens: {error}"
    with np.errstate(all="ignore"):  # what was found may be anything
        off = float(np.max([np.abs(kept - gone).max() for kept, gone in outputs]))
    if off <= TOLERANCE:
        return ""
    return (  # not-a-number comes here too
        f"reads behind a window of {case.window} tokens, in blocks of {case.block_size}: outputs "
        f"are off by {off:.2g} where there is no number, and {TOLERANCE} may be"
    )


def _outputs(
    target: Target, kind: int, case: _Case
) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Those of all STEPS: with numbers behind the window, and with none."""
    steps = [(_inputs(case, new, OLD), _inputs(case, new, GONE)) for new in STEPS]
    num_blocks = 1 + max(int(kept[contract.BLOCK_TABLE].max()) for kept, _ in steps)
    shape = CacheShape(1, case.num_kv_heads, case.head_size, kind)
    caches = device_caches(shape, num_blocks, case.block_size, target)
    blocks = DeviceBlocks(caches, shape, num_blocks, target)
    content = blocks.read([OLD, GONE])
    random = np.random.default_rng(1)
    content[0] = random.standard_normal(content[0].shape).astype(content.dtype)
    content[1] = np.nan
    blocks.write([OLD, GONE], content)
    session = start_session(_graph(kind, case).SerializeToString(), None, quiet_options(), target)
    binding = session.io_binding()
    for cache in caches:
        binding.bind_ortvalue_input(cache.input_name, cache.value)
        binding.bind_ortvalue_output(cache.output_name, cache.value)
    width = case.num_heads * case.head_size
    return [
        (run_step(session, binding, kept, width), run_step(session, binding, gone, width))
        for kept, gone in steps
    ]


def _inputs(case: _Case, new: Sequence[int], behind: int) -> dict[str, NDArray[Any]]:
    """What the graph takes in a step, by name and without the caches."""
    rows = case.rows(new)
    lengths = [count + past for count, past in rows]
    width = -(-max(lengths) // case.block_size)
    table = np.full((len(rows), width), behind, np.int32)
    own = OWN
    for row, (count, past) in enumerate(rows):
        shown, written = case.columns(count, past)
        table[row, shown.start : shown.stop] = OLD
        table[row, written.start : written.stop] = range(own, own + len(written))
        own += len(written)
    size = (sum(new), (case.num_heads + 2 * case.num_kv_heads) * case.head_size)
    return {
        QKV: np.random.default_rng(len(rows)).standard_normal(size).astype(np.float32),
        contract.CUMULATIVE_SEQUENCE_LENGTHS: np.cumsum([0, *new]).astype(np.int32),
        contract.PAST_SEQUENCE_LENGTHS: np.array([past for _, past in rows], np.int32),
        contract.BLOCK_TABLE: table,
        contract.ATTENTION_METADATA: np.array([max(new), max(lengths), max(lengths)], np.int32),
    }


def _graph(kind: int, case: _Case) -> onnx.ModelProto:
    """One PagedAttention in a type, between activations in float32."""
    g = GraphBuilder("behind_windows")
    int32, batch = TensorProto.INT32, contract.BATCH
    width = (case.num_heads + 2 * case.num_kv_heads) * case.head_size
    qkv = g.input(QKV, TensorProto.FLOAT, [contract.NUM_TOKENS, width])
    lengths = g.input(contract.CUMULATIVE_SEQUENCE_LENGTHS, int32, [contract.BATCH_PLUS_ONE])
    past = g.input(contract.PAST_SEQUENCE_LENGTHS, int32, [batch])
    table = g.input(contract.BLOCK_TABLE, int32, [batch, contract.MAX_NUM_BLOCKS])
    metadata = g.input(contract.ATTENTION_METADATA, int32, [3])
    dims: list[int | str] = [contract.NUM_BLOCKS, contract.BLOCK_SIZE]
    dims += [case.num_kv_heads, case.head_size]
    caches = tuple(
        (g.input(name, kind, dims), g.output(present, kind, dims))
        for name, present in contract.cache_names(0, 2)
    )
    sinks = np.zeros(case.num_heads, numpy_dtype(kind))
    attention = attention_ops.paged_attention(
        g,
        ops.cast(g, qkv, kind),
        caches,
        cumulative_sequence_lengths=lengths,
        past_sequence_lengths=past,
        block_table=table,
        attention_metadata=metadata,
        attributes=attention_ops.AttentionAttributes(
            num_heads=case.num_heads,
            kv_num_heads=case.num_kv_heads,
            scale=case.scale,
            softcap=case.softcap or None,
            local_window_size=case.window,
            do_rotary=False,
        ),
        sinks=g.constant(sinks, "sinks") if case.has_sinks else "",
    )
    g.output(OUT, TensorProto.FLOAT, [contract.NUM_TOKENS, case.num_heads * case.head_size])
    g.node("Cast", [attention], outputs=[OUT], to=TensorProto.FLOAT)
    return g.build()
