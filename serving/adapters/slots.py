"""Which adapters get a slot of the model, where requests want more than there are."""

from __future__ import annotations

import heapq
from collections.abc import Collection

from onnxport.errors import AdapterError, CapacityError, DeviceLostError, ProviderError
from onnxport.serving.adapters.registry import AdapterRegistry
from onnxport.serving.request import Request
from onnxport.serving.waiting import NO_BARS, Bars, Place, WaitingQueue

Failed = tuple[Request, AdapterError | CapacityError | ProviderError]


class SlotTurns:
    """Gives slots to the adapters of requests that are about to start. The engine thread's.

    The slot of an adapter that running requests use stays as it is, and so does one that a request
    further ahead is to start with. If all are such, one slot is drained for the first request in
    line that needs another one: no request behind it starts with that slot's adapter. As soon as
    those that run alone use it, that first request keeps its rows and blocks. Where requests ahead
    of it come to use that slot, another one is drained beside it, so that they do not hold up the
    first one while those behind it go on; a slot that is drained stays so until it is lost, or
    every adapter that is wanted has one, so nothing is drained in turns for ever. All others behind
    the first request may start. The line is that of `WaitingQueue.place`, whoever's turn it is.
    What is done for a step does not grow with it: of each adapter one request is looked at.

    Attributes:
        first: the request that keeps its room until it has a slot; None: there is none.
        bars: which waiting requests may not start, nor keep room for themselves.
    """

    def __init__(self, adapters: AdapterRegistry) -> None:
        self._adapters = adapters
        # Numbers of the adapters of which one is to lose its slot, those drained first first.
        self._draining: list[int] = []
        self.first: Request | None = None
        self.bars: Bars = NO_BARS

    def take(self, running: Collection[Request], waiting: WaitingQueue) -> list[Failed]:
        """Write slots, between two steps, and find out who has to wait for one.

        Args:
            running: the requests that hold a row.
            waiting: the others: none of them may start without a slot.

        Returns:
            Requests whose adapter could not be written to a slot, each with the reason: all that
            wait for an adapter whose numbers a slot cannot hold, else the one that it was tried
            for. They have to end before the next step is planned.

        Raises:
            DeviceLostError: the device is gone. Who waits is as it was, until the next call.
        """
        kept = {one.adapter.number for one in running if one.adapter is not None}
        ahead: set[int] = set()  # adapters of requests that wait and have a slot
        lines = waiting.by_adapter()
        heads = [(waiting.place(one := next(line)), number, one) for number, line in lines.items()]
        heapq.heapify(heads)
        failed: list[Failed] = []
        while heads:
            place, number, request = heads[0]
            try:
                if not self._adapters.has_slot(number) and not self._adapters.put(number, kept):
                    self._drain_for(request, place, lines, ahead)
                    return failed
            except DeviceLostError:
                raise
            except AdapterError as error:  # it cannot be written for any of them
                failed += [(one, error) for one in (request, *lines[number])]
                heapq.heappop(heads)
                continue
            except (CapacityError, ProviderError) as error:
                failed.append((request, error))
                if (following := next(lines[number], None)) is None:
                    heapq.heappop(heads)
                else:
                    heapq.heapreplace(heads, (waiting.place(following), number, following))
                continue
            kept.add(number)
            ahead.add(number)
            heapq.heappop(heads)
        self.clear()
        return failed

    def clear(self) -> None:
        """Every adapter that is wanted has a slot."""
        self.first, self._draining, self.bars = None, [], NO_BARS

    def _drain_for(
        self, request: Request, place: Place, wanted: Collection[int], ahead: Collection[int]
    ) -> None:
        """Let a slot become free for a request: the same one as before, as long as it lasts.

        One that requests ahead use may be theirs for as long as they keep coming; if all that are
        drained are such, one that they do not use is drained, too.

        Args:
            request: the first in line without a slot.
            place: where it stands.
            wanted: numbers of the adapters that waiting requests use.
            ahead: numbers of those of them that requests further ahead use.
        """
        adapters = self._adapters
        draining = [one for one in self._draining if adapters.has_slot(one)]
        if all(one in ahead for one in draining):
            slots = adapters.by_last_use()
            unused = next((one for one in slots if one not in ahead), None)
            if unused is not None:
                draining.append(unused)
            elif not draining:
                draining.append(slots[0])
        bars: dict[int, Place | None] = {
            number: None for number in wanted if not adapters.has_slot(number)
        }
        bars.update(dict.fromkeys(draining, place))  # who is ahead may start
        first = None
        if any(one not in ahead for one in draining):  # else those must find room to start
            first = request
            assert request.adapter is not None
            bars[request.adapter.number] = place
        self._draining = draining
        self.first, self.bars = first, bars
