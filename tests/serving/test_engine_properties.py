"""Under any sequence of submit, abort, step and failure nothing leaks and all requests end."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from onnxport.errors import CapacityError
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams
from tests.serving.helpers import alone, checked_step, null_engine, run, submit


class EngineMachine(RuleBasedStateMachine):
    """Every accepted request gets its own tokens and exactly one finish reason."""

    @initialize(
        num_blocks=st.integers(2, 12),
        rows=st.integers(1, 4),
        spare_tokens=st.integers(0, 6),
        block_size=st.sampled_from([1, 3, 4]),
    )
    def start(self, num_blocks: int, rows: int, spare_tokens: int, block_size: int) -> None:
        self.failing = False
        self.engine = null_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_seqs=rows,
            max_num_batched_tokens=rows + spare_tokens,
            fails=lambda run: self.failing,
        )
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.reasons: dict[str, str] = {}

    @rule(length=st.integers(1, 20), max_tokens=st.integers(1, 12), seed=st.integers(0, 3))
    def submit(self, length: int, max_tokens: int, seed: int) -> None:
        name = str(len(self.requests))
        prompt = [seed] * length  # so that requests often begin alike
        params = SamplingParams(temperature=float(seed % 2), seed=seed, max_tokens=max_tokens)
        try:
            submit(self.engine, name, prompt, params)
        except CapacityError:
            return
        self.requests[name] = (prompt, params)
        self.tokens[name] = []

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.requests:
            name = data.draw(st.sampled_from(sorted(self.requests)))
            deltas = self.engine.abort(name)
            assert bool(deltas) == (name not in self.reasons)
            self.take(deltas)

    @rule()
    def step(self) -> None:
        self.take(checked_step(self.engine))

    @rule()
    def fail(self) -> None:
        self.failing = True
        self.take(checked_step(self.engine))
        self.failing = False

    @invariant()
    def nothing_leaks(self) -> None:
        self.engine.check()
        stats = self.engine.stats()
        unfinished = len(self.requests) - len(self.reasons)
        assert stats.num_requests_running + stats.num_requests_waiting == unfinished
        if not unfinished:
            assert stats.num_free_blocks == stats.num_blocks

    def take(self, deltas: list[CompletionDelta]) -> None:
        for delta in deltas:
            name = delta.request_id
            assert name not in self.reasons, "a delta after the last one"
            self.tokens[name] += delta.token_ids
            if delta.finish_reason is not None:
                self.reasons[name] = delta.finish_reason

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for deltas in run(self.engine).values():
            self.take(deltas)
        assert self.reasons.keys() == self.requests.keys()
        for name, (prompt, params) in self.requests.items():
            expected = alone(prompt, params)
            if self.reasons[name] == "length":
                assert self.tokens[name] == expected
            else:
                assert self.tokens[name] == expected[: len(self.tokens[name])]


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
