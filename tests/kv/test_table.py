"""Block tables and the step's transaction: exact block ids."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxport.kv.pool import BlockPool, Eviction
from onnxport.kv.table import (
    BlockTable,
    Claim,
    Copy,
    Found,
    Reservation,
    blocks_for,
    commit,
    fork,
    release_tail,
    reserve,
    rollback,
    share,
)


def take(pool: BlockPool, *claims: Claim) -> Reservation:
    share(pool, claims)
    return reserve(pool, claims)


def filled(pool: BlockPool, count: int) -> BlockTable:
    table = BlockTable()
    commit(pool, take(pool, Claim(table, num_new=count)))
    return table


def whole(*blocks: int) -> Found:
    """Columns of one group."""
    return Found(len(blocks), (blocks,))


def key(number: int) -> tuple[bytes, ...]:
    return (bytes([number]) * 32,)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 4) == blocks


def test_new_blocks_are_appended_and_stay_when_the_step_is_committed() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    a, b = filled(pool, 2), BlockTable()
    reservation = take(pool, Claim(a, num_new=1), Claim(b, num_new=2))
    assert (list(a.blocks), list(b.blocks)) == ([0, 1, 2], [3, 4])
    assert (reservation.copies, reservation.evictions) == ((), ())
    commit(pool, reservation)
    pool.check([a.blocks, b.blocks])


def test_a_reservation_that_is_rolled_back_leaves_tables_as_they_were() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    a, b, c = filled(pool, 2), BlockTable(), BlockTable()
    reservation = take(pool, Claim(a, num_new=1), Claim(b, num_new=2), Claim(c))
    assert (list(a.blocks), list(b.blocks), list(c.blocks)) == ([0, 1, 2], [3, 4], [])
    rollback(pool, reservation)
    assert (list(a.blocks), list(b.blocks), list(c.blocks)) == ([0, 1], [], [])
    pool.check([a.blocks])


def test_shared_blocks_come_before_new_ones() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    a, b = filled(pool, 2), BlockTable()
    reservation = take(pool, Claim(b, shared=whole(0, 1), num_new=1))
    assert list(b.blocks) == [0, 1, 2]
    assert (pool.ref_count(0), pool.ref_count(2)) == (2, 1)
    rollback(pool, reservation)
    assert list(b.blocks) == []
    pool.check([a.blocks])


def test_shared_free_blocks_are_safe_from_what_is_taken_beside_them() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    a = filled(pool, 2)
    for block in a.blocks:
        pool.register(block, key(block))
    release_tail(pool, a)
    b, c = BlockTable(), BlockTable()
    reservation = take(pool, Claim(b, num_new=2), Claim(c, shared=whole(0)))
    assert (list(b.blocks), list(c.blocks)) == ([2, 1], [0])
    assert reservation.evictions == (Eviction(1, key(1)),)
    rollback(pool, reservation)
    pool.check([])
    assert pool.find(key(0)[0]) == 0  # it comes back as it was; what was evicted is lost
    assert pool.find(key(1)[0]) is None


def test_copy_on_write_gives_the_writer_a_block_of_its_own() -> None:
    pool = BlockPool(num_blocks=4, block_size=4)
    a = filled(pool, 2)
    b = fork(pool, a)
    assert list(b.blocks) == [0, 1]
    assert (pool.ref_count(0), pool.ref_count(1)) == (2, 2)
    reservation = take(pool, Claim(a, copies_last=True), Claim(b))
    assert reservation.copies == (Copy(source=1, target=2),)
    assert (list(a.blocks), list(b.blocks)) == ([0, 2], [0, 1])
    assert pool.ref_count(1) == 2  # nobody may write to it before the copy is made
    commit(pool, reservation)
    assert pool.ref_count(1) == 1
    pool.check([a.blocks, b.blocks])


def test_copy_on_write_is_undone() -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    a = filled(pool, 2)
    b, c = fork(pool, a), fork(pool, a)
    claims = [Claim(a, copies_last=True), Claim(c, num_new=1), Claim(b, copies_last=True)]
    reservation = take(pool, *claims)
    assert [list(table.blocks) for table in (a, b, c)] == [[0, 2], [0, 4], [0, 1, 3]]
    rollback(pool, reservation)
    assert [list(table.blocks) for table in (a, b, c)] == [[0, 1]] * 3
    assert pool.ref_count(1) == 3
    pool.check([a.blocks, b.blocks, c.blocks])


def test_the_tail_of_a_table_is_released_before_its_beginning() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    table = filled(pool, 3)
    for block in table.blocks:
        pool.register(block, key(block))
    release_tail(pool, table, keep=1)
    assert list(table.blocks) == [0]
    release_tail(pool, table)
    assert pool.free_blocks() == (2, 1, 0)  # the beginning is evicted last


@given(st.data())
def test_a_rollback_restores_any_step_exactly(data: st.DataObject) -> None:
    pool = BlockPool(num_blocks=24, block_size=4)
    tables = [filled(pool, data.draw(st.integers(1, 3))) for _ in range(2)]
    tables += [fork(pool, table) for table in tables if data.draw(st.booleans())]
    for block in tables[0].blocks[:-1]:
        pool.register(block, key(block))
    cached = filled(pool, 2)
    for block in cached.blocks:
        pool.register(block, key(block))
    found = tuple(cached.blocks)
    release_tail(pool, cached)
    claims = [
        Claim(
            table,
            num_new=data.draw(st.integers(0, 2)),
            copies_last=pool.ref_count(table.blocks[-1]) > 1 and data.draw(st.booleans()),
        )
        for table in tables
    ]
    claims.append(
        Claim(BlockTable(), shared=whole(*found[: data.draw(st.integers(0, 2))]), num_new=1)
    )
    blocks = [list(claim.table.blocks) for claim in claims]
    refs = copy.copy(pool._refs)
    named = copy.deepcopy(pool._by_key)
    reservation = take(pool, *claims)
    rollback(pool, reservation)
    assert [list(claim.table.blocks) for claim in claims] == blocks
    assert pool._refs == refs
    assert pool._by_key == named  # nothing had to be evicted
    pool.check([table.blocks for table in tables])
