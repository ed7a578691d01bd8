"""What layers of gated delta nets are, which have a state in place of keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from onnxport.graphs.fields import check_fields, construct, flags, require


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionSpec:
    """Layers of gated delta nets (arXiv:2412.06464) between layers of attention.

    What such a layer keeps of a sequence does not grow with it: the last inputs of a convolution
    over its queries, keys and values, and a matrix [value_size, key_size] for each value head. Each
    query and key head serves `value_heads / key_heads` value heads, one behind the other.

    Raises ValueError when sizes contradict each other.
    """

    key_heads: int  # and query heads
    value_heads: int
    key_size: int  # of a query or key head
    value_size: int  # of a value head
    kernel: int  # tokens that the convolution reads, the last one its own
    layers: tuple[bool, ...]  # which of them are such

    def __post_init__(self) -> None:
        """Check that the sizes agree."""
        for name in ("key_heads", "value_heads", "key_size", "value_size"):
            value = getattr(self, name)
            require(value > 0, f"{name} of linear attention must be positive, is {value}")
        require(self.kernel > 1, f"kernel of linear attention must be above 1, is {self.kernel}")
        require(
            self.value_heads % self.key_heads == 0,
            f"value_heads {self.value_heads} of linear attention are no multiple of key_heads "
            f"{self.key_heads}",
        )
        require(
            any(self.layers) and not all(self.layers),
            f"layers of linear attention are {list(self.layers)}; some must be such, and some not",
        )

    @property
    def key_width(self) -> int:
        """Width of all key (or query) heads, key_heads * key_size."""
        return self.key_heads * self.key_size

    @property
    def value_width(self) -> int:
        """Width of all value heads, value_heads * value_size."""
        return self.value_heads * self.value_size

    @property
    def channels(self) -> int:
        """What the convolution reads of a token: queries, then keys, then values."""
        return 2 * self.key_width + self.value_width

    @property
    def conv_state(self) -> tuple[int, int]:
        """What a layer keeps of the convolution's inputs: channels, and tokens, the latest last."""
        return (self.channels, self.kernel - 1)

    @property
    def recurrent_state(self) -> tuple[int, int, int]:
        """What else a layer keeps: a matrix for each value head."""
        return (self.value_heads, self.value_size, self.key_size)

    @classmethod
    def from_json(cls, value: Any) -> LinearAttentionSpec:
        """Read what `fields.plain` wrote. Raises ArtifactError for anything else."""
        fields = check_fields("linear", value, _LINEAR_FIELDS)
        fields["layers"] = flags("linear.layers", fields["layers"])
        return construct(cls, "linear", fields)


_LINEAR_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(("key_heads", "value_heads", "key_size", "value_size", "kernel"), (int,)),
    "layers": (list,),
}
