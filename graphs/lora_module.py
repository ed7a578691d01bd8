"""A linear layer of a trained model that adapters add to, and the projections it computes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.linear_spec import StateSpaceSpec
from onnxport.graphs.lora import OF_FEED_FORWARD, LoraDelta, Projection
from onnxport.graphs.spec import ArchSpec


@dataclass(frozen=True, slots=True)
class Module:
    """A linear layer of the trained model, whose rows are those of projections of one layer.

    Attributes:
        layer: from 0.
        parts: projections and how many rows of each there are, one below the other; a projection
            may have several parts, in its own order.
        in_features: columns.
        heads: the rows lie head by head: of each first its share of the first part, and so on.
        ahead: rows of its one projection that other modules compute, ahead of its own.
        behind: likewise behind them.
    """

    layer: int
    parts: tuple[tuple[Projection, int], ...]
    in_features: int
    heads: int = 1
    ahead: int = 0
    behind: int = 0

    @property
    def out_features(self) -> int:
        """Rows of all parts."""
        return sum(rows for _, rows in self.parts)

    def by_projection(self, rows: NDArray[np.float32]) -> dict[Projection, NDArray[np.float32]]:
        """Rows of each projection in its own order, of [out_features, rank]."""
        rank = rows.shape[1]
        ends = np.cumsum([count // self.heads for _, count in self.parts])
        heads = rows.reshape(self.heads, -1, rank)
        found: dict[Projection, list[NDArray[np.float32]]] = {}
        for (name, _), part in zip(self.parts, np.split(heads, ends[:-1], axis=1), strict=True):
            found.setdefault(name, []).append(part.reshape(-1, rank))
        around = ((self.ahead, self.behind), (0, 0))
        return {name: np.pad(np.concatenate(parts), around) for name, parts in found.items()}

    def deltas(
        self, base: ArchSpec, a: NDArray[np.float32], b: NDArray[np.float32]
    ) -> dict[tuple[int, Projection], LoraDelta]:
        """What an adapter adds to each projection.

        Args:
            base: the model.
            a: [rank, in_features].
            b: [out_features, rank]; the scaling is in it.
        """
        found = {}
        for name, rows in self.by_projection(b).items():
            scales = _scales(base, name)
            if (scales != 1).any():
                rows = rows * scales  # as the weights that it adds to are
            found[self.layer, name] = LoraDelta(a, rows)
        return found


def joined(first: LoraDelta, second: LoraDelta) -> LoraDelta:
    """What both add to one projection; its rank is the sum of theirs."""
    return LoraDelta(
        np.concatenate([first.a, second.a]), np.concatenate([first.b, second.b], axis=1)
    )


def _scales(base: ArchSpec, projection: Projection) -> NDArray[np.float32]:
    """What the rows of a projection are stored times, [rows, 1] or [1, 1]."""
    scale = base.output_scale if projection in ("o_proj", "down_proj", "linear_o") else 1.0
    if projection == "o_proj":
        scale *= base.value_scale or 1.0
    own, space = base.multipliers, base.linear
    if own is not None and projection == "linear_mixed":
        assert isinstance(space, StateSpaceSpec)
        kinds = (own.space_values, own.space_given, own.space_taken)
        rows = np.repeat(kinds, (space.value_width, space.group_width, space.group_width))
        return rows.astype(np.float32)[:, None]
    if own is not None:
        scale *= {
            "q_proj": own.queries,
            "k_proj": own.keys,
            "v_proj": own.values,
            "o_proj": own.attention,
            "gate_proj": own.gate,
            "down_proj": own.down,
            "linear_z": own.space_gate,
            "linear_dt": own.space_steps,
            "linear_o": own.space,
        }.get(projection, 1.0)
    return np.full((1, 1), scale, np.float32)


def block_of(base: ArchSpec, layer: int, projection: Projection) -> int:
    """The number of a projection's block, of models whose layers are made of numbered blocks.

    A feed-forward layer has the number behind that of what is ahead of it.
    """
    behind = projection in OF_FEED_FORWARD
    return layer + sum(map(base.has_mlp, range(layer))) + behind
