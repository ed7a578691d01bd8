"""Under any sequence of events nothing leaks, all requests end, and tokens are their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import onnxport.serving.hits as hits_module
import onnxport.serving.sampling as sampling_module
from onnxport.errors import CapacityError, OverloadedError, RequestError
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.linear_attention import LEAST_KEPT
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams
from onnxport.serving.repetition import RepetitionDetection
from onnxport.serving.request import Request
from tests.serving.helpers import Clock, alone, checked_step, null_engine, run, submit
from tests.serving.prophet import Prophet
from tests.serving.watch import Watch
from tests.tiers import examples

MAIN = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]
BRANCHES = [MAIN, [*MAIN[:6], *range(60, 76)], [*MAIN[:8], *range(80, 96)], [1] * 22]
NORMAL = ("length", "stop", "repetition")
MOST_TOKENS = 32  # of a sequence
MIXES: Sequence[dict[str, Any]] = (
    {},
    {},
    {"repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "min_p": 0.1},
    {"allowed_token_ids": range(9, 400, 11), "frequency_penalty": 2.0},
    {"prompt_logprobs": 1, "logprobs": 0},
    {
        "dry_multiplier": 1.5,
        "dry_sequence_breakers": (),
        "xtc_probability": 0.4,
        "top_n_sigma": 3.0,
    },
    {"mirostat": 2, "mirostat_tau": 3.0, "mirostat_eta": 0.5, "presence_penalty": 0.5},
    {"adaptive_target": 0.4, "min_p": 0.02, "presence_penalty": 0.5},
    {"dynatemp_range": 0.6, "repetition_penalty": 1.3, "repeat_last_n": 5},
    {"skip_reading_prefix_cache": True},
    {"allowed_token_ids": (9, 20, 31), "repetition_detection": RepetitionDetection(3, 1, 2)},
)
BEAM_MIXES: Sequence[dict[str, Any]] = (
    {},
    {},
    {"repetition_penalty": 1.3, "logit_bias": {5: 3.0}},
    {"allowed_token_ids": range(9, 400, 11), "frequency_penalty": 2.0},
    {"allowed_token_ids": (9, 20), "stop_token_ids": (9,), "length_penalty": 0.0},
    {"prompt_logprobs": 1, "logprobs": 2},
    {"dry_multiplier": 1.5, "dry_sequence_breakers": (), "temperature": 0.5},
    {"skip_reading_prefix_cache": True, "stop_token_ids": tuple(range(0, 512, 5))},
    {"stop_token_ids": tuple(range(0, 512, 9)), "length_penalty": -1.0, "min_tokens": 1},
)


class EngineMachine(RuleBasedStateMachine):
    """Every accepted sequence gets its own tokens and exactly one finish reason."""

    tiers: Sequence[dict[str, Any]] = ({},)
    windows: Sequence[tuple[int | None, ...]] = ((None,),)
    most_beams = 3
    has_states = False
    host_states = False
    least_shared = hits_module.LEAST_SHARED

    @initialize(
        num_blocks=st.integers(2, 14),
        rows=st.integers(1, 5),
        spare_tokens=st.integers(0, 12),
        block_size=st.sampled_from([1, 3, 4]),
        policy=st.sampled_from(["fcfs", "priority", "fair"]),
        caching=st.sampled_from([True, True, True, False]),
        tier=st.integers(0, 5),
        queue=st.sampled_from([2, 1000]),
        window=st.integers(0, 11),
    )
    def start(
        self,
        num_blocks: int,
        rows: int,
        spare_tokens: int,
        block_size: int,
        policy: Any,
        caching: bool,
        tier: int,
        queue: int,
        window: int,
    ) -> None:
        self.groups = self.windows[window % len(self.windows)]
        tiers = self.tiers[tier % len(self.tiers)]
        self.clock = Clock()
        self.run_fails = self.transfer_fails = False
        self.sampler_fails = 0
        self.engine = null_engine(
            num_blocks=num_blocks * len(self.groups),
            block_size=block_size,
            windows=self.groups,
            state_slots=self.state_slots(rows),
            host_states=self.host_states,
            max_num_seqs=rows,
            max_num_batched_tokens=rows + spare_tokens,
            max_queued_requests=queue,
            scheduling_policy=policy,
            enable_prefix_caching=caching or bool(tiers),
            clock=self.clock,
            fails=lambda run: self.run_fails,
            transfer_fails=lambda transfer: self.transfer_fails,
            model_type=self.make_model,
            speculator=self.speculator(),
            **tiers,
            **self.standby(num_blocks * block_size),
        )
        if self.host_states:  # the null provider's K/V would take as much as any number of states
            assert self.engine._runtime.states is not None
            self.engine._runtime.states.max_kept = LEAST_KEPT + tier
        self.watch = Watch(self.engine)
        self.sample = sampling_module.sample_positions
        sampling_module.sample_positions = self.sampled
        hits_module.LEAST_SHARED = self.least_shared  # type: ignore[misc]
        self.number = 0
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.reasons: dict[tuple[str, int], str] = {}

    def standby(self, pool_tokens: int) -> dict[str, Any]:
        """More options of the engine."""
        return {}

    def state_slots(self, rows: int | None) -> int:
        """For states of a model that takes so many rows: for all of them if even, fewer if odd."""
        if not self.has_states:
            return 0
        rows = rows or 5
        return max(2, 2 * rows + (-1 if rows % 2 else rows // 2))

    def make_model(self, options: NullOptions) -> NullModel:
        """A model, the first one or one that may take over."""
        return NullModel(options)

    def speculator(self) -> Prophet | None:
        """Who guesses."""
        return None

    def options(self, name: str) -> dict[str, Any]:
        """More options of a request."""
        return {}

    def expected(self, name: str, index: int, **changed: Any) -> list[int]:
        """The tokens of a completion that is alone, with other parameters."""
        prompt, params = self.requests[name]
        return alone(
            prompt, replace(params, **changed), index, self.groups, has_states=self.has_states
        )

    def sampled(self, *arguments: Any) -> Any:
        if self.sampler_fails:
            self.sampler_fails -= 1
            raise ZeroDivisionError("sampling")
        return self.sample(*arguments)

    @rule(
        branch=st.sampled_from(BRANCHES),
        length=st.integers(1, 22),
        max_tokens=st.integers(1, MOST_TOKENS - 22),
        seed=st.integers(0, 3),
        n=st.sampled_from([1, 1, 2, 3]),
        beams=st.sampled_from([0, 0, 0, 0, 1, 2, 3]),
        mix=st.sampled_from(MIXES),
        beam_mix=st.sampled_from(BEAM_MIXES),
        priority=st.integers(0, 2),
        tenant=st.sampled_from("xyz"),
        salt=st.sampled_from([None, None, "salt"]),
        timeout_s=st.sampled_from([None, None, 1.0, 3.0]),
    )
    def submit(
        self,
        branch: list[int],
        length: int,
        max_tokens: int,
        seed: int,
        n: int,
        beams: int,
        mix: dict[str, Any],
        beam_mix: dict[str, Any],
        priority: int,
        tenant: str,
        salt: str | None,
        timeout_s: float | None,
    ) -> None:
        self.number += 1
        name = str(self.number)
        prompt = branch[:length]
        params = SamplingParams(
            temperature=float(seed % 2), seed=seed, max_tokens=max_tokens, n=n, **mix
        )
        if width := min(beams, self.most_beams):
            params = SamplingParams(
                n=width, max_tokens=max_tokens, use_beam_search=True, **beam_mix
            )
        if self.engine.config.scheduling_policy == "fcfs":
            priority = 0
        options = {"priority": priority, "tenant": tenant, "cache_salt": salt, **self.options(name)}
        try:
            submit(self.engine, name, prompt, params, timeout_s=timeout_s, **options)
        except OverloadedError:
            config = self.engine.config
            fair = config.scheduling_policy == "fair"  # a tenant may not fill the queue
            assert self.engine.num_queued >= (1 if fair else config.max_queued_requests)
        except CapacityError:
            pass
        except RequestError:
            assert params.n > self.engine._runtime.rows
        else:
            self.requests[name] = (prompt, params)
            self.tokens |= {(name, index): [] for index in range(params.n)}

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.requests)))
        left = {one for one in self.tokens.keys() - self.reasons.keys() if one[0] == name}
        deltas = self.engine.abort(name)
        assert {(delta.request_id, delta.index) for delta in deltas} == left
        assert all(delta.finish_reason == "abort" for delta in deltas)
        self.take(deltas)

    @rule(count=st.integers(1, 4))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.take(checked_step(self.engine))

    @rule()
    def fail_to_run(self) -> None:
        self.run_fails = True
        self.take(checked_step(self.engine))
        self.run_fails = False

    @rule()
    def fail_to_transfer(self) -> None:
        self.transfer_fails = True
        self.take(checked_step(self.engine))
        self.transfer_fails = False

    @rule(times=st.integers(1, 2))
    def fail_to_sample(self, times: int) -> None:
        self.sampler_fails = times  # once: the batch; twice: its first sequence too
        self.take(checked_step(self.engine))
        self.sampler_fails = 0

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0]))
    def wait(self, seconds: float) -> None:
        self.clock.now_s += seconds

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    @invariant()
    def nothing_leaks(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check()
        stats = self.engine.stats()
        if self.tokens.keys() == self.reasons.keys():
            assert not self.engine.has_work
            assert stats.num_free_blocks == stats.num_blocks
        assert Counter(self.reasons.values()) == Counter(stats.finished)

    def take(self, deltas: list[CompletionDelta]) -> None:
        for delta in deltas:
            name = (delta.request_id, delta.index)
            assert name not in self.reasons, "a delta after the last one"
            self.tokens[name] += delta.token_ids
            if delta.finish_reason is not None:
                self.reasons[name] = delta.finish_reason

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            for deltas in run(self.engine, max_steps=3000).values():
                self.take(deltas)
            self.watch.check_all_ended()
        finally:
            sampling_module.sample_positions = self.sample
            hits_module.LEAST_SHARED = EngineMachine.least_shared  # type: ignore[misc]
            self.engine.close()
        assert self.reasons.keys() == self.tokens.keys() == self.watch.events.keys()
        for (name, index), found in self.tokens.items():
            expected = self.expected(name, index)
            if self.reasons[name, index] in NORMAL:
                assert found == expected
            else:
                assert found == expected[: len(found)]


class TieredMachine(EngineMachine):
    """The same, with blocks that leave the pool and come back."""

    tiers = (
        {"kv_host_memory": 1 << 20, "preemption": "swap"},
        {"kv_host_memory": 400, "preemption": "swap"},
        {"kv_host_memory": 1 << 20, "preemption": "recompute"},
    )


class GuessingMachine(TieredMachine):
    """The same, with drafts: right ones, wrong ones, and right ones that go wrong."""

    tiers = ({}, {}, {"kv_host_memory": 1 << 20, "preemption": "swap"})

    def speculator(self) -> Prophet | None:
        self.prophet = Prophet(self.future)
        return self.prophet

    def future(self, request: Request) -> list[int]:
        """The tokens that a request would get, were it not stuck; computed without failures."""
        fails, self.sampler_fails = self.sampler_fails, 0
        try:
            return self.expected(request.request_id, request.index, repetition_detection=None)
        finally:
            self.sampler_fails = fails

    @rule(length=st.integers(0, 9), errs=st.sampled_from([0, 0, 1, 2, 3]), odd=st.booleans())
    def guess(self, length: int, errs: int, odd: bool) -> None:
        self.prophet.length, self.prophet.errs, self.prophet.odd = length, errs, odd


class LosingMachine(TieredMachine):
    """The same, on devices that are lost one after another; nothing else fails by it."""

    tiers = ({}, *TieredMachine.tiers)
    most_beams = 1  # others may not fit what takes over, and end
    sizes = ((2, None), (16, None), (4, 3), (32, 2), (3, 1), (1, None))  # block size, rows
    num_slots: Sequence[int] = (0,)  # for adapters, of one after the other, again and again

    def standby(self, pool_tokens: int) -> dict[str, Any]:
        self.losing = 0
        models = []
        for block_size, rows in self.sizes:
            num_blocks = -(-pool_tokens // block_size)
            pool_tokens = num_blocks * block_size  # each has room for what the one before took
            options = NullOptions(
                block_size=block_size,
                num_blocks=num_blocks * len(self.groups),
                windows=self.groups,
                one_table=len(models) % 2 == 0,
                max_model_len=512,
                max_batch_rows=rows,
                max_adapters=self.num_slots[(len(models) + 1) % len(self.num_slots)],
                state_slots=self.state_slots(rows),
                host_states=self.host_states and len(models) % 2 == 1,
                fails=lambda run: self.run_fails,
                transfer_fails=lambda transfer: self.transfer_fails,
                lost_at=self.lost_at,
            )
            models.append(self.make_model(options))
        return {"lost_at": self.lost_at, "fallbacks": models}

    def lost_at(self, operation: int) -> bool:
        self.losing -= self.losing > 0
        return self.losing == 1

    @precondition(lambda self: len(self.engine.losses) < len(self.sizes) - 1)
    @rule(operation=st.integers(0, 4))
    def lose(self, operation: int) -> None:
        self.losing = operation + 2
        ended = self.engine.stats().finished["error"]
        for _ in range(operation + 1):
            self.take(checked_step(self.engine))
        self.losing = 0
        assert self.engine.stats().finished["error"] == ended
        assert self.engine.failure is None


WINDOWS: Sequence[tuple[int | None, ...]] = (
    (None, 5),
    (None, 8, 8),
    (4,),
    (None, 1),
    (9, 2),
    (None, 6, 3, 3),
)


class WindowedMachine(TieredMachine):
    """The same, with layers that give up what is behind their windows."""

    tiers = ({}, {}, *TieredMachine.tiers)
    windows = WINDOWS


class GuessingWindowedMachine(GuessingMachine):
    windows = WINDOWS


class LosingWindowedMachine(LosingMachine):
    """Every other device has one table for all layers, and so needs more room."""

    windows = WINDOWS

    def standby(self, pool_tokens: int) -> dict[str, Any]:
        return super().standby(max(pool_tokens, MOST_TOKENS))


class StatefulMachine(EngineMachine):
    """The same, with layers that have a state of each sequence, and short texts worth sharing."""

    has_states = True
    least_shared = 1


class GuessingStatefulMachine(GuessingMachine):
    """Such models with drafts, which a state cannot go back behind; most are wrong."""

    tiers = ({},)
    has_states = True
    least_shared = 5

    def speculator(self) -> Prophet | None:
        super().speculator()
        self.prophet.errs = 2
        return self.prophet


class LosingStatefulMachine(LosingMachine):
    """Such models on devices that are lost one after another, with more slots or fewer."""

    tiers = ({},)
    has_states = True
    least_shared = 1


class HostStatefulMachine(StatefulMachine):
    """States that steps write where they are read, few of which are kept."""

    host_states = True


class GuessingHostStatefulMachine(GuessingStatefulMachine):
    host_states = True


class LosingHostStatefulMachine(LosingStatefulMachine):
    """The first device writes them where it reads them, the next one does not, and so on."""

    host_states = True


TestEngineMachine = EngineMachine.TestCase
TestStatefulMachine = StatefulMachine.TestCase
TestHostStatefulMachine = HostStatefulMachine.TestCase
TestGuessingHostStatefulMachine = GuessingHostStatefulMachine.TestCase
TestLosingHostStatefulMachine = LosingHostStatefulMachine.TestCase
TestGuessingStatefulMachine = GuessingStatefulMachine.TestCase
TestLosingStatefulMachine = LosingStatefulMachine.TestCase
TestWindowedMachine = WindowedMachine.TestCase
TestGuessingWindowedMachine = GuessingWindowedMachine.TestCase
TestLosingWindowedMachine = LosingWindowedMachine.TestCase
TestTieredMachine = TieredMachine.TestCase
TestGuessingMachine = GuessingMachine.TestCase
TestLosingMachine = LosingMachine.TestCase
TestEngineMachine.settings = TestTieredMachine.settings = settings(
    max_examples=examples(120),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestLosingMachine.settings = settings(TestEngineMachine.settings, max_examples=examples(100))
TestGuessingMachine.settings = TestLosingMachine.settings
TestWindowedMachine.settings = TestStatefulMachine.settings = TestEngineMachine.settings
TestGuessingStatefulMachine.settings = TestLosingMachine.settings
TestLosingStatefulMachine.settings = TestLosingMachine.settings
TestHostStatefulMachine.settings = settings(TestEngineMachine.settings, max_examples=examples(60))
TestGuessingHostStatefulMachine.settings = TestHostStatefulMachine.settings
TestLosingHostStatefulMachine.settings = TestHostStatefulMachine.settings
TestGuessingWindowedMachine.settings = TestLosingMachine.settings
TestLosingWindowedMachine.settings = TestLosingMachine.settings
