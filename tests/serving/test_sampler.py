"""The samplers, NumPy's and the native one with each instruction set, against an obvious, slow
reference, and against the distribution they promise.
"""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxport.serving.row_params import RowParams
from onnxport.serving.sampler import uniform
from onnxport.serving.topm import top_m
from tests.serving.samplers import ISAS, Sampler, sampler_named
from tests.tiers import crossed, every, examples

VOCABS = (5, 64, 257, 3000)

ROUNDING = 1e-6
"""What a sum of float32 weights may differ from the reference's float64 one, as a share: a token
whose place in the order lies this near to top_p may be in or out.
"""


@pytest.fixture(scope="module", params=["numpy", *ISAS])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return sampler_named(request.param)


def random_logits(rows: int, vocab: int, seed: int, *, ties: bool = False) -> NDArray[np.float32]:
    logits = np.random.default_rng(seed).normal(0, 3, (rows, vocab)).astype(np.float32)
    return np.round(logits) if ties else logits


def ranked(logits: NDArray[np.float32]) -> list[int]:
    """All tokens, likeliest first, of equals the lowest id first."""
    return sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))


def reference(logits: NDArray[np.float32], row: RowParams) -> dict[int, float]:
    """The probability of each token that can be drawn."""
    if row.temperature == 0:
        return {ranked(logits)[0]: 1.0}
    kept = ranked(logits)[: row.top_k]
    weights = np.exp((logits[kept].astype(np.float64) - logits.max()) / row.temperature)
    probabilities = weights / weights.sum()
    before = np.cumsum(probabilities) - probabilities
    nucleus = (before < row.top_p) | (row.top_p == 1.0)
    total = probabilities[nucleus].sum()
    return {
        token_id: float(p / total)
        for token_id, p, inside in zip(kept, probabilities, nucleus, strict=True)
        if inside
    }


@pytest.mark.parametrize("vocab", [1, 2, 100, 255, 1000, 5000])
@pytest.mark.parametrize("ties", [False, True])
def test_top_m_is_the_beginning_of_a_full_sort(vocab: int, ties: bool) -> None:
    logits = random_logits(4, vocab, vocab, ties=ties)
    logits[0, : vocab // 2] = -np.inf
    logits[1] = -np.abs(logits[1])  # -0.0 among them
    for count in {1, 2, 7, 70, vocab // 2, vocab}:
        if 1 <= count <= vocab:
            values, columns = top_m(logits, count)
            assert columns.tolist() == [ranked(row)[:count] for row in logits]
            assert (values == np.take_along_axis(logits, columns, axis=1)).all()


def test_greedy_takes_the_likeliest_and_of_equals_the_first(sampler: Sampler) -> None:
    logits = np.array([[0, 3, 1, 3], [2, 2, 2, 2]], np.float32)
    assert sampler.sample_greedy(logits).token_ids == [1, 0]
    assert sampler.sample(logits, [RowParams()] * 2).token_ids == [1, 0]
    assert sampler.sample(logits, [RowParams(temperature=1.0, top_k=1)] * 2).token_ids == [1, 0]


@settings(max_examples=examples(60), deadline=None)
@given(
    vocab=st.sampled_from(VOCABS),
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 2, 40, 100_000]),
    top_p=st.sampled_from([0.05, 0.4, 0.9, 0.999, 1.0]),
    ties=st.booleans(),
)
@example(vocab=257, seed=627, temperature=1.0, top_k=None, top_p=0.999, ties=True)
def test_only_what_the_reference_allows_is_drawn(
    sampler: Sampler,
    vocab: int,
    seed: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    ties: bool,
) -> None:
    logits = random_logits(1, vocab, seed, ties=ties)
    numbers = [0.0, 0.1, 0.5, 0.9, 1 - 2**-53]
    rows = [RowParams(temperature, top_k, top_p, number) for number in numbers]
    allowed = reference(logits[0], rows[0]._replace(top_p=min(1.0, top_p + ROUNDING)))
    drawn = sampler.sample(np.repeat(logits, len(rows), axis=0), rows).token_ids
    assert set(drawn) <= allowed.keys()


@pytest.mark.parametrize(
    ("row", "vocab"),
    crossed(
        2,
        [
            RowParams(temperature=1.0, top_k=5),
            RowParams(temperature=1.5, top_p=0.7),
            RowParams(temperature=1.2, top_k=20, top_p=0.8),
            RowParams(temperature=4.0, top_p=0.95),
        ],
        [64, 600],
    ),
)
def test_an_even_grid_of_numbers_gives_the_reference_s_probabilities(
    sampler: Sampler, row: RowParams, vocab: int
) -> None:
    """Inverse CDF: n evenly spread numbers hit each token n p times, give or take one."""
    number = 4000
    logits = random_logits(1, vocab, 5)
    rows = [
        RowParams(row.temperature, row.top_k, row.top_p, (i + 0.5) / number) for i in range(number)
    ]
    drawn = sampler.sample(np.repeat(logits, number, axis=0), rows).token_ids
    counts = np.bincount(drawn, minlength=vocab)
    expected = np.zeros(vocab)
    for token_id, probability in reference(logits[0], row).items():
        expected[token_id] = probability * number
    assert np.abs(counts - expected).max() <= 1.1


@pytest.mark.parametrize("temperature", every(3, [1.0, 0.5, 3.0]))
@pytest.mark.parametrize("vocab", [64, 600])
def test_tokens_are_drawn_from_all_with_their_probabilities(
    sampler: Sampler, temperature: float, vocab: int
) -> None:
    """Chi-square of 12,000 draws; a normal variable would be beyond the bound once in 30,000."""
    number = examples(12_000)
    logits = random_logits(1, vocab, 5)
    rows = [RowParams(temperature, uniform=uniform(9, i)) for i in range(number)]
    drawn = sampler.sample(np.repeat(logits, number, axis=0), rows).token_ids
    counts = np.bincount(drawn, minlength=vocab).astype(float)
    of = reference(logits[0], rows[0])
    expected = np.array([of.get(token_id, 0.0) for token_id in range(vocab)]) * number
    often = expected >= 5  # the others count together
    counts = np.append(counts[often], counts[~often].sum())
    expected = np.append(expected[often], expected[~often].sum())
    found = ((counts - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    freedom = len(counts) - 1
    assert found < freedom + 4 * math.sqrt(2 * freedom) + 8


def test_drawing_over_positions_follows_the_distribution(sampler: Sampler) -> None:
    """Chi-square over 20,000 positions of one seed; 99.9 % of the time below the bound."""
    number, vocab = examples(20_000), 16
    logits = random_logits(1, vocab, 2) / 3
    rows = [RowParams(1.0, uniform=uniform(123, position)) for position in range(number)]
    counts = np.bincount(sampler.sample(np.repeat(logits, number, axis=0), rows).token_ids)
    expected = np.array([p for _, p in sorted(reference(logits[0], rows[0]).items())]) * number
    assert ((counts - expected) ** 2 / expected).sum() < 37.7  # 15 degrees of freedom


def test_numbers_are_even_and_unlike_between_seeds_and_positions() -> None:
    numbers = np.array([[uniform(seed, i) for i in range(1000)] for seed in range(-10, 10)])
    assert (numbers >= 0).all()
    assert (numbers < 1).all()
    assert len(np.unique(numbers)) == numbers.size
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # 19 degrees of freedom, 99.9 %
    correlation = np.corrcoef(numbers)
    assert np.abs(correlation - np.eye(20)).max() < 0.15
    assert uniform(7, 3) == uniform(7, 3)


def test_rows_do_not_depend_on_each_other(sampler: Sampler) -> None:
    logits = random_logits(24, 3000, 1)
    choices: list[tuple[float, int | None, float]] = [
        (0.0, None, 1.0),
        (1.0, None, 1.0),
        (0.7, 50, 1.0),
        (1.3, None, 0.95),
        (9.0, None, 0.9),
        (1.0, 2000, 0.99),
    ]
    rows = [RowParams(*choices[i % 6], uniform(i, 0), 3 if i % 5 else None) for i in range(24)]
    together = sampler.sample(logits, rows)
    assert together.logprobs is not None
    for index, row in enumerate(rows):
        single = sampler.sample(logits[index : index + 1], [row])
        assert single.token_ids == together.token_ids[index : index + 1]
        if row.num_logprobs is not None:
            assert single.logprobs == together.logprobs[index : index + 1]
        else:
            assert together.logprobs[index] is None


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("ties", [False, True])
def test_logprobs_are_the_log_softmax_of_raw_logits(
    sampler: Sampler, vocab: int, ties: bool
) -> None:
    logits = random_logits(1, vocab, 9, ties=ties)[0]
    exact = logits.astype(np.float64)
    exact = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    order = ranked(logits)
    for token_id in (0, vocab // 2, order[0], order[-1]):
        found = sampler.logprobs(logits[None], [token_id], [4])[0]
        assert found.logprob == pytest.approx(exact[token_id], abs=2e-6)
        assert found.rank == order.index(token_id) + 1
        assert found.top_ids == tuple(order[:4])
        assert found.top_logprobs == pytest.approx(exact[order[:4]], abs=2e-6)
    assert sampler.logprobs(logits[None], [0], [0])[0].top_ids == ()


def test_logits_are_not_changed(sampler: Sampler) -> None:
    logits = random_logits(4, 300, 0)
    before = logits.copy()
    sampler.sample(logits, [RowParams(t, None, p, 0.5, 5) for t in (0.5, 2.0) for p in (0.5, 1.0)])
    assert (logits == before).all()


def test_rows_without_finite_logits_are_reported_and_others_sampled(sampler: Sampler) -> None:
    logits = random_logits(5, 300, 0)
    logits[1, 7] = np.nan
    logits[2] = -np.inf
    logits[3, 5] = np.inf
    logits[4, 10:] = -np.inf  # a mask is no fault
    rows = [RowParams(1.0, None, p, 0.3) for p in (0.9, 0.9, 1.0, 1.0, 0.9)]
    result = sampler.sample(logits, rows)
    assert result.invalid == (1, 2, 3)
    assert result.token_ids[4] < 10
    assert sampler.sample_greedy(logits).invalid == (1, 2, 3)
