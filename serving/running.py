"""Running requests to their ends in the caller's thread, as `LLM` does."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from onnxport.errors import CapacityError, DeviceLostError
from onnxport.serving.collect import Collector
from onnxport.serving.engine import Engine
from onnxport.serving.interrupts import Interrupts
from onnxport.serving.request import Request


def run_to_ends(
    engine: Engine,
    requests: Sequence[Request],
    collectors: Mapping[str, Collector],
    *,
    use_tqdm: bool,
) -> None:
    """Run requests to their ends; an interruption aborts them, after the step that runs.

    They are submitted as the queue has room for them.

    Args:
        engine: runs them, and nothing else.
        requests: prepared ones.
        collectors: take what is added to each, by its id.
        use_tqdm: show a progress bar.

    Raises:
        KeyboardInterrupt: there was an interruption.
    """
    progress = _progress(sum(request.params.num_sequences for request in requests), use_tqdm)
    coming = deque(requests)
    with Interrupts() as interrupts:
        try:
            while coming or engine.has_work:
                interrupts.check()
                while coming and engine.queue_room(coming[0].options) > 0:
                    _submit(engine, coming.popleft(), collectors)
                for delta in engine.step():
                    collectors[delta.request_id].add(delta)
                    if delta.finish_reason is not None:
                        progress()
        finally:
            for request in requests:
                engine.abort(request.request_id)


def _submit(engine: Engine, request: Request, collectors: Mapping[str, Collector]) -> None:
    """Queue a request; it fails alone if it cannot run since a device was lost."""
    try:
        engine.submit(request)
    except (CapacityError, DeviceLostError) as error:
        collectors[request.request_id].fail(str(error))


def _progress(total: int, show: bool) -> Callable[[], object]:
    """Return what to call when a request has ended."""
    if not show:
        return lambda: None
    from tqdm import tqdm

    bar: Any = tqdm(total=total, unit="request", dynamic_ncols=True)
    return lambda: bar.update() and bar.n == total and bar.close()
