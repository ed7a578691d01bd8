"""What is done when a step fails: look for the request that made it, or for another provider."""

from __future__ import annotations

import logging
from collections.abc import Callable

from onnxport.errors import CapacityError, DeviceLostError, DeviceMemoryError
from onnxport.serving.beams import BeamGroup
from onnxport.serving.growth import Growth
from onnxport.serving.intake import Intake
from onnxport.serving.limits import longest_beams, remaining_total
from onnxport.serving.outputs import Failure
from onnxport.serving.request import Request
from onnxport.serving.retries import Retries
from onnxport.serving.runtime import Runtime
from onnxport.serving.sampling import with_siblings
from onnxport.serving.sequences import Sequences
from onnxport.serving.step_plan import StepPlan
from onnxport.serving.tally import Tally

logger = logging.getLogger(__name__)


class Recovery:
    """Ends the requests that cannot go on after a failure, and lets all others."""

    def __init__(
        self,
        runtime: Runtime,
        intake: Intake,
        sequences: Sequences,
        retries: Retries,
        tally: Tally,
        clock: Callable[[], float],
    ) -> None:
        """Work on the parts of an engine.

        Args:
            runtime: the model, and how another one takes its place.
            intake: checks requests for that model.
            sequences: end.
            retries: is told with whom and how far requests are tried again.
            tally: is told of failed steps, and of requests that yield.
            clock: the time in seconds, of which it is told.
        """
        self._runtime = runtime
        self._intake = intake
        self._sequences = sequences
        self._retries = retries
        self._tally = tally
        self._clock = clock

    def fail(self, plan: StepPlan, error: Exception) -> list[Growth]:
        """Nothing was computed: look for the request that made the step fail."""
        self._tally.num_failed_steps += 1
        requests = plan.requests
        if len(requests) > 1:
            logger.warning("a step of %d requests failed: %s", len(requests), error)
            no_memory = isinstance(error, DeviceMemoryError)
            self._retries.split(requests, had_no_memory=no_memory)
            return []
        if plan.drafts:
            logger.warning("a step with %d guessed tokens failed: %s", plan.num_tokens - 1, error)
            self._retries.repeat(requests[0])
            return []
        if isinstance(error, DeviceMemoryError) and self._retries.shorten(
            requests[0], plan.num_tokens, self._runtime.rows
        ):
            logger.warning(
                "a step of %d tokens failed; steps have at most %d for now: %s",
                plan.num_tokens,
                self._retries.budget_tokens,
                error,
            )
            return []
        logger.error("request %s failed", requests[0].request_id, exc_info=error)
        return self._sequences.end(requests[0], "error", Failure.of(error))

    def fall_back(self, error: DeviceLostError) -> list[Growth]:
        """The device is gone: go on with another provider, or end every request."""
        self._tally.num_failed_steps += 1
        yielded = self._runtime.fall_back(error)
        self._retries.clear(self._runtime.tokens)
        now = self._clock()
        self._sequences.note_preempted(yielded, now)
        self._intake.move_to(self._runtime.limits, self._runtime.rows)
        growths: list[Growth] = []
        for request in list(self._runtime.scheduler.requests()):
            if request.finish_reason is not None:  # with another beam of its search
                continue
            if self._runtime.failure is not None:
                growths += self._sequences.end(request, "error", Failure(self._runtime.failure))
                continue
            try:
                self.fit(request)
            except CapacityError as reason:
                growths += self._sequences.end(request, "error", Failure(str(reason)))
        return growths

    def fit(self, request: Request) -> None:
        """Let a request that was accepted for another model get no longer than this one takes.

        Raises:
            CapacityError: it is too long already.
        """
        beams = request.beams
        if beams is not None and beams.width > self._runtime.rows:
            raise CapacityError(
                f"the request has {beams.width} beams, and the provider that took over when the "
                f"first one was lost ({self._runtime.limits.provider}) runs {self._runtime.rows} "
                "sequences at once; send it again with fewer"
            )
        longest = remaining_total(
            len(request.tokens) if beams is None else beams.num_tokens,
            request.max_total_tokens,
            self._runtime.limits,
            only_prompt=request.options.only_prompt,
        )
        if beams is not None:
            longest = self._beams_total(request, beams, longest)
        for one in with_siblings(request):
            one.max_total_tokens = longest

    def _beams_total(self, request: Request, beams: BeamGroup, longest: int) -> int:
        """Return how long beams may get together where each may get `longest` alone.

        Raises:
            CapacityError: there is no room for what they are.
        """
        limits = self._runtime.limits
        room = longest_beams(request.num_prompt_tokens, beams.width, longest, limits)
        if room <= beams.num_tokens:
            raise CapacityError(
                f"the request has {beams.width} beams of {beams.num_tokens} tokens, and the "
                f"provider that took over when the first one was lost ({limits.provider}) has "
                f"{limits.num_blocks} KV blocks of {limits.block_size} tokens, too few for a token "
                "more of each; send it again with fewer beams, or give that provider more room "
                "(kv_cache_tokens)"
            )
        return room
