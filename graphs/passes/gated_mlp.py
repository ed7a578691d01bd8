"""Fuse a gated feed-forward layer into one operator of our own.

`onnxport.MatMulNBits`, `GatedSilu` and `MatMulNBits`, one after the other, write what is between
them to memory: for a few hundred tokens more than the layer's weights. `onnxport.GatedMlp` computes
the same bits and keeps it in the cache. For devices whose operator library has it, after
`fuse_gated_silu` and `use_int8_matmul`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import onnx

from onnxport.graphs.inspect import attribute_int, consumers
from onnxport.graphs.passes.gated_silu import DOMAIN, GATED_SILU
from onnxport.graphs.passes.int8_matmul import MATMUL_NBITS
from onnxport.graphs.passes.result import PassResult, copy_model

GATED_MLP: Final = "GatedMlp"  # [..., K] -> inner features, gated -> [..., N]


@dataclass(frozen=True, slots=True)
class _Mlp:
    gate_up: onnx.NodeProto
    silu: onnx.NodeProto
    down: onnx.NodeProto


def fuse_gated_mlp(model: onnx.ModelProto) -> PassResult:
    """Replace every `MatMulNBits, GatedSilu, MatMulNBits` of our own domain.

    A pattern fires only where nothing else reads what is between them: neither is a graph output
    or an input of another node, such as one that adds to a projection.
    """
    readers = {name: [node for node, _ in nodes] for name, nodes in consumers(model).items()}
    outputs = {info.name for info in model.graph.output}
    found = [mlp for node in model.graph.node if (mlp := _match(node, readers, outputs))]
    copy = copy_model(model)
    if not found:
        return PassResult("gated_mlp", copy, {})
    fused = {mlp.down.output[0]: mlp for mlp in found}
    dropped = {node.output[0] for mlp in found for node in (mlp.gate_up, mlp.silu)}
    nodes = [
        _node(fused[node.output[0]]) if node.output[0] in fused else node
        for node in model.graph.node
        if node.output[0] not in dropped
    ]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return PassResult("gated_mlp", copy, {"gated feed-forward layers fused": len(found)})


def _match(
    gate_up: onnx.NodeProto, readers: dict[str, list[onnx.NodeProto]], outputs: set[str]
) -> _Mlp | None:
    """The layer that starts at `gate_up`, if one does."""
    if not _is_ours(gate_up, MATMUL_NBITS):
        return None
    silu = _only_reader(gate_up, readers, outputs)
    if silu is None or not _is_ours(silu, GATED_SILU):
        return None
    down = _only_reader(silu, readers, outputs)
    if down is None or not _is_ours(down, MATMUL_NBITS) or down.input[0] != silu.output[0]:
        return None
    is_whole = attribute_int(gate_up, "N", 0) == 2 * attribute_int(down, "K", 0)
    return _Mlp(gate_up, silu, down) if is_whole else None


def _is_ours(node: onnx.NodeProto, kind: str) -> bool:
    return bool(node.op_type == kind and node.domain == DOMAIN)


def _only_reader(
    node: onnx.NodeProto, readers: dict[str, list[onnx.NodeProto]], outputs: set[str]
) -> onnx.NodeProto | None:
    """The node that alone reads what a node makes, if nothing else needs it."""
    output = node.output[0]
    found = readers.get(output, [])
    return found[0] if len(found) == 1 and output not in outputs else None


def _node(mlp: _Mlp) -> onnx.NodeProto:
    return onnx.helper.make_node(
        GATED_MLP,
        [*mlp.gate_up.input, *mlp.down.input[1:]],
        list(mlp.down.output),
        name=mlp.down.name,
        domain=DOMAIN,
        K=attribute_int(mlp.gate_up, "K", 0),
        inner=attribute_int(mlp.down, "K", 0),
        N=attribute_int(mlp.down, "N", 0),
        bits=attribute_int(mlp.gate_up, "bits", 0),
        block_size=attribute_int(mlp.gate_up, "block_size", 0),
        down_bits=attribute_int(mlp.down, "bits", 0),
        down_block_size=attribute_int(mlp.down, "block_size", 0),
    )
