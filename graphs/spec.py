"""What a decoder is: the frozen description that exporter and runtime share.

It is stored in the manifest. Reading is strict: a key that is not known, missing, or of the wrong
type is an error, because each of them changes what the model computes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from onnxport.errors import ArtifactError

_T = TypeVar("_T")

HIDDEN_ACTS: Final = ("silu", "gelu_tanh")

# RoPE type -> the optional RopeSpec fields that it needs (the others stay None).
ROPE_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_context_length"),
    "llama3": ("factor", "original_context_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_context_length", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("original_context_length", "factors"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding; the exporter turns it into the cos and sin tables.

    Parameters are those of transformers' `modeling_rope_utils`. Raises ValueError when a
    parameter of the type is missing, or one of another type is given.
    """

    type: str  # default, linear, dynamic, llama3, yarn, longrope
    theta: float  # base of the geometric frequency series
    rotary_dim: int  # leading channels of a head that rotate, even
    interleaved: bool = False  # pairs (0, 1), (2, 3), … instead of (i, i + rotary_dim / 2)
    attention_factor: float = 1.0  # multiplies cos and sin (yarn, longrope)
    factor: float | None = None  # context extension ratio
    original_context_length: int | None = None  # tokens that the model was first trained on
    low_freq_factor: float | None = None  # llama3
    high_freq_factor: float | None = None  # llama3
    beta_fast: float | None = None  # yarn, rotations where interpolation starts
    beta_slow: float | None = None  # yarn, rotations where interpolation is complete
    truncate: bool | None = None  # yarn, round the correction range to whole channels
    factors: tuple[float, ...] | None = None  # longrope, of each pair's wavelength

    def __post_init__(self) -> None:
        """Hold the parameters to what the type needs."""
        if self.type not in ROPE_PARAMETERS:
            raise ValueError(f"rope type {self.type!r} is not one of {sorted(ROPE_PARAMETERS)}")
        _require(self.theta > 0, f"rope theta {self.theta} must be positive")
        _require(
            self.rotary_dim > 0 and self.rotary_dim % 2 == 0,
            f"rotary_dim {self.rotary_dim} must be positive and even",
        )
        needed = ROPE_PARAMETERS[self.type]
        for field in dataclasses.fields(self):
            if field.default is not None:
                continue
            given = getattr(self, field.name) is not None
            if given != (field.name in needed):
                found = "is not a parameter of" if given else "is missing for"
                raise ValueError(f"{field.name} {found} rope type {self.type!r}, needs {needed}")
        if self.factors is not None:
            _require(
                len(self.factors) == self.rotary_dim // 2 and all(one > 0 for one in self.factors),
                f"factors are {self.factors} for {self.rotary_dim // 2} pairs of channels; there "
                "must be one for each, all positive",
            )

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return _without_nulls(_to_json(self), _LATER_OF_ROPE)

    @classmethod
    def from_json(cls, value: Any) -> RopeSpec:
        """Read what `to_json` wrote. Raises ArtifactError for anything else."""
        fields = check_fields("rope", _with_nulls(value, _LATER_OF_ROPE), _ROPE_FIELDS)
        if fields["factors"] is not None:
            if not all(_is_a(factor, float) for factor in fields["factors"]):
                raise ArtifactError("rope.factors has an entry that is no finite number")
            fields["factors"] = tuple(map(float, fields["factors"]))
        return _construct(cls, "rope", fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArchSpec:
    """A decoder-only transformer. Sizes are elements, `context_length` is tokens.

    Raises ValueError when sizes contradict each other.
    """

    family: str  # llama, mistral, qwen2, qwen3, …
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_size: int
    vocab_size: int
    rms_norm_eps: float
    hidden_act: str  # one of HIDDEN_ACTS
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMSNorm on queries and keys, before RoPE: see `whole_qk_norm`
    tie_word_embeddings: bool
    context_length: int  # longest sequence, rows of the cos and sin tables
    sliding_window: tuple[int | None, ...]  # per layer: visible tokens with the query's own, or all
    rope: RopeSpec
    attention_scale: float | None = None  # of QK^T; None: 1 / sqrt(head_size)
    residual_scale: float | None = None  # what is stored times it: see `output_scale`; None: 1
    logits_scale: float | None = None  # likewise the final norm's weight
    rotated_layers: tuple[bool, ...] | None = None  # which of them RoPE rotates; None: all
    output_norms: bool | None = None  # RMSNorm on what attention and MLP add; None: without
    inner_norm_eps: float | None = None  # of norms on heads and on outputs; None: rms_norm_eps
    local_rope: RopeSpec | None = None  # of layers with a sliding window; None: rope
    raw_inputs: bool | None = None  # attention and MLP read the residual stream; None: norms of it
    whole_qk_norm: bool | None = None  # over all heads of a token at once; None: over each head
    attention_softcap: float | None = None  # c: QK^T, scaled, is c * tanh(it / c); None: as it is
    logits_softcap: float | None = None  # likewise the logits

    def __post_init__(self) -> None:
        """Check that the sizes agree."""
        for name in _SIZES:
            _require(getattr(self, name) > 0, f"{name} must be positive, is {getattr(self, name)}")
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}",
        )
        _require(
            self.rope.rotary_dim <= self.head_size,
            f"rotary_dim {self.rope.rotary_dim} exceeds head_size {self.head_size}",
        )
        _require(
            self.local_rope is None or self.local_rope.rotary_dim <= self.head_size,
            f"local_rope {self.local_rope} exceeds head_size {self.head_size}",
        )
        _require(
            len(self.sliding_window) == self.num_layers,
            f"sliding_window has {len(self.sliding_window)} entries for {self.num_layers} layers",
        )
        _require(
            all(window is None or window > 0 for window in self.sliding_window),
            f"sliding windows must be positive or None, are {self.sliding_window}",
        )
        _require(
            self.rotated_layers is None or len(self.rotated_layers) == self.num_layers,
            f"rotated_layers are {self.rotated_layers} for {self.num_layers} layers",
        )
        for name in ("inner_norm_eps", "attention_softcap", "logits_softcap"):
            value = getattr(self, name)
            _require(value is None or value > 0, f"{name} must be positive, is {value}")
        _require(
            not self.raw_inputs or self.residual_scale is None,
            "residual_scale needs norms on what layers read, and raw_inputs says there are none",
        )
        if self.hidden_act not in HIDDEN_ACTS:
            raise ValueError(f"hidden_act {self.hidden_act!r} is not one of {HIDDEN_ACTS}")

    @property
    def q_size(self) -> int:
        """Width of all query heads, num_heads * head_size."""
        return self.num_heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads, num_kv_heads * head_size."""
        return self.num_kv_heads * self.head_size

    @property
    def qkv_size(self) -> int:
        """Width of the packed projection: queries, then keys, then values."""
        return self.q_size + 2 * self.kv_size

    def rotates(self, layer: int) -> bool:
        """Whether RoPE rotates the queries and keys of a layer."""
        return self.rotated_layers is None or self.rotated_layers[layer]

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        """The rotary embeddings that layers have."""
        return tuple(dict.fromkeys(self.rope_of(layer) for layer in range(self.num_layers)))

    def rope_of(self, layer: int) -> RopeSpec:
        """The rotary embedding of a layer."""
        if self.local_rope is not None and self.sliding_window[layer] is not None:
            return self.local_rope
        return self.rope

    @property
    def inner_eps(self) -> float:
        """The epsilon of norms that do not read the residual stream."""
        return self.rms_norm_eps if self.inner_norm_eps is None else self.inner_norm_eps

    @property
    def output_scale(self) -> float:
        """What o_proj and down_proj are stored times; the norms behind them are, if there are."""
        return 1.0 if self.residual_scale is None or self.output_norms else self.residual_scale

    @property
    def scale(self) -> float:
        """What QK^T is multiplied with."""
        if self.attention_scale is not None:
            return self.attention_scale
        return 1.0 / math.sqrt(self.head_size)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        ropes = {"rope": self.rope.to_json()}
        if self.local_rope is not None:
            ropes["local_rope"] = self.local_rope.to_json()
        return _without_nulls(_to_json(self), _LATER) | ropes

    @classmethod
    def from_json(cls, value: Any) -> ArchSpec:
        """Read what `to_json` wrote. Raises ArtifactError for anything else."""
        fields = check_fields("model", _with_nulls(value, _LATER), _ARCH_FIELDS)
        windows = fields["sliding_window"]
        if not all(window is None or _is_a(window, int) for window in windows):
            raise ArtifactError(f"model.sliding_window has an entry that is no integer: {windows}")
        fields["sliding_window"] = tuple(windows)
        if (rotated := fields["rotated_layers"]) is not None:
            if not all(isinstance(one, bool) for one in rotated):
                raise ArtifactError(f"model.rotated_layers has an entry that is no bool: {rotated}")
            fields["rotated_layers"] = tuple(rotated)
        fields["rope"] = RopeSpec.from_json(fields["rope"])
        if fields["local_rope"] is not None:
            fields["local_rope"] = RopeSpec.from_json(fields["local_rope"])
        return _construct(cls, "model", fields)


_NONE: Final = type(None)
_ROPE_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "type": (str,),
    "theta": (float,),
    "rotary_dim": (int,),
    "interleaved": (bool,),
    "attention_factor": (float,),
    "factor": (float, _NONE),
    "original_context_length": (int, _NONE),
    "low_freq_factor": (float, _NONE),
    "high_freq_factor": (float, _NONE),
    "beta_fast": (float, _NONE),
    "beta_slow": (float, _NONE),
    "truncate": (bool, _NONE),
    "factors": (list, _NONE),
}
_SIZES: Final = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "vocab_size",
    "rms_norm_eps",
    "context_length",
)
_ARCH_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "family": (str,),
    **dict.fromkeys(_SIZES, (int,)),
    "rms_norm_eps": (float,),
    "hidden_act": (str,),
    "qkv_bias": (bool,),
    "o_bias": (bool,),
    "mlp_bias": (bool,),
    "qk_norm": (bool,),
    "tie_word_embeddings": (bool,),
    "sliding_window": (list,),
    "rope": (dict,),
    "attention_scale": (float, _NONE),
    "residual_scale": (float, _NONE),
    "logits_scale": (float, _NONE),
    "rotated_layers": (list, _NONE),
    "output_norms": (bool, _NONE),
    "inner_norm_eps": (float, _NONE),
    "local_rope": (dict, _NONE),
    "raw_inputs": (bool, _NONE),
    "whole_qk_norm": (bool, _NONE),
    "attention_softcap": (float, _NONE),
    "logits_softcap": (float, _NONE),
}
# Fields that artifacts of before lack, as those do today where they are None.
_LATER: Final = (
    *("residual_scale", "logits_scale", "rotated_layers"),
    *("output_norms", "inner_norm_eps", "local_rope"),
    *("raw_inputs", "whole_qk_norm", "attention_softcap", "logits_softcap"),
)
_LATER_OF_ROPE: Final = ("factors",)


def check_fields(what: str, value: Any, schema: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Check a JSON object against field names and types, and return a copy of it.

    An integer is accepted where a float is asked for; a bool is never an integer.

    Args:
        what: The object's name in error messages.
        value: Anything that `json.loads` returns.
        schema: Every field and its allowed types; all are required, no other is allowed.

    Raises:
        ArtifactError: `value` is no object, or a field is missing, unknown or of a wrong type.
    """
    if not isinstance(value, dict):
        raise ArtifactError(f"{what} must be a JSON object, found {type(value).__name__}")
    problems = [f"missing {name!r}" for name in schema if name not in value]
    problems += [f"unknown {name!r}" for name in value if name not in schema]
    problems += [
        f"{name!r} is {value[name]!r}, expected {' or '.join(_json_name(t) for t in types)}"
        for name, types in schema.items()
        if name in value and not any(_is_a(value[name], t) for t in types)
    ]
    if problems:
        raise ArtifactError(
            f"{what} does not match the schema of this version of onnxport: "
            f"{'; '.join(problems)}. Export the model again, or use the version that wrote it."
        )
    return {
        name: float(value[name]) if float in types and value[name] is not None else value[name]
        for name, types in schema.items()
    }


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, kind)


def _json_name(kind: type) -> str:
    names = {_NONE: "null", float: "a finite number", int: "an integer", str: "a string"}
    return names.get(kind, kind.__name__)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _construct(cls: type[_T], what: str, fields: Mapping[str, Any]) -> _T:
    try:
        return cls(**fields)
    except ValueError as error:
        raise ArtifactError(f"{what} contradicts itself: {error}") from error


def _without_nulls(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: one for name, one in fields.items() if name not in names or one is not None}


def _with_nulls(value: Any, names: tuple[str, ...]) -> Any:
    return {**dict.fromkeys(names), **value} if isinstance(value, dict) else value


def _to_json(spec: ArchSpec | RopeSpec) -> dict[str, Any]:
    fields = dataclasses.asdict(spec)
    return {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
