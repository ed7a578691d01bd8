"""A load on an engine, by a clock that the test winds."""

from dataclasses import replace

import pytest

from onnxport.errors import CapacityError
from onnxport.serving.bench.load import Ask, Lengths, RandomPrompts
from onnxport.serving.bench.local import run_local
from onnxport.serving.bench.records import summarize
from onnxport.serving.params import SamplingParams

from .helpers import Clock, null_engine
from .prophet import Prophet

PARAMS = SamplingParams(temperature=0.0, ignore_eos=True)


def test_each_step_is_timed() -> None:
    engine = null_engine(max_num_batched_tokens=8)
    asks = [Ask((5,) * 12, 3), Ask((6, 7), 1)]
    long, short = run_local(engine, asks, PARAMS, Clock(tick_s=1.0))
    # The prompt takes two steps, and in the second there is room for the other.
    assert long.output_s == (2.0, 3.0, 4.0)
    assert (long.num_prompt_tokens, long.num_output_tokens, long.finished_s) == (12, 3, 4.0)
    assert short.output_s == (2.0,)
    assert (short.num_prompt_tokens, short.num_output_tokens, short.finished_s) == (2, 1, 2.0)
    assert long.error is short.error is None
    engine.check()
    engine.close()


def test_more_requests_than_the_queue_takes() -> None:
    engine = null_engine(max_num_seqs=2, max_queued_requests=1)
    asks = RandomPrompts(Lengths(3, 9), Lengths(1, 6), highest_id=500).draw(9, 0)
    records = run_local(engine, asks, PARAMS)
    assert [one.num_output_tokens for one in records] == [ask.max_tokens for ask in asks]
    assert [one.num_prompt_tokens for one in records] == [len(ask.prompt) for ask in asks]
    assert not engine.has_work
    engine.close()


def test_a_prefix_that_all_share_is_found_in_the_cache() -> None:
    engine = null_engine(block_size=4)
    asks = RandomPrompts(Lengths(3, 3), Lengths(2, 2), prefix_len=8, highest_id=500).draw(4, 0)
    assert summarize(run_local(engine, asks, PARAMS)).cached_tokens == 3 * 8
    engine.close()


def test_a_step_may_bring_several_tokens() -> None:
    engine = null_engine()
    prompt, future = [5, 6, 7], []
    engine.submit(engine.prepare("before", prompt, replace(PARAMS, max_tokens=9)))
    while engine.has_work:
        future += [token for delta in engine.step() for token in delta.token_ids]
    engine.close()
    engine = null_engine(speculator=Prophet(lambda request: future, length=3))
    [one] = run_local(engine, [Ask(tuple(prompt), 9)], PARAMS, Clock(tick_s=1.0))
    assert one.output_s == (1.0, 2.0, 3.0)  # 1, 4 and 4 tokens
    assert one.num_output_tokens == 9
    assert one.tpot_s == 2 / 8
    engine.close()


def test_failures_are_recorded() -> None:
    engine = null_engine(fails=lambda run: run > 1)
    [one] = run_local(engine, [Ask((1, 2), 9)], PARAMS)
    assert one.num_output_tokens == 2
    assert one.error
    assert summarize([one]).num_failed == 1
    engine.close()


def test_what_does_not_fit_is_told_and_leaves_nothing() -> None:
    engine = null_engine(max_model_len=16)
    with pytest.raises(CapacityError):
        run_local(engine, [Ask((1, 2), 2), Ask((1, 2), 99)], PARAMS)
    assert not engine.has_work
    engine.close()
