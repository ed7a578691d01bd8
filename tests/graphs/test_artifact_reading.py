"""A tampered artifact is not read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.errors import ArtifactError
from onnxport.graphs.artifact import Artifact, FileInfo, Manifest, TensorRef
from onnxport.graphs.tensors import numpy_dtype
from tests.graphs.artifacts import MANIFEST, SPEC, write
from tests.tiers import examples


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_graph(folder: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    """Change the graph, and its checksum in the manifest: a hostile artifact is consistent."""
    path = folder / "model.onnx"
    model = onnx.load(path, load_external_data=False)
    change(model)
    data = model.SerializeToString()
    path.write_bytes(data)
    edit_manifest(folder, lambda m: m["files"]["model.onnx"].update(size=len(data)))


def test_a_missing_folder_or_manifest(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path, tmp_path / "a\0"):
        with pytest.raises(ArtifactError, match="is not an artifact"):
            Artifact.read(path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"format_version": true}'])
def test_a_manifest_that_is_no_manifest(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        Artifact.read(folder)


def test_a_manifest_that_is_no_text(folder: Path) -> None:
    (folder / "manifest.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArtifactError, match=r"manifest\.json"):
        Artifact.read(folder)


def test_another_format_version(folder: Path) -> None:
    edit_manifest(folder, lambda m: m.update(format_version=2, exporter_version="9.9"))
    with pytest.raises(ArtifactError, match=r"version 2.*reads version 1.*9\.9"):
        Artifact.read(folder)


TOP = sorted(json.loads(MANIFEST.dumps()))
MODEL = sorted(SPEC.to_json())


@pytest.mark.parametrize("key", TOP)
def test_every_key_is_needed(folder: Path, key: str) -> None:
    edit_manifest(folder, lambda m: m.pop(key))
    with pytest.raises(ArtifactError, match=f"missing '{key}'"):
        Artifact.read(folder)


@pytest.mark.parametrize(
    "where", [[], ["model"], ["model", "rope"], ["source"], ["files", "model.onnx"]]
)
def test_unknown_keys_are_refused_everywhere(folder: Path, where: list[str]) -> None:
    def add(manifest: dict[str, Any]) -> None:
        for key in where:
            manifest = manifest[key]
        manifest["surprise"] = 1

    edit_manifest(folder, add)
    with pytest.raises(ArtifactError, match="unknown 'surprise'"):
        Artifact.read(folder)


@pytest.mark.parametrize("key", [key for key in TOP if key != "format_version"])
def test_wrong_types_are_refused(folder: Path, key: str) -> None:
    edit_manifest(folder, lambda m: m.update({key: 1.5}))
    with pytest.raises(ArtifactError, match=rf"'{key}' is 1\.5"):
        Artifact.read(folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("precision", "int2", "precision 'int2'"),
        ("activation_dtype", "int8", "activation_dtype 'int8'"),
        ("eos_token_ids", ["a"], "eos_token_ids"),
        ("eos_token_ids", [True], "eos_token_ids"),
    ],
)
def test_wrong_values_are_refused(folder: Path, key: str, value: Any, message: str) -> None:
    edit_manifest(folder, lambda m: m.update({key: value}))
    with pytest.raises(ArtifactError, match=message):
        Artifact.read(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match=r"tokenizer\.json is missing"):
        Artifact.read(folder)


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data"])
def test_the_graph_and_the_weights_must_be_listed(folder: Path, name: str) -> None:
    edit_manifest(folder, lambda m: m["files"].pop(name))
    with pytest.raises(ArtifactError, match=f"does not list {name}"):
        Artifact.read(folder)


@pytest.mark.parametrize("name", ["model.onnx", "model.onnx.data", "tokenizer.json"])
def test_a_truncated_file_is_named(folder: Path, name: str) -> None:
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[:-1])
    with pytest.raises(ArtifactError, match=rf"{name} has {len(data) - 1} bytes"):
        Artifact.read(folder)


@settings(max_examples=examples(20), deadline=None)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_found(
    position: float, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = write(tmp_path_factory.mktemp("artifact") / "model")
    path = folder / "model.onnx.data"
    data = bytearray(path.read_bytes())
    data[int(position * len(data))] ^= 1 << bit
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=r"model\.onnx\.data has SHA-256"):
        Artifact.read(folder, verify="sha256")
    Artifact.read(folder)  # the default trusts contents, and checks sizes


ESCAPES = [
    "/etc/passwd",
    "../secret",
    "a/../../secret",
    "..\\secret",
    "C:\\secret",
    "C:secret",
    "\\\\host\\share",
    "",
    ".",
    "a\0b",
]


@pytest.mark.parametrize("name", ESCAPES)
def test_a_manifest_cannot_name_files_outside(folder: Path, name: str) -> None:
    (folder.parent / "secret").write_text("x")
    edit_manifest(folder, lambda m: m["files"].update({name: {"sha256": "0" * 64, "size": 1}}))
    with pytest.raises(ArtifactError, match=r"outside the folder|no regular file"):
        Artifact.read(folder)


@pytest.mark.parametrize("name", ESCAPES)
def test_external_data_cannot_lie_outside(folder: Path, name: str) -> None:
    (folder.parent / "secret").write_text("x")
    edit_graph(folder, lambda m: set_external(m.graph.initializer[0], location=name))
    with pytest.raises(ArtifactError, match=r"outside the folder|does not list"):
        Artifact.read(folder)


def set_external(tensor: onnx.TensorProto, **values: str) -> None:
    kept = {entry.key: entry.value for entry in tensor.external_data} | values
    del tensor.external_data[:]
    for key, value in kept.items():
        tensor.external_data.add(key=key, value=value)


@pytest.mark.parametrize("name", ["model.onnx.data", "tokenizer.json", "model.onnx"])
def test_a_link_out_of_the_folder_is_refused(folder: Path, name: str) -> None:
    shutil.move(folder / name, folder.parent / name)
    (folder / name).symlink_to(folder.parent / name)
    with pytest.raises(ArtifactError, match="outside the folder"):
        Artifact.read(folder)


def test_a_link_inside_the_folder_is_read(folder: Path) -> None:
    shutil.move(folder / "tokenizer.json", folder / "real.json")
    (folder / "tokenizer.json").symlink_to("real.json")
    Artifact.read(folder, verify="sha256")


def test_an_artifact_behind_a_link_is_read(folder: Path) -> None:
    (folder.parent / "link").symlink_to(folder)
    assert Artifact.read(folder.parent / "link").path == folder.resolve()


def test_external_data_in_an_unlisted_file_is_refused(folder: Path) -> None:
    (folder / "other").write_bytes(bytes(1 << 20))
    edit_graph(folder, lambda m: set_external(m.graph.initializer[0], location="other"))
    with pytest.raises(ArtifactError, match="does not list"):
        Artifact.read(folder)


@pytest.mark.parametrize(
    "values",
    [
        {"offset": str(1 << 40)},
        {"offset": "-4096"},
        {"length": "1"},
        {"length": str(1 << 40)},
        {"offset": "x"},
        {"length": "1e3"},
    ],
)
def test_external_data_beyond_the_file_is_refused(folder: Path, values: dict[str, str]) -> None:
    def change(model: onnx.ModelProto) -> None:
        set_external(model.graph.initializer[0], **values)

    edit_graph(folder, change)
    with pytest.raises(ArtifactError, match="initializer"):
        Artifact.read(folder)


@pytest.mark.parametrize("dims", [[1 << 62, 1 << 62], [-1, 4], [3]])
def test_a_shape_that_does_not_fit_its_bytes_is_refused(folder: Path, dims: list[int]) -> None:
    def change(model: onnx.ModelProto) -> None:
        model.graph.initializer[0].dims[:] = dims

    edit_graph(folder, change)
    with pytest.raises(ArtifactError, match="initializer"):
        Artifact.read(folder)


def test_external_data_hidden_in_an_attribute_is_refused(folder: Path) -> None:
    def change(model: onnx.ModelProto) -> None:
        tensor = TensorRef("hidden", 1, (1,), 0, 4).initializer()
        set_external(tensor, location="../secret")
        inner = onnx.helper.make_graph(
            [onnx.helper.make_node("Constant", [], ["k"], value=tensor)], "inner", [], []
        )
        node = onnx.helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)
        model.graph.node.append(node)

    edit_graph(folder, change)
    with pytest.raises(ArtifactError, match="outside the folder"):
        Artifact.read(folder)


def test_a_graph_that_is_no_graph_is_refused(folder: Path) -> None:
    path = folder / "model.onnx"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(ArtifactError, match="is no ONNX model"):
        Artifact.read(folder)


def test_the_manifest_survives_a_round_trip() -> None:
    files = {"model.onnx": FileInfo("0" * 64, 3)}
    text = MANIFEST.dumps()
    assert Manifest.loads(text) == MANIFEST
    assert Manifest.loads(text).dumps() == text
    assert files


def test_onnx_types_map_to_numpy_and_back() -> None:
    assert numpy_dtype(onnx.TensorProto.BFLOAT16) == np.dtype(ml_dtypes.bfloat16)
