"""Block tables, one a sequence, and the step's transaction over them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from onnxport.kv.pool import BlockPool, Eviction
from onnxport.kv.prefix import KeyChain
from onnxport.kv.states import StateStep

BLOCK_ID_TYPECODE = "i"  # C int: the contract's int32, so a table is copied without converting it


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold `num_tokens` tokens, for one group of layers."""
    return -(-num_tokens // block_size)


class BlockTable:
    """The blocks of one sequence, in the order of its tokens, for each group of layers.

    Token `i` lives in slot `i % block_size` of column `i // block_size`, which has a block of every
    group. The first columns of a group with a window may be given up; their entries are 0.

    Attributes:
        groups: the blocks of each group, as many of each.
        blocks: those of the first group.
        given_up: how many columns of each group are.
    """

    __slots__ = ("blocks", "given_up", "groups")

    def __init__(self, num_groups: int = 1) -> None:
        self.groups: tuple[array[int], ...] = tuple(
            array(BLOCK_ID_TYPECODE) for _ in range(num_groups)
        )
        self.blocks = self.groups[0]
        self.given_up = [0] * num_groups

    def __len__(self) -> int:
        """How many columns there are."""
        return len(self.blocks)

    def held(self) -> Iterator[int]:
        """Yield every block that the sequence owns."""
        for blocks, gone in zip(self.groups, self.given_up, strict=True):
            yield from islice(blocks, gone, None) if gone else blocks


@dataclass(frozen=True, slots=True)
class Found:
    """Columns with content that a sequence can go on from.

    Of a group with a window they are the last ones, those that what follows sees.
    """

    num_columns: int
    groups: tuple[tuple[int, ...], ...]  # blocks of each group: of its last columns, or of all

    def __len__(self) -> int:
        return self.num_columns

    def blocks(self) -> Iterator[int]:
        """Yield every block."""
        return chain.from_iterable(self.groups)

    def given_up(self, table: BlockTable) -> list[int]:
        """How many columns of each group are given up once these follow those of `table`."""
        return [
            gone if len(found) == self.num_columns else len(table) + self.num_columns - len(found)
            for gone, found in zip(table.given_up, self.groups, strict=True)
        ]


NOTHING = Found(0, ())


class Claim(NamedTuple):
    """What one table takes for a step."""

    table: BlockTable
    shared: Found = NOTHING  # columns with content, appended first
    num_new: int = 0  # blank columns, appended after them
    copies_last: bool = False  # whether its last column, which others own too, becomes a copy


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
    states: StateStep | None = None  # None: the model has none


def share(pool: BlockPool, claims: Sequence[Claim]) -> None:
    """Append the shared columns to the tables: the first half of `reserve`.

    It comes before anything is released or handed out, so that no shared block is overwritten.
    """
    for claim in claims:
        table, shared = claim.table, claim.shared
        if not shared:
            continue
        given_up = shared.given_up(table)
        for group, (blocks, found) in enumerate(zip(table.groups, shared.groups, strict=True)):
            skips = given_up[group] > table.given_up[group]
            assert not (skips and table.given_up[group] < len(blocks)), "held blocks would be lost"
            pool.share(found)
            blocks.frombytes(bytes(blocks.itemsize * (len(shared) - len(found))))
            blocks.extend(found)
        table.given_up = given_up


def reserve(pool: BlockPool, claims: Sequence[Claim]) -> Reservation:
    """Take the new blocks of claims whose shared ones are in their tables already.

    The tables must be distinct, and the pool must have as many free blocks.
    """
    copies: list[Copy] = []
    evictions: list[Eviction] = []
    for claim in claims:
        for blocks in claim.table.groups:
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
            for blocks in claim.table.groups:
                copy = next(copies)
                blocks[-1] = copy.source
                pool.release((copy.target,))


def release_tail(pool: BlockPool, table: BlockTable, keep: int = 0) -> None:
    """Release all but the first `keep` columns of `table`, last to first."""
    for group, blocks in enumerate(table.groups):
        gone = table.given_up[group]
        pool.release(reversed(blocks[max(keep, gone) :]))
        table.given_up[group] = min(keep, gone)
        del blocks[keep:]


def give_up(pool: BlockPool, table: BlockTable, num_tokens: int) -> None:
    """Release the blocks that nothing sees any more that follows `num_tokens` tokens."""
    for group in pool.groups.windowed:
        gone, first = table.given_up[group], pool.groups.first_seen(group, num_tokens)
        if first > gone:
            blocks = table.groups[group]
            pool.release(blocks[gone:first])
            blocks[gone:first] = array(BLOCK_ID_TYPECODE, bytes(blocks.itemsize * (first - gone)))
            table.given_up[group] = first


def register(pool: BlockPool, table: BlockTable, keys: KeyChain, start: int, stop: int) -> None:
    """Make columns `start` to `stop - 1` findable: they are full, and none is given up."""
    for group, blocks in enumerate(table.groups):
        for column in range(start, stop):
            pool.register(blocks[column], keys.block(column), group)


def hide(pool: BlockPool, table: BlockTable, keys: KeyChain | None) -> None:
    """Make all columns unfindable, also those that are given up, as their content is wrong."""
    for block in table.held():
        pool.unregister(block)
    if keys is not None:
        for group, gone in enumerate(table.given_up):
            for column in range(min(gone, len(keys))):
                pool.hide(keys.key(column), group)


def fork(pool: BlockPool, table: BlockTable) -> BlockTable:
    """Return a second table of the same blocks."""
    copied = BlockTable(len(table.groups))
    pool.share(table.held())
    for blocks, source in zip(copied.groups, table.groups, strict=True):
        blocks.extend(source)
    copied.given_up = table.given_up.copy()
    return copied
