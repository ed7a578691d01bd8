"""The requests that every lane serves, and how they are run."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from onnxport.providers.base import Model
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.intake import SEED_STEP
from onnxport.serving.params import SamplingParams
from onnxport.serving.stats import EngineStats

VOCAB = 160  # of the tiny models
NEW_TOKENS = 8
_random = random.Random(3)


def _draw(count: int) -> list[int]:
    return [_random.randrange(3, VOCAB) for _ in range(count)]


SYSTEM = _draw(40)
PROMPTS = (
    SYSTEM,
    [*SYSTEM, 9, 8, 7],
    [*SYSTEM[:33], 5],
    [*SYSTEM[:20], *_draw(12)],
    _draw(17),
    [4],
)
# Greedy and drawn in turn, one to three completions each.
PARAMS = tuple(
    SamplingParams(
        temperature=float(index % 2),
        seed=index,
        max_tokens=NEW_TOKENS,
        ignore_eos=True,
        n=1 + (index in (1, 4)) + (index == 4),
    )
    for index in range(len(PROMPTS))
)
LONGEST = max(len(prompt) for prompt in PROMPTS) + NEW_TOKENS


@dataclasses.dataclass(frozen=True, slots=True)
class Completion:
    """One completion, as a request of its own."""

    request: int
    index: int
    prompt: list[int]
    params: SamplingParams  # with its own seed


def _own(params: SamplingParams, index: int) -> SamplingParams:
    assert params.seed is not None
    return dataclasses.replace(params, n=1, seed=params.seed + index * SEED_STEP)


COMPLETIONS = tuple(
    Completion(request, index, prompt, _own(params, index))
    for request, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True))
    for index in range(params.n)
)


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the requests."""

    tokens: list[list[int]]  # of COMPLETIONS
    num_cached_tokens: int  # prompt tokens of the last round that needed no computing
    stats: EngineStats


def serve(
    model: Model,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 512,
    *,
    rounds: int = 1,
    **config: Any,
) -> Outcome:
    """Submit all requests together, once or several times in turn; the last round's tokens."""
    engine = Engine(model, config=EngineConfig(max_num_seqs, max_num_batched_tokens, **config))
    for _ in range(rounds):
        for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
            engine.submit(engine.prepare(str(number), prompt, params))
        found, cached = _drain(engine)
    tokens = [found[str(one.request), one.index] for one in COMPLETIONS]
    outcome = Outcome(tokens, sum(cached.values()), engine.stats())
    engine.close()
    return outcome


def serve_alone(model: Model) -> list[list[int]]:
    """The tokens of COMPLETIONS, one after the other: prompts at once, without a prefix cache."""
    engine = Engine(model, config=EngineConfig(1, 512, enable_prefix_caching=False))
    tokens = []
    for one in COMPLETIONS:
        engine.submit(engine.prepare("alone", one.prompt, one.params))
        tokens.append(_drain(engine)[0]["alone", 0])
    return tokens


def _drain(engine: Engine) -> tuple[dict[tuple[str, int], list[int]], dict[str, int]]:
    """Step until all is done; tokens by request and completion, cached tokens by request."""
    tokens: dict[tuple[str, int], list[int]] = {}
    cached: dict[str, int] = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.finish_reason in (None, "length"), delta.error
            tokens.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)
            cached[delta.request_id] = delta.num_cached_tokens
        engine.check()
    return tokens, cached
