"""Layers that share block tables: those without a window, and those with one, in equal groups.

Attention with a sliding window reads no more than the window, so the blocks behind it can be given
to others. For that, such layers need block tables of their own. To let all blocks be of one kind
nevertheless, layers are divided into groups of one size: a block is memory for `num_places` layers,
whichever group takes it, and the layers that have the same place in their groups share caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MOST_GROUPS = 8  # each is one more table to fill in every step


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """How the layers of a model share block tables and caches.

    Layers are those with keys and values, in their order: `ArchSpec.cached_layers`.
    """

    windows: tuple[int | None, ...]  # of each group: tokens a query sees, its own too; None: all
    places: tuple[tuple[int, int], ...]  # of each layer: its group, and its place in a block
    num_places: int  # layers that a block has room for

    @classmethod
    def single(cls, num_layers: int, window: int | None = None) -> LayerGroups:
        """One table for all layers."""
        return cls((window,), tuple((0, layer) for layer in range(num_layers)), num_layers)

    @property
    def has_windows(self) -> bool:
        """Whether any group gives blocks up."""
        return any(window is not None for window in self.windows)


def group_layers(
    windows: Sequence[int | None], longest: int, heads: Sequence[tuple[int, int]] | None = None
) -> LayerGroups:
    """Divide layers into groups.

    The size of a group is chosen by what a column of a long sequence holds, which is the layers
    that see all, and what one of a short sequence holds, which is everything: groups that are not
    full waste memory of both. Where no division beats a single table, there is one, without a
    window unless all layers have the same.

    Layers of other heads share no caches. So a place takes memory for each kind of heads that
    layers have there, whichever group a block is of.

    Args:
        windows: of each layer: tokens a query sees, its own included; None: all.
        longest: tokens of the longest sequence; a window as long as that is none.
        heads: of each layer: KV heads, and their channels; None: all have the same.
    """
    heads = heads or [(1, 1)] * len(windows)
    seen = [None if window is None or window >= longest else window for window in windows]
    kinds = sorted(set(seen), key=lambda window: -longest if window is None else -window)
    if len(kinds) == 1:
        return LayerGroups.single(len(seen), kinds[0])
    counts = {kind: seen.count(kind) for kind in kinds}
    single = LayerGroups.single(len(seen))
    best = (2 * _block_width(single, heads), 1, 0)
    for size in range(1, max(counts.values()) + 1):
        parts = {kind: -(-count // size) for kind, count in counts.items()}
        groups = sum(parts.values())
        if groups <= MOST_GROUPS:
            width = _block_width(_divided(seen, kinds, size), heads)
            best = min(best, (width * (parts.get(None, 0) + groups), groups, size))
    size = best[2]
    return _divided(seen, kinds, size) if size else single


def _block_width(groups: LayerGroups, heads: Sequence[tuple[int, int]]) -> int:
    """Channels of a token's keys for which a block has room."""
    places = {(place, kind) for (_, place), kind in zip(groups.places, heads, strict=True)}
    return sum(count * size for _, (count, size) in places)


def _divided(seen: Sequence[int | None], kinds: Sequence[int | None], size: int) -> LayerGroups:
    """Groups of `size` layers, kind by kind, each in the order of its layers."""
    windows: list[int | None] = []
    places: dict[int, tuple[int, int]] = {}
    for kind in kinds:
        first = len(windows)
        layers = [layer for layer, window in enumerate(seen) if window == kind]
        for number, layer in enumerate(layers):
            places[layer] = (first + number // size, number % size)
        windows += [kind] * -(-len(layers) // size)
    return LayerGroups(tuple(windows), tuple(places[i] for i in range(len(seen))), size)
