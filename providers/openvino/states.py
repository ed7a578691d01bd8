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


class RowStates:
    """Pools of all layers that have states; slot 0 stays zeros.

    A single row is read and written where its states lie, several are copied.
    """

    def __init__(self, spec: ArchSpec, plan: StatePlan) -> None:
        """Make the pools."""
        self._pools = [
            _Pool(
                pool.past,
                pool.present,
                huge_page_zeros((plan.pool_slots, *pool.shape), "float32").view(np.float32),
            )
            for pool in state_tensors(spec)
        ]
        # Of each pool, what the last run takes and what it gives: tensors keep nothing alive.
        self._taken: list[NDArray[np.float32]] = []
        self._given: list[NDArray[np.float32]] = []

    def bind(self, request: Any, reads: NDArray[np.int32], writes: NDArray[np.int32]) -> None:
        """Let a run take the states in some slots, and give those for others."""
        import openvino as ov

        is_one = len(reads) == 1
        self._taken, self._given = [], []
        for pool in self._pools:
            if is_one and reads[0] != writes[0]:
                taken = pool.slots[reads[0] : reads[0] + 1]
            else:
                taken = pool.slots[reads]  # a copy, also where a row goes on in its own slot
            given = np.empty_like(taken)
            if is_one:
                given = pool.slots[writes[0] : writes[0] + 1]
            self._taken.append(taken)
            self._given.append(given)
            request.set_tensor(pool.past, ov.Tensor(taken, shared_memory=True))
            request.set_tensor(pool.present, ov.Tensor(given, shared_memory=True))

    def keep(self, writes: NDArray[np.int32]) -> None:
        """Put what the run gave into their slots."""
        if len(writes) > 1:
            for pool, given in zip(self._pools, self._given, strict=True):
                pool.slots[writes] = given
