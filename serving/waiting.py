"""The waiting requests, in the order of the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from sortedcontainers import SortedDict, SortedKeyList

from onnxport.serving.request import Request

PATIENCE_S: Final = 30.0

Urgency = tuple[float, tuple[int, int, int]]
Lanes = dict[str, "SortedKeyList[Request, Urgency]"]  # tenant -> requests, the most urgent first


def by_arrival(request: Request) -> Urgency:
    """The order inside one priority where nothing else counts."""
    return (0.0, request.rank)


def by_deadline(request: Request) -> Urgency:
    """The order inside one tenant and priority: the earlier deadline first, then by arrival.

    Whoever gives none, or a late one, is served as if it were PATIENCE_S after the arrival. So
    nobody waits for ever for others that came later and are in a hurry.
    """
    return (min(request.deadline_s, request.times.arrival_s + PATIENCE_S), request.rank)


class WaitingQueue:
    """Requests that hold no blocks, by priority, tenant and urgency."""

    def __init__(self, urgency: Callable[[Request], Urgency] = by_deadline) -> None:
        self._urgency = urgency
        self._levels: SortedDict[int, Lanes] = SortedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Every request, the lowest priority number first, tenant by tenant."""
        for lanes in self._levels.values():
            for lane in lanes.values():
                yield from lane

    def __contains__(self, request: Request) -> bool:
        lane = self._levels.get(request.rank[0], {}).get(request.tenant)
        return lane is not None and request in lane

    def add(self, request: Request) -> None:
        """Queue a request."""
        lanes = self._levels.setdefault(request.rank[0], {})
        if request.tenant not in lanes:
            lanes[request.tenant] = SortedKeyList(key=self._urgency)
        lanes[request.tenant].add(request)
        self._size += 1

    def remove(self, request: Request) -> None:
        """Take a request out, which must be there."""
        level, tenant = request.rank[0], request.tenant
        lanes = self._levels[level]
        lanes[tenant].remove(request)
        if not lanes[tenant]:
            del lanes[tenant]
        if not lanes:
            del self._levels[level]
        self._size -= 1

    @property
    def levels(self) -> list[int]:
        """The priorities that wait, the first to be served first."""
        return list(self._levels)

    def lanes(self, level: int) -> Lanes:
        """The requests of one priority by tenant."""
        return self._levels.get(level, {})

    def first(self) -> Request | None:
        """The most urgent request of the first priority, whoever's turn it is."""
        if not self._levels:
            return None
        lanes = self._levels.peekitem(0)[1]
        return min((lane[0] for lane in lanes.values()), key=self._urgency)
