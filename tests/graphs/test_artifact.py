"""An artifact appears whole or not at all, and a tampered one is not read."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from onnxport.errors import ArtifactError, ExportError
from onnxport.graphs import artifact_writer
from onnxport.graphs.artifact import Artifact, ArtifactWriter, FileInfo, Manifest, TensorRef
from onnxport.graphs.tensors import numpy_dtype
from tests.graphs.artifacts import MANIFEST, SPEC, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


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


# Writing


def test_what_is_written_is_read(folder: Path) -> None:
    artifact = Artifact.read(folder, verify="sha256")
    assert artifact.manifest.model == SPEC
    assert artifact.manifest.family == "llama"
    assert artifact.manifest.eos_token_ids == (1, 2)
    assert set(artifact.manifest.files) == {"model.onnx", "model.onnx.data", "tokenizer.json"}
    assert not artifact.has_gqa
    assert sorted(os.listdir(folder.parent)) == ["model"], "no temporary folder is left"
    with pytest.raises(ArtifactError, match="no gqa graph"):
        artifact.load_graph("gqa")


def test_the_folder_is_readable_by_others(folder: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777 & ~umask


dtypes = st.sampled_from(
    [np.dtype(t) for t in (np.uint8, np.int8, np.float16, ml_dtypes.bfloat16, np.float32, np.int64)]
)


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=70)),
        max_size=6,
    )
)
def test_tensors_are_aligned_and_come_back(
    shapes: list[tuple[Any, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    r = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("artifact") / "model"
    arrays = [r.integers(0, 100, shape).astype(dtype) for dtype, shape in shapes]
    with ArtifactWriter(path) as writer:
        refs = [writer.add_weight(f"w{i}", array) for i, array in enumerate(arrays)]
        writer.write_graph("paged", onnx.ModelProto())
        writer.commit(MANIFEST)
    artifact = Artifact.read(path, verify="sha256")
    for ref, array in zip(refs, arrays, strict=True):
        assert ref.offset % (4096 if array.nbytes >= 4096 else 64) == 0
        found = artifact.read_tensor(ref.initializer())
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
    spans = sorted((ref.offset, ref.offset + ref.length) for ref in refs)
    assert all(a[1] <= b[0] for a, b in pairwise(spans))


def test_transposed_and_chunked_tensors_come_back(tmp_path: Path) -> None:
    array = np.arange(60, dtype=np.float32).reshape(5, 12)
    with ArtifactWriter(tmp_path / "model") as writer:
        transposed = writer.add_weight("t", array.T)
        rows = (array[i : i + 2] for i in range(0, 5, 2))
        chunked = writer.add_weight_chunks("c", array.dtype, array.shape, rows)
        writer.write_graph("paged", onnx.ModelProto())
        artifact = Artifact.read(writer.commit(MANIFEST), verify="sha256")
    np.testing.assert_array_equal(artifact.read_tensor(transposed.initializer()), array.T)
    np.testing.assert_array_equal(artifact.read_tensor(chunked.initializer()), array)


def test_read_tensor_maps_the_file(folder: Path) -> None:
    artifact = Artifact.read(folder)
    tensor = artifact.load_graph("paged").graph.initializer[0]
    value = artifact.read_tensor(tensor)
    assert not value.flags.writeable
    assert not value.flags.owndata


def test_onnx_runtime_opens_the_weights(tmp_path: Path) -> None:
    """The other end of external data: a runtime that shares no code with ours."""
    from onnxport.graphs.builder import GraphBuilder

    table = np.arange(5000, dtype=np.float32)
    with ArtifactWriter(tmp_path / "model") as writer:
        g = GraphBuilder("one")
        g.input("ids", onnx.TensorProto.INT64, ["n"])
        weight = g.weight(writer.add_weight("table", table))
        g.node("Gather", [weight, "ids"], outputs=[g.output("y", onnx.TensorProto.FLOAT, ["n"])])
        writer.write_graph("paged", g.build())
        path = writer.commit(MANIFEST)
    session = ort.InferenceSession(path / "model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_array_equal(session.run(None, {"ids": np.array([4999, 7])})[0], [4999, 7])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_interrupted_export_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error), ArtifactWriter(tmp_path / "model") as writer:  # noqa: PT012
        writer.add_weight("w", np.zeros(10_000, np.float32))
        writer.write_bytes("tokenizer.json", b"{}")
        raise error
    assert os.listdir(tmp_path) == []


def test_an_export_that_is_not_committed_leaves_nothing(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "model") as writer:
        writer.add_weight("w", np.zeros(10, np.float32))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_overwrite_leaves_the_old_artifact(
    folder: Path, error: type[BaseException]
) -> None:
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(error), ArtifactWriter(folder, overwrite=True) as writer:  # noqa: PT012
        writer.add_weight("w", np.zeros(10_000, np.float32))
        raise error
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert os.listdir(folder.parent) == ["model"]


def test_a_failed_rename_leaves_the_old_artifact(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "manifest.json").read_bytes()

    def broken(new: Path, old: Path) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(artifact_writer, "_swap", broken)
    with pytest.raises(ExportError, match="broken"):
        write(folder, overwrite=True)
    assert (folder / "manifest.json").read_bytes() == before
    assert os.listdir(folder.parent) == ["model"]


@pytest.mark.parametrize("exchange", [True, False], ids=["renameat2", "two renames"])
def test_overwriting_swaps(folder: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(artifact_writer, "_exchange", lambda new, old: False)
    (folder / "old file").write_text("of the old artifact")
    write(folder, quantized=False, overwrite=True)
    assert Artifact.read(folder, verify="sha256").manifest.precision == "fp16"
    assert not (folder / "old file").exists()
    assert os.listdir(folder.parent) == ["model"]


def test_an_existing_destination_is_refused(folder: Path) -> None:
    with pytest.raises(ExportError, match="already exists"):
        write(folder)
    Artifact.read(folder, verify="sha256")


def test_a_folder_that_is_no_artifact_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters").write_text("dear")
    (tmp_path / "file").write_text("x")
    for name in ("home", "file"):
        with pytest.raises(ExportError, match=name):
            write(tmp_path / name, overwrite=True)
    (tmp_path / "link").symlink_to(tmp_path / "home")
    with pytest.raises(ExportError, match="link"):
        write(tmp_path / "link", overwrite=True)
    assert (tmp_path / "home" / "letters").read_text() == "dear"
    (tmp_path / "empty").mkdir()
    Artifact.read(write(tmp_path / "empty", overwrite=True))


class FullDisk:
    """A file whose disk is full after some bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: Any) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return int(self.file.write(data))

    def close(self) -> None:
        self.file.close()
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_says_how_much_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ExportError) as error, ArtifactWriter(tmp_path / "model") as writer:  # noqa: PT012
        writer._data = FullDisk(writer._data, room=3 << 20)  # type: ignore[assignment]
        writer.add_weight("a", np.zeros(2 << 20, np.uint8))
        writer.add_weight("b", np.zeros(8 << 20, np.uint8))
    for part in ("No space left", "2.0 MiB were written", "8.0 MiB more", "free"):
        assert part in str(error.value)
    assert os.listdir(tmp_path) == []


def test_too_little_space_is_seen_before_the_work(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"needs .* MiB"):
        write(tmp_path / "model", expected_bytes=1 << 60)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_an_unwritable_folder_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ExportError, match="Permission denied"):
        write(tmp_path / "model")


def test_a_file_in_place_of_a_parent_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ExportError, match="cannot write"):
        write(tmp_path / "file" / "model")


def test_files_are_copied_with_their_checksums(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("hello")
    with ArtifactWriter(tmp_path / "model") as writer:
        writer.copy_file(tmp_path / "tokenizer.json")
        writer.copy_file(tmp_path / "tokenizer.json", "other.json")
        writer.write_graph("paged", onnx.ModelProto())
        artifact = Artifact.read(writer.commit(MANIFEST), verify="sha256")
    assert artifact.manifest.files["other.json"].size == 5


# Reading


def test_a_missing_folder_or_manifest(tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
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


@settings(max_examples=20, deadline=None)
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
