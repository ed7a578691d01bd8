"""What the host runs for a device: bookkeeping is expected there, arithmetic is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from onnxport.errors import ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.passes.decompose import decompose
from onnxport.providers.placement import check_host_operators, host_operators, placement
from tests.providers.conftest import ArtifactMaker


def session(**nodes: list[tuple[str, str]]) -> Any:
    """A session that says it runs (name, operator) nodes on execution providers."""

    def subgraph(ep: str, found: list[tuple[str, str]]) -> Any:
        made = [SimpleNamespace(name=name, op_type=kind) for name, kind in found]
        return SimpleNamespace(ep_name=ep, get_nodes=lambda: made)

    graphs = [subgraph(ep, [node]) for ep, found in nodes.items() for node in found]
    return SimpleNamespace(get_provider_graph_assignment_info=lambda: graphs)


@pytest.fixture(scope="module")
def model(tiny_artifact: ArtifactMaker) -> Any:
    return decompose(Artifact.read(tiny_artifact("llama", "int4")).load_graph("paged")).model


def test_nodes_are_counted_by_execution_provider() -> None:
    found = session(Cpu=[("a", "Add"), ("b", "Mul")], Gpu=[("c", "MatMul")])
    assert placement(found) == {"Cpu": 2, "Gpu": 1}


def test_the_plan_and_integers_may_stay_on_the_host(model: Any) -> None:
    plan = [n for n in model.graph.node if n.name.startswith("paged.")]
    assert len(plan) > 20
    nodes = [(n.name, n.op_type) for n in plan]
    nodes += [("Memcpy", "MemcpyFromHost"), ("Memcpy_1", "MemcpyToHost"), ("InsertedCast", "Cast")]
    assert host_operators(session(CPUExecutionProvider=nodes), model) == {}


def test_what_works_with_activations_is_named(model: Any) -> None:
    wanted = ("MatMulNBits", "ScatterND", "Softmax", "GatherBlockQuantized")
    nodes = [(n.name, n.op_type) for n in model.graph.node if n.op_type in wanted]
    found = host_operators(session(CPUExecutionProvider=nodes), model)
    assert set(found) == set(wanted)
    assert sum(found.values()) == len(nodes)
    assert host_operators(session(OtherExecutionProvider=nodes), model) == {}
    unknown = session(CPUExecutionProvider=[("fused", "FusedMatMul")])  # not of the lowered graph
    assert host_operators(unknown, model) == {"FusedMatMul": 1}


def test_only_what_is_expected_or_allowed_passes() -> None:
    found = {"GatherBlockQuantized": 1, "Softmax": 2}
    check_host_operators({}, (), (), "webgpu")
    check_host_operators(found, ("GatherBlockQuantized",), ("Softmax",), "webgpu")
    check_host_operators(found, (), ("Softmax", "GatherBlockQuantized"), "webgpu")
    with pytest.raises(ProviderError, match=r"2 Softmax to the CPU.*--allow-on-host Softmax$"):
        check_host_operators(found, ("GatherBlockQuantized",), ("Gather",), "webgpu")
