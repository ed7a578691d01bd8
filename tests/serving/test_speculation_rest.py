"""At rest: trials that no step checks, pauses that grow, and what may be lost."""

from __future__ import annotations

from itertools import groupby

import pytest

from onnxport.serving.request import Request
from onnxport.serving.speculation.acceptance import Acceptance
from onnxport.serving.speculation.answers import FIRST_OUTPUT, LEAST_COMING, AnswerLengths
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.debts import Debts
from onnxport.serving.speculation.ledger import (
    FIRST_S,
    FIRST_STEPS,
    FREE_SHARE,
    MOST_STEPS,
    TRIAL_SHARE,
    Ledger,
)
from onnxport.serving.speculation.pauses import (
    AFTERMATH,
    ASK_SHARE,
    HOPEFUL_PAUSE,
    MOST_HOPES,
    MOST_PAUSE,
    MOST_PAUSE_OF_HEADS,
    PATIENCE,
    Pauses,
)
from onnxport.serving.speculation.speculator import CONTEXT_STEPS, MOST_TELLING, TELLING_S
from onnxport.serving.speculation.trials import Trials
from tests.serving.speculating import Machine, request


def on_trial(guess: list[int]) -> tuple[Trials, Acceptance, Request]:
    acceptance = Acceptance()
    trials = Trials(acceptance)
    one = request([1, 2])
    trials.add(one, guess)
    return trials, acceptance, one


def test_what_comes_shows_whether_a_guess_was_right() -> None:
    trials, acceptance, one = on_trial([5, 6, 7])
    assert trials.judge() is None
    one.tokens.extend([5, 6])
    assert trials.judge() is None  # too early
    trials.add(one, [9])  # and no other one as long as that is so
    one.tokens.extend([7, 9, 9])
    assert trials.judge() is True
    assert acceptance.num_tried(one) == 3
    assert trials.judge() is None
    trials.add(one, [9, 9])
    one.tokens.extend([9, 1, 9])
    assert trials.judge() is False
    assert acceptance.num_tried(one) == pytest.approx(0.95 * 3 + 2)  # one right, one wrong
    trials.add(one, [4])
    one.tokens.append(5)
    before = acceptance.rate(one)
    assert trials.judge() is False
    assert acceptance.rate(one) < before


def test_of_a_request_that_ends_only_what_came_is_judged() -> None:
    trials, acceptance, one = on_trial([5, 6, 7])
    one.tokens.append(5)
    trials.forget(one)
    assert acceptance.num_tried(one) == 1
    assert acceptance.rate(one) > 0.5
    trials, acceptance, one = on_trial([5])
    trials.forget(one)
    trials.forget(one)
    assert acceptance.num_tried(one) == 0


def test_guesses_on_trial_get_longer_while_they_are_right() -> None:
    trials, _, one = on_trial([5])
    assert trials.length == 1
    for length in (2, 4):
        one.tokens.extend([5] * trials.length)
        assert trials.judge() is True
        assert trials.length == length
        trials.add(one, [5] * length)
    one.tokens.append(6)
    assert trials.judge() is False
    assert trials.length == 1


def pauses_after(pauses: Pauses, number: int, asking_s: float, can_afford: bool) -> list[int]:
    return [pauses.after(asking_s, 1.0, can_afford=can_afford)[0] for _ in range(number)]


def test_pauses_grow_until_asking_takes_little_of_the_time() -> None:
    asking_s = 40 * ASK_SHARE / AFTERMATH  # what 40 steps may be burdened with
    pauses = Pauses()
    assert pauses_after(pauses, 7, asking_s, False) == [1, 3, 7, 15, 31, 40, 40]
    pauses.end()
    assert pauses_after(pauses, 2, asking_s, False) == [1, 3]
    assert pauses_after(Pauses(), 9, 1.0, False)[-1] == MOST_PAUSE
    assert pauses_after(Pauses(), 9, 0.0, False) == [0] * 9  # it costs nothing
    patient = pauses_after(Pauses(), 3 * PATIENCE, asking_s, True)
    assert patient == [0] * (PATIENCE - 1) + [1] * PATIENCE + [3] * PATIENCE + [7]


def test_a_trial_that_was_right_is_followed_up_but_not_for_ever() -> None:
    pauses = Pauses()
    pauses_after(pauses, 20, 1.0, False)
    for _ in range(MOST_HOPES):
        pauses.note_trial(True)
        assert pauses_after(pauses, 1, 1.0, False) == [HOPEFUL_PAUSE]
    pauses.note_trial(True)  # it is right and does not pay
    assert pauses_after(pauses, 1, 1.0, False) == [MOST_PAUSE]
    pauses.note_trial(False)
    pauses.note_trial(True)
    assert pauses_after(pauses, 1, 1.0, False) == [HOPEFUL_PAUSE]


def test_what_is_free_is_not_saved_up_and_what_was_saved_is() -> None:
    ledger = Ledger()
    ledger.open(1.0)
    ledger.open(1.0)
    assert ledger.balance_s == FIRST_STEPS
    ledger.note(1e6, 0.0, 1.0)
    assert ledger.balance_s == FIRST_STEPS
    assert not ledger.has_earned(1.0)
    ledger.charge(FIRST_STEPS)
    ledger.note(100.0, 0.0, 1.0)
    assert ledger.balance_s == pytest.approx(100 * FREE_SHARE)
    ledger.note(1.0, 1e6, 1.0)
    assert ledger.balance_s == MOST_STEPS
    assert ledger.has_earned(1.0)
    ledger.note(1.0, -1e6, 1.0)
    assert ledger.balance_s == -MOST_STEPS


def test_small_steps_have_some_milliseconds_to_begin_with() -> None:
    """But not more of them than may ever be lost."""
    for step_s in (1e-4, 5e-4, 1e-3, 1.0):
        ledger = Ledger()
        ledger.open(step_s)
        wanted = max(FIRST_STEPS * step_s, min(FIRST_S, MOST_STEPS * step_s))
        assert ledger.balance_s == pytest.approx(wanted)
        assert FIRST_STEPS * step_s <= ledger.balance_s <= MOST_STEPS * step_s


def test_credit_comes_back_after_so_many_steps() -> None:
    ledger = Ledger()
    ledger.open(1.0)
    assert ledger.steps_to_credit(1.0) == 0
    ledger.charge(FIRST_STEPS + 2.5)
    steps = ledger.steps_to_credit(1.0)
    ledger.note(steps - 2, 0.0, 1.0)
    assert ledger.steps_to_credit(1.0) > 0
    ledger.note(2, 0.0, 1.0)
    assert ledger.steps_to_credit(1.0) == 0


def test_what_a_trial_takes_is_saved_up() -> None:
    ledger = Ledger()
    ledger.open(1.0)
    ledger.note(10.0, 0.0, 1.0)
    price_s = 2 * FIRST_STEPS
    steps = ledger.steps_to_trial(price_s, 1.0)
    assert steps == pytest.approx((price_s - FIRST_STEPS) / TRIAL_SHARE - 10, abs=1)
    ledger.note(steps - 2, 0.0, 1.0)
    assert not ledger.affords_trial(price_s)
    ledger.note(3, 0.0, 1.0)
    assert ledger.affords_trial(price_s)
    assert ledger.steps_to_trial(price_s, 1.0) == 0
    assert not ledger.has_earned(1.0)  # all of it is for free
    ledger.note_trial(price_s)
    ledger.note(1e6, 0.0, 1.0)
    assert ledger.balance_s == pytest.approx(price_s)


def test_more_than_may_ever_be_lost_is_not_saved_up() -> None:
    for price_s, goal_s in [(MOST_STEPS, MOST_STEPS), (MOST_STEPS + 1, FIRST_STEPS)]:
        ledger = Ledger()
        ledger.open(1.0)
        ledger.save_up(price_s, 1.0)
        ledger.note(1e6, 0.0, 1.0)
        assert ledger.balance_s == goal_s


def test_what_is_not_kept_of_savings_is_told() -> None:
    ledger = Ledger()
    ledger.open(1.0)
    assert ledger.note(1.0, MOST_STEPS - FIRST_STEPS - 1, 1.0) == 0
    assert ledger.note(1.0, 5.0, 1.0) == 4
    assert ledger.balance_s == MOST_STEPS
    assert ledger.note(1.0, -5.0, 1.0) == 0


def test_debts_are_paid_of_what_is_saved_or_charged_at_the_end() -> None:
    ledger = Ledger()
    debts = Debts(ledger)
    first, second, third = (request([1]) for _ in range(3))
    debts.add(first, 2.0)
    debts.add(second, 3.0)
    debts.add(second, 4.0)  # it comes nearer, in parts
    debts.pay(3.0)  # all of the first, and one of the seven
    debts.charge(first)
    debts.charge(third)
    assert ledger.balance_s == 0
    debts.note_guessed([second, third])
    debts.add(second, 10.0)  # it has to begin anew
    assert ledger.balance_s == -10
    debts.charge(second)
    debts.charge(second)
    assert ledger.balance_s == -16
    debts.add(second, 1.0)  # nothing is left of what it was
    debts.pay(5.0)
    debts.add(second, 1.0)
    assert ledger.balance_s == -16


def test_the_mean_answer_follows_those_that_end() -> None:
    answers = AnswerLengths()
    one = request([1])
    assert answers.coming(one) == FIRST_OUTPUT
    for num_tokens in (0, 1):  # it waited till it was aborted, or its prompt alone was wanted
        answers.note(num_tokens)
    assert answers.coming(one) == FIRST_OUTPUT
    for _ in range(200):
        answers.note(10)
    assert answers.coming(one) == pytest.approx(10, abs=0.1)
    assert answers.coming(request([1], longest=4)) == 3
    one.tokens.extend([2] * 500)  # longer than any
    assert answers.coming(one) == pytest.approx(LEAST_COMING * 10, abs=0.1)


def test_at_rest_nobody_is_asked() -> None:
    machine = Machine(lambda tokens: 0.010 * tokens, 0.5)  # where no guess can pay
    machine.guesser.takes_s = 0.001
    machine.run(600)
    asked = machine.guesser.num_asked
    machine.run(640)
    assert 5 < machine.guesser.num_asked - asked < 25


class Deaf:
    """Reads nothing of what it is told."""

    reads_final = False

    def note_states(self, *_: object) -> None: ...

    def note_decodes(self, *_: object) -> None: ...


def runs(told: list[bool]) -> list[tuple[bool, int]]:
    """How often each value comes in a row."""
    return [(value, len(list(group))) for value, group in groupby(told)]


def test_in_short_steps_the_last_states_of_a_pause_are_told() -> None:
    def step_s(tokens: int) -> float:
        return 2e-4 * tokens

    machine = Machine(step_s, 0.5, round_s=1e-4, behind_s=1e-5, reader=Deaf())
    machine.run(20_000)
    lengths = runs(machine.told[:-MOST_PAUSE_OF_HEADS])
    assert not any(machine.lengths[-10_000:])  # they do not pay
    assert machine.guesser.num_asked > 10  # which is found out again and again
    told = [length for value, length in lengths if value]
    untold = [length for value, length in lengths if not value]
    # But before the first pause; and the step of which guesses are asked.
    assert set(told[1:-1]) <= {CONTEXT_STEPS, CONTEXT_STEPS + 1}
    assert sum(untold) > 8 * sum(told)
    assert max(untold) <= MOST_PAUSE_OF_HEADS


def test_in_longer_steps_all_of_them_are() -> None:
    shortest_s = TELLING_S / MOST_TELLING
    machine = Machine(lambda tokens: shortest_s * tokens, 0.5, round_s=1e-3, reader=Deaf())
    machine.run(2000)
    assert sum(map(bool, machine.lengths[-1000:])) < 50  # they rest
    assert all(machine.told)


def test_a_long_pause_ends_where_steps_become_longer() -> None:
    def step_s(tokens: int) -> float:
        return 2e-4 * tokens

    machine = Machine(step_s, 0.5, round_s=1e-3, behind_s=1e-4, reader=Deaf())
    for _ in range(20_000):
        machine.step()
        if machine.speculator._idle > MOST_PAUSE_OF_HEADS - 10:
            break
    now_s = machine.now_s
    machine.step_s = lambda tokens: 0.01 + 1e-4 * tokens
    while not machine.told[-1]:
        machine.step()
    assert machine.now_s - now_s < 0.02 * MOST_PAUSE  # a fifth of the pause


@pytest.mark.parametrize("step_s", [1e-4, 1e-2])
def test_a_crowd_is_not_told_of_in_short_steps(step_s: float) -> None:
    config = SpeculationConfig("ngram", disable_by_batch_size=1)
    machine = Machine(lambda _: step_s, 0.5, round_s=step_s, config=config, reader=Deaf(), rows=2)
    machine.run(100)
    machine.told.clear()
    machine.run(200)
    assert sum(machine.told) < 40 if step_s < TELLING_S / MOST_TELLING else all(machine.told)


def test_what_guesses_on_trial_take_is_a_small_part_of_short_steps() -> None:
    def step_s(tokens: int) -> float:
        return 2e-4 * tokens

    machine = Machine(step_s, 0.5, round_s=2e-4, behind_s=3e-5, reader=Deaf())
    machine.guesser.takes_s = 1e-4
    machine.run(2000)
    speed = machine.run(20_000)
    assert speed > 0.985 / step_s(1)


def test_text_that_begins_to_repeat_is_guessed_soon() -> None:
    machine = Machine(lambda tokens: 0.010 + 0.0005 * tokens, 0.0)
    machine.guesser.takes_s = 0.001  # a tenth of a step: it is asked seldom
    machine.run(2000)
    machine.rate = 1.0
    machine.run(3 * MOST_PAUSE)
    assert machine.lengths[-1] == 5
