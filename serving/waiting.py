"""The waiting requests, in the order of the policy."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Final

from sortedcontainers import SortedDict, SortedKeyList

from onnxport.serving.request import Request

PATIENCE_S: Final = 30.0

Urgency = tuple[float, tuple[int, int, int]]
Place = tuple[int, Urgency]  # in line: the priority first; no two requests have the same
# Adapter, by its number -> the last place of its requests that may start; None: none may.
Bars = Mapping[int, Place | None]

NO_BARS: Final[Bars] = MappingProxyType({})


def adapter_of(request: Request) -> int | None:
    """The number of the adapter that a request uses."""
    return None if request.adapter is None else request.adapter.number


def by_arrival(request: Request) -> Urgency:
    """The order inside one priority where nothing else counts."""
    return (0.0, request.rank)


def by_deadline(request: Request) -> Urgency:
    """The order inside one tenant and priority: the earlier deadline first, then by arrival.

    Whoever gives none, or a late one, is served as if it were PATIENCE_S after the arrival. So
    nobody waits for ever for others that came later and are in a hurry.
    """
    return (min(request.deadline_s, request.times.arrival_s + PATIENCE_S), request.rank)


class Lane:
    """The requests of one tenant and priority, at least one, the most urgent first.

    Each adapter has a line of its own, so that many requests are passed over at once.
    """

    __slots__ = ("_level", "_lines", "_urgency")

    def __init__(self, level: int, urgency: Callable[[Request], Urgency]) -> None:
        self._level = level
        self._urgency = urgency
        # By the adapter's number; None: without one. No line is empty.
        self._lines: dict[int | None, SortedKeyList[Request, Urgency]] = {}

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __iter__(self) -> Iterator[Request]:
        return self.startable(NO_BARS)

    def __contains__(self, request: Request) -> bool:
        line = self._lines.get(adapter_of(request))
        return line is not None and request in line

    def add(self, request: Request) -> None:
        """Queue a request."""
        adapter = adapter_of(request)
        if adapter not in self._lines:
            self._lines[adapter] = SortedKeyList(key=self._urgency)
        self._lines[adapter].add(request)

    def remove(self, request: Request) -> None:
        """Take a request out, which must be there."""
        adapter = adapter_of(request)
        line = self._lines[adapter]
        line.remove(request)
        if not line:
            del self._lines[adapter]

    @property
    def lines(self) -> Mapping[int | None, SortedKeyList[Request, Urgency]]:
        """The requests of each adapter, by its number, and under None of none."""
        return self._lines

    def first(self) -> Request:
        """The most urgent request."""
        return min((line[0] for line in self._lines.values()), key=self._urgency)

    def startable(self, bars: Bars) -> Iterator[Request]:
        """Yield the requests that are not barred, without a look at those that are."""
        lines: list[Iterable[Request]] = []
        for adapter, line in self._lines.items():
            if adapter is None or adapter not in bars:
                lines.append(line)
            elif (last := bars[adapter]) is not None and self._level <= last[0]:
                most = last[1] if self._level == last[0] else None
                lines.append(line.irange_key(max_key=most))
        return iter(lines[0]) if len(lines) == 1 else heapq.merge(*lines, key=self._urgency)


class WaitingQueue:
    """Requests that hold no blocks, by priority, tenant and urgency."""

    def __init__(self, urgency: Callable[[Request], Urgency] = by_deadline) -> None:
        self._urgency = urgency
        self._levels: SortedDict[int, dict[str, Lane]] = SortedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Every request, the lowest priority number first, tenant by tenant."""
        return self.startable(NO_BARS)

    def __contains__(self, request: Request) -> bool:
        lane = self._levels.get(request.rank[0], {}).get(request.tenant)
        return lane is not None and request in lane

    def add(self, request: Request) -> None:
        """Queue a request."""
        level = request.rank[0]
        lanes = self._levels.setdefault(level, {})
        if request.tenant not in lanes:
            lanes[request.tenant] = Lane(level, self._urgency)
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

    def lanes(self, level: int) -> Mapping[str, Lane]:
        """The requests of one priority by tenant."""
        return self._levels.get(level, {})

    def first(self, bars: Bars = NO_BARS, passed: Collection[Request] = ()) -> Request | None:
        """The most urgent request of the first priority that has one, whoever's turn it is.

        Args:
            bars: which requests are left out.
            passed: others that are.
        """
        for lanes in self._levels.values():
            firsts = [
                first
                for lane in lanes.values()
                for first in islice((one for one in lane.startable(bars) if one not in passed), 1)
            ]
            if firsts:
                return min(firsts, key=self._urgency)
        return None

    def place(self, request: Request) -> Place:
        """Where a request stands, whoever's turn it is: by priority, then by urgency."""
        return (request.rank[0], self._urgency(request))

    def by_adapter(self) -> dict[int, Iterator[Request]]:
        """The requests of each adapter, by its number, in the order of their places."""
        lines: dict[int, list[list[Iterable[Request]]]] = {}
        for lanes in self._levels.values():
            level: dict[int, list[Iterable[Request]]] = {}
            for lane in lanes.values():
                for adapter, line in lane.lines.items():
                    if adapter is not None:
                        level.setdefault(adapter, []).append(line)
            for adapter, found in level.items():
                lines.setdefault(adapter, []).append(found)
        return {adapter: self._in_line(levels) for adapter, levels in lines.items()}

    def startable(self, bars: Bars) -> Iterator[Request]:
        """Yield the requests that are not barred, in the order of `__iter__`."""
        for lanes in self._levels.values():
            for lane in lanes.values():
                yield from lane.startable(bars)

    def _in_line(self, levels: list[list[Iterable[Request]]]) -> Iterator[Request]:
        for lines in levels:
            yield from lines[0] if len(lines) == 1 else heapq.merge(*lines, key=self._urgency)
