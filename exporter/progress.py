"""How far an export is, by the bytes of the checkpoint that it has taken in."""

from __future__ import annotations

from collections.abc import Callable

from onnxport.exporter.checkpoint import Checkpoint
from onnxport.exporter.options import Progress, ProgressCallback
from onnxport.exporter.plan import WeightPlan


def advance_through(
    checkpoint: Checkpoint, plan: WeightPlan, progress: ProgressCallback | None
) -> Callable[[int], None]:
    """A function that counts bytes and reports them."""
    total = sum(checkpoint.size_bytes(name) for name in plan.shapes())
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(Progress(done, total, "converting weights"))

    return advance
