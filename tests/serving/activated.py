"""aLoRAs for tests, and what the null model answers with one: computed by hand, in two parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from onnxport.providers.base import Model
from onnxport.providers.null import NullModel
from onnxport.serving.adapters.peft import AdapterContent
from tests.conformance.models import Slotted, step
from tests.serving.adapting import content, null_options


def activated(seed: int, *invocation: int) -> AdapterContent:
    """`content(seed)` that begins at its invocation."""
    return replace(content(seed), invocation=invocation)


def border(prompt: Sequence[int], invocation: Sequence[int]) -> int | None:
    """Where the last invocation of a prompt begins; None: there is none."""
    size = len(invocation)
    places = range(len(prompt) - size, -1, -1)
    return next((i for i in places if list(prompt[i : i + size]) == list(invocation)), None)


def by_hand(
    seed: int | None, start: int | None, prompt: Sequence[int], max_tokens: int, *, states: int = 0
) -> list[int]:
    """The likeliest tokens where an adapter, by the seed of its content, begins at a token.

    Args:
        seed: of the content; None: no adapter.
        start: the first token that it changes; None: it changes none.
        prompt: tokens.
        max_tokens: how many follow.
        states: slots for states of the model.
    """
    rows = logits_by_hand(seed, start, tuple(prompt), max_tokens, states)
    return [int(row.argmax()) for row in rows[len(prompt) - 1 :]]


@cache
def logits_by_hand(
    seed: int | None, start: int | None, prompt: tuple[int, ...], max_tokens: int, states: int = 0
) -> NDArray[np.float32]:
    """The logits after each token of a prompt, and of all but the last that follow it."""
    null = NullModel(null_options(num_blocks=128, state_slots=states))
    model: Model = Slotted(null) if states else null
    if seed is not None:
        model.set_adapter(1, content(seed).adapter)
    acts = seed is not None and start is not None
    first = start if acts and start is not None else len(prompt)
    tokens, size = list(prompt), model.capabilities.block_size
    found: list[NDArray[np.float32]] = []
    parts = [(0, first), (first, len(prompt))]
    parts += [(at, at + 1) for at in range(len(prompt), len(prompt) + max_tokens - 1)]
    for begin, end in parts:
        if begin == end:
            continue
        slots = np.array([int(acts and begin >= first)], np.int32)
        row = (tokens[begin:end], begin, list(range(-(-end // size))))
        found.extend(model.run(step([row], model.capabilities, adapter_slots=slots)).copy())
        if end == len(tokens):
            tokens.append(int(found[-1].argmax()))
    return np.array(found)
