"""Adapters under any sequence of events: more of them than slots, on devices that fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from onnxport.errors import AdapterError, CapacityError, DeviceLostError, ProviderError
from onnxport.graphs.lora import LoraAdapter
from onnxport.providers.null import NullModel, NullOptions, _adapter_mark
from tests.serving import test_engine_properties as properties
from tests.serving.adapting import alone_with, content
from tests.serving.helpers import checked_step, null_model
from tests.tiers import examples

PLACES = 4  # in host memory
NAMES, SEEDS = ["a", "b", "c", "d"], range(5)
Failure = Callable[[], Exception | None]


class WritingModel(NullModel):
    """Asks whether a slot can be written."""

    def __init__(self, options: NullOptions, failure: Failure) -> None:
        super().__init__(options)
        self._failure = failure

    def set_adapter(self, slot: int, adapter: LoraAdapter | None) -> None:
        if adapter is not None and (failure := self._failure()) is not None:
            raise failure
        super().set_adapter(slot, adapter)


class AdaptedMachine(properties.GuessingMachine, properties.LosingMachine):
    """Requests pick adapters, of which there are more than slots; all else happens, too."""

    tiers = (*properties.TieredMachine.tiers, {}, {}, {})
    failure: Exception | None = None

    def standby(self, pool_tokens: int) -> dict[str, Any]:
        self.num_slots = [(1,), (2,), (2, 1), (3, 1, 2)][pool_tokens % 4]
        spares = super().standby(pool_tokens)
        return {**spares, "max_adapters": self.num_slots[0], "max_host_adapters": PLACES}

    def make_model(self, options: NullOptions) -> NullModel:
        return WritingModel(options, self.take_failure)

    def take_failure(self) -> Exception | None:
        failure, self.failure = self.failure, None
        return failure

    @initialize(seeds=st.lists(st.sampled_from(SEEDS), min_size=3, max_size=4))
    def fill(self, seeds: Sequence[int]) -> None:
        """Load the first adapters; `start` may come later."""
        self.seeds = dict(zip(NAMES, seeds, strict=False))  # of what is loaded, by name
        self.seed_of: dict[str, int | None] = {}  # of a request
        self.is_filled = False

    def load_first(self) -> None:
        """Load what `fill` chose, when there is an engine."""
        if not self.is_filled:
            self.is_filled = True
            for name, seed in self.seeds.items():
                self.engine.adapters.load(name, content(seed))

    def options(self, name: str) -> dict[str, Any]:
        self.load_first()
        names = [*self.seeds, None]  # in turn: each request has another one
        picked = names[self.number % len(names)]
        self.seed_of[name] = None if picked is None else self.seeds[picked]
        return {"adapter": picked}

    def expected(self, name: str, index: int, **changed: Any) -> list[int]:
        prompt, params = self.requests[name]
        own = replace(params, **changed)
        return alone_with(self.seed_of[name], prompt, own, index, self.groups)

    @rule(name=st.sampled_from(NAMES), seed=st.sampled_from(SEEDS))
    def load(self, name: str, seed: int) -> None:
        self.load_first()
        held = len(self.engine.adapters._entries)
        try:
            self.engine.adapters.load(name, content(seed), in_place=True)
        except CapacityError:
            assert held == PLACES
        else:
            self.seeds[name] = seed

    @precondition(lambda self: self.seeds)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        self.load_first()
        name = data.draw(st.sampled_from(sorted(self.seeds)))
        self.engine.adapters.unload(name)
        del self.seeds[name]

    @rule(failure=st.sampled_from([AdapterError, CapacityError, ProviderError]))
    def fail_to_write(self, failure: type[Exception]) -> None:
        self.failure = failure("writing")
        self.take(checked_step(self.engine))
        self.failure = None

    @precondition(lambda self: len(self.engine.losses) < len(self.sizes) - 1)
    @rule()
    def lose_while_writing(self) -> None:
        self.failure = DeviceLostError("writing")
        ended = self.engine.stats().finished["error"]
        self.take(self.engine.step())
        self.failure = None
        assert self.engine.stats().finished["error"] == ended

    @invariant()
    def slots_hold_what_is_used(self) -> None:
        if not hasattr(self, "engine"):
            return
        adapters, model = self.engine.adapters, null_model(self.engine)
        held = {slot: _adapter_mark(one.weights) for slot, one in adapters._slots.filled.items()}
        assert model._adapters == held
        for request in self.engine._scheduler.running:
            assert adapters.slot_of(request.adapter) in {0, *held}
        if self.is_filled and not self.engine.has_work:
            assert {one.name for one in adapters.loaded} == set(self.seeds)
            assert set(adapters.num_requests.values()) <= {0}


class AdaptedWindowedMachine(AdaptedMachine):
    """The same, with layers that give up what is behind their windows."""

    windows = properties.WINDOWS

    def standby(self, pool_tokens: int) -> dict[str, Any]:
        return super().standby(max(pool_tokens, properties.MOST_TOKENS))


TestAdaptedMachine = AdaptedMachine.TestCase
TestAdaptedWindowedMachine = AdaptedWindowedMachine.TestCase
TestAdaptedMachine.settings = settings(
    properties.TestEngineMachine.settings, max_examples=examples(100)
)
TestAdaptedWindowedMachine.settings = TestAdaptedMachine.settings
