"""What architectures read of a GGUF file: metadata, shapes of tensors, and a few small ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from onnxport.errors import CheckpointError
from onnxport.exporter.gguf.metadata import Metadata


@dataclass(frozen=True, slots=True)
class Facts:
    """A file without its weights."""

    metadata: Metadata
    shapes: Mapping[str, tuple[int, ...]]  # of all tensors
    numbers: Callable[[str], list[float] | None]  # of a small tensor; None: there is none

    def has(self, tensor: str) -> bool:
        """Whether a tensor is there."""
        return tensor in self.shapes

    def vocab_size(self) -> int:
        """Rows of the embedding.

        Raises:
            CheckpointError: There is none, or the metadata says otherwise.
        """
        name = "token_embd.weight"
        shape = self.shapes.get(name, ())
        if len(shape) != 2:
            raise CheckpointError(
                f"{self.metadata.path} holds no embedding {name} of two dimensions. Give the file "
                "of the model itself, and of a split one the first."
            )
        told = self.metadata.get("vocab_size", int, shape[0])
        if told != shape[0]:
            raise CheckpointError(
                f"{self.metadata.path}: {self.metadata.name('vocab_size')} is {told}, and {name} "
                f"has {shape[0]} rows. Download it again."
            )
        return shape[0]
