"""How a model makes one vector of a text, as its authors say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from onnxport.errors import ArtifactError
from onnxport.graphs.fields import check_fields, construct, is_a, require

Pooling = Literal["last", "mean"]
Dimensions = Literal["any"] | tuple[int, ...]  # that vectors may be cut to (Matryoshka)
POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec:
    """What a checkpoint says of embeddings.

    Raises ValueError for a value that is not allowed.
    """

    pooling: Pooling | None = None  # of what the final norm makes of tokens; None: it does not say
    normalized: bool | None = None  # the vector has length 1; None: it does not say
    # Whether vectors may be cut (Matryoshka), and to how many numbers; None: to any number.
    matryoshka: bool = False
    dimensions: tuple[int, ...] | None = None
    only: bool = False  # the model has no head, and so generates nothing

    def __post_init__(self) -> None:
        """Check that the values are allowed."""
        require(
            self.pooling in (None, *POOLINGS), f"pooling {self.pooling!r} is not one of {POOLINGS}"
        )
        given = self.dimensions
        require(
            given is None or (self.matryoshka and bool(given) and min(given) > 0),
            f"dimensions are {given}; they are of vectors that may be cut, positive, and not none",
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {
            "pooling": self.pooling,
            "normalized": self.normalized,
            "matryoshka": self.matryoshka,
            "dimensions": None if self.dimensions is None else list(self.dimensions),
            "only": self.only,
        }

    @classmethod
    def from_json(cls, value: Any) -> EmbeddingSpec:
        """Read what `to_json` wrote. Raises ArtifactError for anything else."""
        fields = check_fields("embedding", value, _FIELDS)
        given = fields["dimensions"]
        if given is not None:
            if not all(is_a(one, int) for one in given):
                raise ArtifactError(f"embedding.dimensions has what is no integer: {given}")
            fields["dimensions"] = tuple(given)
        return construct(cls, "embedding", fields)


_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "pooling": (str, type(None)),
    "normalized": (bool, type(None)),
    "matryoshka": (bool,),
    "dimensions": (list, type(None)),
    "only": (bool,),
}
