"""An artifact appears whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import stat
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
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.artifact_writer import ArtifactWriter
from tests.graphs.artifacts import MANIFEST, SPEC, write
from tests.tiers import examples


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


@settings(max_examples=examples(25), deadline=None)
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


@pytest.mark.parametrize("exchange", [True, False], ids=["renameat2", "two renames"])
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs Linux's /proc")
def test_all_is_on_the_disk_before_the_older_artifact_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool
) -> None:
    if not exchange:
        monkeypatch.setattr(artifact_writer, "_exchange", lambda new, old: False)
    events: list[tuple[str, str]] = []
    rename, swap, remove = Path.rename, artifact_writer._swap, artifact_writer._remove

    def sync(descriptor: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def noted(name: str, plain: Any) -> Any:
        def call(*arguments: Any) -> Any:
            events.append((name, str(arguments[0])))
            return plain(*arguments)

        return call

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(artifact_writer, "_swap", noted("swap", swap))
    monkeypatch.setattr(artifact_writer, "_remove", noted("remove", remove))
    monkeypatch.setattr(Path, "rename", noted("rename", rename))
    write(folder, overwrite=True)
    swapped = next(at for at, (what, _) in enumerate(events) if what == "swap")
    hidden = events[swapped][1]
    names = ("manifest.json", "model.onnx", "model.onnx.data", "tokenizer.json")
    assert {("sync", f"{hidden}/{name}") for name in names} < set(events[:swapped])
    assert events[swapped - 1] == ("sync", hidden)
    behind = [event for event in events[swapped + 1 :] if event[0] != "rename"]
    assert behind == [
        ("sync", str(folder.parent)),
        ("remove", hidden if exchange else f"{hidden}.old"),
    ]


def test_a_disk_that_fails_at_the_end_keeps_the_older_artifact(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (folder / "manifest.json").read_bytes()

    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(ExportError, match="broken"):
        write(folder, quantized=False, overwrite=True)
    assert (folder / "manifest.json").read_bytes() == before
    assert os.listdir(folder.parent) == ["model"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_name_that_may_not_stay_is_told(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    overwrite: bool,
) -> None:
    plain = artifact_writer._sync_folder

    def sync(path: Path) -> None:
        if path == folder.parent:
            raise OSError(errno.EIO, "broken")
        plain(path)

    monkeypatch.setattr(artifact_writer, "_sync_folder", sync)
    made = write(folder if overwrite else folder.parent / "other", quantized=False, overwrite=True)
    assert Artifact.read(made, verify="sha256").manifest.precision == "fp16"
    assert "may not be there after a power failure" in caplog.text
    hidden = [path for path in folder.parent.iterdir() if path.name.startswith(".")]
    assert len(hidden) == overwrite
    for path in hidden:
        assert Artifact.read(path, verify="sha256").manifest.precision == "int4"
        assert f"the older one is left in {path}" in caplog.text


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EACCES])
def test_a_folder_that_cannot_be_synced_is_none_s_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Some file systems cannot, and some folders may not be listed."""
    plain, refused = getattr(os, "open" if number == errno.EACCES else "fsync"), []

    def refuse(given: Any, *more: Any) -> Any:
        if Path(f"/proc/self/fd/{given}").is_dir() if number != errno.EACCES else given == tmp_path:
            refused.append(given)
            raise OSError(number, "no")
        return plain(given, *more)

    monkeypatch.setattr(os, plain.__name__, refuse)
    Artifact.read(write(tmp_path / "model"), verify="sha256")
    assert refused


def test_an_older_artifact_that_cannot_be_deleted_is_told_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on NFS, where an open file leaves a file of another name; the others go."""
    monkeypatch.setattr(os, "rmdir", stubborn)
    made = write(folder, quantized=False, overwrite=True)
    assert Artifact.read(made, verify="sha256").manifest.precision == "fp16"
    (left,) = [path for path in folder.parent.iterdir() if path != folder]
    assert f"the older artifact is left in {left}, delete it yourself" in caplog.text
    assert list(left.iterdir()) == []


def test_what_cannot_be_discarded_does_not_hide_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "rmdir", stubborn)
    path = tmp_path / "model"
    with pytest.raises(RuntimeError, match="the reason"), ArtifactWriter(path) as writer:  # noqa: PT012
        writer.add_weight("w", np.zeros(10, np.float32))
        raise RuntimeError("the reason")
    (left,) = tmp_path.iterdir()
    assert f"what was written of the artifact is left in {left}" in caplog.text


def stubborn(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOTEMPTY, "Directory not empty")


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


@pytest.mark.parametrize(
    "manifest",
    [
        b'{"manifest_version": 3, "name": "an extension"}',
        b'{"format_version": 1}',
        b'{"format_version": 1, "files": ["model.onnx"]}',
        b'{"format_version": 1, "files": {"background.js": {}}}',
        b'{"files": {"model.onnx": {}}}',
        b'["format_version", "files", "model.onnx"]',
        b"[" * 100_000,
        b"{",
        b"\xff\xfe",
        None,
    ],
)
def test_somebody_else_s_manifest_is_never_overwritten(
    tmp_path: Path, manifest: bytes | None
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    if manifest is None:
        (other / "manifest.json").mkdir()
    else:
        (other / "manifest.json").write_bytes(manifest)
    with pytest.raises(ExportError, match=r"no manifest\.json with a format_version"):
        write(other, overwrite=True)
    assert os.listdir(other) == ["manifest.json"]
    assert os.listdir(tmp_path) == ["other"]


def test_a_folder_that_cannot_be_listed_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(ExportError, match="model cannot be looked into: Permission denied"):
        write(folder, overwrite=True)


def test_an_artifact_of_another_format_version_is_overwritten(folder: Path) -> None:
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    Artifact.read(write(folder, overwrite=True), verify="sha256")


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
