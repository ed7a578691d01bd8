"""The rounds of a beam search, without a model: candidates in, beams and finished texts out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from onnxport.serving.beams import (
    BeamGroup,
    Beginning,
    Candidate,
    Child,
    Text,
    Told,
    best_possible,
    common_length,
    rows_of,
    score,
)
from onnxport.serving.params import SamplingParams
from onnxport.serving.request import Request
from onnxport.serving.rules import SequenceRules, logit_rules
from onnxport.serving.sampled import RowLogprobs
from onnxport.serving.token_counts import TokenCounts

PROMPT = [7, 8]
END = 99


def group(width: int, max_tokens: int = 9, **params: Any) -> BeamGroup:
    asked = SamplingParams(n=width, use_beam_search=True, **params)
    slots = tuple(
        Request(
            "a",
            array("q", PROMPT),
            asked,
            max_total_tokens=len(PROMPT) + max_tokens,
            index=index,
            stop_token_ids=frozenset({END}),
        )
        for index in range(width)
    )
    return BeamGroup(slots, Beginning(lambda: None, lambda: None, lambda: None))


def advance(beams: BeamGroup, *found: Sequence[tuple[int, float]]) -> list[tuple[list[int], float]]:
    """Play a round; `found` is what may follow each beam, the best one first."""
    for beam, pairs in zip(beams.live, found, strict=True):
        beams.found[beam.slot] = tuple(Candidate(*pair) for pair in pairs)
    assert beams.has_arrived
    go_on(beams, beams.advance())
    return state(beams)


def go_on(beams: BeamGroup, children: list[Child]) -> None:
    seats = beams.seat(children) if children else {}
    beams.take(children, seats)


def state(beams: BeamGroup) -> list[tuple[list[int], float]]:
    return [(output(beam.slot.tokens), beam.logprob) for beam in beams.live]


def output(tokens: array[int]) -> list[int]:
    assert tokens[: len(PROMPT)].tolist() == PROMPT
    return tokens[len(PROMPT) :].tolist()


def finished(beams: BeamGroup) -> list[tuple[list[int], float]]:
    return [(output(text.tokens), text.logprob) for text in beams.finished]


def test_the_best_of_all_beams_go_on() -> None:
    beams = group(2)
    assert advance(beams, [(1, -1.0), (2, -2.0), (3, -3.0)]) == [([1], -1.0), ([2], -2.0)]
    assert advance(beams, [(4, -4.0), (5, -5.0)], [(6, -0.5), (7, -1.0)]) == [
        ([2, 6], -2.5),
        ([2, 7], -3.0),
    ]
    assert advance(beams, [(4, -1.0), (5, -9.0)], [(6, -0.25), (7, -1.0)]) == [
        ([2, 7, 6], -3.25),
        ([2, 6, 4], -3.5),
    ]


def test_equals_come_in_the_order_of_their_beams_and_ranks() -> None:
    beams = group(3)
    advance(beams, [(3, -1.0), (1, -1.0), (2, -1.0), (0, -1.0)])
    assert state(beams) == [([3], -1.0), ([1], -1.0), ([2], -1.0)]
    advance(beams, [(9, -1.0), (4, -1.0)], [(5, -1.0)], [(6, -1.0)])
    assert state(beams) == [([3, 9], -2.0), ([3, 4], -2.0), ([1, 5], -2.0)]


def test_an_end_token_finishes_a_text_wherever_it_ranks() -> None:
    beams = group(2)
    advance(beams, [(1, -1.0), (2, -2.0), (3, -3.0), (END, -4.0)])
    assert finished(beams) == [([END], -4.0)]
    assert beams.finished[0].score == -2.0  # the end token has no length
    advance(beams, [(END, -0.1), (4, -9.0)], [(5, -1.0), (6, -2.0)])
    assert finished(beams) == [([1, END], -1.1), ([END], -4.0)]
    assert state(beams) == [([2, 5], -3.0), ([2, 6], -4.0)]


def test_only_the_best_finished_ones_are_kept() -> None:
    beams = group(2, length_penalty=0.0)
    for logprob in (-3.0, -1.0, -2.0, -1.0):
        beams._finish(Text(array("q", [*PROMPT, END]), logprob), 2)
    assert [text.logprob for text in beams.finished] == [-1.0, -1.0]


@pytest.mark.parametrize(("penalty", "goes_on"), [(0.0, False), (1.0, True), (-1.0, False)])
def test_it_is_over_when_no_beam_can_get_better(penalty: float, goes_on: bool) -> None:
    """The best beam has -5 at 4 tokens; of 11 tokens, -5 may still be the better one."""
    beams = group(2, length_penalty=penalty)
    advance(beams, [(1, -1.0), (2, -2.0)])
    found = advance(beams, [(END, -1.5), (3, -4.0)], [(END, -1.0), (4, -5.0)])
    assert finished(beams) == [([1, END], -2.5), ([2, END], -3.0)]
    assert bool(found) == goes_on


def test_a_beam_that_may_become_as_good_does_not_go_on() -> None:
    beams = group(1, length_penalty=0.0)
    assert advance(beams, [(END, -1.0), (2, -1.0)]) == []
    beams = group(1, length_penalty=0.0)
    assert advance(beams, [(END, -1.0), (2, -0.5)]) == [([2], -0.5)]


def test_bounds_hold_for_whatever_follows() -> None:
    for penalty in (-2.0, -0.5, 0.0, 0.5, 1.0, 3.0):
        for length in (3, 10):
            bound = best_possible(-4.0, length, 30, penalty)
            for more in range(length, 31):
                for logprob in (-4.0, -4.5, -9.0):
                    assert score(logprob, more, penalty) <= bound


def test_at_the_length_all_beams_are_finished() -> None:
    beams = group(2, max_tokens=2)
    advance(beams, [(1, -1.0), (2, -2.0), (END, -9.0)])
    assert advance(beams, [(3, -3.0), (4, -4.0)], [(5, -1.5), (END, -2.5)]) == []
    # -9 / 2, and others that are longer: -3.5 / 4, -4.0 / 4, and -4.5 / 3.
    assert finished(beams) == [([2, 5], -3.5), ([1, 3], -4.0)]


def test_there_may_be_fewer_beams_than_slots() -> None:
    beams = group(4)
    assert advance(beams, [(1, -1.0), (2, -2.0)]) == [([1], -1.0), ([2], -2.0)]
    advance(beams, [(END, -1.0)], [(3, -1.0)])
    assert state(beams) == [([2, 3], -3.0)]
    assert beams.live[0].slot is beams.slots[0]
    assert advance(beams, [(END, -1.0)]) == []
    assert finished(beams) == [([1, END], -2.0), ([2, 3, END], -4.0)]  # -2 / 3 and -4 / 4


def test_a_beam_takes_the_slot_of_its_parent_and_the_first_slot_is_always_taken() -> None:
    beams = group(3)
    advance(beams, [(1, -1.0), (2, -2.0), (3, -3.0)])
    assert [beam.slot.index for beam in beams.live] == [0, 1, 2]
    # The third has two children, the second one, and the first none.
    found = {
        beams.live[0].slot: (Candidate(4, -20.0),),
        beams.live[1].slot: (Candidate(5, -1.0),),
        beams.live[2].slot: (Candidate(6, -0.5), Candidate(7, -1.0)),
    }
    beams.found.update(found)
    children = beams.advance()
    seats = beams.seat(children)
    assert {slot.index: output(child.text.tokens) for slot, child in seats.items()} == {
        0: [3, 7],
        1: [2, 5],
        2: [3, 6],
    }
    assert {slot.index: child.parent.slot.index for slot, child in seats.items()} == {
        0: 2,
        1: 1,
        2: 2,
    }
    beams.take(children, seats)
    assert [beam.slot.index for beam in beams.live] == [1, 2, 0]


def test_what_a_parent_has_read_is_not_read_again() -> None:
    beams = group(3, frequency_penalty=1.0)
    first = beams.slots[0]
    rules = logit_rules(first.params, (), 100, None)
    assert rules is not None
    first.rules = SequenceRules(rules, len(PROMPT))
    read: list[tuple[int, ...]] = []
    for pairs in ([(1, -1.0), (2, -2.0)],), ([(3, -1.0), (1, -1.5)], [(2, -1.0)]):
        for beam in beams.live:
            assert beam.slot.rules is not None
            beam.slot.rules.edits(beam.slot.tokens)
        advance(beams, *pairs)
    for beam in beams.live:
        assert beam.slot.rules is not None
        assert isinstance(beam.slot.rules._counts, TokenCounts)
        assert beam.slot.rules._counts._num_read == len(PROMPT) + 1
        edits = beam.slot.rules.edits(beam.slot.tokens)
        read.append(tuple(np.repeat(edits.seen, edits.counts.astype(int)).tolist()))
    assert read == [(1, 3), (1, 1), (2, 2)]


def test_a_single_child_moves_to_the_first_slot() -> None:
    beams = group(2)
    advance(beams, [(1, -1.0), (2, -2.0)])
    for beam, pairs in zip(beams.live, ([(END, -1.0)], [(3, -1.0)]), strict=True):
        beams.found[beam.slot] = tuple(Candidate(*pair) for pair in pairs)
    children = beams.advance()
    [(slot, child)] = beams.seat(children).items()
    assert (slot.index, child.parent.slot.index) == (0, 1)


def test_beams_that_were_given_up_come_back_as_they_were() -> None:
    beams = group(3)
    advance(beams, [(1, -1.0), (2, -2.0), (3, -3.0)])
    advance(beams, [(4, -1.0), (5, -1.5)], [(6, -9.0)], [(7, -9.0), (8, -9.0)])
    advance(beams, [(9, -1.0)], [(9, -1.0), (8, -1.25)], [(1, -1.0)])
    before = state(beams)
    assert [tokens for tokens, _ in before] == [[1, 4, 9], [1, 5, 9], [1, 5, 8]]
    beams.found[beams.live[0].slot] = ()  # had arrived when all yielded
    beams.give_up()
    assert output(beams.slots[0].tokens) == [1]
    assert [output(slot.tokens) for slot in beams.slots[1:]] == [[], []]
    assert (beams.num_tokens, beams.found) == (5, {})
    known: list[list[list[int]]] = []
    while beams.behind:
        for beam in beams.live:
            beams.found[beam.slot] = ()
        go_on(beams, beams.advance())
        known.append(sorted(tokens for tokens, _ in state(beams)))
    assert known == [[[1, 4], [1, 5]], [[1, 4, 9], [1, 5, 8], [1, 5, 9]]]
    assert state(beams) == before


def test_beams_may_be_given_up_again_while_they_come_back() -> None:
    beams = group(2)
    advance(beams, [(1, -1.0), (2, -2.0)])
    advance(beams, [(3, -1.0)], [(4, -1.0)])
    before = state(beams)
    beams.give_up()
    for beam in beams.live:
        beams.found[beam.slot] = ()
    go_on(beams, beams.advance())
    beams.give_up()
    assert output(beams.slots[0].tokens) == []
    while beams.behind:
        for beam in beams.live:
            beams.found[beam.slot] = ()
        go_on(beams, beams.advance())
    assert state(beams) == before


def test_one_beam_is_given_up_as_it_is() -> None:
    beams = group(1)
    advance(beams, [(1, -1.0)])
    beams.give_up()
    assert not beams.behind
    assert state(beams) == [([1], -1.0)]


def test_what_is_reported_belongs_to_each_text() -> None:
    def row(token_id: int) -> RowLogprobs:
        return RowLogprobs(token_id, -1.0, 1, (), ())

    beams = group(2)
    beams.found[beams.slots[0]] = tuple(Candidate(one, -1.0, row(one)) for one in (1, 2))
    go_on(beams, beams.advance())
    for beam in beams.live:
        beams.found[beam.slot] = (Candidate(3, -1.0, row(3)),)
    go_on(beams, beams.advance())
    told = [rows_of(beam.told) for beam in beams.live]
    assert told == [(row(1), row(3)), (row(2), row(3))]
    assert rows_of(None) is None
    long: Told | None = None
    for one in range(50_000):  # neither read nor freed by recursion
        long = Told(row(one), long)
    rows = rows_of(long)
    assert rows is not None
    assert [rows[0].token_id, rows[-1].token_id] == [0, 49_999]
    del long, rows


def test_common_lengths() -> None:
    def of(*sequences: list[int]) -> int:
        return common_length([array("q", one) for one in sequences])

    assert of([1, 2, 3]) == 3
    assert of([1, 2, 3], [1, 2, 3]) == 3
    assert of([1, 2, 3], [1, 2, 4], [1, 2, 3]) == 2
    assert of([1, 2], [2, 2]) == 0
    assert of([1, 2], [1, 2, 3]) == 2
