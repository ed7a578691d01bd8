"""Deficit round robin: whose turn it is, and how much everybody gets."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.serving.shares import Shares
from tests.tiers import examples

QUANTUM = 8


def serve(shares: Shares, demand: dict[str, int], budget: int) -> list[tuple[str, int]]:
    """One step: who takes how many tokens, turn by turn. `demand` counts down."""
    turns = shares.turns([tenant for tenant, tokens in demand.items() if tokens])
    taken = []
    while budget and (tenant := turns.current()) is not None:
        tokens = min(turns.allowance(budget), demand[tenant])
        assert 0 <= tokens <= budget
        if tokens:
            turns.spend(tokens)
            demand[tenant] -= tokens
            budget -= tokens
            taken.append((tenant, tokens))
        else:
            turns.leave()
    shares.commit(turns)
    return taken


def total(taken: list[tuple[str, int]], tenant: str) -> int:
    return sum(tokens for name, tokens in taken if name == tenant)


def test_tenants_take_a_quantum_each_in_turn() -> None:
    taken = serve(Shares(QUANTUM), {"a": 100, "b": 100, "c": 100}, 30)
    assert taken == [("a", 8), ("b", 8), ("c", 8), ("a", 6)]


def test_a_turn_goes_on_in_the_next_step() -> None:
    shares = Shares(QUANTUM)
    demand = {"a": 100, "b": 100}
    assert serve(shares, demand, 5) == [("a", 5)]
    assert serve(shares, demand, 5) == [("a", 3), ("b", 2)]
    assert serve(shares, demand, 5) == [("b", 5)]
    assert serve(shares, demand, 5) == [("b", 1), ("a", 4)]


def test_planning_alone_changes_nothing() -> None:
    shares = Shares(QUANTUM)
    turns = shares.turns(["a", "b"])
    assert turns.current() == "a"
    turns.spend(8)
    assert shares.turns(["a", "b"]).current() == "a"
    shares.commit(turns)
    assert shares.turns(["a", "b"]).current() == "b"


def test_one_tenant_alone_is_never_limited_and_owes_nothing() -> None:
    shares = Shares(QUANTUM)
    demand = {"a": 1000}
    assert serve(shares, demand, 500) == [("a", 500)]
    assert serve(shares, {"a": 100, "b": 100}, 16) == [("a", 8), ("b", 8)]


def test_who_has_nothing_more_leaves_the_rest_to_the_others() -> None:
    shares = Shares(QUANTUM)
    assert serve(shares, {"a": 3, "b": 100}, 64) == [("a", 3)] + [("b", 8)] * 7 + [("b", 5)]


def test_credit_is_not_saved_up() -> None:
    shares = Shares(QUANTUM)
    assert serve(shares, {"a": 1, "b": 4}, 5) == [("a", 1), ("b", 4)]
    assert shares.turns("ab").balance == {"a": 7, "b": 4}
    serve(shares, {"b": 100}, 64)  # a has nothing to compute: it loses what is left
    assert shares.turns("ab").balance == {"a": 0, "b": 4}
    for _ in range(10):
        serve(shares, {"a": 1, "b": 1}, 64)
    assert max(shares.turns("ab").balance.values()) <= QUANTUM


def test_who_joins_late_gets_no_more_than_from_then_on() -> None:
    shares = Shares(QUANTUM)
    demand = {"a": 1000, "b": 1000}
    serve(shares, demand, 320)
    demand["c"] = 1000
    taken = serve(shares, demand, 240)
    assert all(abs(total(taken, tenant) - 80) <= QUANTUM for tenant in "abc")


def test_a_debt_is_paid_before_the_next_turn() -> None:
    shares = Shares(QUANTUM)
    shares.charge("a", 20)
    assert serve(shares, {"a": 100, "b": 100}, 40) == [
        ("b", 8),
        ("b", 8),
        ("a", 4),  # it has paid: -20 + 3 rounds
        ("b", 8),
        ("a", 8),
        ("b", 4),
    ]


@pytest.mark.parametrize(
    ("debts", "first", "allowance"),
    [
        ((0, 0), "a", 8),
        ((1, 0), "a", 7),
        ((1, 1), "a", 7),
        ((8, 8), "a", 8),
        ((9, 9), "a", 7),
        ((20, 9), "b", 7),
        ((15, 16), "a", 1),
    ],
)
def test_no_more_rounds_pass_than_somebody_needs(
    debts: tuple[int, int], first: str, allowance: int
) -> None:
    shares = Shares(QUANTUM)
    for tenant, debt in zip("ab", debts, strict=True):
        shares.charge(tenant, debt)
    turns = shares.turns("ab")
    assert (turns.current(), turns.allowance(100)) == (first, allowance)


def test_a_debt_stays_while_its_tenant_has_nothing_to_compute() -> None:
    shares = Shares(QUANTUM)
    shares.charge("a", 12)
    serve(shares, {"b": 100, "c": 100}, 64)
    assert serve(shares, {"a": 100, "b": 100}, 20)[0] == ("b", 8)
    assert not shares.empty
    shares.forget("a")
    shares.forget("b")
    shares.forget("c")
    assert shares.empty
    assert serve(shares, {"a": 100, "b": 100}, 8) == [("a", 8)]


@settings(max_examples=examples(150))
@given(
    quantum=st.integers(1, 20),
    steps=st.lists(
        st.tuples(
            st.integers(1, 60),  # budget
            st.integers(0, 40),  # new demand of a third tenant
            st.integers(0, 3),  # a decodes
            st.integers(0, 3),  # b decodes
        ),
        min_size=1,
        max_size=60,
    ),
)
def test_two_that_always_have_more_get_the_same(
    quantum: int, steps: list[tuple[int, int, int, int]]
) -> None:
    """At any time, prompts and decoded tokens together, within a quantum and one step's decodes."""
    shares = Shares(quantum)
    served = {"a": 0, "b": 0, "c": 0}
    most_decoded = 0
    demand = {"c": 0}
    behind = {"a": 0, "b": 0}
    for budget, more, *decoded in steps:
        demand = {"a": 10_000, "b": 10_000, "c": demand["c"] + more}
        for tenant, tokens in serve(shares, demand, budget):
            served[tenant] += tokens
        for tenant, tokens in zip("ab", decoded, strict=True):
            shares.charge(tenant, tokens)
            served[tenant] += tokens
            behind[tenant] += tokens
        most_decoded = sum(behind.values())
        assert abs(served["a"] - served["b"]) <= quantum + most_decoded
    # Without more decoding the debts are paid, and what is left is a quantum.
    for _ in range(2 + 2 * most_decoded // quantum):
        for tenant, tokens in serve(shares, {"a": 10_000, "b": 10_000}, 2 * quantum):
            served[tenant] += tokens
    assert abs(served["a"] - served["b"]) <= quantum


@settings(max_examples=examples(100))
@given(
    quantum=st.integers(1, 10),
    steps=st.lists(
        st.tuples(st.integers(1, 30), st.lists(st.integers(0, 30), min_size=3, max_size=3)),
        min_size=1,
        max_size=40,
    ),
)
def test_a_budget_is_used_up_and_nobody_is_passed_over_twice(
    quantum: int, steps: list[tuple[int, list[int]]]
) -> None:
    shares = Shares(quantum)
    demand = dict.fromkeys("abcx", 0)
    demand["x"] = 100_000  # always has more
    since = dict.fromkeys("abc", 0)
    for budget, more in steps:
        for tenant, tokens in zip("abc", more, strict=True):
            demand[tenant] += tokens
        wanted = sum(demand.values())
        taken = serve(shares, demand, budget)
        assert sum(tokens for _, tokens in taken) == min(budget, wanted)
        for tenant, tokens in taken:
            if tenant == "x":
                since = dict.fromkeys("abc", 0)
            else:
                since[tenant] += tokens
                assert since[tenant] <= 2 * quantum  # the end of a turn, and the next one
