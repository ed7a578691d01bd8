"""DRY against its definition in plain loops, and in the engine."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.errors import RequestError
from onnxport.serving.dry import LONGEST, MOST_LOWERED, Dry, Repetitions, dry_of, with_penalties
from onnxport.serving.params import SamplingParams
from onnxport.serving.rules import SequenceRules, logit_rules
from tests.serving.helpers import alone, null_engine, run, submit, tokens
from tests.serving.prophet import Prophet
from tests.serving.structured import tokenizer
from tests.tiers import examples

VOCAB = 8


class Breaking(Dry):
    """Token 7 is a breaker."""

    def breaks(self, token_ids: Sequence[int]) -> list[bool]:  # type: ignore[override]
        return [token_id == 7 for token_id in token_ids]


def slowly(dry: Dry, sequence: Sequence[int]) -> dict[int, float]:
    """What is subtracted from each token's logit, place by place and token by token."""
    if dry.last_n >= 0:
        sequence = sequence[max(0, len(sequence) - dry.last_n) :]
    found: dict[int, float] = {}
    for place in range(1, len(sequence)):
        if sequence[place] == 7:
            continue
        length = 0
        while length < min(place, LONGEST):
            one, other = sequence[place - 1 - length], sequence[len(sequence) - 1 - length]
            if one != other or one == 7:
                break
            length += 1
        if length and length >= dry.allowed_length:
            by = min(dry.multiplier * dry.base ** (length - dry.allowed_length), MOST_LOWERED)
            found[sequence[place]] = max(found.get(sequence[place], 0.0), by)
    return found


def told(repetitions: Repetitions, read: Sequence[int], *assumed: int) -> dict[int, float]:
    ids, penalties = repetitions.penalties(array("q", read), assumed)
    assert len({*ids.tolist()}) == len(ids)
    return dict(zip(ids.tolist(), (-penalties).tolist(), strict=True))


@settings(max_examples=examples(200), deadline=None)
@given(
    sequence=st.lists(st.sampled_from([0, 1, 2, 7]), min_size=2, max_size=60),
    allowed=st.integers(0, 4),
    last_n=st.sampled_from([-1, -1, 1, 2, 5, 20, 1000]),
    first=st.integers(1, 60),
    guessed=st.integers(0, 6),
)
def test_penalties_are_those_of_plain_loops(
    sequence: list[int], allowed: int, last_n: int, first: int, guessed: int
) -> None:
    """However many tokens are read at once, and whether some of them are guessed."""
    dry = Breaking(0.8, 1.75, allowed, last_n)
    prompt = min(first, len(sequence))
    siblings = Repetitions(dry, prompt), Repetitions(dry, prompt)
    for size in range(prompt, len(sequence) + 1):
        start = max(1, size - guessed)
        read, assumed = sequence[:start], sequence[start:size]
        expected = pytest.approx(slowly(dry, sequence[:size]))
        assert told(Repetitions(replace(dry), start), read, *assumed) == expected
        for one in siblings:
            assert told(one, sequence[:size]) == expected
            for end in range(size, min(size + guessed, len(sequence)) + 1):
                guesses = sequence[size:end]
                assert told(one, sequence[:size], *guesses) == pytest.approx(
                    slowly(dry, sequence[:end])
                )
            wrong = [*sequence[size : size + 1], 2]
            assert told(one, sequence[:size], *wrong) == pytest.approx(
                slowly(dry, [*sequence[:size], *wrong])
            )


@settings(max_examples=examples(100), deadline=None)
@given(
    begun=st.lists(st.sampled_from([0, 1, 2, 7]), min_size=1, max_size=80),
    ends=st.lists(st.lists(st.sampled_from([0, 1, 2, 7]), max_size=20), min_size=2, max_size=3),
    prompt=st.integers(1, 80),
)
def test_what_is_forked_goes_on_on_its_own(
    begun: list[int], ends: list[list[int]], prompt: int
) -> None:
    dry = Breaking(0.8, 1.75, 1, -1)
    first = Repetitions(dry, min(prompt, len(begun)))
    told(first, begun, 1)
    each = [first, *(first.fork() for _ in ends[1:])]
    for size in range(max(map(len, ends)) + 1):
        for one, end in zip(each, ends, strict=True):
            sequence = [*begun, *end[:size]]
            assert told(one, sequence) == pytest.approx(slowly(dry, sequence))


def test_longest_repetitions() -> None:
    dry = Dry(1.0, 1.01, 2, -1)
    sequence = [3] * (2 * LONGEST)
    assert told(Repetitions(dry, len(sequence)), sequence) == pytest.approx(
        {3: 1.01 ** (LONGEST - 2)}
    )
    gradually = Repetitions(replace(dry), 1)
    for size in range(1, len(sequence) + 1):
        found = told(gradually, sequence[:size])
    assert found == pytest.approx({3: 1.01 ** (LONGEST - 2)})
    most = Repetitions(Dry(1.0, 100.0, 2, -1), 300)
    assert told(most, sequence) == {3: MOST_LOWERED}


def test_long_prompts_of_few_words() -> None:
    """Where many places are the same as the end, and then few."""
    dice = random.Random(2)
    sequence = [dice.choice([0, 0, 0, 1, 2]) for _ in range(600)]
    for end in (sequence, [*sequence, *sequence[100:130]], [0] * 400 + [1] + [0] * 300):
        dry = Dry(0.8, 1.1, 2, -1)
        assert told(Repetitions(dry, len(end)), end) == pytest.approx(slowly(dry, end))


def test_biases_and_penalties_of_one_token_add_up() -> None:
    ids, values = with_penalties(
        np.array([5, 2]), np.array([1.0, 3.0], np.float32), np.array([2, 9]), np.float32([-1, -2])
    )
    assert dict(zip(ids.tolist(), values.tolist(), strict=True)) == {2: 2.0, 5: 1.0, 9: -2.0}


def test_breakers_are_tokens_with_their_text_and_special_ones() -> None:
    text = tokenizer()
    dry = dry_of(SamplingParams(dry_multiplier=1.0), text)
    assert dry is not None
    newline, letter, quote = (text.encode(one)[-1] for one in ("a\n", "a", 'a"'))
    [special, *_] = [one for one in text.eos_token_ids if text.is_special(one)]
    assert dry.breaks([newline, letter, quote, special]) == [True, False, True, True]
    dry = dry_of(SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=("a",)), text)
    assert dry is not None
    assert dry.breaks([newline, letter, special]) == [False, True, True]


def test_what_asks_for_nothing() -> None:
    assert dry_of(SamplingParams(dry_base=3.0), None) is None
    assert dry_of(SamplingParams(dry_multiplier=1.0, dry_penalty_last_n=0), None) is None
    with pytest.raises(RequestError, match="dry_sequence_breakers holds"):
        SamplingParams(dry_sequence_breakers=("\ud800",))
    with pytest.raises(RequestError, match="give a list of texts"):
        SamplingParams(dry_sequence_breakers=5)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="need a tokenizer"):
        dry_of(SamplingParams(dry_multiplier=1.0), None)
    dry = dry_of(SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=()), None)
    assert dry is not None
    assert dry.breaks([0]) == [False]


def test_rules_of_a_sequence() -> None:
    """Of biases it is a part; so it is there with drafts, and counts as logits that fall."""
    params = SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=(), logit_bias={4: 2.0})
    rules = logit_rules(params, (), 40, None, None, dry_of(params, None))
    assert rules is not None
    assert rules.most_lowered(10, 5) is None  # the bias raises one
    sequence = SequenceRules(rules, 4)
    edits = sequence.edits(array("q", [4, 5, 3, 4]), [5])
    assert edits.addresses is None
    assert dict(zip(edits.bias_ids.tolist(), edits.bias.tolist(), strict=True)) == {3: -1.0, 4: 2.0}
    edits = sequence.edits(array("q", [4, 5, 3, 4]))
    assert edits.addresses is not None
    assert edits.bias_ids.tolist() == [4]
    plain = SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=())
    rules = logit_rules(plain, (), 40, None, None, dry_of(plain, None))
    assert rules is not None
    assert rules.most_lowered(10, 5) == 15


def test_no_two_tokens_follow_one_another_twice() -> None:
    """Where that is lowered by more than logits differ; drawn from four tokens it has to happen."""
    params: dict[str, Any] = {"max_tokens": 40, "seed": 1, "dry_sequence_breakers": ()}
    params["logit_bias"] = dict.fromkeys(range(5, 9), 9)
    prompt = [5, 6, 7, 8, 5]
    free = [*prompt, *alone(prompt, SamplingParams(**params))]
    assert len({*pairwise(free)}) < len(free) - 1
    given = SamplingParams(**params, dry_multiplier=100.0, dry_allowed_length=1)
    kept = [*prompt, *alone(prompt, given)]
    assert len({*pairwise(kept)}) == len(kept) - 1


@pytest.mark.parametrize("errs", [0, 3])
def test_guesses_change_nothing(errs: int) -> None:
    """Penalties of a guessed token's place are those of the tokens before it, guessed ones too."""
    params = SamplingParams(
        **{"max_tokens": 30, "seed": 1, "dry_multiplier": 2.0, "dry_sequence_breakers": ()},
        **{"logit_bias": dict.fromkeys(range(5, 9), 9), "n": 2, "xtc_probability": 0.5},
    )  # type: ignore[arg-type]
    prompt = [5, 6, 7, 8, 5]
    prophet = Prophet(lambda request: alone(prompt, params, request.index))
    prophet.errs = errs
    engine = null_engine(speculator=prophet, enable_prefix_caching=False)
    submit(engine, "r", prompt, params)
    deltas = run(engine)
    for index in range(2):
        assert tokens(deltas["r"], index) == alone(prompt, params, index)
    assert prophet.num_accepted > (0 if errs else 40)
