"""LoRA adapters for the tiny models, and what a model with one of them means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxport.exporter.reference import forward
from onnxport.exporter.reference_parts import Array
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.lora import (
    KINDS,
    OF_SOME,
    PROJECTIONS,
    LoraAdapter,
    LoraDelta,
    Projection,
    projection_shapes,
    projections_of,
)
from onnxport.graphs.spec import ArchSpec
from tests.conformance.reference import ArtifactWeights

# Rank and projections of the adapters, by their seed; what PEFT takes by default comes first.
SHAPES: Final[dict[int, tuple[int, tuple[Projection, ...]]]] = {
    1: (8, ("q_proj", "v_proj")),
    2: (4, (*PROJECTIONS, *OF_SOME)),
    3: (1, ("k_proj", "o_proj", "up_proj")),
}
MAX_RANK: Final = 8
SUM: Final = 4  # in place of a seed
SUMMED: Final = ((2, 0.75), (3, -1.5))  # the adapters of that, and what each is times


def make_adapter(spec: ArchSpec, seed: int) -> LoraAdapter:
    """A random adapter with one of SHAPES; its rank is one less in odd layers."""
    random = np.random.default_rng(seed)
    rank, projections = SHAPES[seed]
    deltas = {}
    for layer in range(spec.num_layers):
        own = max(1, rank - layer % 2)
        for projection in (name for name in projections if name in projections_of(spec, layer)):
            outputs, inputs = projection_shapes(spec, layer)[projection]
            a = random.standard_normal((own, inputs)) / inputs**0.5
            b = random.standard_normal((outputs, own)) * 0.3
            deltas[layer, projection] = LoraDelta(a.astype(np.float32), b.astype(np.float32))
    return LoraAdapter(deltas)


class AdaptedWeights(ArtifactWeights):
    """A `WeightSource` that reads an artifact and adds adapters, times scales, to its products."""

    def __init__(self, artifact: Artifact, adapters: Sequence[tuple[LoraAdapter, float]]) -> None:
        super().__init__(artifact)
        self._adapters = adapters
        self._spec = artifact.manifest.model

    def linear(self, role: str, x: Array) -> Array:
        """See `WeightSource`."""
        product = super().linear(role, x)
        _, layer, kind = role.split(".", 2) if role.count(".") > 1 else ("", "", "")
        if kind not in KINDS:  # a head, a router, or experts
            return product
        added = [self._delta(int(layer), projection, x) for projection in KINDS[kind]]  # type: ignore[index]
        result: Array = product + np.concatenate(added, axis=-1)
        return result

    def _delta(self, layer: int, projection: Projection, x: Array) -> Array:
        rows, _ = projection_shapes(self._spec, layer)[projection]
        result: Array = np.zeros((len(x), rows), np.float32)
        for adapter, scale in self._adapters:
            if (delta := adapter.deltas.get((layer, projection))) is not None:
                result += np.float32(scale) * ((x @ delta.a.T) @ delta.b.T)
        return result


class AdaptedReference:
    """Logits of any sequence with any of the adapters; 0 is the model without one, SUM a sum."""

    def __init__(self, path: Path) -> None:
        self._artifact = Artifact.read(path)
        self.spec = self._artifact.manifest.model
        self.adapters = {seed: make_adapter(self.spec, seed) for seed in SHAPES}
        self._cached = cache(self._compute)

    def of(self, seed: int) -> OneReference:
        """The model with one of the adapters."""
        return OneReference(self, seed)

    def logits(self, token_ids: Sequence[int], seed: int) -> NDArray[np.float32]:
        """The logits after each token, float32 [len(token_ids), vocab]."""
        return self._cached(tuple(token_ids), seed)

    def _compute(self, token_ids: tuple[int, ...], seed: int) -> NDArray[np.float32]:
        rows = np.arange(len(token_ids), dtype=np.int32)
        parts = {0: (), SUM: SUMMED}.get(seed, ((seed, 1.0),))
        adapters = [(self.adapters[one], scale) for one, scale in parts]
        weights = AdaptedWeights(self._artifact, adapters)
        return forward(self.spec, weights, np.array(token_ids, np.int64), rows)


@dataclass(frozen=True, slots=True)
class OneReference:
    """See `AdaptedReference.of`; it stands in for a `Reference`."""

    whole: AdaptedReference
    seed: int

    def logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """The logits after each token, float32 [len(token_ids), vocab]."""
        return self.whole.logits(token_ids, self.seed)
