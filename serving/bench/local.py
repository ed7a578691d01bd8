"""A load on an engine in this process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from onnxport.serving.bench.load import Ask
from onnxport.serving.bench.records import RequestRecord
from onnxport.serving.engine import Engine
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams

Clock = Callable[[], float]


@dataclass(slots=True)
class _Progress:
    """One request while it runs."""

    num_prompt_tokens: int
    output_s: list[float] = field(default_factory=list)
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finished_s: float = 0.0
    error: str | None = None

    def add(self, delta: CompletionDelta, now_s: float) -> None:
        """Note what a step brought."""
        if delta.token_ids:
            self.output_s.append(now_s)
            self.num_output_tokens += len(delta.token_ids)
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        if delta.finish_reason is not None:
            self.finished_s = now_s
            if delta.finish_reason not in ("stop", "length"):
                self.error = delta.error or f"the request ended with {delta.finish_reason}"

    def record(self) -> RequestRecord:
        """Return what became of it; all requests of a load arrive at 0."""
        return RequestRecord(
            arrival_s=0.0,
            sent_s=0.0,
            output_s=tuple(self.output_s),
            finished_s=self.finished_s,
            num_prompt_tokens=self.num_prompt_tokens,
            num_output_tokens=self.num_output_tokens,
            num_cached_tokens=self.num_cached_tokens,
            error=self.error,
        )


def run_local(
    engine: Engine,
    asks: Sequence[Ask],
    params: SamplingParams,
    clock: Clock = time.perf_counter,
    name: str = "bench",
) -> list[RequestRecord]:
    """Run requests that all arrive at once; one record each, in their order.

    Args:
        engine: has no other work.
        asks: the requests; tokenizing and checking them is not timed.
        params: how they are decoded, but for `max_tokens`, which each says itself.
        clock: the time in seconds.
        name: begins the request ids.

    Raises:
        RequestError: a prompt is not one for this model.
        CapacityError: a request does not fit the context or the KV cache.
    """
    requests = [
        engine.prepare(f"{name}-{index}", _prompt(ask), replace(params, max_tokens=ask.max_tokens))
        for index, ask in enumerate(asks)
    ]
    progress = {request.request_id: _Progress(request.num_prompt_tokens) for request in requests}
    coming = deque(requests)
    try:
        start_s = clock()
        while coming or engine.has_work:
            while coming and engine.queue_room(coming[0].options) > 0:
                engine.submit(coming.popleft())
            deltas = engine.step()
            now_s = clock() - start_s
            for delta in deltas:
                progress[delta.request_id].add(delta, now_s)
    finally:
        for request in requests:
            engine.abort(request.request_id)
    return [one.record() for one in progress.values()]


def _prompt(ask: Ask) -> str | list[int]:
    return ask.prompt if isinstance(ask.prompt, str) else list(ask.prompt)
