"""A session runs on the execution provider that was asked for, or not at all."""

from __future__ import annotations

from typing import Any

import onnxruntime as ort
import pytest
from onnx import TensorProto

from onnxport.errors import ProviderError
from onnxport.graphs.block_transfers import zeros_graph
from onnxport.graphs.builder import GraphBuilder
from onnxport.providers.ort import CPU, Target, quiet_options, start_session

GPU = Target("GpuExecutionProvider", "gpu", options={"device_id": "3"})
GRAPH = zeros_graph(TensorProto.FLOAT).SerializeToString()


class Session:
    """Stands in for onnxruntime.InferenceSession, with an execution provider that is not here."""

    failure: str | None = None
    running = (GPU.execution_provider, "CPUExecutionProvider")
    given: dict[str, Any]

    def __init__(self, model: bytes, options: Any, **given: Any) -> None:
        Session.given = given
        if Session.failure is not None:
            raise RuntimeError(Session.failure)

    def get_providers(self) -> list[str]:
        return list(Session.running)

    def disable_fallback(self) -> None: ...


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(ort, "InferenceSession", Session)
    return monkeypatch


def test_onnx_runtime_is_told_not_to_try_again_on_the_cpu(gpu: pytest.MonkeyPatch) -> None:
    assert isinstance(start_session(GRAPH, None, quiet_options(), GPU), Session)
    assert Session.given["enable_fallback"] == 0
    assert Session.given["providers"] == [("GpuExecutionProvider", {"device_id": "3"})]


@pytest.mark.parametrize(
    "failure",
    [
        "Failed to compile node MatMulNBits_3: no kernel image is available",  # claimed before
        "CUDA driver version is insufficient for CUDA runtime version",
        "out of memory while initializing",
    ],
)
def test_what_fails_at_the_start_is_one_error_with_the_runtimes_words(
    gpu: pytest.MonkeyPatch, failure: str
) -> None:
    gpu.setattr(Session, "failure", failure)
    with pytest.raises(ProviderError) as caught:
        start_session(GRAPH, None, quiet_options(), GPU)
    assert "could not start the graph on GpuExecutionProvider" in str(caught.value)
    assert failure in str(caught.value)


def test_going_on_without_the_device_is_an_error(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(Session, "running", ("CPUExecutionProvider",))
    with pytest.raises(ProviderError, match="did not start; ONNX Runtime went on with CPUExec"):
        start_session(GRAPH, None, quiet_options(), GPU)


def test_a_graph_that_onnx_runtime_really_refuses() -> None:
    g = GraphBuilder("unknown")
    g.input("x", TensorProto.FLOAT, [1])
    g.output("y", TensorProto.FLOAT, [1])
    g.node("Abacus", ["x"], outputs=["y"])
    with pytest.raises(ProviderError, match=r"could not start the graph on CPUExecution.*Abacus"):
        start_session(g.build().SerializeToString(), None, quiet_options(), CPU)


def test_an_execution_provider_that_onnx_runtime_really_lacks() -> None:
    with (
        pytest.warns(UserWarning, match="not in available provider names"),
        pytest.raises(ProviderError, match="Nowhere"),
    ):
        start_session(GRAPH, None, quiet_options(), Target("NowhereExecutionProvider"))
