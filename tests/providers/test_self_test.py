"""A PagedAttention is trusted only where it gives the known answer."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from onnxport.graphs.inspect import set_attribute
from onnxport.graphs.paged import PagedInput
from onnxport.graphs.passes.decompose import decompose
from onnxport.providers import self_test
from onnxport.providers.ort import CPU
from tests.providers.models import use_kernel


@pytest.fixture
def device_with_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU with our kernel be the device, in the type that the kernel takes."""
    use_kernel(monkeypatch, self_test)


@pytest.mark.usefixtures("device_with_attention")
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_right_one_is_trusted(block_size: int, sinks: bool) -> None:
    assert self_test.distrust(CPU, "float32", block_size, sinks=sinks) == ""


@pytest.mark.usefixtures("device_with_attention")
def test_one_that_takes_no_notice_of_sinks_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    right = self_test._run

    def without(model: onnx.ModelProto, *args: Any, **options: Any) -> list[Any]:
        for node in model.graph.node:
            if node.op_type == "PagedAttention":
                node.input[PagedInput.HEAD_SINK] = ""
        return right(model, *args, **options)

    monkeypatch.setattr(self_test, "_run", without)
    assert self_test.distrust(CPU, "float32", 16) == ""
    reason = self_test.distrust(CPU, "float32", 16, sinks=True)
    assert "computes wrongly here with head sinks: outputs" in reason


@pytest.mark.usefixtures("device_with_attention")
@pytest.mark.parametrize(
    ("name", "value", "windows"),
    [
        ("scale", 0.15, [None]),
        ("local_window_size", 60, [None]),
        ("do_rotary", 0, [None]),
        ("local_window_size", 10, [None, 9]),  # right without a window, one off with it
    ],
)
def test_a_wrong_one_is_not(
    monkeypatch: pytest.MonkeyPatch, name: str, value: float, windows: list[int | None]
) -> None:
    right = self_test._graph
    made: list[int | None] = []

    def wrong(kind: int, window: int | None, *, sinks: bool) -> onnx.ModelProto:
        model = right(kind, window, sinks=sinks)
        if window == windows[-1] and window not in made:  # the device's first, then the reference
            for node in model.graph.node:
                if node.op_type == "PagedAttention":
                    set_attribute(node, name, value)
        made.append(window)
        return model

    monkeypatch.setattr(self_test, "_graph", wrong)
    reason = self_test.distrust(CPU, "float32", 16)
    assert "computes wrongly here" in reason
    assert ("sliding window" in reason) == (len(windows) == 2)
    assert made == [window for window in windows for _ in range(2)]


@pytest.mark.parametrize("step", range(len(self_test.STEPS)))
def test_not_a_number_is_wrong_wherever_it_comes(step: int) -> None:
    kind = TensorProto.FLOAT

    def run(model: onnx.ModelProto) -> list[Any]:
        outputs = self_test._run(decompose(model).model, kind, CPU, 32)
        outputs[step][0, 0] = np.nan
        return outputs

    assert "off by nan in float32" in self_test.distrust_runner(run, kind, "float32")


def test_one_that_is_not_there_is_said_to_be_missing() -> None:
    # ONNX Runtime's own CPU execution provider has no such kernel
    assert "has no PagedAttention in float16" in self_test.distrust(CPU, "float16", 16)
