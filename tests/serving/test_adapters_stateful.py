"""Adapters come and go in any order: requests keep theirs, and no slot is lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from onnxport.errors import AdapterError, CapacityError, UnknownAdapterError
from onnxport.providers.null import NullModel
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import RequestOptions, SamplingParams
from tests.serving.adapting import (
    adapter_engine,
    alone_with,
    content,
    mixed_with,
    null_options,
)
from tests.serving.helpers import checked_step, null_model, tokens
from tests.tiers import examples

NAMES, SEEDS, SLOTS = ["a", "b", "c"], [0, 1, 2, 3], 2
PROMPTS = [[7], list(range(9)), list(range(26)), [*range(8), *range(100, 115)]]


class Adapters(RuleBasedStateMachine):
    num_slots = places = SLOTS  # of the model, in host memory
    spare_slots = (SLOTS, SLOTS)  # of the models that take over
    has_mixes = False

    def __init__(self) -> None:
        super().__init__()
        self.losing = False
        spares = [
            NullModel(null_options(num_blocks=30, max_adapters=slots, lost_at=self.lost))
            for slots in self.spare_slots
        ]
        self.num_spares = len(spares)
        self.engine = adapter_engine(
            num_blocks=20,
            max_num_seqs=4,
            max_num_batched_tokens=9,
            max_adapters=self.num_slots,
            config={"max_host_adapters": self.places},
            fallbacks=spares,
            lost_at=self.lost,
        )
        self.loaded: dict[str, tuple[int, int]] = {}  # name -> (seed, number of the load)
        self.running: dict[str, tuple[tuple[int, int], ...]] = {}  # unfinished -> what it uses
        self.expected: dict[str, list[int]] = {}
        self.deltas: dict[str, list[CompletionDelta]] = {}
        self.number = 0

    def lost(self, operation: int) -> bool:
        """Whether the device is lost now: once whenever `losing` was set."""
        lost, self.losing = self.losing, False
        return lost

    def used(self) -> set[tuple[int, int]]:
        """The loads that hold a place."""
        return {*self.loaded.values(), *(one for uses in self.running.values() for one in uses)}

    @rule(name=st.sampled_from(NAMES), seed=st.sampled_from(SEEDS), in_place=st.booleans())
    def load(self, name: str, seed: int, in_place: bool) -> None:
        previous = self.loaded.get(name)
        idle = not any(previous in uses for uses in self.running.values())
        error: Any = None
        if previous is not None and not in_place:
            error = AdapterError
        elif len(self.used()) == self.places and not (previous is not None and idle):
            error = CapacityError
        if error is not None:
            with pytest.raises(error):
                self.engine.adapters.load(name, content(seed), in_place=in_place)
            return
        self.engine.adapters.load(name, content(seed), in_place=in_place)
        self.number += 1
        self.loaded[name] = (seed, self.number)

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        if name in self.loaded:
            self.engine.adapters.unload(name)
            del self.loaded[name]
        else:
            with pytest.raises(UnknownAdapterError):
                self.engine.adapters.unload(name)

    @rule(
        name=st.sampled_from([None, *NAMES]),
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.integers(1, 9),
    )
    def submit(self, name: str | None, prompt: list[int], max_tokens: int) -> None:
        self.number += 1
        request_id = str(self.number)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        if name is not None and name not in self.loaded:
            with pytest.raises(UnknownAdapterError):
                self.engine.prepare(request_id, prompt, params, RequestOptions(adapter=name))
            return
        request = self.engine.prepare(request_id, prompt, params, RequestOptions(adapter=name))
        self.engine.submit(request)
        self.running[request_id] = (self.loaded[name],) if name is not None else ()
        seed = None if name is None else self.loaded[name][0]
        self.expected[request_id] = alone_with(seed, prompt, params)
        self.deltas[request_id] = []

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.note(self.engine.abort(data.draw(st.sampled_from(sorted(self.running)))))

    @rule()
    def step(self) -> None:
        self.note(checked_step(self.engine))

    @precondition(lambda self: self.running and self.num_spares)
    @rule()
    def lose(self) -> None:
        self.losing = True
        before = null_model(self.engine)
        while null_model(self.engine) is before and self.running:
            self.note(self.engine.step())
        self.num_spares -= null_model(self.engine) is not before

    def note(self, deltas: list[CompletionDelta]) -> None:
        for delta in deltas:
            self.deltas[delta.request_id].append(delta)
            if delta.finish_reason is not None:
                del self.running[delta.request_id]
                found, expected = self.deltas[delta.request_id], self.expected[delta.request_id]
                if delta.finish_reason == "abort":
                    assert tokens(found) == expected[: len(tokens(found))]
                else:
                    assert (tokens(found), delta.finish_reason) == (expected, "length")

    @invariant()
    def slots_hold_what_is_used(self) -> None:
        self.engine.check()
        assert {each.name for each in self.engine.adapters.loaded} == set(self.loaded)
        num_filled = len(null_model(self.engine)._adapters)
        num_slots = self.engine.capabilities.max_adapters
        if {self.num_slots, *self.spare_slots} == {self.places} and not self.has_mixes:
            assert num_filled == len(self.used())
        else:
            assert num_filled <= num_slots
            assert num_filled <= len(self.used()) or self.has_mixes
            for request in self.engine._scheduler.running:  # an assertion where it has no slot
                self.engine.adapters.slot_of(request.adapter)
        assert self.engine.stats().adapter_requests == {
            name: sum(load in uses for uses in self.running.values())
            for name, load in self.loaded.items()
        }

    def teardown(self) -> None:
        while self.running:
            self.note(checked_step(self.engine))
        for name in [*self.loaded]:
            self.unload(name)
        assert not null_model(self.engine)._adapters


class FewSlots(Adapters):
    """The same, with adapters that wait for a slot."""

    num_slots, places = 1, 3
    spare_slots = (2, 1)


class FewerSlots(Adapters):
    """The same, where those that take over have fewer."""

    num_slots = places = 3
    spare_slots = (1, 2)


class Mixes(Adapters):
    """The same, with sums of adapters, which take turns in the slots of all."""

    has_mixes = True

    @rule(
        names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=3, unique=True),
        first=st.sampled_from([0.5, 1.0, -2.0]),
        prompt=st.sampled_from(PROMPTS),
        max_tokens=st.integers(1, 9),
        by_default=st.booleans(),
    )
    def submit_mix(
        self,
        names: list[str],
        first: float,
        prompt: list[int],
        max_tokens: int,
        by_default: bool,
    ) -> None:
        self.number += 1
        request_id = str(self.number)
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        scales = {names[0]: first} | dict.fromkeys(names[1:], 0.5)
        options = RequestOptions(adapter_scales=None if by_default else scales)
        adapters = self.engine.adapters
        if not self.loaded.keys() >= scales.keys():
            with pytest.raises(UnknownAdapterError):
                adapters.set_scales(scales)
            options = RequestOptions(adapter_scales=scales)
            with pytest.raises(UnknownAdapterError):
                self.engine.prepare(request_id, prompt, params, options)
            return
        if by_default:
            adapters.set_scales(scales)
        self.engine.submit(self.engine.prepare(request_id, prompt, params, options))
        adapters.set_scales({})
        loads = sorted((self.loaded[name] for name in names), key=lambda load: load[1])
        self.running[request_id] = tuple(loads)
        ordered = sorted(scales, key=lambda name: self.loaded[name][1])
        seeds = tuple((self.loaded[name][0], scales[name]) for name in ordered)
        self.expected[request_id] = mixed_with(seeds, tuple(prompt), params)
        self.deltas[request_id] = []


class FewSlotsForMixes(Mixes):
    """The same, in fewer slots."""

    num_slots, places = 1, 3
    spare_slots = (2, 1)


TestMixes = Mixes.TestCase
TestFewSlotsForMixes = FewSlotsForMixes.TestCase
TestAdapters = Adapters.TestCase
TestFewSlots = FewSlots.TestCase
TestFewerSlots = FewerSlots.TestCase
TestMixes.settings = TestFewSlotsForMixes.settings = settings(
    max_examples=examples(15), stateful_step_count=30, deadline=None
)
TestAdapters.settings = TestFewSlots.settings = TestFewerSlots.settings = settings(
    max_examples=examples(25), stateful_step_count=40, deadline=None
)
