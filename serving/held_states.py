"""Which states requests hold: what a step reads and writes, and what of it is kept."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from onnxport.kv.prefix import KeyChain
from onnxport.kv.states import NO_TOKENS, StatePool, StateStep
from onnxport.serving.request import Request
from onnxport.serving.step_plan import StepPlan


class HeldStates:
    """The states of the scheduler's requests; nothing is held where the model has none."""

    __slots__ = ("_block_size", "_pool")

    def __init__(self, pool: StatePool | None, block_size: int) -> None:
        """Hold nothing yet.

        Args:
            pool: the slots; None: the model has no states.
            block_size: tokens of a block, behind which states are kept.
        """
        self._pool = pool
        self._block_size = block_size

    def find(self, plan: StepPlan) -> dict[int, int]:
        """Own the states that rows of a plan found, before who yields leaves others in their place.

        Returns:
            Row -> slot, of those that go on from what others have left.
        """
        if self._pool is None:
            return {}
        return {row: self._pool.share(self._found(plan, row)) for row in plan.shared}

    def reserve(self, plan: StepPlan, found: Mapping[int, int]) -> StateStep | None:
        """Take a state to write for each row of a plan, and own what it reads.

        A row may lose its state with the step, and is computed again then, unless it has guesses,
        which may be wrong, or one of the step's requests has lost one before: that would go on for
        ever if it is one that makes steps fail.

        Args:
            plan: of the step.
            found: what `find` returned.
        """
        if self._pool is None:
            return None
        losable: list[int] = []
        if not any(request.keeps_state for request in plan.requests):
            losable = [
                row
                for row in range(len(plan.requests))
                if row not in plan.shared and row not in plan.drafts
            ]
        reads = [found.get(row, request.state) for row, request in enumerate(plan.requests)]
        step = self._pool.reserve(reads, losable)
        for slot in found.values():
            self._pool.release(slot)
        return step

    def rollback(self, step: StateStep | None) -> None:
        """Give the states of a step back; its requests hold what they held."""
        if self._pool is not None and step is not None:
            self._pool.rollback(step)

    @property
    def are_there(self) -> bool:
        """Whether the model has states."""
        return self._pool is not None

    def commit(self, plan: StepPlan, step: StateStep | None, undone: Collection[int]) -> None:
        """The step ran: its requests hold what it wrote.

        Args:
            plan: of the step.
            step: what it reads and writes.
            undone: rows whose new state is of guesses that proved wrong; they hold the old one.
        """
        if self._pool is None or step is None:
            return
        self._pool.commit(step)
        for row, (request, state) in enumerate(zip(plan.requests, step.writes, strict=True)):
            if row in undone:
                self._pool.release(state)
                continue
            self._pool.release(request.state)
            request.state = state
            if request.kept is not None:
                self._pool.hand_out_first(request.kept)

    def keep(self, request: Request, *, stopped: bool) -> None:
        """Make the state of a request findable if it is that of whole blocks.

        Of those on its way, in a prompt or its output, the latest is enough, and others' states are
        worth more as long as it goes on.

        Args:
            request: whose state.
            stopped: whether the step ended there so that the state is kept.
        """
        index, partial = divmod(request.num_computed_tokens, self._block_size)
        if self._pool is None or partial:
            return
        assert request.keys is not None
        if request.kept is not None:
            self._pool.pass_by(request.kept)
        kept = self._pool.register(request.state, request.keys.key(index - 1), stays=stopped)
        request.kept = None if stopped else kept

    def share(self, request: Request) -> int:
        """Return the state of a request for another one, which owns it too from now on."""
        return NO_TOKENS if self._pool is None else self._pool.share(request.state)

    def release(self, request: Request) -> None:
        """Free the state of a request."""
        if self._pool is None:
            return
        request.state = self._pool.release(request.state)
        if request.kept is not None:
            self._pool.hand_out_last(request.kept)

    def settle(self, request: Request) -> None:
        """A request has ended: its latest state stays, whoever else had it on their way."""
        if self._pool is not None and request.kept is not None:
            self._pool.settle(request.kept)
            request.kept = None

    def hide(self, keys: KeyChain | None) -> None:
        """Hide the states behind all blocks of a chain."""
        if self._pool is None or keys is None:
            return
        for index in range(len(keys)):
            self._pool.hide(keys.key(index))

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that these hold states if they have computed tokens, and nobody else does."""
        held = list(requests)
        for request in held:
            has_state = self._pool is not None and request.num_computed_tokens > 0
            assert (request.state != NO_TOKENS) == has_state, request
            assert not any(one.state for one in request.siblings)
        if self._pool is not None:
            self._pool.check(request.state for request in held)

    def _found(self, plan: StepPlan, row: int) -> int:
        """Return the slot of a state that others have left."""
        request = plan.requests[row]
        assert self._pool is not None
        assert request.keys is not None
        index = plan.num_past[row] // self._block_size - 1
        found = self._pool.find(request.keys.key(index))
        assert found is not None, f"{request} goes on from a state that is gone"
        return found
