"""What architectures read of a GGUF file: metadata, shapes of tensors, and a few small ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.gguf.layouts import QKV, ROUTER, SECOND_NORM
from onnxport.exporter.gguf.metadata import Metadata

FURTHER: Final = "nextn_predict_layers"
_FIRST: Final = "blk.0."


@dataclass(frozen=True, slots=True)
class Facts:
    """A file without its weights."""

    metadata: Metadata
    shapes: Mapping[str, tuple[int, ...]]  # of all tensors
    numbers: Callable[[str], list[float] | None]  # of a small tensor; None: there is none

    def has(self, tensor: str) -> bool:
        """Whether a tensor is there."""
        return tensor in self.shapes

    @property
    def joins_qkv(self) -> bool:
        """Whether queries, keys and values of the first layer are one product, of one tensor."""
        return self.has(f"{_FIRST}{QKV}.weight")

    @property
    def has_second_norm(self) -> bool:
        """Whether attention and MLP of the first layer read norms of their own of one stream."""
        return self.has(_FIRST + SECOND_NORM)

    def has_qkv_bias(self) -> bool:
        """Whether queries of the first layer have biases."""
        return self.has(f"{_FIRST}{QKV}.bias") or self.has(f"{_FIRST}attn_q.bias")

    def count(self, key: str, default: int | None = None) -> int:
        """How many there are of something, at least 1; None: the file has to say so.

        Raises:
            CheckpointError: It does not, or says that there are none.
        """
        meta = self.metadata
        given = meta.require(key, int) if default is None else meta.get(key, int, default)
        if given < 1:
            raise CheckpointError(
                f"{meta.path}: {meta.name(key)} is {given}, expected at least 1. Download it again."
            )
        return given

    def by_layer(self, key: str, layers: int) -> list[Any]:
        """A value for each layer, which the metadata may have as one number.

        Raises:
            CheckpointError: There are more, or fewer.
        """
        meta = self.metadata
        if not meta.holds(key, list):
            return [meta.require(key, int)] * layers
        found: list[Any] = meta.require(key, list)
        if len(found) not in (layers, self.num_layers()):
            raise CheckpointError(
                f"{meta.path}: {meta.name(key)} has {len(found)} entries for {layers} layers. "
                "Download it again."
            )
        return found[:layers]

    def where_any(self, key: str, layers: int) -> int:
        """The one number of layers that have something, where 0 is of the others.

        Raises:
            CheckpointError: See `by_layer`.
            UnsupportedModelError: The numbers are several, or there is none.
        """
        found = self.by_layer(key, layers)
        counts = {one for one in found if one}
        if len(counts) != 1 or not all(type(one) is int and one >= 0 for one in found):
            raise UnsupportedModelError(
                f"{self.metadata.path}: {self.metadata.name(key)} is {found}; supported is one "
                "number for the layers that have some, and 0 for the others."
            )
        return int(counts.pop())

    def num_layers(self) -> int:
        """The layers that there are, by the metadata.

        Raises:
            CheckpointError: There are fewer tensors, each layer of which has some.
        """
        told = self.count("block_count")
        if told > len(self.shapes):
            raise CheckpointError(
                f"{self.metadata.path}: {self.metadata.name('block_count')} is {told}, and there "
                f"are {len(self.shapes)} tensors in all. Download it again."
            )
        return told

    def further_layers(self) -> int:
        """Layers behind the last one, which guess tokens behind the next one.

        Raises:
            CheckpointError: There are as many as layers, or fewer than none.
        """
        told = self.metadata.get(FURTHER, int, 0)
        if not 0 <= told < self.num_layers():
            raise CheckpointError(
                f"{self.metadata.path}: {self.metadata.name(FURTHER)} is {told}, and there are "
                f"{self.num_layers()} layers with these. Download it again."
            )
        return told

    def num_experts(self) -> int:
        """The experts of a layer, by the metadata.

        Raises:
            CheckpointError: No router has rows for as many.
        """
        told = self.count("expert_count")
        rows = {shape[0] for name, shape in self.shapes.items() if name.endswith(ROUTER)}
        if told not in rows:
            raise CheckpointError(
                f"{self.metadata.path}: {self.metadata.name('expert_count')} is {told}, and what "
                f"chooses experts has {sorted(rows)} rows. Download it again."
            )
        return told

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
