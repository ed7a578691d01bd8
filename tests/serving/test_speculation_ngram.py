"""Guessing by repetition."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from onnxport.serving.speculation.ngram import MOST_LOOKED_AT, NgramDrafter, NgramIndex
from tests.serving.speculating import request


def following(
    tokens: Sequence[int], length: int = 3, longest: int = 3, shortest: int = 2
) -> list[int]:
    drafter = NgramDrafter(longest, shortest)
    one = request(tokens)
    [found] = drafter.propose([one], [length])
    assert list(one.tokens) == list(tokens)
    return list(found)


def naive(tokens: Sequence[int], length: int, longest: int, shortest: int) -> list[int]:
    """Search all places, the latest first, for the longest suffix."""
    for size in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[len(tokens) - size :]:
                grown = list(tokens)
                for place in range(length):
                    grown.append(grown[end + place])
                return grown[len(tokens) :]
    return []


def test_what_followed_the_last_time() -> None:
    assert following([1, 2, 3, 4, 5, 9, 2, 3]) == [4, 5, 9]


def test_the_longest_match_goes_first() -> None:
    assert following([7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2], 1) == [50]
    assert following([7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2], 1, longest=2) == [60]


def test_the_latest_match_goes_first() -> None:
    assert following([1, 2, 50, 1, 2, 60, 1, 2], 2) == [60, 1]


def test_a_longer_match_far_back_is_not_looked_for() -> None:
    for others, wanted in [(MOST_LOOKED_AT - 1, 50), (MOST_LOOKED_AT, 60)]:
        between = [token for number in range(others) for token in (100 + number, 1, 2, 60)]
        assert following([7, 1, 2, 50, *between, 7, 1, 2], 1) == [wanted]


def test_a_loop_goes_on() -> None:
    assert following([5, 1, 2, 1, 2], 5) == [1, 2, 1, 2, 1]
    assert following([4, 4, 4, 4], 4) == [4, 4, 4, 4]


def test_nothing_to_go_by() -> None:
    assert following([1, 2, 3, 4, 5]) == []
    assert following([1, 2, 9, 2]) == []  # one token is too short
    assert following([1]) == []
    assert following([1, 2]) == []
    assert following([1, 2, 1, 2], 0) == []


SEQUENCES = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@given(SEQUENCES, st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6))
def test_the_index_finds_what_a_search_finds(prompt: list[int], more: list[list[int]]) -> None:
    index = NgramIndex(range(4, 1, -1))
    tokens = array("q", prompt)
    for new in [[], *more]:
        tokens.extend(new)
        assert list(index.following(tokens, 4)) == naive(list(tokens), 4, 4, 2)


@given(SEQUENCES, st.integers(1, 5))
def test_forgetting_loses_nothing(prompt: list[int], length: int) -> None:
    drafter = NgramDrafter(3, 2)
    one, other = request(prompt), request([9, *prompt])
    before = drafter.propose([one, other], [length, length])
    drafter.forget(one)
    drafter.forget(one)
    assert drafter.propose([other, one], [length, length]) == before[::-1]


class Counting(array):  # type: ignore[type-arg]
    """Tokens that count how many of them are looked at."""

    num_read = 0

    def __getitem__(self, item):  # type: ignore[no-untyped-def]
        found = super().__getitem__(item)
        Counting.num_read += len(found) if isinstance(item, slice) else 1
        return found


def test_a_long_prompt_is_read_once() -> None:
    index = NgramIndex(range(4, 1, -1))
    tokens = Counting("q", range(5000))
    index.following(tokens, 5)
    Counting.num_read = 0
    for _ in range(10):
        tokens.append(1)
        index.following(tokens, 5)
    assert 0 < Counting.num_read < 400
