"""Which adapters get a slot of the model, where requests want more than there are."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from onnxport.errors import AdapterError, CapacityError, DeviceLostError, ProviderError
from onnxport.serving.adapters.registry import AdapterRegistry
from onnxport.serving.request import Request
from onnxport.serving.waiting import NO_BARS, Bars, Place, WaitingQueue

MOST_PAUSED: Final = 64  # steps

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
    What is done for a step grows neither with it nor with the number of adapters in it: of each
    adapter that has a slot one request is looked at, up to the first one without.

    A device that could not write a slot is not asked again in that step, whoever else waits, nor in
    the next ones while others run: one at first, and twice as many after each failure that follows,
    up to MOST_PAUSED. Until then those without a slot wait as if none were free.

    Attributes:
        first: the request that keeps its room until it has a slot; None: there is none.
        bars: which waiting requests may not start, nor keep room for themselves.
    """

    def __init__(self, adapters: AdapterRegistry) -> None:
        self._adapters = adapters
        # Numbers of the adapters of which one is to lose its slot, those drained first first.
        self._draining: list[int] = []
        self._num_failures = 0  # of the device to write a slot, since it last did
        self._num_paused = 0  # steps in which it is not asked
        self.first: Request | None = None
        self.bars: Bars = NO_BARS

    def take(self, running: Collection[Request], waiting: WaitingQueue) -> list[Failed]:
        """Write slots, between two steps, and find out who has to wait for one.

        Args:
            running: the requests that hold a row.
            waiting: the others: none of them may start without a slot.

        Returns:
            Requests whose adapter could not be written to a slot, each with the reason: all that
            wait for an adapter whose numbers a slot cannot hold, and the one for which the device
            failed. They have to end before the next step is planned.

        Raises:
            DeviceLostError: the device is gone. Who waits is as it was, until the next call.
        """
        kept = {one.adapter.number for one in running if one.adapter is not None}
        ahead: set[int] = set()  # adapters of requests that wait and have a slot
        failed: list[Failed] = []
        may_write = self._may_write(running)
        line = waiting.adapted.firsts()
        while (request := next(line, None)) is not None:
            assert request.adapter is not None
            number = request.adapter.number
            try:
                if not self._has_slot(number, kept, may_write=may_write):
                    self._drain_for(request, waiting.place(request), ahead)
                    return failed
            except DeviceLostError:
                self._num_failures = self._num_paused = 0  # the next one may do better
                raise
            except AdapterError as error:  # it cannot be written for any of them
                failed += [(one, error) for one in waiting.adapted.of(number)]
                continue
            except (CapacityError, ProviderError) as error:
                self._note_failure()
                may_write = False
                failed.append((request, error))
                line = waiting.adapted.firsts_behind(request)
                continue
            kept.add(number)
            ahead.add(number)
        self.clear()
        return failed

    def clear(self) -> None:
        """Every adapter that is wanted has a slot."""
        self._num_paused = 0
        self.first, self._draining, self.bars = None, [], NO_BARS

    def _may_write(self, running: Collection[Request]) -> bool:
        """Whether the device is asked in this step: not yet if it failed and others go on."""
        if not self._num_paused or not running:
            return True
        self._num_paused -= 1
        return False

    def _has_slot(self, number: int, kept: Collection[int], *, may_write: bool) -> bool:
        """Whether an adapter has a slot, or gets one now; raises as `AdapterRegistry.put`."""
        if self._adapters.has_slot(number):
            return True
        if not may_write or not self._adapters.put(number, kept):
            return False
        self._num_failures = self._num_paused = 0
        return True

    def _note_failure(self) -> None:
        self._num_paused = min(MOST_PAUSED, 1 << self._num_failures)
        self._num_failures += self._num_paused < MOST_PAUSED

    def _drain_for(self, request: Request, place: Place, ahead: Collection[int]) -> None:
        """Let a slot become free for a request: the same one as before, as long as it lasts.

        One that requests ahead use may be theirs for as long as they keep coming; if all that are
        drained are such, one that they do not use is drained, too.

        Args:
            request: the first in line without a slot; one may be free that cannot be written yet.
            place: where it stands.
            ahead: numbers of the adapters in slots that requests further ahead use.
        """
        adapters = self._adapters
        draining = [one for one in self._draining if adapters.has_slot(one)]
        if not adapters.has_free_slot and all(one in ahead for one in draining):
            slots = adapters.by_last_use()
            unused = next((one for one in slots if one not in ahead), None)
            if unused is not None:
                draining.append(unused)
            elif not draining:
                draining.append(slots[0])
        may_start: dict[int, Place | None] = dict.fromkeys(adapters.by_last_use())
        may_start.update(dict.fromkeys(draining, place))  # who is ahead may start
        first = None
        if not draining or any(one not in ahead for one in draining):
            # Else those ahead must find room to start.
            first = request
            assert request.adapter is not None
            may_start[request.adapter.number] = place
        self._draining = draining
        self.first, self.bars = first, Bars(may_start)
