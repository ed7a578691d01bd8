"""Read an artifact folder, trusting nothing in it.

The writer is `onnxport.graphs.artifact_writer.ArtifactWriter`. The manifest's schema is
`onnxport.graphs.manifest`, importable from here.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ArtifactError
from onnxport.graphs.manifest import GRAPH_FILES, MANIFEST_FILE, FileInfo, Manifest, Source
from onnxport.graphs.tensors import WEIGHTS_FILE, TensorRef, numpy_dtype

if TYPE_CHECKING:
    import onnx

__all__ = [
    "GRAPH_FILES",
    "MANIFEST_FILE",
    "WEIGHTS_FILE",
    "Artifact",
    "FileInfo",
    "GraphKind",
    "Manifest",
    "Source",
    "TensorRef",
]

GraphKind = Literal["paged", "gqa"]


@dataclass(frozen=True, slots=True)
class Artifact:
    """A checked artifact folder; make one with `Artifact.read`."""

    path: Path  # absolute, symbolic links resolved
    manifest: Manifest
    # Names that were found to be inside of the folder -> their real paths.
    _real: dict[str, Path] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def read(
        cls,
        path: str | os.PathLike[str],
        *,
        verify: Literal["size", "sha256"] = "size",
        check_graphs: bool = True,
    ) -> Artifact:
        """Open a folder and check its manifest, files and graphs.

        Args:
            path: The artifact folder.
            verify: "size" checks that every file is there and has its size; "sha256" also reads
                all of them.
            check_graphs: Look into the graphs, too; else that is done when one is loaded.

        Raises:
            ArtifactError: The manifest is missing or invalid, a file is missing, differs, or
                leads out of the folder, or a graph is damaged.
        """
        try:
            folder = Path(path).resolve()
            text = (folder / MANIFEST_FILE).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # of a path with NUL, or what is no UTF-8
            raise ArtifactError(
                f"{path} is not an artifact: cannot read {MANIFEST_FILE} ({error}). Give the "
                "folder that `onnxport export` wrote."
            ) from error
        artifact = cls(folder, Manifest.loads(text))
        files = artifact.manifest.files
        for required in (GRAPH_FILES["paged"], WEIGHTS_FILE):
            if required not in files:
                raise ArtifactError(f"{MANIFEST_FILE} in {folder} does not list {required}")
        for name, info in files.items():
            artifact._check_file(name, info, verify)
        for kind in ("paged", "gqa"):
            if check_graphs and GRAPH_FILES[kind] in files:
                artifact._parse(GRAPH_FILES[kind])
        return artifact

    @property
    def has_gqa(self) -> bool:
        """Whether the folder holds the GQA graph besides the paged one."""
        return GRAPH_FILES["gqa"] in self.manifest.files

    def load_graph(self, kind: GraphKind) -> onnx.ModelProto:
        """The graph, its weights still in the weights file. Raises ArtifactError if absent."""
        if GRAPH_FILES[kind] not in self.manifest.files:
            raise ArtifactError(f"{self.path} has no {kind} graph ({GRAPH_FILES[kind]})")
        return self._parse(GRAPH_FILES[kind])

    def read_tensor(self, initializer: onnx.TensorProto) -> NDArray[Any]:
        """An initializer of one of the graphs; external data is a read-only memory map."""
        from onnx import TensorProto, numpy_helper

        if initializer.data_location != TensorProto.EXTERNAL:
            inline: NDArray[Any] = numpy_helper.to_array(initializer)
            return inline
        location, offset, _ = self.external(initializer)
        dtype = numpy_dtype(initializer.data_type)
        return self.map_file(location, offset, tuple(initializer.dims), dtype)

    def map_file(
        self, location: str, offset: int, dims: tuple[int, ...], dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        """Bytes of a file as a read-only memory map; what names them was checked before."""
        if math.prod(dims) == 0:
            return np.zeros(dims, dtype)
        raw: NDArray[np.uint8] = np.memmap(
            str(self.path / location),  # it would look a Path up again, for each of hundreds
            np.uint8,
            mode="r",
            offset=offset,
            shape=(math.prod(dims) * dtype.itemsize,),
        )
        tensor: NDArray[Any] = raw.view(dtype).reshape(dims)
        return tensor

    def _check_file(self, name: str, info: FileInfo, verify: str) -> None:
        path = self._inside(name, MANIFEST_FILE)
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ArtifactError(f"{self.path / name} is missing ({error.strerror})") from error
        if not path.is_file():
            raise ArtifactError(f"{self.path / name} is no regular file")
        if size != info.size:
            raise ArtifactError(
                f"{self.path / name} has {size} bytes, its manifest says {info.size}: it is "
                "truncated or changed. Export or download it again."
            )
        if verify == "sha256":
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != info.sha256:
                raise ArtifactError(
                    f"{self.path / name} has SHA-256 {found}, its manifest says {info.sha256}: "
                    "it is damaged or changed. Export or download it again."
                )

    def _inside(self, name: str, where: str) -> Path:
        """The real path of a file that a manifest or graph names, if it is in the folder."""
        if name in self._real:
            return self._real[name]
        parts = PurePosixPath(name).parts
        absolute = PurePosixPath(name).is_absolute() or bool(PureWindowsPath(name).anchor)
        outside = absolute or not parts or ".." in parts or ".." in PureWindowsPath(name).parts
        if not outside and "\0" not in name:
            real = (self.path / name).resolve()
            if real.is_relative_to(self.path):
                self._real[name] = real
                return real
        raise ArtifactError(
            f"{where} in {self.path} names {name!r}, which is outside the folder; refused. An "
            "artifact's files are in its own folder, copied and not linked."
        )

    def _parse(self, name: str) -> onnx.ModelProto:
        import onnx

        try:
            model = onnx.load(self.path / name, load_external_data=False)
        except Exception as error:  # protobuf's DecodeError, which onnx does not export
            raise ArtifactError(f"{self.path / name} is no ONNX model: {error}") from error
        for tensor in _tensors(model):
            if tensor.data_location == onnx.TensorProto.EXTERNAL:
                self.external(tensor)
        return model

    def external(self, tensor: onnx.TensorProto) -> tuple[str, int, int]:
        """Location, offset and length of a tensor's external data, checked.

        Raises ArtifactError where that is not within one of the files, or of another size.
        """
        entries: Mapping[str, str] = {entry.key: entry.value for entry in tensor.external_data}
        location = entries.get("location", "")
        self._inside(location, f"initializer {tensor.name}")
        if location not in self.manifest.files:
            raise ArtifactError(
                f"initializer {tensor.name} lies in {location!r}, which {MANIFEST_FILE} in "
                f"{self.path} does not list"
            )
        size = self.manifest.files[location].size
        try:
            needed = math.prod(tensor.dims) * numpy_dtype(tensor.data_type).itemsize
            offset = int(entries.get("offset", "0"))
            length = int(entries["length"]) if "length" in entries else size - offset
        except (ValueError, KeyError) as error:
            raise ArtifactError(
                f"initializer {tensor.name} has bad external data: {error}"
            ) from error
        if (
            offset < 0
            or length != needed
            or offset + length > size
            or min(tensor.dims, default=0) < 0
        ):
            raise ArtifactError(
                f"initializer {tensor.name} takes {length} bytes at {offset} of {location}, "
                f"which has {size} bytes; its shape {list(tensor.dims)} needs {needed}"
            )
        return location, offset, length


def refuse_head(artifact: Artifact) -> None:
    """Raise ArtifactError where an artifact is a draft head, which says nothing by itself."""
    head = artifact.manifest.model.draft
    if head is not None:
        raise ArtifactError(
            f"{artifact.path} is a draft head, and no model: name it where the model that it "
            "guesses for is served, --speculative-config "
            f'\'{{"method": "{head.method}", "model": "…"}}\''
        )


def _tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    """Every tensor of a model, those in attributes, subgraphs and functions included."""
    yield from _graph_tensors(model.graph)
    for function in model.functions:
        yield from _node_tensors(function.node)


def _graph_tensors(graph: onnx.GraphProto) -> Iterator[onnx.TensorProto]:
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    yield from _node_tensors(graph.node)


def _node_tensors(nodes: Any) -> Iterator[onnx.TensorProto]:
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors
            for graph in (attribute.g, *attribute.graphs):
                yield from _graph_tensors(graph)
