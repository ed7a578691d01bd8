"""A sequence's tokens do not depend on what is computed beside it, or in how many pieces.

Each way to serve the same requests is held to the reference, and where the arithmetic is exact
enough (`Rule.identical`) to the very tokens that each sequence has when it is computed alone.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from onnxport.providers.base import Model
from onnxport.providers.rows import convert, element_type
from onnxport.serving.verify.transfers import read_layers, write_layers
from tests.conformance.conftest import Loaded
from tests.conformance.lanes import partner_of
from tests.conformance.models import Narrow, Unreliable, Wrapped, step, tables_of
from tests.conformance.rules import check_tokens
from tests.conformance.workload import (
    COMPLETIONS,
    LONGEST,
    NEW_TOKENS,
    PROMPTS,
    SYSTEM,
    Outcome,
    serve,
    serve_alone,
)

TIER_BYTES = 64 << 20


def preempted(model: Model, **config: object) -> Outcome:
    """In a pool that holds one and a half of the longest sequences."""
    limits = model.capabilities
    count = -(-3 * LONGEST // (2 * limits.block_size))
    outcome = serve(Narrow(model, count * len(limits.windows)), **config)
    assert outcome.stats.num_preemptions > 0
    return outcome


def batched(model: Model) -> Outcome:
    return serve(model, enable_prefix_caching=False)


def chunked(model: Model) -> Outcome:
    return serve(model, 4, 7)


def chunked_by_13(model: Model) -> Outcome:
    return serve(model, 8, 13, enable_prefix_caching=False)


def cached(model: Model) -> Outcome:
    outcome = serve(model, rounds=2)
    size = model.capabilities.block_size
    # all full blocks but for the one that holds the last token of a prompt
    every = sum((len(p) - 1) // size * size for p in PROMPTS)
    if model.capabilities.state_slots:  # and of states some
        assert 0 < outcome.num_cached_tokens <= every
    else:
        assert outcome.num_cached_tokens == every
    return outcome


def recomputed(model: Model) -> Outcome:
    return preempted(model, preemption="recompute")


def swapped(model: Model) -> Outcome:
    if model.capabilities.state_slots:
        pytest.skip("blocks of a model that keeps states do not leave its device")
    outcome = preempted(model, preemption="swap", kv_host_memory=TIER_BYTES)
    assert outcome.stats.num_blocks_loaded > 0
    return outcome


def interrupted(model: Model) -> Outcome:
    outcome = serve(Unreliable(model))
    assert outcome.stats.num_failed_steps > 1
    return outcome


WAYS = (
    batched,
    chunked,
    pytest.param(chunked_by_13, marks=pytest.mark.slow),
    cached,
    pytest.param(recomputed, marks=pytest.mark.slow),
    swapped,
    interrupted,
)


@pytest.fixture(scope="session")
def alone(loaded: Loaded) -> list[list[int]]:
    return serve_alone(Wrapped(loaded.model))


def check(loaded: Loaded, tokens: list[list[int]]) -> None:
    for one, found in zip(COMPLETIONS, tokens, strict=True):
        assert len(found) == NEW_TOKENS
        check_tokens(loaded.rule, loaded.reference, one.prompt, found, one.params)


def test_alone(loaded: Loaded, alone: list[list[int]]) -> None:
    check(loaded, alone)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_together(loaded: Loaded, alone: list[list[int]], way: Callable[[Model], Outcome]) -> None:
    if way is swapped and not loaded.model.capabilities.moves_blocks:
        pytest.skip("caches of several shapes have no canonical form")
    found = way(Wrapped(loaded.model)).tokens
    check(loaded, found)
    if loaded.rule.identical:
        assert found == alone


def test_a_sequence_moves_in_mid_generation(movable: Loaded) -> None:
    """Prefilled on one provider, decoded on the other; there and back, and the other way round."""
    here, size = movable.model, movable.model.capabilities.block_size
    if here.capabilities.state_slots:
        pytest.skip("states do not move from one provider to another")
    blocks = [9, 4, 7, 2][: -(-(len(SYSTEM) + NEW_TOKENS) // size)]
    there = partner_of(movable.lane).open(movable.path, block_size=size)

    def go(*route: Model) -> list[int]:
        tokens, past, last = list(SYSTEM), 0, None
        for model in route:
            if last is not None and model is not last:
                content = read_layers(last, tables_of(last.capabilities, blocks))
                dtype = element_type(model.capabilities.kv_format.dtype)
                tables = tables_of(model.capabilities, blocks)
                write_layers(model, tables, convert(content, dtype))
            logits = model.run(step([(tokens[past:], past, blocks)], model.capabilities))
            past, last = len(tokens), model
            tokens.append(int(logits[-1].argmax()))
        return tokens[len(SYSTEM) :]

    greedy = COMPLETIONS[0]
    assert greedy.prompt == SYSTEM
    assert greedy.params.greedy
    try:
        stay = go(*[here] * NEW_TOKENS)
        for route in (
            [here, *[there] * (NEW_TOKENS - 1)],
            [there, *[here] * (NEW_TOKENS - 1)],
            [here, there, there, here, here, here, there, here],
        ):
            found = go(*route)
            check_tokens(movable.rule, movable.reference, SYSTEM, found, greedy.params)
            if movable.rule.identical and movable.lane.rule is None:
                assert found == stay
    finally:
        there.close()
