"""Queries that grow with their positions, as those of Llama 4 and Ministral 3 do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from onnxport.graphs.fields import check_fields, construct, require


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthSpec:
    """A query at position p is times `1 + strength * log(1 + floor((p + offset) / interval))`.

    Sources: transformers' Ministral3Attention, Mistral4Attention and Llama4TextAttention; the idea
    is that of Scalable-Softmax (arXiv:2501.19399).

    Raises ValueError when a number is out of range.
    """

    strength: float
    interval: int  # positions that have one factor
    offset: int  # Llama 4 counts positions from 1: its first interval is one shorter
    without_rope: bool  # of layers that RoPE does not rotate alone

    def __post_init__(self) -> None:
        """Check the numbers."""
        require(
            0 < self.strength < math.inf,
            f"strength of growing queries must be above 0, is {self.strength}",
        )
        require(self.interval > 0, f"interval of growing queries must be positive: {self.interval}")
        require(
            self.offset in (0, 1), f"offset of growing queries must be 0 or 1, is {self.offset}"
        )

    @classmethod
    def from_json(cls, value: Any) -> GrowthSpec:
        """Read what `fields.plain` wrote. Raises ArtifactError for anything else."""
        return construct(cls, "query_growth", check_fields("query_growth", value, _FIELDS))


_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "strength": (float,),
    "interval": (int,),
    "offset": (int,),
    "without_rope": (bool,),
}
