"""Heads of layers whose attention differs from that of the others: what they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from onnxport.graphs.fields import check_fields, construct, require


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadsSpec:
    """Heads of layers without a window, beside layers with one that have others.

    Raises ValueError when a size is not positive.
    """

    head_size: int  # channels
    num_kv_heads: int
    keys_are_values: bool  # what keys are made of, ahead of their norm, is what values are made of

    def __post_init__(self) -> None:
        """Check the sizes."""
        for name in ("head_size", "num_kv_heads"):
            value = getattr(self, name)
            require(value > 0, f"{name} of global heads must be positive, is {value}")

    @classmethod
    def from_json(cls, value: Any) -> HeadsSpec:
        """Read what `fields.plain` wrote. Raises ArtifactError for anything else."""
        return construct(cls, "global_heads", check_fields("global_heads", value, _FIELDS))


_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "head_size": (int,),
    "num_kv_heads": (int,),
    "keys_are_values": (bool,),
}
