"""What fails ends alone; everybody else gets exactly their own tokens."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

import onnxport.serving.sampling as sampling_module
from onnxport.errors import ProviderError
from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel
from onnxport.serving.params import SamplingParams
from onnxport.serving.sampler import Sampled
from onnxport.serving.sampling import Position
from tests.serving.helpers import (
    alone,
    checked_step,
    null_engine,
    null_model,
    reasons,
    run,
    submit,
    tokens,
)
from tests.serving.watch import Watch

POISON = 510
PREFIX = list(range(100, 112))
Run = Callable[[StepInputs], NDArray[np.float32]]


class Touchy(NullModel):
    """Fails whenever a token is in its input, and leaves what it would have written unreadable."""

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        if POISON in inputs.input_ids:
            self._spoil(inputs)
            raise ProviderError("the token was there")
        return super().run(inputs)

    def _spoil(self, inputs: StepInputs) -> None:
        size = self.options.block_size
        for row, past in enumerate(inputs.past_sequence_lengths):
            start, stop = inputs.cumulative_sequence_lengths[row : row + 2]
            for position in range(past, past + stop - start):
                block = inputs.block_table[row, position // size]
                self._tokens[block, position % size] = -1
                self._positions[block, position % size] = -1


class Infinite(NullModel):
    """Its logits are no numbers for sequences whose last token is the poison."""

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        logits = super().run(inputs)
        logits[inputs.input_ids[inputs.logits_indices] == POISON] = np.nan
        return logits


@pytest.mark.parametrize("at", [0, 1, 9, 21])
@pytest.mark.parametrize("budget", [8, 16, 64])
@pytest.mark.parametrize("number", [0, 3, 5])
def test_a_poisoned_prompt_fails_alone(at: int, budget: int, number: int) -> None:
    engine = null_engine(max_num_batched_tokens=budget, model_type=Touchy)
    watch = Watch(engine)
    prompts = [[*PREFIX, *range(index, index + 10)] for index in range(6)]
    prompts[number][at] = POISON
    for index, prompt in enumerate(prompts):
        submit(engine, str(index), prompt)
    deltas = run(engine)
    watch.check_all_ended()
    for index, prompt in enumerate(prompts):
        if index == number:
            assert reasons(deltas[str(index)]) == ["error"]
            assert deltas[str(index)][-1].error == "ProviderError: the token was there"
        else:
            assert reasons(deltas[str(index)]) == ["length"]
            assert tokens(deltas[str(index)]) == alone(prompt)


def test_several_that_are_poisoned_fail_and_no_other() -> None:
    engine = null_engine(model_type=Touchy, max_num_batched_tokens=64)
    prompts = [[index, POISON if index in (1, 2, 7) else 3, 5] for index in range(8)]
    for index, prompt in enumerate(prompts):
        submit(engine, str(index), prompt)
    deltas = run(engine)
    for index in range(8):
        assert reasons(deltas[str(index)]) == ["error" if index in (1, 2, 7) else "length"]
        if index not in (1, 2, 7):
            assert tokens(deltas[str(index)]) == alone(prompts[index])
    # 0-7, 0-3, 0-1, 1, 2-3, 2, 4-7, 6-7, 7; what is good is not tried again with what is bad.
    assert engine.stats().num_failed_steps == 9


def test_a_poisoned_token_that_was_sampled_ends_one_completion() -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=12, n=4)
    expected = [alone(PREFIX, params, index) for index in range(4)]
    bad = expected[1][4]
    assert sum(bad in one[:-1] for one in expected) == 1

    class Bad(Touchy):
        def run(self, inputs: StepInputs) -> NDArray[np.float32]:
            if bad in inputs.input_ids:
                self._spoil(inputs)
                raise ProviderError("the token was there")
            return NullModel.run(self, inputs)

    engine = null_engine(model_type=Bad)
    submit(engine, "a", PREFIX, params)
    submit(engine, "b", PREFIX[:5])
    deltas = run(engine)
    for index in range(4):
        want = expected[index][:5] if index == 1 else expected[index]
        assert tokens(deltas["a"], index) == want
    assert sorted(reasons(deltas["a"])) == ["error", "length", "length", "length"]
    assert tokens(deltas["b"]) == alone(PREFIX[:5])


@pytest.mark.parametrize("number", range(14))
def test_any_run_may_fail_once_without_a_trace(number: int) -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=8, n=3)
    engine = null_engine(num_blocks=12, max_num_batched_tokens=12, fails=lambda run: run == number)
    submit(engine, "a", [*PREFIX, 1, 2], params)
    submit(engine, "b", [*PREFIX, 1, 2, 3])
    submit(engine, "c", [4, 5])
    deltas = run(engine)
    assert engine.stats().num_failed_steps == 1
    ended = [reason for one in deltas.values() for reason in reasons(one)]
    assert len(ended) == 5
    assert ended.count("error") <= (3 if number == 0 else 1)  # the step was of `a`, or one, alone
    for index in range(3):
        found = tokens(deltas["a"], index)
        assert found == alone([*PREFIX, 1, 2], params, index)[: len(found)]
    for name, prompt in (("b", [*PREFIX, 1, 2, 3]), ("c", [4, 5])):
        if reasons(deltas[name]) == ["length"]:
            assert tokens(deltas[name]) == alone(prompt)


def test_a_device_that_always_fails_ends_everybody_and_may_recover() -> None:
    broken = True
    engine = null_engine(fails=lambda run: broken, max_num_seqs=4)
    watch = Watch(engine)
    for index in range(6):
        submit(
            engine, str(index), [*PREFIX, index], SamplingParams(temperature=0.0, n=1 + index % 3)
        )
    deltas = run(engine, max_steps=100)
    for index in range(6):
        assert reasons(deltas[str(index)]) == ["error"] * (1 + index % 3)
    watch.check_all_ended()
    assert engine.stats().num_cached_blocks == 0
    broken = False
    submit(engine, "a", PREFIX)
    assert tokens(run(engine)["a"]) == alone(PREFIX)


def test_requests_that_come_while_a_step_is_retried_are_served() -> None:
    engine = null_engine(model_type=Touchy, max_num_batched_tokens=64)
    submit(engine, "a", [1, 2])
    submit(engine, "bad", [POISON])
    submit(engine, "b", [3, 4])
    assert checked_step(engine) == []
    submit(engine, "late", [5, 6])
    deltas = run(engine)
    assert reasons(deltas["bad"]) == ["error"]
    for name, prompt in (("a", [1, 2]), ("b", [3, 4]), ("late", [5, 6])):
        assert tokens(deltas[name]) == alone(prompt)


def test_suspects_may_be_aborted_and_time_out() -> None:
    engine = null_engine(model_type=Touchy, max_num_batched_tokens=64)
    submit(engine, "a", [1, 2])
    submit(engine, "bad", [POISON])
    submit(engine, "b", [3, 4])
    checked_step(engine)
    engine.abort("bad")
    engine.abort("a")
    deltas = run(engine)
    assert deltas.keys() == {"b"}
    assert tokens(deltas["b"]) == alone([3, 4])
    assert engine.stats().num_failed_steps == 1


# Sampling.


def test_sampling_that_fails_for_one_ends_that_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = sampling_module.sample_positions

    def fails(
        positions: list[Position], logits: NDArray[np.float32], num_threads: int | None
    ) -> Sampled:
        for request, _, _ in positions:
            if request.request_id == "bad" and request.index == 1:
                raise ZeroDivisionError("sampling")
        return sample(positions, logits, num_threads)

    monkeypatch.setattr(sampling_module, "sample_positions", fails)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=12, n=3, logprobs=1)
    engine = null_engine()
    watch = Watch(engine)
    submit(engine, "bad", PREFIX, params)
    submit(engine, "good", [1, 2], params)
    submit(engine, "plain", [1, 2, 3])
    deltas = run(engine)
    assert sorted(reasons(deltas["bad"])) == ["error", "length", "length"]
    [end] = [delta for delta in deltas["bad"] if delta.index == 1]
    assert (end.error, end.token_ids) == ("ZeroDivisionError: sampling", ())
    for index in (0, 2):
        assert tokens(deltas["bad"], index) == alone(PREFIX, params, index)
    for index in range(3):
        assert tokens(deltas["good"], index) == alone([1, 2], params, index)
    assert all(delta.logprobs for delta in deltas["good"])
    assert tokens(deltas["plain"]) == alone([1, 2, 3])
    assert engine.stats().num_failed_steps == 0
    watch.check_all_ended()


def test_logits_that_are_no_numbers_are_not_left_for_others() -> None:
    engine = null_engine(model_type=Infinite, max_num_batched_tokens=64)
    bad = [*PREFIX, 1, 2, 3, POISON]  # four whole blocks
    submit(engine, "bad", bad, SamplingParams(temperature=0.0, max_tokens=12, n=2))
    submit(engine, "good", [*PREFIX, 1])
    deltas = run(engine)
    assert reasons(deltas["bad"]) == ["error"] * 2
    assert "not finite" in str(deltas["bad"][0].error)
    assert tokens(deltas["good"]) == alone([*PREFIX, 1])
    submit(engine, "next", [*bad, 5])
    deltas = run(engine)
    assert deltas["next"][0].num_cached_tokens <= 12  # what `good` has computed again, at most
    assert tokens(deltas["next"]) == alone([*bad, 5])


def test_what_a_failed_step_has_written_is_found_by_nobody() -> None:
    engine = null_engine(model_type=Touchy, max_num_batched_tokens=16)
    bad = [*PREFIX, *range(12), POISON]
    submit(engine, "bad", bad)
    checked_step(engine)
    assert reasons(run(engine)["bad"]) == ["error"]
    assert engine.stats().num_cached_blocks == 4  # of the step that was committed
    submit(engine, "next", [*bad[:-1], 5])
    assert tokens(run(engine)["next"]) == alone([*bad[:-1], 5])
    assert null_model(engine).num_runs > 0
