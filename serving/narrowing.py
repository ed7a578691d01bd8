"""Telling the model which tokens a row may get, so that it need not compute the others' logits.

What a grammar allows is known while the model runs, most often long before it comes to the logits.
So a step begins with all logits asked for, and the thread that has the masks writes them into the
step's inputs, and only then how many of the logits that are left have to be exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from onnxport.providers.base import StepInputs
from onnxport.serving.native.sampler import NativeSampler
from onnxport.serving.outputs import Failure
from onnxport.serving.request import Request
from onnxport.serving.step_plan import StepPlan

EVERY_TOKEN = -1  # a word that allows all its tokens


def may_narrow(request: Request) -> bool:
    """Whether the model can be told of a row, in this step, which tokens it may get.

    Siblings wait for the logits of the row for once, and each has a grammar of its own.
    """
    if not request.exact_allowed or request.scores_missing:
        return False
    return request.grammar is None or not request.siblings


def narrowed(inputs: StepInputs) -> NDArray[np.int32] | None:
    """Return the mask of each row of logits, as `StepInputs.allowed_tokens`, if all are there.

    None: they are not, or no row has one. To be asked after the model's run.
    """
    exact, allowed = inputs.exact_logits, inputs.allowed_tokens
    return allowed if exact is not None and allowed is not None and exact.all() else None


def narrow(
    plan: StepPlan,
    inputs: StepInputs,
    masks: Mapping[Request, NDArray[np.uint32] | Failure],
    sampler: NativeSampler,
) -> None:
    """Write what grammars allow into a step's inputs, while the model may be reading them.

    Args:
        plan: of the step.
        inputs: as `BatchPacker` made them; without `allowed_tokens` nothing is to be written.
        masks: of the sequences that have a grammar, uint32 [1 + drafted, mask_words(vocab)].
        sampler: has the fence between the two writes.
    """
    exact, allowed = inputs.exact_logits, inputs.allowed_tokens
    if exact is None or allowed is None:
        return
    ends = list(accumulate(plan.num_logits))
    written: list[tuple[slice, int]] = []
    for row in plan.sampled:
        request = plan.requests[row]
        mask = masks.get(request)
        if mask is None or isinstance(mask, Failure) or not may_narrow(request):
            continue
        lines = slice(ends[row] - plan.num_logits[row], ends[row])
        allowed[lines] = mask.view(np.int32)
        written.append((lines, request.exact_allowed))
    sampler.fence()
    for lines, count in written:
        exact[lines] = count
