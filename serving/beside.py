"""What is done while the model runs: the next step's plan, and the masks of grammars."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

from onnxport.providers.base import StepInputs
from onnxport.serving import sampling
from onnxport.serving.narrowing import narrow
from onnxport.serving.sampler import native_sampler
from onnxport.serving.sampling import Masks
from onnxport.serving.scheduler import Scheduler
from onnxport.serving.step_plan import StepPlan

logger = logging.getLogger(__name__)

MANY_ROWS = 128  # planning half as many takes no longer than waking a thread that does it


class Beside:
    """A thread beside the model's, which starts when it is first needed."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    @contextmanager
    def run(
        self, plan: StepPlan, inputs: StepInputs, scheduler: Scheduler
    ) -> Iterator[Callable[[], Masks]]:
        """Do what can be done beside the block, in which the model runs a plan.

        The masks are done when it ends. Whether the next plan is makes no difference but in time;
        nor does when the model is told of the masks, which are written into its inputs.

        Yields:
            What returns the masks after the block, by sequence; see `sampling.sample_step`.
        """
        masked = any(plan.requests[row].grammar for row in plan.sampled)
        ahead = len(plan.requests) >= MANY_ROWS
        if ahead:
            self._start(partial(scheduler.plan_ahead, plan))
        if not masked:
            yield dict
            return
        results: SimpleQueue[Masks | BaseException] = SimpleQueue()
        self._start(partial(_put_masks, plan, inputs, results))
        found: list[Masks | BaseException] = []
        try:
            yield lambda: _given(found[0])
        finally:
            found.append(results.get())  # waits: a grammar is used by one thread at a time

    def close(self) -> None:
        """End the thread. Idempotent."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    def _start(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="onnxport-beside", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:
                logger.error("what was to be done beside the model failed", exc_info=error)
            del task  # nothing is kept until the next step


def _put_masks(
    plan: StepPlan, inputs: StepInputs, results: SimpleQueue[Masks | BaseException]
) -> None:
    """Return what the grammars allow, and tell the model."""
    try:
        masks = sampling.grammar_masks(plan)
        sampler = native_sampler()
        if sampler is not None:
            narrow(plan, inputs, masks, sampler)
    except BaseException as error:
        results.put(error)
    else:
        results.put(masks)


def _given(result: Masks | BaseException) -> Masks:
    if isinstance(result, BaseException):
        raise result
    return result
