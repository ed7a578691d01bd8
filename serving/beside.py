"""What is done while the model runs: the next step's plan, and the masks of grammars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from onnxport.serving import sampling
from onnxport.serving.draft import StepPlan
from onnxport.serving.sampling import Masks
from onnxport.serving.scheduler import Scheduler

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

MANY_ROWS = 128  # planning half as many takes no longer than waking a thread that does it


class Beside:
    """A thread beside the model's, which starts when it is first needed."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    @contextmanager
    def run(self, plan: StepPlan, scheduler: Scheduler) -> Iterator[Callable[[], Masks]]:
        """Do what can be done beside the block, in which the model runs a plan.

        The masks are done when it ends. Whether the next plan is makes no difference but in time.

        Yields:
            What returns the masks after the block, by sequence; see `sampling.sample_step`.
        """
        masked = any(plan.requests[row].grammar for row in plan.sampled)
        ahead = len(plan.requests) >= MANY_ROWS
        if not masked and not ahead:
            yield dict
            return
        if self._executor is None:
            from concurrent.futures import ThreadPoolExecutor

            self._executor = ThreadPoolExecutor(1, "onnxport-beside")
        if ahead:
            self._executor.submit(scheduler.plan_ahead, plan)
        if not masked:
            yield dict
            return
        future = self._executor.submit(sampling.grammar_masks, plan)
        try:
            yield future.result
        finally:
            future.exception()  # waits: a grammar is used by one thread at a time

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
