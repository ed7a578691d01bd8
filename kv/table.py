"""Block tables, one a sequence, and the step's transaction over them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from onnxport.kv.pool import BlockPool, Eviction

BLOCK_ID_TYPECODE = "i"  # C int: the contract's int32, so a table is copied without converting it


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


class BlockTable:
    """The blocks of one sequence, in the order of its tokens.

    Token `i` lives in slot `i % block_size` of block `blocks[i // block_size]`.
    """

    __slots__ = ("blocks",)

    def __init__(self) -> None:
        self.blocks: array[int] = array(BLOCK_ID_TYPECODE)

    def __len__(self) -> int:
        return len(self.blocks)


class Claim(NamedTuple):
    """What one table takes for a step."""

    table: BlockTable
    shared: tuple[int, ...] = ()  # blocks with content, appended first
    num_new: int = 0  # blank blocks, appended after them
    copies_last: bool = False  # whether its last block, which others own too, becomes a copy


class Copy(NamedTuple):
    """A block whose content is to be copied before the step runs."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Reservation:
    """What tables took for one step, until it is committed or rolled back."""

    claims: tuple[Claim, ...]
    copies: tuple[Copy, ...]  # copy-on-write, in the order of the claims that ask for it
    evictions: tuple[Eviction, ...]  # blocks to be saved now if they are to be saved at all


def share(pool: BlockPool, claims: Sequence[Claim]) -> None:
    """Append the shared blocks to the tables: the first half of `reserve`.

    It comes before anything is released or handed out, so that no shared block is overwritten.
    """
    for claim in claims:
        pool.share(claim.shared)
        claim.table.blocks.extend(claim.shared)


def reserve(pool: BlockPool, claims: Sequence[Claim]) -> Reservation:
    """Take the new blocks of claims whose shared ones are in their tables already.

    The tables must be distinct, and the pool must have as many free blocks.
    """
    copies: list[Copy] = []
    evictions: list[Eviction] = []
    for claim in claims:
        blocks = claim.table.blocks
        if claim.copies_last:
            [target] = pool.allocate(1, evictions)
            copies.append(Copy(blocks[-1], target))
            blocks[-1] = target
        blocks.extend(pool.allocate(claim.num_new, evictions))
    return Reservation(tuple(claims), tuple(copies), tuple(evictions))


def commit(pool: BlockPool, reservation: Reservation) -> None:
    """The step ran: the tables keep what they took, and give up the blocks they copied."""
    pool.release(copy.source for copy in reservation.copies)


def rollback(pool: BlockPool, reservation: Reservation) -> None:
    """Give everything back; the tables are as they were."""
    copies = iter(reservation.copies)
    for claim in reservation.claims:
        release_tail(pool, claim.table, len(claim.table) - len(claim.shared) - claim.num_new)
        if claim.copies_last:
            copy = next(copies)
            claim.table.blocks[-1] = copy.source
            pool.release((copy.target,))


def release_tail(pool: BlockPool, table: BlockTable, keep: int = 0) -> None:
    """Release all but the first `keep` blocks of `table`, last to first."""
    pool.release(reversed(table.blocks[keep:]))
    del table.blocks[keep:]


def fork(pool: BlockPool, table: BlockTable) -> BlockTable:
    """Return a second table of the same blocks."""
    copied = BlockTable()
    pool.share(table.blocks)
    copied.blocks.extend(table.blocks)
    return copied
