"""The waiting requests, in the order of the policy."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Generic, TypeVar

from sortedcontainers import SortedDict, SortedKeyList

from onnxport.serving.request import Request

PATIENCE_S: Final = 30.0

Urgency = tuple[float, tuple[int, int, int]]
Place = tuple[int, Urgency]  # in line: the priority first; no two requests have the same


@dataclass(frozen=True, slots=True)
class Bars:
    """Which waiting requests may not start. Those without an adapter always may.

    Attributes:
        open: the adapters that are not barred, by number, which are few -> the last place of their
            requests that may start, or None: all may. None: nobody is barred.
    """

    open: Mapping[int, Place | None] | None = None


NO_BARS: Final = Bars()


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


Key = TypeVar("Key", bound=tuple[Any, ...])


class Lines(Generic[Key]):
    """Requests in lines, one for each adapter and one for those without. No line is empty."""

    __slots__ = ("_firsts", "_key", "_lines")

    def __init__(self, key: Callable[[Request], Key]) -> None:
        """Start empty.

        Args:
            key: what they are in order of; no two requests have the same, and none changes.
        """
        self._key = key
        # By the adapter's number; None: without one.
        self._lines: dict[int | None, SortedKeyList[Request, Key]] = {}
        self._firsts: SortedKeyList[Request, Key] = SortedKeyList(key=key)  # of each line

    def __len__(self) -> int:
        """How many lines there are."""
        return len(self._lines)

    def __iter__(self) -> Iterator[Request]:
        """Every request, in order."""
        lines = self._lines.values()
        return iter(*lines) if len(lines) == 1 else heapq.merge(*lines, key=self._key)

    def add(self, request: Request) -> None:
        """Put a request in its line."""
        adapter = adapter_of(request)
        line = self._lines.get(adapter)
        if line is None:
            line = self._lines[adapter] = SortedKeyList(key=self._key)
        elif self._key(request) < self._key(line[0]):
            self._firsts.remove(line[0])
        line.add(request)
        if line[0] is request:
            self._firsts.add(request)

    def remove(self, request: Request) -> None:
        """Take a request out, which must be there."""
        adapter = adapter_of(request)
        line = self._lines[adapter]
        was_first = line[0] is request
        line.remove(request)
        if was_first:
            self._firsts.remove(request)
            if line:
                self._firsts.add(line[0])
        if not line:
            del self._lines[adapter]

    def of(self, adapter: int | None) -> Collection[Request]:
        """The requests of one adapter, in order."""
        return self._lines.get(adapter, ())

    def among(self, adapters: Collection[int]) -> list[int]:
        """Those of some adapters that have a line; it takes as long as the fewer of both are."""
        if len(adapters) < len(self._lines):
            return [one for one in adapters if one in self._lines]
        return [one for one in self._lines if one is not None and one in adapters]

    def up_to(self, adapter: int | None, key: Key) -> Iterable[Request]:
        """Those of one adapter whose key is not larger."""
        line = self._lines.get(adapter)
        return () if line is None else line.irange_key(max_key=key)

    def first(self) -> Request:
        """The first of all."""
        return self._firsts[0]

    def firsts(self) -> Iterator[Request]:
        """The first request of each line, in order. Nothing is looked at before it is asked for."""
        return iter(self._firsts)

    def firsts_behind(self, first: Request) -> Iterator[Request]:
        """Go on behind one of `firsts`, as if those of its line were ahead of it no more.

        Its own line is told again, by the request that follows it.
        """
        key, line = self._key(first), self._lines[adapter_of(first)]
        assert line[0] is first
        others = self._firsts.irange_key(min_key=key, inclusive=(False, True))
        return heapq.merge(islice(line, 1, 2), others, key=self._key)


class Lane:
    """The requests of one tenant and priority, at least one, the most urgent first.

    Each adapter has a line of its own, so that many requests are passed over at once.
    """

    __slots__ = ("_level", "_lines", "_urgency")

    def __init__(self, level: int, urgency: Callable[[Request], Urgency]) -> None:
        self._level = level
        self._urgency = urgency
        self._lines = Lines(urgency)

    def __bool__(self) -> bool:
        return len(self._lines) > 0

    def __iter__(self) -> Iterator[Request]:
        return iter(self._lines)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._lines.add(request)

    def remove(self, request: Request) -> None:
        """Take a request out, which must be there."""
        self._lines.remove(request)

    def first(self) -> Request:
        """The most urgent request."""
        return self._lines.first()

    def startable(self, bars: Bars) -> Iterator[Request]:
        """Yield the requests that are not barred, without a look at those that are."""
        if bars.open is None:
            return iter(self)
        lines: list[Iterable[Request]] = [self._lines.of(None)]
        for adapter in self._lines.among(bars.open):
            last = bars.open[adapter]
            if last is None or self._level < last[0]:
                lines.append(self._lines.of(adapter))
            elif self._level == last[0]:
                lines.append(self._lines.up_to(adapter, last[1]))
        return iter(lines[0]) if len(lines) == 1 else heapq.merge(*lines, key=self._urgency)


class WaitingQueue:
    """Requests that hold no blocks, by priority, tenant and urgency."""

    def __init__(self, urgency: Callable[[Request], Urgency] = by_deadline) -> None:
        self._urgency = urgency
        self._levels: SortedDict[int, dict[str, Lane]] = SortedDict()
        self._adapted = Lines(self.place)  # those that use an adapter
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[Request]:
        """Every request, the lowest priority number first, tenant by tenant."""
        return self.startable(NO_BARS)

    def add(self, request: Request) -> None:
        """Queue a request."""
        level = request.rank[0]
        lanes = self._levels.setdefault(level, {})
        if request.tenant not in lanes:
            lanes[request.tenant] = Lane(level, self._urgency)
        lanes[request.tenant].add(request)
        if request.adapter is not None:
            self._adapted.add(request)
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
        if request.adapter is not None:
            self._adapted.remove(request)
        self._size -= 1

    @property
    def levels(self) -> list[int]:
        """The priorities that wait, the first to be served first."""
        return list(self._levels)

    def lanes(self, level: int) -> Mapping[str, Lane]:
        """The requests of one priority by tenant."""
        return self._levels.get(level, {})

    def place(self, request: Request) -> Place:
        """Where a request stands, whoever's turn it is: by priority, then by urgency."""
        return (request.rank[0], self._urgency(request))

    @property
    def adapted(self) -> Lines[Place]:
        """The requests that use an adapter, by their places."""
        return self._adapted

    def startable(self, bars: Bars) -> Iterator[Request]:
        """Yield the requests that are not barred, in the order of `__iter__`."""
        for lanes in self._levels.values():
            for lane in lanes.values():
                yield from lane.startable(bars)
