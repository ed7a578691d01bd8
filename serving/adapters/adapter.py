"""What is known of an adapter, loaded or mixed of loaded ones, without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnxport.graphs.lora import Projection

Ranks = Mapping[tuple[int, Projection], int]  # by layer, from 0, and projection


@dataclass(frozen=True, slots=True)
class Adapter:
    """A loaded adapter, or a mix of some. Two that are equal compute the same."""

    name: str
    number: int  # of the load, or of the mix, from 1; no two have the same. 0: of no mix yet
    fingerprint: str  # of its content; K/V are shared by it
    rank: int  # the largest of its modules
    path: Path  # where it was read
    base_model: str | None  # what it says it was trained on
    place: int = 0  # as llama.cpp's server counts, from 0: that of the one it replaced, or the next
    task_name: str = ""  # of people, likewise
    prompt_prefix: str = ""
    parts: tuple[tuple[Adapter, float], ...] = ()  # of a mix, each with its scale, ascending
    ranks: Ranks = field(default_factory=dict, compare=False, repr=False)

    @property
    def members(self) -> tuple[Adapter, ...]:
        """The loaded adapters that it is made of: itself, or those of the mix."""
        return tuple(part for part, _ in self.parts) or (self,)
