"""A device without memory for a step gets smaller ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import DeviceMemoryError
from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.params import SamplingParams
from onnxport.serving.retries import GOOD_STEPS
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
