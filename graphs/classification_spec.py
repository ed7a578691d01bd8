"""How a model judges a text, or a pair of texts: the labels of its score head.

The head itself is a small matrix in a file of its own, which no graph reads.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ArtifactError
from onnxport.graphs.fields import check_fields, construct, is_a, require

Activation = Literal["sigmoid", "softmax", "none"]
ACTIVATIONS: Final[tuple[Activation, ...]] = get_args(Activation)
SCORE_FILE: Final = "score_head.npz"  # `weight`, float32 [labels, hidden]
SCORE_TEMPLATE_FILE: Final = "score_template.jinja"  # how a pair of texts is written

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationSpec:
    """What a checkpoint says of its score head.

    Raises ValueError for a value that is not allowed.
    """

    labels: tuple[str, ...]
    activation: Activation  # of what the head makes of the last token; none: it is the answer
    only: bool = False  # the model has no other head, and so generates nothing

    def __post_init__(self) -> None:
        """Check that the values are allowed."""
        require(len(self.labels) > 0, "there are no labels")
        require(
            self.activation in ACTIVATIONS,
            f"activation {self.activation!r} is not one of {ACTIVATIONS}",
        )
        require(
            self.activation != "softmax" or len(self.labels) > 1,
            "a softmax of one label is always 1",
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values."""
        return {
            "labels": list(self.labels),
            "activation": self.activation,
            "only": self.only,
        }

    @classmethod
    def from_json(cls, value: Any) -> ClassificationSpec:
        """Read what `to_json` wrote. Raises ArtifactError for anything else."""
        fields = check_fields("classification", value, _FIELDS)
        if not all(is_a(one, str) for one in fields["labels"]):
            raise ArtifactError(f"classification.labels has what is no text: {fields['labels']}")
        fields["labels"] = tuple(fields["labels"])
        return construct(cls, "classification", fields)


def dump_score_head(weight: Floats) -> bytes:
    """The bytes of SCORE_FILE."""
    buffer = io.BytesIO()
    np.savez(buffer, weight=weight)
    return buffer.getvalue()


def read_score_head(folder: Path, spec: ClassificationSpec, hidden_size: int) -> Floats:
    """The score head of an artifact, float32 [labels, hidden].

    Raises:
        ArtifactError: the file is missing, or is not what the manifest calls for.
    """
    from zipfile import BadZipFile  # which most models never need

    path, shape = folder / SCORE_FILE, (len(spec.labels), hidden_size)
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            weight: Floats = arrays["weight"]
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise ArtifactError(
            f"{path} cannot be read ({error}), and the manifest says that the model has a score "
            "head; export it again"
        ) from error
    if weight.dtype != np.float32 or weight.shape != shape or not np.isfinite(weight).all():
        raise ArtifactError(
            f"{path} holds {weight.dtype} {list(weight.shape)}, expected finite numbers of "
            f"float32 {list(shape)}; export the model again"
        )
    return weight


_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "labels": (list,),
    "activation": (str,),
    "only": (bool,),
}
