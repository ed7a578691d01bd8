"""How near a lane has to come to the reference, and what that says about its tokens.

One number decides: by how much a logit may be off. If no logit is off by more than e, then

- the greedy token is one whose reference logit is at most 2 e below the best one;
- the token drawn from all is one whose sum of reference logit and noise, at temperature 1, is at
  most 2 e below the largest one.

Both are asked of each token after the tokens that the lane itself chose before it. Two ways to
compute a sequence may therefore part only where the reference sees a near tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from onnxport.graphs.noise import Noise
from onnxport.providers.base import Capabilities
from onnxport.serving.params import SamplingParams
from onnxport.serving.sampler import uniform
from tests.conformance.reference import Reference


@dataclass(frozen=True, slots=True)
class Rule:
    """What a lane promises."""

    arithmetic: str
    max_diff: float  # of a logit, over the standard deviation of the reference's logits
    identical: bool  # whether a sequence has the same tokens, however it is computed
    with_experts: float = 2.0  # how many times as far off a model with experts may be


# Measured on the tiny models: 2e-5 in float32, 6e-2 in float16 (on a GPU in software), and 6e-2
# with nothing but the cache in bfloat16.
FLOAT32: Final = Rule("float32", 1e-4, identical=True)
FLOAT16: Final = Rule("float16", 1e-1, identical=False, with_experts=2.5)
BFLOAT16: Final = Rule("bfloat16", 2e-1, identical=False)


def rule_of(capabilities: Capabilities) -> Rule:
    """The rule for what a model computes and stores, float32 products taken for granted."""
    types = {capabilities.compute_dtype, capabilities.kv_cache_dtype}
    for rule in (BFLOAT16, FLOAT16, FLOAT32):
        if rule.arithmetic in types:
            assert types <= {"bfloat16", "float16", "float32"}, f"{types}: the lane needs a rule"
            return rule
    raise AssertionError(f"{types}: the lane needs a rule of its own")


def with_experts(rule: Rule) -> Rule:
    """The rule for a model with experts.

    What rounds what a router reads may give a token of a near tie to another expert, which is
    another product. Measured with 8-bit activations: 0.85; in float16 0.22.
    """
    if rule == FLOAT32:
        return rule
    return replace(rule, max_diff=rule.with_experts * rule.max_diff)


def check_logits(
    rule: Rule, expected: NDArray[np.float32], found: NDArray[np.float32], what: str
) -> None:
    """Assert that logits, [rows, vocab], are near the reference's."""
    assert found.dtype == np.float32
    assert np.isfinite(found).all(), what
    diff = np.abs(found - expected).max() / expected.std()
    assert diff <= rule.max_diff, f"{what}: off by {diff:.2g}; {rule} applies"


def check_tokens(
    rule: Rule,
    reference: Reference,
    prompt: Sequence[int],
    tokens: Sequence[int],
    params: SamplingParams,
) -> None:
    """Assert that each token is one that the reference could have chosen, see above.

    `params.seed` is the sequence's own; only the temperatures 0 and 1 are known here.
    """
    logits = reference.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :].astype(np.float64)
    assert len(logits) == len(tokens)
    most = rule.max_diff * float(logits.std())
    for at, (row, token) in enumerate(zip(logits, tokens, strict=True)):
        where = f"token {at} of a prompt of {len(prompt)}"
        if not params.greedy:
            assert params.temperature == 1.0
            assert params.seed is not None
            row = row + noise(uniform(params.seed, len(prompt) + at), len(row))
        short = row.max() - row[token]
        assert short <= 2 * most, f"{where} is {short:.2g} below the best; {2 * most:.2g} may be"


def noise(number: float, vocab: int) -> NDArray[np.float64]:
    """What is added to each logit."""
    found = Noise(number, vocab)
    return found.of(np.arange(len(found.most))).ravel()[:vocab]
