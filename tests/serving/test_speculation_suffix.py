"""Guessing by the ends of texts: the index, the answers that are kept, and whose they are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.serving.adapters.adapter import Adapter
from onnxport.serving.outputs import FinishReason
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.request import TOKEN_ID_TYPECODE, Request
from onnxport.serving.speculation import suffix_index
from onnxport.serving.speculation.continuations import likeliest, longest_drafts
from onnxport.serving.speculation.past_answers import LARGEST_SHARE, PastAnswers
from onnxport.serving.speculation.suffix import MOST_READ, SuffixDrafter
from onnxport.serving.speculation.suffix_index import (
    FEW,
    MOST_LOOKED_AT,
    GramHash,
    SuffixIndex,
)
from tests.serving.speculating import GREEDY, request
from tests.tiers import examples

DEPTH, LEAST = 24, 0.1


def drafter(
    depth: int = DEPTH,
    factor: float = 1.0,
    least: float = LEAST,
    most_answers: int = 100,
    most_tokens: int = 1024,
) -> SuffixDrafter:
    return SuffixDrafter(depth, factor, least, most_answers=most_answers, most_tokens=most_tokens)


def guess(guesser: SuffixDrafter, one: Request, length: int = 100) -> list[int]:
    before = list(one.tokens)
    [found] = guesser.propose([one], [length])
    assert list(one.tokens) == before
    return list(found)


def end(
    guesser: SuffixDrafter,
    prompt: Sequence[int],
    answer: Sequence[int],
    reason: FinishReason = "stop",
    **options: Any,
) -> None:
    """A request that was answered so ends."""
    one = of(prompt, answer, **options)
    one.finish_reason = reason
    guesser.forget(one)


def of(prompt: Sequence[int], answer: Sequence[int] = (), **options: Any) -> Request:
    """A request of which so much was answered."""
    params = options.pop("params", GREEDY)
    adapter = options.pop("adapter", None)
    one = Request(
        "r",
        array(TOKEN_ID_TYPECODE, prompt),
        params,
        max_total_tokens=10**6,
        options=RequestOptions(**options),
        adapter=adapter,
    )
    one.tokens.extend(answer)
    return one


# The reference: all that is kept, searched from one end to the other.

Kept = tuple[Sequence[int], int]  # tokens, of which so many are not the answer's


def num_shared(tokens: Sequence[int], text: Sequence[int], most: int) -> int:
    """How many tokens the two have in common at their ends."""
    for size in range(most, 0, -1):
        if size <= min(len(tokens), len(text)) and tokens[-size:] == text[-size:]:
            return size
    return 0


def draft_of(rows: list[list[int]], length: int, least: float) -> tuple[list[int], float]:
    """The most frequent continuation, and how much of it is expected to come."""
    draft: list[int] = []
    probability, expected = 1.0, 0.0
    while len(draft) < length:
        following = [row[len(draft)] for row in rows if len(row) > len(draft)]
        if not following:
            break
        token_id = max(following, key=following.count)
        probability *= following.count(token_id) / len(following)
        if probability < least:
            break
        draft.append(token_id)
        expected += probability
        rows = [row for row in rows if row[: len(draft)] == draft]
    return draft, expected


def searched(
    kept: Sequence[Kept], text: list[int], length: int, depth: int, factor: float, least: float
) -> list[int]:
    """What should be guessed, of at most `length` tokens."""

    def drafted(places: list[tuple[int, list[int]]]) -> tuple[list[int], float]:
        longest = max((shared for shared, _ in places), default=0)
        rows = [row for shared, row in places if shared == longest]
        allowed = max(min(int(factor * size + 1e-6), depth - size) for size in range(longest + 1))
        return draft_of(rows, min(length, allowed), least) if longest else ([], 0.0)

    own = []
    for place in range(len(text) - 1, 0, -1):
        period = text[place:]
        row = (period * (length + 1))[: length + 1]
        own.append((num_shared(text[:place], text, depth - 1), row))
    others = [
        (num_shared(tokens[:place], text, depth - 1), list(tokens[place:]))
        for tokens, num_prompt in reversed(kept)
        for place in range(len(tokens) - 1, max(1, num_prompt) - 1, -1)
    ]
    mine, theirs = drafted(own), drafted(others)
    return theirs[0] if theirs[1] > mine[1] + 1e-9 else mine[0]


TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=60)
FEWER = st.lists(st.integers(0, 5), min_size=1, max_size=3 * FEW)


@settings(max_examples=examples(300), deadline=None)
@given(
    answers=st.lists(st.tuples(TEXTS | FEWER, TEXTS | FEWER), max_size=8),
    prompt=TEXTS | FEWER,
    more=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6),
    copied=st.booleans(),
    depth=st.integers(2, 40),
    factor=st.sampled_from([1.0, 0.5, 2.5]),
    least=st.sampled_from([0.0, 0.1, 0.6, 1.0]),
    length=st.integers(1, 30),
)
def test_what_is_found_is_what_a_search_finds(
    answers: list[tuple[list[int], list[int]]],
    prompt: list[int],
    more: list[list[int]],
    copied: bool,
    depth: int,
    factor: float,
    least: float,
    length: int,
) -> None:
    factor = max(factor, 1 / (depth - 1))
    with patch.object(suffix_index, "MOST_LOOKED_AT", 10**6):
        guesser = drafter(depth, factor, least, most_answers=6, most_tokens=1024)
        kept: list[Kept] = []
        for question, answer in answers:
            end(guesser, question, answer)
            context = question[-(depth - 1) :]
            largest = 1024 // LARGEST_SHARE - 1
            whole = [*context, *answer][-largest:]
            if len(answer) > 1:
                kept.append((whole, max(0, len(whole) - len(answer))))
        assert guesser.answers is not None
        number = len(guesser.answers)
        assert number == min(len(kept), 6) or guesser.answers.num_tokens > 1024 / 2
        live = kept[len(kept) - number :]
        assert guesser.answers.num_tokens == sum(len(tokens) for tokens, _ in live)
        if copied and answers:
            prompt, more = prompt + answers[-1][0], [answers[-1][1], *more]
        one = request(prompt)
        for new in [[], *more]:
            one.tokens.extend(new)
            text = list(one.tokens)
            found = guess(guesser, one, length)
            wanted = searched(live, text, length, depth, factor, least)
            assert found == wanted


@given(TEXTS | FEWER, st.integers(1, 40), st.integers(0, 2**64 - 1))
def test_many_ends_at_once_are_linked_as_one_by_one(
    tokens: list[int], depth: int, salt: int
) -> None:
    hashing = GramHash(depth)
    indices = [SuffixIndex(256, hashing) for _ in range(2)]
    for index in indices:
        index.tokens[index.margin : index.margin + len(tokens)] = tokens
    last = indices[0].margin + len(tokens) - 1
    with patch.object(suffix_index, "FEW", 0):
        indices[0].add(indices[0].margin, last, salt)
    with patch.object(suffix_index, "FEW", 10**6):
        indices[1].add(indices[1].margin, last, salt)
    np.testing.assert_array_equal(indices[0]._heads, indices[1]._heads)
    np.testing.assert_array_equal(indices[0]._before, indices[1]._before)


# What is guessed.


def test_a_draft_is_as_long_as_the_match_allows() -> None:
    assert longest_drafts(24, 1.0) == (*range(13), *[12] * 12)
    assert longest_drafts(6, 0.5) == (0, 0, 1, 1, 2, 2, 2)
    assert longest_drafts(5, 3.0) == (0, 3, 3, 3, 3, 3)
    assert longest_drafts(3, 0.1)[:2] == (0, 0)
    assert longest_drafts(256, 0.29)[100] == 29  # as floats have it, 0.29 * 100 is less
    guesser = drafter()
    end(guesser, [50], range(100, 200))
    for match in (1, 2, 5, 11, 12, 20, 30):
        found = guess(guesser, of([7], range(110, 110 + match)))
        assert found == list(range(110 + match, 110 + match + min(match, 12)))


def rows(*texts: Sequence[int]) -> list[bytes]:
    return [array("i", [*text, -1]).tobytes() for text in texts]


def test_what_followed_most_often_is_guessed() -> None:
    found = likeliest(rows([1, 2, 3], [1, 4, 5], [1, 2, 6], [7, 2, 3]), 3, 0.0)
    assert found.tokens == [1, 2, 3]
    assert found.expected == pytest.approx(3 / 4 + 2 / 4 + 1 / 4)
    assert likeliest(rows([1, 2, 3], [4, 2, 3]), 3, 0.0).expected == pytest.approx(3 / 2)


def test_no_token_is_guessed_that_is_not_likely_enough() -> None:
    found = rows([1, 2, 3], [1, 4, 5], [1, 2, 6], [7, 2, 3])
    assert likeliest(found, 3, 0.5).tokens == [1, 2]
    assert likeliest(found, 3, 0.75).tokens == [1]
    assert likeliest(found, 3, 0.76).tokens == []
    assert likeliest(rows([1, 2], [1, 3]), 2, 1.0).tokens == [1]


def test_of_equals_the_latest_is_guessed() -> None:
    assert likeliest(rows([1, 2], [3, 4]), 2, 0.1).tokens == [1, 2]
    assert likeliest(rows([3, 4], [1, 2]), 2, 0.1).tokens == [3, 4]


def test_a_row_that_has_ended_has_no_vote() -> None:
    assert likeliest(rows([1], [1], [1, 2]), 2, 1.0) == ([1, 2], 2.0)
    assert likeliest(rows([1], [1, 2], [1, 3]), 2, 0.5).tokens == [1, 2]
    assert likeliest(rows([1], [1], [1]), 2, 0.1) == ([1], 1.0)
    assert likeliest([], 2, 0.1) == ([], 0.0)
    many = array("i", [1, -1, 5, 6]).tobytes(), array("i", [1, -1, 7, 8]).tobytes()
    assert likeliest(many, 4, 0.1).tokens == [1]


def test_the_longest_match_goes_first_however_many_shorter_ones_there_are() -> None:
    guesser = drafter(most_tokens=1 << 14)
    end(guesser, [9], [1, 2, 3, 4, 5, 60, 61])
    for number in range(3 * MOST_LOOKED_AT):
        end(guesser, [9], [100 + number, 4, 5, 70, 71])
    assert guess(guesser, of([9], [1, 2, 3, 4, 5]), 1) == [60]  # by its 4-gram
    assert guess(guesser, of([9], [4, 5]), 1) == [70]


def test_not_all_of_many_are_looked_at() -> None:
    for others, wanted in [(MOST_LOOKED_AT - 1, 60), (MOST_LOOKED_AT, 70)]:
        guesser = drafter(most_tokens=1 << 14)
        end(guesser, [9], [1, 2, 3, 60, 61])
        for number in range(others):
            end(guesser, [9], [100 + number, 2, 3, 70, 71])
        assert guess(guesser, of([8], [1, 2, 3]), 1) == [wanted]


def test_an_answer_is_known_by_the_prompt_before_it() -> None:
    guesser = drafter()
    end(guesser, [1, 2, 3, 4], [10, 20, 30, 40])
    end(guesser, [1, 2, 3, 5], [10, 21, 31, 41])
    assert guess(guesser, of([1, 2, 3, 4], [10])) == [20, 30, 40]
    assert guess(guesser, of([1, 2, 3, 5], [10])) == [21, 31, 41]
    assert guess(guesser, of([1, 2, 3])) == []  # a prompt itself is not what is guessed


def test_the_more_promising_of_own_text_and_answers_is_guessed() -> None:
    guesser = drafter()
    end(guesser, [9], [5, 6, 7, 8, 70, 71, 72, 73])
    own = [5, 6, 7, 8, 80, 81, 82, 83]
    assert guess(guesser, of([*own, 1, 7, 8])) == [80, 81]  # no less of its own
    assert guess(guesser, of([1, 7, 8, 80, 81], [5, 6, 7, 8])) == [70, 71, 72, 73]


def test_a_loop_goes_on() -> None:
    guesser = drafter(most_answers=0)
    assert guesser.answers is None
    assert guess(guesser, of([5, 1, 2, 1, 2]), 2) == [1, 2]
    assert guess(guesser, of([4, 4, 4, 4]), 9) == [4, 4, 4]
    assert guess(guesser, of([1, 2, 3] * 8)) == [1, 2, 3] * 4
    assert guess(guesser, of([1, 2, 3, 4])) == []
    assert guess(guesser, of([1])) == []


def test_nothing_is_asked_where_nothing_is_wanted() -> None:
    guesser = drafter()
    assert guesser.propose([of([1, 1, 1])], [0]) == [()]
    assert not guesser._texts
    assert guesser.is_cheap
    assert guesser.num_behind(of([1])) == 0


def test_a_long_text_is_read_in_parts() -> None:
    guesser = drafter()
    one = of([*range(3 * MOST_READ), 7, 8])
    calls = 0
    while not guess(guesser, one):
        calls += 1
        assert calls < 4
    assert calls == 3
    one.tokens.append(9)
    assert guess(guesser, one) == [10, 11, 12]
    one.tokens.extend([*range(10, 3 * MOST_READ), 7, 8])  # while it rested; there is no room for it
    for _ in range(5):  # from its beginning
        assert guess(guesser, one) == []
    assert guess(guesser, one) == list(range(9, 21))


def test_the_last_token_of_a_long_text_may_be_a_part_of_its_own() -> None:
    guesser = drafter()
    one = of([*range(100, 100 + MOST_READ - 2), 7, 8, 9])
    assert guess(guesser, one) == guess(guesser, one) == []
    one.tokens.extend([7, 8])
    assert guess(guesser, one) == [9, 7]


def test_a_token_that_comes_costs_the_same_in_a_long_text() -> None:
    guesser = drafter()
    one = of(range(MOST_READ - 300))
    guess(guesser, one)
    with patch.object(SuffixIndex, "add", side_effect=AssertionError("it was read again")):
        for token_id in range(100):
            one.tokens.append(token_id)
            guess(guesser, one)


def test_shorter_ngrams_are_not_looked_up_where_a_longer_one_was_found() -> None:
    hashing = GramHash(23)
    answers = PastAnswers(10, 1024, hashing)
    answers.add("key", array("q", [5, 1, 2, 3, 4, 6, 4, 7, 3, 4, 8]), 0)
    ending = hashing.ending(array("q", [1, 2, 3, 4]))
    place = answers._index.margin
    salt = answers._owners["key"].salt
    assert answers._index.longest(ending, place, 12, salt) == {place + 5: 4}
    ending = hashing.ending(array("q", [9, 3, 4]))
    assert answers._index.longest(ending, place, 12, salt) == {place + 10: 2, place + 5: 2}


# What is kept.


def test_answers_end_in_every_way_but_by_an_error() -> None:
    reasons: tuple[tuple[FinishReason, int], ...] = (
        ("stop", 1),
        ("length", 1),
        ("abort", 1),
        ("timeout", 1),
        ("error", 0),
    )
    for reason, number in reasons:
        guesser = drafter()
        end(guesser, [1], [2, 3, 4], reason)
        assert guesser.answers is not None
        assert len(guesser.answers) == number
    guesser = drafter()
    guesser.forget(of([1], [2, 3, 4]))  # it yields, and goes on
    end(guesser, [1], [2])  # nothing follows a token of its answer
    end(guesser, [1], [])
    assert guesser.answers is not None
    assert len(guesser.answers) == 0


def test_the_oldest_answers_make_room() -> None:
    guesser = drafter(most_answers=3)
    for number in range(5):
        end(guesser, [9], range(100 * number, 100 * number + 20))
    found = [bool(guess(guesser, of([8], [100 * number, 100 * number + 1]))) for number in range(5)]
    assert found == [False, False, True, True, True]


def test_tokens_are_bounded_and_memory_does_not_grow() -> None:
    guesser = drafter(depth=4, most_answers=10**6, most_tokens=1024)
    answers = guesser.answers
    assert answers is not None
    size = answers.num_bytes
    assert size < 1024 * 44 + 8192
    for number in range(200):
        length = 10 + number % 37
        end(guesser, [9], range(1000 * number, 1000 * number + length))
        assert answers.num_tokens <= 1024
        assert guess(guesser, of([8], [1000 * number])) == [1000 * number + 1]
    assert len(answers) > 20
    assert answers.num_bytes == size
    assert len(answers._owners) == 1


def test_what_the_ring_has_passed_over_is_not_found() -> None:
    """Behind the last answer that fits there is what an earlier one left."""
    guesser = drafter(depth=4)
    for number in range(5):
        end(guesser, [9], range(1000 * number, 1000 * number + 190))
    for number in range(5, 10):  # longer ones: the fifth of them begins anew
        end(guesser, [9], range(1000 * number, 1000 * number + 230))
    answers = guesser.answers
    assert answers is not None
    assert answers._index.tokens.tolist().count(4189) == 0
    for token_id in range(4000, 4190):
        assert guess(guesser, of([8], [token_id])) == []
    assert guess(guesser, of([8], [9000])) == [9001]


def test_of_a_long_answer_the_last_part_is_kept() -> None:
    guesser = drafter(most_tokens=1024)
    end(guesser, [9], range(20))
    end(guesser, [9], range(1000, 3000))
    assert guess(guesser, of([8], [2990, 2991])) == [2992, 2993]
    assert guess(guesser, of([8], [1010, 1011])) == []
    assert guess(guesser, of([8], [3, 4])) == [5, 6]  # and others stay


def test_closing_lets_go_of_all_and_may_be_done_twice() -> None:
    guesser = drafter()
    end(guesser, [1], [2, 3, 4])
    guess(guesser, of([1], [2]))
    guesser.close()
    guesser.close()
    assert not guesser._texts
    assert guesser.answers is not None
    assert len(guesser.answers) == 0
    assert guess(guesser, of([1], [2])) == []


def test_forgetting_is_idempotent_and_loses_nothing_of_a_text() -> None:
    guesser = drafter(most_answers=0)
    one = of([5, 1, 2, 1, 2])
    before = guess(guesser, one)
    guesser.forget(one)
    guesser.forget(one)
    assert not guesser._texts
    assert guess(guesser, one) == before


# Whose it is.


def adapter(fingerprint: str) -> Adapter:
    return Adapter("name", 1, fingerprint, 4, Path("folder"), None)


OWNERS: tuple[dict[str, Any], ...] = (
    {},
    {"tenant": "a"},
    {"tenant": "b"},
    {"cache_salt": "a"},
    {"cache_salt": "b"},
    {"tenant": "a", "cache_salt": "a"},
    {"adapter": adapter("a")},
    {"adapter": adapter("b")},
    {"adapter": adapter("a"), "tenant": "a"},
)


@pytest.mark.parametrize("colliding", [False, True])
@pytest.mark.parametrize("owner", OWNERS)
def test_answers_are_found_by_their_owner_alone(owner: dict[str, Any], colliding: bool) -> None:
    """Also where the n-grams of two of them have one bucket."""
    guesser = drafter()
    prompt, answer = [1, 2, 3], list(range(10, 40))
    salts = patch("random.getrandbits", return_value=12345) if colliding else nullcontext()
    with salts:
        for other in OWNERS:
            end(guesser, [7], [70, 71, 72], **other)
        end(guesser, prompt, answer, **owner)
    for other in OWNERS:
        found = guess(guesser, of(prompt, answer[:9], **other), 4)
        assert found == (answer[9:13] if other == owner else [])


def test_others_change_nothing_of_what_is_found() -> None:
    """However often they say the same: what is looked at is an owner's alone."""
    guesser = drafter(most_tokens=1 << 14)
    end(guesser, [9], [1, 2, 3, 60, 61], tenant="a")
    for number in range(3 * MOST_LOOKED_AT):
        end(guesser, [9], [100 + number, 2, 3, 70, 71], tenant="b")
    assert guess(guesser, of([8], [1, 2, 3], tenant="a"), 1) == [60]


def test_an_owner_without_answers_is_forgotten() -> None:
    guesser = drafter(most_answers=2)
    for number in range(50):
        end(guesser, [9], [1, 2, 3], tenant=str(number))
    assert guesser.answers is not None
    assert len(guesser.answers._owners) == 2


def test_who_reads_nothing_cached_reads_no_answers() -> None:
    fresh = SamplingParams(temperature=0.0, skip_reading_prefix_cache=True)
    guesser = drafter()
    end(guesser, [1, 2], range(10, 30), params=fresh)
    assert guess(guesser, of([1, 2], range(10, 14), params=fresh)) == []
    assert guess(guesser, of([1, 2], range(10, 14))) == [14, 15, 16, 17, 18, 19]
    assert guess(guesser, of([1, 2, 1, 2], params=fresh)) == [1, 2]


def test_of_many_occurrences_few_are_looked_at() -> None:
    hashing = GramHash(23)
    answers = PastAnswers(10**6, 1 << 14, hashing)
    for _ in range(100):
        answers.add("key", array("q", [5] * 100), 0)
    match = answers.longest("key", hashing.ending(array("q", [5] * 50)))
    assert match.length == 23
    assert len(match.ends) == MOST_LOOKED_AT
