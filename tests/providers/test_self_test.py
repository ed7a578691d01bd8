"""A PagedAttention is trusted only where it gives the known answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.reference import ReferenceEvaluator

from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.inspect import set_attribute
from onnxport.graphs.paged import PagedInput
from onnxport.graphs.passes.decompose import decompose
from onnxport.graphs.tensors import numpy_dtype
from onnxport.providers import self_test
from onnxport.providers.ort import CPU
from onnxport.providers.self_test import WINDOW, Tried
from tests.graphs.paged_models import paged_case, paged_model
from tests.providers.conftest import ArtifactMaker
from tests.providers.models import use_kernel

FLOAT = TensorProto.FLOAT
SINKS = (Tried(sinks=True),)
LAYERS = (
    Tried(block_size=64),
    Tried(sinks=True),
    Tried(window=WINDOW, sinks=True, block_size=32),
    Tried(14, 2, 64, 64, block_size=256),
    Tried(8, 1, 128, 64, interleaved=True, block_size=128),
    Tried(2, 2, 40, 0, softcap=20.0),
)


@pytest.fixture
def device_with_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU with our kernel be the device, in the type that the kernel takes."""
    use_kernel(monkeypatch, self_test)


@pytest.mark.usefixtures("device_with_attention")
@pytest.mark.parametrize("tried", [*self_test.PLAIN, *LAYERS])
def test_a_right_one_is_trusted(tried: Tried) -> None:
    assert self_test.distrust(CPU, "float32", (tried,)) == ""


@pytest.mark.usefixtures("device_with_attention")
def test_one_that_takes_no_notice_of_sinks_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    right = self_test._run

    def without(model: onnx.ModelProto, *args: Any, **options: Any) -> list[Any]:
        for node in model.graph.node:
            if node.op_type == "PagedAttention":
                node.input[PagedInput.HEAD_SINK] = ""
        return right(model, *args, **options)

    monkeypatch.setattr(self_test, "_run", without)
    assert self_test.distrust(CPU, "float32") == ""
    reason = self_test.distrust(CPU, "float32", SINKS)
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

    def wrong(kind: int, tried: Tried) -> onnx.ModelProto:
        model = right(kind, tried)
        if tried.window == windows[-1] and tried.window not in made:  # the device's comes first
            for node in model.graph.node:
                if node.op_type == "PagedAttention":
                    set_attribute(node, name, value)
        made.append(tried.window)
        return model

    monkeypatch.setattr(self_test, "_graph", wrong)
    reason = self_test.distrust(CPU, "float32")
    assert "computes wrongly here" in reason
    assert "with 4 heads of 32 channels in blocks of 16 tokens" in reason
    assert ("sliding window" in reason) == (len(windows) == 2)
    assert made == [window for window in windows for _ in range(2)]


@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("block_size", [16, 64, 256])
def test_one_that_looks_up_a_wrong_block_is_not(
    monkeypatch: pytest.MonkeyPatch, block_size: int, row: int
) -> None:
    """Whatever the size of a block is, both rows go beyond their first."""
    right = self_test.step_inputs

    def confused(tried: Tried) -> list[dict[str, Any]]:
        steps = right(tried)
        for step in steps[2:]:
            step[contract.BLOCK_TABLE][row, 1] = 5
        return steps

    def run(model: onnx.ModelProto, tried: Tried) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(self_test, "step_inputs", confused)
            return self_test._run(decompose(model).model, tried, kind=FLOAT, target=CPU)

    tried = Tried(block_size=block_size)
    assert "computes wrongly" in self_test.distrust_runner(run, FLOAT, "float32", (tried,))


@pytest.mark.parametrize("step", range(len(Tried().steps)))
def test_not_a_number_is_wrong_wherever_it_comes(step: int) -> None:
    def run(model: onnx.ModelProto, tried: Tried) -> list[Any]:
        outputs = self_test._run(decompose(model).model, tried, kind=FLOAT, target=CPU)
        outputs[step][0, 0] = np.nan
        return outputs

    assert "off by nan in float32" in self_test.distrust_runner(run, FLOAT, "float32")


@pytest.mark.parametrize("tried", [*self_test.PLAIN, Tried(8, 2, 64, 64, sinks=True)])
@pytest.mark.parametrize("dtype", self_test.TYPES)
def test_rounding_is_no_mistake(dtype: str, tried: Tried) -> None:
    """Not even where each operator rounds, as ONNX's own evaluator does."""
    kind = self_test.TYPES[dtype]

    def run(model: onnx.ModelProto, tried: Tried) -> list[Any]:
        evaluator = ReferenceEvaluator(decompose(model).model)
        caches = (contract.past_key(0), contract.past_value(0))
        names = [self_test.OUT, contract.present_key(0), contract.present_value(0)]
        dims = (self_test.NUM_BLOCKS, tried.block_size, tried.num_kv_heads, tried.head_size)
        held = [np.zeros(dims, numpy_dtype(kind)) for _ in caches]
        outputs = []
        for step in self_test.step_inputs(tried):
            out, *held = evaluator.run(names, {**step, **dict(zip(caches, held, strict=True))})
            outputs.append(out)
        return outputs

    assert self_test.distrust_runner(run, kind, dtype, (tried,)) == ""


def test_one_that_is_not_there_is_said_to_be_missing() -> None:
    # ONNX Runtime's own CPU execution provider has no such kernel
    assert "has no PagedAttention in float16" in self_test.distrust(CPU, "float16")


def test_layers_are_like_the_model_s(tiny_artifact: ArtifactMaker) -> None:
    graph = Artifact.read(tiny_artifact("gemma2", "fp16")).load_graph("paged")
    plain, windowed = self_test.layers_like(graph, 64)
    assert (plain.window, windowed.window) == (None, WINDOW)
    assert plain == replace(windowed, window=None)
    assert plain.softcap > 0
    assert (plain.block_size, plain.sinks) == (64, False)
    assert plain.num_heads == 2 * plain.num_kv_heads
    graph = Artifact.read(tiny_artifact("gpt-oss", "fp16")).load_graph("paged")
    assert all(tried.sinks for tried in self_test.layers_like(graph, 16))


def test_layers_are_no_larger_than_it_takes_to_tell() -> None:
    case = next(case for seed in range(0, 40, 4) if (case := paged_case(seed)).cosine is not None)
    model = paged_model(case, layers=3)
    head_size, rotates = case.head_size, 2 * case.cosine.shape[1]
    for each in model.graph.node:
        set_attribute(each, "num_heads", 128)
        set_attribute(each, "kv_num_heads", 8)
    (tried,) = self_test.layers_like(model, 4096)
    assert (tried.num_heads, tried.num_kv_heads, tried.block_size) == (16, 2, 256)
    assert (tried.head_size, tried.rotary_dim) == (head_size, rotates)
    for each in model.graph.node:
        set_attribute(each, "do_rotary", 0)
    assert self_test.layers_like(model, 16)[0].rotary_dim == 0
