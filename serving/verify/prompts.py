"""The prompts that `verify` decodes: made from the golden tokens, the same on every provider."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxport.kv.groups import CacheGroups
from onnxport.kv.table import blocks_for
from onnxport.providers.base import Capabilities

NEW_TOKENS = 8  # that each prompt is continued by
FIXED = (  # (tokens, of which the first so many are shared, number of the tail)
    (15, 0, 1),  # 15, 16 and 17, 33: on both sides of the borders of small blocks
    (16, 0, 2),
    (17, 0, 3),
    (33, 33, 0),
    (40, 33, 5),
    (50, 33, 6),
)
OWN_TAIL_TOKENS = 2
MOST_PROMPTS = len(FIXED) + 3  # of a provider, its own ones counted
Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Prompts:
    """What one loaded model decodes."""

    fixed: tuple[Prompt, ...]  # the same for every provider
    own: tuple[Prompt, ...]  # around the borders of this provider's blocks

    @property
    def all(self) -> tuple[Prompt, ...]:
        """Every prompt, each once."""
        return tuple(dict.fromkeys((*self.fixed, *self.own)))


def make_prompts(token_ids: Sequence[int], limits: Capabilities) -> Prompts:
    """Return the prompts that fit the context and the cache of a loaded model.

    Of each provider's own, two fill a block but for three tokens, so that they need another while
    they decode, and one has a whole block and three tokens more.
    """
    size = limits.block_size
    room = min(limits.max_model_len, limits.kv_tokens) - NEW_TOKENS
    own = [
        (length, max(0, length - OWN_TAIL_TOKENS), tail)
        for length, tail in ((size - 3, 7), (size - 3, 8), (size + 3, 9))
    ]
    made = [
        tuple(_prompt(token_ids, *shape) for shape in shapes if 1 <= shape[0] <= room)
        for shapes in (FIXED, own)
    ]
    return Prompts(*made)


def _prompt(token_ids: Sequence[int], length: int, shared: int, tail: int) -> Prompt:
    """The first `shared` tokens are those of every prompt, the others this tail's own."""
    return tuple(
        stream(token_ids, position, 0 if position < shared else tail) for position in range(length)
    )


def stream(token_ids: Sequence[int], position: int, number: int) -> int:
    """Token `position` of an endless sequence: the golden tokens, each lap in another order."""
    lap, at = divmod(position, len(token_ids))
    return int(token_ids[(at * (2 * lap + 1) + lap + 3 * number) % len(token_ids)])


def longest_need(prompts: Sequence[Prompt], limits: Capabilities) -> int:
    """Blocks that the longest of `prompts` needs to its last token, at once."""
    groups = CacheGroups(limits.windows, limits.block_size)
    longest = max(map(len, prompts)) + NEW_TOKENS
    return groups.resident(blocks_for(longest, limits.block_size))
