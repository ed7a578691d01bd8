"""K/V behind a window are used again only where a device's attention was seen not to read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import pytest

from onnxport.graphs.inspect import set_attribute
from onnxport.graphs.paged import PagedAttentionNode, attention_nodes
from onnxport.graphs.passes.decompose import decompose
from onnxport.providers import behind_windows
from onnxport.providers.behind_windows import reads_behind_windows
from onnxport.providers.ort import CPU, quiet_options
from tests.graphs.paged_models import paged_case, paged_model
from tests.providers.models import use_kernel

Windows = tuple[int | None, ...]


@pytest.fixture(autouse=True)
def device_with_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU with our kernel be the device, in the type that the kernel takes."""
    use_kernel(monkeypatch, behind_windows)


def layers(windows: Windows, seed: int = 28) -> list[PagedAttentionNode]:
    model = paged_model(paged_case(seed), layers=len(windows))
    for node, window in zip(model.graph.node, windows, strict=True):
        set_attribute(node, "local_window_size", window or -1)
    return attention_nodes(model)


def change_graphs(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[onnx.ModelProto], onnx.ModelProto]
) -> None:
    """Let the device run another graph than it is given."""
    right = behind_windows._graph
    monkeypatch.setattr(behind_windows, "_graph", lambda *given: change(right(*given)))


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("window", [1, 7, 16, 100])
def test_ours_reads_nothing_there(window: int, block_size: int) -> None:
    assert reads_behind_windows(CPU, "float32", layers((window, None)), block_size) == ""


@pytest.mark.parametrize("window", [1, 7, 100])
def test_nor_does_the_decomposed_graph(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    change_graphs(monkeypatch, lambda model: decompose(model).model)
    assert reads_behind_windows(CPU, "float32", layers((window,)), 16) == ""


@pytest.mark.parametrize("window", [7, 100])
def test_one_key_too_many_is_seen(monkeypatch: pytest.MonkeyPatch, window: int) -> None:
    def longer(model: onnx.ModelProto) -> onnx.ModelProto:
        for node in model.graph.node:
            if node.op_type == "PagedAttention":
                set_attribute(node, "local_window_size", window + 1)
        return model

    change_graphs(monkeypatch, longer)
    reason = reads_behind_windows(CPU, "float32", layers((None, window)), 16)
    assert f"reads behind a window of {window} tokens, in blocks of 16" in reason
    assert "off by nan" in reason


def test_numbers_that_are_multiplied_by_zero_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masked keys and values that are loaded nevertheless, as tiles of a GPU's kernel may."""

    def masked(model: onnx.ModelProto) -> onnx.ModelProto:
        model = decompose(model).model
        (values,) = (  # those of the sequence's own tokens, within the window
            node
            for node in model.graph.node
            if node.op_type == "Where" and node.input[0].startswith("paged.own")
        )
        for node in model.graph.node:
            if values.output[0] in node.input:
                node.input[list(node.input).index(values.output[0])] = values.input[1]
        return model

    change_graphs(monkeypatch, masked)
    reason = reads_behind_windows(CPU, "float32", layers((9,)), 16)
    assert "reads behind a window of 9 tokens" in reason


def test_what_cannot_be_tried_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behind_windows, "quiet_options", quiet_options)
    reason = reads_behind_windows(CPU, "float32", layers((9,)), 16)
    assert "could not be tried with a window of 9 tokens: ONNX Runtime" in reason


def test_each_kind_of_layer_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Any] = []

    def note(target: Any, kind: int, case: Any) -> str:
        tried.append((case.window, case.has_sinks, case.softcap > 0))
        return ""

    monkeypatch.setattr(behind_windows, "_try", note)
    sinks = next(seed for seed in (0, 1, 2, 4, 5) if paged_case(seed).head_sink is not None)
    given = [*layers((9, None, 9, 12)), *layers((9,), sinks)]
    assert reads_behind_windows(CPU, "float32", given, 16) == ""
    assert sorted({window for window, _, _ in tried}) == [9, 12]
    assert len(tried) == 3
    assert sorted(has_sinks for _, has_sinks, _ in tried) == [False, False, True]
