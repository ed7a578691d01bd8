"""Vectors under any sequence of events: beside texts, on devices that fail, with few blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from onnxport.errors import CapacityError, OverloadedError
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams
from tests.serving import test_engine_properties as properties
from tests.serving.pooling import LAST, MEAN, Floats, embed, vector
from tests.tiers import examples


@cache
def own_vector(
    prompt: tuple[int, ...], is_mean: bool, windows: tuple[int | None, ...], has_states: bool
) -> Floats:
    return vector(prompt, MEAN if is_mean else LAST, windows, has_states=has_states)


class EmbeddingRules(properties.LosingMachine):
    """Prompts are embedded beside all else that happens."""

    def standby(self, pool_tokens: int) -> dict[str, Any]:
        self.is_mean = pool_tokens % 2 == 1
        self.prompts: dict[str, list[int]] = {}
        self.vectors: dict[str, Floats | None] = {}
        spares = super().standby(max(pool_tokens, properties.MOST_TOKENS))
        return {**spares, "embedder": MEAN if self.is_mean else LAST}

    def make_model(self, options: NullOptions) -> NullModel:
        return NullModel(replace(options, final_features=8))

    def expected(self, name: str, index: int, **changed: Any) -> list[int]:
        return [] if name in self.prompts else super().expected(name, index, **changed)

    @rule(
        branch=st.sampled_from(properties.BRANCHES),
        length=st.integers(1, 22),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("xyz"),
        salt=st.sampled_from([None, None, "salt"]),
        timeout_s=st.sampled_from([None, None, None, 3.0]),
    )
    def embed(
        self,
        branch: list[int],
        length: int,
        priority: int,
        tenant: str,
        salt: str | None,
        timeout_s: float | None,
    ) -> None:
        self.number += 1
        name, prompt = str(self.number), branch[:length]
        if self.engine.config.scheduling_policy == "fcfs":
            priority = 0
        treated = {"priority": priority, "tenant": tenant, "cache_salt": salt}
        try:
            embed(self.engine, name, prompt, timeout_s=timeout_s, **treated)
        except (CapacityError, OverloadedError):
            return
        self.prompts[name] = prompt
        self.requests[name] = (prompt, SamplingParams())
        self.tokens[name, 0] = []

    def take(self, deltas: list[CompletionDelta]) -> None:
        super().take(deltas)
        for delta in deltas:
            name = delta.request_id
            if name in self.prompts:
                self.vectors[name] = delta.embedding
                assert (delta.embedding is None) == (delta.finish_reason != "stop")
            else:
                assert delta.embedding is None

    def teardown(self) -> None:
        super().teardown()
        if not hasattr(self, "engine"):
            return
        assert self.vectors.keys() == self.prompts.keys()
        for name, found in self.vectors.items():
            if found is not None:
                prompt = tuple(self.prompts[name])
                own = own_vector(prompt, self.is_mean, self.groups, self.has_states)
                np.testing.assert_array_equal(found, own)


class EmbeddingMachine(EmbeddingRules, properties.GuessingMachine, properties.LosingMachine):
    """By models without states, beside sequences whose tokens somebody guesses."""

    windows: Sequence[tuple[int | None, ...]] = ((None,), *properties.WINDOWS)


class EmbeddingStatefulMachine(EmbeddingRules, properties.LosingStatefulMachine):
    """By models that have states."""


TestEmbeddingMachine = EmbeddingMachine.TestCase
TestEmbeddingStatefulMachine = EmbeddingStatefulMachine.TestCase
TestEmbeddingMachine.settings = settings(
    properties.TestEngineMachine.settings, max_examples=examples(120)
)
TestEmbeddingStatefulMachine.settings = TestEmbeddingMachine.settings
