"""Content keys: what a KV block holds, said by a hash of all the tokens that it depends on.

The K/V of a token depend on all tokens before it, so a block is named by a chain: the key of a
unit of tokens is SHA-256(key of the unit before, its tokens). The first unit continues a root that
says whose cache it is. Two blocks with one key hold the same K/V; a collision would hand one
tenant's K/V to another, hence a cryptographic hash.

Where something else than tokens changes the K/V from some token on, as an adapter that begins
there, the chain branches off at the unit of that token: units before have the keys that they have
without it.

The unit is the same for every provider whose blocks are multiples of it, whatever their size, so
the keys of one token sequence, and blocks stored under them, are common to all of them.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from dataclasses import dataclass

UNIT_TOKENS = 16  # tokens that one key covers

BlockKeys = tuple[bytes, ...]  # the keys of a block's units in order; the last one is the block's


def unit_tokens(block_size: int) -> int:
    """Tokens of one unit for blocks of `block_size`: the common unit, if they are made of it."""
    return block_size if block_size % UNIT_TOKENS else UNIT_TOKENS


def root_key(adapter: str | None = None, cache_salt: str | None = None) -> bytes:
    """Return the key that a sequence begins with, 32 bytes.

    Sequences share K/V only if they have both names in common.
    """
    return hashlib.sha256(json.dumps(["onnxport", adapter, cache_salt]).encode()).digest()


@dataclass(frozen=True, slots=True)
class Branch:
    """What changes the K/V of a sequence from a token on."""

    num_tokens: int  # before it, at least 1
    name: bytes  # of what changes them there, 32 bytes

    @classmethod
    def of(cls, adapter: str, num_tokens: int) -> Branch:
        """Return that of an adapter, by its name, that begins behind `num_tokens` tokens.

        The same tokens with an adapter that begins elsewhere have other K/V, so it is named, too.
        """
        content = json.dumps(["onnxport", "branch", adapter, num_tokens])
        return cls(num_tokens, hashlib.sha256(content.encode()).digest())


def stored_keys(keys: BlockKeys, group: int) -> BlockKeys:
    """The keys under which what a group of layers has of a block is stored outside the pool.

    Those of the first group are the block's own; the others' are SHA-256(key, group in 4 bytes).
    """
    if not group:
        return keys
    number = group.to_bytes(4, "little")
    return tuple(hashlib.sha256(key + number).digest() for key in keys)


class KeyChain:
    """The keys of one sequence, which grows."""

    __slots__ = ("_branch", "_keys", "_root", "_unit_bytes", "_units_per_block")

    def __init__(self, root: bytes, block_size: int, branch: Branch | None = None) -> None:
        unit = unit_tokens(block_size)
        self._root = root
        self._branch = branch
        self._units_per_block = block_size // unit
        self._unit_bytes = unit * array("q").itemsize
        self._keys: list[bytes] = []

    def __len__(self) -> int:
        """Whole blocks that have keys."""
        return len(self._keys) // self._units_per_block

    def copy(self) -> KeyChain:
        """Return a chain that grows on its own."""
        other = KeyChain.__new__(KeyChain)
        other._root = self._root
        other._branch = self._branch
        other._units_per_block = self._units_per_block
        other._unit_bytes = self._unit_bytes
        other._keys = self._keys.copy()
        return other

    def first(self, num_tokens: int) -> KeyChain:
        """Return the chain of the first `num_tokens` tokens of the sequence."""
        other = self.copy()
        del other._keys[num_tokens * array("q").itemsize // self._unit_bytes :]
        return other

    def for_block_size(self, block_size: int) -> KeyChain:
        """Return the chain of the same sequence in other blocks, with the keys that still hold.

        These are all where the unit is the same, and none where it is another one.
        """
        other = KeyChain(self._root, block_size, self._branch)
        if other._unit_bytes == self._unit_bytes:
            other._keys = self._keys.copy()
        return other

    def extend(self, tokens: array[int]) -> None:
        """Make the keys of all whole units of `tokens`, int64, that have none yet.

        `tokens` continue those of the call before.
        """
        keys, size = self._keys, self._unit_bytes
        content = memoryview(tokens).cast("B")
        parent = keys[-1] if keys else self._root
        first = None  # byte of the unit that branches off
        if self._branch is not None:
            first = self._branch.num_tokens * tokens.itemsize // size * size
        for start in range(len(keys) * size, len(content) - size + 1, size):
            if start == first and self._branch is not None:
                parent = hashlib.sha256(parent + self._branch.name).digest()
            parent = hashlib.sha256(parent + content[start : start + size]).digest()
            keys.append(parent)

    def block(self, index: int) -> BlockKeys:
        """The keys of block number `index` of the sequence."""
        if self._units_per_block == 1:
            return (self._keys[index],)
        start = index * self._units_per_block
        return tuple(self._keys[start : start + self._units_per_block])

    def key(self, index: int) -> bytes:
        """The key under which block number `index` of the sequence is found."""
        return self._keys[(index + 1) * self._units_per_block - 1]
