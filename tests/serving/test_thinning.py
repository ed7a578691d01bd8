"""What llama.cpp's users leave tokens out by: top_n_sigma, typical_p and XTC."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxport.errors import RequestError
from onnxport.serving.drawing import thinned
from onnxport.serving.params import SamplingParams
from onnxport.serving.row_params import NOTHING_LEFT_OUT, RowParams, Thinning
from onnxport.serving.sampling import Position, row_params
from tests.serving.samplers import Sampler, sampler_named
from tests.serving.sampling_cases import KINDS, make_logits
from tests.serving.slow_sampling import SLACK, probabilities
from tests.serving.test_rules import make_request
from tests.tiers import examples

Floats = NDArray[np.float32]
SAMPLERS = ("numpy", "portable", "avx2", "avx512")
NUDGE = 1e-5


@pytest.fixture(params=SAMPLERS)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return sampler_named(request.param)


def kept(sampler: Sampler, chances: list[float], row: RowParams) -> dict[int, float]:
    """How often each token is drawn of tokens with these chances, by numbers all over [0, 1)."""
    number = 1000
    logits = np.repeat(np.log(np.array([chances], np.float32)), number, axis=0)
    rows = [row._replace(uniform=(i + 0.5) / number) for i in range(number)]
    drawn = sampler.sample(logits, rows).token_ids
    return {token: drawn.count(token) / number for token in sorted({*drawn})}


def test_xtc_leaves_out_all_likely_choices_but_the_last(sampler: Sampler) -> None:
    chances = [0.05, 0.5, 0.15, 0.3]
    row = RowParams(1.0, thinning=Thinning(xtc_threshold=0.1))
    assert kept(sampler, chances, row) == pytest.approx({0: 0.25, 2: 0.75}, abs=2e-3)
    row = row._replace(thinning=Thinning(xtc_threshold=0.4))  # one alone is a likely choice
    assert kept(sampler, chances, row) == pytest.approx(dict(enumerate(chances)), abs=2e-3)
    row = row._replace(thinning=Thinning(xtc_threshold=0.0))
    assert kept(sampler, chances, row) == {0: 1.0}


def test_what_xtc_leaves_may_weigh_nothing_beside_the_rest(sampler: Sampler) -> None:
    logits = np.random.default_rng(1).normal(0, 15, (1, 1000)).astype(np.float32)
    for threshold in (0.0, 1e-15):
        thinning = Thinning(xtc_threshold=threshold)
        rows = [RowParams(1.0, uniform=i / 60, thinning=thinning) for i in range(60)]
        drawn = {*sampler.sample(np.repeat(logits, 60, axis=0), rows).token_ids}
        weights = np.exp(logits[0].astype(np.float64) - logits.max())
        likely = weights >= max(threshold * weights.sum(), math.exp(-87))
        assert weights[[*drawn]].max() <= weights[likely].min() * 1.0001


def test_xtc_looks_at_what_top_p_left(sampler: Sampler) -> None:
    """0.5, 0.3 and 0.15 are left, 0.53, 0.32 and 0.16 of what is left."""
    row = RowParams(1.0, None, 0.9, thinning=Thinning(xtc_threshold=0.2))
    assert kept(sampler, [0.05, 0.5, 0.15, 0.3], row) == pytest.approx(
        {2: 1 / 3, 3: 2 / 3}, abs=2e-3
    )
    row = row._replace(thinning=Thinning(xtc_threshold=0.01))  # all of it, and what it cut off
    assert kept(sampler, [0.05, 0.5, 0.15, 0.3], row) == {2: 1.0}


def test_typical_tokens_are_those_that_surprise_as_expected(sampler: Sampler) -> None:
    """Surprises are 0.51, 1.61, 2.30 and 2.30, the entropy is 1.09."""
    chances = [0.6, 0.2, 0.1, 0.1]
    assert kept(sampler, chances, RowParams(1.0, thinning=Thinning(typical_p=0.15))) == {1: 1.0}
    row = RowParams(1.0, thinning=Thinning(typical_p=0.3))
    assert kept(sampler, chances, row) == pytest.approx({0: 0.75, 1: 0.25}, abs=2e-3)
    row = RowParams(1.0, thinning=Thinning(typical_p=0.85))
    assert kept(sampler, chances, row) == pytest.approx({0: 2 / 3, 1: 2 / 9, 2: 1 / 9}, abs=2e-3)


def test_top_n_sigma_is_of_the_logits_whatever_the_temperature(sampler: Sampler) -> None:
    """The deviation of 0, 2 and 4 is 1.63."""
    logits = np.repeat(np.array([[0, 4, 2, -np.inf]], np.float32), 400, axis=0)
    for temperature, (sigma, expected) in product(
        (0.5, 50.0), ((1.2, {1}), (1.3, {1, 2}), (2.4, {1, 2}), (2.5, {0, 1, 2}))
    ):
        thinning = Thinning(sigma)
        rows = [RowParams(temperature, uniform=i / 400, thinning=thinning) for i in range(400)]
        drawn = {*sampler.sample(logits, rows).token_ids}
        assert drawn == expected if temperature > 1 else drawn <= expected


@st.composite
def rows(draw: st.DrawFn) -> RowParams:
    return RowParams(
        temperature=draw(st.sampled_from([1e-3, 0.4, 1.0, 2.5, 100.0])),
        top_k=draw(st.sampled_from([None, None, 2, 40])),
        top_p=draw(st.sampled_from([0.3, 0.9, 0.9999, 1.0, 1.0])),
        uniform=draw(st.floats(0, 1, exclude_max=True)),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-4, 0.07])),
        thinning=Thinning(
            draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 2.5])),
            draw(st.sampled_from([1.0, 0.01, 0.2, 0.5, 0.95])),
            draw(st.sampled_from([NOTHING_LEFT_OUT, 1e-3, 0.01, 0.1, 0.4])),
        ),
    )


def nudged(row: RowParams) -> Iterator[SamplingParams]:
    """The parameters, and such as rounding may make of them."""
    assert row.thinning is not None
    sigma, typical_p, threshold = row.thinning
    signs = [(0, -1, 1)] * 5
    for off in product(*signs):
        by = [1 + NUDGE * sign for sign in off]
        values = [row.top_p, row.min_p, sigma, typical_p, threshold]
        neutral = [1.0, 0.0, 0.0, 1.0, NOTHING_LEFT_OUT]
        if any(sign and one == at for sign, one, at in zip(off, values, neutral, strict=True)):
            continue
        top_p, min_p, sigma_, typical, xtc = (a * b for a, b in zip(values, by, strict=True))
        yield SamplingParams(
            row.temperature,
            min(1.0, top_p),
            row.top_k,
            min_p=min(1.0, min_p),
            top_n_sigma=sigma_,
            typical_p=min(1.0, typical),
            xtc_probability=float(threshold <= 1.0),
            xtc_threshold=min(1.0, xtc),
        )


def possible(logits: list[float], row: RowParams) -> set[int]:
    found = set()
    for params in nudged(row):
        end = 0.0
        for token_id, probability in probabilities(logits, params).items():
            start, end = end, end + probability
            if start - SLACK <= row.uniform < end + SLACK:
                found.add(token_id)
    return found


@settings(max_examples=examples(60), deadline=None)
@given(
    row=rows(),
    vocab=st.sampled_from([1, 2, 17, 64, 200]),
    kind=st.sampled_from([kind for kind in KINDS if kind != "ties"]),
    seed=st.integers(0, 99),
)
def test_what_is_drawn_is_what_plain_loops_allow(
    row: RowParams, vocab: int, kind: str, seed: int
) -> None:
    logits = make_logits(kind, vocab, seed)
    choice = possible(logits.tolist(), row)
    for name in ("numpy", "portable"):
        with np.errstate(over="ignore"):  # huge ones
            assert {*sampler_named(name).sample(logits[None], [row]).token_ids} <= choice


def test_wide_rows(sampler: Sampler) -> None:
    """More tokens than are ever sorted for any other parameter."""
    logits = np.random.default_rng(5).normal(0, 2, (1, 50_000)).astype(np.float32)
    for number in (0.0, 0.2, 0.7, 0.999):
        for thinning in (Thinning(3.0), Thinning(0.0, 0.6), Thinning(0.0, 1.0, 1e-4)):
            row = RowParams(1.0, uniform=number, thinning=thinning)
            [token] = sampler.sample(logits, [row]).token_ids
            [expected] = sampler_named("numpy").sample(logits, [row]).token_ids
            assert abs(float(logits[0, token]) - float(logits[0, expected])) < 1e-3


def test_chance_is_of_the_request_and_the_position() -> None:
    """And not the number that a token is drawn by: half of the positions, whatever that is."""
    params = SamplingParams(xtc_probability=0.5, xtc_threshold=0.2, seed=3)
    request = make_request(params, [0] * 4, [], seed=3)
    struck, numbers = [], []
    for _ in range(2000):
        row = row_params(Position(request))
        assert row == row_params(Position(request))
        struck.append(row.thinning is not None)
        numbers.append(row.uniform)
        request.tokens.append(1)
    assert 0.45 < np.mean(struck) < 0.55
    assert 0.45 < np.mean(np.array(numbers)[struck]) < 0.55
    assert row_params(Position(request)).thinning in (None, Thinning(xtc_threshold=0.2))
    other = make_request(params, [0] * 4, [1] * 2000, seed=4)
    assert len({row_params(Position(one)).uniform for one in (request, other)}) == 2


def test_a_draft_is_drawn_as_its_tokens_would_be() -> None:
    params = SamplingParams(xtc_probability=0.5, xtc_threshold=0.2, typical_p=0.9, seed=3)
    request, later = (make_request(params, [0], output, seed=3) for output in ([], [5, 6, 7]))
    assert row_params(Position(request, (5, 6, 7))) == row_params(Position(later))


@pytest.mark.parametrize(
    ("given", "row"),
    [
        ({}, None),
        ({"top_n_sigma": -1, "typical_p": 1, "xtc_threshold": 0.3}, None),
        ({"temperature": 0.0, "typical_p": 0.5}, None),
        ({"top_n_sigma": 2}, Thinning(2)),
        ({"typical_p": 0.5}, Thinning(typical_p=0.5)),
        ({"xtc_probability": 1}, Thinning(xtc_threshold=0.1)),
    ],
)
def test_what_a_request_s_rows_are_thinned_by(
    given: dict[str, float], row: Thinning | None
) -> None:
    request = make_request(SamplingParams(**given), [0], [])  # type: ignore[arg-type]
    assert request.row.thinning == row
    assert row_params(Position(request)).thinning == row


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_n_sigma", -0.5),
        ("top_n_sigma", 101),
        ("typical_p", 0),
        ("typical_p", 1.1),
        ("xtc_probability", -0.1),
        ("xtc_threshold", 2),
        ("xtc_threshold", "x"),
        ("dry_multiplier", -1),
        ("dry_base", 0.5),
        ("dry_allowed_length", 1.5),
        ("dry_allowed_length", None),
        ("dry_penalty_last_n", -2),
        ("dry_sequence_breakers", [""]),
        ("dry_sequence_breakers", ["x" * 41]),
        ("dry_sequence_breakers", ["x"] * 65),
    ],
)
def test_bad_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name) as error:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert error.value.param == name


# Many tokens, of which few are looked at.

MANY = 40_009


def spread(kind: str, seed: int) -> Floats:
    """A row that is flat, peaked, made of lumps that a sample misses, or of many equal values."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 1, MANY)
    if kind == "wide":
        values *= 4
    elif kind == "peaks":
        values[rng.integers(0, MANY, 30)] += 14
    elif kind == "lumps":  # what is sampled, 16 of 256 values, differs from all the others
        values[np.arange(MANY) % 256 >= 16] += rng.choice([-2.0, 2.0])
    elif kind == "steps":
        values = np.round(values * 4)
    elif kind == "one":
        values[rng.integers(MANY)] += 20
    elif kind == "holes":
        values[rng.random(MANY) < 0.4] = -np.inf
    return values.astype(np.float32)


SPREADS = ("flat", "wide", "peaks", "lumps", "steps", "one", "holes")


def left_of(logits: Floats, row: RowParams) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """What is drawn from, in its order, and the ends of each token's share."""
    ids, weights = thinned(logits, row)
    sums = weights.cumsum()
    return ids, sums / sums[-1]


@settings(max_examples=examples(60), deadline=None)
@given(
    kind=st.sampled_from(SPREADS),
    seed=st.integers(0, 9),
    temperature=st.sampled_from([0.2, 0.5, 1.0, 2.0, 30.0]),
    thinning=st.sampled_from(
        [Thinning(typical_p=share) for share in (0.005, 0.1, 0.5, 0.9, 0.999)]
        + [Thinning(xtc_threshold=threshold) for threshold in (0.0, 1e-9, 1e-4, 1e-3, 0.1, 0.9)]
        + [Thinning(0.0, 0.9, 0.1), Thinning(0.0, 0.6, 1e-4)]
    ),
    top_p=st.sampled_from([1.0, 1.0, 0.9]),
    number=st.floats(0, 1, exclude_max=True),
)
def test_few_of_many_tokens_are_looked_at(
    kind: str, seed: int, temperature: float, thinning: Thinning, top_p: float, number: float
) -> None:
    """What NumPy draws, which sorts them all, or what is next to it but for rounding."""
    logits = spread(kind, seed)
    row = RowParams(temperature, None, top_p, number, thinning=thinning)
    found = [sampler_named(name).sample(logits[None], [row]) for name in SAMPLERS[1:]]
    assert found[0] == found[1] == found[2]
    ids, ends = left_of(logits, row)
    likely = {
        float(logits[ids[min(int(np.searchsorted(ends, number + off, "right")), len(ids) - 1)]])
        for off in np.linspace(-NUDGE, NUDGE, 41)
    }
    [token] = found[0].token_ids
    value = float(logits[token])
    assert min(likely) - 1e-4 <= value <= max(likely) + 1e-4


@pytest.mark.parametrize(("share", "is_whole"), [(0.02, True), (0.02, False), (0.9, False)])
def test_few_or_most_of_a_whole_vocabulary_are_typical(share: float, is_whole: bool) -> None:
    """Where a small share ends, what is looked at reaches from below the average to above it.

    Logits of -inf weigh nothing, which is asked for where there are some.
    """
    rng = np.random.default_rng(7)
    logits = rng.normal(0, 1, (10, 151_936)).astype(np.float32)
    if not is_whole:
        logits[:, ::7] = -np.inf
    row = RowParams(1.0, thinning=Thinning(typical_p=share))
    rows = [row._replace(uniform=number) for number in rng.random(len(logits)).tolist()]
    drawn = [sampler_named(name).sample(logits, rows).token_ids for name in SAMPLERS[1:]]
    assert drawn[0] == drawn[1] == drawn[2]
    for values, token, one in zip(logits, drawn[0], rows, strict=True):
        ids, ends = left_of(values, one)
        [place] = np.flatnonzero(ids == token)
        start = ends[place - 1] if place else 0.0
        assert start - NUDGE <= one.uniform <= ends[place] + NUDGE


@pytest.mark.parametrize("name", SAMPLERS[1:])
@pytest.mark.parametrize(
    "thinning", [Thinning(typical_p=0.9), Thinning(typical_p=0.3), Thinning(xtc_threshold=2e-5)]
)
def test_many_tokens_are_drawn_as_often_as_their_probabilities(
    name: str, thinning: Thinning
) -> None:
    """By numbers all over [0, 1); of equal ones each in its turn."""
    logits = spread("steps", 3)
    row = RowParams(1.5, thinning=thinning)
    number = 300
    rows = [row._replace(uniform=(i + 0.5) / number) for i in range(number)]
    drawn = sampler_named(name).sample(np.repeat(logits[None], number, axis=0), rows).token_ids
    ids, ends = left_of(logits, row)
    places = {token: place for place, token in enumerate(ids.tolist())}
    for token, one in zip(drawn, rows, strict=True):
        end = ends[places[token]]
        start = ends[places[token] - 1] if places[token] else 0.0
        assert start - NUDGE <= one.uniform <= end + NUDGE


@pytest.mark.parametrize("name", SAMPLERS[1:])
def test_one_token_of_many_has_nearly_all_probability(name: str) -> None:
    """XTC leaves it in where it alone is likely; without it, what is left weighs little."""
    logits = spread("one", 4)
    top = int(logits.argmax())
    rows = [
        RowParams(1.0, uniform=number, thinning=Thinning(xtc_threshold=threshold))
        for threshold in (0.1, 1e-9)
        for number in (0.0, 0.3, 0.7)
    ]
    drawn = sampler_named(name).sample(np.repeat(logits[None], 6, axis=0), rows).token_ids
    assert drawn[:3] == [top] * 3
    ids, _ = left_of(logits, rows[3])
    assert drawn[3] == ids[0]
    assert top not in drawn[3:]
