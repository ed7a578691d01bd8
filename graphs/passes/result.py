"""What a pass returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class PassResult:
    """A rewritten model; the one that was passed in is left as it was."""

    name: str  # of the pass
    model: onnx.ModelProto
    changes: Mapping[str, int]  # what was changed -> how often; empty: the pass did not fire
    # Initializers whose new contents are too large for the protobuf. The model declares them as
    # external data without a file: attach them with SessionOptions.add_external_initializers.
    attached: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    # Of those that are another tensor of the artifact in another type, that tensor.
    sources: Mapping[str, onnx.TensorProto] = field(default_factory=dict)

    def __str__(self) -> str:
        """One line for a log."""
        done = ", ".join(f"{count} {what}" for what, count in self.changes.items() if count)
        return f"{self.name}: {done or 'nothing to do'}"


def copy_model(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy that a pass may change."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy
