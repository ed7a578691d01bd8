"""The sampler `infill`: what it leaves, against a slow copy of its rules, and in an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.errors import RequestError
from onnxport.serving.edits import RowEdits
from onnxport.serving.infill_sampler import InfillRule, filled, left
from onnxport.serving.params import SamplingParams
from onnxport.serving.row_params import RowParams, exact_allowed, exact_logits, summary_scale
from onnxport.serving.structured.spec import StructuredOutputs
from tests.serving.helpers import null_engine, reasons, run, submit, tokens
from tests.serving.prophet import Prophet
from tests.serving.test_sampling_engine import PREFIX, TOKENIZER, VOCAB
from tests.tiers import examples

PIECES = ("a", "ab", "abc", "b", "bc", "", "c", "ca", "é", "x", "y", "z")
ALIKE = ("a", "ab", "a", "ab", "abc", "", "b", "a", "", "b")  # tokens may have one text
ENDS = frozenset({5, 9})
RULE = InfillRule(ENDS, lambda one: PIECES[one].encode())


def slow(ids: list[int], chances: list[float], pieces: Sequence[str] = PIECES) -> set[int]:
    """What llama.cpp leaves of tokens, the likeliest first; none: its end-of-text token."""
    end = sum(chance for one, chance in zip(ids, chances, strict=True) if one in ENDS)
    if 3 * end * len(ids) > sum(chances) - end:
        return {one for one in ids if one in ENDS}
    own = dict(zip(ids, chances, strict=True))
    alive = dict.fromkeys(ids, True)
    for one in ids:
        for other in ids:
            if not alive[one]:
                break
            text = "" if one in ENDS else pieces[one]
            longer = "" if other in ENDS else pieces[other]
            if one == other or not alive[other] or not text or not longer.startswith(text):
                continue
            loser = one if own[other] > own[one] else other
            own[other if loser == one else one] += own[loser]
            own[loser], alive[loser] = 0.0, False
    kept = [one for one in ids if own[one] >= 0.2 or one in ENDS]
    texts = [one for one in kept if one not in ENDS]
    if not texts:
        return set()
    total = sum(own[one] for one in kept)
    return {one for one in kept if one in ENDS or own[one] / total >= 1 / (len(texts) + 1)}


@given(
    st.lists(st.floats(0.001, 1.0), min_size=10, max_size=10),
    st.integers(1, 10),
    st.sampled_from([PIECES, ALIKE]),
)
def test_what_is_left(weights: list[float], count: int, pieces: Sequence[str]) -> None:
    order = sorted(range(10), key=lambda one: -weights[one])[:count]
    chances = np.array([weights[one] for one in order])
    chances /= chances.sum()
    rule = InfillRule(ENDS, lambda one: pieces[one].encode())
    found = {*left(np.array(order), chances, rule).tolist()}
    assert found == slow(order, chances.tolist(), pieces)


@pytest.mark.parametrize(
    ("chances", "expected"),
    [
        ({0: 0.6, 3: 0.4}, [0, 3]),
        ({0: 0.9, 3: 0.1}, [0]),
        ({0: 0.4, 1: 0.35, 3: 0.25}, [0]),  # "ab" counts for "a", and "b" is under a third
        ({0: 0.27, 1: 0.26, 2: 0.255, 3: 0.215}, [0]),  # "abc" counts for it, too
        (
            {3: 0.3, 1: 0.28, 2: 0.22, 6: 0.2},
            [3, 1],
        ),  # what is merged may be more than the likeliest
        ({6: 0.19, 8: 0.19, 3: 0.19, 0: 0.15, 9: 0.001}, []),
        ({0: 0.7, 9: 0.3}, [9]),
        ({0: 0.99, 5: 0.01}, [0, 5]),
        ({0: 0.5, 3: 0.498, 5: 0.001, 9: 0.001}, [0, 3, 5, 9]),
    ],
)
def test_examples(chances: dict[int, float], expected: list[int]) -> None:
    ids = np.array([*chances])
    assert left(ids, np.array([*chances.values()]), RULE).tolist() == expected


def row(chances: dict[int, float], **more: Any) -> tuple[np.ndarray[Any, Any], RowParams]:
    logits = np.full(len(PIECES), -200.0, np.float32)  # which weighs nothing
    for one, chance in chances.items():
        logits[one] = math.log(chance)
    return logits, RowParams(**{"temperature": 1.0, "infill": RULE, **more})


def allowed(logits: np.ndarray[Any, Any], params: RowParams) -> list[int] | None:
    found = filled(logits, params)
    assert found.infill is None
    if found.edits is None or found.edits.allowed is None:
        return None
    assert not found.truncated
    return found.edits.allowed.tolist()  # type: ignore[no-any-return]


def test_a_row() -> None:
    sure = {0: 0.55, 3: 0.44}
    assert allowed(*row(sure)) == [0, 3]
    assert allowed(*row(sure, top_k=1)) is None  # the likeliest anyway
    assert allowed(*row(sure, temperature=0.0)) is None
    assert allowed(*row(sure, top_p=0.5)) == [0]
    assert allowed(*row(sure, min_p=0.9)) == [0]
    assert allowed(*row(sure, temperature=0.05)) == [0]
    unsure = {6: 0.18, 8: 0.17, 3: 0.17, 0: 0.16, 10: 0.16, 11: 0.16}
    assert allowed(*row(unsure, top_k=6)) == [5]  # an end, though none was among the likeliest
    assert allowed(*row(unsure, edits=RowEdits(banned=np.array([5, 9])))) == [6]
    mask = np.array([0b0000001001], np.uint32)
    assert allowed(*row({**sure, 8: 0.9}, mask=mask)) == [0, 3]
    edits = RowEdits(bias_ids=np.array([3]), bias=np.array([9.0], np.float32))
    assert allowed(*row(sure, edits=edits)) == [3]
    logits, params = row(sure)
    logits[:] = np.nan
    assert allowed(logits, params) is None


def test_how_many_tokens_are_looked_at() -> None:
    """An end that is not among the likeliest 128 does not count, however many others there are."""
    pieces = InfillRule(frozenset({199}), lambda one: bytes([one + 1, 0]))
    for place, expected in ((126, [0, 199]), (128, [0])):
        logits = np.full(200, -9.0, np.float32)
        logits[0], logits[1:200], logits[199] = 9.0, np.linspace(-1.0, -2.0, 199), -1.0
        order = np.argsort(-logits, kind="stable").tolist()
        order.remove(199)
        logits[199] = (logits[order[place - 1]] + logits[order[place]]) / 2
        assert allowed(logits, RowParams(1.0, infill=pieces)) == expected


def test_all_logits_count() -> None:
    _, params = row({0: 1.0}, top_k=4)
    assert exact_logits(params) == 0
    assert exact_logits(params._replace(infill=None)) == 4
    assert exact_allowed(params) == exact_allowed(params._replace(top_k=None))
    assert summary_scale(params, is_edited=False, is_masked=False) < 0
    assert params._replace(top_k=None).per_unit == 0.0


more = st.fixed_dictionaries(
    {"seed": st.integers(0, 9), "n": st.sampled_from([1, 3]), "max_tokens": st.integers(1, 12)},
    optional={
        "temperature": st.sampled_from([0.05, 0.3]),
        "top_k": st.sampled_from([3, 40]),
        "top_p": st.just(0.9),
        "typical_p": st.just(0.8),
        "dynatemp_range": st.just(0.3),
        "min_tokens": st.just(1),
        "logprobs": st.just(2),
        "ignore_eos": st.just(True),
    },
)


@settings(max_examples=examples(12))
@given(st.lists(more, min_size=2, max_size=4))
def test_batched_or_alone(requests: list[dict[str, Any]]) -> None:
    engine = null_engine(vocab_size=VOCAB, tokenizer=TOKENIZER, max_num_seqs=16)
    params = [SamplingParams(infill=True, **one) for one in requests]
    for number, one in enumerate(params):
        submit(engine, str(number), PREFIX, one)
    deltas = run(engine)
    for number, one in enumerate(params):
        other = null_engine(vocab_size=VOCAB, tokenizer=TOKENIZER, max_num_seqs=16)
        submit(other, "alone", PREFIX, one)
        found = run(other)["alone"]
        for index in range(one.n):
            assert tokens(deltas[str(number)], index) == tokens(found, index)
        assert "error" not in reasons(deltas[str(number)])


def test_what_it_needs() -> None:
    engine = null_engine(vocab_size=VOCAB)
    with pytest.raises(RequestError, match="tokenizer"):
        submit(engine, "a", PREFIX, SamplingParams(infill=True))
    with pytest.raises(RequestError, match="draws nothing"):
        SamplingParams(infill=True, use_beam_search=True)
    with pytest.raises(RequestError, match="true or false"):
        SamplingParams(infill=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "first"),
    [
        ({"dry_multiplier": 1.0}, "dry_sequence_breakers"),
        ({"thinking_token_budget": 1}, "thinking_token_budget"),
        ({"bad_words": ("a",)}, "infill"),
        ({"logit_bias": {VOCAB: 1.0}}, "infill"),
    ],
)
def test_which_of_two_faults_is_told(more: dict[str, Any], first: str) -> None:
    engine = null_engine(vocab_size=VOCAB)
    with pytest.raises(RequestError) as told:
        engine.prepare("a", [1], SamplingParams(infill=True, **more))
    assert told.value.param == first


def test_what_says_nothing() -> None:
    """Greedily, and with Mirostat, tokens are those without."""
    for fields in ({"temperature": 0.0}, {"top_k": 1}, {"mirostat": 2, "seed": 4}):
        found = []
        for infill in (False, True):
            engine = null_engine(vocab_size=VOCAB, tokenizer=TOKENIZER)
            submit(engine, "a", PREFIX, SamplingParams(infill=infill, max_tokens=9, **fields))  # type: ignore[arg-type]
            found.append(tokens(run(engine)["a"]))
        assert found[0] == found[1]


def test_a_probability_that_is_aimed_at_counts_behind_it() -> None:
    """Adaptive-p draws from what the filling leaves, by what that is a part of."""
    logits, params = row({0: 0.6, 3: 0.38, 6: 0.02}, target=0.38, uniform=0.99)
    filled_row = filled(logits, params)
    assert filled_row.target == 0.38
    assert filled_row.edits is not None
    assert filled_row.edits.allowed is not None
    assert filled_row.edits.allowed.tolist() == [0, 3]


def output(params: SamplingParams, speculator: Prophet | None = None, **config: Any) -> list[int]:
    engine = null_engine(vocab_size=VOCAB, tokenizer=TOKENIZER, speculator=speculator, **config)
    submit(engine, "a", PREFIX, params)
    return tokens(run(engine)["a"])


def test_guesses_change_no_token() -> None:
    params = SamplingParams(infill=True, temperature=0.4, seed=5, max_tokens=24, ignore_eos=True)
    wanted = output(params)
    for errs in (0, 3):
        speculator = Prophet(lambda _: wanted)
        speculator.errs = errs
        assert output(params, speculator) == wanted
        assert speculator.num_accepted > 5


def test_a_form_is_obeyed() -> None:
    """What it forbids is not looked at; where it allows no end, another token comes."""
    params = SamplingParams(
        **{"infill": True, "seed": 2, "max_tokens": 64},  # type: ignore[arg-type]
        structured_outputs=StructuredOutputs(regex="[a-d]{12}"),
    )
    text = TOKENIZER.decode(output(params))
    assert len(text) == 12
    assert {*text} <= {*"abcd"}


def test_what_is_told_of_what_was_left() -> None:
    """With `logprobs_mode` "processed_logprobs" the tokens that stay have all probability."""
    engine = null_engine(vocab_size=VOCAB, tokenizer=TOKENIZER, logprobs_mode="processed_logprobs")
    params = SamplingParams(infill=True, seed=2, max_tokens=9, logprobs=20, temperature=0.3)
    submit(engine, "a", PREFIX, params)
    entries = [one for delta in run(engine)["a"] for one in delta.logprobs or ()]
    assert entries
    for entry in entries:
        chances = [math.exp(one.logprob) for one in entry.values()]
        assert sum(chances) == pytest.approx(1.0, abs=1e-4)
        assert sum(chance > 0.0 for chance in chances) < 9
