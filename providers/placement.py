"""Which execution provider really runs the nodes of a session, and which ought not to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

from onnxport.errors import ProviderError
from onnxport.providers.ort import CPU_EXECUTION_PROVIDER

if TYPE_CHECKING:
    import onnx

_MOVES: Final = frozenset({"MemcpyToHost", "MemcpyFromHost"})  # ONNX Runtime's own, between the two


def placement(session: Any) -> Mapping[str, int]:
    """How many nodes each execution provider really runs.

    A session must have been started by `start_session`. Execution providers that are built into
    ONNX Runtime before 1.28 do not tell theirs, only the CPU's are known there.
    """
    nodes: Counter[str] = Counter()
    for subgraph in session.get_provider_graph_assignment_info():
        nodes[subgraph.ep_name] += len(subgraph.get_nodes())
    return dict(nodes)


def host_operators(session: Any, model: onnx.ModelProto) -> Mapping[str, int]:
    """Operator type -> nodes that the CPU runs although a device should.

    Arithmetic with integers stays on the host on purpose: it sizes and places what the device
    does, its inputs come from there, and devices without int64 cannot do it. So does what all
    layers share, which is computed once a step (`graphs.passes.paged_plan`). Everything else
    works with activations.

    Args:
        session: started from `model` on a device.
        model: the lowered graph.
    """
    from onnx import TensorProto

    from onnxport.graphs.inspect import element_types, producers
    from onnxport.graphs.passes.paged_plan import SCOPE

    floats = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
    types, made = element_types(model), {node.name: node for node in model.graph.node}
    known = producers(model)
    found: Counter[str] = Counter()
    for node in _host_nodes(session):
        own = made.get(node.name)
        if own is None or own.op_type != node.op_type or not set(own.output) & known.keys():
            expected = node.op_type in _MOVES or node.op_type == "Cast"  # what ONNX Runtime adds
        else:
            is_plan = node.name.startswith(f"{SCOPE}.")
            expected = is_plan or all(types.get(name) not in floats for name in own.output)
        if not expected:
            found[node.op_type] += 1
    return dict(found)


def check_host_operators(
    found: Mapping[str, int], expected: Collection[str], allowed: Collection[str], device: str
) -> None:
    """Refuse what the host runs and nobody said it may.

    Args:
        found: what `host_operators` returned.
        expected: operator types that the device is known not to have.
        allowed: operator types that the user allowed, LoadOptions.allowed_on_host.
        device: the name of the provider.

    Raises:
        ProviderError: other operators are found.
    """
    wrong = {name: count for name, count in found.items() if name not in {*expected, *allowed}}
    if wrong:
        listed = ", ".join(f"{count} {name}" for name, count in sorted(wrong.items()))
        flags = " ".join(f"--allow-on-host {name}" for name in sorted(wrong))
        raise ProviderError(
            f"ONNX Runtime left {listed} to the CPU, which {device} should run: each step would "
            f"wait for copies in both directions. Use another version of its library or another "
            f"provider, or allow it with {flags}"
        )


def _host_nodes(session: Any) -> Iterator[Any]:
    for subgraph in session.get_provider_graph_assignment_info():
        if subgraph.ep_name == CPU_EXECUTION_PROVIDER:
            yield from subgraph.get_nodes()
