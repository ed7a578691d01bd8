"""Multi-head latent attention: what heads keep of a token, and what they make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from onnxport.graphs.fields import NONE, check_fields, construct, require


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Attention whose keys and values are products of one short vector a token, its latent.

    The formulas are those of DeepSeek V2 (arXiv:2405.04434, §2.1) in their absorbed form. A row of
    the cache is the latent, normalized, and behind it what rotates of the key, which all heads
    share. A head's query is multiplied with what would make its keys of latents, and so finds them
    without any being made; what it finds is a mean of latents, and is multiplied with what makes
    its value of one.

    Raises ValueError when a size is not positive.
    """

    kv_rank: int  # channels of a latent
    nope_size: int  # channels of a head's query and key that do not rotate
    rope_size: int  # that do
    value_size: int  # channels of a head's value
    query_rank: int | None = None  # of what queries are made of, likewise; None: of the input

    def __post_init__(self) -> None:
        """Check the sizes."""
        for one in fields(self):
            value = getattr(self, one.name)
            require(
                value is None or value > 0,
                f"{one.name} of latent attention must be positive, is {value}",
            )

    @property
    def row_size(self) -> int:
        """Channels of a row of the cache."""
        return self.kv_rank + self.rope_size

    @property
    def query_size(self) -> int:
        """Channels of a head's query as it is projected."""
        return self.nope_size + self.rope_size

    @classmethod
    def from_json(cls, value: Any) -> LatentSpec:
        """Read what `fields.plain` wrote. Raises ArtifactError for anything else."""
        return construct(cls, "latent", check_fields("latent", value, _FIELDS))


_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(("kv_rank", "nope_size", "rope_size", "value_size"), (int,)),
    "query_rank": (int, NONE),
}
