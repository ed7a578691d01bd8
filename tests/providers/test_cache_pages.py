"""Huge pages at the beginnings of KV caches, made once these are in use. Nothing is timed."""

from __future__ import annotations

import errno
import mmap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.providers.cpu import cache_pages, caches, provider, settling
from onnxport.providers.cpu.cache_pages import CachePages
from onnxport.providers.memory import HUGE_PAGE, huge_page_zeros
from onnxport.providers.rows import convert
from tests.providers.models import opened, run_rows

needs_collapse = pytest.mark.skipif(
    not cache_pages.can_collapse(), reason="this system makes no huge page of small ones"
)
ENOUGH = cache_pages.NEEDED * mmap.PAGESIZE  # bytes


def cache(pages: int = 1) -> NDArray[Any]:
    """Of so many huge pages and a half, which are small ones yet."""
    count = pages * HUGE_PAGE + HUGE_PAGE // 2
    return huge_page_zeros((2, count // 2), np.uint8, small_bytes=pages * HUGE_PAGE)


def fill(array: NDArray[Any], count: int = ENOUGH, first: int = 0) -> None:
    array.reshape(-1)[first : first + count] = 3


def huge_kib(address: int) -> int:
    """Of the mapping that an address lies in, what is on huge pages.

    It may be more than the array's: Linux makes one mapping of neighbours that want huge pages, and
    NumPy wants them for arrays of 4 MiB.
    """
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split()
        if "-" in first:
            low, high = (int(one, 16) for one in first.split("-"))
            is_here = low <= address < high
        elif is_here and first == "AnonHugePages:":
            return int(others[0])
    raise AssertionError("no such mapping")


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What Linux answers to each wish for a page, in turn, and then 0; none is made."""
    answers: list[int] = []
    monkeypatch.setattr(cache_pages, "can_collapse", lambda: True)
    monkeypatch.setattr(cache_pages, "_num_resident", lambda address: cache_pages.NEEDED)
    monkeypatch.setattr(cache_pages, "_collapse", lambda address: answers.pop(0) if answers else 0)
    return answers


def made(pages: CachePages, most: int = 100) -> list[bool]:
    """What each try gave, until there are no more to make."""
    found: list[bool] = []
    while len(pages) and len(found) < most:
        found.append(pages.settle())
    return found


@needs_collapse
def test_a_cache_begins_at_a_huge_page_and_on_small_ones() -> None:
    array = cache()
    assert array.ctypes.data % HUGE_PAGE == 0
    fill(array)
    assert huge_kib(array.ctypes.data) == 0


@needs_collapse
def test_its_beginning_becomes_huge_once_it_is_nearly_full() -> None:
    array = cache()
    pages = CachePages([array, huge_page_zeros((HUGE_PAGE - 1,), np.uint8)], HUGE_PAGE)
    assert len(pages) == 1, "no place for one in the second"
    for written in (0, mmap.PAGESIZE, ENOUGH - mmap.PAGESIZE):
        fill(array, written)
        assert not pages.settle()
        assert len(pages) == 1
    content = np.random.default_rng(0).integers(0, 256, ENOUGH, np.uint8)
    flat = array.reshape(-1)
    flat[:ENOUGH] = content
    if not pages.settle():
        pytest.skip("the system has no huge page left")
    assert len(pages) == 0
    assert huge_kib(array.ctypes.data) >= HUGE_PAGE >> 10
    assert np.array_equal(flat[:ENOUGH], content)
    assert not flat[ENOUGH:].any()


@needs_collapse
def test_of_longer_beginnings_all_first_pages_come_first() -> None:
    arrays = [cache(2), cache(2)]
    pages = CachePages(arrays, 2 * HUGE_PAGE)
    assert len(pages) == 4
    for array in arrays:
        fill(array)
    if made(pages, 2) != [True, True]:
        pytest.skip("the system has no huge page left")
    assert not pages.settle()
    assert len(pages) == 2
    for array in arrays:
        fill(array, first=HUGE_PAGE)
    if made(pages) != [True, True]:
        pytest.skip("the system has no huge page left")
    assert all(huge_kib(array.ctypes.data) >= 2 * HUGE_PAGE >> 10 for array in arrays)


@needs_collapse
@pytest.mark.parametrize("view", [np.transpose, lambda array: array.view(np.uint16)])
def test_a_view_is_enough_to_keep_a_cache(view: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """As transfers and ONNX Runtime hold caches; the arrays themselves are gone."""
    pages = CachePages([cache()], HUGE_PAGE)
    assert len(pages) == 0, "nothing held it"
    array = cache()
    seen = view(array)
    fill(array)
    pages = CachePages([array], HUGE_PAGE)
    del array
    assert len(pages) == 1
    del seen
    assert len(pages) == 0


@needs_collapse
def test_a_page_that_is_being_made_keeps_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [cache()]
    fill(arrays[0])
    address = arrays[0].ctypes.data
    collapse = cache_pages._collapse

    def meanwhile(place: int) -> int:
        arrays.clear()
        assert huge_kib(place) == 0, "it is mapped still"
        return collapse(place)

    monkeypatch.setattr(cache_pages, "_collapse", meanwhile)
    pages = CachePages(arrays, HUGE_PAGE)
    assert pages._left[0].address == address
    pages.settle()
    assert not arrays
    assert len(pages) == 0


def test_caches_that_go_between_two_looks_are_left_alone(refusals: list[int]) -> None:
    arrays = [cache()]
    pages = CachePages(arrays, HUGE_PAGE)
    assert len(pages) == 1
    arrays.clear()
    assert not pages.settle()
    assert len(pages) == 0


@pytest.mark.parametrize("error", [errno.EAGAIN, errno.ENOMEM, errno.EBUSY])
def test_one_that_is_refused_for_now_is_tried_again_after_the_others(
    error: int, refusals: list[int]
) -> None:
    arrays = [cache() for _ in range(3)]
    pages = CachePages(arrays, HUGE_PAGE)
    first = pages._left[0].address
    refusals[:] = [error]
    assert not pages.settle()
    assert [place.address for place in pages._left].index(first) == 2
    assert made(pages) == [True] * 3


def test_none_is_tried_for_ever(refusals: list[int], caplog: pytest.LogCaptureFixture) -> None:
    arrays = [cache() for _ in range(3)]
    pages = CachePages(arrays, HUGE_PAGE)
    refusals[:] = [errno.ENOMEM] * 100
    with caplog.at_level("INFO"):
        assert made(pages) == [False] * (3 * cache_pages.TRIES)
    assert len(pages) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "Linux refused 3 of 3 huge pages for caches, the last one with: Cannot allocate memory"
    ]


def test_one_that_is_refused_for_good_is_tried_once(
    refusals: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """And told of, whichever comes last."""
    arrays = [cache() for _ in range(3)]
    pages = CachePages(arrays, HUGE_PAGE)
    refusals[:] = [errno.EINVAL]
    with caplog.at_level("INFO"):
        assert made(pages) == [False, True, True]
    assert [record.getMessage() for record in caplog.records] == [
        "Linux refused 1 of 3 huge pages for caches, the last one with: Invalid argument"
    ]


@needs_collapse
def test_linux_says_why_it_refuses() -> None:
    """Here of what begins at no page, which no place does."""
    array = cache()
    assert cache_pages._collapse(array.ctypes.data + 1) == errno.EINVAL
    assert cache_pages._num_resident(array.ctypes.data + 1) == 0


@pytest.mark.parametrize(
    ("enabled", "size"),
    [
        ("always madvise [never]", str(HUGE_PAGE)),
        ("always [madvise] never", str(512 << 20)),  # of an Arm system with pages of 64 KiB
        ("always [madvise] never", ""),
        (None, None),
    ],
)
def test_where_there_are_no_such_pages_none_are_made(
    enabled: str | None, size: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("enabled", enabled), ("hpage_pmd_size", size)):
        if text is not None:
            (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(cache_pages, "SETTINGS", tmp_path)
    cache_pages.can_collapse.cache_clear()
    array = cache()
    try:
        assert len(CachePages([array], HUGE_PAGE)) == 0
    finally:
        cache_pages.can_collapse.cache_clear()


@needs_collapse
@pytest.mark.parametrize("dtype", list(caches.CACHE_DTYPES))
def test_a_model_s_caches_are_settled_in_use(
    dtype: str, tiny_artifact: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All keys and values of every layer; what they hold and what is answered stays."""
    given: list[CachePages] = []
    threads: list[threading.Thread | None] = []

    def settle_later(
        model: Any, kernel: Path, pages: Sequence[CachePages], *, has_planes: bool
    ) -> None:
        assert has_planes == model.capabilities.takes_exact_logits
        given.append(pages[0])
        threads.append(settling.settle_later(model, kernel, pages))

    monkeypatch.setattr(provider, "settle_later", settle_later)
    for name in ("START_S", "BUSY_TIMES", "IDLE_S", "CHECK_S"):
        monkeypatch.setattr(settling, name, 0.0)
    path, tokens = tiny_artifact("llama", "fp32"), 1 << 17
    with opened(path, "custom", kv_cache_dtype=dtype, kv_cache_tokens=tokens) as model:
        places = [place.address for place in given[0]._left]
        layers = model.capabilities.kv_format.num_layers
        assert len(places) == 2 * layers
        assert all(address % HUGE_PAGE == 0 for address in places)
        limits, rows = model.capabilities, [([5, 6, 7], 16, [0, 1])]
        count = -(-HUGE_PAGE * 2 * layers // limits.kv_block_bytes)
        first = model.read_blocks(range(1))
        shape = (count, *first.shape[1:-1], model.capabilities.kv_format.head_size)
        numbers = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
        content = convert(numbers, first.dtype)
        model.write_blocks(range(count), content)
        held = model.read_blocks(range(count))
        answer = run_rows(model, rows)
        thread = threads[0]
        assert thread is not None
        for _ in range(100_000):
            if not thread.is_alive():
                break
            assert np.array_equal(run_rows(model, rows), answer)
        assert len(given[0]) == 0
        made_kib = [huge_kib(address) for address in places]
        others = [block for block in range(count) if block != 1]
        assert np.array_equal(model.read_blocks(others), held[others])
    if 0 in made_kib:
        pytest.skip("the system has no huge page left")
    assert min(made_kib) >= HUGE_PAGE >> 10
