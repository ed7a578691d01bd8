"""How positions rotate queries and keys: rotary position embedding, and its types."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from onnxport.errors import ArtifactError
from onnxport.graphs.fields import (
    NONE,
    check_fields,
    construct,
    is_a,
    plain,
    require,
    with_nulls,
    without_nulls,
)

# RoPE type -> the optional RopeSpec fields that it needs (the others stay None).
ROPE_PARAMETERS: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor", "original_context_length"),
    "llama3": ("factor", "original_context_length", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_context_length", "beta_fast", "beta_slow", "truncate"),
    "longrope": ("original_context_length", "factors"),
    "proportional": ("factor", "rotated_pairs"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding; the exporter turns it into the cos and sin tables.

    Parameters are those of transformers' `modeling_rope_utils`. Raises ValueError when a
    parameter of the type is missing, or one of another type is given.
    """

    type: str  # default, linear, dynamic, llama3, yarn, longrope, proportional
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
    rotated_pairs: int | None = None  # proportional, the first of rotary_dim / 2 that really turn
    turns_back: bool | None = None  # angles are negative, of any type; None: they are positive

    def __post_init__(self) -> None:
        """Hold the parameters to what the type needs."""
        if self.type not in ROPE_PARAMETERS:
            raise ValueError(f"rope type {self.type!r} is not one of {sorted(ROPE_PARAMETERS)}")
        require(self.theta > 0, f"rope theta {self.theta} must be positive")
        require(
            self.rotary_dim > 0 and self.rotary_dim % 2 == 0,
            f"rotary_dim {self.rotary_dim} must be positive and even",
        )
        needed = ROPE_PARAMETERS[self.type]
        for field in dataclasses.fields(self):
            if field.default is not None or field.name in _OF_ANY_TYPE:
                continue
            given = getattr(self, field.name) is not None
            if given != (field.name in needed):
                found = "is not a parameter of" if given else "is missing for"
                raise ValueError(f"{field.name} {found} rope type {self.type!r}, needs {needed}")
        if self.factors is not None:
            require(
                len(self.factors) == self.rotary_dim // 2 and all(one > 0 for one in self.factors),
                f"factors are {self.factors} for {self.rotary_dim // 2} pairs of channels; there "
                "must be one for each, all positive",
            )
        if self.rotated_pairs is not None:
            require(
                0 < self.rotated_pairs <= self.rotary_dim // 2,
                f"rotated_pairs is {self.rotated_pairs}; it must be from 1 to the "
                f"{self.rotary_dim // 2} pairs of channels",
            )

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return without_nulls(plain(self), _LATER)

    @classmethod
    def from_json(cls, value: Any) -> RopeSpec:
        """Read what `to_json` wrote. Raises ArtifactError for anything else."""
        fields = check_fields("rope", with_nulls(value, _LATER), _FIELDS)
        if fields["factors"] is not None:
            if not all(is_a(factor, float) for factor in fields["factors"]):
                raise ArtifactError("rope.factors has an entry that is no finite number")
            fields["factors"] = tuple(map(float, fields["factors"]))
        return construct(cls, "rope", fields)


_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "type": (str,),
    "theta": (float,),
    "rotary_dim": (int,),
    "interleaved": (bool,),
    "attention_factor": (float,),
    "factor": (float, NONE),
    "original_context_length": (int, NONE),
    "low_freq_factor": (float, NONE),
    "high_freq_factor": (float, NONE),
    "beta_fast": (float, NONE),
    "beta_slow": (float, NONE),
    "truncate": (bool, NONE),
    "factors": (list, NONE),
    "rotated_pairs": (int, NONE),
    "turns_back": (bool, NONE),
}
# Fields that artifacts of before lack, as those do today where they are None.
_LATER: Final = ("factors", "rotated_pairs", "turns_back")
_OF_ANY_TYPE: Final = ("turns_back",)
