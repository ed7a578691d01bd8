"""Compute a graph in another floating type: float32, float16 or bfloat16.

The artifact stores 16-bit activations, which a CPU is slow at, or float32 ones, which a GPU is
slow at. This changes every floating value of a graph to the type that a device is good at, and
removes the Cast nodes that lose their purpose. What is float32 beside 16-bit activations is so on
purpose and stays: the RoPE tables, cast once behind, and the logits. Where activations are float32,
so do the parts that graphs of 16 bits have between Casts (`graphs.float_islands`); they get these.

Weights that are stored as integers stay as they are; their scales change type with the
activations. Other initializers (norms, biases, scales, and the weights of MatMul and Gemm) are
read and converted, but for tables that are only gathered from (embeddings): towards float32 they
keep their 16-bit data, and the rows are cast. Converted initializers up to `INLINE_BYTES` become
part of the model; larger ones are returned beside it, because a protobuf ends at 2 GB, and take
memory of their own for as long as the session lives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import onnx
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxport.errors import ArtifactError
from onnxport.graphs import contract
from onnxport.graphs.float_islands import float_islands
from onnxport.graphs.inspect import (
    attribute_int,
    consumers,
    element_types,
    has_subgraphs,
    names,
    producers,
    set_attribute,
)
from onnxport.graphs.passes.result import PassResult, copy_model
from onnxport.graphs.tensors import convert, numpy_dtype

ReadTensor = Callable[[TensorProto], NDArray[Any]]
Read = tuple[onnx.NodeProto, int]  # a node and which of its inputs

INLINE_BYTES: Final = 64 << 10  # converted initializers up to this size go into the protobuf
HALF_TYPES: Final = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FLOAT_DTYPES: Final = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
}

# Attributes that hold an element type or a tensor, in the operators that `retype` rewrites.
_TYPED_OPS: Final = frozenset({"Cast", "Constant", "ConstantOfShape"})
_TYPE_ATTRIBUTES: Final = frozenset({"dtype", "to", "output_dtype"})

# Inputs and outputs of graphs that are float32 always; behind and ahead of them is a Cast.
_FLOAT_VALUES: Final = frozenset(
    [
        contract.LOGITS,
        contract.HIDDEN_STATES,
        contract.TARGET_HIDDEN_STATES,
        contract.DRAFT_HIDDEN_STATES,
        contract.LAST_HIDDEN_STATES,
    ]
)

# Attention operators: inputs that are cos and sin tables, and inputs that are float32 always.
_ROPE_INPUTS: Final = {"PagedAttention": (8, 9), "GroupQueryAttention": (7, 8)}
_FLOAT_INPUTS: Final = {"PagedAttention": (14, 15), "GroupQueryAttention": (12, 13)}


def retype(
    model: onnx.ModelProto,
    read_tensor: ReadTensor,
    dtype: str = "float32",
    *,
    keep_tables: bool = True,
    kept: Collection[str] = (),
) -> PassResult:
    """Change the floating values of a graph to one type.

    KV cache inputs and outputs change type too. The output `logits` is float32 afterwards, and
    hidden states that go in or come out stay that.
    A graph whose activations are of the type already is left as it is.

    Args:
        model: A graph without control flow.
        read_tensor: Returns an initializer's contents, such as `Artifact.read_tensor`.
        dtype: One of FLOAT_DTYPES.
        keep_tables: Keep 16-bit tables that are only gathered from; not on a device that has no
            16-bit floats at all.
        kept: Initializers that stay as they are: another pass replaces what reads them.

    Raises:
        ValueError: Another dtype.
        ArtifactError: The graph has subgraphs, an operator whose type attribute is not
            understood, or activations of unknown type; or a number is too large for the type.
    """
    if dtype not in FLOAT_DTYPES:
        raise ValueError(f"retype: {dtype!r} is not one of {sorted(FLOAT_DTYPES)}")
    if has_subgraphs(model.graph.node) or model.functions:
        raise ArtifactError("retype: the graph has control flow or functions; none is expected")
    retyper = _Retyper(copy_model(model), read_tensor, FLOAT_DTYPES[dtype])
    retyper.convert(keep_tables=keep_tables, left=kept)
    return PassResult(
        "retype", retyper.model, dict(retyper.changes), retyper.attached, retyper.sources
    )


def retyped_bytes(model: onnx.ModelProto, dtype: str, *, keep_tables: bool = True) -> int:
    """How much memory `retype` takes for the initializers that it converts, with nothing kept."""
    target = FLOAT_DTYPES[dtype]
    replaced, readers = _replaced_types(model, target), consumers(model)
    outputs = {info.name for info in model.graph.output}
    islands: frozenset[str] = frozenset()
    if TensorProto.FLOAT in replaced:
        islands = islands.union(*(island.made for island in float_islands(model)))
    count = 0
    for tensor in model.graph.initializer:
        every = readers.get(tensor.name, [])
        reads = [read for read in every if islands.isdisjoint(read[0].output)]
        if every and not reads:
            continue
        tables = _tables(reads, target, keep_tables=keep_tables)
        is_table = bool(tables) and len(tables) == len(reads) and tensor.name not in outputs
        if _changes(tensor, reads, replaced) and not is_table:
            count += math.prod(tensor.dims)
    return count * numpy_dtype(target).itemsize


def _replaced_types(model: onnx.ModelProto, target: int) -> frozenset[int]:
    """The types that `target` replaces; float32 among them where the activations are float32.

    The type of the activations is that of what attention reads, else of the graph's inputs.
    """
    halves = frozenset(HALF_TYPES) - {target}
    if target == TensorProto.FLOAT:
        return halves
    types = element_types(model)
    queries = {n.input[0] for n in model.graph.node if n.op_type in _ROPE_INPUTS}
    if unknown := sorted(name for name in queries if name not in types):
        raise ArtifactError(f"retype: the types of {unknown}, which attention reads, are unknown")
    activations = {types.get(name) for name in queries or {i.name for i in model.graph.input}}
    return halves | {TensorProto.FLOAT} if TensorProto.FLOAT in activations else halves


class _Retyper:
    """Converts one graph in place."""

    def __init__(self, model: onnx.ModelProto, read_tensor: ReadTensor, target: int) -> None:
        self.model = model
        self.changes: Counter[str] = Counter()
        self.attached: dict[str, NDArray[Any]] = {}
        self.sources: dict[str, TensorProto] = {}
        self._read_tensor = read_tensor
        self._target = target
        self._replaced = _replaced_types(model, target)
        self._taken = names(model)
        self._islands: frozenset[str] = frozenset()  # values that stay float32

    def convert(self, *, keep_tables: bool, left: Collection[str]) -> None:
        """Convert what the graph declares, stores and computes, in this order."""
        graph = self.model.graph
        self._keep_logits()
        if TensorProto.FLOAT in self._replaced:
            self._fence_islands()
        for info in (*graph.input, *graph.output, *graph.value_info):
            kind = info.type.tensor_type
            is_float = info.name in _FLOAT_VALUES or info.name in self._islands
            if not is_float and kind.elem_type in self._replaced:
                kind.elem_type = self._target
                self.changes["inputs and outputs"] += 1
        self._convert_initializers(keep_tables=keep_tables, left=left)
        for node in graph.node:
            if _FLOAT_VALUES.isdisjoint(node.output) and self._islands.isdisjoint(node.output):
                self._convert_attributes(node)
        self._remove_casts()

    def _keep_logits(self) -> None:
        """Have a Cast to float32 make the output `logits`."""
        kind = next(
            (i.type.tensor_type for i in self.model.graph.output if i.name == contract.LOGITS), None
        )
        if kind is None or kind.elem_type not in self._replaced | set(HALF_TYPES):
            return
        self.changes["inputs and outputs"] += kind.elem_type != TensorProto.FLOAT
        kind.elem_type = TensorProto.FLOAT
        producer = producers(self.model)[contract.LOGITS]
        if producer.op_type == "Cast":
            set_attribute(producer, "to", TensorProto.FLOAT)
            return
        inner = self._fresh(f"{contract.LOGITS}.uncast")
        for node in self.model.graph.node:
            for field in (node.input, node.output):
                field[:] = [inner if name == contract.LOGITS else name for name in field]
        cast = self._cast(inner, contract.LOGITS, TensorProto.FLOAT, "logits.cast")
        self.model.graph.node.append(cast)

    def _fence_islands(self) -> None:
        """Put a Cast ahead of each part that stays float32, and one behind."""
        found, graph = float_islands(self.model), self.model.graph
        types = element_types(self.model)
        homes = {name: island for island in found for name in island.made}
        floats = {name for name in homes if types.get(name) == TensorProto.FLOAT}
        casts: dict[tuple[str, int], str] = {}  # by what is cast, and to what
        nodes: list[onnx.NodeProto] = []

        def cast(source: str, to: int) -> str:
            if (source, to) not in casts:
                casts[source, to] = name = self._fresh(f"{source}.{_dtype_name(to)}")
                nodes.append(self._cast(source, name, to, f"{name}.cast"))
            return casts[source, to]

        for node in graph.node:
            home = homes.get(node.output[0])
            for index, name in enumerate(node.input):
                value = name
                if name in floats and homes[name] is not home:
                    value = cast(value, self._target)
                if home is not None and name == home.start:
                    value = cast(value, TensorProto.FLOAT)
                node.input[index] = value
            nodes.append(node)
        wide = {name for (_, to), name in casts.items() if to == TensorProto.FLOAT}
        self._islands = frozenset(homes) | wide
        if found:
            self.changes["parts kept in float32"] += len(found)
            _replace(graph.node, nodes)

    def _convert_initializers(self, *, keep_tables: bool, left: Collection[str]) -> None:
        """Convert initializers; kept tables are cast behind their Gather, or once, as a whole."""
        readers = consumers(self.model)
        outputs = {info.name for info in self.model.graph.output}
        kept: list[TensorProto] = []
        first: list[onnx.NodeProto] = []  # Casts of whole tables
        casts: dict[str, onnx.NodeProto] = {}  # name of a Gather's stored output -> Cast after it
        for tensor in self.model.graph.initializer:
            every = readers.get(tensor.name, [])
            reads = [read for read in every if self._islands.isdisjoint(read[0].output)]
            in_islands = len(reads) < len(every)
            is_left = tensor.name in left or (in_islands and not reads)
            if is_left or not _changes(tensor, every, self._replaced):
                kept.append(tensor)
                continue
            widens = self._target == TensorProto.FLOAT
            tables = _tables(reads, self._target, keep_tables=keep_tables)
            others = [read for read in reads if read not in tables]
            if widens:
                casts.update(self._cast_after(node) for node, _ in tables)
            elif tables:
                first.append(self._cast_table(tensor.name, tables))
            if tables:
                self.changes["gathered tables kept" if widens else "RoPE tables cast"] += 1
            if tables or in_islands:
                kept.append(tensor)
            if others or not tables or tensor.name in outputs:
                kept.append(self._converted(tensor, others, beside=bool(tables) or in_islands))
        nodes = list(first)
        for node in self.model.graph.node:
            nodes.append(node)
            nodes.extend(casts[name] for name in node.output if name in casts)
        _replace(self.model.graph.initializer, kept)
        _replace(self.model.graph.node, nodes)

    def _cast_after(self, gather: onnx.NodeProto) -> tuple[str, onnx.NodeProto]:
        """Let a Gather return the stored type, and cast its rows."""
        stored, name = self._fresh(f"{gather.output[0]}.stored"), gather.output[0]
        gather.output[0] = stored
        return stored, self._cast(stored, name, self._target, f"{gather.name}.cast")

    def _cast_table(self, name: str, reads: list[Read]) -> onnx.NodeProto:
        """Cast a float32 table once, for all that read it as a RoPE table."""
        cast = self._fresh(f"{name}.{_dtype_name(self._target)}")
        for node, index in reads:
            node.input[index] = cast
        return self._cast(name, cast, self._target, f"{cast}.cast")

    def _cast(self, source: str, result: str, to: int, name: str) -> onnx.NodeProto:
        return onnx.helper.make_node("Cast", [source], [result], name=self._fresh(name), to=to)

    def _converted(self, tensor: TensorProto, reads: list[Read], *, beside: bool) -> TensorProto:
        """The tensor in the target type, under a name of its own where the stored one is kept."""
        dtype = numpy_dtype(self._target)
        name = self._fresh(f"{tensor.name}.{_dtype_name(self._target)}") if beside else tensor.name
        value = convert(tensor.name, self._read_tensor(tensor), dtype)
        for node, index in reads:
            node.input[index] = name
        self.changes["initializers converted"] += 1
        if value.nbytes <= INLINE_BYTES:
            return numpy_helper.from_array(value, name)
        self.attached[name] = value
        self.sources[name] = source = TensorProto()
        source.CopyFrom(tensor)
        return external_placeholder(name, self._target, value.shape)

    def _convert_attributes(self, node: onnx.NodeProto) -> None:
        """Change the element types that a node's attributes name."""
        for attribute in list(node.attribute):
            is_type = attribute.name in _TYPE_ATTRIBUTES and attribute.i in self._replaced
            if not is_type and attribute.t.data_type not in self._replaced:
                continue
            if node.op_type not in _TYPED_OPS:
                raise ArtifactError(
                    f"retype: {node.op_type} {node.name!r} has a floating type in its attribute "
                    f"{attribute.name!r}, which is understood in {sorted(_TYPED_OPS)} only"
                )
            if is_type:
                set_attribute(node, attribute.name, self._target)
            else:
                stored = numpy_helper.to_array(attribute.t)
                value = convert(node.name or node.output[0], stored, numpy_dtype(self._target))
                attribute.t.CopyFrom(numpy_helper.from_array(value, attribute.t.name))
            self.changes["attributes"] += 1

    def _remove_casts(self) -> None:
        """Remove each Cast from the target type to itself; a graph output keeps its name."""
        graph, target = self.model.graph, self._target
        types = element_types(self.model)
        outputs = {info.name for info in graph.output}
        fixed = outputs | {entry.name for entry in (*graph.input, *graph.initializer)}
        renamed: dict[str, str] = {}
        nodes: list[onnx.NodeProto] = []
        made: dict[str, onnx.NodeProto] = {}
        for node in graph.node:
            for index, name in enumerate(node.input):
                node.input[index] = renamed.get(name, name)
            source = node.input[0] if node.input else ""
            useless = (
                node.op_type == "Cast"
                and attribute_int(node, "to", TensorProto.UNDEFINED) == target
                and types.get(source) == target
            )
            if useless and node.output[0] not in outputs:
                renamed[node.output[0]] = source
            elif useless and source not in fixed:
                producer = made[source]
                position = list(producer.output).index(source)
                producer.output[position] = node.output[0]
                renamed = {k: node.output[0] if v == source else v for k, v in renamed.items()}
                renamed[source] = node.output[0]
                for other in nodes:
                    for index, name in enumerate(other.input):
                        other.input[index] = renamed.get(name, name)
            else:
                nodes.append(node)
                made.update(dict.fromkeys(node.output, node))
                continue
            self.changes["casts removed"] += 1
        _replace(graph.node, nodes)

    def _fresh(self, name: str) -> str:
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name


def external_placeholder(name: str, data_type: int, dims: tuple[int, ...]) -> TensorProto:
    """An initializer whose contents are attached when a session is made; it names no file."""
    tensor = TensorProto(name=name, data_type=data_type, dims=dims)
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="attached-in-memory")
    return tensor


def _changes(tensor: TensorProto, reads: Sequence[Read], replaced: Collection[int]) -> bool:
    """Whether an initializer is of a type that is replaced, and no scale, which is float32."""
    is_scale = any(index in _FLOAT_INPUTS.get(node.op_type, ()) for node, index in reads)
    return tensor.data_type in replaced and not is_scale


def _tables(reads: Sequence[Read], target: int, *, keep_tables: bool) -> list[Read]:
    """Those that read an initializer as a table, which keeps its type."""
    widens = target == TensorProto.FLOAT
    keeps = _is_gathered if widens else _is_rope_table
    return [read for read in reads if keeps(*read) and (keep_tables or not widens)]


def _is_rope_table(node: onnx.NodeProto, index: int) -> bool:
    return index in _ROPE_INPUTS.get(node.op_type, ())


def _is_gathered(node: onnx.NodeProto, index: int) -> bool:
    return bool(node.op_type == "Gather" and index == 0)


def _dtype_name(data_type: int) -> str:
    return numpy_dtype(data_type).name


def _replace(field: Any, values: list[Any]) -> None:
    copies = []
    for value in values:
        copy = type(value)()
        copy.CopyFrom(value)
        copies.append(copy)
    del field[:]
    field.extend(copies)
