"""Build an ONNX graph node by node, with unique readable names and no boilerplate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from onnxport.graphs import contract
from onnxport.graphs.inspect import has_powers
from onnxport.graphs.tensors import TensorRef
from onnxport.version import __version__

Dims = Sequence[int | str]  # a string is a symbolic dimension


class GraphBuilder:
    """Collects inputs, outputs, initializers and nodes of one graph.

    A value is its name, a `str`; the empty string is an omitted optional input. Names made here
    are `<scope>.<name>`; a name that is taken gets a number. Nodes and values may share a name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._inputs: list[onnx.ValueInfoProto] = []
        self._outputs: list[onnx.ValueInfoProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._weights: dict[str, TensorRef] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._nodes: list[onnx.NodeProto] = []
        self._taken: set[str] = set()  # value names
        self._node_names: set[str] = set()
        self._scopes: list[str] = []

    @contextmanager
    def scope(self, name: str, *, root: bool = False) -> Iterator[None]:
        """Prefix the names made inside with `name` and a dot; scopes nest, but for `root`."""
        outer = self._scopes
        self._scopes = [name] if root else [*outer, name]
        try:
            yield
        finally:
            self._scopes = outer

    def input(self, name: str, dtype: int, dims: Dims) -> str:
        """Declare a graph input of ONNX element type `dtype`; returns its name."""
        self._inputs.append(helper.make_tensor_value_info(self._claim(name), dtype, dims))
        return name

    def output(self, name: str, dtype: int, dims: Dims | None) -> str:
        """Declare a graph output, of any shape if None; a node must produce the value `name`."""
        self._outputs.append(helper.make_tensor_value_info(name, dtype, dims))
        return name

    def constant(self, value: NDArray[Any], name: str = "constant") -> str:
        """A small tensor stored inline; equal tensors are stored once."""
        value = np.asarray(value)
        key = (value.dtype.name, value.shape, value.tobytes())
        if key not in self._constants:
            unique = self._unique(name, self._taken)
            self._initializers.append(numpy_helper.from_array(np.ascontiguousarray(value), unique))
            self._initializers[-1].dims[:] = value.shape  # ascontiguousarray makes 0-d into 1-d
            self._constants[key] = unique
        return self._constants[key]

    def weight(self, ref: TensorRef) -> str:
        """Declare a tensor of the weights file; the same one may be declared again."""
        known = self._weights.get(ref.name)
        if known is None:
            self._weights[self._claim(ref.name)] = ref
            self._initializers.append(ref.initializer())
        else:
            assert known == ref, f"weight {ref.name} declared as {known} and as {ref}"
        return ref.name

    @overload
    def node(
        self,
        op_type: str,
        inputs: Sequence[str],
        *,
        outputs: None = None,
        domain: str = "",
        name: str | None = None,
        **attributes: Any,
    ) -> str: ...

    @overload
    def node(
        self,
        op_type: str,
        inputs: Sequence[str],
        *,
        outputs: int | Sequence[str],
        domain: str = "",
        name: str | None = None,
        **attributes: Any,
    ) -> tuple[str, ...]: ...

    def node(
        self,
        op_type: str,
        inputs: Sequence[str],
        *,
        outputs: int | Sequence[str] | None = None,
        domain: str = "",
        name: str | None = None,
        **attributes: Any,
    ) -> str | tuple[str, ...]:
        """Append a node.

        Args:
            op_type: Operator, such as "MatMul".
            inputs: Value names; trailing empty ones are dropped.
            outputs: None for one output with a made-up name, which is returned as a string. A
                number, or names to use as they are, returns a tuple; "" is an unused output, and
                a name that starts with a dot is appended to the node's own.
            domain: Operator domain, such as `contract.MICROSOFT`.
            name: Node name, before scoping; the operator type if None.
            **attributes: Operator attributes; those that are None are left out.
        """
        unique = self._unique(name or op_type, self._node_names)
        names: list[str]
        if outputs is None:
            names = [f"{unique}.out"]
        elif isinstance(outputs, int):
            names = [f"{unique}.out{index}" for index in range(outputs)]
        else:
            names = [f"{unique}{out}" if out.startswith(".") else out for out in outputs]
        for output in names:
            if output:
                self._claim(output)
        kept = list(inputs)
        while kept and not kept[-1]:
            kept.pop()
        given: Mapping[str, Any] = {k: v for k, v in attributes.items() if v is not None}
        self._nodes.append(
            helper.make_node(op_type, kept, names, name=unique, domain=domain, **given)
        )
        return names[0] if outputs is None else tuple(names)

    def declare(self, name: str) -> str:
        """A name for an initializer that is declared elsewhere, scoped and unique."""
        return self._unique(name, self._taken)

    def reserve(self, names: Iterable[str]) -> None:
        """Never make these names: those of a model that the nodes will be spliced into."""
        names = set(names)
        self._taken |= names
        self._node_names |= names

    def take_nodes(self) -> list[onnx.NodeProto]:
        """The nodes made since the last call; they are no longer this builder's."""
        nodes, self._nodes = self._nodes, []
        return nodes

    def take_initializers(self) -> list[onnx.TensorProto]:
        """The initializers made since the last call; their names stay valid."""
        initializers, self._initializers = self._initializers, []
        return initializers

    def build(self) -> onnx.ModelProto:
        """The model, with the contract's opsets and IR version."""
        graph = helper.make_graph(
            self._nodes, self._name, self._inputs, self._outputs, self._initializers
        )
        model = helper.make_model(
            graph,
            opset_imports=[
                helper.make_opsetid("", contract.ONNX_OPSET),
                helper.make_opsetid(contract.MICROSOFT, contract.MICROSOFT_OPSET),
            ],
            ir_version=contract.IR_VERSION,
            producer_name="onnxport",
            producer_version=__version__,
        )
        if has_powers(model):
            model.ir_version = contract.IR_VERSION_POWERS
        return model

    def _unique(self, name: str, taken: set[str]) -> str:
        base = ".".join((*self._scopes, name))
        candidate, number = base, 1
        while candidate in taken:
            number += 1
            candidate = f"{base}_{number}"
        taken.add(candidate)
        return candidate

    def _claim(self, name: str) -> str:
        assert name not in self._taken, f"the name {name!r} is used twice in graph {self._name}"
        self._taken.add(name)
        return name
