"""A model in one GGUF file, or in several that are parts of it."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np

from onnxport.errors import CheckpointError
from onnxport.exporter.checkpoint import to_float32
from onnxport.exporter.config import Config
from onnxport.exporter.embedding import gguf_pooling
from onnxport.exporter.families.base import TensorNames
from onnxport.exporter.gguf import blocks
from onnxport.exporter.gguf.architectures import read_config
from onnxport.exporter.gguf.checkpoint import GgufCheckpoint, Heads
from onnxport.exporter.gguf.dense import activations
from onnxport.exporter.gguf.facts import FURTHER, Facts
from onnxport.exporter.gguf.layouts import GATE_UP, QKV, layout
from onnxport.exporter.gguf.metadata import Metadata
from onnxport.exporter.gguf.orders import orders
from onnxport.exporter.gguf.parts import parts_of
from onnxport.exporter.gguf.reranker import POOLING, RANK, score_head
from onnxport.exporter.gguf.shard import GgufShard
from onnxport.exporter.gguf.tokenizer import write_files
from onnxport.exporter.gguf.vocabulary import check_count, read_ends
from onnxport.graphs.embedding_spec import EmbeddingSpec
from onnxport.graphs.lora_module import block_of
from onnxport.graphs.spec import ArchSpec

_COUNT: Final = "split.count"
_NUMBER: Final = "split.no"
_TENSORS: Final = "split.tensors.count"


class GgufModel:
    """A model's metadata, and its open files.

    Attributes:
        config: What `config.json` would say.
        names: What its tensors are called.
        embedding: What it says of embeddings; None: nothing.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, and the others that belong to it.

        Raises:
            CheckpointError: A file is missing, corrupt or not the first one, or contradicts itself.
            UnsupportedModelError: An architecture, key or value that is not supported.
        """
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._shards: list[GgufShard] = []
        try:
            self._open(path)
            self._metadata = Metadata(self._shards[0].metadata, path)
            shapes = {
                name: tensor.shape for one in self._shards for name, tensor in one.tensors.items()
            }
            self.embedding = _embedding(self._metadata)
            self._facts = Facts(self._metadata, shapes, self._numbers)
            architecture, values = read_config(self._facts)
        except BaseException:
            self.close()
            raise
        self._architecture = architecture
        self.config = Config(values, path)
        self._vocab_size: int = values["vocab_size"]
        names = layout(
            self._metadata.architecture,
            joins_qkv=self._facts.joins_qkv,
            has_second_norm=self._facts.has_second_norm,
        )
        if any(name.endswith(GATE_UP) for name in shapes):
            names = replace(names, expert_gate_up=(GATE_UP,))
        layers = values["num_hidden_layers"]
        further = range(layers, layers + self._metadata.get(FURTHER, int, 0))
        self.names: TensorNames = replace(names, further=tuple(map(names.layer.format, further)))

    def close(self) -> None:
        """Close the files, and remove those that were written. Idempotent."""
        for shard in self._shards:
            shard.close()
        if self._folder is not None:
            self._folder.cleanup()

    @cached_property
    def _wanted_bits(self) -> frozenset[int | None]:
        """The bits that matrices of layers need, see `blocks.wanted_bits`."""
        tensors = {name: one for shard in self._shards for name, one in shard.tensors.items()}
        wanted = blocks.wanted_bits({name: one.dtype for name, one in tensors.items()})
        return frozenset(
            wanted[name]
            for name, one in tensors.items()
            if len(one.shape) > 1 and name.startswith("blk.")
        )

    @property
    def precision(self) -> str:
        """The precision of the weights where none was asked for: the one that the file is nearest.

        It is int4 where some matrices are in four bits, or none is quantized, else int8.
        """
        return "int8" if 8 in self._wanted_bits and 4 not in self._wanted_bits else "int4"

    @property
    def is_mixed(self) -> bool:
        """Whether some matrices need more bits than others, or are plain beside them."""
        return len(self._wanted_bits) > 1

    def open(self, spec: ArchSpec) -> GgufCheckpoint:
        """The weights. Raises CheckpointError where they are not there, or cannot be decoded."""
        turned: dict[str, Heads] = {}
        counts = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
        counts[QKV] = spec.num_heads + spec.num_kv_heads
        for layer in range(spec.num_layers if self._architecture.neighbours else 0):
            block = block_of(spec, layer, "q_proj") if self.names.blocks else layer
            prefix = self.names.layer.format(block)
            for name, count in counts.items():
                heads = Heads(count, spec.head_size)
                turned |= {f"{prefix}{name}.{kind}": heads for kind in ("weight", "bias")}
        tiled = orders(spec, self.names) if self._architecture.tiled else {}
        own = self.names.layer + self.names.activation
        values = activations(self._metadata, spec.num_layers, own) | score_head(self._facts)
        return GgufCheckpoint(self._shards, turned, tiled, values)

    def write_files(self) -> Path:
        """Write tokenizer, templates and generation settings to a folder, which `close` removes.

        Raises:
            CheckpointError: What the metadata say of them contradicts itself, or there are more
                tokens than rows of the embedding.
            UnsupportedModelError: The tokenizer is of a kind that is not known.
        """
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="onnxport-gguf-")
            meta = self._metadata
            check_count(meta.all, meta.path, self._vocab_size)
            write_files(meta.all, meta.path, meta.architecture, Path(self._folder.name))
        return Path(self._folder.name)

    def ends(self, vocab_size: int) -> list[int]:
        """The tokens that end texts, also where the tokenizer is not read; see `read_ends`."""
        return read_ends(self._metadata.all, self._metadata.path, vocab_size)

    def _open(self, path: Path) -> None:
        """Open all files; the first one says how many there are."""
        first = GgufShard(path)
        self._shards.append(first)
        count, number = (_whole(first, key, least) for key, least in ((_COUNT, 1), (_NUMBER, 0)))
        if count in (0, 1):
            return
        paths = parts_of(path)
        if number != 0 or len(paths) != count:
            raise CheckpointError(
                f"{path} is part {number + 1} of {count} of a model. Give the first one, whose "
                f"name ends in -00001-of-{count:05d}.gguf, with the others beside it."
            )
        for place, one in enumerate(paths[1:], 1):
            shard = GgufShard(one)
            self._shards.append(shard)
            found = (shard.metadata.get(_NUMBER), shard.metadata.get(_COUNT))
            if found != (place, count):
                raise CheckpointError(
                    f"{one} says that it is part {found[0]} of {found[1]}, counted from 0, and its "
                    f"name that it is part {place} of {count}. Download it again."
                )
        wanted = first.metadata.get(_TENSORS)
        found_tensors = sum(len(one.tensors) for one in self._shards)
        if wanted is not None and wanted != found_tensors:
            raise CheckpointError(
                f"{path} and the other {count - 1} files hold {found_tensors} tensors, and "
                f"{_TENSORS} is {wanted}. Download them again."
            )

    def _numbers(self, name: str) -> list[float] | None:
        for shard in self._shards:
            if (tensor := shard.tensors.get(name)) is not None:
                blocks.check_decodable(tensor.dtype, name)
                data = shard.read(tensor, 0, tensor.size_bytes)[None]
                values = to_float32(blocks.decode(tensor.dtype, name, data))
                return np.ravel(values).tolist()
        return None


def _embedding(metadata: Metadata) -> EmbeddingSpec | None:
    told = metadata.get(POOLING, int, 0)
    if told == RANK and metadata.architecture == "qwen3":
        return None  # it judges pairs
    return gguf_pooling(told, f"{metadata.path}: {metadata.name(POOLING)}")


def _whole(shard: GgufShard, key: str, default: int) -> int:
    """A count in the metadata. Raises CheckpointError if it is of another type."""
    value = shard.metadata.get(key, default)
    if type(value) is not int:
        raise CheckpointError(
            f"{shard.path}: {key} is {str(value)[:80]!r}, expected a whole number. "
            "Download it again."
        )
    return value
