import dataclasses
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from onnxport.kv.disk_file import DiskFormat, Entry
from onnxport.kv.disk_tier import DiskTier
from onnxport.kv.host_tier import HostTier
from onnxport.kv.tiers import TieredStore
from tests.tiers import examples

FORMAT = DiskFormat("5e" * 32, 2, 1, 1, 2, "float16")
SIZE = FORMAT.content_bytes("float16")
FILE_BYTES = FORMAT.file_bytes("float16")
TIMEOUT_S = 60.0
OpenStore = Callable[..., TieredStore]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> bytes:
    return bytes([number]) * SIZE


def entry(number: int) -> Entry:
    return Entry(content(number), "float16")


def put(store: TieredStore, *numbers: int) -> None:
    for number in numbers:
        store.put(key(number), content(number))


def known(store: TieredStore) -> list[int]:
    return [number for number in range(20) if key(number) in store]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    """Open stores on one folder, with room for `host` and `disk` entries; all are closed."""
    threads = threading.active_count()
    stores = []

    def open_one(
        host: int | HostTier, disk: int, format_: DiskFormat = FORMAT, **options: int
    ) -> TieredStore:
        host_tier = HostTier(host * SIZE) if isinstance(host, int) else host
        disk_tier = DiskTier(tmp_path, disk * FILE_BYTES, format_, **options)
        stores.append(TieredStore(host_tier, disk_tier, format_.dtype))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close(TIMEOUT_S)
    assert threading.active_count() <= threads


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, open_store: OpenStore) -> Iterator[threading.Event]:
    """Holds every write back until it is set."""
    event = threading.Event()
    replace = os.replace

    def gated(source: Path, target: Path) -> None:
        assert event.wait(TIMEOUT_S)
        replace(source, target)

    monkeypatch.setattr(os, "replace", gated)
    yield event
    event.set()


def test_host_memory_alone() -> None:
    store = TieredStore(HostTier(2 * SIZE), None, "bfloat16")
    put(store, 1, 2)
    assert store.get(key(1)) == Entry(content(1), "bfloat16")
    put(store, 3)
    assert known(store) == [1, 3]
    assert store.get(key(2)) is None
    assert (store.host_bytes, store.disk_bytes) == (2 * SIZE, 0)
    assert (store.num_errors, store.num_dropped) == (0, 0)
    assert store.persist(TIMEOUT_S)
    assert store.close(TIMEOUT_S)
    assert store.host_bytes == 0


def test_what_leaves_host_memory_goes_to_disk_and_comes_back(open_store: OpenStore) -> None:
    host = HostTier(2 * SIZE)
    store = open_store(host, 8)
    put(store, 1, 2)
    assert store.disk_bytes == 0
    put(store, 3, 4)
    assert store.persist(TIMEOUT_S)
    assert known(store) == [1, 2, 3, 4]
    assert key(1) not in host
    assert store.get(key(1)) == entry(1)
    assert [found for found, _ in host.items()] == [key(4), key(1)]
    assert (store.host_bytes, store.disk_bytes) == (2 * SIZE, 4 * FILE_BYTES)
    assert store.get(key(9)) is None


def test_looking_is_not_using() -> None:
    store = TieredStore(HostTier(2 * SIZE), None, "float16")
    put(store, 1, 2)
    assert key(1) in store
    put(store, 3)
    assert known(store) == [2, 3]


def test_an_entry_larger_than_host_memory_lives_on_disk(open_store: OpenStore) -> None:
    store = open_store(0, 2)
    put(store, 1)
    for _ in range(2):
        assert store.get(key(1)) == entry(1)
        assert store.persist(TIMEOUT_S)
    assert (store.host_bytes, store.disk_bytes) == (0, FILE_BYTES)


def test_another_provider_reads_the_entries_in_their_dtype(open_store: OpenStore) -> None:
    first = open_store(4, 8)
    put(first, 1, 2)
    assert first.persist(TIMEOUT_S)
    first.close(TIMEOUT_S)
    wide = dataclasses.replace(FORMAT, dtype="float32")
    second = open_store(2, 8, wide)
    assert second.get(key(1)) == second.get(key(1)) == entry(1)
    assert second.host_bytes == SIZE
    mine = bytes(2 * SIZE)
    second.put(key(3), mine)  # entry 1 leaves, in its own dtype
    assert second.get(key(1)) == entry(1)
    second.put(key(1), mine)  # computed again
    assert second.get(key(1)) == Entry(mine, "float32")
    assert second.num_errors == 0


def test_an_entry_of_another_dtype_keeps_it_on_its_way_back(
    open_store: OpenStore, tmp_path: Path
) -> None:
    first = open_store(1, 8)
    put(first, 1)
    assert first.persist(TIMEOUT_S)
    second = open_store(1, 8, dataclasses.replace(FORMAT, dtype="bfloat16"))
    assert second.get(key(1)) == entry(1)
    for path in tmp_path.rglob("*.kv"):
        path.unlink()
    assert second.persist(TIMEOUT_S)
    second.put(key(2), content(2))
    assert second.get(key(1)) == entry(1)
    assert second.get(key(2)) == Entry(content(2), "bfloat16")


def test_contents_of_another_dtype_are_told_from_those_that_were_here(
    open_store: OpenStore,
) -> None:
    store = open_store(host=8, disk=8)
    put(store, 1, 2)
    store.retype("float32")
    store.put(key(3), content(3) * 2)
    assert store.get(key(1)) == entry(1)
    assert store.get(key(3)) == Entry(content(3) * 2, "float32")
    store.retype("float16")
    put(store, 4)
    assert [store.get(key(number)) for number in (1, 4)] == [entry(1), entry(4)]
    assert store.get(key(3)) == Entry(content(3) * 2, "float32")
    assert store.persist(TIMEOUT_S)
    assert store.close(TIMEOUT_S)
    later = open_store(host=8, disk=8)
    assert later.get(key(2)) == entry(2)
    assert later.get(key(3)) == Entry(content(3) * 2, "float32")


def test_numbers_of_another_kind_are_our_bug() -> None:
    with pytest.raises(AssertionError, match="entries are no int64"):
        TieredStore(HostTier(SIZE), None, "float16").retype("int64")


def test_persist_keeps_the_most_recently_used_in_order(open_store: OpenStore) -> None:
    store = open_store(4, 5)
    put(store, 0, 1, 2, 3, 4)  # 0 goes to disk
    assert store.get(key(1)) == entry(1)
    in_pool = [(key(number), content(number)) for number in (7, 4, 6)]
    assert store.persist(TIMEOUT_S, in_pool)
    store.close(TIMEOUT_S)
    # most recent first: 7, 4, 6 of the pool, then 1, 4, 3, 2 of host memory, then 0
    for room, kept in (
        (5, [1, 3, 4, 6, 7]),
        (4, [1, 4, 6, 7]),
        (3, [4, 6, 7]),
        (2, [4, 7]),
        (1, [7]),
    ):
        store = open_store(4, room)
        assert known(store) == kept
        store.close(TIMEOUT_S)
    store = open_store(4, 1)
    assert store.get(key(7)) == entry(7)


def test_persist_stops_when_time_is_out(open_store: OpenStore, gate: threading.Event) -> None:
    store = open_store(4, 8, queue_bytes=1)
    drawn = []

    def in_pool() -> Iterator[tuple[bytes, bytes]]:
        for number in range(8):
            drawn.append(number)
            yield key(number), content(number)

    assert not store.persist(0.01, in_pool())
    assert drawn in ([0], [0, 1])  # the queue has room for one
    drawn.clear()
    assert not store.persist(0, in_pool())
    assert drawn == [0]
    gate.set()
    assert store.persist(TIMEOUT_S, in_pool())
    assert known(store) == list(range(8))


def test_a_slow_disk_costs_entries_and_no_time(
    open_store: OpenStore, gate: threading.Event
) -> None:
    store = open_store(1, 8, queue_bytes=1)
    put(store, 1, 2, 3, 4)  # 1 is being written, 2 and 3 find the queue full
    assert known(store) == [1, 4]
    assert store.num_dropped == 2
    assert store.get(key(1)) == entry(1)


def test_close_writes_what_had_left_host_memory_and_no_more(open_store: OpenStore) -> None:
    store = open_store(2, 8)
    put(store, 1, 2, 3)
    assert store.close(TIMEOUT_S)
    assert store.close(TIMEOUT_S)
    assert store.host_bytes == 0
    assert known(open_store(2, 8)) == [1]


def test_tiers_of_two_dtypes_are_our_bug(tmp_path: Path) -> None:
    disk = DiskTier(tmp_path, FILE_BYTES, FORMAT)
    with pytest.raises(AssertionError, match="the tiers differ in dtype"):
        TieredStore(HostTier(1), disk, "float32")
    disk.close(TIMEOUT_S)


NUMBERS = st.integers(0, 9)


class StoreMachine(RuleBasedStateMachine):
    """A store with room for everything on disk: it may forget only what nobody persisted."""

    @initialize(host=st.integers(0, 3))
    def start(self, host: int) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.put_so_far: set[int] = set()
        self.open(host)

    def open(self, host: int) -> None:
        disk = DiskTier(Path(self.temporary.name), 20 * FILE_BYTES, FORMAT)
        self.host_bytes = host * SIZE
        self.store = TieredStore(HostTier(self.host_bytes), disk, "float16")

    @rule(number=NUMBERS)
    def put(self, number: int) -> None:
        put(self.store, number)
        self.put_so_far.add(number)

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        expected = entry(number) if number in self.put_so_far else None
        assert self.store.get(key(number)) == expected

    @rule(host=st.integers(0, 3))
    def restart(self, host: int) -> None:
        assert self.store.persist(TIMEOUT_S)
        assert self.store.close(TIMEOUT_S)
        self.open(host)

    @invariant()
    def bounded(self) -> None:
        assert known(self.store) == sorted(self.put_so_far)
        assert self.store.host_bytes <= self.host_bytes
        assert (self.store.num_errors, self.store.num_dropped) == (0, 0)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close(TIMEOUT_S)
            self.temporary.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=examples(50), stateful_step_count=40, deadline=None
)
