"""Write an artifact folder that appears at once, complete, or not at all."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import logging
import math
import os
import shutil
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ExportError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.manifest import GRAPH_FILES, MANIFEST_FILE, FileInfo, Manifest
from onnxport.graphs.shared_tensors import SharedTensors
from onnxport.graphs.tensors import WEIGHTS_FILE, TensorRef, onnx_dtype

if TYPE_CHECKING:
    import onnx

logger = logging.getLogger(__name__)

_FULL: Final = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
_UNSUPPORTED: Final = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
PAGE_BYTES: Final = 4096  # large tensors start on a page, so that they can be mapped alone
CACHE_LINE_BYTES: Final = 64  # small ones on a cache line
_CHUNK_BYTES: Final = 16 << 20  # hashed and written while still in the CPU's cache hierarchy


def check_destination(destination: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuse a destination where `ArtifactWriter` would write nothing.

    Raises:
        ExportError: It is there and is not to be overwritten, or is no artifact.
    """
    folder = _named(destination)
    if not os.path.lexists(folder):
        return
    if not overwrite:
        raise ExportError(f"{folder} already exists. Choose another destination, or overwrite it.")
    if folder.is_symlink():
        raise ExportError(f"{folder} is a link, which is left alone. Give the folder it leads to.")
    if not folder.is_dir():
        raise ExportError(f"{folder} exists and is no folder; it is left alone.")
    try:
        is_empty = not any(folder.iterdir())
    except OSError as error:
        raise ExportError(f"{folder} cannot be looked into: {error.strerror or error}.") from error
    if not is_empty and not _is_artifact(folder):
        raise ExportError(
            f"{folder} exists and holds no {MANIFEST_FILE} with a format_version "
            f"and, in its files, {GRAPH_FILES['paged']}, so it is not an artifact and is not "
            "overwritten. Choose another destination, or remove it yourself."
        )


def _named(destination: str | os.PathLike[str]) -> Path:
    folder = Path(os.path.abspath(destination))
    if not folder.name:
        raise ExportError(f"{destination} has no name; give a folder to make.")
    return folder


class ArtifactWriter:
    """Write into a hidden folder beside the destination; `commit` renames it into place.

    Use it as a context manager: whatever leaves the block without a commit, an exception, a
    KeyboardInterrupt or nothing at all, leaves nothing behind.

    Args:
        destination: The artifact folder to make. Its parents are created.
        overwrite: Replace an older artifact, when the new one is complete.
        expected_bytes: What will be written in all, if known; checked against the free space
            before any work is done.

    Raises:
        ExportError: The destination exists, or the disk is (or becomes) full or unwritable.
    """

    def __init__(
        self,
        destination: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        expected_bytes: int | None = None,
    ) -> None:
        self._destination = _named(destination)
        self._overwrite = overwrite
        self._expected_bytes = expected_bytes
        self._folder = self._destination.with_name(
            f".{self._destination.name}.{uuid.uuid4().hex[:12]}.partial"
        )
        self._files: dict[str, FileInfo] = {}
        self._data: BinaryIO | None = None
        self._offset = 0
        self._hash = hashlib.sha256()
        self._tensors: set[str] = set()
        self._shared: SharedTensors | None = None
        self._committed = False

    def __enter__(self) -> ArtifactWriter:
        check_destination(self._destination, overwrite=self._overwrite)
        with self._explain(0):
            self._destination.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self._destination.parent).free
            if self._expected_bytes is not None and self._expected_bytes > free:
                raise self._no_space(self._expected_bytes, free)
            try:
                self._folder.mkdir()
                self._data = (self._folder / WEIGHTS_FILE).open("xb")
            except BaseException:
                self._discard()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self._committed:
            self._discard()

    @property
    def bytes_written(self) -> int:
        """Bytes of the weights file so far."""
        return self._offset

    def add_weight(self, name: str, array: NDArray[Any]) -> TensorRef:
        """Append a tensor to the weights file at once; or name what `share` found for it.

        Args:
            name: Unique among the weights; the name of the initializer.
            array: Any NumPy or ml_dtypes element type that ONNX knows. A C-contiguous array is
                written without a copy.

        Raises:
            ExportError: The disk is full.
        """
        shared = None if self._shared is None else self._shared.find(name, array)
        if self._shared is None or shared is None:
            return self.add_weight_chunks(name, array.dtype, array.shape, [array])
        self._take(name)
        self._files[shared.location] = self._shared.file(shared)
        return shared

    def add_weight_chunks(
        self,
        name: str,
        dtype: np.dtype[Any],
        dims: tuple[int, ...],
        chunks: Iterable[NDArray[Any]],
    ) -> TensorRef:
        """Append a tensor that arrives in pieces, in C order, such as blocks of rows."""
        self._take(name)
        length = math.prod(dims) * dtype.itemsize
        align = PAGE_BYTES if length >= PAGE_BYTES else CACHE_LINE_BYTES
        self._append(bytes(-self._offset % align))
        offset = self._offset
        for chunk in chunks:
            assert chunk.dtype == dtype, f"{name}: {chunk.dtype} in a tensor of {dtype}"
            flat = np.ascontiguousarray(chunk).reshape(-1)
            self._append(flat.view(np.uint8).data)
        assert self._offset - offset == length, f"{name}: {self._offset - offset} of {length} bytes"
        return TensorRef(name, onnx_dtype(dtype), tuple(dims), offset, length)

    def write_graph(self, kind: str, model: onnx.ModelProto) -> None:
        """Write the "paged" or the "gqa" graph."""
        self.write_bytes(GRAPH_FILES[kind], model.SerializeToString())

    def write_bytes(self, name: str, data: bytes) -> None:
        """Write a whole file; `name` may lead into a folder, with forward slashes."""
        self._claim(name)
        path = self._folder / name
        with self._explain(len(data)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self._files[name] = FileInfo(hashlib.sha256(data).hexdigest(), len(data))

    def inside(self, name: str) -> Path:
        """A folder to make within this artifact, of an artifact by itself, before `commit`.

        No file of it is listed here, but for the weights that `share` lets this one's graphs name.
        """
        self._claim(name)
        return self._folder / name

    def share(self, name: str) -> None:
        """Let weights to come be stored once that the artifact `inside` has, too.

        Raises:
            ArtifactError: What lies there is no whole artifact.
        """
        self._shared = SharedTensors(Artifact.read(self._folder / name), name)

    def copy_file(self, source: str | os.PathLike[str], name: str | None = None) -> None:
        """Copy a small file (it is read whole), under its own name or another."""
        source = Path(source)
        self.write_bytes(name or source.name, source.read_bytes())

    def commit(self, manifest: Manifest) -> Path:
        """Write the manifest last, with every file's checksum, and rename into place.

        `manifest.files` must be empty; it is filled here. Returns the artifact's folder. Nothing
        can be added afterwards. All is on the disk before it has its name, and that is before an
        older artifact is deleted: a power failure leaves one of them whole. Where the older one
        cannot be deleted, a warning says where it is left.
        """
        assert self._data is not None, "the writer is not open"
        assert not manifest.files, "the writer fills in the files"
        with self._explain(0):
            self._data.close()
        self._data = None
        self._files[WEIGHTS_FILE] = FileInfo(self._hash.hexdigest(), self._offset)
        text = replace(manifest, files=dict(self._files)).dumps()
        with self._explain(len(text)):
            (self._folder / MANIFEST_FILE).write_text(text, encoding="utf-8")
        with self._explain(0):
            _sync(self._folder)
        check_destination(self._destination, overwrite=self._overwrite)
        older = None
        with self._explain(0):
            if self._destination.exists():
                older = _swap(self._folder, self._destination)
            else:
                self._folder.rename(self._destination)
        self._committed = True
        try:
            _sync_folder(self._destination.parent)
        except OSError as error:
            logger.warning(
                "%s is complete, but may not be there after a power failure: %s%s",
                *(self._destination, error, f"; the older one is left in {older}" if older else ""),
            )
            return self._destination
        if older is not None:
            _remove(older, "the older artifact")
        return self._destination

    def _append(self, data: bytes | memoryview) -> None:
        assert self._data is not None, "the writer is not open"
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            with self._explain(len(data) - start):
                self._data.write(chunk)
            self._hash.update(chunk)
            self._offset += len(chunk)

    def _take(self, name: str) -> None:
        assert name not in self._tensors, f"weight {name} is added twice"
        self._tensors.add(name)

    def _claim(self, name: str) -> None:
        assert not Path(name).is_absolute(), f"{name} leads out of the folder"
        assert ".." not in Path(name).parts, f"{name} leads out of the folder"
        assert name not in {WEIGHTS_FILE, MANIFEST_FILE}, f"{name} is written by the writer"
        assert name not in self._files, f"{name} is written twice"
        assert self._data is not None, "the writer is not open"

    def _discard(self) -> None:
        if self._data is not None:
            with suppress(OSError):  # flushing fails on a full disk; the file goes anyway
                self._data.close()
            self._data = None
        if self._folder.exists():
            _remove(self._folder, "what was written of the artifact")

    @contextmanager
    def _explain(self, pending: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise ExportError(
                    f"cannot write the artifact to {self._destination}: {error.strerror or error}. "
                    "Nothing was left behind; choose another destination."
                ) from error
            existing = next(p for p in self._destination.parents if p.exists())
            free = shutil.disk_usage(existing).free
            raise ExportError(
                f"cannot write the artifact to {self._destination}: {error.strerror or error}. "
                f"{_mib(self._offset)} were written, at least {_mib(pending)} more are needed, "
                f"{_mib(free)} are free. Nothing was left behind; free some space or choose "
                "another destination."
            ) from error

    def _no_space(self, needed: int, free: int) -> ExportError:
        return ExportError(
            f"the artifact needs {_mib(needed)} and {self._destination.parent} has {_mib(free)} "
            "free. Free some space, choose another destination, or a smaller precision."
        )


def _mib(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"


def _is_artifact(folder: Path) -> bool:
    """Whether an artifact of any format version is in a folder, as far as its manifest tells.

    Browser extensions and web apps, say, have a file of that name, too.
    """
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    if not isinstance(manifest, dict) or "format_version" not in manifest:
        return False
    files = manifest.get("files")
    return isinstance(files, dict) and GRAPH_FILES["paged"] in files


def _remove(folder: Path, what: str) -> None:
    """Delete a folder as far as that goes; a warning says where the rest is, and why."""
    shutil.rmtree(folder, ignore_errors=True)
    if not folder.exists():
        return
    try:
        shutil.rmtree(folder)
    except OSError as error:
        logger.warning("%s is left in %s, delete it yourself: %s", what, folder, error)


def _sync(folder: Path) -> None:
    """Have all that is in a folder on the disk."""
    for path in folder.rglob("*"):
        if path.is_dir():
            _sync_folder(path)
            continue
        with path.open("rb+") as file:  # Windows wants it to be writable
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    """Have a folder's names on the disk, where the system and the file system can do that."""
    if sys.platform == "win32":
        return
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # in a parent that may be written to, and not be listed
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def _swap(new: Path, old: Path) -> Path:
    """Exchange two folders, at best so that always one has the name; returns where `old` is now."""
    if _exchange(new, old):
        return new
    aside = old.with_name(f"{new.name}.old")
    old.rename(aside)
    try:
        new.rename(old)
    except BaseException:
        aside.rename(old)
        raise
    return aside


def _exchange(new: Path, old: Path) -> bool:
    """Exchange in one system call; False where the system or file system has none."""
    at_cwd, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE, renameat2(2) of Linux
    if not sys.platform.startswith("linux"):
        return False
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    return bool(renameat2(at_cwd, os.fsencode(new), at_cwd, os.fsencode(old), exchange) == 0)
