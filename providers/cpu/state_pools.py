"""The pools of states of the `cpu` provider, in float32 and as the graph contract lays them out."""

from __future__ import annotations

from onnxport.graphs.spec import ArchSpec
from onnxport.providers.memory import huge_page_zeros
from onnxport.providers.ort import CacheTensor, ort_value
from onnxport.providers.states import StatePlan, state_tensors


def allocate_states(spec: ArchSpec, plan: StatePlan) -> list[CacheTensor]:
    """Pools of all layers that have states, zeroed, under the graph's names; slot 0 stays so."""
    return [
        CacheTensor(
            pool.past,
            pool.present,
            ort_value(huge_page_zeros((plan.pool_slots, *pool.shape), pool.dtype)),
        )
        for pool in state_tensors(spec)
    ]
