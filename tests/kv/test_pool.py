"""The block pool: exact block ids, in the order in which they are handed out."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from onnxport.errors import CapacityError
from onnxport.kv.pool import BlockPool, Eviction
from onnxport.kv.prefix import BlockKeys
from tests.tiers import examples

MOST_KEYS = 5  # so few that blocks often have the same content


def keys(number: int) -> BlockKeys:
    return (number.to_bytes(32, "big"),)


def key(number: int) -> bytes:
    return keys(number)[-1]


def take(pool: BlockPool, count: int) -> list[int]:
    """Allocate; no block may lose its key by it."""
    evictions: list[Eviction] = []
    blocks = pool.allocate(count, evictions)
    assert not evictions
    return blocks


def cached_pool(num_blocks: int = 4, num_cached: int = 3) -> BlockPool:
    """A pool whose first blocks are free and cached under their own number, 0 unused longest."""
    pool = BlockPool(num_blocks, block_size=4)
    for number in take(pool, num_cached):
        pool.register(number, keys(number))
        pool.release([number])
    return pool


def test_blank_blocks_are_a_stack() -> None:
    pool = BlockPool(num_blocks=5, block_size=4)
    assert take(pool, 3) == [0, 1, 2]
    pool.release([1])
    assert pool.free_blocks() == (1, 3, 4)
    assert take(pool, 2) == [1, 3]
    pool.release([3, 0])
    assert pool.free_blocks() == (0, 3, 4)
    assert take(pool, 0) == []


def test_a_shared_block_is_free_when_its_last_owner_lets_go() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    (block,) = take(pool, 1)
    pool.share([block])
    assert pool.ref_count(block) == 2
    pool.release([block])
    assert (pool.ref_count(block), pool.num_free) == (1, 1)
    pool.release([block])
    assert (pool.ref_count(block), pool.num_free) == (0, 2)


def test_blank_blocks_go_before_cached_ones_and_those_by_age() -> None:
    pool = cached_pool()
    assert pool.blank_blocks() == (3,)
    assert pool.cached_blocks() == tuple(Eviction(n, keys(n)) for n in (0, 1, 2))
    assert pool.free_blocks() == (3, 0, 1, 2)
    assert (pool.num_free, pool.num_cached) == (4, 3)
    evictions: list[Eviction] = []
    assert pool.allocate(3, evictions) == [3, 0, 1]
    assert evictions == [Eviction(0, keys(0)), Eviction(1, keys(1))]
    assert [pool.find(key(number)) for number in range(3)] == [None, None, 2]
    pool.check([[3, 0, 1]])


def test_evictions_are_appended_to_those_that_are_there() -> None:
    pool = cached_pool(num_blocks=2, num_cached=2)
    evictions = [Eviction(9, keys(9))]
    pool.allocate(1, evictions)
    assert evictions == [Eviction(9, keys(9)), Eviction(0, keys(0))]


def test_a_block_that_is_used_again_is_evicted_last() -> None:
    pool = cached_pool()
    pool.share([0])
    assert (pool.num_free, pool.num_cached, pool.ref_count(0)) == (3, 2, 1)
    assert pool.find(key(0)) == 0
    pool.release([0])
    assert pool.free_blocks() == (3, 1, 2, 0)


def test_a_used_block_keeps_its_key_and_is_found() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    (block,) = take(pool, 1)
    assert pool.find(key(5)) is None
    pool.register(block, keys(5))
    assert pool.find(key(5)) == block
    pool.share([block])
    pool.release([block])
    pool.check([[block]])
    assert pool.find(key(5)) == block


def test_a_block_is_found_by_the_last_of_its_keys() -> None:
    pool = BlockPool(num_blocks=1, block_size=32)
    (block,) = take(pool, 1)
    pool.register(block, (key(1), key(2)))
    assert (pool.find(key(1)), pool.find(key(2))) == (None, block)
    pool.release([block])
    assert pool.cached_blocks() == (Eviction(block, (key(1), key(2))),)


def test_the_first_block_of_a_key_stays() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    first, second, _ = take(pool, 3)
    pool.register(first, keys(5))
    pool.register(second, keys(5))  # computed twice: it stays unknown
    pool.register(first, keys(6))  # a block has one key
    assert (pool.find(key(5)), pool.find(key(6))) == (first, None)
    pool.check([[0, 1, 2]])
    pool.release([second, first])
    assert pool.blank_blocks() == (second,)
    assert pool.cached_blocks() == (Eviction(first, keys(5)),)


def test_a_free_block_gives_its_key_up_to_a_used_one() -> None:
    """Else the free one is handed out, and what the used one holds cannot be found."""
    pool = cached_pool(num_blocks=5)
    again, another = pool.allocate(2, [])
    pool.share([2])
    pool.register(again, keys(1))
    assert (pool.find(key(1)), pool.blank_blocks()) == (again, (1,))
    pool.register(again, keys(0))  # it has a key, so nobody gives up theirs
    pool.register(another, keys(2))  # that one is used
    assert (pool.find(key(0)), pool.find(key(2))) == (0, 2)
    pool.check([[again, another, 2]])
    evictions: list[Eviction] = []
    assert pool.allocate(2, evictions) == [1, 0]
    assert evictions == [Eviction(0, keys(0))]
    assert pool.find(key(1)) == again


def test_a_free_block_of_another_group_keeps_its_key() -> None:
    pool = BlockPool(3, 4, windows=(None, 8))
    first, second, _ = take(pool, 3)
    pool.register(first, keys(5))
    pool.release([first])
    pool.register(second, keys(5), group=1)
    assert (pool.find(key(5)), pool.find(key(5), 1)) == (first, second)


def test_an_unregistered_block_is_not_found_and_is_blank_when_free() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    blocks = take(pool, 2)
    pool.register(0, keys(5))
    pool.unregister(0)
    pool.unregister(1)  # had none
    assert pool.find(key(5)) is None
    pool.register(1, keys(5))  # another one may take the key
    assert pool.find(key(5)) == 1
    pool.check([blocks])
    pool.release(blocks)
    assert (pool.blank_blocks(), pool.num_cached) == ((0,), 1)


def test_a_reset_forgets_free_and_used_blocks() -> None:
    pool = cached_pool()
    pool.share([1])
    pool.reset_cache()
    assert [pool.find(key(number)) for number in range(3)] == [None, None, None]
    assert (pool.num_cached, pool.num_free) == (0, 3)
    assert sorted(pool.blank_blocks()) == [0, 2, 3]
    pool.check([[1]])
    pool.release([1])
    assert pool.blank_blocks()[0] == 1
    pool.check([])


def test_misuse_is_caught() -> None:
    pool = BlockPool(num_blocks=2, block_size=4)
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 free"):
        pool.allocate(3, [])
    assert pool.num_free == 2
    with pytest.raises(AssertionError, match="cannot be released"):
        pool.release([0])
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share([0])
    with pytest.raises(AssertionError, match="cannot be registered"):
        pool.register(0, keys(1))
    with pytest.raises(AssertionError, match="cannot be unregistered"):
        pool.unregister(0)


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0)])
def test_a_pool_that_holds_nothing_is_refused(num_blocks: int, block_size: int) -> None:
    with pytest.raises(CapacityError, match="holds nothing"):
        BlockPool(num_blocks, block_size)


def test_check_sees_leaks_and_strangers() -> None:
    pool = BlockPool(num_blocks=3, block_size=4)
    blocks = take(pool, 2)
    pool.check([blocks])
    pool.check([blocks[:1], blocks[1:]])
    with pytest.raises(AssertionError, match="ref count 1, owned 0"):
        pool.check([blocks[:1]])
    with pytest.raises(AssertionError, match="ref count 1, owned 2"):
        pool.check([blocks, blocks])
    with pytest.raises(AssertionError, match="outside"):
        pool.check([blocks, [7]])


def test_check_sees_every_inconsistency() -> None:
    def broken(words: str) -> BlockPool:
        pool = cached_pool()
        pool.share([2])
        pool.check([[2]])
        expected.append(words)
        return pool

    expected: list[str] = []
    pool = broken("free twice")
    pool._blank.append(3)
    pools = [pool]
    pool = broken("block 3: blank")
    pool._blank.remove(3)
    pools.append(pool)
    pool = broken("block 2: blank")
    pool._blank.append(2)
    pools.append(pool)
    pool = broken("0: cached")
    del pool._cached[0]
    pools.append(pool)
    pool = broken("2: cached")
    pool._cached[2] = None
    pools.append(pool)
    pool = broken("block 1: key")
    pool._by_key[0][key(1)] = 0
    pools.append(pool)
    pool = broken("stray key")
    pool._by_key[0][key(8)] = 2
    pools.append(pool)
    for pool, words in zip(pools, expected, strict=True):
        with pytest.raises(AssertionError, match=words):
            pool.check([[2]])


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of operations does what lists, in the order of the docstring, do."""

    @initialize(num_blocks=st.integers(1, 10))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, block_size=4)
        self.owners: list[list[int]] = []
        self.blank = list(range(num_blocks))  # the next to be handed out first
        self.cached: list[int] = []  # likewise
        self.named: dict[int, int] = {}  # block -> the number of its key

    @precondition(lambda self: self.pool.num_free)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.num_free))
        evictions: list[Eviction] = []
        blocks = self.pool.allocate(count, evictions)
        assert blocks == (self.blank + self.cached)[:count]
        evicted = blocks[len(self.blank) :]
        assert evictions == [Eviction(block, keys(self.named.pop(block))) for block in evicted]
        del self.blank[:count], self.cached[: len(evicted)]
        self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(number=st.integers(0, MOST_KEYS - 1), data=st.data())
    def register(self, number: int, data: st.DataObject) -> None:
        if used := sorted({block for blocks in self.owners for block in blocks}):
            self.register_block(data.draw(st.sampled_from(used)), number)

    @precondition(lambda self: self.blank)
    @rule(number=st.integers(0, MOST_KEYS - 1), keeps=st.booleans())
    def compute(self, number: int, keeps: bool) -> None:
        """A block is filled; a free one may have the same content already."""
        (block,) = take(self.pool, 1)
        assert block == self.blank.pop(0)
        self.owners.append([block])
        self.register_block(block, number)
        if not keeps:
            self.release_owner(len(self.owners) - 1)

    def register_block(self, block: int, number: int) -> None:
        self.pool.register(block, keys(number))
        old = {key: block for block, key in self.named.items()}.get(number)
        if block in self.named or (old is not None and old not in self.cached):
            return
        if old is not None:
            del self.named[old]
            self.cached.remove(old)
            self.blank.insert(0, old)
        self.named[block] = number

    @rule(data=st.data())
    def unregister(self, data: st.DataObject) -> None:
        if used := sorted({block for blocks in self.owners for block in blocks}):
            block = data.draw(st.sampled_from(used))
            self.pool.unregister(block)
            self.named.pop(block, None)

    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        found = sorted({block for blocks in self.owners for block in blocks} | {*self.cached})
        if found:
            blocks = data.draw(st.lists(st.sampled_from(found), unique=True))
            self.pool.share(blocks)
            self.cached = [block for block in self.cached if block not in blocks]
            self.owners.append(blocks)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.release_owner(data.draw(st.integers(0, len(self.owners) - 1)))

    def release_owner(self, index: int) -> None:
        blocks = self.owners.pop(index)
        self.pool.release(reversed(blocks))
        owned = {block for others in self.owners for block in others}
        for block in reversed(blocks):
            if block not in owned and block in self.named:
                self.cached.append(block)
            elif block not in owned:
                self.blank.insert(0, block)

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()
        self.blank = list(self.pool.blank_blocks())
        assert len(set(self.blank)) == len(self.blank) == self.pool.num_free
        self.cached, self.named = [], {}

    @invariant()
    def agrees(self) -> None:
        self.pool.check(self.owners)
        assert self.pool.free_blocks() == (*self.blank, *self.cached)
        found = {number: self.pool.find(key(number)) for number in range(MOST_KEYS)}
        named = {number: block for block, number in self.named.items()}
        assert found == {number: named.get(number) for number in range(MOST_KEYS)}


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
