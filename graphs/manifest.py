"""The manifest: what an artifact is and the checksums of its files, in a strict schema."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from onnxport.errors import ArtifactError
from onnxport.graphs.classification_spec import ClassificationSpec
from onnxport.graphs.embedding_spec import EmbeddingSpec
from onnxport.graphs.fields import check_fields, with_nulls, without_nulls
from onnxport.graphs.spec import ArchSpec
from onnxport.version import __version__

FORMAT_VERSION: Final = 1
MANIFEST_FILE: Final = "manifest.json"
GRAPH_FILES: Final = {"paged": "model.onnx", "gqa": "model_gqa.onnx"}
PRECISIONS: Final = ("int4", "int8", "fp16", "fp32")
DRAFT_TOKENS: Final = "draft_tokens.npy"  # of a draft head: int32 [logits], the token of each
MTP_FOLDER: Final = "mtp"  # in a model's artifact: that of its layer of multi-token prediction
EXPERT_PRECISIONS: Final = ("mxfp4",)  # besides those
# The second one where some of the model's weights lie there alone, see `shared_tensors`.
WEIGHT_FILES: Final = ("model.onnx.data", f"{MTP_FOLDER}/model.onnx.data")
KV_FILES: Final = ("model.onnx", *WEIGHT_FILES)  # what the K/V of a token depend on
ACTIVATION_DTYPES: Final = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class FileInfo:
    """One file of an artifact."""

    sha256: str  # 64 lower-case hexadecimal digits
    size: int  # bytes


@dataclass(frozen=True, slots=True)
class Source:
    """Where the checkpoint came from."""

    name: str  # hub id or folder name, never a full path
    revision: str | None = None  # commit on the hub, None for a local folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What an artifact is. `files` lists every file but the manifest itself."""

    model: ArchSpec
    precision: str  # of the projections: one of PRECISIONS
    group_size: int | None  # input features that share a scale; None where nothing is quantized
    head_precision: str  # of the lm_head (and a tied embedding): one of PRECISIONS
    expert_precision: str | None = None  # one of EXPERT_PRECISIONS; None: `precision`
    zero_points: bool | None = None  # whether some projections have them; None: none has
    offsets: bool | None = None  # likewise
    int8_matrices: int | None = None  # projections in int8 where `precision` is int4; None: none is
    activation_dtype: str  # of the stored graphs' activations: one of ACTIVATION_DTYPES
    source: Source
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    embedding: EmbeddingSpec | None = None  # None: nothing is known of embeddings
    classification: ClassificationSpec | None = None  # None: there is no score head
    files: Mapping[str, FileInfo] = field(default_factory=dict)  # ArtifactWriter fills it
    exporter_version: str = __version__
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        """Check the enumerated fields; raises ValueError."""
        for name, value, allowed in (
            ("precision", self.precision, PRECISIONS),
            ("head_precision", self.head_precision, PRECISIONS),
            ("expert_precision", self.expert_precision, (None, *EXPERT_PRECISIONS)),
            ("activation_dtype", self.activation_dtype, ACTIVATION_DTYPES),
        ):
            if value not in allowed:
                raise ValueError(f"{name} {value!r} is not one of {allowed}")

    @property
    def family(self) -> str:
        """The model family, such as llama."""
        return self.model.family

    @property
    def weight_bytes(self) -> int:
        """Size of all files of weights that the graphs may name."""
        return sum(self.files[name].size for name in WEIGHT_FILES if name in self.files)

    @property
    def fingerprint(self) -> str:
        """What the K/V of a token depend on: a hex SHA-256 of the paged graph's and weights' own.

        Artifacts that differ in their tokenizer or chat template alone have the same one.
        """
        parts = [f"{name} {self.files[name].sha256}" for name in KV_FILES if name in self.files]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def dumps(self) -> str:
        """The manifest as JSON text."""
        judge = self.classification
        value = {
            "format_version": self.format_version,
            "exporter_version": self.exporter_version,
            "source": {"name": self.source.name, "revision": self.source.revision},
            "precision": self.precision,
            "group_size": self.group_size,
            "head_precision": self.head_precision,
            "expert_precision": self.expert_precision,
            "zero_points": self.zero_points,
            "offsets": self.offsets,
            "int8_matrices": self.int8_matrices,
            "activation_dtype": self.activation_dtype,
            "eos_token_ids": list(self.eos_token_ids),
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
            "embedding": None if self.embedding is None else self.embedding.to_json(),
            "classification": None if judge is None else judge.to_json(),
            "model": self.model.to_json(),
            "files": {
                name: {"sha256": info.sha256, "size": info.size}
                for name, info in sorted(self.files.items())
            },
        }
        return json.dumps(without_nulls(value, _LATER), indent=2) + "\n"

    @classmethod
    def loads(cls, text: str) -> Manifest:
        """Read what `dumps` wrote. Raises ArtifactError for anything else."""
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ArtifactError(f"manifest.json is not JSON: {error}") from error
        version = value.get("format_version") if isinstance(value, dict) else None
        if isinstance(version, int) and version != FORMAT_VERSION:
            raise ArtifactError(
                f"the artifact has format version {version}, this onnxport {__version__} reads "
                f"version {FORMAT_VERSION}. Export the model again, or install the version of "
                f"onnxport that wrote it ({value.get('exporter_version')})."
            )
        fields = check_fields("manifest.json", with_nulls(value, _LATER), _FIELDS)
        source = check_fields("source", fields["source"], _SOURCE_FIELDS)
        tokens = fields["eos_token_ids"]
        if not all(isinstance(t, int) and not isinstance(t, bool) for t in tokens):
            raise ArtifactError(f"manifest.json: eos_token_ids must be integers, are {tokens}")
        fields["source"] = Source(**source)
        fields["model"] = ArchSpec.from_json(fields["model"])
        if fields["embedding"] is not None:
            fields["embedding"] = EmbeddingSpec.from_json(fields["embedding"])
        if fields["classification"] is not None:
            fields["classification"] = ClassificationSpec.from_json(fields["classification"])
        fields["eos_token_ids"] = tuple(tokens)
        fields["files"] = {
            name: FileInfo(**check_fields(f"files[{name!r}]", info, _FILE_FIELDS))
            for name, info in fields["files"].items()
        }
        try:
            return cls(**fields)
        except ValueError as error:
            raise ArtifactError(f"manifest.json: {error}") from error


_INT_OR_NULL: Final[tuple[type, ...]] = (int, type(None))
_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "format_version": (int,),
    "exporter_version": (str,),
    "source": (dict,),
    "precision": (str,),
    "group_size": _INT_OR_NULL,
    "head_precision": (str,),
    "expert_precision": (str, type(None)),
    "zero_points": (bool, type(None)),
    "offsets": (bool, type(None)),
    "int8_matrices": _INT_OR_NULL,
    "activation_dtype": (str,),
    "eos_token_ids": (list,),
    "bos_token_id": _INT_OR_NULL,
    "pad_token_id": _INT_OR_NULL,
    "embedding": (dict, type(None)),
    "classification": (dict, type(None)),
    "model": (dict,),
    "files": (dict,),
}
# Fields that artifacts of before lack, as those do today where they are None.
_LATER: Final = (
    *("expert_precision", "zero_points", "offsets", "int8_matrices"),
    *("embedding", "classification"),
)
_SOURCE_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "name": (str,),
    "revision": (str, type(None)),
}
_FILE_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {"sha256": (str,), "size": (int,)}
