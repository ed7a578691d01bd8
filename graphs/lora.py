"""What a LoRA adapter is: low-rank additions to the projections of a model.

Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021: a projection `y = x W^T`
becomes `y + (x A^T) B^T`, with the scaling of the adapter multiplied into B.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.spec import ArchSpec

Projection = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PROJECTIONS: Final[tuple[Projection, ...]] = get_args(Projection)


@dataclass(frozen=True, slots=True)
class LoraDelta:
    """What is added to one projection."""

    a: NDArray[np.float32]  # [rank, in_features], host
    b: NDArray[np.float32]  # [out_features, rank], host; the scaling is in it

    @property
    def rank(self) -> int:
        """Columns of `b`."""
        return len(self.a)


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter of one model: its shapes fit the model's projections."""

    deltas: Mapping[tuple[int, Projection], LoraDelta]  # by layer, from 0, and projection

    @property
    def rank(self) -> int:
        """The largest rank of all."""
        return max((delta.rank for delta in self.deltas.values()), default=0)


def projection_shapes(spec: ArchSpec) -> dict[Projection, tuple[int, int]]:
    """Return (out_features, in_features) of each projection of a layer."""
    queries, keys = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
    hidden, inner = spec.hidden_size, spec.intermediate_size
    return {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
