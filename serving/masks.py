"""Grammar masks, computed in a thread of their own while the model runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from onnxport.serving import sampling
from onnxport.serving.draft import StepPlan
from onnxport.serving.sampling import Masks

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor


class MaskThread:
    """Computes the masks of one step at a time; the thread starts when one is needed."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    @contextmanager
    def of(self, plan: StepPlan) -> Iterator[Callable[[], Masks]]:
        """Compute the masks of a plan beside the block; they are done when it ends.

        Yields:
            What returns them after the block, by sequence; see `sampling.sample_step`.
        """
        if not any(plan.requests[row].grammar for row in plan.sampled):
            yield dict
            return
        if self._executor is None:
            from concurrent.futures import ThreadPoolExecutor

            self._executor = ThreadPoolExecutor(1, "onnxport-masks")
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
