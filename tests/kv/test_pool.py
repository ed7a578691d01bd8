import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from onnxport.errors import CapacityError
from onnxport.kv.pool import BlockPool
from onnxport.kv.table import BlockTable, blocks_for, release_tail, reserve, rollback


def test_blocks_come_out_in_order_and_return_to_the_end() -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([1])
    assert pool.free_blocks() == (3, 4, 1)
    assert pool.allocate(2) == [3, 4]
    pool.release([4, 0])
    assert pool.free_blocks() == (1, 4, 0)


def test_a_shared_block_is_free_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    (block,) = pool.allocate(1)
    pool.share([block])
    assert pool.ref_count(block) == 2
    pool.release([block])
    assert (pool.ref_count(block), pool.num_free) == (1, 1)
    pool.release([block])
    assert (pool.ref_count(block), pool.num_free) == (0, 2)


def test_misuse_is_caught() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 free"):
        pool.allocate(3)
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="cannot be released"):
        pool.release([0])
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share([0])


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_a_pool_that_holds_nothing_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(CapacityError, match="holds nothing"):
        BlockPool(num_blocks, block_size)


def test_check_sees_leaks_and_strangers() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    blocks = pool.allocate(2)
    pool.check([blocks])
    pool.check([blocks[:1], blocks[1:]])
    with pytest.raises(AssertionError, match="ref count 1, owned 0"):
        pool.check([blocks[:1]])
    with pytest.raises(AssertionError, match="ref count 1, owned 2"):
        pool.check([blocks, blocks])
    with pytest.raises(AssertionError, match="outside"):
        pool.check([blocks, [7]])


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 4) == blocks


def test_a_reservation_that_is_rolled_back_leaves_tables_as_they_were() -> None:
    pool = BlockPool(num_blocks=6, block_size=4)
    a, b, c = BlockTable(), BlockTable(), BlockTable()
    reserve(pool, [a], [2])
    reservation = reserve(pool, [a, b, c], [1, 2, 0])
    assert (list(a.blocks), list(b.blocks), list(c.blocks)) == ([0, 1, 2], [3, 4], [])
    rollback(pool, reservation)
    assert (list(a.blocks), list(b.blocks)) == ([0, 1], [])
    pool.check([a.blocks])


def test_the_tail_of_a_table_is_handed_out_before_its_beginning() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    table = BlockTable()
    reserve(pool, [table], [3])
    release_tail(pool, table, keep=1)
    assert list(table.blocks) == [0]
    release_tail(pool, table)
    assert pool.free_blocks() == (2, 1, 0)


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of operations keeps ref counts equal to what a plain model says."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, block_size=4)
        self.owners: list[BlockTable] = []
        self.expected_free = list(range(num_blocks))

    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, self.pool.num_free))
        table = BlockTable()
        reserve(self.pool, [table], [count])
        assert list(table.blocks) == self.expected_free[:count]
        del self.expected_free[:count]
        self.owners.append(table)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        if self.owners:
            other = BlockTable()
            other.blocks.extend(data.draw(st.sampled_from(self.owners)).blocks)
            self.pool.share(other.blocks)
            self.owners.append(other)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.owners:
            table = data.draw(st.sampled_from(self.owners))
            keep = data.draw(st.integers(0, len(table)))
            dropped = list(table.blocks[keep:])
            release_tail(self.pool, table, keep)
            self._now_free(dropped)

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        tables = self.owners[:3]
        counts = [data.draw(st.integers(0, self.pool.num_free // 3)) for _ in tables]
        before = [list(table.blocks) for table in tables]
        reservation = reserve(self.pool, tables, counts)
        taken = [list(t.blocks)[len(b) :] for t, b in zip(tables, before, strict=True)]
        del self.expected_free[: sum(counts)]
        rollback(self.pool, reservation)
        assert [list(table.blocks) for table in tables] == before
        for blocks in taken:
            self._now_free(blocks)

    @invariant()
    def blocks_are_free_or_owned(self) -> None:
        self.pool.check(table.blocks for table in self.owners)
        assert list(self.pool.free_blocks()) == self.expected_free

    def _now_free(self, blocks: list[int]) -> None:
        owned = {block for table in self.owners for block in table.blocks}
        self.expected_free += [block for block in reversed(blocks) if block not in owned]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
