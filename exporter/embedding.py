"""What a checkpoint says of embeddings, in sentence-transformers' files and in `config.json`.

`modules.json` lists what makes a vector of a text: a transformer, a pooling, whose own folder says
which, and perhaps a normalization. `config_sentence_transformers.json` has prompts, and
`sentence_bert_config.json` how long a text may be.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from onnxport.errors import CheckpointError, UnsupportedModelError
from onnxport.exporter.config import Config
from onnxport.exporter.families.base import TensorNames
from onnxport.exporter.source import read_json
from onnxport.graphs.embedding_spec import SIMILARITIES, EmbeddingSpec, Pooling
from onnxport.graphs.spec import ArchSpec

MODULES_FILE: Final = "modules.json"
POOLING_FILES: Final = "*_Pooling/config.json"
SCORE_FILES: Final = "*_LogitScore/config.json"
PROMPTS_FILE: Final = "config_sentence_transformers.json"
LENGTH_FILE: Final = "sentence_bert_config.json"
LOGIT_SCORE: Final = "LogitScore"  # which judges pairs by the logits of two tokens
_POOLINGS: Final[dict[str, Pooling]] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}
_MODE: Final = "pooling_mode"
_SIZES: Final = ("word_embedding_dimension", "embedding_dimension")
_FOLDER: Final = re.compile(r"[\w-][\w.-]*")
_GGUF: Final[dict[int, Pooling]] = {1: "mean", 3: "last"}  # llama.cpp's numbers
_OF_PAIRS: Final = (["Transformer"], ["Transformer", LOGIT_SCORE])  # which make no vectors

logger = logging.getLogger(__name__)


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
    modules = _modules(folder)
    if modules and not makes_no_vectors(folder):
        pooling, normalized = _read_modules(folder, modules, spec.hidden_size)
        found = replace(found, pooling=pooling, normalized=normalized)
        return _with_prompts(found, folder, spec.context_length)
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


def module_folder(folder: Path, kind: str) -> Path | None:
    """The folder of a module of a kind, such as `LOGIT_SCORE`; None: there is none.

    Raises:
        CheckpointError: The list of modules cannot be read, or names a folder that is none.
    """
    places = [place for found, place in _modules(folder) or () if found == kind]
    if not places:
        return None
    _check_place(folder, places[0])
    return folder / places[0]


def _modules(folder: Path) -> list[tuple[str, str]] | None:
    """The kind and the folder of each module; None: no file lists them."""
    path = folder / MODULES_FILE
    if not path.is_file():
        return None
    try:
        listed = json.loads(path.read_bytes())
        return [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in listed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not readable ({error}). Download it again.") from error


def _check_place(folder: Path, place: str) -> None:
    if not _FOLDER.fullmatch(place):
        path = folder / MODULES_FILE
        raise CheckpointError(f"{path} names the folder {place!r} for a module, which is none.")


def _with_prompts(found: EmbeddingSpec, folder: Path, context_length: int) -> EmbeddingSpec:
    """The same with what goes ahead of texts, how long these may be, and how vectors compare."""
    path = folder / PROMPTS_FILE
    values = read_json(path)
    prompts, default = read_prompts(path, values)
    similarity = values.get("similarity_fn_name")
    if similarity not in (None, *SIMILARITIES):
        raise UnsupportedModelError(
            f"{path}: similarity_fn_name is {similarity!r}; supported are "
            f"{', '.join(SIMILARITIES)}."
        )
    most = max_texts(folder)
    if found.pooling == "mean" and any(prompts.values()) and not _counts_prompts(folder):
        logger.warning(
            "%s: a prompt's tokens are left out of the mean, which is not supported, so the "
            "artifact has no prompts",
            folder,
        )
        prompts, default = {}, None
    return replace(
        found,
        similarity=similarity,
        max_tokens=most if most is not None and most < context_length else None,
        prompts=prompts,
        default_prompt=default,
    )


def read_prompts(path: Path, values: dict[str, Any]) -> tuple[dict[str, str], str | None]:
    """The prompts that go ahead of texts, by name, and the name of the default one.

    Args:
        path: PROMPTS_FILE, in errors.
        values: of it.

    Raises:
        CheckpointError: They are no texts, or no prompt has the default name.
    """
    prompts, default = values.get("prompts") or {}, values.get("default_prompt_name")
    are_texts = isinstance(prompts, dict) and all(isinstance(one, str) for one in prompts.values())
    if not are_texts or (default is not None and default not in prompts):
        raise CheckpointError(
            f"{path}: prompts are {prompts!r} and default_prompt_name {default!r}, expected texts "
            "by name, and one of the names or null."
        )
    return prompts, default


def max_texts(folder: Path) -> int | None:
    """How many tokens a text, or a pair, may have; None: that is not said.

    Raises:
        CheckpointError: It is no number.
        UnsupportedModelError: Texts are changed before they are read.
    """
    length = read_json(folder / LENGTH_FILE)
    most = length.get("max_seq_length")
    if most is not None and (type(most) is not int or most < 1):
        raise CheckpointError(
            f"{folder / LENGTH_FILE}: max_seq_length is {most!r}, expected a whole number above 0."
        )
    if length.get("do_lower_case"):
        raise UnsupportedModelError(
            f"{folder / LENGTH_FILE}: do_lower_case is set, and texts are read as they are written."
        )
    return most


def makes_no_vectors(folder: Path) -> bool:
    """Whether the modules that are listed judge pairs, or make nothing of texts."""
    return [kind for kind, _ in _modules(folder) or ()] in _OF_PAIRS


def _counts_prompts(folder: Path) -> bool:
    """Whether the tokens of a prompt are pooled like the others."""
    place = module_folder(folder, "Pooling")
    return place is None or read_json(place / "config.json").get("include_prompt") is not False


def _read_modules(
    folder: Path, modules: list[tuple[str, str]], hidden_size: int
) -> tuple[Pooling, bool]:
    """The pooling, and whether the vector is normalized behind it."""
    path = folder / MODULES_FILE
    kinds = [kind for kind, _ in modules]
    if kinds not in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
        raise UnsupportedModelError(
            f"{path}: vectors are made by {', '.join(kinds) or 'nothing'}; supported is a "
            "Transformer, a Pooling, and a Normalize or none. Without these files the model is "
            "exported as one that generates text."
        )
    place = modules[1][1]
    _check_place(folder, place)
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
    # Whether the tokens of a prompt count; see `_counts_prompts`.
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
