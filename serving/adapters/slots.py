"""Which adapters get a slot of the model, where requests want more than there are."""

from __future__ import annotations

from collections.abc import Iterable

from onnxport.errors import CapacityError, DeviceLostError, ProviderError
from onnxport.serving.adapters.registry import AdapterRegistry
from onnxport.serving.request import Request

Failed = tuple[Request, CapacityError | ProviderError]


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

    def take(
        self, running: Iterable[Request], waiting: Iterable[Request], num_rows: int
    ) -> list[Failed]:
        """Write slots, between two steps, and find out who has to wait for one.

        Args:
            running: the requests that hold a row.
            waiting: the others, in the order of their start.
            num_rows: rows that are free.

        Returns:
            Requests whose adapter could not be written to a slot, each with the reason. They have
            to end before the next step is planned.

        Raises:
            DeviceLostError: the device is gone.
        """
        adapters = self._adapters
        self._begin()
        kept = {one.adapter.number for one in running if one.adapter is not None}
        barred: set[Request] = set()
        failed: list[Failed] = []
        for place, request in enumerate(waiting):
            # The first one may start for whom others yield, so rows do not matter to it.
            fits = place == 0 or request.num_rows <= num_rows
            number = None if request.adapter is None else request.adapter.number
            if number is not None and self.first is not None and number == self._draining:
                barred.add(request)
                continue
            if number is not None and not adapters.has_slot(number):
                try:
                    found = fits and self.first is None and adapters.put(number, kept)
                except DeviceLostError:
                    raise
                except (CapacityError, ProviderError) as error:
                    failed.append((request, error))
                    continue
                if not found:
                    if self.first is None:
                        self._drain_for(request)
                        num_rows -= request.num_rows
                    else:
                        barred.add(request)
                    continue
            if number is not None:
                kept.add(number)
            num_rows -= request.num_rows
        if self.first is None:
            self._draining = None
        self.barred = frozenset(barred)
        return failed

    def clear(self) -> None:
        """Every adapter that is wanted has a slot."""
        self.first, self._draining, self.barred = None, None, frozenset()

    def _begin(self) -> None:
        self.first, self.barred = None, frozenset()

    def _drain_for(self, request: Request) -> None:
        """Let one slot become free for a request: the same one as before, as long as it lasts."""
        self.first = request
        if self._draining is None or not self._adapters.has_slot(self._draining):
            self._draining = self._adapters.by_last_use()[0]
