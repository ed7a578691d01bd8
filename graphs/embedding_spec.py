"""How a model makes one vector of a text, as its authors say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from onnxport.errors import ArtifactError
from onnxport.graphs.fields import (
    check_fields,
    construct,
    is_a,
    require,
    with_nulls,
    without_nulls,
)

Pooling = Literal["last", "mean"]
Dimensions = Literal["any"] | tuple[int, ...]  # that vectors may be cut to (Matryoshka)
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)
SIMILARITIES: Final[tuple[Similarity, ...]] = get_args(Similarity)


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
    similarity: Similarity | None = None  # of two vectors; None: it does not say
    max_tokens: int | None = None  # of a text; None: as many as the context has
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name: what goes ahead of a text
    default_prompt: str | None = None  # the name of the one ahead of texts that ask for none

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
        require(
            self.similarity in (None, *SIMILARITIES),
            f"similarity {self.similarity!r} is not one of {SIMILARITIES}",
        )
        require(
            self.max_tokens is None or self.max_tokens > 0,
            f"max_tokens is {self.max_tokens}; a text has one at least",
        )
        require(
            self.default_prompt is None or self.default_prompt in self.prompts,
            f"default_prompt is {self.default_prompt!r}, and prompts are {sorted(self.prompts)}",
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        fields = {
            "pooling": self.pooling,
            "normalized": self.normalized,
            "matryoshka": self.matryoshka,
            "dimensions": None if self.dimensions is None else list(self.dimensions),
            "only": self.only,
            "similarity": self.similarity,
            "max_tokens": self.max_tokens,
            "prompts": dict(self.prompts) or None,
            "default_prompt": self.default_prompt,
        }
        return without_nulls(fields, _LATER)

    @classmethod
    def from_json(cls, value: Any) -> EmbeddingSpec:
        """Read what `to_json` wrote. Raises ArtifactError for anything else."""
        fields = check_fields("embedding", with_nulls(value, _LATER), _FIELDS)
        given = fields["dimensions"]
        if given is not None:
            if not all(is_a(one, int) for one in given):
                raise ArtifactError(f"embedding.dimensions has what is no integer: {given}")
            fields["dimensions"] = tuple(given)
        prompts = fields["prompts"] = fields["prompts"] or {}
        if not all(is_a(one, str) for one in prompts.values()):
            raise ArtifactError(f"embedding.prompts has what is no text: {prompts}")
        return construct(cls, "embedding", fields)


_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "pooling": (str, type(None)),
    "normalized": (bool, type(None)),
    "matryoshka": (bool,),
    "dimensions": (list, type(None)),
    "only": (bool,),
    "similarity": (str, type(None)),
    "max_tokens": (int, type(None)),
    "prompts": (dict, type(None)),
    "default_prompt": (str, type(None)),
}
# Fields that artifacts of before lack, as those do today where they are None.
_LATER: Final = ("similarity", "max_tokens", "prompts", "default_prompt")
