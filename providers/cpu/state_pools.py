"""The pools of states of the `cpu` provider, in float32 and as the graph contract lays them out.

A slot takes memory when it is first written, so sequences that do not run cost none. That needs
small pages: a huge one holds the states that a layer has of several sequences. Once what is on its
place is used, it becomes one (`cache_pages.py`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.spec import ArchSpec
from onnxport.providers.memory import huge_page_zeros
from onnxport.providers.ort import CacheTensor, ort_value
from onnxport.providers.states import StatePlan, state_tensors


def allocate_states(
    spec: ArchSpec, plan: StatePlan
) -> tuple[list[CacheTensor], list[NDArray[Any]]]:
    """Make the pools of all layers that have states, zeroed; slot 0 stays so.

    Returns:
        The pools under the graph's names, and those of matrices without slot 0, which is never
        written; each begins where a huge page can.
    """
    tensors: list[CacheTensor] = []
    matrices: list[NDArray[Any]] = []
    for pool in state_tensors(spec):
        shape = (plan.pool_slots, *pool.shape)
        slot_bytes = int(np.prod(pool.shape)) * np.dtype(pool.dtype).itemsize
        size = slot_bytes * plan.pool_slots
        array = huge_page_zeros(shape, pool.dtype, small_bytes=size, lead_bytes=slot_bytes)
        tensors.append(CacheTensor(pool.past, pool.present, ort_value(array)))
        if spec.linear is not None and pool.shape == spec.linear.recurrent_state:
            matrices.append(array[1:])
    return tensors, matrices
