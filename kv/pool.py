"""The block pool: which KV blocks are free, and how often each of the others is used."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from onnxport.errors import CapacityError


class BlockPool:
    """Ref-counted KV blocks in plain ints; knows neither requests nor tensors.

    A block is either free (ref count 0, in the free list) or used (ref count >= 1). The free list
    is in order of release: the block that was free for longest is handed out first, so that what
    a released block holds survives as long as possible (prefix caching needs that).
    """

    __slots__ = ("_free", "_refs", "block_size", "num_blocks")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise CapacityError(
                f"a KV pool of {num_blocks} blocks of {block_size} tokens holds nothing; "
                "both must be at least 1: give the cache more tokens"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._free)

    def free_blocks(self) -> tuple[int, ...]:
        """The free blocks, the next to be handed out first."""
        return tuple(self._free)

    def ref_count(self, block: int) -> int:
        """How many owners `block` has; 0 when it is free."""
        return self._refs[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` free blocks, each with one owner; the longest free come first.

        Callers look at `num_free` before; asking for more is a bug of theirs.
        """
        assert 0 <= count <= len(self._free), f"{count} blocks asked for, {len(self._free)} free"
        take = self._free.popitem
        blocks = [take(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one owner to each block, which must be in use."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is free and cannot be shared"
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one owner from each block; those without another join the end of the free list.

        A request releases its blocks last to first: the tail of a sequence is then handed out
        again before its beginning, which others are likelier to have in common with it.
        """
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is free and cannot be released"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free[block] = None

    def check(self, owners: Iterable[Iterable[int]]) -> None:
        """Assert that every block is free, or owned exactly as often as its ref count says.

        Args:
            owners: the block ids of every owner there is.
        """
        counts = Counter(block for blocks in owners for block in blocks)
        for block, refs in enumerate(self._refs):
            assert refs == counts[block], f"block {block}: ref count {refs}, owned {counts[block]}"
            assert (refs == 0) == (block in self._free), f"block {block}: {refs} owners and free"
        assert len(self._free) + len(counts) == self.num_blocks, "an id outside the pool is owned"
