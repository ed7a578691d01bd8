"""Block tables, one a request, and the step's transaction over them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from onnxport.kv.pool import BlockPool

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


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks that were appended to tables for one step, until it is committed or rolled back."""

    tables: tuple[BlockTable, ...]
    counts: tuple[int, ...]  # blocks appended to each table


def reserve(pool: BlockPool, tables: Sequence[BlockTable], counts: Sequence[int]) -> Reservation:
    """Append `counts[i]` new blocks to `tables[i]`.

    The tables must be distinct and the pool must have `sum(counts)` free blocks. Committing needs
    no call: the blocks are the tables' own. `rollback` undoes it.
    """
    grown = [(table, count) for table, count in zip(tables, counts, strict=True) if count]
    for table, count in grown:
        table.blocks.extend(pool.allocate(count))
    return Reservation(tuple(table for table, _ in grown), tuple(count for _, count in grown))


def rollback(pool: BlockPool, reservation: Reservation) -> None:
    """Give the reserved blocks back; the tables are as they were before `reserve`."""
    for table, count in zip(reservation.tables, reservation.counts, strict=True):
        release_tail(pool, table, len(table) - count)


def release_tail(pool: BlockPool, table: BlockTable, keep: int = 0) -> None:
    """Release all but the first `keep` blocks of `table`, last to first."""
    pool.release(reversed(table.blocks[keep:]))
    del table.blocks[keep:]
