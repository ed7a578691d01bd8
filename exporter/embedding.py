"""What a checkpoint says of embeddings, in sentence-transformers' files and in `config.json`.

`modules.json` lists what makes a vector of a text: a transformer, a pooling, whose own folder says
which, and perhaps a normalization.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.families.base import TensorNames
from onnxport.exporter.source import read_json
from onnxport.graphs.embedding_spec import EmbeddingSpec, Pooling
from onnxport.graphs.spec import ArchSpec

MODULES_FILE: Final = "modules.json"
POOLING_FILES: Final = "*_Pooling/config.json"
_POOLINGS: Final[dict[str, Pooling]] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
_MODE: Final = "pooling_mode"
_SIZES: Final = ("word_embedding_dimension", "embedding_dimension")
_FOLDER: Final = re.compile(r"[\w-][\w.-]*")
_GGUF: Final[dict[int, Pooling]] = {1: "mean", 3: "last"}  # llama.cpp's numbers


def read_embedding(config: Config, folder: Path, spec: ArchSpec) -> EmbeddingSpec | None:
    """Read what a checkpoint's folder says; None: it says nothing.

    Raises:
        CheckpointError: A file cannot be read, or contradicts the model.
        UnsupportedModelError: Vectors are made in a way that is not supported.
    """
    sizes = config.get("matryoshka_dimensions", list, None)
    cuts = config.get("is_matryoshka", bool, sizes is not None)
    if sizes is not None and not (sizes and all(type(one) is int and one > 0 for one in sizes)):
        raise CheckpointError(
            f"{config.path}: matryoshka_dimensions is {sizes!r}, expected whole numbers above 0."
        )
    if sizes is not None and max(sizes) > spec.hidden_size:
        raise CheckpointError(
            f"{config.path}: matryoshka_dimensions is {sizes!r}, and vectors have "
            f"{spec.hidden_size} numbers; correct it."
        )
    dimensions = tuple(sizes) if sizes is not None and cuts else None
    found = EmbeddingSpec(matryoshka=cuts, dimensions=dimensions)
    if (folder / MODULES_FILE).is_file():
        pooling, normalized = _read_modules(folder, spec.hidden_size)
        return replace(found, pooling=pooling, normalized=normalized)
    return found if cuts or _is_without_head(config) else None


def embeds_only(
    config: Config,
    told: EmbeddingSpec | None,
    spec: ArchSpec,
    names: TensorNames,
    found: Collection[str],
) -> bool:
    """Whether a checkpoint lacks the head that its model would have, for it is to embed alone.

    Args:
        config: Its configuration.
        told: What it says of embeddings.
        spec: The model.
        names: What its tensors are called.
        found: Its tensors.
    """
    has_head = spec.tie_word_embeddings or names.head in found
    return not has_head and (told is not None or _is_without_head(config))


def gguf_pooling(number: int, what: str) -> EmbeddingSpec | None:
    """What a GGUF file says of embeddings; None: nothing.

    Args:
        number: Its pooling_type.
        what: The key, in errors.

    Raises:
        UnsupportedModelError: A pooling that is not supported.
    """
    if number == 0:
        return None
    if number not in _GGUF:
        raise UnsupportedModelError(
            f"{what} is {number}; supported are 0 (none), 1 (mean) and 3 (last)."
        )
    return EmbeddingSpec(pooling=_GGUF[number])


def _is_without_head(config: Config) -> bool:
    """Whether the configuration names such a class."""
    return any(name.endswith("Model") for name in config.architectures)


def _read_modules(folder: Path, hidden_size: int) -> tuple[Pooling, bool]:
    """The pooling, and whether the vector is normalized behind it."""
    path = folder / MODULES_FILE
    try:
        listed = json.loads(path.read_bytes())
        modules = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not readable ({error}). Download it again.") from error
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModelError(
            f"{path}: vectors are made by {', '.join(kinds) or 'nothing'}; supported is a "
            "Transformer, a Pooling, and a Normalize or none. Without these files the model is "
            "exported as one that generates text."
        )
    place = modules[1][1]
    if not _FOLDER.fullmatch(place):
        raise CheckpointError(f"{path} names the folder {place!r} for the pooling, which is none.")
    return _read_pooling(folder / place / "config.json", hidden_size), len(kinds) == 3


def _read_pooling(path: Path, hidden_size: int) -> Pooling:
    values = read_json(path)
    if not values:
        raise CheckpointError(f"{path}, which says how vectors are pooled, is missing or empty.")
    size = next((values[name] for name in _SIZES if name in values), hidden_size)
    if size != hidden_size:
        raise CheckpointError(
            f"{path}: vectors have {size} numbers, and the model's states {hidden_size}."
        )
    # Whether the tokens of an instruction count; texts are whole here, whatever they begin with.
    values.pop("include_prompt", None)
    modes = _modes(values)
    unknown = [name for name in values if name not in _SIZES and not name.startswith(_MODE)]
    if unknown:
        raise UnsupportedModelError(
            f"{path} has the key {unknown[0]!r}, which the exporter does not understand."
        )
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise UnsupportedModelError(
            f"{path}: the pooling is {' and '.join(modes) or 'none'}; supported is one of "
            f"{', '.join(_POOLINGS)}."
        )
    return _POOLINGS[modes[0]]


def _modes(values: dict[str, Any]) -> list[str]:
    """The poolings whose vectors are put side by side; newer files name them, older have flags."""
    named = values.get(_MODE)
    if named is not None:
        return [str(one) for one in (named if isinstance(named, list) else [named])]
    flags = {name: one for name, one in values.items() if name.startswith(f"{_MODE}_")}
    return [name.removeprefix(f"{_MODE}_") for name, is_on in flags.items() if is_on]
