"""A say in which memory plan ONNX Runtime takes for a run.

It plans where the tensors of a run lie when it first sees the shapes of its inputs, and knows them
by the exclusive or of all their dimensions (CalculateMemoryPatternsKey in its session_state.cc).
In that a step of one token agrees with one of six tokens of the same sequence, for each token has
its logits, and the plan is that of whichever came first: the other one allocates every tensor by
itself, for good. So a graph gets one more input, which nothing reads and which has no elements. Its
dimension is chosen so that the value says how many tokens there are, on which nearly all sizes
depend, and nothing else: no new plan is made where a sequence takes one more block either. What an
even number of inputs have, such as the width of two block tables, is not in the value anyway.
"""

from __future__ import annotations

from typing import Final

from onnxport.providers.base import StepInputs

MEMORY_PLAN: Final = "memory_plan"  # int8 [memory_plan, 0]


def plan_dimension(inputs: StepInputs, *, has_slots: bool, per_logit: int = 1) -> int:
    """Return the dimension of MEMORY_PLAN for a step.

    Args:
        inputs: of the step.
        has_slots: whether the graph has an input of an adapter slot for each token.
        per_logit: how many inputs it has with a number for each row of logits.
    """
    rows, width = inputs.block_table.shape
    # With one table, or three, the rows are there an even number of times, for past lengths have
    # them, too; with two, or four, the width is.
    is_odd = len(inputs.more_block_tables) % 2 == 0
    others: int = (width if is_odd else rows) ^ (rows + 1)
    if per_logit % 2:  # else these are there twice, or four times
        others ^= len(inputs.logits_indices)
    return others ^ len(inputs.input_ids) if has_slots else others
