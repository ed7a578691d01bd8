import dataclasses
import errno
import logging
import os
import random
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from onnxport.errors import CapacityError, OnnxportError
from onnxport.kv.disk_file import DiskFormat, Entry
from onnxport.kv.disk_folder import TEMPORARY_AGE_S
from onnxport.kv.disk_tier import DiskTier
from tests.tiers import examples

FORMAT = DiskFormat(
    "5e" * 32, unit_tokens=2, num_layers=1, num_kv_heads=1, head_size=2, dtype="float16"
)
CONTENT_BYTES = FORMAT.content_bytes("float16")
FILE_BYTES = FORMAT.file_bytes("float16")
TIMEOUT_S = 60.0  # far longer than anything here takes
OpenTier = Callable[..., DiskTier]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def entry(number: int) -> Entry:
    return Entry(bytes([number % 256]) * CONTENT_BYTES, "float16")


def write(tier: DiskTier, *numbers: int) -> None:
    for number in numbers:
        assert tier.put(key(number), entry(number))
    assert tier.flush(TIMEOUT_S)


def known(tier: DiskTier, numbers: range = range(20)) -> list[int]:
    return [number for number in numbers if key(number) in tier]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def open_tier(tmp_path: Path) -> Iterator[OpenTier]:
    """Open tiers on one folder, of `capacity` entries; all are closed, and no thread is left."""
    threads = threading.active_count()
    tiers = []

    def open_one(capacity: int = 16, format_: DiskFormat = FORMAT, **options: Any) -> DiskTier:
        tier = DiskTier(tmp_path, capacity * FILE_BYTES, format_, **options)
        tiers.append(tier)
        return tier

    yield open_one
    for tier in tiers:
        tier.close(TIMEOUT_S)
    assert threading.active_count() <= threads


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch, open_tier: OpenTier) -> Iterator[threading.Event]:
    """Holds every write back, just before the file gets its name, until it is set."""
    event = threading.Event()
    replace = os.replace

    def gated(source: Path, target: Path) -> None:
        assert event.wait(TIMEOUT_S)
        replace(source, target)

    monkeypatch.setattr(os, "replace", gated)
    yield event
    event.set()


# --- what is put is what is got


def test_an_entry_is_in_one_file_of_its_own(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier()
    write(tier, 1)
    assert files(tmp_path) == [tier.path(key(1))]
    assert tier.path(key(1)).name == f"{1:064x}.kv"
    assert tier.num_bytes == tier.path(key(1)).stat().st_size == FILE_BYTES
    assert tier.get(key(1)) == entry(1)
    assert tier.get(key(2)) is None
    assert (known(tier), tier.num_errors, tier.num_dropped) == ([1], 0, 0)


def test_the_least_recently_used_leave_first(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier(3)
    write(tier, 1, 2, 3)
    assert tier.get(key(1)) == entry(1)
    write(tier, 2)  # its file is there: only a use
    write(tier, 4)
    assert known(tier) == [1, 2, 4]
    write(tier, 5)
    assert known(tier) == [2, 4, 5]
    assert [path.stem for path in files(tmp_path)] == [key(n).hex() for n in (2, 4, 5)]
    assert tier.num_bytes == 3 * FILE_BYTES


def test_a_restart_keeps_entries_and_their_order(open_tier: OpenTier) -> None:
    tier = open_tier(4)
    write(tier, 3, 1, 4, 2)
    assert tier.get(key(3)) == entry(3)
    assert tier.close(TIMEOUT_S)
    tier = open_tier(4)
    assert known(tier) == [1, 2, 3, 4]
    assert tier.num_bytes == 4 * FILE_BYTES
    for new, left in ((5, [2, 3, 4, 5]), (6, [2, 3, 5, 6]), (7, [3, 5, 6, 7])):
        write(tier, new)
        assert known(tier) == left
    assert tier.get(key(3)) == entry(3)


def test_a_smaller_capacity_at_a_restart_evicts(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier(5)
    write(tier, 1, 2, 3, 4, 5)
    tier.get(key(1))
    tier.close(TIMEOUT_S)
    assert known(open_tier(2)) == [1, 5]
    assert len(files(tmp_path)) == 2


def test_the_time_of_use_may_be_given(open_tier: OpenTier) -> None:
    tier = open_tier()
    for number, used_ns in ((1, 30), (2, 10), (3, 20)):
        assert tier.put(key(number), entry(number), used_ns=used_ns * 10**9)
    tier.close(TIMEOUT_S)
    assert known(open_tier(2)) == [1, 3]


def test_an_entry_of_another_dtype_says_so(open_tier: OpenTier) -> None:
    wide = dataclasses.replace(FORMAT, dtype="float32")
    content = bytes(wide.content_bytes("float32"))
    writer = open_tier(format_=wide)
    assert writer.put(key(1), Entry(content, "float32"))
    assert writer.put(key(2), entry(2))
    writer.close(TIMEOUT_S)
    reader = open_tier()
    assert reader.get(key(1)) == Entry(content, "float32")
    assert reader.get(key(2)) == entry(2)
    assert reader.num_errors == 0


def test_models_share_a_folder_and_its_bound(open_tier: OpenTier, tmp_path: Path) -> None:
    others = [
        open_tier(3, dataclasses.replace(FORMAT, model="77" * 32)),
        open_tier(3, dataclasses.replace(FORMAT, unit_tokens=1)),
    ]
    one_unit = Entry(bytes(others[1].format.content_bytes("float16")), "float16")
    write(others[0], 1)
    assert others[1].put(key(1), one_unit)
    assert others[1].flush(TIMEOUT_S)
    tier = open_tier(3)
    assert key(1) not in tier
    assert tier.get(key(1)) is None
    assert tier.num_bytes == sum(path.stat().st_size for path in files(tmp_path))
    write(tier, 1, 2)
    assert others[0].get(key(1)) is None  # the least recently used of all three models
    assert others[1].get(key(1)) == one_unit
    assert tier.num_errors == others[0].num_errors == others[1].num_errors == 0


# --- files that are damaged, foreign, or not there


def test_every_damaged_byte_is_found_and_the_file_removed(
    open_tier: OpenTier, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier()
    path = tier.path(key(1))
    for number, index in enumerate(range(8, FILE_BYTES)):
        write(tier, 1)
        data = bytearray(path.read_bytes())
        data[index] ^= 0x10
        path.write_bytes(data)
        assert tier.get(key(1)) is None
        assert not path.exists()
        assert key(1) not in tier
        assert tier.num_errors == len(caplog.records) == number + 1
    write(tier, 1)
    assert tier.get(key(1)) == entry(1)


def test_a_file_cut_anywhere_is_found_and_removed(open_tier: OpenTier) -> None:
    tier = open_tier()
    path = tier.path(key(1))
    for length in range(FILE_BYTES):
        write(tier, 1)
        os.truncate(path, length)
        assert tier.get(key(1)) is None
        assert not path.exists()
    assert tier.num_errors == FILE_BYTES


def test_the_same_tokens_in_other_layouts_are_other_entries(open_tier: OpenTier) -> None:
    """Groups of layers have the same keys, and blocks of fewer layers."""
    grouped = dataclasses.replace(FORMAT, num_layers=1, places=((0, 0), (1, 0)))
    tiers = [open_tier(), open_tier(format_=grouped)]
    for number, tier in enumerate(tiers):
        size = tier.format.content_bytes("float16")
        assert tier.put(key(1), Entry(bytes([number]) * size, "float16"))
        assert tier.flush(TIMEOUT_S)
    for number, tier in enumerate(tiers):
        found = tier.get(key(1))
        assert found is not None
        assert found.content[0] == number
        assert tier.num_errors == 0


def test_a_file_of_zeros_is_removed(open_tier: OpenTier) -> None:
    """A power failure leaves such ones on some file systems."""
    tier = open_tier()
    tier.path(key(1)).write_bytes(bytes(FILE_BYTES))
    assert tier.get(key(1)) is None
    assert not tier.path(key(1)).exists()
    write(tier, 1)
    assert tier.get(key(1)) == entry(1)


def test_room_is_made_of_files_of_zeros(open_tier: OpenTier) -> None:
    tier = open_tier(2)
    tier.path(key(1)).write_bytes(bytes(FILE_BYTES))
    os.utime(tier.path(key(1)), (1, 1))
    tier.close(TIMEOUT_S)
    tier = open_tier(2)
    write(tier, 2, 3)
    assert known(tier) == [2, 3]
    assert not tier.path(key(1)).exists()


def foreign_files() -> list[bytes]:
    """Contents that a file with our name may have without being our entry."""
    with tempfile.TemporaryDirectory() as folder:
        others = []
        for change in ({"num_kv_heads": 2, "head_size": 1}, {"model": "0"}, {"unit_tokens": 4}):
            format_ = dataclasses.replace(FORMAT, **change)
            tier = DiskTier(Path(folder), 1 << 20, format_)
            content = bytes(format_.content_bytes("float16"))
            tier.put(key(1), Entry(content, "float16"))
            tier.close(TIMEOUT_S)
            others.append(tier.path(key(1)).read_bytes())
    magic = others[0][:8]
    return [*others, b"some text", magic + bytes(1 << 20)]


def test_a_sound_file_with_a_fault_is_reported_and_can_be_written_anew(
    open_tier: OpenTier, caplog: pytest.LogCaptureFixture
) -> None:
    faults = [None, "it is of no use"]
    tier = open_tier(find_fault=lambda found: faults.pop() if found == entry(1) else None)
    write(tier, 1, 2)
    assert tier.get(key(1)) is None
    assert "it is of no use; it is removed" in caplog.text
    assert (known(tier), tier.num_errors) == ([2], 1)
    assert not tier.path(key(1)).exists()
    write(tier, 1)
    assert [tier.get(key(number)) for number in (1, 2)] == [entry(1), entry(2)]
    assert tier.num_errors == 1


@pytest.mark.parametrize("data", foreign_files(), ids=["shape", "model", "unit", "text", "long"])
def test_what_is_not_ours_is_reported_once_and_stays(
    open_tier: OpenTier, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    tier = open_tier()
    path = tier.path(key(1))
    path.write_bytes(data)
    for _ in range(2):
        assert tier.get(key(1)) is None
        assert key(1) not in tier
    write(tier, 1)
    assert path.read_bytes() == data
    assert key(1) not in tier
    assert tier.get(key(1)) is None
    assert (tier.num_errors, len(caplog.records)) == (1, 1)
    assert f"{path} is not used: it" in caplog.text
    path.unlink()
    write(tier, 1)
    assert tier.get(key(1)) == entry(1)


def test_eviction_leaves_what_is_not_ours(
    open_tier: OpenTier, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    tier = open_tier(2)
    strange = tier.path(key(1))
    strange.write_bytes(b"a letter" * (FILE_BYTES // 8))
    os.utime(strange, (1, 1))
    (tmp_path / "notes.txt").write_bytes(bytes(10 * FILE_BYTES))
    (strange.parent / "README").write_bytes(bytes(10 * FILE_BYTES))
    tier.close(TIMEOUT_S)
    tier = open_tier(2)
    assert known(tier) == [1]
    write(tier, 2, 3, 4)
    assert known(tier) == [3, 4]
    assert [path.name for path in files(tmp_path)] == [
        strange.name, tier.path(key(3)).name, tier.path(key(4)).name, "README", "notes.txt"
    ]  # fmt: skip
    assert (tier.num_errors, len(caplog.records)) == (1, 1)


def test_a_file_that_vanished_is_a_miss(
    open_tier: OpenTier, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier()
    write(tier, 1, 2)
    tier.path(key(1)).unlink()
    assert key(1) in tier
    assert tier.get(key(1)) is None
    assert key(1) not in tier
    tier.path(key(2)).unlink()
    tier.path(key(2)).parent.rmdir()
    write(tier, 2)
    assert tier.get(key(2)) == entry(2)
    assert (tier.num_errors, caplog.records, tier.num_bytes) == (0, [], FILE_BYTES)


def test_only_old_temporary_files_of_our_kind_are_removed(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    family = open_tier().path(key(1)).parent
    old = family / f"{key(1).hex()}.0123456789abcdef.tmp"
    fresh = family / f"{key(1).hex()}.fedcba9876543210.tmp"
    others = [family / "mine.tmp", family / f"{key(1).hex()}.tmp", tmp_path / old.name]
    for path in (old, fresh, *others):
        path.write_bytes(b"half")
        if path != fresh:
            before = path.stat().st_mtime - TEMPORARY_AGE_S - 10
            os.utime(path, (before, before))
    tier = open_tier()
    assert files(tmp_path) == sorted([fresh, *others])
    assert (tier.num_bytes, tier.num_errors) == (0, 0)


# --- two tiers on one folder


def test_get_finds_what_another_process_wrote(open_tier: OpenTier) -> None:
    ours, theirs = open_tier(), open_tier()
    write(theirs, 1, 2)
    assert known(ours) == []
    assert ours.get(key(1)) == entry(1)
    assert known(ours) == [1]
    assert ours.num_bytes == FILE_BYTES


def test_what_another_process_mended_is_found(open_tier: OpenTier) -> None:
    ours, theirs = open_tier(), open_tier()
    write(ours, 1)
    os.truncate(ours.path(key(1)), 20)
    assert ours.get(key(1)) is None
    write(theirs, 1)
    assert ours.get(key(1)) == entry(1)


def test_the_folder_is_looked_at_again_after_an_eighth_of_the_capacity(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    ours, theirs = open_tier(16), open_tier(16)
    write(theirs, 1, 2)
    write(ours, 11, 12)
    assert known(ours) == [11, 12]
    write(ours, 13)
    assert known(ours) == [1, 2, 11, 12, 13]
    write(theirs, *range(3, 10))
    write(ours, 14)
    assert known(ours) == [1, 2, 11, 12, 13, 14]
    write(ours, 15, 16, 17, 18, 19)
    assert len(files(tmp_path)) <= 16 + 2
    assert not ours.path(key(1)).exists()


def test_two_writers_evict_beside_each_other(open_tier: OpenTier, tmp_path: Path) -> None:
    tiers = [open_tier(4), open_tier(4)]

    def work(tier: DiskTier, seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(400):
            number = draw.randrange(12)
            if draw.random() < 0.5:
                tier.put(key(number), entry(number), wait_s=TIMEOUT_S)
            else:
                assert tier.get(key(number)) in (None, entry(number))
        assert tier.flush(TIMEOUT_S)

    failures: list[BaseException] = []

    def caught(tier: DiskTier, seed: int) -> None:
        try:
            work(tier, seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=caught, args=(t, i)) for i, t in enumerate(tiers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert [tier.num_errors for tier in tiers] == [0, 0]
    write(tiers[0], 100)  # looks at the folder
    assert len(files(tmp_path)) <= 4


# --- the queue


def test_what_is_queued_is_found(open_tier: OpenTier, gate: threading.Event) -> None:
    tier = open_tier()
    assert tier.put(key(1), entry(1))
    assert tier.put(key(2), entry(2))
    assert tier.put(key(2), entry(2))
    assert known(tier) == [1, 2]
    assert tier.get(key(1)) == entry(1)
    assert tier.get(key(2)) == entry(2)
    assert not tier.flush(0)
    gate.set()
    assert tier.flush(TIMEOUT_S)
    assert tier.get(key(2)) == entry(2)
    assert tier.num_bytes == 2 * FILE_BYTES


def test_a_full_queue_drops_and_counts(open_tier: OpenTier, gate: threading.Event) -> None:
    gate.set()
    tier = open_tier(queue_bytes=CONTENT_BYTES + 1)
    write(tier, 9)
    gate.clear()
    assert tier.put(key(1), entry(1))
    assert tier.put(key(2), entry(2))
    assert not tier.put(key(3), entry(3))
    assert not tier.put(key(4), entry(4), wait_s=0.001)
    assert tier.put(key(1), entry(1))  # queued already
    assert tier.put(key(9), entry(9))  # on disk already
    assert tier.num_dropped == 2
    gate.set()
    assert tier.flush(TIMEOUT_S)
    assert known(tier) == [1, 2, 9]
    write(tier, 3)
    assert tier.num_dropped == 2


def test_put_may_wait_for_room(open_tier: OpenTier, gate: threading.Event) -> None:
    tier = open_tier(queue_bytes=1)
    assert tier.put(key(1), entry(1))
    opener = threading.Timer(0.01, gate.set)
    opener.start()
    assert tier.put(key(2), entry(2), wait_s=TIMEOUT_S)
    opener.join()
    assert tier.flush(TIMEOUT_S)
    assert (known(tier), tier.num_dropped) == ([1, 2], 0)


def test_close_writes_what_is_queued(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier()
    for number in range(10):
        assert tier.put(key(number), entry(number))
    assert tier.close(TIMEOUT_S)
    assert tier.close(TIMEOUT_S)
    assert len(files(tmp_path)) == 10
    assert tier.get(key(3)) == entry(3)
    with pytest.raises(AssertionError, match="closed"):
        tier.put(key(1), entry(1))


def test_close_drops_what_it_has_no_time_for(
    open_tier: OpenTier, gate: threading.Event, tmp_path: Path
) -> None:
    tier = open_tier()
    for number in range(3):
        assert tier.put(key(number), entry(number))
    opener = threading.Timer(0.05, gate.set)  # the first write ends after `close` gave up on it
    opener.start()
    assert not tier.close(0)
    opener.join()
    assert tier.num_dropped == 3
    assert len(files(tmp_path)) <= 1


def test_wrong_sizes_are_our_bugs(open_tier: OpenTier) -> None:
    tier = open_tier()
    with pytest.raises(AssertionError, match="1 bytes, 16 expected"):
        tier.put(key(1), Entry(b"x", "float16"))
    with pytest.raises(AssertionError, match="a key of 3 bytes"):
        tier.put(b"abc", entry(1))


# --- a disk that fails


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS])
def test_a_failed_write_is_counted_and_the_tier_goes_on(
    open_tier: OpenTier,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    code: int,
) -> None:
    tier = open_tier()
    write(tier, 1)

    def failing(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", failing)
        write(tier, 2, 3)
        patch.setattr(os, "utime", failing)
        assert tier.get(key(1)) == entry(1)
    assert files(tmp_path) == [tier.path(key(1))]
    assert known(tier) == [1]
    assert tier.num_errors == 2
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert f"cannot write K/V in {tmp_path}: " in caplog.messages[0]
    assert "cannot mark the use of K/V" in caplog.messages[1]
    write(tier, 2)
    assert tier.get(key(2)) == entry(2)
    assert tier.num_dropped == 0


def test_no_room_can_be_made_where_removing_fails(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tier = open_tier(2)
    write(tier, 1, 2)

    def failing(path: Path, missing_ok: bool = False) -> None:
        if path.suffix == ".kv":
            raise OSError(errno.EACCES, "no", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", failing)
        write(tier, 3)
        tier.path(key(2)).write_bytes(b"")
        assert tier.get(key(2)) is None
    assert (known(tier), tier.num_errors) == ([1], 3)  # a write, a corrupt file, its removal
    assert tier.get(key(1)) == entry(1)
    assert len(files(tmp_path)) == 2


def test_a_file_that_cannot_be_read_is_a_miss(
    open_tier: OpenTier, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier()
    tier.path(key(1)).mkdir()
    assert tier.get(key(1)) is None
    assert tier.get(key(1)) is None
    assert (tier.num_errors, len(caplog.records)) == (2, 1)
    assert "cannot read K/V" in caplog.text


def test_an_entry_larger_than_the_folder_is_not_written(open_tier: OpenTier) -> None:
    tier = open_tier(1)
    write(tier, 1)
    wide = Entry(bytes(2 * CONTENT_BYTES), "float32")
    assert tier.put(key(2), wide)
    assert tier.flush(TIMEOUT_S)
    assert tier.get(key(2)) is None
    assert (known(tier), tier.num_errors) == ([1], 1)


def test_a_folder_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threading.active_count()
    file = tmp_path / "file"
    file.write_bytes(b"")
    with pytest.raises(OnnxportError, match=r"file cannot be used: .*leave kv_disk out"):
        DiskTier(file, 1 << 20, FORMAT)

    def failing(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "touch", failing)
    with pytest.raises(OnnxportError, match=r"Permission denied.*may create and write"):
        DiskTier(tmp_path / "new", 1 << 20, FORMAT)
    assert threading.active_count() <= threads


def test_a_capacity_below_one_entry_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=f"hold {FILE_BYTES - 1} bytes .* takes {FILE_BYTES}"):
        DiskTier(tmp_path / "kv", FILE_BYTES - 1, FORMAT)
    assert not files(tmp_path)


# --- whatever happens

NUMBERS = st.integers(0, 7)


class DiskMachine(RuleBasedStateMachine):
    """A tier beside the list of what it knows, the least recently used first."""

    @initialize(capacity=st.integers(1, 5))
    def start(self, capacity: int) -> None:
        self.temporary = tempfile.TemporaryDirectory()
        self.folder = Path(self.temporary.name)
        self.known: list[int] = []
        self.there: set[int] = set()
        self.open(capacity)

    def open(self, capacity: int) -> None:
        self.capacity = capacity
        self.tier = DiskTier(self.folder, capacity * FILE_BYTES, FORMAT)
        self.look(0)

    def look(self, new: int) -> None:
        """The tier sees what is there, and makes room for `new` entries."""
        self.known = [number for number in self.known if number in self.there]
        while len(self.known) + new > self.capacity:
            self.there.discard(self.known.pop(0))

    def use(self, number: int) -> None:
        self.known = [other for other in self.known if other != number] + [number]

    @rule(number=NUMBERS)
    def put(self, number: int) -> None:
        if number not in self.there:
            self.look(new=1)
            self.there.add(number)
        self.use(number)
        write(self.tier, number)

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        found = self.tier.get(key(number))
        if number in self.there:
            assert found == entry(number)
            self.use(number)
        else:
            assert found is None
            self.known = [other for other in self.known if other != number]

    @rule(number=NUMBERS)
    def another_process_removes(self, number: int) -> None:
        self.tier.path(key(number)).unlink(missing_ok=True)
        self.there.discard(number)

    @rule(number=NUMBERS, index=st.integers(8, FILE_BYTES - 1))
    def damage(self, number: int, index: int) -> None:
        if number not in self.there:
            return
        path = self.tier.path(key(number))
        data = bytearray(path.read_bytes())
        data[index] ^= 1
        path.write_bytes(data)
        assert self.tier.get(key(number)) is None
        self.there.discard(number)
        self.known = [other for other in self.known if other != number]

    @rule(capacity=st.integers(1, 5))
    def restart(self, capacity: int) -> None:
        assert self.tier.close(TIMEOUT_S)
        self.open(capacity)

    @invariant()
    def same(self) -> None:
        assert known(self.tier) == sorted(self.known)
        names = [path.stem for path in files(self.folder)]
        assert names == [key(number).hex() for number in sorted(self.there)]
        assert self.tier.num_bytes == len(self.known) * FILE_BYTES
        assert len(self.known) <= self.capacity
        assert self.tier.num_dropped == 0

    def teardown(self) -> None:
        if hasattr(self, "tier"):
            self.tier.close(TIMEOUT_S)
            self.temporary.cleanup()


TestDiskMachine = DiskMachine.TestCase
TestDiskMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=40, deadline=None
)
