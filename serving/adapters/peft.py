"""LoRA adapters in PEFT's folders: configuration and tensors become deltas of projections."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import safetensors
from numpy.typing import NDArray

from onnxport.errors import AdapterError
from onnxport.graphs.invocation import read_invocation
from onnxport.graphs.lora import LoraAdapter, LoraDelta, Projection
from onnxport.graphs.lora_module import Module, joined
from onnxport.graphs.spec import ArchSpec
from onnxport.serving.adapters.modules import modules_of, numbers_of
from onnxport.serving.adapters.patterns import check_time
from onnxport.serving.adapters.peft_config import PeftConfig, read_config, read_file

logger = logging.getLogger(__name__)

WEIGHTS_FILE: Final = "adapter_model.safetensors"

# PEFT puts `base_model.model.` ahead of the model's own names; some who write its folders do not.
_NAME: Final = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<part>[AB])\.weight")
# Where the decoder is in the model that was trained: a text model, and one that reads images, as
# its modules are called and as older releases of transformers called them.
_PARENTS: Final = (
    *("model", "model.language_model", "language_model.model"),
    *("gpt_neox", "backbone", "model.decoder", "transformer"),
)
_LAYERS: Final[Mapping[str, str]] = {"transformer": "h"}  # what holds them there, if not layers
_HEADS: Final[Mapping[str, str]] = {"language_model.model": "language_model.lm_head"}
# Families whose multipliers `ArchSpec.multipliers` tells, unless a file has lost them.
_MULTIPLIED: Final = frozenset(["falcon_h1"])
_EMBEDDINGS: Final[Mapping[str, str]] = {
    "falcon": "word_embeddings",
    "gpt_neox": "embed_in",
    "internlm2": "tok_embeddings",
    "nemotron_h": "embeddings",
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gptj"), "wte"),
}
_OF_IMAGES: Final = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector|visual)\.")
_DTYPES: Final[Mapping[str, Any]] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}

Array = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AdapterContent:
    """An adapter that was read and fits its base model."""

    adapter: LoraAdapter
    fingerprint: str  # of all that the adapter changes: hex SHA-256 of its deltas
    path: Path  # where it was read
    base_model: str | None  # what its configuration says it was trained on
    task_name: str = ""  # what a file says to people
    prompt_prefix: str = ""
    invocation: tuple[int, ...] = ()  # of an aLoRA: the tokens that it begins with


def read_adapter(folder: Path, base: ArchSpec) -> AdapterContent:
    """Read the adapter in `folder`, as PEFT's `save_pretrained` wrote it.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors`.
        base: the model that it has to fit.

    Raises:
        AdapterError: a file is missing or malformed, asks for what cannot be served, or does not
            fit the model; says what was found and what fits.
    """
    config = read_config(folder)
    _check_base(folder, base)
    where = f"{config.path}: alora_invocation_tokens"
    invocation = read_invocation(where, config.invocation, base)
    pairs = _of_text(folder, _pairs(folder, _read_tensors(folder)))
    modules, others = _modules(base, pairs)
    check_time(config.path, config.expressions, [*modules, *others])
    _check_others(config, others, modules)
    _check_modules(folder, config, pairs, set(modules), base)
    _check_shapes(folder, config, pairs, modules)
    deltas: dict[tuple[int, Projection], LoraDelta] = {}
    for module, (a, b) in pairs.items():
        with np.errstate(over="ignore"):
            scaled = b * np.float32(config.scaling_of(module))
        if not np.isfinite(scaled).all() or not np.isfinite(a).all():
            raise AdapterError(
                f"{folder} holds values of {module} that are not finite, or are not once they are "
                f"scaled by {config.scaling_of(module):g}; the file is damaged, or the training "
                "diverged"
            )
        for key, delta in modules[module].deltas(base, a, scaled).items():
            deltas[key] = joined(deltas[key], delta) if key in deltas else delta
    adapter = LoraAdapter(deltas)
    return AdapterContent(
        *(adapter, fingerprint(adapter), folder, config.base_model), invocation=invocation
    )


def _layers(parent: str) -> str:
    """What names of modules of layers begin with."""
    return f"{parent}.{_LAYERS.get(parent, 'layers')}."


def _modules(base: ArchSpec, named: Collection[str]) -> tuple[dict[str, Module], tuple[str, str]]:
    """The decoder's modules, where these are, and linear ones that are not to be adapted here."""
    parent = next(
        (one for one in _PARENTS if any(name.startswith(_layers(one)) for name in named)),
        _PARENTS[0],
    )
    layers = _layers(parent)
    modules = {
        layers + name.removeprefix("layers."): module
        for name, module in modules_of(base, layers.removesuffix(".")).items()
    }
    published = base.family == "exaone" and parent == "transformer"
    embedding = "wte" if published else _EMBEDDINGS.get(base.family, "embed_tokens")
    head = "output" if base.family == "internlm2" else _HEADS.get(parent, "lm_head")
    return modules, (f"{parent}.{embedding}", head)


def fingerprint(adapter: LoraAdapter) -> str:
    """Return a hex SHA-256 of all deltas: adapters that share it compute the same K/V."""
    digest = hashlib.sha256()
    for (layer, name), delta in sorted(adapter.deltas.items()):
        digest.update(f"{layer} {name} {delta.a.shape} {delta.b.shape}\n".encode())
        digest.update(delta.a.tobytes() + delta.b.tobytes())
    return digest.hexdigest()


def _check_base(folder: Path, base: ArchSpec) -> None:
    """Raise AdapterError where nothing tells what the weights of the model are times."""
    if base.family in _MULTIPLIED and base.multipliers is None:
        raise AdapterError(
            f"{folder} cannot be added to this {base.family} model: it is of a GGUF file, whose "
            "weights are times multipliers that the file does not tell, so that the adapter's "
            "cannot be. Give the adapter as llama.cpp's convert_lora_to_gguf.py writes it, or "
            "export the model of its safetensors"
        )


def _read_tensors(folder: Path) -> dict[str, Array]:
    """Return the tensors by name; in one read, so that a file that is replaced is not mixed."""
    path = folder / WEIGHTS_FILE
    deserialize: Any = safetensors.deserialize  # which has no types
    try:
        stored = deserialize(read_file(path))
    except FileNotFoundError as error:
        others = sorted(each.name for each in folder.glob("adapter_model.*"))
        hint = f"; it holds {', '.join(others)}: save it as safetensors" if others else ""
        raise AdapterError(f"{folder} holds no {WEIGHTS_FILE}{hint}") from error
    except (OSError, safetensors.SafetensorError) as error:
        raise AdapterError(f"{path} is not a valid safetensors file: {error}") from error
    types = {name: tensor["dtype"] for name, tensor in stored}
    if wrong := [f"{name} is {kind}" for name, kind in types.items() if kind not in _DTYPES]:
        raise AdapterError(
            f"{path} holds tensors of a type that cannot be read: {_some(wrong)}; "
            f"{', '.join(_DTYPES)} can"
        )
    return {
        name: np.frombuffer(tensor["data"], _DTYPES[types[name]])
        .reshape(tensor["shape"])
        .astype(np.float32)
        for name, tensor in stored
    }


def _pairs(folder: Path, tensors: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """Return A and B of each module."""
    found: dict[str, dict[str, Array]] = {}
    unknown, twice = [], []
    for name, tensor in sorted(tensors.items()):
        match = _NAME.fullmatch(name)
        if match is None or tensor.ndim != 2:
            unknown.append(f"{name} {list(tensor.shape)}")
            continue
        parts = found.setdefault(match["module"], {})
        if match["part"] in parts:
            twice.append(name)
        parts[match["part"]] = tensor
    if twice:
        raise AdapterError(
            f"{folder} holds tensors twice, with base_model.model. and without: {_some(twice)}; "
            "save the adapter again"
        )
    if unknown:
        raise AdapterError(
            f"{folder} holds tensors that are no matrices of LoRA: {_some(unknown)}; only "
            "base_model.model.<module>.lora_A.weight and .lora_B.weight can be served"
        )
    single = [
        f"{name} has {''.join(parts)} alone" for name, parts in found.items() if len(parts) < 2
    ]
    if single:
        raise AdapterError(f"{folder} lacks the other half of a pair: {_some(single)}")
    if not found:
        raise AdapterError(f"{folder} holds no tensors; train the adapter, and save it again")
    return {name: (parts["A"], parts["B"]) for name, parts in found.items()}


def _of_text(
    folder: Path, pairs: Mapping[str, tuple[Array, Array]]
) -> Mapping[str, tuple[Array, Array]]:
    """The modules but for those that read images, which is not done here."""
    kept = {name: pair for name, pair in pairs.items() if not _OF_IMAGES.match(name)}
    if left_out := len(pairs) - len(kept):
        logger.warning(
            "%s adapts %d modules that read images too; they are left out, for text alone is read",
            folder,
            left_out,
        )
    if not kept:
        raise AdapterError(
            f"{folder} adapts nothing but modules that read images; only text is read here"
        )
    return kept


def _check_others(config: PeftConfig, others: Iterable[str], modules: Iterable[str]) -> None:
    """Refuse a config that calls for modules that no provider adapts."""
    if targets := [name for name in others if config.is_target(name)]:
        adapted = dict.fromkeys(name.rpartition(".")[2] for name in modules)
        raise AdapterError(
            f"{config.path} targets {', '.join(targets)}; only {', '.join(adapted)} can be "
            "adapted: merge the adapter into its model, and export that"
        )


def _check_modules(
    folder: Path,
    config: PeftConfig,
    found: Iterable[str],
    known: set[str],
    base: ArchSpec,
) -> None:
    """Refuse tensors of modules that are not the model's, or not those the config calls for."""
    wanted = {name for name in known if config.is_target(name)}
    layers = f"this model is a {base.family} with layers 0 to {numbers_of(base) - 1}"
    if base.experts is not None:
        layers += ", whose experts, routers and what is beside experts cannot be adapted"
    for names, what in (
        (set(found) - known, f"tensors of modules that the model does not have ({layers})"),
        (set(found) - wanted, f"tensors of modules that {config.path.name} does not target"),
    ):
        if names:
            raise AdapterError(f"{folder} holds {what}: {_some(sorted(names))}")
    if missing := wanted - set(found):
        raise AdapterError(
            f"{folder} lacks tensors of {len(missing)} of the {len(wanted)} modules that "
            f"{config.path.name} targets: {_some(sorted(missing))}; it is incomplete, or was made "
            f"for another model ({layers})"
        )


def _check_shapes(
    folder: Path,
    config: PeftConfig,
    pairs: Mapping[str, tuple[Array, Array]],
    modules: Mapping[str, Module],
) -> None:
    """Refuse matrices that do not fit the model or the rank of the config."""
    wrong_features, wrong_rank = [], []
    for name, (a, b) in pairs.items():
        out_features, in_features = modules[name].out_features, modules[name].in_features
        rank = config.rank_of(name)
        if (b.shape[0], a.shape[1]) != (out_features, in_features):
            wrong_features.append(
                f"{name} takes {a.shape[1]} features and gives {b.shape[0]}, the model's takes "
                f"{in_features} and gives {out_features}"
            )
        if (a.shape[0], b.shape[1]) != (rank, rank):
            wrong_rank.append(
                f"{name} has A {list(a.shape)} and B {list(b.shape)}, not rank {rank}"
            )
    if wrong_features:
        raise AdapterError(f"{folder} was made for another model: {_some(wrong_features, 2)}")
    if wrong_rank:
        raise AdapterError(
            f"{folder} has tensors of another rank than {config.path.name} says: "
            f"{_some(wrong_rank, 2)}"
        )


def _some(names: Iterable[str], limit: int = 4) -> str:
    """Return a few of many, for an error."""
    listed = list(names)
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
