"""Whether to guess and how far: measured costs, acceptance, and what is made of them."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.errors import DeviceLostError, ProviderError
from onnxport.serving.guesses import MOST_OWED
from onnxport.serving.request import Request
from onnxport.serving.speculation.acceptance import Acceptance
from onnxport.serving.speculation.config import MOST_GUESSED, SpeculationConfig
from onnxport.serving.speculation.costs import ENOUGH_SAMPLES, FRESH_NOTES, StepCosts, ascending
from onnxport.serving.speculation.ledger import FREE_SHARE
from onnxport.serving.speculation.lengths import choose_lengths
from tests.serving.speculating import Machine, request
from tests.tiers import examples


def memory_bound(num_tokens: int) -> float:
    return 0.010 + 0.0005 * num_tokens


def compute_bound(num_tokens: int) -> float:
    return 0.010 * num_tokens


def steep(num_tokens: int) -> float:
    return 0.010 if num_tokens == 1 else 0.018 + 0.001 * num_tokens


def test_costs_are_interpolated_between_measurements() -> None:
    costs = StepCosts()
    assert not costs.knows(1)
    for rows, seconds in [(1, 1.0), (3, 2.0), (9, 5.0)]:
        assert not costs.knows(rows)
        costs.note(rows, 0, 9.0)  # the first may be slow
        assert not costs.knows(rows)
        costs.note(rows, 0, seconds)
        assert costs.knows(rows)
    found = [costs.seconds(rows) for rows in (1, 2, 3, 6, 9, 11)]
    assert found == pytest.approx([1.0, 1.5, 2.0, 3.5, 5.0, 5.2])  # at the end 2 % more each
    assert costs.seconds(1, 5) == pytest.approx(3.5)  # as long as no guess was measured


def test_steps_with_guesses_are_measured_apart() -> None:
    costs = StepCosts()
    for rows, drafted, seconds in [(1, 0, 1.0), (4, 0, 1.1), (1, 3, 1.6), (1, 5, 2.0)]:
        for _ in range(2):
            costs.note(rows, drafted, seconds)
    assert costs.seconds(4) == pytest.approx(1.1)  # which is not what four tokens of one row take
    found = [costs.seconds(1, drafted) for drafted in (0, 1, 2, 3, 4, 5)]
    assert found == pytest.approx([1.0, 1.2, 1.4, 1.6, 1.8, 2.0])
    assert costs.seconds(4, 2) == pytest.approx(2.0)
    costs = StepCosts()
    for rows, drafted, seconds in [(2, 0, 1.0), (2, 2, 0.5)] * 2:
        costs.note(rows, drafted, seconds)
    assert costs.seconds(2, 2) == 1.0  # never less than without guesses


def test_costs_follow_the_machine_and_forget() -> None:
    costs = StepCosts()
    for _ in range(2):
        costs.note(6, 0, 9.0)
        costs.note(1, 7, 12.0)
    for seconds in (1.0, 2.0):
        for _ in range(40):
            costs.note(1, 0, seconds)
        assert costs.seconds(1) == seconds
    assert costs.seconds(6) == 9.0
    assert costs.seconds(1, 7) == 12.0
    for _ in range(300):
        costs.note(1, 0, 1.0)
    assert not costs.knows(6)
    assert costs.seconds(6) == pytest.approx(1.1)  # a guess
    assert costs.seconds(1, 7) == pytest.approx(1.14)


def test_plain_steps_have_to_be_measured_often_and_of_late() -> None:
    costs = StepCosts()
    for _ in range(ENOUGH_SAMPLES):
        assert not costs.is_fresh(3)
        costs.note(3, 0, 1.0)
    assert costs.is_fresh(3)
    assert not costs.is_fresh(4)
    for _ in range(FRESH_NOTES - 1):
        costs.note(3, 2, 1.5)
        assert costs.is_fresh(3)
    costs.note(3, 2, 1.5)
    assert not costs.is_fresh(3)
    costs.note(3, 0, 1.0)
    assert costs.is_fresh(3)


def test_of_a_few_measurements_the_middle_one_counts() -> None:
    costs = StepCosts()
    for seconds in (1.0, 9.0, 2.0, 8.0, 3.0, 7.0, 2.5, *[2.5] * 9):
        costs.note(1, 0, seconds)
    for seconds in (5.0, 1.0, 3.0, 2.0, 4.0, 100.0, 0.5):
        costs.note(2, 0, seconds)
    for _ in range(9):
        costs.note(9, 0, 9.0)
    assert costs.seconds(1) == 2.5
    assert costs.seconds(2) == 3.0


def test_sizes_above_sixteen_are_measured_together() -> None:
    costs = StepCosts()
    costs.note(100, 0, 1.0)
    costs.note(101, 0, 1.0)
    assert costs.knows(96)
    assert costs.knows(103)
    assert not costs.knows(95)
    assert not costs.knows(104)
    costs.note(5, 0, 1.0)
    costs.note(5, 0, 1.0)
    assert costs.knows(50)
    assert not costs.knows(4)


@given(st.lists(st.floats(0.0, 10.0), max_size=12))
def test_pooled_values_ascend_and_keep_their_sum(values: list[float]) -> None:
    found = ascending(values)
    assert len(found) == len(values)
    assert all(left <= right for left, right in itertools.pairwise(found))
    assert sum(found) == pytest.approx(sum(values))
    if values == sorted(values):
        assert found == values


def test_acceptance_goes_from_all_to_one() -> None:
    acceptance = Acceptance()
    good, bad, new = (request([1]) for _ in range(3))
    assert acceptance.rate(new) == 0.5
    for _ in range(20):
        acceptance.note(good, 5, 5)
        acceptance.note(bad, 5, 0)
    assert acceptance.rate(good) > 0.95
    assert acceptance.rate(bad) < 0.3
    assert 0.6 < acceptance.rate(new) < 0.9  # 5 right for each that is wrong
    assert acceptance.num_tried(good) > acceptance.num_tried(bad) > acceptance.num_tried(new) == 0
    acceptance.forget(bad)
    assert acceptance.rate(bad) == acceptance.rate(new)


@settings(deadline=None, max_examples=examples(60))
@given(
    st.lists(st.tuples(st.floats(0.0, 0.98), st.integers(0, 3)), min_size=1, max_size=3),
    st.integers(1, 6),
    st.floats(0.0, 0.5),
    st.floats(0.0, 0.3),
)
def test_no_other_lengths_are_better(
    rows: list[tuple[float, int]], budget: int, slope: float, round_s: float
) -> None:
    rates, limits = [rate for rate, _ in rows], [limit for _, limit in rows]

    def step_s(num_tokens: int) -> float:
        return 1.0 + slope * num_tokens

    def speed(lengths: tuple[int, ...]) -> float:
        tokens = sum(
            rate**place
            for rate, length in zip(rates, lengths, strict=True)
            for place in range(1, length + 1)
        )
        taken_s = step_s(len(rows) + sum(lengths)) + max(lengths) * round_s
        return (len(rows) + tokens) / taken_s

    table = [step_s(len(rows) + drafted) for drafted in range(sum(limits) + 1)]
    choice = choose_lengths(rates, limits, budget, table, round_s)
    allowed = [
        lengths
        for lengths in itertools.product(*(range(limit + 1) for limit in limits))
        if sum(lengths) <= budget
    ]
    assert tuple(choice.lengths) in allowed
    plain = speed((0,) * len(rows))
    assert choice.speedup == pytest.approx(speed(tuple(choice.lengths)) / plain)
    assert choice.speedup == pytest.approx(max(map(speed, allowed)) / plain)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("step_s", [memory_bound, steep])
def test_it_comes_near_the_best_fixed_length(step_s, rate: float, rows: int) -> None:  # type: ignore[no-untyped-def]
    machine = Machine(step_s, rate, rows=rows)
    machine.run(100)
    assert machine.run(1500) > 0.95 * machine.best()


# Where a wrong guess makes a request compute again what it has got in that step.


@settings(deadline=None, max_examples=examples(60))
@given(
    st.floats(0.0, 0.98), st.integers(0, 6), st.integers(0, 9), st.floats(0.0, 0.5), st.booleans()
)
def test_what_is_computed_again_counts(
    rate: float, limit: int, owed: int, slope: float, slow: bool
) -> None:
    round_s = 0.1 if slow else 0.0
    table = [1.0 + slope * (1 + owed + drafted) for drafted in range(limit + 1)]

    def speed(length: int) -> float:
        tokens = 1.0 + sum(rate**place for place in range(1, length + 1))
        again = sum(rate**right * (1 - rate) * (owed + 1 + right) for right in range(length))
        return tokens / (table[length] + length * round_s + slope * again)

    choice = choose_lengths([rate], [limit], 6, table, round_s, [owed])
    assert choice.speedup == pytest.approx(speed(choice.lengths[0]) / speed(0))
    assert choice.speedup == pytest.approx(max(map(speed, range(limit + 1))) / speed(0))
    if not rate:
        assert choice.lengths == [0]


def best_again(machine: Machine) -> float:
    """Tokens a second of a row with the best fixed length, what is owed included."""
    dice, speeds = Random(1), []
    for length in range(machine.config.longest_draft + 1):
        tokens, taken_s, owed = 0, 0.0, 0
        for _ in range(2000):
            taken_s += machine.step_s(1 + owed + length)
            right = 0
            while right < length and dice.random() < machine.rate:
                right += 1
            tokens += 1 + right
            owed = owed + 1 + right if right < length and owed < MOST_OWED else 0
        speeds.append(tokens / taken_s)
    return max(speeds)


@pytest.mark.parametrize("rate", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("step_s", [memory_bound, steep])
def test_it_comes_near_the_best_length_where_tokens_are_computed_again(  # type: ignore[no-untyped-def]
    step_s, rate: float
) -> None:
    machine = Machine(step_s, rate, recomputes=True)
    machine.run(100)
    assert machine.run(1500) > 0.9 * best_again(machine)


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("step_s", [memory_bound, compute_bound, steep])
def test_wrong_guesses_cost_little_where_tokens_are_computed_again(  # type: ignore[no-untyped-def]
    step_s, rows: int
) -> None:
    machine = Machine(step_s, 0.0, rows=rows, recomputes=True)
    assert machine.run(1000) > 0.97 * machine.plain()
    assert machine.run(1000) > 0.98 * machine.plain()


def test_a_step_that_computes_again_is_a_loss() -> None:
    machine = Machine(memory_bound, 0.9, recomputes=True)
    machine.run(100)
    speculator = machine.speculator
    speculator._settle()
    before_s = speculator._ledger.balance_s
    speculator.note_step(1, 9, memory_bound(9))  # without a guess
    speculator._settle()
    lost_s = before_s - speculator._ledger.balance_s
    assert lost_s == pytest.approx(memory_bound(9) - memory_bound(1), rel=0.2)


def test_guesses_do_not_pay_by_what_is_computed_again() -> None:
    """Half of them are right, which pays where nothing is computed again, and not here."""

    def step_s(num_tokens: int) -> float:
        return 0.010 + 0.004 * (num_tokens - 1)

    plain = Machine(step_s, 0.5)
    plain.run(1000)
    assert sum(plain.lengths[500:]) > 250
    again = Machine(step_s, 0.5, recomputes=True)
    assert again.run(2000) > 0.98 * again.plain()
    assert sum(again.lengths[1000:]) < 100


@pytest.mark.parametrize("rate", [0.5, 0.8, 0.95])
def test_a_draft_model_that_takes_time(rate: float) -> None:
    machine = Machine(memory_bound, rate, round_s=0.001, rows=2)
    machine.run(100)
    assert machine.run(1500) > 0.95 * machine.best()


@pytest.mark.parametrize("seed", range(20))
def test_a_draft_model_whose_first_guesses_are_wrong_is_tried_again(seed: int) -> None:
    machine = Machine(memory_bound, 0.75, round_s=0.0008, behind_s=0.0001, seed=seed)
    machine.requests = [request([1] * 40)]
    assert machine.run(60) > 0.7 * machine.best()


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("step_s", [memory_bound, steep])
def test_a_draft_model_that_is_right_gets_going(step_s, rows: int) -> None:  # type: ignore[no-untyped-def]
    machine = Machine(step_s, 0.95, rows=rows, round_s=0.0005, behind_s=0.00005)
    machine.requests = [request([1] * 50) for _ in range(rows)]
    machine.run(150)
    assert machine.run(1000) > 0.9 * machine.best()


@pytest.mark.parametrize("prompt", [700, 2000, 4000])
def test_a_prompt_that_takes_several_calls_is_caught_up_with(prompt: int) -> None:
    machine = Machine(lambda n: 0.0045 + 0.0005 * n, 0.75, round_s=0.0005, behind_s=0.00002)
    machine.guesser.budget = 512
    for _ in range(4):
        machine.requests = [request([1] * prompt)]
        speed = machine.run(200)
    assert speed > 1.4 * machine.plain()


def test_what_a_token_takes_is_never_nothing() -> None:
    machine = Machine(memory_bound, 0.95, round_s=0.0005, behind_s=0.00002)
    asker = machine.speculator._asker
    one = request([1])
    for _ in range(6):
        asker.ask_model({one: 5})
    machine.guesser.behind[one] = 20
    machine.round_s = 0.000375  # a machine that is faster for once
    asker.ask_model({one: 5})
    machine.guesser.behind[one] = 4000
    assert 0.25 * 4000 * machine.behind_s < asker.seconds_to_catch_up(one, 1.0)


@pytest.mark.parametrize("rows", [1, 4, 8])
@pytest.mark.parametrize("behind_s", [0.00005, 0.0005])
def test_a_draft_model_that_is_right_where_it_cannot_pay(rows: int, behind_s: float) -> None:
    machine = Machine(compute_bound, 0.95, rows=rows, round_s=0.0005, behind_s=behind_s)
    machine.requests = [request([1] * 50) for _ in range(rows)]
    machine.run(1000)
    assert machine.run(3000) > 0.985 * machine.plain()


@pytest.mark.parametrize("round_s", [0.0, 0.002])
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("step_s", [memory_bound, compute_bound, steep])
def test_guesses_that_are_never_right_cost_next_to_nothing(  # type: ignore[no-untyped-def]
    step_s, rows: int, round_s: float
) -> None:
    machine = Machine(step_s, 0.0, rows=rows, round_s=round_s, behind_s=round_s / 10)
    assert machine.run(1000) > 0.97 * machine.plain()
    machine.requests = [request([1] * 500) for _ in range(rows)]
    # What a draft model takes to catch up with one of them, ten steps, was saved up before.
    assert machine.run(1000 if round_s else 200) > 0.97 * machine.plain()


def test_right_guesses_that_cost_as_much_as_steps_are_not_made() -> None:
    machine = Machine(compute_bound, 0.9)
    assert machine.run(1000) > 0.97 * machine.plain()
    assert sum(machine.lengths[200:]) < 80


@pytest.mark.parametrize(("rows", "gain", "is_made"), [(1, 1.06, 1), (4, 1.06, 0), (4, 1.2, 1)])
def test_several_sequences_have_to_gain_a_tenth(rows: int, gain: float, is_made: int) -> None:
    """With each guess right nine times of ten, and steps that take as much longer as to gain it."""

    def step_s(num_tokens: int) -> float:
        return 0.01 * (1.0 + (1.9 / gain - 1.0) * (num_tokens - rows) / rows)

    config = SpeculationConfig("ngram", num_speculative_tokens=1)
    machine = Machine(step_s, 0.9, rows=rows, config=config)
    machine.run(1000)
    made = sum(machine.lengths[500:]) / (500 * rows)
    assert made > 0.5 if is_made else made < 0.05


class Counted(list[float]):
    """Counts how often it is looked at."""

    num_reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(place)


@pytest.mark.parametrize(
    ("rows", "round_s", "most"), [(1, 0.0, 300), (64, 0.0, 600), (1, 0.05, 1500)]
)
def test_long_drafts_are_chosen_in_little_time(rows: int, round_s: float, most: int) -> None:
    """What it looks at does not grow with the square of the longest draft."""
    step_s = Counted([1.0 + 0.001 * drafted for drafted in range(513)])
    choice = choose_lengths([0.9] * rows, [MOST_GUESSED] * rows, 512, step_s, round_s)
    assert choice.speedup > 2
    assert step_s.num_reads < most


def test_it_finds_out_when_guesses_become_right_and_wrong_again() -> None:
    machine = Machine(memory_bound, 0.0)
    machine.run(1000)
    machine.rate = 0.95
    machine.run(300)
    assert machine.run(500) > 0.95 * machine.best()
    machine.rate = 0.0
    assert machine.run(1000) > 0.96 * machine.plain()
    assert machine.run(1000) > 0.98 * machine.plain()


def test_an_outlier_does_not_put_it_off_for_good() -> None:
    machine = Machine(memory_bound, 0.95)
    machine.step_s = lambda tokens: 1.0 if tokens > 1 else 0.0105
    machine.run(10)
    machine.step_s = memory_bound
    machine.run(12_000)
    assert machine.run(500) > 0.9 * machine.best()


def test_what_it_is_compared_with_is_measured_again() -> None:
    machine = Machine(memory_bound, 0.98)
    machine.run(1000)
    plain = [number for number, length in enumerate(machine.lengths) if not length]
    assert 10 < len(plain) < 30


def test_more_sequences_than_allowed() -> None:
    config = SpeculationConfig("ngram", disable_by_batch_size=3)
    machine = Machine(memory_bound, 0.9, rows=4, config=config)
    machine.run(50)
    assert not any(machine.lengths)
    machine.requests.pop()
    machine.run(50)
    assert any(machine.lengths)


def test_fewer_guesses_where_more_sequences_run() -> None:
    config = SpeculationConfig(
        "ngram", 4, num_speculative_tokens_per_batch_size=((1, 1, 3), (2, 2, 1))
    )
    machine = Machine(memory_bound, 0.95, rows=2, config=config)
    machine.run(50)
    assert max(machine.lengths) == 2
    machine.requests.pop()
    machine.lengths.clear()
    machine.run(50)
    assert max(machine.lengths) == 3


def test_lengths_keep_to_the_budget_and_the_end() -> None:
    machine = Machine(memory_bound, 0.95, rows=2)
    machine.run(50)
    short, long = machine.requests
    short.max_total_tokens = len(short.tokens) + 3
    for budget in (1, 4, 7):
        found = machine.speculator.propose(machine.requests, budget)
        assert sum(map(len, found.values())) <= budget
        assert len(found.get(short, ())) <= 2  # the last token comes by itself
    assert len(found[long]) == 5


def test_a_draft_model_does_not_catch_up_for_the_last_tokens() -> None:
    machine = Machine(memory_bound, 0.95, round_s=0.0001, behind_s=0.001)
    for _ in range(2):
        machine.requests = [request([1] * 100)]
        machine.run(50)
    assert machine.lengths[-1]
    machine.requests = [request([1] * 1000, longest=1010)]
    machine.run(3)
    assert not any(machine.lengths[-3:])
    machine.requests = [request([1] * 20)]
    machine.run(12)
    assert any(machine.lengths[-12:])


def test_failures_are_tried_again_and_end_it(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(memory_bound, 0.9)
    machine.run(20)
    machine.fails = [ProviderError("broken")] * 2
    machine.run(50)
    assert machine.lengths[-1]
    assert machine.requests[0] in machine.guesser.forgotten
    machine.fails = [ProviderError("broken")] * 3
    machine.run(50)
    assert machine.guesser.closed
    assert not any(machine.lengths[-40:])
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1
    assert "speculation is off" in caplog.text


def test_a_lost_device_ends_it_at_once(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(memory_bound, 0.9)
    machine.run(20)
    machine.fails = [DeviceLostError("gone")]
    machine.run(20)
    assert machine.guesser.closed
    assert "speculation is off" in caplog.text
    machine.speculator.forget(machine.requests[0])
    machine.speculator.close()


@pytest.mark.parametrize(("asking_s", "asked"), [(0.0, 2000), (0.003, 31), (0.1, 1)])
def test_asking_in_vain_takes_little_time(
    asking_s: float, asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of steps of 0.0105 s: every 65th one, or what a hundredth of the time pays for."""
    machine = Machine(memory_bound, 0.9)
    found = 0

    def nothing(requests: Sequence[Request], lengths: Sequence[int]) -> list[Sequence[int]]:
        nonlocal found
        found += 1
        machine.now_s += asking_s
        return [()] * len(requests)

    monkeypatch.setattr(machine.guesser, "propose", nothing)
    machine.run(1000)
    found = 0
    machine.run(2000)
    assert found == pytest.approx(asked, abs=2)
    assert machine.speculator._costs.seconds(1) == pytest.approx(0.0105)


@pytest.mark.parametrize("takes_s", [0.0, 5e-5])
def test_what_is_cold_at_first_does_not_end_it(takes_s: float) -> None:
    """Steps of a small model: the first ones with guesses take as long as four others."""
    cold = 8

    def step_s(tokens: int) -> float:
        nonlocal cold
        cold -= tokens > 1
        return 1.6e-4 if tokens == 1 else 6.4e-4 if cold >= 0 else 2e-4

    machine = Machine(step_s, 0.9)
    machine.guesser.takes_s = takes_s
    machine.run(1000)
    assert sum(machine.lengths[-100:]) > 200


def test_nobody_is_asked_while_nothing_may_be_lost() -> None:
    machine = Machine(memory_bound, 0.9)
    machine.run(20)
    machine.speculator._ledger.balance_s = -0.2
    machine.guesser.num_asked = 0
    plain_s = machine.speculator._costs.seconds(1)
    machine.run(int(0.7 * 0.2 / (FREE_SHARE * plain_s)))
    assert machine.guesser.num_asked == 0
    machine.run(int(0.4 * 0.2 / (FREE_SHARE * plain_s)))
    assert machine.lengths[-1]


def test_what_is_done_for_guesses_is_a_part_of_their_steps() -> None:
    machine = Machine(memory_bound, 0.95)
    machine.guesser.takes_s = 0.0005
    machine.run(300)
    assert machine.lengths[-1] == 5
    costs = machine.speculator._costs
    assert costs.seconds(1) == pytest.approx(memory_bound(1))
    assert costs.seconds(1, 5) == pytest.approx(memory_bound(6) + 0.0005)


def test_counters() -> None:
    machine = Machine(memory_bound, 0.5)
    speculator, one = machine.speculator, machine.requests[0]
    for drafted, accepted in [(5, 3), (2, 0), (3, 1), (0, 0)]:
        speculator.note_verified(one, drafted, accepted)
    counters = speculator.counters
    assert counters.num_drafts == 3
    assert counters.num_draft_tokens == 10
    assert counters.num_accepted_tokens == 4
    assert counters.accepted_per_position == (2, 1, 1, 0, 0)


def test_a_step_that_nobody_was_asked_for_is_charged_besides_the_one_before() -> None:
    machine = Machine(memory_bound, 0.9, recomputes=True)
    machine.run(100)
    speculator = machine.speculator
    speculator._settle()
    before_s = speculator._ledger.balance_s
    for _ in range(2):
        speculator.rests()
        speculator.note_step(1, 9, memory_bound(9))
    speculator._settle()
    lost_s = before_s - speculator._ledger.balance_s
    assert lost_s == pytest.approx(2 * (memory_bound(9) - memory_bound(1)), rel=0.2)
