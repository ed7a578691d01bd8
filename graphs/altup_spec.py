"""Several residual streams, of which layers compute one and foretell the others (AltUp)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from onnxport.graphs.fields import check_fields, construct, require


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpSpec:
    """Alternating updates (arXiv:2301.13310), and a product of low rank beside attention (LAuReL).

    Each layer foretells all streams from all, computes on what is foretold of one, and corrects
    all by what came out other than foretold. LAuReL (arXiv:2411.07501) adds to the stream what
    attention reads, and a norm of a product of it.

    Raises ValueError when sizes contradict each other.
    """

    streams: int
    active: int  # which one layers compute on
    scaled: bool  # what each layer is told of tokens is chosen by a stream times a vector
    laurel_rank: int

    def __post_init__(self) -> None:
        """Check the sizes."""
        require(self.streams > 1, f"streams must be above 1, are {self.streams}")
        require(
            0 <= self.active < self.streams,
            f"active must be one of {self.streams} streams, is {self.active}",
        )
        require(self.laurel_rank > 0, f"laurel_rank must be positive, is {self.laurel_rank}")

    @classmethod
    def from_json(cls, value: Any) -> AltUpSpec:
        """Read what `fields.plain` wrote. Raises ArtifactError for anything else."""
        return construct(cls, "altup", check_fields("altup", value, _FIELDS))


_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "streams": (int,),
    "active": (int,),
    "scaled": (bool,),
    "laurel_rank": (int,),
}
