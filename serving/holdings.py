"""What requests hold: the blocks and states of what they have computed, and of a step's tokens."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from onnxport.kv import table as kv
from onnxport.kv.pool import BlockPool
from onnxport.kv.states import StatePool
from onnxport.kv.table import NOTHING, BlockTable, Claim, Reservation, blocks_for
from onnxport.serving.held_states import HeldStates
from onnxport.serving.request import Request
from onnxport.serving.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Claims:
    """What a step takes, whose cached blocks and states are owned already.

    Attributes:
        blocks: of its rows, but for those that take none.
        states: row -> slot, of those that go on from what others have left.
    """

    blocks: list[Claim]
    states: dict[int, int]


class Holdings:
    """The tables and states of the scheduler's requests, over the pools of one model."""

    __slots__ = ("_pool", "_states", "_swapped")

    def __init__(self, pool: BlockPool, states: StatePool | None) -> None:
        """Hold nothing yet.

        Args:
            pool: the blocks.
            states: the slots for states; None: the model has none.
        """
        self._pool = pool
        self._states = HeldStates(states, pool.block_size)
        self._swapped: set[bytes] = set()  # keys of the blocks of preempted requests

    def open(self, request: Request) -> None:
        """Let a request hold something: nothing yet, nor of another model."""
        request.table = BlockTable(len(self._pool.groups))
        request.kept = None

    def is_swapped(self, key: bytes) -> bool:
        """Whether the block of this key was a request's that has yielded and waits to go on."""
        return key in self._swapped

    def note_swapped(self, request: Request, num_tokens: int) -> None:
        """A request yields, which has computed so many tokens."""
        if (keys := request.keys) is not None:
            self._swapped.update(map(keys.key, range(num_tokens // self._pool.block_size)))

    def forget_swapped(self, request: Request) -> None:
        """A request that has yielded goes on or ends: its blocks are like all others."""
        if (keys := request.keys) is not None:
            self._swapped.difference_update(map(keys.key, range(len(keys))))

    def claim(self, plan: StepPlan) -> Claims:
        """Own what rows of a plan have found, before who yields leaves others in its place."""
        claims = []
        for row, (request, num_new) in enumerate(
            zip(plan.requests, plan.num_new_columns, strict=True)
        ):
            if num_new or row in plan.shared or row in plan.copied:
                shared = plan.shared.get(row, NOTHING)
                claims.append(Claim(request.table, shared, num_new, row in plan.copied))
        kv.share(self._pool, claims)
        return Claims(claims, self._states.find(plan))

    def reserve(self, plan: StepPlan, claims: Claims) -> Reservation:
        """Take the step's blocks, and a state to write for each row."""
        reservation = kv.reserve(self._pool, claims.blocks)
        states = self._states.reserve(plan, claims.states)
        return reservation if states is None else replace(reservation, states=states)

    def rollback(self, reservation: Reservation) -> Sequence[int]:
        """Give a step's blocks and states back; returns the rows that have lost their state.

        Nobody knows what is in a state that the step was to write in place.
        """
        kv.rollback(self._pool, reservation)
        states = reservation.states
        self._states.rollback(states)
        return () if states is None else tuple(states.in_place)

    def commit(
        self, plan: StepPlan, reservation: Reservation, accepted: Mapping[int, Sequence[int]]
    ) -> None:
        """A step's tokens are in the cache now, and what it fills is findable.

        Args:
            plan: of the step.
            reservation: what was taken for it.
            accepted: see `Scheduler.commit`.
        """
        undone = self._undone(plan, accepted)
        kv.commit(self._pool, reservation)
        self._states.commit(plan, reservation.states, undone)
        block_size, gives_up = self._pool.block_size, bool(self._pool.groups.windowed)
        for row, request in enumerate(plan.requests):
            num_past, num_new = plan.num_past[row], plan.num_new[row]
            total = num_past + num_new
            right: Sequence[int] = ()
            if row in plan.drafts:
                right = accepted.get(row, ())
                total -= len(plan.drafts[row]) - len(right)
                if row in undone:
                    request.num_owed_tokens, total = total - num_past, num_past
                kv.release_tail(self._pool, request.table, blocks_for(total, block_size))
            request.num_computed_tokens = total
            if request.num_owed_tokens and row not in undone:
                request.num_owed_tokens = max(0, request.num_owed_tokens - num_new)
            if total // block_size > num_past // block_size and request.keys is not None:
                self._register(request, num_past // block_size, total // block_size, right)
                self._states.keep(request, stopped=row in plan.stopped)
            if gives_up:
                kv.give_up(self._pool, request.table, total)

    def fork(self, request: Request, source: Request) -> None:
        """Let a request, which holds nothing, go on from what another one has computed."""
        request.table = kv.fork(self._pool, source.table)
        request.state = self._states.share(source)
        request.keys = None if source.keys is None else source.keys.copy()
        request.num_computed_tokens = source.num_computed_tokens

    def refork(self, slots: Sequence[Request], parents: Mapping[Request, Request]) -> None:
        """Let slots go on from what others hold, all at once; those without a parent hold nothing.

        Args:
            slots: of a beam search.
            parents: slot -> the slot that it goes on from, which may be itself.
        """
        moved = {
            slot: (
                kv.fork(self._pool, parent.table),
                self._states.share(parent),
                parent.num_computed_tokens,
                None if parent.keys is None else parent.keys.copy(),
            )
            for slot, parent in parents.items()
            if slot is not parent
        }
        for slot in slots:
            if slot in moved or slot not in parents:
                self.release(slot)
            if slot in moved:
                slot.table, slot.state, slot.num_computed_tokens, slot.keys = moved[slot]

    def release(self, request: Request) -> None:
        """Free what a request holds of its computed tokens, to the last block and its state."""
        kv.release_tail(self._pool, request.table)
        self._states.release(request)

    def settle(self, request: Request) -> None:
        """A request has ended, and holds nothing any more: its latest state stays findable."""
        self._states.settle(request)

    def hide(self, request: Request) -> None:
        """Hide what a request has computed from others."""
        kv.hide(self._pool, request.table, request.keys)
        self._states.hide(request.keys)

    def check(self, requests: Collection[Request]) -> None:
        """Assert that unfinished requests hold what they have computed, and nobody else does."""
        groups = self._pool.groups
        self._pool.check([tuple(request.table.held()) for request in requests])
        self._states.check(requests)
        for request in requests:
            needed = blocks_for(request.num_computed_tokens, self._pool.block_size)
            assert len(request.table) == needed, f"{request}: {len(request.table)} columns"
            for group, gone in enumerate(request.table.given_up):
                assert gone == groups.first_seen(group, request.num_computed_tokens), request
            assert not any(len(one.table) for one in request.siblings)

    def _undone(self, plan: StepPlan, accepted: Mapping[int, Sequence[int]]) -> Collection[int]:
        """Return the rows of a plan whose states are of wrong guesses."""
        if not self._states.are_there:
            return ()
        drafts = plan.drafts.items()
        return {row for row, draft in drafts if len(accepted.get(row, ())) < len(draft)}

    def _register(
        self, request: Request, start: int, stop: int, accepted: Sequence[int] = ()
    ) -> None:
        """Make columns `start` to `stop - 1` of a request findable; they are full.

        Args:
            request: whose columns.
            start: the first one.
            stop: the one after the last.
            accepted: tokens in them that are about to be appended to the request's own.
        """
        keys = request.keys
        assert keys is not None
        if len(keys) < stop:
            tokens = request.tokens
            keys.extend(tokens + array(tokens.typecode, accepted) if accepted else tokens)
        kv.register(self._pool, request.table, keys, start, stop)
