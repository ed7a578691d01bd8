"""Fuse a gated feed-forward layer into one operator of our own.

`onnxport.MatMulNBits`, `GatedSilu` or `GatedGelu`, and `MatMulNBits` write what is between
them to memory: for a few hundred tokens more than the layer's weights. `onnxport.GatedMlp` computes
the same bits and keeps it in the cache. For devices whose operator library has it, after
`fuse_gated_silu`, `fuse_gated_gelu` and `use_int8_matmul`.

It takes in the `AddLora` behind both products, too, where adapters are integers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import onnx

from onnxport.graphs.inspect import attribute_int, consumers, input_at, set_input
from onnxport.graphs.passes.gated_gelu import GATED_GELU
from onnxport.graphs.passes.gated_silu import DOMAIN, GATED_SILU
from onnxport.graphs.passes.int8_matmul import MATMUL_NBITS, OFFSETS, ZERO_POINTS
from onnxport.graphs.passes.lora import ADD_LORA
from onnxport.graphs.passes.result import PassResult, copy_model

GATED_MLP: Final = "GatedMlp"  # [..., K] -> inner features, gated -> [..., N]
NORM_INPUT: Final = 5  # skip and gamma, see graphs.passes.input_norm; adapters come behind them
ADAPTERS_INPUT: Final = 7
MLP_ZERO_POINTS: Final = (11, 12)  # of gate and up, and of down
MLP_OFFSETS: Final = (13, 14)  # likewise
_INTEGER_LORA_INPUTS: Final = 6  # of AddLora, with scales
_GATES: Final = (GATED_SILU, GATED_GELU)


@dataclass(frozen=True, slots=True)
class _Mlp:
    gate_up: onnx.NodeProto
    gate: onnx.NodeProto
    down: onnx.NodeProto
    adapters: tuple[onnx.NodeProto, onnx.NodeProto] | None  # AddLora of gate_up, and of down

    @property
    def last(self) -> onnx.NodeProto:
        """The node that returns what the layer does."""
        return self.adapters[1] if self.adapters else self.down


def fuse_gated_mlp(model: onnx.ModelProto) -> PassResult:
    """Replace every `MatMulNBits, GatedSilu or GatedGelu, MatMulNBits` of our own domain.

    Either both products have an `AddLora` behind them, with the same adapters in integers, or none
    has.
    A pattern fires only where nothing else reads what is between its nodes: neither is a graph
    output or an input of another node, such as one that adds to a projection.
    """
    graph = _Graph(model)
    found = [mlp for node in model.graph.node if (mlp := _match(node, graph))]
    copy = copy_model(model)
    if not found:
        return PassResult("gated_mlp", copy, {})
    fused = {mlp.last.output[0]: mlp for mlp in found}
    dropped = {
        node.output[0]
        for mlp in found
        for node in (mlp.gate_up, mlp.gate, mlp.down, *(mlp.adapters or ()))
    } - fused.keys()
    nodes = [
        _node(fused[node.output[0]]) if node.output[0] in fused else node
        for node in model.graph.node
        if node.output[0] not in dropped
    ]
    del copy.graph.node[:]
    copy.graph.node.extend(nodes)
    return PassResult("gated_mlp", copy, {"gated feed-forward layers fused": len(found)})


def zero_point_bytes(model: onnx.ModelProto) -> int:
    """What our products and layers keep of zero points besides what is stored: two bytes each.

    Offsets take what they do in the file.
    """
    total = 0
    for node in model.graph.node:
        if not _is_ours(node, MATMUL_NBITS, GATED_MLP):
            continue
        depth, rows, inner, size = (
            attribute_int(node, name, 0) for name in ("K", "N", "inner", "block_size")
        )
        if node.op_type == MATMUL_NBITS:
            parts = [(ZERO_POINTS, rows, depth, size)]
        else:
            down_size = attribute_int(node, "down_block_size", 0)
            first, second = MLP_ZERO_POINTS
            parts = [(first, 2 * inner, depth, size), (second, rows, inner, down_size)]
        total += sum(2 * n * -(-k // block) for at, n, k, block in parts if input_at(node, at))
    return total


class _Graph:
    """Who reads what."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._readers = consumers(model)
        self._outputs = {info.name for info in model.graph.output}

    def readers(self, node: onnx.NodeProto) -> list[tuple[onnx.NodeProto, int]]:
        """All nodes that read what a node makes, and where; none if others need it, too."""
        output = node.output[0]
        return [] if output in self._outputs else self._readers.get(output, [])

    def only_reader(self, node: onnx.NodeProto) -> onnx.NodeProto | None:
        """The node that alone reads what a node makes, as its first input."""
        found = self.readers(node)
        return found[0][0] if len(found) == 1 and found[0][1] == 0 else None


def _match(gate_up: onnx.NodeProto, graph: _Graph) -> _Mlp | None:
    """The layer that starts at `gate_up`, if one does."""
    if not _is_ours(gate_up, MATMUL_NBITS):
        return None
    follower = graph.only_reader(gate_up)
    first = follower if follower is not None and adds_integer_adapters(follower, gate_up) else None
    gate = graph.only_reader(first) if first is not None else follower
    if gate is None or not _is_ours(gate, *_GATES) or not graph.readers(gate):
        return None
    (down, at), *others = graph.readers(gate)
    inner = attribute_int(down, "K", 0)
    is_whole = attribute_int(gate_up, "N", 0) == 2 * inner
    if not _is_ours(down, MATMUL_NBITS) or at != 0 or not is_whole:
        return None
    if any(name for one in (gate_up, down) for name in one.input[3:ZERO_POINTS]):
        return None
    if first is None:
        return None if others else _Mlp(gate_up, gate, down, None)
    second = graph.only_reader(down)
    if second is None or others != [(second, 1)] or not adds_integer_adapters(second, down):
        return None
    are_alike = first.input[2:] == second.input[2:] and (
        adapter_attributes(first) == adapter_attributes(second)
    )
    columns = (_columns(first), _columns(second))
    if not are_alike or columns != ([inner, inner, 0], [attribute_int(down, "N", 0), 0, 0]):
        return None
    return _Mlp(gate_up, gate, down, (first, second))


def adds_integer_adapters(node: onnx.NodeProto, product: onnx.NodeProto) -> bool:
    """Whether a node is an `AddLora` of what adapters in integers make of a product's own input.

    They read it as the product does, rounded in the same way.
    """
    return (
        _is_ours(node, ADD_LORA)
        and len(node.input) == _INTEGER_LORA_INPUTS
        and node.input[1] == product.input[0]
        and all(
            attribute_int(node, name, 0) == attribute_int(product, name, 0)
            for name in ("bits", "block_size")
        )
    )


def adapter_attributes(adding: onnx.NodeProto) -> dict[str, int]:
    """The attributes of an `AddLora` that say what adapters in integers are."""
    return {
        "max_rank": attribute_int(adding, "max_rank", 0),
        "adapter_bits": attribute_int(adding, "adapter_bits", 8),
    }


def _columns(adding: onnx.NodeProto) -> list[int]:
    return [attribute_int(adding, f"columns{part}", 0) for part in range(3)]


def _is_ours(node: onnx.NodeProto, *kinds: str) -> bool:
    return bool(node.op_type in kinds and node.domain == DOMAIN)


def _node(mlp: _Mlp) -> onnx.NodeProto:
    inputs = [*mlp.gate_up.input[:3], *mlp.down.input[1:3]]
    attributes = {"is_gelu": 1} if mlp.gate.op_type == GATED_GELU else {}
    if mlp.adapters:
        first, second = mlp.adapters
        inputs += [""] * (ADAPTERS_INPUT - len(inputs)) + list(first.input[2:])
        attributes |= adapter_attributes(first)
        for name, adding in (("gate_up", first), ("down", second)):
            attributes[f"{name}_offset"] = attribute_int(adding, "offset", 0)
            attributes[f"{name}_ranks"] = attribute_int(adding, "ranks", 0)
    node = onnx.helper.make_node(
        GATED_MLP,
        inputs,
        list(mlp.last.output),
        name=mlp.down.name,
        domain=DOMAIN,
        K=attribute_int(mlp.gate_up, "K", 0),
        inner=attribute_int(mlp.down, "K", 0),
        N=attribute_int(mlp.down, "N", 0),
        bits=attribute_int(mlp.gate_up, "bits", 0),
        block_size=attribute_int(mlp.gate_up, "block_size", 0),
        down_bits=attribute_int(mlp.down, "bits", 0),
        down_block_size=attribute_int(mlp.down, "block_size", 0),
        **attributes,
    )
    for source, places in ((ZERO_POINTS, MLP_ZERO_POINTS), (OFFSETS, MLP_OFFSETS)):
        for product, place in zip((mlp.gate_up, mlp.down), places, strict=True):
            if name := input_at(product, source):
                set_input(node, place, name)
    return node
