"""What layers are that have a state in place of keys and values.

There are three kinds, of which a model has one: gated delta nets, state spaces, and convolutions
alone. In JSON the field `kind` tells them apart; gated delta nets have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from onnxport.errors import ArtifactError
from onnxport.graphs.fields import (
    NONE,
    check_fields,
    construct,
    flags,
    plain,
    require,
    with_nulls,
    without_nulls,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionSpec:
    """Layers of gated delta nets (arXiv:2412.06464) between layers of attention.

    What such a layer keeps of a sequence does not grow with it: the last inputs of a convolution
    over its queries, keys and values, and a matrix [value_size, key_size] for each value head. Each
    query and key head serves `value_heads / key_heads` value heads, one behind the other.

    With a `gate_rank` they are Kimi Delta Attention (arXiv:2510.26692): each channel of a value
    head's key has a decay of its own, what makes decays and the output's gate are two products each
    with so many numbers between them, and that gate is a sigmoid and not a SiLU.

    Raises ValueError when sizes contradict each other.
    """

    key_heads: int  # and query heads
    value_heads: int
    key_size: int  # of a query or key head
    value_size: int  # of a value head
    kernel: int  # tokens that the convolution reads, the last one its own
    layers: tuple[bool, ...]  # which of them are such
    doubled_beta: bool | None = None  # how much of a value is new is from 0 to 2; None: to 1
    norm_eps: float | None = None  # of the norm behind; None: rms_norm_eps
    gate_rank: int | None = None  # None: decays are of heads, and one product makes each

    def __post_init__(self) -> None:
        """Check that the sizes agree."""
        sizes = ("key_heads", "value_heads", "key_size", "value_size", "norm_eps", "gate_rank")
        for name in sizes:
            value = getattr(self, name)
            require(
                value is None or value > 0,
                f"{name} of linear attention must be positive, is {value}",
            )
        require(
            self.value_heads % self.key_heads == 0,
            f"value_heads {self.value_heads} of linear attention are no multiple of key_heads "
            f"{self.key_heads}",
        )
        _check_common("linear attention", self.kernel, self.layers)

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

    @property
    def decay_width(self) -> int:
        """Decays of a token: of each value head, or of each channel of its key."""
        return self.value_heads * (1 if self.gate_rank is None else self.key_size)

    @property
    def projected_width(self) -> int:
        """Rows and columns, beside hidden_size, of a layer's large products."""
        gates = self.value_width if self.gate_rank is None else 2 * self.gate_rank
        return self.channels + self.value_width + gates


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceSpec:
    """Layers of Mamba-2, which are state spaces (arXiv:2405.21060), between layers of attention.

    What such a layer keeps of a sequence are the last inputs of a convolution over its values, and
    what goes into and comes out of its state, and a matrix [head_size, state_size] for each head.
    The heads of a group, which lie one behind the other, share what goes in and what comes out.
    What all heads of a group have is normalized at once, unless nothing is.

    Raises ValueError when sizes contradict each other.
    """

    heads: int
    head_size: int  # values of a head
    groups: int
    state_size: int  # numbers that a value has in a state
    kernel: int  # tokens that the convolution reads, the last one its own
    conv_bias: bool  # of the convolution
    layers: tuple[bool, ...]  # which of them are such
    # Every layer has both: attention and a state space read one norm, and what both make is added.
    beside_attention: bool | None = None  # None: a layer has one of them
    without_norm: bool | None = None  # what is gated is not normalized; None: it is

    def __post_init__(self) -> None:
        """Check that the sizes agree."""
        for name in ("heads", "head_size", "groups", "state_size"):
            value = getattr(self, name)
            require(value > 0, f"{name} of state spaces must be positive, is {value}")
        require(
            self.heads % self.groups == 0,
            f"heads {self.heads} of state spaces are no multiple of groups {self.groups}",
        )
        _check_common("state spaces", self.kernel, self.layers, some=not self.beside_attention)

    @property
    def value_width(self) -> int:
        """Width of all heads, heads * head_size."""
        return self.heads * self.head_size

    @property
    def group_width(self) -> int:
        """Width of what all groups put in (or take out), groups * state_size."""
        return self.groups * self.state_size

    @property
    def channels(self) -> int:
        """What the convolution reads of a token: values, then what goes in, then what comes out."""
        return self.value_width + 2 * self.group_width

    @property
    def conv_state(self) -> tuple[int, int]:
        """What a layer keeps of the convolution's inputs: channels, and tokens, the latest last."""
        return (self.channels, self.kernel - 1)

    @property
    def recurrent_state(self) -> tuple[int, int, int]:
        """What else a layer keeps: a matrix for each head."""
        return (self.heads, self.head_size, self.state_size)

    @property
    def projected_width(self) -> int:
        """Rows and columns, beside hidden_size, of a layer's large products."""
        return self.channels + 2 * self.value_width


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """Layers that are a gated convolution over a few tokens, between layers of attention.

    All that such a layer keeps of a sequence are the convolution's last inputs. It has as many
    channels as the residual stream.

    Raises ValueError when sizes contradict each other.
    """

    channels: int
    kernel: int  # tokens that the convolution reads, the last one its own
    bias: bool  # of the convolution, and of the products into and out of the layer
    layers: tuple[bool, ...]  # which of them are such

    def __post_init__(self) -> None:
        """Check that the sizes agree."""
        require(
            self.channels > 0,
            f"channels of short convolutions must be positive, are {self.channels}",
        )
        _check_common("short convolutions", self.kernel, self.layers)

    @property
    def conv_state(self) -> tuple[int, int]:
        """What a layer keeps of the convolution's inputs: channels, and tokens, the latest last."""
        return (self.channels, self.kernel - 1)

    @property
    def recurrent_state(self) -> None:
        """There is no other state."""
        return None

    @property
    def projected_width(self) -> int:
        """Rows and columns, beside hidden_size, of a layer's large products.

        One makes inputs and their two gates, and the other is behind the convolution.
        """
        return 4 * self.channels


LinearSpec = LinearAttentionSpec | StateSpaceSpec | ShortConvSpec


def linear_to_json(linear: LinearSpec) -> dict[str, Any]:
    """The fields as plain JSON values, and what tells their kind."""
    kinds = {cls: kind for kind, (cls, _) in _KINDS.items() if kind is not None}
    kind = kinds.get(type(linear))
    fields = without_nulls(plain(linear), _LATER)
    return fields if kind is None else {"kind": kind, **fields}


def linear_from_json(value: Any) -> LinearSpec:
    """Read what `linear_to_json` wrote. Raises ArtifactError for anything else."""
    rest = value
    kind = None
    if isinstance(value, dict) and "kind" in value:
        kind = value["kind"]
        rest = {name: one for name, one in value.items() if name != "kind"}
        if not isinstance(kind, str) or kind not in _KINDS:
            known = [one for one in _KINDS if one is not None]
            raise ArtifactError(
                f"linear.kind is {kind!r}; this version of onnxport knows {known}, and none for "
                "gated delta nets. Export the model again, or use the version that wrote it."
            )
    cls, schema = _KINDS[kind]
    later = tuple(name for name in _LATER if name in schema)
    fields = check_fields("linear", with_nulls(rest, later), schema)
    fields["layers"] = flags("linear.layers", fields["layers"])
    return construct(cls, "linear", fields)


def _check_common(what: str, kernel: int, layers: tuple[bool, ...], *, some: bool = True) -> None:
    """Check what all kinds have; `some` of the layers are such, or all."""
    require(kernel > 1, f"kernel of {what} must be above 1, is {kernel}")
    wanted = "some must be such, and some not" if some else "beside attention all must be such"
    require(
        any(layers) and all(layers) is not some, f"layers of {what} are {list(layers)}; {wanted}"
    )


# Fields that artifacts of before lack, as those do today where they are None.
_OF_SPACES: Final = ("beside_attention", "without_norm")
_LATER: Final = (*_OF_SPACES, "doubled_beta", "norm_eps", "gate_rank")


def _schema(sizes: tuple[str, ...], switches: tuple[str, ...]) -> Mapping[str, tuple[type, ...]]:
    return {**dict.fromkeys(sizes, (int,)), **dict.fromkeys(switches, (bool,)), "layers": (list,)}


_KINDS: Final[Mapping[str | None, tuple[type[LinearSpec], Mapping[str, tuple[type, ...]]]]] = {
    None: (
        LinearAttentionSpec,
        {
            **_schema(("key_heads", "value_heads", "key_size", "value_size", "kernel"), ()),
            "doubled_beta": (bool, NONE),
            "norm_eps": (float, NONE),
            "gate_rank": (int, NONE),
        },
    ),
    "state_space": (
        StateSpaceSpec,
        {
            **_schema(("heads", "head_size", "groups", "state_size", "kernel"), ("conv_bias",)),
            **dict.fromkeys(_OF_SPACES, (bool, NONE)),
        },
    ),
    "short_convolution": (ShortConvSpec, _schema(("channels", "kernel"), ("bias",))),
}
