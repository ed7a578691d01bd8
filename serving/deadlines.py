"""When requests end unless they have before."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from onnxport.serving.request import Request

FORGOTTEN = 64  # entries of requests that have ended, before they are swept out


class Deadlines:
    """The deadlines of the unfinished requests, the earliest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, tuple[int, int, int], tuple[Request, ...]]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, group: tuple[Request, ...], num_unfinished: int) -> None:
        """Note the deadline of a submitted request, if it has one.

        Args:
            group: all its sequences.
            num_unfinished: requests that are unfinished, this one included.
        """
        first = group[0]
        if first.deadline_s == math.inf:
            return
        heapq.heappush(self._heap, (first.deadline_s, first.rank, group))
        if len(self._heap) > 2 * num_unfinished + FORGOTTEN:
            self._heap = [entry for entry in self._heap if any(map(_unfinished, entry[2]))]
            heapq.heapify(self._heap)

    def passed(self, now_s: float) -> Iterator[Request]:
        """Yield the unfinished sequences whose deadline has passed, each once."""
        while self._heap and self._heap[0][0] <= now_s:
            for request in heapq.heappop(self._heap)[2]:
                if _unfinished(request):
                    yield request


def _unfinished(request: Request) -> bool:
    return request.finish_reason is None
