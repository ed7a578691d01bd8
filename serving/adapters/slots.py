"""Which adapters get a slot of the model, where requests want more than there are."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from onnxport.errors import AdapterError, CapacityError, DeviceLostError, ProviderError
from onnxport.serving.adapters.registry import AdapterRegistry
from onnxport.serving.request import Request

Failed = tuple[Request, AdapterError | CapacityError | ProviderError]


class SlotTurns:
    """Gives slots to the adapters of requests that are about to start. The engine thread's.

    The slot of an adapter that running requests use stays as it is. If all are, the first request
    in line that needs another one keeps its place, rows and blocks, and one slot is drained for it:
    no request behind it starts with that slot's adapter. All others behind it may start.

    Attributes:
        first: the request that a slot is drained for; None: there is no such request.
        barred: waiting requests that may not start, nor keep room for themselves.
    """

    def __init__(self, adapters: AdapterRegistry) -> None:
        self._adapters = adapters
        self._draining: int | None = None  # number of the adapter that is to lose its slot
        self.first: Request | None = None
        self.barred: frozenset[Request] = frozenset()

    def take(self, running: Collection[Request], waiting: Iterable[Request]) -> list[Failed]:
        """Write slots, between two steps, and find out who has to wait for one.

        Args:
            running: the requests that hold a row.
            waiting: the others, more or less in the order of their start. All are looked at: none
                may start without a slot.

        Returns:
            Requests whose adapter could not be written to a slot, each with the reason. They have
            to end before the next step is planned.

        Raises:
            DeviceLostError: the device is gone.
        """
        adapters = self._adapters
        first: Request | None = None
        kept = {one.adapter.number for one in running if one.adapter is not None}
        barred: set[Request] = set()
        failed: list[Failed] = []
        for request in waiting:
            if request.adapter is None:
                continue
            number = request.adapter.number
            if first is not None:
                if number == self._draining or not adapters.has_slot(number):
                    barred.add(request)
                continue
            try:
                if not adapters.has_slot(number) and not adapters.put(number, kept):
                    first = request
                    self._drain()
                    continue
            except DeviceLostError:
                raise
            except (AdapterError, CapacityError, ProviderError) as error:
                failed.append((request, error))
                continue
            kept.add(number)
        if first is None:
            self._draining = None
        elif not running:  # those who have the slots are still to start, and must find room
            barred.add(first)
            first = None
        self.first, self.barred = first, frozenset(barred)
        return failed

    def clear(self) -> None:
        """Every adapter that is wanted has a slot."""
        self.first, self._draining, self.barred = None, None, frozenset()

    def _drain(self) -> None:
        """Let one slot become free: the same one as before, as long as it lasts."""
        if self._draining is None or not self._adapters.has_slot(self._draining):
            self._draining = self._adapters.by_last_use()[0]
