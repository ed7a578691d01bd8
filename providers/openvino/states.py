"""The states of sequences, in host memory: the graph takes those of its rows, and gives theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.spec import ArchSpec
from onnxport.providers.memory import huge_page_zeros
from onnxport.providers.states import StatePlan, state_tensors


@dataclass(frozen=True, slots=True)
class _Pool:
    past: str
    present: str
    slots: NDArray[np.float32]  # [num_states, …]
    # Of the last run, if it had several rows; tensors over them keep nothing alive.
    taken: NDArray[np.float32]  # [most_rows, …]
    given: NDArray[np.float32]  # likewise


class RowStates:
    """Pools of all layers that have states; slot 0 stays zeros.

    A single row is read and written where its states lie, several are copied.
    """

    def __init__(self, spec: ArchSpec, plan: StatePlan) -> None:
        """Make the pools, and room for the rows of a run."""
        assert plan.copies_rows, "rows are copied, and the plan counts no room for that"
        self.most_rows = plan.most_rows  # of a run
        self._pools = [
            _Pool(
                pool.past,
                pool.present,
                *(
                    huge_page_zeros((count, *pool.shape), "float32").view(np.float32)
                    for count in (plan.pool_slots, plan.most_rows, plan.most_rows)
                ),
            )
            for pool in state_tensors(spec)
        ]

    def bind(self, request: Any, reads: NDArray[np.int32], writes: NDArray[np.int32]) -> None:
        """Let a run take the states in some slots, and give those for others."""
        import openvino as ov

        count = len(reads)
        assert count <= self.most_rows, "a step of more rows is cut"
        for pool in self._pools:
            taken, given = pool.taken[:count], pool.given[:count]
            if count == 1:
                given = pool.slots[writes[0] : writes[0] + 1]
            if count == 1 and reads[0] != writes[0]:
                taken = pool.slots[reads[0] : reads[0] + 1]
            else:  # also where a row goes on in its own slot
                for row, slot in enumerate(reads):  # `np.take` would make another copy
                    taken[row] = pool.slots[slot]
            request.set_tensor(pool.past, ov.Tensor(taken, shared_memory=True))
            request.set_tensor(pool.present, ov.Tensor(given, shared_memory=True))

    def keep(self, writes: NDArray[np.int32]) -> None:
        """Put what the run gave into their slots."""
        if len(writes) > 1:
            for pool in self._pools:
                pool.slots[writes] = pool.given[: len(writes)]
