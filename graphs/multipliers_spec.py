"""What a model multiplies the outputs of its products with, which are stored times it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from onnxport.graphs.fields import check_fields, construct, require


@dataclass(frozen=True, slots=True, kw_only=True)
class MultipliersSpec:
    """A number for each product of every layer; each field names what the product makes.

    Raises ValueError when one is no positive number.
    """

    queries: float
    keys: float
    values: float
    attention: float  # what layers add of it
    gate: float  # of feed-forward layers
    down: float
    # Of state spaces: the gate, what goes into states and what comes out of them, with the values
    # ahead, steps, and what layers add of it.
    space_gate: float
    space_values: float
    space_given: float
    space_taken: float
    space_steps: float
    space: float

    def __post_init__(self) -> None:
        """Check the numbers."""
        for one in fields(self):
            value = getattr(self, one.name)
            require(0 < value < math.inf, f"{one.name} of multipliers must be above 0, is {value}")

    @classmethod
    def from_json(cls, value: Any) -> MultipliersSpec:
        """Read what `fields.plain` wrote. Raises ArtifactError for anything else."""
        return construct(cls, "multipliers", check_fields("multipliers", value, _FIELDS))


_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    one.name: (float,) for one in fields(MultipliersSpec)
}
