"""Memory for the states of sequences that layers keep, and who has none."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from onnxport.errors import CapacityError, ProviderError
from onnxport.graphs import contract
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.spec import ArchSpec
from onnxport.kv.states import SLOTS_PER_SEQUENCE
from onnxport.providers.base import LoadOptions, StepInputs
from onnxport.providers.pool import UNKNOWN_BYTES, PoolPlan, is_exact

SEQUENCES: Final = 32  # that there is room for where nobody says how many
STATE_SHARE: Final = 0.5  # of what the weights leave free; K/V are in the rest
STATE_ITEM_BYTES: Final = 4  # float32, of matrices, and of convolutions unless said otherwise


@dataclass(frozen=True, slots=True)
class StatePlan:
    """How many states there is room for."""

    num_slots: int  # that can be written; another one is all zeros. 0: there are no states
    slot_bytes: int  # over all layers that have states
    num_spare: int = 0  # slots behind the others, for what pads a step
    copies_rows: bool = False  # of steps with several: what they read, and what they write

    @property
    def most_rows(self) -> int:
        """Rows of a step at most, where each has the slots of a sequence to itself."""
        return self.num_slots // SLOTS_PER_SEQUENCE

    @property
    def pool_slots(self) -> int:
        """Slots of a pool, the one of zeros and the spare ones included."""
        return self.num_slots + 1 + self.num_spare if self.num_slots else 0

    @property
    def num_bytes(self) -> int:
        """What all slots take, the one of zeros included, and copies of rows."""
        copies = 2 * self.most_rows if self.copies_rows else 0
        return (self.pool_slots + copies) * self.slot_bytes


def state_bytes(spec: ArchSpec, conv_item_bytes: int = STATE_ITEM_BYTES) -> int:
    """What the states of one sequence take; 0 where no layer has one.

    Args:
        spec: the model.
        conv_item_bytes: of a number that a convolution keeps; matrices are float32.
    """
    return len(spec.linear_layers) * sum(_sizes(spec, conv_item_bytes))


@dataclass(frozen=True, slots=True)
class StateTensor:
    """A pool of states as the graph contract has it."""

    past: str
    present: str
    shape: tuple[int, ...]  # of a slot
    dtype: str


def state_tensors(spec: ArchSpec, conv_dtype: str = "float32") -> list[StateTensor]:
    """The pools of all layers that have states; those of convolutions are of `conv_dtype`."""
    found = []
    for layer in spec.linear_layers:
        assert spec.linear is not None
        names = contract.past_conv_state(layer), contract.present_conv_state(layer)
        found.append(StateTensor(*names, spec.linear.conv_state, conv_dtype))
        if spec.linear.recurrent_state is not None:
            names = contract.past_recurrent_state(layer), contract.present_recurrent_state(layer)
            found.append(StateTensor(*names, spec.linear.recurrent_state, "float32"))
    return found


def _sizes(spec: ArchSpec, conv_item_bytes: int) -> tuple[int, int]:
    """Bytes of a sequence's state in a layer: of the convolution, and of the matrices."""
    if spec.linear is None:
        return 0, 0
    matrices = math.prod(spec.linear.recurrent_state or (0,))
    return math.prod(spec.linear.conv_state) * conv_item_bytes, matrices * STATE_ITEM_BYTES


def plan_states(
    spec: ArchSpec,
    options: LoadOptions,
    free_bytes: int | None,
    weight_bytes: int,
    kv_bytes: int = 0,
    *,
    conv_item_bytes: int = STATE_ITEM_BYTES,
    num_spare: int = 0,
    copies_rows: bool = False,
    buffer_bytes: int | None = None,
) -> StatePlan:
    """Plan as many slots as are asked for, or as fit into a share of what the others leave.

    Args:
        spec: the model.
        options: `state_slots` is used.
        free_bytes: memory that can be taken before the weights are loaded; None: not known, and
            UNKNOWN_BYTES are left.
        weight_bytes: what these take of it.
        kv_bytes: what a KV cache takes whose size was asked for; 0: it is planned afterwards.
        conv_item_bytes: of a number that a convolution keeps.
        num_spare: slots that nobody counts as his, for what pads a step.
        copies_rows: see `StatePlan`; each slot takes twice the room then.
        buffer_bytes: the largest buffer that the device has, for the states of a layer; None: no
            limit.

    Raises:
        CapacityError: not even one sequence can run.
    """
    size = state_bytes(spec, conv_item_bytes)
    if not size:
        return StatePlan(0, 0)
    wanted = options.state_slots or SEQUENCES * SLOTS_PER_SEQUENCE
    left = UNKNOWN_BYTES if free_bytes is None else max(0, free_bytes - weight_bytes - kv_bytes)
    # A sequence has two slots, and its row is copied twice.
    times = 2 if copies_rows else 1
    num_slots = min(wanted, (int(left * STATE_SHARE) // size - 1 - num_spare) // times)
    if buffer_bytes is not None:
        fits = buffer_bytes // max(_sizes(spec, conv_item_bytes)) - 1 - num_spare
        if fits < SLOTS_PER_SEQUENCE <= num_slots:
            raise CapacityError(
                f"the states of sequences do not fit: the device's buffers hold "
                f"{buffer_bytes} bytes, and of the largest states of a layer there are to be "
                f"{SLOTS_PER_SEQUENCE + 1 + num_spare} of {max(_sizes(spec, conv_item_bytes))} "
                "bytes in one; choose another provider"
            )
        num_slots = min(num_slots, fits)
    if num_slots < SLOTS_PER_SEQUENCE:
        cache, smaller = "", ""
        copies = ", copies in steps of several included" if copies_rows else ""
        there = "the device does not tell its memory"
        if kv_bytes:
            cache = f", the KV cache {kv_bytes} (kv_memory, kv_cache_tokens)"
            smaller = " a smaller KV cache,"
        if free_bytes is not None:
            there = f"{free_bytes} are free and the weights take {weight_bytes}{cache}"
        raise CapacityError(
            f"the states of sequences do not fit: each sequence needs "
            f"{times * SLOTS_PER_SEQUENCE} of {size} bytes{copies}, and another one is all zeros; "
            f"state_slots is "
            f"{wanted}, and {left} bytes are left, of which they may take {STATE_SHARE:.0%}, for "
            f"{there}. Ask for at least {SLOTS_PER_SEQUENCE} state_slots,{smaller} free memory, or "
            "export at a lower precision."
        )
    return StatePlan(num_slots, size, num_spare, copies_rows)


def plan_memory(
    spec: ArchSpec,
    options: LoadOptions,
    free_bytes: int | None,
    plan: Callable[..., PoolPlan],
    weight_bytes: int,
    **others: Any,
) -> tuple[PoolPlan, StatePlan]:
    """Plan states in what weights leave, and the pool of K/V in what states do.

    K/V whose size was asked for go first: how many states there are is nobody's wish most often.

    Args:
        spec: the model.
        options: of the load.
        free_bytes: see `plan_states`.
        plan: `plan_pool` of the same, which takes the bytes of weights and of states.
        weight_bytes: see `plan_states`.
        others: what else it takes.
    """
    if is_exact(options):
        pool = plan(weight_bytes=weight_bytes)
        kv_bytes = pool.num_blocks * pool.block_bytes
        return pool, plan_states(spec, options, free_bytes, weight_bytes, kv_bytes, **others)
    states = plan_states(spec, options, free_bytes, weight_bytes, **others)
    return plan(weight_bytes=weight_bytes, state_bytes=states.num_bytes), states


def refuse_states(artifact: Artifact, provider: str) -> None:
    """Raise ProviderError where what keeps no states is given a model that has some."""
    if artifact.manifest.model.linear is not None:
        raise ProviderError(
            f"{provider} does not run layers that keep states, which {artifact.path.name} has; "
            "use another provider, such as cpu"
        )


def check_states(inputs: StepInputs, state_slots: int) -> None:
    """Refuse a step without slots for the states of its rows, or with some that are none.

    Args:
        inputs: the step.
        state_slots: of the model, see `Capabilities`.

    Raises:
        ProviderError: it is such a step.
    """
    given = [inputs.state_reads is not None, inputs.state_writes is not None]
    if given == [state_slots > 0] * 2:
        return
    if state_slots:
        raise ProviderError(
            "this model keeps a state of each sequence, so a step needs state_reads and "
            f"state_writes, slots 1 to {state_slots}; one of them is missing"
        )
    raise ProviderError(
        "this model keeps no states of sequences, and a step names slots for them; leave out "
        "state_reads and state_writes"
    )
