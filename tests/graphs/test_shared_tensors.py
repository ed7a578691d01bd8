"""What an artifact shares with the one in its folder is stored once, and both stay whole."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from onnxport.errors import ArtifactError
from onnxport.graphs.artifact import WEIGHTS_FILE, Artifact
from onnxport.graphs.artifact_writer import ArtifactWriter
from onnxport.graphs.builder import GraphBuilder
from onnxport.graphs.manifest import MTP_FOLDER
from onnxport.graphs.tensors import TensorRef
from tests.graphs.artifacts import MANIFEST

SHARED_FILE = f"{MTP_FOLDER}/{WEIGHTS_FILE}"
TABLE = np.arange(6000, dtype=np.float32)


def gather(writer: ArtifactWriter, table: NDArray[Any]) -> TensorRef:
    """Give an artifact a graph that looks numbers up in a table."""
    g = GraphBuilder("one")
    g.input("ids", onnx.TensorProto.INT64, ["n"])
    ref = writer.add_weight("table", table)
    g.node("Gather", [g.weight(ref), "ids"], outputs=[g.output("y", ref.data_type, ["n"])])
    writer.write_graph("paged", g.build())
    return ref


def write(path: Path, outer: NDArray[Any], inner: NDArray[Any] = TABLE) -> TensorRef:
    """An artifact and one in its folder; where the outer one's table is."""
    with ArtifactWriter(path) as writer:
        with ArtifactWriter(writer.inside(MTP_FOLDER)) as within:
            gather(within, inner)
            within.commit(MANIFEST)
        writer.share(MTP_FOLDER)
        ref = gather(writer, outer)
        writer.commit(MANIFEST)
    return ref


def numbers(path: Path) -> list[float]:
    """What a runtime that shares no code with ours finds at some places."""
    session = ort.InferenceSession(path / "model.onnx", providers=["CPUExecutionProvider"])
    found: NDArray[Any] = session.run(None, {"ids": np.array([4999, 7])})[0]
    return [float(one) for one in found]


def test_what_both_have_is_stored_once(tmp_path: Path) -> None:
    ref = write(tmp_path / "model", TABLE.reshape(60, 100).reshape(-1))
    assert ref.location == SHARED_FILE
    assert (tmp_path / "model" / WEIGHTS_FILE).stat().st_size == 0
    shutil.copytree(tmp_path / "model", tmp_path / "copy")
    (tmp_path / "copy").rename(tmp_path / "elsewhere")
    shutil.copytree(tmp_path / "model" / MTP_FOLDER, tmp_path / "layer")  # alone, as it always was
    for folder in ("model", "elsewhere", f"elsewhere/{MTP_FOLDER}", "layer"):
        artifact = Artifact.read(tmp_path / folder, verify="sha256")
        (table,) = artifact.load_graph("paged").graph.initializer
        np.testing.assert_array_equal(artifact.read_tensor(table), TABLE)
        assert numbers(tmp_path / folder) == [4999, 7]


def test_the_same_bytes_may_have_another_shape(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "model") as writer:
        with ArtifactWriter(writer.inside(MTP_FOLDER)) as within:
            gather(within, TABLE)
            within.commit(MANIFEST)
        writer.share(MTP_FOLDER)
        ref = writer.add_weight("rows", TABLE.reshape(60, 100))
    assert (ref.name, ref.location, ref.dims) == ("rows", SHARED_FILE, (60, 100))


@pytest.mark.parametrize("change", ["a number", "the length", "the type", "few bytes"])
def test_what_differs_is_stored_apart(change: str, tmp_path: Path) -> None:
    table, inner = TABLE.copy(), TABLE
    if change == "a number":
        table[-1] += 1
    elif change == "the length":
        table = table[:-1]
    elif change == "the type":
        table = table.view(np.int32)
    else:
        table = inner = TABLE[:1000]
    ref = write(tmp_path / "model", table, inner)
    assert ref.location == WEIGHTS_FILE
    files = Artifact.read(tmp_path / "model").manifest.files
    assert SHARED_FILE not in files
    assert files[WEIGHTS_FILE].size == table.nbytes


def test_the_shared_file_is_checked_as_any_other(tmp_path: Path) -> None:
    write(tmp_path / "model", TABLE)
    manifest = Artifact.read(tmp_path / "model").manifest
    assert manifest.weight_bytes == TABLE.nbytes
    info = manifest.files[SHARED_FILE]
    other = replace(info, sha256="0" * 64)
    files = dict(manifest.files) | {SHARED_FILE: other}
    assert replace(manifest, files=files).fingerprint != manifest.fingerprint
    path = tmp_path / "model" / SHARED_FILE
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    with pytest.raises(ArtifactError, match=f"{SHARED_FILE} has SHA-256"):
        Artifact.read(tmp_path / "model", verify="sha256")
    shutil.rmtree(tmp_path / "model" / MTP_FOLDER)
    with pytest.raises(ArtifactError, match=f"{SHARED_FILE} is missing"):
        Artifact.read(tmp_path / "model")
