"""What a draft head is, beside the layers that it has as any model has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from onnxport.errors import ArtifactError
from onnxport.graphs.fields import check_fields, construct, is_a, require


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSpec:
    """A head that guesses tokens by what another model, its target, makes of those before.

    As in EAGLE-3 (arXiv:2503.01840): what some of the target's layers read is normalized, or not,
    and brought to the head's width by a product. The head's first layer reads that beside the
    embedding of the next token, each normalized; further layers are ordinary ones.

    Or as in multi-token prediction (arXiv:2412.19437), which has no `target_layers`: the head reads
    what the target's final norm makes. That, or what the head itself made, and the embedding of the
    next token are normalized, and a product of both is what the stream begins with, through layers
    that are all ordinary ones.

    Raises ValueError when sizes contradict each other.
    """

    vocab_size: int  # tokens that have a logit: see `manifest.DRAFT_TOKENS`
    target_hidden_size: int
    target_num_layers: int
    target_layers: tuple[int, ...]  # what these read of the residual stream, in order; or none
    norm_before_residual: bool  # the residual stream begins with what is normalized already
    joint_norm: bool  # RMSNorm over what all of them read at once
    apart_norm: bool  # or over what each of them reads
    norm_output: bool  # the head goes on from its final norm's output, not from what that reads

    def __post_init__(self) -> None:
        """Check that the sizes agree."""
        for name in ("vocab_size", "target_hidden_size", "target_num_layers"):
            value = getattr(self, name)
            require(value > 0, f"{name} of a draft head must be positive, is {value}")
        layers = self.target_layers
        require(
            len(set(layers)) == len(layers)
            and all(0 <= layer < self.target_num_layers for layer in layers),
            f"target_layers of a draft head are {list(layers)}; they must be distinct layers of "
            f"the target's {self.target_num_layers}, from 0",
        )
        others = ("norm_before_residual", "joint_norm", "apart_norm")
        wrong = [name for name in others if self.is_mtp and getattr(self, name)]
        require(not wrong, f"{' and '.join(wrong)} of a draft head needs target_layers")
        require(
            not (self.joint_norm and self.apart_norm),
            "joint_norm and apart_norm of a draft head exclude each other",
        )

    @property
    def is_mtp(self) -> bool:
        """Whether it reads what the target's final norm makes, and has ordinary layers alone."""
        return not self.target_layers

    @property
    def method(self) -> Literal["eagle3", "mtp"]:
        """The speculation method that it is for."""
        return "mtp" if self.is_mtp else "eagle3"

    @property
    def features(self) -> int:
        """Numbers that the head reads of each token."""
        return max(1, len(self.target_layers)) * self.target_hidden_size

    @classmethod
    def from_json(cls, value: Any) -> DraftSpec:
        """Read what `fields.plain` wrote. Raises ArtifactError for anything else."""
        fields = check_fields("draft", value, _DRAFT_FIELDS)
        layers = fields["target_layers"]
        if not all(is_a(layer, int) for layer in layers):
            raise ArtifactError(f"draft.target_layers has an entry that is no integer: {layers}")
        fields["target_layers"] = tuple(layers)
        return construct(cls, "draft", fields)


_DRAFT_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(("vocab_size", "target_hidden_size", "target_num_layers"), (int,)),
    "target_layers": (list,),
    **dict.fromkeys(("norm_before_residual", "joint_norm", "apart_norm", "norm_output"), (bool,)),
}
