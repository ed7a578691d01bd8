"""PEFT's `adapter_config.json`: what it says of the tensors, and what cannot be served.

A field is obeyed, or it may only have values that change nothing for the model that is served. So
may fields that a later PEFT adds. Source: PEFT's `LoraConfig` and its rules for matching names of
modules (`check_target_module_exists`, `get_pattern_key`), version 0.21.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from onnxport.errors import AdapterError

T = TypeVar("T")

CONFIG_FILE: Final = "adapter_config.json"
MAX_PATTERN: Final = 1000  # characters of a regular expression
ALL_LINEAR: Final = "all-linear"  # PEFT's word for every linear layer but the output head
_OF_LAYER: Final = re.compile(r"\.(?:layers|h)\.\d+\.")

# Of what `init_lora_weights` may be, that which leaves the base model as it is. The others subtract
# the first values of the adapter from its weights.
_PLAIN_STARTS: Final = (True, False, "gaussian", "eva", "orthogonal", "mica")

_ANY: Final[object] = object()  # every value is neutral
_OBEYED: Final = (
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("base_model_name_or_path", "alora_invocation_tokens"),
)
# Field -> values that change nothing, besides null and whatever is empty or false.
_NEUTRAL: Final[Mapping[str, Any]] = {
    "task_type": ("CAUSAL_LM",),
    "bias": ("none",),
    "init_lora_weights": _PLAIN_STARTS,
    "lora_dropout": _ANY,  # of training
    "inference_mode": _ANY,
    "auto_mapping": _ANY,
    "peft_version": _ANY,
    "revision": _ANY,  # of the base model
    "megatron_core": _ANY,  # nothing without megatron_config
    "qalora_group_size": _ANY,  # nothing without use_qalora
    "ensure_weight_tying": _ANY,  # of embedding and head, which are refused
    "runtime_config": _ANY,
    "fan_in_fan_out": _ANY,  # how the base model's weights lie; PEFT sees to it by itself
    "eva_config": _ANY,  # how the first values of A were chosen
}
_ADVICE: Final[Mapping[str, str]] = {
    "init_lora_weights": "it changes the base model's weights; save the adapter again with "
    "save_pretrained(..., path_initial_model_for_weight_conversion=...)",
    "modules_to_save": "it replaces whole layers; export the merged model instead",
    "invocation_string": "of an aLoRA that is older than PEFT's; write alora_invocation_tokens in "
    "its place, the ids of the tokens that it begins to act at",
    "use_dora": "export the merged model instead",
    "lora_bias": "export the merged model instead",
    "bias": "biases of the base model were trained too; export the merged model instead",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftConfig:
    """What an adapter's configuration says of its tensors.

    Modules are named as in the base model: `model.layers.0.self_attn.q_proj`.
    """

    path: Path
    rank: int
    alpha: float
    rank_stabilized: bool  # rsLoRA: the scaling is alpha / sqrt(rank), not alpha / rank
    ranks: Mapping[str, int]  # pattern of modules -> their rank, the first that fits
    alphas: Mapping[str, float]  # likewise
    targets: str | tuple[str, ...]  # a regular expression, or how names end
    excluded: str | tuple[str, ...]
    layers: frozenset[int] | None  # the only ones; None: all
    layers_patterns: tuple[str, ...]  # what a layer's number follows
    base_model: str | None  # what it was trained on, as PEFT was told
    invocation: Any = None  # `alora_invocation_tokens` as they stand there; see `read_invocation`

    @property
    def largest_rank(self) -> int:
        """The largest rank that a module may have."""
        return max((self.rank, *self.ranks.values()))

    @property
    def expressions(self) -> list[tuple[str, str]]:
        """All regular expressions, as they were given and as names of modules are matched."""
        whole = [(each, each) for each in (self.targets, self.excluded) if isinstance(each, str)]
        endings = [(each, _ending(each)) for each in (*self.ranks, *self.alphas)]
        return [*whole, *endings, *((each, _layer_number(each)) for each in self.layers_patterns)]

    def is_target(self, module: str) -> bool:
        """Whether the adapter changes a module of the base model."""
        if self.excluded and _fits(module, self.excluded):
            return False
        if self.targets == ALL_LINEAR:
            return _OF_LAYER.search(module) is not None
        if not _fits(module, self.targets):
            return False
        if self.layers is None or module in self.targets:  # named in full, whatever its layer
            return True
        return self._layer(module) in self.layers

    def rank_of(self, module: str) -> int:
        """The rank of a module."""
        return _by_pattern(self.ranks, module, self.rank)

    def scaling_of(self, module: str) -> float:
        """What the product of a module's matrices is multiplied with."""
        alpha, rank = _by_pattern(self.alphas, module, self.alpha), self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.rank_stabilized else rank)

    def _layer(self, module: str) -> int | None:
        """The number of a module's layer; None where it has none."""
        for pattern in self.layers_patterns or (r"[^.]*",):
            found = re.match(_layer_number(pattern), module)
            if found is not None:
                return int(found["number"])
        return None


def read_config(folder: Path) -> PeftConfig:
    """Read the configuration of the adapter in `folder`.

    Raises:
        AdapterError: it is missing, malformed, or asks for what cannot be served; names all that
            it asks for.
    """
    path = folder / CONFIG_FILE
    fields = _load(folder, path)
    if fields.get("peft_type") != "LORA":
        raise AdapterError(
            f"{path}: peft_type is {fields.get('peft_type')!r}; only LORA can be served"
        )
    problems = list(_unsupported(fields))
    if problems:
        raise AdapterError(f"{path} asks for what cannot be served: {'; '.join(problems)}")
    return _Reader(path, fields).config()


def _load(folder: Path, path: Path) -> dict[str, Any]:
    """Return the JSON object of a file."""
    try:
        if not folder.is_dir():
            hint = "an adapter on the hub has to be downloaded first"
            if folder.suffix.lower() == ".gguf":
                hint = "files of llama.cpp are read by onnxport.cli.adapter_files.read_adapter"
            raise AdapterError(
                f"{folder} is not a folder here; give one that PEFT's save_pretrained wrote "
                f"({hint})"
            )
        fields = json.loads(read_file(path).decode())
    except FileNotFoundError as error:
        raise AdapterError(
            f"{folder} holds no {CONFIG_FILE}; give the folder that PEFT's save_pretrained wrote"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise AdapterError(f"{path} cannot be read: {error}") from error
    if not isinstance(fields, dict):
        raise AdapterError(f"{path} must hold a JSON object, found {type(fields).__name__}")
    return fields


def read_file(path: Path) -> bytes:
    """Return what a file holds; it is not opened unless it is one, for a pipe would never end.

    Raises:
        OSError: it cannot be read.
    """
    if path.exists() and not path.is_file():
        raise OSError("it is not a file")
    return path.read_bytes()


def _unsupported(fields: Mapping[str, Any]) -> list[str]:
    """Say which fields would change the result in a way that is not supported."""
    problems = []
    for name, value in fields.items():
        if name in _OBEYED or value is None or value is False or value in ("", [], {}):
            continue
        allowed = _NEUTRAL.get(name, ())
        if allowed is _ANY or any(value == one and type(value) is type(one) for one in allowed):
            continue
        shown = json.dumps(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        listed = " or ".join(json.dumps(one) for one in (*allowed, None))
        advice = f" ({_ADVICE[name]})" if name in _ADVICE else ""
        problems.append(f"{name} is {shown}, and may be {listed}{advice}")
    return problems


class _Reader:
    """Takes fields out of a configuration, and checks their types."""

    def __init__(self, path: Path, fields: Mapping[str, Any]) -> None:
        self._path = path
        self._fields = fields

    def config(self) -> PeftConfig:
        """Return the whole of it."""
        targets = self._names("target_modules")
        layers = self._layers()
        if not targets:
            raise self._error("target_modules", "names of modules, or a regular expression")
        if isinstance(targets, str) and layers is not None:
            raise self._error(
                "layers_to_transform", "null where target_modules is a regular expression"
            )
        patterns = self._names("layers_pattern")
        return PeftConfig(
            path=self._path,
            rank=self._rank("r", self._fields.get("r")),
            alpha=self._number("lora_alpha", self._fields.get("lora_alpha")),
            rank_stabilized=self._switch("use_rslora"),
            ranks={each: self._rank("rank_pattern", v) for each, v in self._map("rank_pattern")},
            alphas={
                each: self._number("alpha_pattern", v) for each, v in self._map("alpha_pattern")
            },
            targets=targets,
            excluded=self._names("exclude_modules"),
            layers=layers,
            layers_patterns=self._patterns(
                (patterns,) if isinstance(patterns, str) else patterns, _layer_number
            ),
            base_model=self._text("base_model_name_or_path"),
            invocation=self._fields.get("alora_invocation_tokens"),
        )

    def _error(self, name: str, wanted: str) -> AdapterError:
        found = json.dumps(self._fields.get(name))
        return AdapterError(f"{self._path}: {name} is {found[:200]}; it must be {wanted}")

    def _rank(self, name: str, value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self._error(name, "an integer of at least 1")
        return value

    def _number(self, name: str, value: Any) -> float:
        known = isinstance(value, int | float) and not isinstance(value, bool)
        if not known or not abs(value) <= sys.float_info.max:  # of any size, and NaN is neither
            raise self._error(name, "a finite number")
        return float(value)

    def _text(self, name: str) -> str | None:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, str):
            raise self._error(name, "a text or null")
        return value or None

    def _switch(self, name: str) -> bool:
        value = self._fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise self._error(name, "true or false")
        return bool(value)

    def _map(self, name: str) -> list[tuple[str, Any]]:
        value = self._fields.get(name) or {}
        if not isinstance(value, dict):
            raise self._error(name, "an object of patterns")
        return list(zip(self._patterns(tuple(value), _ending), value.values(), strict=True))

    def _names(self, name: str) -> str | tuple[str, ...]:
        value = self._fields.get(name) or ()
        if isinstance(value, str):
            if value.lower() == ALL_LINEAR:
                return ALL_LINEAR
            wrapped = _layer_number if name == "layers_pattern" else None
            return self._patterns((value,), wrapped)[0]
        if not isinstance(value, list | tuple) or not all(isinstance(one, str) for one in value):
            raise self._error(name, "text or a list of texts")
        return tuple(value)

    def _layers(self) -> frozenset[int] | None:
        value = self._fields.get("layers_to_transform")
        listed = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in listed):
            raise self._error("layers_to_transform", "a layer's number, or a list of them")
        return frozenset(listed) or None

    def _patterns(
        self, patterns: Sequence[str], wrapped: Callable[[str], str] | None = None
    ) -> tuple[str, ...]:
        """Return regular expressions that are sound, alone and wrapped, and not too long."""
        for pattern in patterns:
            if len(pattern) > MAX_PATTERN:
                raise AdapterError(
                    f"{self._path}: a pattern has {len(pattern)} characters; at most "
                    f"{MAX_PATTERN} are allowed"
                )
            try:
                re.compile(pattern)
                if wrapped is not None:
                    re.compile(wrapped(pattern))
            except (re.error, RecursionError, OverflowError) as error:
                raise AdapterError(
                    f"{self._path}: {pattern!r} is not a regular expression that can be matched: "
                    f"{error}"
                ) from error
        return tuple(patterns)


def _ending(pattern: str) -> str:
    """Return the expression that finds a pattern at the end of a module's name."""
    return rf"(?:.*\.)?(?:{pattern})$"


def _layer_number(pattern: str) -> str:
    """Return the expression that finds the number of a layer after a pattern."""
    return rf"(?:^|.*?\.)(?:{pattern})\.(?P<number>\d+)\."


def _fits(module: str, names: str | Sequence[str]) -> bool:
    """Whether a module is one of those that are named, as PEFT matches them."""
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _by_pattern(patterns: Mapping[str, T], module: str, default: T) -> T:
    """Return the value of the first pattern that the end of a module's name fits."""
    for pattern, value in patterns.items():
        if re.match(_ending(pattern), module):
            return value
    return default
