"""Draft models that have to catch up with each request first: what that may cost, and who pays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from onnxport.errors import ProviderError
from onnxport.serving.request import Request
from onnxport.serving.speculation.ledger import MOST_STEPS
from tests.serving.speculating import Machine, request


def memory_bound(num_tokens: int) -> float:
    return 0.010 + 0.0005 * num_tokens


def drafting(rate: float, behind_s: float = 1e-4, **options: Any) -> Machine:
    return Machine(memory_bound, rate, round_s=0.0005, behind_s=behind_s, **options)


@pytest.mark.parametrize("behind_s", [1e-4, 1.4e-4])
@pytest.mark.parametrize("prompt", [200, 400, 1000, 2000])
def test_a_draft_model_that_was_wrong_is_tried_again(prompt: int, behind_s: float) -> None:
    """Catching up takes two to thirty steps, which have to be saved up for."""
    machine = drafting(0.10, behind_s)
    for _ in range(6):
        machine.answer(prompt, 200)
    machine.rate = 0.95
    for _ in range(16):
        machine.answer(prompt, 500)
    assert machine.answer(prompt, 500) > 2.5 * machine.plain()


def test_what_was_saved_up_is_a_small_part_of_the_time() -> None:
    """Nothing is ever right, and it takes thirty steps to find out."""
    machine = drafting(0.0)
    machine.answer(3000, 1000)
    asked, start_s = machine.guesser.num_asked, machine.now_s
    for _ in range(20):
        machine.answer(3000, 1000)
    assert machine.guesser.num_asked > asked
    assert 20_000 / (machine.now_s - start_s) > 0.985 * machine.plain()


def test_who_could_not_win_it_back_is_not_caught_up_with_to_learn() -> None:
    machine = drafting(0.10)
    for _ in range(100):
        machine.answer(1500, 10)  # answers that take less time than it does
    asked = machine.guesser.num_asked
    for _ in range(1000):
        machine.answer(1500, 10)
    assert machine.guesser.num_asked == asked


@pytest.mark.parametrize("budget", [512, 2048, 1 << 30])
@pytest.mark.parametrize("prompt", [1000, 3000, 6000])
def test_a_prompt_that_takes_more_steps_than_may_be_lost_pays(prompt: int, budget: int) -> None:
    """As long as answers save far more than that, which is charged whole at their ends."""
    machine = drafting(0.95)
    machine.guesser.budget = budget
    machine.answer(prompt, 1000)
    speeds = [machine.answer(prompt, 1000) for _ in range(12)]
    assert min(speeds) > 2.5 * machine.plain()


def test_prompts_that_do_not_pay_any_more_are_found_out() -> None:
    machine = drafting(0.95)
    for _ in range(4):
        machine.answer(6000, 1000)
    machine.rate = 0.0
    start_s = machine.now_s
    machine.answer(6000, 1000)
    lost_s = machine.now_s - start_s - 1000 * memory_bound(1)
    assert lost_s < 6000 * machine.behind_s + (MOST_STEPS + 10) * memory_bound(1)
    assert machine.speculator._ledger.balance_s < 0.5 * -6000 * machine.behind_s
    start_s = machine.now_s
    for _ in range(4):
        machine.answer(6000, 1000)
    assert 4000 / (machine.now_s - start_s) > 0.99 * machine.plain()


def test_a_request_that_is_often_behind_a_little_owes_no_more_for_that() -> None:
    machine = drafting(0.95)
    machine.answer(6000, 100)
    machine.requests = [one] = [request([1] * 6000)]
    while not machine.lengths[-1]:
        machine.step()
    ledger = machine.speculator._ledger
    before_s = ledger.balance_s
    machine.guesser.behind[one] = 20
    machine.step()
    machine.step()
    assert ledger.balance_s > before_s - 0.5 * 6000 * machine.behind_s


def test_a_cold_start_with_a_short_prompt_is_no_price_of_long_ones() -> None:
    machine = drafting(0.95)
    machine.guesser.takes_s = 0.15
    while not machine.guesser.num_asked:
        machine.answer(8, 2)
    machine.guesser.takes_s = 0.0
    for _ in range(8):
        machine.answer(300, 100)
    assert machine.answer(300, 100) > 2 * machine.plain()


@pytest.mark.parametrize("rate", [0.1, 0.95])
def test_what_was_not_computed_costs_nothing(rate: float) -> None:
    """Its context is too short, or its pool is too small."""
    machine = drafting(rate)
    for _ in range(3):
        machine.answer(400, 300)
    behind_s = list(machine.speculator._asker._behind_s)
    one = request([1] * 250)
    machine.guesser.stuck.add(one)
    machine.guesser.takes_s = 1.5e-5
    machine.requests = [one]
    asked, start_s = machine.guesser.num_asked, machine.now_s
    machine.run(2000)
    assert machine.guesser.num_asked > asked
    assert machine.now_s - start_s < 1.005 * 2000 * memory_bound(1)
    machine.speculator.forget(one)
    assert machine.speculator._ledger.balance_s > 0
    assert list(machine.speculator._asker._behind_s) == behind_s


def test_asking_for_what_cannot_be_had_is_asking_in_vain() -> None:
    machine = drafting(0.95)
    machine.answer(100, 300)
    one = request([1] * 100)
    machine.guesser.stuck.add(one)
    machine.guesser.takes_s = 0.001
    machine.requests = [one]
    machine.run(200)
    asked = machine.guesser.num_asked
    assert machine.run(2000) > 0.985 * machine.plain()
    assert machine.guesser.num_asked - asked < 60


def test_others_are_tried_where_one_cannot_be_guessed_for() -> None:
    machine = drafting(0.0, rows=2)
    machine.run(1000)
    machine.rate = 0.95
    stuck, other = machine.requests = [request([1] * 60) for _ in range(2)]
    machine.guesser.stuck.add(stuck)
    machine.run(3000)
    assert machine.speculator._acceptance.num_tried(other)
    assert machine.lengths[-1]


@pytest.mark.parametrize("prompt", [60, 2000])
def test_a_failure_while_it_catches_up_says_nothing_about_its_price(prompt: int) -> None:
    machine = drafting(0.95)
    machine.requests = [request([1] * prompt)]
    machine.guesser.takes_s = 0.5
    machine.fails = [ProviderError("broken")]
    while machine.fails:
        machine.step()
    machine.guesser.takes_s = 0.0
    machine.run(20)
    assert machine.run(500) > 2.5 * machine.plain()


def test_guesses_that_are_not_planned_were_not_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts took the blocks, say: nothing was checked, and nothing was lost but the guessing."""
    machine = Machine(memory_bound, 0.95)
    machine.run(100)
    speculator, ledger = machine.speculator, machine.speculator._ledger
    ledger.balance_s = 0.01
    for _ in range(30):
        assert not speculator.rests()
        if speculator.propose(machine.requests, 64):
            speculator.note_planned(0)
        machine.now_s += memory_bound(1)
        machine.grow(machine.requests[0])
        speculator.note_step(1, 1, memory_bound(1))
    assert ledger.balance_s >= 0.01
    drafted = speculator.propose(machine.requests, 64)
    assert sum(map(len, drafted.values())) == 5
    speculator.note_planned(2)
    assert speculator._step is not None
    assert speculator._step.num_drafted == 2


class Nothing:
    """A grammar that none of the guesses fits."""

    def num_possible(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
        return 0


@pytest.mark.parametrize("round_s", [0.0, 0.0005])
def test_guesses_that_cannot_be_are_asked_for_in_vain(round_s: float) -> None:
    machine = Machine(memory_bound, 0.95, round_s=round_s)
    machine.run(100)
    one = request([1])
    one.grammar = Nothing()  # type: ignore[assignment]
    machine.requests = [one]
    machine.guesser.takes_s = 0.001
    machine.run(200)
    asked = machine.guesser.num_asked
    assert machine.run(2000) > 0.985 * machine.plain()
    assert not any(machine.lengths[-2200:])
    assert machine.guesser.num_asked - asked < 60


def test_a_guess_is_cut_to_what_may_follow() -> None:
    class Two(Nothing):
        def num_possible(self, tokens: Sequence[int], draft: Sequence[int]) -> int:
            return min(2, len(draft))

    machine = Machine(memory_bound, 0.95)
    machine.run(100)
    machine.requests[0].grammar = Two()  # type: ignore[assignment]
    machine.run(200)
    assert set(machine.lengths[-100:]) <= {0, 1, 2}
    assert 2 in machine.lengths[-100:]


def test_requests_that_are_forgotten_leave_nothing() -> None:
    machine = drafting(0.95, rows=3)
    machine.requests = [request([1] * 300) for _ in range(3)]
    stuck: Request = machine.requests[0]
    machine.guesser.stuck.add(stuck)
    machine.run(200)
    for one in machine.requests:
        machine.speculator.forget(one)
    speculator = machine.speculator
    assert not speculator._debts._open_s
    assert not speculator._debts._guessed
    assert not speculator._vain
