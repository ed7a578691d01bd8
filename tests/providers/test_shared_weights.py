"""Sessions that have the same packed weights share them, and only then."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import numpy as np
import pytest

from onnxport.graphs.artifact import WEIGHTS_FILE, Artifact
from onnxport.graphs.inspect import attribute_int
from onnxport.providers.base import Model
from onnxport.providers.cpu.library import weight_memory_bytes
from tests.exporter.checkpoints import VOCAB
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
