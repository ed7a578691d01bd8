"""Groups of layers: their arithmetic, against sequences that grow column by column."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onnxport.kv.groups import CacheGroups
from onnxport.kv.pool import BlockPool
from onnxport.kv.table import BlockTable, Claim, commit, give_up, reserve

some_windows = st.lists(st.none() | st.integers(1, 20), min_size=1, max_size=4)


def grown(groups: CacheGroups, columns: int) -> tuple[BlockPool, BlockTable, int]:
    """A table that got its columns one by one, and the most blocks that it held at once."""
    pool = BlockPool(1000, groups.block_size, groups.windows)
    table, most = BlockTable(len(groups)), 0
    for column in range(columns):
        commit(pool, reserve(pool, [Claim(table, num_new=1)]))
        most = max(most, len(list(table.held())))
        give_up(pool, table, (column + 1) * groups.block_size)
        pool.check([tuple(table.held())])
    return pool, table, most


@given(windows=some_windows, block_size=st.integers(1, 6), columns=st.integers(0, 20))
def test_resident_is_what_a_sequence_holds_at_most(
    windows: list[int | None], block_size: int, columns: int
) -> None:
    groups = CacheGroups(windows, block_size)
    assert grown(groups, columns)[2] == groups.resident(columns)


@given(
    windows=some_windows,
    block_size=st.integers(1, 6),
    columns=st.integers(0, 12),
    more=st.integers(0, 12),
)
def test_pending_is_what_a_sequence_takes_more(
    windows: list[int | None], block_size: int, columns: int, more: int
) -> None:
    groups = CacheGroups(windows, block_size)
    pool, table, _ = grown(groups, columns)
    pending = groups.pending(columns + more, columns, table.given_up)
    held = most = [columns - gone for gone in table.given_up]
    for column in range(columns, columns + more):
        commit(pool, reserve(pool, [Claim(table, num_new=1)]))
        now = [len(table) - gone for gone in table.given_up]
        most = [max(pair) for pair in zip(most, now, strict=True)]
        give_up(pool, table, (column + 1) * block_size)
    assert pending == sum(most) - sum(held)


@given(windows=some_windows, block_size=st.integers(1, 6), num_tokens=st.integers(0, 60))
def test_given_up_is_what_no_later_token_sees(
    windows: list[int | None], block_size: int, num_tokens: int
) -> None:
    groups = CacheGroups(windows, block_size)
    for group, window in enumerate(windows):
        earliest = 0 if window is None else max(0, num_tokens - window + 1)
        first = groups.first_seen(group, num_tokens)
        assert first * block_size <= earliest < (first + 1) * block_size


@given(
    windows=some_windows,
    block_size=st.integers(1, 4),
    start=st.integers(0, 4),
    there=st.sets(st.tuples(st.integers(0, 14), st.integers(0, 3))),
    stop=st.integers(0, 14),
)
def test_reach_is_the_furthest_that_all_groups_allow(
    windows: list[int | None],
    block_size: int,
    start: int,
    there: set[tuple[int, int]],
    stop: int,
) -> None:
    groups, stop = CacheGroups(windows, block_size), max(start, stop)

    def allowed(end: int) -> bool:
        return all(
            (column, group) in there
            for group in range(len(groups))
            for column in groups.needed(group, start, end)
        )

    reach = groups.reach(range(start, stop), lambda column, group: (column, group) in there)
    assert reach == max((end for end in range(start, stop + 1) if allowed(end)), default=start)


@pytest.mark.parametrize(
    ("windows", "num_blocks", "columns"),
    [
        ((None,), 7, 7),
        ((None, None), 7, 3),
        ((None, 8), 7, 4),  # of windows of 8 tokens 3 blocks of 4 are held at most
        ((None, 8), 100, 97),
        ((8,), 2, 2),
        ((8,), 3, (2**31 - 1) // 4),
    ],
)
def test_longest(windows: tuple[int | None, ...], num_blocks: int, columns: int) -> None:
    groups = CacheGroups(windows, 4)
    assert groups.longest(num_blocks) == columns
    assert groups.resident(columns) <= num_blocks
