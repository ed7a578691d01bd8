"""The block pool: which KV blocks are free, what the free ones still hold, who uses the others."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from onnxport.errors import CapacityError
from onnxport.kv.groups import CacheGroups
from onnxport.kv.prefix import BlockKeys


class Eviction(NamedTuple):
    """A block that was handed out anew, and what it holds until it is written."""

    block: int
    keys: BlockKeys
    group: int = 0  # of layers, that it holds K/V of


class BlockPool:
    """Ref-counted KV blocks in plain ints; knows neither requests nor tensors.

    A block is used (ref count >= 1) or free. A used block that is full may have a key: the hash of
    all tokens up to its end. When its last owner releases it, it stays findable under that key,
    among the free blocks, until it is handed out again: that is the prefix cache. Blank blocks,
    those without a key, are handed out first, the last released one first; then cached ones, the
    longest unused first. Any block may be any group's of layers; a key is found group by group.
    """

    __slots__ = (
        "_blank",
        "_by_key",
        "_cached",
        "_group",
        "_keys",
        "_refs",
        "block_size",
        "groups",
        "num_blocks",
    )

    def __init__(
        self, num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,)
    ) -> None:
        """Begin with all blocks blank.

        Args:
            num_blocks: how many.
            block_size: tokens of each.
            windows: of each group of layers, see `CacheGroups`.

        Raises:
            CapacityError: that holds nothing.
        """
        if num_blocks < 1 or block_size < 1:
            raise CapacityError(
                f"a KV pool of {num_blocks} blocks of {block_size} tokens holds nothing; "
                "both must be at least 1: give the cache more tokens"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = CacheGroups(windows, block_size)
        self._refs = [0] * num_blocks
        self._keys: list[BlockKeys | None] = [None] * num_blocks
        self._group = [0] * num_blocks  # of blocks that have a key
        self._by_key: tuple[dict[bytes, int], ...] = tuple({} for _ in windows)
        self._blank = list(range(num_blocks - 1, -1, -1))  # a stack
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, the longest unused first

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can hand out now."""
        return len(self._blank) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Free blocks that can still be found by their key."""
        return len(self._cached)

    def free_blocks(self) -> tuple[int, ...]:
        """The free blocks, the next to be handed out first."""
        return (*reversed(self._blank), *self._cached)

    def blank_blocks(self) -> tuple[int, ...]:
        """The free blocks whose content is of no use, the next to be handed out first."""
        return tuple(reversed(self._blank))

    def cached_blocks(self) -> tuple[Eviction, ...]:
        """The free blocks that have keys, the longest unused first."""
        found = []
        for block in self._cached:
            keys = self._keys[block]
            assert keys is not None
            found.append(Eviction(block, keys, self._group[block]))
        return tuple(found)

    def ref_count(self, block: int) -> int:
        """How many owners `block` has; 0 when it is free."""
        return self._refs[block]

    def find(self, key: bytes, group: int = 0) -> int | None:
        """The block, used or free, that holds the tokens up to `key` for a group of layers."""
        return self._by_key[group].get(key)

    def allocate(self, count: int, evictions: list[Eviction]) -> list[int]:
        """Take `count` free blocks, each with one owner.

        Callers look at `num_free` before; asking for more is a bug of theirs.

        Args:
            count: how many.
            evictions: blocks that lose their key by it are appended; they hold their content until
                they are written.
        """
        assert 0 <= count <= self.num_free, f"{count} blocks asked for, {self.num_free} free"
        blocks = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block = self._cached.popitem(last=False)[0]
                keys = self._keys[block]
                assert keys is not None
                evictions.append(Eviction(block, keys, self._group[block]))
                self._forget(block)
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one owner to each block, which must be used or have a key."""
        for block in blocks:
            if self._refs[block] == 0:
                assert block in self._cached, f"block {block} holds nothing and cannot be shared"
                del self._cached[block]
            self._refs[block] += 1

    def register(self, block: int, keys: BlockKeys, group: int = 0) -> None:
        """Make a full block findable.

        If another one is found under its key already, that stays if it is used. A free one gives
        up the key: it may be handed out before this one, which then could not be found.
        """
        assert self._refs[block] > 0, f"block {block} is free and cannot be registered"
        if self._keys[block] is not None:
            return
        found = self.find(keys[-1], group)
        if found is not None:
            if self._refs[found]:
                return
            self.hide(keys[-1], group)
        self._keys[block] = keys
        self._group[block] = group
        self._by_key[group][keys[-1]] = block

    def unregister(self, block: int) -> None:
        """Make a used block unfindable, as its content turned out to be wrong."""
        assert self._refs[block] > 0, f"block {block} is free and cannot be unregistered"
        if self._keys[block] is not None:
            self._forget(block)

    def hide(self, key: bytes, group: int) -> None:
        """Make the block under a key, used or free, unfindable, if there is one."""
        block = self.find(key, group)
        if block is not None:
            self._forget(block)
            if self._refs[block] == 0:
                del self._cached[block]
                self._blank.append(block)

    def release(self, blocks: Iterable[int]) -> None:
        """Take one owner from each block; those without another are free.

        A request releases its blocks last to first: the tail of a sequence is then handed out
        again before its beginning, which others are likelier to have in common with it, and
        without which the tail could not be found.
        """
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is free and cannot be released"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if self._keys[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def reset_cache(self) -> None:
        """Forget every key; free blocks hold nothing then."""
        self._blank.extend(self._cached)
        self._cached.clear()
        for found in self._by_key:
            for block in list(found.values()):
                self._forget(block)

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Assert that every block is blank, cached or owned exactly as often as its count says.

        Args:
            owners: the block ids of every owner there is.
        """
        counts = Counter(block for blocks in owners for block in blocks)
        blank = set(self._blank)
        assert len(blank) == len(self._blank), "a block is free twice"
        for block, refs in enumerate(self._refs):
            assert refs == counts[block], f"block {block}: ref count {refs}, owned {counts[block]}"
            keys = self._keys[block]
            assert (block in blank) == (refs == 0 and keys is None), f"block {block}: blank?"
            assert (block in self._cached) == (refs == 0 and keys is not None), f"{block}: cached?"
            assert keys is None or self.find(keys[-1], self._group[block]) == block, (
                f"block {block}: key"
            )
        named = sum(keys is not None for keys in self._keys)
        assert sum(map(len, self._by_key)) == named, "a stray key"
        assert all(0 <= block < self.num_blocks for block in counts), "an id outside the pool"

    def _forget(self, block: int) -> None:
        keys = self._keys[block]
        assert keys is not None
        del self._by_key[self._group[block]][keys[-1]]
        self._keys[block] = None
