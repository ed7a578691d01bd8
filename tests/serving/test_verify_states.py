"""What verify does with models that have states: their slots, and what it skips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.kv.states import SLOTS_PER_SEQUENCE
from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel
from onnxport.serving.verify.golden import rows_of
from onnxport.serving.verify.prompts import MOST_PROMPTS, make_prompts
from onnxport.serving.verify.sequence import LoneSequence
from onnxport.serving.verify.speed import _fits
from onnxport.serving.verify.verifier import Checks
from tests.serving.verifying import GOLDEN, FakeProvider, WrongModel, all_right, fake_verifier

SLOTS = (SLOTS_PER_SEQUENCE + 1) * MOST_PROMPTS
TOKENS = GOLDEN.tolist()


class Noting(WrongModel):
    """Notes the slots of each step of one row."""

    def __init__(self, state_slots: int) -> None:
        super().__init__(state_slots=state_slots)
        self.slots: list[tuple[int, int]] = []

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        if inputs.state_reads is not None and inputs.state_writes is not None:
            self.slots.append((int(inputs.state_reads[0]), int(inputs.state_writes[0])))
        return super().run(inputs)


def stateful(wrong: Any = all_right, **options: Any) -> WrongModel:
    return WrongModel(wrong, state_slots=SLOTS, **options)


@pytest.mark.parametrize(("slots", "last"), [(2, (2, 1)), (9, (2, 1))])
def test_a_lone_sequence_writes_two_slots_by_turns(slots: int, last: tuple[int, int]) -> None:
    model = Noting(slots)
    sequence = LoneSequence(model, 8)
    for start, stop in ((0, 5), (5, 6), (6, 8)):
        sequence.step(TOKENS[start:stop], [0])
    assert model.slots == [(0, 1), (1, 2), last]


def test_rows_are_those_of_one_step() -> None:
    whole = rows_of(stateful(), GOLDEN, [4, 9, 19], len(GOLDEN))
    for first in (1, 7, 19):
        assert np.array_equal(rows_of(stateful(), GOLDEN, [4, 9, 19], first), whole)
    assert not np.array_equal(rows_of(WrongModel(), GOLDEN, [4, 9, 19], 20), whole)


def test_providers_are_compared_and_what_k_v_alone_are_for_is_skipped(
    monkeypatch: Any, tmp_path: Path
) -> None:
    providers = {
        "first": FakeProvider(stateful),
        "second": FakeProvider(lambda: stateful(block_size=64)),
        "forgetful": FakeProvider(lambda: Forgetful(state_slots=SLOTS)),
    }
    verifier = fake_verifier(monkeypatch, tmp_path, providers, has_states=True)
    found = {name: verifier.verify(name) for name in providers}
    for name in ("first", "second"):
        assert (found[name].state, found[name].reason) == ("passed", "")
        (mode,) = found[name].modes
        assert {one.name: one.state for one in mode.variants} == {
            "batched": "passed",
            "chunked": "passed",
            "cached": "passed",
            "preempted": "passed",
        }
        [transfer] = found[name].transfers
        assert (transfer.source, transfer.tokens.state) == (name, "skipped")
        assert transfer.tokens.reason == "K/V alone are of no use to a model that has states"
        [options] = providers[name].options
        assert options.state_slots == SLOTS
    agreement = found["second"].modes[0].agreement
    assert agreement is not None
    assert (agreement.reference, agreement.tokens.state) == ("first", "passed")
    assert found["forgetful"].state == "failed"


class Forgetful(WrongModel):
    """Begins anew in every step of several tokens."""

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        new = np.diff(inputs.cumulative_sequence_lengths)
        logits = NullModel.run(self, inputs)
        lost = (inputs.past_sequence_lengths > 0) & (new > 1)
        return np.roll(logits, 1, axis=1) if lost.any() else logits


def test_all_prompts_run_at_once() -> None:
    sizes = {
        len(make_prompts(TOKENS, WrongModel(block_size=size).capabilities).all)
        for size in (4, 16, 64)
    }
    assert max(sizes) == MOST_PROMPTS


def test_speed_is_of_as_many_rows_as_have_states(monkeypatch: Any, tmp_path: Path) -> None:
    assert [_fits(WrongModel(state_slots=slots), 8) for slots in (15, 16, 0)] == [
        False,
        True,
        True,
    ]
    providers = {"few": FakeProvider(lambda: WrongModel(state_slots=7))}
    checks = Checks(variants=False, caches=False)
    report = fake_verifier(monkeypatch, tmp_path, providers, checks=checks, has_states=True).verify(
        "few"
    )
    assert report.speed is not None
    assert [one.rows for one in report.speed.decode] == [1]
