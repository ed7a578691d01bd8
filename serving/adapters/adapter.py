"""What is known of an adapter, loaded or mixed of loaded ones, without its weights."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from onnxport.graphs.lora import Projection

Ranks = Mapping[tuple[int, Projection], int]  # by layer, from 0, and projection

_TOKEN_BYTES: Final = 5  # of seven bits each: enough for any vocabulary


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
    invocation: tuple[int, ...] = ()  # of an aLoRA: the tokens that it begins with
    ranks: Ranks = field(default_factory=dict, compare=False, repr=False)

    @property
    def members(self) -> tuple[Adapter, ...]:
        """The loaded adapters that it is made of: itself, or those of the mix."""
        return tuple(part for part, _ in self.parts) or (self,)

    def start_in(self, prompt: array[int]) -> int | None:
        """Return the number of the token of a prompt that it acts from, from 0; None: from none.

        An aLoRA acts from the first token of the last occurrence of its invocation in the prompt,
        and nowhere without one; any other adapter on all tokens. Source: PEFT's
        `calculate_alora_offsets`, which counts from the end.
        """
        if not self.invocation:
            return 0
        # `bytes.find` takes linear time whatever repeats, which `rfind` does not.
        behind = _reversed(prompt).find(_reversed(self.invocation))
        if behind < 0:
            return None
        return len(prompt) - len(self.invocation) - behind // _TOKEN_BYTES


def _reversed(tokens: Sequence[int]) -> bytes:
    """Return tokens from the last to the first, in bytes.

    The first byte of each token has a bit that no other has: found is what begins where one does.
    """
    ids = np.array(tokens, np.int64)[::-1, None]
    parts = ids >> np.arange(0, 7 * _TOKEN_BYTES, 7) & 0x7F
    parts[:, 0] |= 0x80
    return parts.astype(np.uint8).tobytes()
