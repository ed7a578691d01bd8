"""Where an export comes from: a folder with safetensors, or a GGUF file."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from onnxport.exporter.checkpoint import Checkpoint
from onnxport.exporter.config import Config
from onnxport.exporter.embedding import read_embedding
from onnxport.exporter.families.base import Family, TensorNames
from onnxport.exporter.gguf.model import GgufModel
from onnxport.exporter.gguf.parts import is_gguf
from onnxport.exporter.hub import CheckpointFolder, fetch_weights
from onnxport.exporter.quantization import Quantization, read_quantization
from onnxport.exporter.source import END, named_ids
from onnxport.graphs.embedding_spec import EmbeddingSpec
from onnxport.graphs.spec import ArchSpec

DEFAULT_PRECISION: Final = "int4"


class FolderOrigin:
    """A folder with `config.json` and safetensors weights, which a model on the hub becomes.

    Attributes:
        folder: Where it is.
        config: What `config.json` says.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        """Read the configuration.

        Raises:
            CheckpointError: It cannot be read.
        """
        self.folder = folder
        self.config = Config.read(folder.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Do nothing: no file is open."""

    @property
    def precision(self) -> str:
        """The precision of the weights where none was asked for."""
        return DEFAULT_PRECISION

    @property
    def is_mixed(self) -> bool:
        """Whether matrices then have precisions of their own."""
        return False

    @cached_property
    def _quantization(self) -> Quantization:
        return read_quantization(self.config)

    def check_weights(self) -> None:
        """Check what the configuration says of how weights are quantized.

        Of a model that is not supported anyway nobody asks, for other weights would not help.

        Raises:
            CheckpointError: A value is of a wrong type.
            UnsupportedModelError: They are quantized in a way that is not read.
        """
        _ = self._quantization

    def files(self) -> Path:
        """The folder of the tokenizer and other small files."""
        return self.folder.path

    def ends(self, vocab_size: int) -> tuple[int, ...]:
        """The tokens that end texts, as the model itself names them. Raises CheckpointError."""
        return named_ids(self.folder.path, END)

    def open(self, spec: ArchSpec, token: str | bool | None) -> Checkpoint:
        """Open the weights, of a model on the hub downloaded first. Raises CheckpointError."""
        folder = fetch_weights(self.folder, token=token)
        return Checkpoint.open(
            folder.path, self._quantization.weight_block, self._quantization.packing
        )

    def names(self, family: Family, checkpoint: Checkpoint) -> TensorNames:
        """What the tensors of a checkpoint are called."""
        found = family.names_in(checkpoint.names)
        return replace(found, ignored=(*found.ignored, *self._quantization.ignored))

    def embedding(self, spec: ArchSpec) -> EmbeddingSpec | None:
        """What is said of embeddings. Raises CheckpointError or UnsupportedModelError."""
        return read_embedding(self.config, self.folder.path, spec)


class GgufOrigin:
    """A GGUF file, of a split one the first.

    Attributes:
        folder: Where it is.
        config: What its metadata says, as `config.json` would.
    """

    def __init__(self, folder: CheckpointFolder) -> None:
        """Read the metadata. Raises CheckpointError or UnsupportedModelError."""
        self.folder = folder
        self._model = GgufModel(folder.path)
        self.config = self._model.config

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._model.close()

    @property
    def precision(self) -> str:
        """The precision of the weights where none was asked for."""
        return self._model.precision

    @property
    def is_mixed(self) -> bool:
        """Whether matrices then have precisions of their own."""
        return self._model.is_mixed

    def check_weights(self) -> None:
        """Do nothing: types are checked with the header, and when the weights are opened."""

    def files(self) -> Path:
        """A folder, which is gone when the file is closed, of the tokenizer that is in it."""
        return self._model.write_files()

    def ends(self, vocab_size: int) -> tuple[int, ...]:
        """The tokens that end texts, as the file names them. Raises CheckpointError."""
        return tuple(self._model.ends(vocab_size))

    def open(self, spec: ArchSpec, token: str | bool | None) -> Checkpoint:
        """Open the weights. Raises CheckpointError."""
        return self._model.open(spec)

    def names(self, family: Family, checkpoint: Checkpoint) -> TensorNames:
        """What its tensors are called."""
        return self._model.names

    def embedding(self, spec: ArchSpec) -> EmbeddingSpec | None:
        """What is said of embeddings."""
        return self._model.embedding


Origin = FolderOrigin | GgufOrigin


def open_origin(folder: CheckpointFolder) -> Origin:
    """What `find_checkpoint` found. Raises CheckpointError or UnsupportedModelError."""
    return GgufOrigin(folder) if is_gguf(folder.path) else FolderOrigin(folder)
