"""A temperature that moves, and Mirostat, against plain loops; and what they are to an engine."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxport.errors import RequestError
from onnxport.graphs.contract import ALL_ALLOWED, NO_SUMMARY
from onnxport.serving.adapting import Mirostat
from onnxport.serving.logprob_modes import processed
from onnxport.serving.params import SamplingParams
from onnxport.serving.row_params import (
    Adapting,
    RowParams,
    exact_allowed,
    exact_logits,
    summary_scale,
)
from onnxport.serving.sampling import Position, row_params
from tests.serving.samplers import ISAS, Sampler, native, sampler_named
from tests.serving.sampling_cases import KINDS, make_edits, make_logits, make_mask
from tests.serving.slow_sampling import SLACK, mirostat, possible, temperature_of
from tests.serving.test_rules import make_request
from tests.tiers import examples

Floats = NDArray[np.float32]
SAMPLERS = ("numpy", "portable", "avx2", "avx512")
NUDGE = 1e-5
kinds = st.sampled_from([kind for kind in KINDS if kind != "huge"])
numbers = st.floats(0, 1, exclude_max=True)
vocabs = st.sampled_from([1, 2, 17, 64, 300, 5000])


@pytest.fixture(params=SAMPLERS)
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return sampler_named(request.param)


def row_of(params: SamplingParams, number: float, mu: float = 0.0) -> RowParams:
    """The row of a request, as the engine makes it."""
    row = make_request(params, [0], []).row._replace(uniform=number)
    if row.adapting is not None and row.adapting.mirostat:
        row = row._replace(adapting=row.adapting._replace(mu=mu))
    return row


def test_the_temperature_is_the_higher_the_less_sure_the_model_is(sampler: Sampler) -> None:
    """Of logits that are alike it is the highest, of one that is far above all the lowest."""
    number = 400
    alike = np.zeros((number, 4), np.float32)
    sure = np.repeat(np.array([[60.0, 2.0, 0.0, 0.0]], np.float32), number, axis=0)
    params = SamplingParams(1.0, dynatemp_range=1.0)
    rows = [row_of(params, (i + 0.5) / number) for i in range(number)]
    assert (rows[0].temperature, rows[0].adapting) == (2.0, Adapting(0.0, 1.0))
    assert {*sampler.sample(alike, rows).token_ids} == {0, 1, 2, 3}
    sampled = sampler.sample(sure, rows)
    assert {*sampled.token_ids} == {0}
    assert sampled.surprises is None
    always = [row._replace(adapting=Adapting(0.0, 0.0), temperature=50.0) for row in rows]
    assert len({*sampler.sample(sure, always).token_ids}) == 4  # the power 0 is the highest


def test_one_token_that_may_come_is_drawn_at_any_temperature(sampler: Sampler) -> None:
    logits = np.array([[-np.inf, 3.0, -np.inf]], np.float32)
    for temperature in (0.0, 1.0):
        params = SamplingParams(temperature, dynatemp_range=0.5)
        assert sampler.sample(logits, [row_of(params, 0.9)]).token_ids == [1]
    for version in (1, 2):
        sampled = sampler.sample(logits, [row_of(SamplingParams(mirostat=version), 0.9, 10.0)])
        assert sampled.token_ids == [1]
        assert sampled.surprises == [pytest.approx(0.0, abs=1e-6)]


@pytest.mark.parametrize(
    "more", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {"typical_p": 0.9}], ids=str
)
def test_a_sure_row_whose_temperature_has_no_inverse(
    sampler: Sampler, more: dict[str, float]
) -> None:
    """A spread of 0.37 to the power of 100 is next to nothing; its likeliest token comes."""
    logits = np.array([[0.0, 6.0, 2.0, 1.0]], np.float32)
    for exponent in (30.0, 60.0, 100.0):
        params = SamplingParams(1.0, dynatemp_range=1.0, dynatemp_exponent=exponent, **more)
        assert sampler.sample(logits, [row_of(params, 0.999)]).token_ids == [1]


def test_rows_that_cannot_be_drawn_are_told_and_others_are_drawn(sampler: Sampler) -> None:
    logits = np.array([[np.nan, 1.0], [-np.inf, -np.inf], [1.0, 0.0]], np.float32)
    row, moving = row_of(SamplingParams(mirostat=2), 0.0, 10.0), SamplingParams(dynatemp_range=1)
    sampled = sampler.sample(logits, [row, row_of(moving, 0.0), row])
    assert sampled.invalid == (0, 1)
    assert sampled.token_ids[2] == 0
    assert sampled.surprises is not None
    assert sampled.surprises[2] == pytest.approx(math.log2(1 + math.exp(-1)), abs=1e-5)


@settings(max_examples=examples(80), deadline=None)
@given(
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    reach=st.sampled_from([0.2, 1.0, 4.0]),
    exponent=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    more=st.fixed_dictionaries(
        {},
        optional={
            "top_k": st.sampled_from([1, 5, 40]),
            "top_p": st.sampled_from([0.4, 0.9]),
            "min_p": st.sampled_from([0.01, 0.2]),
        },
    ),
    number=numbers,
    kind=kinds,
    vocab=vocabs,
    seed=st.integers(0, 99),
)
def test_what_a_moving_temperature_draws_is_what_plain_loops_allow(
    temperature: float,
    reach: float,
    exponent: float,
    more: dict[str, Any],
    number: float,
    kind: str,
    vocab: int,
    seed: int,
) -> None:
    logits = make_logits(kind, vocab, seed)
    params = SamplingParams(temperature, dynatemp_range=reach, dynatemp_exponent=exponent, **more)
    exact = temperature_of(logits.tolist(), params)
    allowed: set[int] = set()
    for sign in (-1, 0, 1):
        found = exact * (1 + NUDGE * sign)
        allowed |= possible(logits.tolist(), SamplingParams(found, **more), number)
    for name in ("numpy", "portable"):
        sampled = sampler_named(name).sample(logits[None], [row_of(params, number)])
        assert {*sampled.token_ids} <= allowed, name


@settings(max_examples=examples(120), deadline=None)
@given(
    version=st.sampled_from([1, 2]),
    mu=st.one_of(st.floats(-3, 25), st.sampled_from([-2000.0, 5000.0])),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    number=numbers,
    kind=kinds,
    vocab=vocabs,
    seed=st.integers(0, 99),
)
def test_what_mirostat_draws_is_what_plain_loops_allow(
    version: int, mu: float, temperature: float, number: float, kind: str, vocab: int, seed: int
) -> None:
    logits = make_logits(kind, vocab, seed)
    params = SamplingParams(temperature, mirostat=version)
    mu = min(max(mu, -900.0), 900.0) if abs(mu) > 900 else mu
    allowed: dict[int, list[float]] = {}
    for sign in (-1, 0, 1):
        end = 0.0
        near = mu + NUDGE * sign
        for token_id, chance in mirostat(logits.tolist(), params, near, vocab).items():
            start, end = end, end + chance
            if start - SLACK <= number < end + SLACK and chance > 0.0:
                allowed.setdefault(token_id, []).append(-math.log2(chance))
    for name in ("numpy", "portable"):
        sampled = sampler_named(name).sample(logits[None], [row_of(params, number, mu)])
        [token_id] = sampled.token_ids
        assert sampled.surprises is not None
        assert token_id in allowed, name
        told = sampled.surprises[0]
        assert any(told == pytest.approx(one, abs=1e-3) for one in allowed[token_id]), name


@settings(max_examples=examples(40), deadline=None)
@given(
    kind=kinds,
    seed=st.integers(0, 99),
    mu=st.floats(0, 20),
    number=numbers,
    share=st.sampled_from([0.01, 0.7]),
    others=st.fixed_dictionaries(
        {}, optional={"mirostat": st.sampled_from([1, 2]), "top_k": st.just(20)}
    ),
)
def test_what_is_forbidden_or_changed_does_not_count(
    kind: str, seed: int, mu: float, number: float, share: float, others: dict[str, int]
) -> None:
    """A row with edits and a mask is drawn as one whose logits are so already, on every set."""
    vocab = 700
    logits = make_logits(kind, vocab, seed)
    params = SamplingParams(0.9, dynatemp_range=0.5, **others)
    row = row_of(params, number, mu)
    edits = make_edits(vocab, seed)
    changed = row._replace(edits=edits, mask=make_mask(vocab, seed, share))
    values = processed(logits, RowParams(edits=changed.edits, mask=changed.mask), 0)
    if not np.isfinite(values.max()):
        return
    before = logits.copy()
    for sampler in (sampler_named("numpy"), native("portable")):
        one = sampler.sample(logits[None], [changed])
        same = sampler.sample(values[None], [row])
        assert one.token_ids == same.token_ids
        assert one.surprises == same.surprises
    assert (logits == before).all()


def test_all_instruction_sets_and_batches_give_the_same_bits() -> None:
    vocab, count = 20_000, 24
    logits = np.stack([make_logits(KINDS[i % 6], vocab, i) for i in range(count)])
    rows = []
    for i in range(count):
        asked: dict[str, Any] = {"mirostat": i % 3} if i % 3 else {"dynatemp_range": 0.6}
        row = row_of(SamplingParams(0.9, logprobs=i % 2 or None, **asked), (i * 0.618) % 1, i / 2)
        rows.append(row._replace(mask=make_mask(vocab, i, 0.5)) if i % 4 == 1 else row)
    rows[5] = RowParams(1.0, uniform=0.3)  # of those that have nothing to do with it
    wanted = native("portable").sample(logits, rows)
    for isa in ISAS[1:]:
        try:
            sampler = native(isa, num_threads=2)
        except pytest.skip.Exception:
            continue
        assert sampler.sample(logits, rows) == wanted
    for i in range(count):
        alone = native("portable").sample(logits[i : i + 1], [rows[i]])
        assert alone.token_ids == [wanted.token_ids[i]]
        assert wanted.surprises is not None
        assert (alone.surprises or [0.0]) == [wanted.surprises[i]]


def test_what_processed_log_probabilities_are_of() -> None:
    logits = make_logits("normal", 500, 3)
    row = row_of(SamplingParams(0.8, mirostat=2), 0.4, 4.0)
    sampled = sampler_named("numpy").sample(logits[None], [row])
    values = processed(logits, row, sampled.token_ids[0])
    left = mirostat(logits.tolist(), SamplingParams(0.8, mirostat=2), 4.0, 500)
    assert {*np.flatnonzero(values > -np.inf).tolist()} == {*left}
    assert values.max() == pytest.approx(logits.max() / 0.8)
    params = SamplingParams(0.8, dynatemp_range=0.5)
    values = processed(logits, row_of(params, 0.4), 0)
    assert values.max() == pytest.approx(logits.max() / temperature_of(logits.tolist(), params))


def test_all_logits_count() -> None:
    """Of those that may come: none may be left out by whoever computes them."""
    for asked in ({"mirostat": 1}, {"mirostat": 2}, {"dynatemp_range": 0.5, "top_k": 5}):
        row = row_of(SamplingParams(0.9, **asked), 0.0)  # type: ignore[arg-type]
        assert (exact_logits(row), exact_allowed(row), row.per_unit) == (0, ALL_ALLOWED, 0.0)
        assert summary_scale(row, is_edited=False, is_masked=False) == NO_SUMMARY


@pytest.mark.parametrize(
    ("given", "row"),
    [
        ({"mirostat": 2, "temperature": 0.0}, RowParams()),
        ({"mirostat": 2, "top_k": 1}, RowParams(1.0, adapting=Adapting(mirostat=2))),
        (
            {"mirostat": 1, "top_p": 0.5, "min_p": 0.2, "typical_p": 0.5, "dynatemp_range": 1},
            RowParams(1.0, adapting=Adapting(mirostat=1)),
        ),
        ({"dynatemp_range": 0.0, "dynatemp_exponent": 2.0}, RowParams(1.0)),
        ({"dynatemp_range": 0.5, "top_k": 1}, RowParams(1.0, 1)),
        (
            {"dynatemp_range": 0.5, "temperature": 0.0},
            RowParams(0.5, adapting=Adapting(0.0, 1.0)),
        ),
        (
            {"dynatemp_range": 0.25, "dynatemp_exponent": 2.0},
            RowParams(1.25, adapting=Adapting(0.75, 2.0)),
        ),
    ],
)
def test_how_a_request_s_rows_are_drawn(given: dict[str, float], row: RowParams) -> None:
    params = SamplingParams(**given)  # type: ignore[arg-type]
    request = make_request(params, [0], [])
    assert request.row == row
    assert params.greedy == row.greedy
    assert request.plain == row.greedy
    assert (request.feedback is not None) == bool(row.adapting and row.adapting.mirostat)


def test_mu_begins_at_twice_the_target_and_follows_the_tokens() -> None:
    request = make_request(SamplingParams(mirostat=2, mirostat_tau=3.0, mirostat_eta=0.5), [0], [])
    state = request.feedback
    assert isinstance(state, Mirostat)
    assert row_params(Position(request)).adapting == Adapting(mirostat=2, mu=6.0)
    state.note(5.0)
    assert row_params(Position(request)).adapting == Adapting(mirostat=2, mu=5.0)
    state.note(1.0)
    assert state.mu == 6.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *product(
            ["mirostat", "mirostat_tau", "mirostat_eta", "dynatemp_range", "dynatemp_exponent"],
            [-1, 101, "x", None, True],
        ),
        *product(["mirostat"], [3, 1.0]),
        ("mirostat_eta", 1.5),
        *product(["repeat_last_n"], [-2, 0.5, "a", True]),
    ],
)
def test_bad_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name) as error:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert error.value.param == name
