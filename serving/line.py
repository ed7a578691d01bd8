"""The order in which waiting requests of one priority take rows."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator

from onnxport.serving.queues import Queues
from onnxport.serving.request import Request


def in_line(
    queues: Queues, level: int, is_busy: Callable[[str], bool] = lambda _: False
) -> Iterator[Request]:
    """Yield the waiting requests of one priority in the order in which they may take rows.

    A free row goes to the tenant that holds the fewest; of equals, to the one that has not been
    given one for longest, then by arrival. So nobody keeps all rows for long.

    Args:
        queues: who waits and runs.
        level: the priority.
        is_busy: whether a tenant takes no more of them, asked when its turn comes.
    """
    waiting = queues.waiting.lanes(level)
    held: Counter[str] = Counter()
    if len(waiting) > 1:
        for request in queues.running:
            held[request.tenant] += request.num_rows
    requests = {tenant: lane.startable(queues.bars) for tenant, lane in waiting.items()}
    line = [
        (held[tenant], queues.last_start.get(tenant, 0), lane.first().rank, tenant)
        for tenant, lane in waiting.items()
    ]
    heapq.heapify(line)
    while line:
        rows, last_start, rank, tenant = heapq.heappop(line)
        if is_busy(tenant):
            continue
        first = next(requests[tenant], None)
        if first is not None:
            heapq.heappush(line, (rows + first.num_rows, last_start, rank, tenant))
            yield first
