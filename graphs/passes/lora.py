"""Let LoRA adapters, which are inputs of the graph, add to every projection of the decoder.

An adapter adds `(x A^T) B` to a projection of x. The rows of A, and of B with them, are those of
all adapters that a step uses, one below the other. Tokens of other adapters, and of none, must get
nothing from a row, so x A^T is 0 for them:

    own = Where(token_slots[:, None] == owners, Gemm(x, A, transB), 0)
    product = Gemm(own, B, x W)

It is chosen and not multiplied, because 0 times infinity is no number: an adapter that is too large
for the type would spoil the tokens of all others.

`owners` says which adapter a row belongs to. Where one product computes several projections, such
as queries, keys and values, a row of B is 0 outside its own projection's columns.

`add_lora` writes this in standard operators. `add_lora_operator` has one operator of our own for
it, for devices whose operator library has that: it reads only the rows that a token needs, from
slots that keep their place, and adds in place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import onnx
from onnx import TensorProto, helper

from onnxport.errors import ArtifactError
from onnxport.graphs import contract
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.inspect import attribute_int, element_types, initializers, names
from onnxport.graphs.lora import (
    CUT,
    INTEGERS,
    KINDS,
    RANKS,
    SCALES,
    TOKEN_SLOTS,
    WEIGHTS,
    Kind,
    LoraProduct,
    SlotDtype,
    owners_name,
    projection_shapes,
    projections_in,
    projections_of,
    slot_layout,
)
from onnxport.graphs.passes.gated_silu import DOMAIN, OPSET
from onnxport.graphs.passes.int8_matmul import BLOCK_SIZES
from onnxport.graphs.passes.paged_plan import SCOPE
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.spec import ArchSpec

ADD_LORA: Final = "AddLora"
PASSES: Final = ("lora", "lora_operator")  # what results of the two are called
SLOT_TYPES: Final[Mapping[SlotDtype, int]] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "int8": TensorProto.INT8,
    "int4": TensorProto.INT8,
}
PRODUCTS: Final = ("MatMul", "MatMulNBits")
_WEIGHT: Final = re.compile(r"layers\.(\d+)\.([a-z_.]+)\.weight(?:\.(\d+)_*)?")


@dataclass(frozen=True, slots=True)
class _Found:
    """A product in a graph."""

    product: LoraProduct
    node: onnx.NodeProto
    is_selected: bool  # its rows are those that need logits, not all tokens


def add_lora(model: onnx.ModelProto, spec: ArchSpec) -> PassResult:
    """Add the three nodes to each projection; their inputs are in the type of the activations.

    New inputs of the graph, with the names of graphs.lora: TOKEN_SLOTS, the owners of each kind of
    product, and A and B of each product. Their number of rows is dynamic, and at least 1.

    Args:
        model: A paged graph, in the types that the device computes in.
        spec: The model it is of.

    Raises:
        ArtifactError: The graph does not compute the projections of `spec`.
    """
    copy = copy_model(model)
    found = _find(copy, spec)
    types = element_types(copy)
    g = _builder(copy, found)
    g.input(TOKEN_SLOTS, TensorProto.INT32, [contract.NUM_TOKENS])
    masks = _Masks(g, types[found[0].node.input[0]])
    added: dict[str, list[onnx.NodeProto]] = {}  # output of a product -> what follows it
    for one in found:
        is_own = masks.mask(one.product.kind, is_selected=one.is_selected)
        result, base = _rename_output(one.node)
        a, b = _declare(g, one.product, spec, masks.dtype)
        masks.take()
        with g.scope(f"{one.product.name}.lora"):
            low = g.node("Gemm", [one.node.input[0], a], name="a", transB=1)
            own = g.node("Where", [is_own, low, masks.zero], name="own")
            g.node("Gemm", [own, b, base], outputs=[result], name="b")
        added[base] = g.take_nodes()
    _splice(copy, g, masks.nodes, added)
    return PassResult(PASSES[0], copy, {"products with LoRA": len(found)})


def add_lora_operator(
    model: onnx.ModelProto, spec: ArchSpec, max_rank: int, dtype: SlotDtype = "float32"
) -> PassResult:
    """Add the operator `onnxport.AddLora` to each projection.

    New inputs of the graph, with the names of graphs.lora: TOKEN_SLOTS, RANKS, WEIGHTS, and for
    adapters in integers SCALES.

    Args:
        model: A paged graph. Activations are float32 for `cpu`, and of the adapters' type for CUDA
            devices.
        spec: The model it is of.
        max_rank: The largest rank of an adapter, which sizes the slots.
        dtype: Of the adapters in their slots.

    Raises:
        ArtifactError: The graph does not compute the projections of `spec`.
    """
    copy = copy_model(model)
    found = _find(copy, spec)
    layout, numbers = slot_layout([one.product for one in found], spec, max_rank, dtype)
    g = _builder(copy, found)
    g.input(TOKEN_SLOTS, TensorProto.INT32, [contract.NUM_TOKENS])
    projections = projections_in(spec)
    ranks: list[int | str] = ["lora.ranks_rows", spec.num_layers, len(projections)]
    stored = [
        g.input(RANKS, TensorProto.INT32, ranks),
        g.input(WEIGHTS, SLOT_TYPES[dtype], ["lora.slots", numbers]),
    ]
    if dtype in INTEGERS:
        stored.append(g.input(SCALES, TensorProto.FLOAT, [*ranks, max_rank]))
    selected = ""
    if any(one.is_selected for one in found):
        with g.scope(f"{SCOPE}.lora"):
            selected = _selected_slots(g)
    first = g.take_nodes()
    added: dict[str, list[onnx.NodeProto]] = {}
    for one in found:
        product = one.product
        result, base = _rename_output(one.node)
        parts = product.out_features(spec)
        slots = selected if one.is_selected else TOKEN_SLOTS
        rounding = {
            "bits": product.bits,
            "block_size": product.block_size,
            "adapter_bits": 4 if dtype == "int4" else 8,
        }
        g.node(
            ADD_LORA,
            [base, one.node.input[0], slots, *stored],
            outputs=[result],
            domain=DOMAIN,
            name=f"{product.name}.lora",
            offset=layout[product],
            max_rank=max_rank,
            ranks=product.layer * len(projections) + projections.index(KINDS[product.kind][0]),
            **{f"columns{number}": part for number, part in enumerate((*parts, 0, 0)[:3])},
            **(rounding if dtype in INTEGERS else {}),
        )
        added[base] = g.take_nodes()
    _splice(copy, g, first, added)
    if DOMAIN not in {opset.domain for opset in copy.opset_import}:
        copy.opset_import.append(helper.make_opsetid(DOMAIN, OPSET))
    return PassResult(PASSES[1], copy, {"products with LoRA": len(found)})


def lora_products(model: onnx.ModelProto, spec: ArchSpec) -> list[LoraProduct]:
    """The products of a graph that adapters add to, in the order of the graph.

    It is the same before and after the passes above, which raise what this raises.
    """
    return [one.product for one in _find(model, spec)]


class _Masks:
    """Which stacked rows belong to the adapter of each token; computed once a step."""

    def __init__(self, g: GraphBuilder, dtype: int) -> None:
        self.dtype = dtype  # of activations
        self.zero = g.constant(np.zeros((), helper.tensor_dtype_to_np_dtype(dtype)), "lora.zero")
        self.nodes: list[onnx.NodeProto] = []
        self._g = g
        self._columns: dict[bool, str] = {}
        self._owners: dict[Kind, str] = {}
        self._made: dict[tuple[Kind, bool], str] = {}

    def mask(self, kind: Kind, *, is_selected: bool) -> str:
        """Whether a token and a row have the same adapter, bool [rows of the input, rows]."""
        g, key = self._g, (kind, is_selected)
        if kind not in self._owners:
            dims = [_rows(kind)]
            self._owners[kind] = g.input(owners_name(kind), TensorProto.INT32, dims)
        if key not in self._made:
            with g.scope(f"{SCOPE}.lora"):
                column = self._column(is_selected)
                self._made[key] = g.node("Equal", [column, self._owners[kind]], name=kind)
        return self._made[key]

    def take(self) -> None:
        """Move the nodes made since the last call here."""
        self.nodes += self._g.take_nodes()

    def _column(self, is_selected: bool) -> str:
        """The slot of each row of the input, as a column."""
        g = self._g
        if is_selected not in self._columns:
            slots = _selected_slots(g) if is_selected else TOKEN_SLOTS
            axis = g.constant(np.array([1], np.int64), "axis")
            self._columns[is_selected] = g.node("Unsqueeze", [slots, axis], name="slots.column")
        return self._columns[is_selected]


def _selected_slots(g: GraphBuilder) -> str:
    """The adapter slots of the rows that need logits."""
    return g.node("Gather", [TOKEN_SLOTS, contract.LOGITS_INDICES], name="slots.selected", axis=0)


def _rows(kind: Kind) -> str:
    return f"lora.{kind}.rows"


def _declare(g: GraphBuilder, product: LoraProduct, spec: ArchSpec, dtype: int) -> tuple[str, str]:
    """Declare A and B of a product."""
    rows = _rows(product.kind)
    a = g.input(product.a, dtype, [rows, product.in_features(spec)])
    return a, g.input(product.b, dtype, [rows, sum(product.out_features(spec))])


def _builder(model: onnx.ModelProto, found: list[_Found]) -> GraphBuilder:
    """A builder of nodes for a graph; they make the values that the products made."""
    g = GraphBuilder("lora")
    g.reserve(names(model) - {one.node.output[0] for one in found})
    return g


def _rename_output(node: onnx.NodeProto) -> tuple[str, str]:
    """Let a product return another value; returns the old name, which others read, and the new."""
    result = node.output[0]
    node.output[0] = f"{result}.base"
    return result, node.output[0]


def _find(model: onnx.ModelProto, spec: ArchSpec) -> list[_Found]:
    """Every product of the decoder's layers, in the order of the graph."""
    found = list(_products(model, spec))
    computed = [
        (one.product.layer, projection) for one in found for projection in KINDS[one.product.kind]
    ]
    wanted = {
        (layer, name) for layer in range(spec.num_layers) for name in projections_of(spec, layer)
    }
    if missing := sorted(wanted - set(computed)):
        layer, name = missing[0]
        raise ArtifactError(
            f"LoRA adapters need every projection as a product of its own or a joined one; "
            f"{len(missing)} of {len(wanted)} are not found in the graph, the first is {name} of "
            f"layer {layer}. Export the model again with this version"
        )
    assert len(computed) == len(wanted), "a projection is computed twice"
    return found


def _products(model: onnx.ModelProto, spec: ArchSpec) -> Iterator[_Found]:
    tensors = initializers(model)
    selected: set[str] = set()  # values whose rows are those that need logits
    for node in model.graph.node:
        is_selection = node.op_type == "Gather" and node.input[1] == contract.LOGITS_INDICES
        if is_selection or selected.intersection(node.input):
            selected.update(name for name in node.output if name)
        product = _product(node, tensors, spec) if node.op_type in PRODUCTS else None
        if product is not None:
            yield _Found(product, node, node.input[0] in selected)


def _product(
    node: onnx.NodeProto, tensors: Mapping[str, TensorProto], spec: ArchSpec
) -> LoraProduct | None:
    """Which product a node is; None for one that no adapter adds to."""
    match = _WEIGHT.fullmatch(node.input[1])
    if match is None or node.input[1] not in tensors:
        return None
    layer, role, first = int(match[1]), match[2], match[3]
    dims = list(tensors[node.input[1]].dims)
    if node.op_type == "MatMulNBits":
        dims = [attribute_int(node, "K", 0), attribute_int(node, "N", 0)]
    kind = next((name for name in KINDS if name == role), None)
    if kind is None:
        return None
    if first is not None and kind in CUT:
        kind = CUT[kind][int(first) // dims[1]]
    if not projection_shapes(spec, layer).keys() >= {*KINDS[kind]}:
        return None
    product = LoraProduct(layer, kind, *_rounding(node))
    wanted = [product.in_features(spec), sum(product.out_features(spec))]
    return product if dims == wanted else None


def _rounding(node: onnx.NodeProto) -> tuple[int, int]:
    """The bits and blocks in which activations are quantized for a product, if they are."""
    bits, block_size = attribute_int(node, "bits", 4), attribute_int(node, "block_size", 0)
    return (bits, block_size) if bits in (4, 8) and block_size in BLOCK_SIZES else (8, 128)


def _splice(
    model: onnx.ModelProto,
    g: GraphBuilder,
    first: list[onnx.NodeProto],
    added: Mapping[str, list[onnx.NodeProto]],
) -> None:
    """Put new nodes behind the products, the shared ones before all, and declare what they read."""
    nodes = list(first)
    for node in model.graph.node:
        nodes.append(node)
        nodes.extend(added.get(node.output[0], ()))
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(kept)
    built = g.build()
    model.graph.input.extend(built.graph.input)
    model.graph.initializer.extend(built.graph.initializer)
