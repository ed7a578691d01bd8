"""Who waits, who runs, and whose turn it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from sortedcontainers import SortedKeyList

from onnxport.serving.request import Request
from onnxport.serving.shares import Shares
from onnxport.serving.waiting import NO_BARS, Bars, WaitingQueue


def _by_rank() -> SortedKeyList[Request, tuple[int, int, int]]:
    return SortedKeyList(key=lambda request: request.rank)


@dataclass(slots=True)
class Queues:
    """Who waits, who runs, and whose turn it is: the scheduler's state, which plans look at.

    Attributes:
        quantum: tokens of prompts that a tenant may compute in a round.
        running: the first in rank first.
        num_rows: rows that the running requests hold, for siblings too.
        shares: by priority.
        last_start: tenant -> number of its latest start, from 1.
        bars: which waiting requests may not start, and no room is kept for.
    """

    quantum: int
    waiting: WaitingQueue = field(default_factory=WaitingQueue)
    running: SortedKeyList[Request, tuple[int, int, int]] = field(default_factory=_by_rank)
    num_rows: int = 0
    shares: dict[int, Shares] = field(default_factory=dict)
    last_start: dict[str, int] = field(default_factory=dict)
    bars: Bars = field(default_factory=lambda: NO_BARS)

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.running or len(self.waiting))

    def shares_of(self, level: int) -> Shares:
        """The shares of one priority; fresh ones, which are not kept, where there are none."""
        return self.shares.get(level) or Shares(self.quantum)
