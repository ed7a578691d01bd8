"""Lowered graphs, kept in a folder, so that a later start need not lower them again.

A file holds one graph and no weights: those stay in the artifact. Its name says what it depends on:
the artifact, the code of the passes, ONNX Runtime's version, and the choices that the passes obey.
A file that is damaged, or cannot be read, is as good as none; a folder that cannot be written to is
left alone. The folder is its user's own: a graph in it is run as it is.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxport.graphs import fp4
from onnxport.graphs.artifact import GRAPH_FILES, Artifact
from onnxport.graphs.manifest import WEIGHT_FILES
from onnxport.graphs.tensors import convert
from onnxport.version import __version__

logger = logging.getLogger(__name__)

FORMAT: Final = 3  # of the files; others are made anew
MAGIC: Final = b"onnxport graph\n"
SUFFIX: Final = ".graph"
MOST_BYTES: Final = 64 << 20  # of all files; the least recently used ones go
NUMBERS, SCALES = "uint8", "float8_e8m0fnu"  # of MXFP4
DTYPES: Final[Mapping[str, Any]] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    NUMBERS: np.uint8,
    SCALES: ml_dtypes.float8_e8m0fnu,
}


@dataclass(frozen=True, slots=True)
class Conversion:
    """An initializer that is made of a tensor of a weights file.

    That is in another floating type; or it is NUMBERS or SCALES, see `graphs.fp4`.
    """

    name: str
    location: str  # the file
    offset: int  # bytes
    dims: tuple[int, ...]  # in the file
    stored: str  # its type in the file: one of DTYPES
    dtype: str  # one of DTYPES

    def make(self, artifact: Artifact) -> NDArray[Any]:
        """The contents."""
        stored, dtype = np.dtype(DTYPES[self.stored]), np.dtype(DTYPES[self.dtype])
        source = artifact.map_file(self.location, self.offset, self.dims, stored)
        if self.stored == NUMBERS:
            return fp4.int8_numbers(source)
        if self.stored == SCALES:
            return fp4.int8_scales(self.name, source, dtype)
        return convert(self.name, source, dtype)


@dataclass(frozen=True, slots=True)
class LoweredGraph:
    """What a session is made of besides the weights file."""

    model: bytes  # a serialized ModelProto; its external data lies in the artifact
    is_exact: bool  # whether its products are in float32
    # Of its initializers, without copies of converted ones, and of what operators keep besides.
    stored_bytes: int
    conversions: tuple[Conversion, ...] | None  # None: something else is attached, keep it not

    @property
    def int8_bytes(self) -> int:
        """Memory for experts in MXFP4 that `convert` makes integers of."""
        made = {NUMBERS: 2, SCALES: np.dtype(np.float32).itemsize}  # bytes of one in the file
        return sum(made.get(one.stored, 0) * math.prod(one.dims) for one in self.conversions or ())

    def convert(self, artifact: Artifact) -> dict[str, NDArray[Any]]:
        """The contents of converted initializers."""
        assert self.conversions is not None, "this graph cannot come from a file"
        return {one.name: one.make(artifact) for one in self.conversions}


def graph_key(
    artifact: Artifact, code: Iterable[Path], choices: Mapping[str, str | int | None]
) -> dict[str, Any] | None:
    """Everything that a lowered graph depends on, in JSON types; None where that is not known.

    Small weights become a part of the graph, so a weights file is told by its checksum in the
    manifest, size and time; a changed one is another one even if the manifest was not changed.

    Args:
        artifact: whose paged graph is lowered.
        code: the modules that do it, or folders of them. Any other size or time of one is another
            key.
        choices: what they are told, and versions of what runs the graph.
    """
    try:
        graph = (artifact.path / GRAPH_FILES["paged"]).read_bytes()
        files = [name for name in WEIGHT_FILES if name in artifact.manifest.files]
        weights = [(artifact.path / name).stat() for name in files]
        modules = sorted(
            (path.name, name, stat.st_size, stat.st_mtime_ns)
            for path in code
            for name, stat in _modules(path)
        )
    except OSError as error:
        logger.info("the lowered graph is not kept: %s", error)
        return None
    key = {
        "format": FORMAT,
        "onnxport": __version__,
        "code": hashlib.sha256(json.dumps(modules).encode()).hexdigest(),
        "graph": hashlib.sha256(graph).hexdigest(),
        "artifact": artifact.manifest.fingerprint,
        "weights": [(one.st_size, one.st_mtime_ns) for one in weights],
        "choices": dict(choices),
    }
    return key


def _modules(path: Path) -> Iterator[tuple[str, os.stat_result]]:
    """A module, or those of a folder. Raises OSError where it is not there."""
    if path.suffix == ".py":
        yield path.name, path.stat()
        return
    for entry in os.scandir(path):
        if entry.name.endswith(".py"):
            yield entry.name, entry.stat()


class GraphCache:
    """The file of one key."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        """Name the file; nothing is read or written.

        Args:
            folder: of all graphs; it need not exist.
            key: what `graph_key` returned.
        """
        self._folder = folder
        self._key = json.dumps(key, sort_keys=True)
        self.path = folder / (hashlib.sha256(self._key.encode()).hexdigest()[:32] + SUFFIX)

    def read(self) -> LoweredGraph | None:
        """The graph, if it is there and whole."""
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            logger.info("the lowered graph in %s is made anew: %s", self.path, error)
            return None
        found = self._parse(content)
        if found is None:
            logger.info("the lowered graph in %s is made anew: the file is damaged", self.path)
            return None
        try:
            os.utime(self.path)  # the least recently used files go first
        except OSError:
            logger.debug("%s cannot be marked as used", self.path)
        return found

    def write(self, graph: LoweredGraph) -> None:
        """Keep a graph, in one step, and let old ones go. A folder that refuses is left alone."""
        if graph.conversions is None or len(graph.model) > MOST_BYTES:
            return
        about = asdict(graph)
        model = about.pop("model")
        header = json.dumps({"key": self._key, "graph": about}).encode()
        body = len(header).to_bytes(8, "little") + header + model
        new = self.path.with_suffix(f".{os.getpid()}.new")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            new.write_bytes(MAGIC + hashlib.sha256(body).digest() + body)
            new.replace(self.path)
            _prune(self._folder)
        except OSError as error:
            logger.info("the lowered graph is not kept in %s: %s", self._folder, error)

    def _parse(self, content: bytes) -> LoweredGraph | None:
        start = len(MAGIC)
        digest, body = content[start : start + 32], content[start + 32 :]
        if content[:start] != MAGIC or hashlib.sha256(body).digest() != digest:
            return None
        end = 8 + int.from_bytes(body[:8], "little")
        header = json.loads(body[8:end])
        if header["key"] != self._key:
            return None
        about = header["graph"]
        conversions = tuple(
            Conversion(**{**one, "dims": tuple(one["dims"])}) for one in about.pop("conversions")
        )
        return LoweredGraph(model=body[end:], conversions=conversions, **about)


def _prune(folder: Path) -> None:
    """Delete the least recently used files beyond MOST_BYTES, and those of broken writes."""
    files = []
    for entry in os.scandir(folder):
        if entry.name.endswith((SUFFIX, ".new")):
            stat = entry.stat()
            files.append((stat.st_mtime_ns, stat.st_size, entry.path))
    total = 0
    for _, size, path in sorted(files, reverse=True):
        total += size
        if total > MOST_BYTES:
            Path(path).unlink(missing_ok=True)  # another process may do the same
