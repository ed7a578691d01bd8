"""Log probabilities of the tokens of prompts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnxport.serving.logprob_modes import LOGITS, as_logits
from onnxport.serving.request import Request
from onnxport.serving.sampler import (
    RowLogprobs,
    logprobs,
)
from onnxport.serving.step_plan import StepPlan


def score_prompts(
    plan: StepPlan, logits: NDArray[np.float32], num_threads: int | None = None
) -> list[tuple[Request, list[RowLogprobs]]]:
    """Return the log probabilities of the prompt tokens that the step's logits are about.

    Args:
        plan: of the step.
        logits: float32 [sum(plan.num_logits), vocab].
        num_threads: see `sample_step`.

    Returns:
        By request those that it has not got yet, the first ones first.

    Raises:
        FloatingPointError: the logits are no numbers.
    """
    found = []
    start = 0
    for row, request in enumerate(plan.requests):
        if request.scores_missing:
            assert request.scores is not None
            assert request.params.prompt_logprobs is not None
            past = plan.num_past[row]
            following = range(
                max(past, len(request.scores)) + 1,
                min(past + plan.num_new[row] + 1, request.num_prompt_tokens),
            )
            first = start + following.start - 1 - past
            scores = logprobs(
                logits[first : first + len(following)],
                [request.tokens[index] for index in following],
                [request.params.prompt_logprobs] * len(following),
                num_threads,
            )
            if request.logprobs_mode in LOGITS:
                scores = [as_logits(*one) for one in zip(scores, logits[first:], strict=False)]
            found.append((request, scores))
        start += plan.num_logits[row]
    return found
