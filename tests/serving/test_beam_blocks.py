"""Which blocks beams have, step by step, without a model."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from onnxport.kv.pool import BlockPool
from onnxport.kv.prefix import KeyChain, root_key
from onnxport.kv.table import NOTHING
from onnxport.serving.beams import BeamGroup, Beginning, Candidate
from onnxport.serving.draft import Draft
from onnxport.serving.params import SamplingParams
from onnxport.serving.request import Request
from onnxport.serving.scheduler import Scheduler
from onnxport.serving.step_plan import StepPlan

BLOCK = 4


class Beams:
    """A search of `width` beams, one of which is told what may follow each, in a pool."""

    def __init__(
        self,
        num_blocks: int,
        width: int,
        num_prompt: int,
        *,
        caching: bool = True,
        windows: tuple[int | None, ...] = (None,),
    ):
        self.pool = BlockPool(num_blocks, BLOCK, windows)
        self.scheduler = Scheduler(self.pool, 8, 32)
        params = SamplingParams(n=width, use_beam_search=True)
        prompt = array("q", range(100, 100 + num_prompt))
        slots = [
            Request("a", prompt[:], params, max_total_tokens=100, index=index)
            for index in range(width)
        ]
        first = slots[0]
        first.siblings = tuple(slots[1:])
        if caching:
            first.keys = KeyChain(root_key(), BLOCK)
            first.keys.extend(prompt)
        self.group = BeamGroup(tuple(slots), Beginning(lambda: None, lambda: None, lambda: None))
        for slot in slots:
            slot.beams = self.group
        self.scheduler.submit(first)

    def step(self, *found: Sequence[int]) -> StepPlan:
        """Compute a step; `found` are the tokens that follow each beam, the best one first."""
        plan = self.scheduler.plan()
        decodes = plan.requests[: plan.num_decodes]
        columns = Draft(self.pool, 32, 8).columns_for(decodes)
        assert columns == sum(plan.num_new_columns[: plan.num_decodes]) + len(plan.copied)
        reservation = self.scheduler.reserve(plan)
        self.scheduler.commit(plan, reservation)
        arrived = [plan.requests[row] for row in plan.sampled]
        for place, beam in enumerate(self.group.live):
            assert beam.slot in arrived
            tokens = found[place] if found else ()
            self.group.found[beam.slot] = tuple(
                Candidate(token_id, -1.0 - 0.1 * rank) for rank, token_id in enumerate(tokens)
            )
        children = self.group.advance()
        seats = self.group.seat(children)
        parents = {slot: child.parent.slot for slot, child in seats.items()}
        self.scheduler.refork(self.group, parents)
        self.group.take(children, seats)
        self.scheduler.check()
        return plan

    @property
    def blocks(self) -> list[list[int]]:
        return [list(slot.table.blocks) for slot in self.group.slots]


def test_beams_share_blocks_and_copy_what_they_write_to() -> None:
    beams = Beams(num_blocks=12, width=3, num_prompt=6)
    beams.step([1, 2])
    assert beams.blocks == [[0, 1], [0, 1], []]  # two beams, and a slot without one
    assert [slot.running for slot in beams.group.slots] == [True, True, False]
    assert beams.group.slots[0].siblings == beams.group.slots[2:]
    plan = beams.step([3, 4], [5])
    assert plan.copied == {0}  # the last of them writes to the block itself
    assert beams.blocks == [[0, 2], [0, 1], [0, 2]]
    assert [slot.tokens[6:].tolist() for slot in beams.group.slots] == [[1, 3], [2, 5], [1, 4]]
    plan = beams.step([6], [7], [8])  # token 7 is the last of a block
    assert plan.copied == {0}
    assert beams.blocks == [[0, 3], [0, 1], [0, 2]]
    plan = beams.step([6], [7], [8])
    assert (plan.copied, plan.num_new_columns) == (set(), (1, 1, 1))


def test_what_no_beam_goes_on_from_is_free() -> None:
    beams = Beams(num_blocks=12, width=2, num_prompt=4)
    beams.step([1, 2])
    assert beams.blocks == [[0], [0]]
    beams.step([3, 4, 5], [])  # both go on from the first
    assert beams.blocks == [[0, 1], [0, 1]]
    assert beams.pool.num_free == 10
    assert [slot.tokens[4:].tolist() for slot in beams.group.slots] == [[1, 3], [1, 4]]


def test_all_of_them_yield_and_are_replayed_from_where_they_part() -> None:
    beams = Beams(num_blocks=12, width=3, num_prompt=4)
    beams.step([1, 2, 3])
    beams.step([4, 5, 6], [], [])  # all go on from the first
    beams.step([7], [8], [9])
    beams.step([1], [1], [1])
    before = [(beam.slot.tokens.tolist(), beam.logprob) for beam in beams.group.live]
    first = beams.group.slots[0]
    beams.scheduler._preempt(beams.group.slots[2])
    beams.scheduler.check()
    assert beams.pool.num_free == 12
    assert first.tokens[4:].tolist() == [1]
    assert beams.blocks == [[], [], []]
    assert beams.scheduler.num_waiting == 1
    assert beams.scheduler.plan().shared  # the prompt's block is found again
    rounds = []
    while beams.group.behind:
        beams.step()
        rounds.append(sorted(len(table) for table in beams.blocks))
    assert [beam.slot.tokens.tolist() for beam in beams.group.live] == [one for one, _ in before]
    assert [beam.logprob for beam in beams.group.live] == [one for _, one in before]
    assert rounds == [[2, 2, 2]] * 3


def test_beams_need_room_for_what_they_were() -> None:
    """Where only what they have in common finds room they would yield again at once."""
    beams = Beams(num_blocks=5, width=3, num_prompt=4)
    beams.step([1, 2, 3])
    beams.step([4, 5, 6], [], [])
    scheduler = beams.scheduler
    scheduler._preempt(beams.group.slots[0])
    assert beams.group.blocks_behind(beams.pool.groups) == 3
    other = Request("b", array("q", range(5)), SamplingParams(), max_total_tokens=20)
    scheduler.submit(other)
    plan = scheduler.plan([other])
    scheduler.commit(plan, scheduler.reserve(plan))
    other.tokens.append(1)
    assert beams.pool.num_free == 3  # two would do for the beginning
    assert scheduler.plan().requests == (other,)
    scheduler.finish(other, "length")
    assert scheduler.plan().requests == (beams.group.slots[0],)
    while beams.group.behind:
        beams.step()
    assert len(beams.group.live) == 3


@pytest.mark.parametrize(
    ("windows", "needed"), [((None,), 1 + 3 * 6), ((8,), 1 + 3 * 3), ((None, 8), 2 + 3 * 9)]
)
def test_beams_need_room_for_what_windows_hold_of_them(
    windows: tuple[int | None, ...], needed: int
) -> None:
    """And that is enough: nobody yields while they are computed again."""
    beams = Beams(num_blocks=32, width=3, num_prompt=4, caching=False, windows=windows)
    beams.step([1, 2, 3])
    for _ in range(20):
        beams.step([4], [5], [6])
    first = beams.group.slots[0]
    beams.scheduler._preempt(first)
    draft = Draft(beams.pool, 32, 8)
    assert draft.needed(first, NOTHING) == needed
    most = 0
    while beams.group.behind:
        beams.step()
        most = max(most, beams.pool.num_blocks - beams.pool.num_free)
    assert most <= needed
