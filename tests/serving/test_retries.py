"""A device without memory for a step gets smaller ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import DeviceMemoryError
from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.params import SamplingParams
from onnxport.serving.retries import GOOD_STEPS, Retries
from tests.serving.helpers import alone, checked_step, null_engine, null_model, run, submit, tokens

PREFIX = [(i * 7) % 500 for i in range(64)]


class Narrow(NullModel):
    """Has memory for so many tokens in a step."""

    most = 10
    sizes: list[int]

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        if not hasattr(self, "sizes"):
            self.sizes = []
        self.sizes.append(len(inputs.input_ids))
        if len(inputs.input_ids) > self.most:
            raise DeviceMemoryError("no memory left")
        return super().run(inputs)


def test_a_prompt_that_needs_too_much_memory_is_computed_in_smaller_chunks() -> None:
    engine = null_engine(model_type=Narrow, max_num_batched_tokens=64, max_num_seqs=4)
    submit(engine, "a", PREFIX)
    submit(engine, "b", [*PREFIX[:30], 4])
    deltas = run(engine)
    assert tokens(deltas["a"]) == alone(PREFIX)
    assert tokens(deltas["b"]) == alone([*PREFIX[:30], 4])
    model = null_model(engine)
    assert isinstance(model, Narrow)
    failed = [size for size in model.sizes if size > model.most]
    assert len(failed) <= 8  # not again and again


def test_steps_grow_again_when_there_is_memory_again() -> None:
    engine = null_engine(
        model_type=Narrow, max_num_batched_tokens=32, max_num_seqs=4, max_model_len=4096
    )
    model = null_model(engine)
    assert isinstance(model, Narrow)
    submit(engine, "a", PREFIX)
    run(engine)
    model.most = 1000
    model.sizes.clear()
    submit(engine, "b", [9] * 40)
    run(engine)
    assert max(model.sizes) == 8
    while engine._retries.budget_tokens < 32:
        submit(engine, "c", [1], SamplingParams(max_tokens=100))
        run(engine)
    assert len(model.sizes) > GOOD_STEPS
    model.sizes.clear()
    submit(engine, "d", [8] * 40)
    run(engine)
    assert max(model.sizes) == 32


class Few(NullModel):
    """Has memory for so many rows in a step."""

    most = 5
    sizes: list[int]

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        if not hasattr(self, "sizes"):
            self.sizes = []
        self.sizes.append(len(inputs.block_table))
        if len(inputs.block_table) > self.most:
            raise DeviceMemoryError("no memory left")
        return super().run(inputs)


def test_rows_that_need_too_much_memory_go_in_parts_and_fail_no_more() -> None:
    engine = null_engine(model_type=Few, max_num_batched_tokens=64, max_num_seqs=16)
    for number in range(12):
        submit(engine, str(number), [number, 3])
    deltas = run(engine)
    for number in range(12):
        assert tokens(deltas[str(number)]) == alone([number, 3])
    model = null_model(engine)
    assert isinstance(model, Few)
    assert [size for size in model.sizes if size > model.most] == [12, 6, 6]  # of one step
    assert engine._retries.most_rows == 3  # a quarter went well
    assert max(model.sizes[-12:]) == 3


def test_rows_of_which_some_need_more_memory_go_in_parts_that_fit() -> None:
    class Uneven(Few):
        """Has memory for so many rows, or for fewer where one is long."""

        def run(self, inputs: StepInputs) -> NDArray[np.float32]:
            self.most = 2 if inputs.attention_metadata[1] > 40 else 8
            return super().run(inputs)

    engine = null_engine(
        model_type=Uneven, max_num_batched_tokens=64, max_num_seqs=16, num_blocks=256
    )
    params = SamplingParams(temperature=0.0, max_tokens=60)
    prompts = {str(number): [number, 3] for number in range(11)} | {"long": [7] * 36}
    for name, prompt in prompts.items():
        submit(engine, name, prompt, params)
    deltas = run(engine)
    for name, prompt in prompts.items():
        assert tokens(deltas[name]) == alone(prompt, params)
    model = null_model(engine)
    assert isinstance(model, Uneven)
    assert engine._retries.most_rows == 2
    assert not [size for size in model.sizes[len(model.sizes) // 2 :] if size > 2]


def test_rows_grow_again_when_there_is_memory_again() -> None:
    engine = null_engine(
        model_type=Few, max_num_batched_tokens=64, max_num_seqs=16, num_blocks=1000
    )
    model = null_model(engine)
    assert isinstance(model, Few)
    params = SamplingParams(temperature=0.0, max_tokens=300)
    for number in range(12):
        submit(engine, str(number), [number], params)
    checked_step(engine)
    while not engine._retries.most_rows:
        checked_step(engine)
    model.most = 12
    model.sizes.clear()
    deltas = run(engine)
    assert all(deltas.values())
    assert engine._retries.most_rows is None
    assert [size for size in dict.fromkeys(model.sizes) if size in (3, 6, 12)] == [3, 6, 12]


def test_a_failure_of_another_kind_limits_no_rows() -> None:
    class Broken(Few):
        most = 100

        def run(self, inputs: StepInputs) -> NDArray[np.float32]:
            found = super().run(inputs)
            if 7 in inputs.input_ids:
                raise RuntimeError("no such token")
            return found

    engine = null_engine(model_type=Broken, max_num_batched_tokens=64, max_num_seqs=16)
    for number in range(6, 10):
        submit(engine, str(number), [number], SamplingParams(max_tokens=1))
    deltas = run(engine)
    assert [name for name, found in deltas.items() if found[-1].finish_reason == "error"] == ["7"]
    assert engine._retries.most_rows is None


def test_one_request_that_is_too_large_limits_no_rows() -> None:
    engine = null_engine(model_type=Narrow, max_num_batched_tokens=64, max_num_seqs=4)
    submit(engine, "a", PREFIX)
    submit(engine, "b", [*PREFIX[:30], 4])
    run(engine)
    assert engine._retries.budget_tokens < 64
    assert engine._retries.most_rows is None


def test_who_yields_to_others_does_so_though_there_is_memory_for_few_rows() -> None:
    engine = null_engine(
        model_type=Few, max_num_batched_tokens=64, num_blocks=30, scheduling_policy="priority"
    )
    for number in range(7):
        submit(engine, str(number), [number, 3, 5], priority=1)
    while not engine._retries.most_rows:
        checked_step(engine)
    submit(engine, "first", PREFIX[:40], priority=0)
    deltas = run(engine)
    assert tokens(deltas["first"]) == alone(PREFIX[:40])
    for number in range(7):
        assert len(tokens(deltas[str(number)])) <= len(alone([number, 3, 5]))
    assert engine.stats().num_preemptions > 0


def test_the_next_provider_starts_with_all_its_memory() -> None:
    engine = null_engine(
        model_type=Narrow,
        max_num_batched_tokens=64,
        lost_at=lambda operation: operation == 1,  # a run without memory is none of them
        fallbacks=[Narrow(NullOptions(block_size=4, max_model_len=512))],
    )
    submit(engine, "a", PREFIX)
    while not engine.losses:
        checked_step(engine)
    assert engine._retries.budget_tokens == 64
    model = null_model(engine)
    assert isinstance(model, Narrow)
    model.most = 100
    assert tokens(run(engine)["a"]) in (alone(PREFIX), alone(PREFIX)[1:])
    assert max(model.sizes) >= 64


def test_one_token_for_which_there_is_no_memory_is_an_error() -> None:
    class Full(Narrow):
        most = 0

    engine = null_engine(model_type=Full)
    submit(engine, "a", PREFIX[:20])
    [*_, last] = run(engine)["a"]
    assert last.finish_reason == "error"
    assert last.error == "DeviceMemoryError: no memory left"
    assert engine.failure is None


def test_a_step_for_which_others_yielded_says_nothing_of_fewer_rows() -> None:
    engine = null_engine(max_num_seqs=32, num_blocks=256)
    for number in range(17):
        submit(engine, str(number), [number], SamplingParams(max_tokens=4))
    engine.step()
    requests = list(engine._scheduler.running)
    retries = Retries(64)
    retries._rows = 16
    retries.split(requests, had_no_memory=True)  # all of them, as such a step is tried whole
    retries.note_good(8)
    retries.note_good(9)
    retries._settle_rows()
    assert retries.most_rows == 16
    retries.split(requests[:16], had_no_memory=True)
    retries.note_good(8)
    retries._settle_rows()
    assert retries.most_rows == 8
