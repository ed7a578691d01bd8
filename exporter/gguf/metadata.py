"""The metadata of a GGUF file: typed, and strict about what nobody asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from onnxport.errors import CheckpointError, UnsupportedModelError

ARCHITECTURE: Final = "general.architecture"
KIND: Final = "general.type"

T = TypeVar("T")
D = TypeVar("D")

# Keys of an architecture that change no logit of a model that generates text by itself.
_IRRELEVANT: Final = frozenset(
    {
        "rope.scaling.finetuned",  # says how the weights came to be
        "tensor_data_layout",  # whose original Llama had its rows as all GGUF files do
        "decoder_start_token_id",
    }
)
# Keys that would change the logits, with the one value at which they do nothing.
_NEUTRAL: Final[Mapping[str, Any]] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.sliding_window": 0,
    "embedding_scale": 1.0,
    "expert_count": 0,
    "expert_shared_count": 0,
    "expert_used_count": 0,
    "expert_weights_scale": 1.0,
    "leading_dense_block_count": 0,
    "logit_scale": 1.0,
    "nextn_predict_layers": 0,
    "residual_scale": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "use_parallel_residual": False,
}


class Metadata:
    """The keys of one architecture, without its name in front; remembers which were used."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        """Wrap what the header of the file `path` holds.

        Raises:
            CheckpointError: It does not name an architecture.
            UnsupportedModelError: It is no model, but an adapter or the part that reads images.
        """
        self.path = path
        self.all = values
        found = values.get(ARCHITECTURE)
        if not isinstance(found, str):
            raise CheckpointError(
                f"{path} does not say what it holds: {ARCHITECTURE} is {found!r}."
            )
        kind = values.get(KIND, "model")
        if kind != "model":
            raise UnsupportedModelError(
                f"{path} holds no model: {KIND} is {kind!r}. Give the file of the model itself."
            )
        self.architecture = found
        prefix = found + "."
        self._values = {
            key.removeprefix(prefix): value
            for key, value in values.items()
            if key.startswith(prefix)
        }
        self._used: set[str] = set()

    def name(self, key: str) -> str:
        """The key as the file has it."""
        return f"{self.architecture}.{key}"

    def require(self, key: str, kind: type[T]) -> T:
        """The value of `key`, which must be there. Raises CheckpointError if it is not."""
        value = self.get(key, kind, None)
        if value is None:
            raise CheckpointError(
                f"{self.path} lacks the key {self.name(key)}, which the model needs."
            )
        return value

    def get(self, key: str, kind: type[T], default: D) -> T | D:
        """The value of `key`, or `default` where it is absent.

        A list that has the same value for each layer counts as that value. An int is accepted as a
        float.

        Raises:
            CheckpointError: A value of another type.
            UnsupportedModelError: A list of different values.
        """
        self._used.add(key)
        if key not in self._values:
            return default
        value = self._values[key]
        if kind is not list and isinstance(value, list):
            if len(set(value)) != 1:
                raise UnsupportedModelError(
                    f"{self.path}: {self.name(key)} differs between layers, {value[:8]} …, which "
                    "is not supported. Export the original checkpoint."
                )
            value = value[0]
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(
                f"{self.path}: {self.name(key)} is {value!r}, expected a value of type "
                f"{kind.__name__}."
            )
        return value

    def holds(self, key: str, kind: type) -> bool:
        """Whether `key` is there, with a value of a type."""
        return isinstance(self._values.get(key), kind)

    def expect(self, key: str, value: Any) -> None:
        """Refuse another value of `key`, which may be absent, than what this model computes."""
        found = self.get(key, type(value), value)
        if found != value:
            raise UnsupportedModelError(
                f"{self.path}: {self.name(key)} is {found!r}; of the architecture "
                f"{self.architecture} it is {value!r}, as llama.cpp computes it."
            )

    def ignore(self, *keys: str) -> None:
        """Let `keys` be there, whatever they say: they change nothing of this model."""
        self._used.update(keys)

    def check_all_used(self) -> None:
        """Raise UnsupportedModelError for keys that were not used and may change the result."""
        unknown = {
            key: value
            for key, value in self._values.items()
            if key not in self._used
            and key not in _IRRELEVANT
            and not (key in _NEUTRAL and value == _NEUTRAL[key])
        }
        if unknown:
            listed = ", ".join(
                f"{self.name(key)} = {str(value)[:80]}" for key, value in sorted(unknown.items())
            )
            raise UnsupportedModelError(
                f"{self.path} has {len(unknown)} key(s) that the exporter does not understand for "
                f"the architecture {self.architecture!r}, and that could change the result: "
                f"{listed}. Export the original checkpoint."
            )
