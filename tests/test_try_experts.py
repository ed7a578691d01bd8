"""scripts/try_experts.py judges kernels: wrong is wrong, and of equal experts any may be chosen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from scripts.try_experts import Array, error_of, expected

HIDDEN, COUNT, CHOSEN = 8, 6, 3
TIED = np.array([3.0, 1.0, 2.0, 1.0, 0.0, 1.0])  # one of the experts 1, 3 and 5 is chosen


@pytest.fixture
def weights() -> tuple[Array, Array]:
    random = np.random.default_rng(1)
    gate_up = random.standard_normal((COUNT, 2 * HIDDEN, HIDDEN))
    return gate_up, random.standard_normal((COUNT, HIDDEN, HIDDEN))


def routed(weights: tuple[Array, Array], values: Array, scores: Array, chosen: list[int]) -> Array:
    """The output of a row for some experts."""
    shares = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
    y = np.zeros(HIDDEN)
    for share, expert in zip(shares, chosen, strict=True):
        gate, up = weights[0][expert][0::2] @ values, weights[0][expert][1::2] @ values
        y += share * (weights[1][expert] @ (gate / (1 + np.exp(-gate)) * up))
    return y


def test_whichever_of_equals_is_chosen_is_right(weights: tuple[Array, Array]) -> None:
    random = np.random.default_rng(2)
    x, drawn = random.standard_normal((2, HIDDEN)), random.standard_normal(COUNT)
    allowed = expected(*weights, x, np.stack([TIED, drawn]), CHOSEN)
    assert [len(each) for each in allowed] == [3, 1]
    best = np.argsort(-drawn)[:CHOSEN].tolist()
    second = routed(weights, x[1], drawn, best)
    for chosen in itertools.combinations(range(COUNT), CHOSEN):
        y = np.stack([routed(weights, x[0], TIED, list(chosen)), second])
        is_right = {0, 2} < {*chosen} and 4 not in chosen
        assert (error_of(y, allowed) < 1e-6) == is_right, chosen


@pytest.mark.parametrize("room", [1, 2, 3])
def test_several_of_equals(weights: tuple[Array, Array], room: int) -> None:
    x, scores = np.ones((1, HIDDEN)), np.array([[2.0, 1.0, 1.0, 1.0, 0.0, 0.0]])
    [allowed] = expected(*weights, x, scores, 1 + room)
    assert len(allowed) == (3, 3, 1)[room - 1]
    found = [
        routed(weights, x[0], scores[0], [0, *each])
        for each in itertools.combinations((1, 2, 3), room)
    ]
    np.testing.assert_allclose(allowed, found, atol=1e-12)


def test_what_is_no_number_is_wrong(weights: tuple[Array, Array]) -> None:
    x = np.ones((2, HIDDEN))
    allowed = expected(*weights, x, np.stack([TIED, TIED]), CHOSEN)
    y = np.stack([allowed[0][0], np.full(HIDDEN, np.nan)])
    assert not error_of(y, allowed) <= 1.0
