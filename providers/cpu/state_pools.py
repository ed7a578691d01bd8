"""The pools of states of the `cpu` provider, in float32 and as the graph contract lays them out."""

from __future__ import annotations

from onnxport.graphs import contract
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.memory import huge_page_zeros
from onnxport.providers.ort import CacheTensor, ort_value
from onnxport.providers.states import StatePlan


def allocate_states(spec: ArchSpec, plan: StatePlan) -> list[CacheTensor]:
    """Pools of all layers that have states, zeroed, under the graph's names; slot 0 stays so."""
    if spec.linear is None:
        return []
    kinds = (
        (spec.linear.conv_state, contract.past_conv_state, contract.present_conv_state),
        (
            spec.linear.recurrent_state,
            contract.past_recurrent_state,
            contract.present_recurrent_state,
        ),
    )
    return [
        CacheTensor(
            past(layer),
            present(layer),
            ort_value(huge_page_zeros((plan.num_slots + 1, *shape), "float32")),
        )
        for layer in spec.linear_layers
        for shape, past, present in kinds
        if shape is not None
    ]
