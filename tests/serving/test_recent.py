"""Counts of the last tokens, against counting them anew each time."""

from __future__ import annotations

from array import array
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.serving.edits import Floats, Ids, address_of
from onnxport.serving.params import SamplingParams
from onnxport.serving.recent import ROOM, RecentCounts
from onnxport.serving.rules import LogitRules, logit_rules
from onnxport.serving.sampling import Position, row_params
from tests.serving.test_rules import VOCAB, make_request
from tests.tiers import examples


def told(found: tuple[Ids, Floats]) -> dict[int, float]:
    ids, counts = found
    assert ids.dtype == np.int64
    assert counts.dtype == np.float32
    assert len({*ids.tolist()}) == len(ids) == len(counts)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def wanted(tokens: list[int], last_n: int) -> dict[int, int]:
    return dict(Counter(tokens if last_n < 0 else tokens[max(0, len(tokens) - last_n) :]))


@settings(max_examples=examples(150), deadline=None)
@given(
    last_n=st.sampled_from([-1, 1, 2, 5, 64, 100, 1000]),
    width=st.sampled_from([2, 9, 400]),
    prompt=st.integers(1, 200),
    steps=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12),
    seed=st.integers(0, 999),
)
def test_counts_are_those_of_the_last_tokens(
    last_n: int, width: int, prompt: int, steps: list[tuple[int, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    tokens = array("q", rng.integers(0, width, prompt).tolist())
    counts = RecentCounts(last_n)
    assert told(counts.read(tokens)) == wanted(tokens.tolist(), last_n)
    for more, ahead in steps:
        tokens.extend(rng.integers(0, width, more).tolist())
        found = counts.read(tokens)
        expected = wanted(tokens.tolist(), last_n)
        assert told(found) == expected
        if len(found[0]):
            assert tuple(map(address_of, found)) == counts.addresses
        assumed = rng.integers(0, width, ahead).tolist()
        guessed = wanted([*tokens.tolist(), *assumed], last_n)
        assert told(counts.with_more(assumed)) == guessed
        assert told(counts.read(tokens)) == expected  # guesses left no trace


def test_room_grows() -> None:
    tokens = array("q", [1])
    counts = RecentCounts(-1)
    for token_id in range(5 * ROOM):
        counts.read(tokens)
        tokens.append(token_id)
    assert told(counts.read(tokens)) == wanted(tokens.tolist(), -1)


def rules_of(**given: object) -> LogitRules:
    rules = logit_rules(SamplingParams(**given), (), VOCAB, None)  # type: ignore[arg-type]
    assert rules is not None
    return rules


@pytest.mark.parametrize(
    ("given", "most"),
    [
        ({"repetition_penalty": 1.1, "repeat_last_n": 8}, 8),
        ({"frequency_penalty": 1.0, "repeat_last_n": 8}, 8),
        ({"frequency_penalty": 1.0, "repeat_last_n": 500}, 130),
        ({"frequency_penalty": 1.0, "repeat_last_n": -1}, 130),
        ({"frequency_penalty": 1.0}, 30),
        ({"repetition_penalty": 1.1}, 130),
        ({"repetition_penalty": 0.9, "repeat_last_n": 8}, None),
        ({"repetition_penalty": 1.1, "repeat_last_n": 8, "logit_bias": {3: -1.0}}, 9),
    ],
)
def test_how_many_logits_may_fall(given: dict[str, object], most: int | None) -> None:
    assert rules_of(**given).most_lowered(100, 30) == most


def test_no_window_is_no_penalty() -> None:
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=1.0, repeat_last_n=0)
    assert logit_rules(params, (), VOCAB, None) is None
    assert make_request(params, [1, 2], []).rules is None


def test_penalties_of_a_window_by_hand() -> None:
    """All three look at the last four tokens, of which two are the prompt's."""
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, repeat_last_n=4
    )
    request = make_request(params, [9, 3, 4], [4, 5])
    edits = row_params(Position(request)).edits
    assert edits is not None
    found = dict(zip(edits.seen.tolist(), edits.counts.tolist(), strict=True))
    assert found == {3: 1.0, 4: 2.0, 5: 1.0}
    assert (edits.repetition, edits.presence, edits.frequency) == (2.0, 0.5, 0.25)
    edits = row_params(Position(request, (7, 7))).edits
    assert edits is not None
    found = dict(zip(edits.seen.tolist(), edits.counts.tolist(), strict=True))
    assert found == {4: 1.0, 5: 1.0, 7: 2.0}
