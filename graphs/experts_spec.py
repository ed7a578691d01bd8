"""Feed-forward layers of experts: how many, and how a token's are chosen and weighed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

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
class ExpertsSpec:
    """A feed-forward layer of several, of which each token is given to a few: its experts.

    A router has a logit for each expert, of which scores are made: a softmax over all experts, or
    the sigmoid of each. A token goes to those with the largest, and what they return is added up by
    their scores. Experts may be in groups, and a token goes to none but those of a few groups: the
    ones whose `group_best` largest scores add up to most. There may be a feed-forward layer beside
    the experts that each token is given to, the shared one; what is said of biases and activations
    is not said of that. In a model whose feed-forward layers have no gate, experts have none.

    Raises ValueError when sizes contradict each other.
    """

    count: int  # experts of a layer
    per_token: int  # that a token is given to
    size: int  # features between an expert's two products
    normalized: bool  # weights of those that a token is given to add up to 1
    layers: tuple[bool, ...] | None = None  # which have experts; None: all
    sigmoid: bool | None = None  # scores are sigmoids of logits; None: their softmax
    corrected: bool | None = None  # a vector is added to scores where they choose, and only there
    scale: float | None = None  # of what experts add: `down` is stored times it; None: 1
    shared_size: int | None = None  # features of the shared layer; None: there is none
    shared_gated: bool | None = None  # it is multiplied with the sigmoid of a product; None: not
    biased: bool | None = None  # the router and each expert's two products have biases; None: not
    alpha: float | None = None  # gates are multiplied with sigmoid(alpha * gate); None: 1
    up_offset: float | None = None  # what is added to what they are multiplied with then; None: 0
    limit: float | None = None  # of gates from above, and of up's both sides, first; None: none
    groups: int | None = None  # of experts that stand beside each other; None: there are none
    groups_per_token: int | None = None  # whose experts a token may be given to
    group_best: int | None = None  # scores of a group, as they choose, that are added up
    # Router, experts and shared layer read norms of the stream that are their own, and what experts
    # add, each times a number of its own, is normalized ahead of the sum, as is the shared layer's.
    apart: bool | None = None  # None: all read one norm, and what they make is added as it is
    # Of SparseMixer (arXiv:2409.12136): a score is the softmax of a logit among those of experts
    # that are not yet chosen and no further below it than twice this part of the larger of it and
    # their own size. None: scores are of all experts.
    jitter: float | None = None
    shared_scale: float | None = None  # of what the shared layer adds: as `scale`; None: 1
    sum_normed: bool | None = None  # RMSNorm on what experts and shared layer add; None: without
    # What the one expert of a token reads is times the sigmoid of its logit, and what it makes is
    # added as it is; None: what experts make is weighed.
    scaled_inputs: bool | None = None

    def __post_init__(self) -> None:
        """Check that the sizes agree."""
        for name in ("count", "per_token", "size"):
            value = getattr(self, name)
            require(value > 0, f"{name} of the experts must be positive, is {value}")
        require(
            self.per_token <= self.count,
            f"a token is given to {self.per_token} experts, of {self.count}",
        )
        for name in ("scale", "shared_size", "shared_scale", "alpha", "limit"):
            found = getattr(self, name)
            require(found is None or found > 0, f"{name} of the experts must be positive: {found}")
        require(
            self.shared_size is not None or not self.shared_gated,
            "shared_gated needs a shared_size, and there is none",
        )
        mixed_otherwise = self.sigmoid or self.corrected or self.groups is not None
        mixed = mixed_otherwise or self.normalized
        require(
            self.jitter is None or (self.jitter >= 0 and self.per_token == 2 and not mixed),
            f"jitter is of two experts by a softmax that nothing normalizes: it is {self.jitter}, "
            f"and a token is given to {self.per_token}",
        )
        require(
            self.shared_size is not None or self.shared_scale is None,
            f"shared_scale is {self.shared_scale}, and there is no shared layer",
        )
        require(
            not self.apart or (self.shared_size is not None and not self.shared_gated),
            "experts apart need a shared layer without a gate",
        )
        require(
            not (self.sum_normed and self.apart),
            "experts apart have norms of their own, sum_normed is of others",
        )
        require(
            not self.scaled_inputs
            or (self.per_token == 1 and self.normalized and not (mixed_otherwise or self.apart)),
            f"scaled_inputs is of one expert a token, whose weight is 1: a token is given to "
            f"{self.per_token}, of {self}",
        )
        self._check_groups()

    def _check_groups(self) -> None:
        """Check that the experts' groups have what is chosen of them."""
        sizes = (self.groups, self.groups_per_token, self.group_best)
        if self.groups is None or self.groups_per_token is None or self.group_best is None:
            require(not any(sizes), "groups, groups_per_token and group_best need each other")
            return
        require(
            self.groups > 1 and self.count % self.groups == 0,
            f"{self.count} experts cannot be {self.groups} equal groups",
        )
        size = self.count // self.groups
        require(
            0 < self.groups_per_token <= self.groups and 0 < self.group_best <= size,
            f"of {self.groups} groups a token is given to {self.groups_per_token}, and of a "
            f"group's {size} experts {self.group_best} say so",
        )
        require(
            self.per_token <= self.groups_per_token * size,
            f"a token is given to {self.per_token} experts, of {self.groups_per_token} groups of "
            f"{size}",
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return without_nulls(plain(self), _LATER_OF_EXPERTS)

    @classmethod
    def from_json(cls, value: Any) -> ExpertsSpec:
        """Read what `to_json` wrote. Raises ArtifactError for anything else."""
        schema = _EXPERTS_FIELDS
        fields = check_fields("experts", with_nulls(value, _LATER_OF_EXPERTS), schema)
        fields["layers"] = flags("experts.layers", fields["layers"])
        return construct(cls, "experts", fields)


_EXPERTS_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(("count", "per_token", "size"), (int,)),
    "normalized": (bool,),
    "layers": (list, NONE),
    **dict.fromkeys(("sigmoid", "corrected", "shared_gated", "biased", "apart"), (bool, NONE)),
    "sum_normed": (bool, NONE),
    "scaled_inputs": (bool, NONE),
    **dict.fromkeys(
        ("scale", "alpha", "up_offset", "limit", "shared_scale", "jitter"), (float, NONE)
    ),
    **dict.fromkeys(("shared_size", "groups", "groups_per_token", "group_best"), (int, NONE)),
}
# Fields that artifacts of before lack, as those do today where they are None.
_LATER_OF_EXPERTS: Final = (
    *("layers", "sigmoid", "corrected", "scale", "shared_size", "shared_gated"),
    *("biased", "alpha", "up_offset", "limit"),
    *("groups", "groups_per_token", "group_best", "apart", "shared_scale", "jitter"),
    "sum_normed",
    "scaled_inputs",
)
