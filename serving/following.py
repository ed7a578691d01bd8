"""The step after one in which every request decodes: known before that one has run."""

from __future__ import annotations

from onnxport.kv.pool import BlockPool
from onnxport.serving.queues import Queues
from onnxport.serving.step_plan import StepPlan


class Foresight:
    """What follows the last step that ran, as long as nothing else happens."""

    __slots__ = ("_ahead", "_last", "_pool", "_queues")

    def __init__(self, queues: Queues, pool: BlockPool) -> None:
        """Know nothing yet.

        Args:
            queues: who waits and runs.
            pool: where blocks come from.
        """
        self._queues = queues
        self._pool = pool
        self._last: StepPlan | None = None  # the plan since whose commit nothing has changed
        self._ahead: tuple[StepPlan, StepPlan | None] | None = None  # a plan, and what follows it

    def forget(self) -> None:
        """Something happens: what comes next has to be looked for."""
        self._last = self._ahead = None

    def note(self, plan: StepPlan) -> None:
        """A plan is committed."""
        self._last = plan

    def look(self, plan: StepPlan) -> None:
        """Look what follows a plan that runs; from any thread, see `Scheduler.plan_ahead`."""
        self._ahead = (plan, following(plan, self._queues, self._pool))

    def plan(self) -> StepPlan | None:
        """Return what follows the last step, found already or now; None: it is not known."""
        last, ahead = self._last, self._ahead
        if last is None:
            return None
        if ahead is not None and ahead[0] is last:
            return ahead[1]
        return following(last, self._queues, self._pool)


def following(plan: StepPlan, queues: Queues, pool: BlockPool) -> StepPlan | None:
    """Return what `Planner.plan` would choose after a plan, if all its requests decode and go on.

    That is, if each gets one token and nothing else happens. It may be asked for as soon as the
    blocks of `plan` are taken, and in any thread. Where the two have a field in common, they share
    it, the object.

    Args:
        plan: a step that runs, or is the last that ran.
        queues: who waits and runs.
        pool: where blocks come from.

    Returns:
        The plan; None where it has to be looked for.
    """
    requests, block_size = plan.requests, pool.block_size
    if (
        plan.num_decodes != len(requests)
        or len(queues.running) != len(requests)
        or len(queues.waiting)
        or plan.drafts
        or len(plan.sampled) != len(requests)
        or plan.num_new.count(1) != len(requests)
    ):
        return None
    num_past = tuple([past + 1 for past in plan.num_past])
    num_new_columns = []
    for request, past in zip(requests, num_past, strict=True):
        blocks = request.table.blocks
        is_full = past == len(blocks) * block_size
        if request.siblings:  # which fork at the end of the plan's step
            return None
        if request.forked and not is_full and pool.ref_count(blocks[-1]) > 1:
            return None
        num_new_columns.append(int(is_full))
    if sum(num_new_columns) * len(pool.groups) > pool.num_free:
        return None
    return StepPlan(
        requests=requests,
        num_decodes=plan.num_decodes,
        num_past=num_past,
        num_new=plan.num_new,
        num_logits=plan.num_logits,
        num_new_columns=tuple(num_new_columns),
        shared={},
        copied=frozenset(),
        sampled=plan.sampled,
        stopped=frozenset(),
        drafts={},
        preempted=(),
        turns={},
    )
