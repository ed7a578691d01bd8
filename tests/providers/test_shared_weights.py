"""Sessions that have the same packed weights share them, and only then."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from onnxport.exporter.export import export_model
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import WEIGHTS_FILE, Artifact
from onnxport.graphs.inspect import attribute_int
from onnxport.graphs.manifest import MTP_FOLDER
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.cpu.library import num_compared_panels, weight_memory_bytes
from onnxport.providers.registry import open_model
from tests.exporter import checkpoints
from tests.exporter.checkpoints import VOCAB, Case
from tests.exporter.mtp_layers import Mtp, make
from tests.providers.conftest import ArtifactMaker
from tests.providers.test_cpu_matmul import needs_kernel, opened, step

pytestmark = needs_kernel
PARTS = [(0, 0, [5, 9, 23, 4]), (1, 0, [7])]


def added(path: Path) -> tuple[Model, int]:
    """The model, and how many bytes of packed weights it brings."""
    gc.collect()
    before = weight_memory_bytes()
    model = opened(path)
    return model, weight_memory_bytes() - before


def with_another_head(path: Path, folder: Path) -> tuple[Path, int]:
    """A copy whose head differs in the last byte of its quants; and how many bytes a row has."""
    shutil.copytree(path, folder)
    artifact = Artifact.read(folder)
    graph = artifact.load_graph("paged").graph
    products = [node for node in graph.node if node.op_type == "MatMulNBits"]
    (head,) = (node for node in products if attribute_int(node, "N", 0) == VOCAB)
    (weight,) = (one for one in graph.initializer if one.name == head.input[1])
    (scales,) = (one for one in graph.initializer if one.name == head.input[2])
    _, offset, length = artifact.external(weight)
    with (folder / WEIGHTS_FILE).open("r+b") as file:
        file.seek(offset + length - 1)
        (last,) = file.read(1)
        file.seek(offset + length - 1)
        file.write(bytes([last ^ 16]))
    return folder, (length + 2 * int(np.prod(scales.dims))) // VOCAB


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_packed_weights_are_there_once(
    tiny_artifact: ArtifactMaker, precision: str, tmp_path: Path
) -> None:
    path = tiny_artifact("llama", precision)
    start = weight_memory_bytes()
    first, alone = added(path)
    wanted = step(first, PARTS)
    second, beside = added(path)
    assert 0 <= beside < alone  # feed-forward layers are packed otherwise, and not shared
    other, row_bytes = with_another_head(path, tmp_path / "other")
    third, with_head = added(other)
    assert with_head - beside == VOCAB * row_bytes
    first.close()
    del first
    gc.collect()
    assert step(second, PARTS).tobytes() == wanted.tobytes()  # which outlive those that packed them
    found = step(third, PARTS)
    assert found[:, : VOCAB - 1].tobytes() == wanted[:, : VOCAB - 1].tobytes()
    assert (found[:, -1] != wanted[:, -1]).all()
    for model in (second, third):
        model.close()
    del model, second, third
    gc.collect()
    assert weight_memory_bytes() == start


def compared(path: Path) -> tuple[Model, int]:
    """The model, and how many panels were packed to see whether others have the same."""
    before = num_compared_panels()
    model = opened(path)
    return model, num_compared_panels() - before


def test_matrices_are_not_compared_with_all_of_their_shape(tmp_path: Path) -> None:
    """A model may have thousands of one shape: what differs costs a panel each, however many."""
    made = []
    for layers in (2, 12):
        checkpoint = tmp_path / f"checkpoint-{layers}"
        checkpoints.make(Case("llama", {"num_hidden_layers": layers}), checkpoint)
        path = export_model(checkpoint, tmp_path / f"model-{layers}", ExportOptions())
        model, panels = compared(path)
        made.append(panels)
        again, beside = compared(path)
        assert beside > panels  # each of them finds the same
        again.close()
        model.close()
        del model, again
        gc.collect()
    few, many = made
    assert few == 2 * 2 + 1  # attention's products of a layer, and the head
    assert many == 2 * 12 + 1


def test_a_later_start_finds_what_lies_in_the_layers_folder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of floats that are converted as the model is loaded, by a graph that was kept."""
    caplog.set_level(logging.INFO)
    make(Mtp("glm4-moe"), tmp_path / "checkpoint")
    exported = ExportOptions(precision="fp16", mtp=True)
    path = export_model(tmp_path / "checkpoint", tmp_path / "model", exported)
    options = LoadOptions(threads=1, kv_cache_tokens=512, graph_cache=tmp_path / "graphs")
    found = []
    for is_kept in (False, True):
        model = open_model(path, "cpu", options)
        assert ("lowered by an earlier start" in caplog.text) == is_kept
        found.append(step(model, PARTS).tobytes())
        model.close()
    assert found[0] == found[1]
    moved = path / MTP_FOLDER / WEIGHTS_FILE
    os.utime(moved, ns=(1, 1))  # another file, for all that is known
    caplog.clear()
    open_model(path, "cpu", options).close()
    assert "lowered by an earlier start" not in caplog.text
