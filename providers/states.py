"""Memory for the states of sequences that layers of linear attention keep, and who has none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from onnxport.errors import CapacityError, ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.spec import ArchSpec
from onnxport.kv.states import SLOTS_PER_SEQUENCE
from onnxport.providers.base import LoadOptions

SEQUENCES: Final = 32  # that there is room for where nobody says how many
STATE_SHARE: Final = 0.5  # of what the weights leave free; K/V are in the rest
STATE_ITEM_BYTES: Final = 4  # float32, of convolutions and matrices


@dataclass(frozen=True, slots=True)
class StatePlan:
    """How many states there is room for."""

    num_slots: int  # that can be written; another one is all zeros. 0: there are no states
    slot_bytes: int  # over all layers that have states

    @property
    def num_bytes(self) -> int:
        """What all slots take, the one of zeros included."""
        return (self.num_slots + 1) * self.slot_bytes if self.num_slots else 0


def state_bytes(spec: ArchSpec) -> int:
    """What the states of one sequence take in float32; 0 where no layer has one."""
    if spec.linear is None:
        return 0
    numbers = math.prod(spec.linear.conv_state) + math.prod(spec.linear.recurrent_state or (0,))
    return len(spec.linear_layers) * numbers * STATE_ITEM_BYTES


def plan_states(
    spec: ArchSpec,
    options: LoadOptions,
    free_bytes: int,
    weight_bytes: int,
    kv_bytes: int = 0,
) -> StatePlan:
    """Plan as many slots as are asked for, or as fit into a share of what the others leave.

    Args:
        spec: the model.
        options: `state_slots` is used.
        free_bytes: memory that can be taken before the weights are loaded.
        weight_bytes: what these take of it.
        kv_bytes: what a KV cache takes whose size was asked for; 0: it is planned afterwards.

    Raises:
        CapacityError: not even one sequence can run.
    """
    size = state_bytes(spec)
    if not size:
        return StatePlan(0, 0)
    wanted = options.state_slots or SEQUENCES * SLOTS_PER_SEQUENCE
    left = max(0, free_bytes - weight_bytes - kv_bytes)
    num_slots = min(wanted, int(left * STATE_SHARE) // size - 1)
    if num_slots < SLOTS_PER_SEQUENCE:
        cache, smaller = "", ""
        if kv_bytes:
            cache = f", the KV cache {kv_bytes} (kv_memory, kv_cache_tokens)"
            smaller = " a smaller KV cache,"
        raise CapacityError(
            f"the states of layers of linear attention do not fit: each sequence needs "
            f"{SLOTS_PER_SEQUENCE} of {size} bytes, and another one is all zeros; state_slots is "
            f"{wanted}, and {left} bytes are left, of which they may take {STATE_SHARE:.0%}, for "
            f"{free_bytes} are free and the weights take {weight_bytes}{cache}. Ask for at "
            f"least {SLOTS_PER_SEQUENCE} state_slots,{smaller} free memory, or export at a lower "
            "precision."
        )
    return StatePlan(num_slots, size)


def refuse_states(artifact: Artifact, provider: str) -> None:
    """Raise ProviderError where a provider that keeps no states is given a model that has some."""
    if artifact.manifest.model.linear is not None:
        raise ProviderError(
            f"the {provider} provider does not run layers of linear attention, which "
            f"{artifact.path.name} has; cpu does"
        )


def refuse_adapters(artifact: Artifact, options: LoadOptions) -> None:
    """Raise ProviderError for LoRA adapters of a model that has such layers."""
    if artifact.manifest.model.linear is not None and options.max_adapters:
        raise ProviderError(
            f"max_adapters is {options.max_adapters}, but adapters do not reach layers of linear "
            f"attention, which {artifact.path.name} has; leave it out"
        )
