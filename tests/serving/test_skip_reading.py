"""Requests that go on from nothing that is cached, though others go on from what they computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onnxport.errors import RequestError
from onnxport.serving.params import SamplingParams
from tests.serving.helpers import GREEDY, alone, null_engine, run, submit, tokens
from tests.serving.watch import Watch

FRESH = replace(GREEDY, skip_reading_prefix_cache=True)
PROMPT = list(range(1, 22))


def test_all_of_the_prompt_is_computed() -> None:
    engine = null_engine()
    watch = Watch(engine)
    found, computed, looked_up = [], [], []
    for name, params in (("a", GREEDY), ("b", GREEDY), ("c", FRESH), ("d", GREEDY)):
        before = watch.num_tokens, engine.stats().prefix_cache_queries
        submit(engine, name, PROMPT, params)
        deltas = run(engine)[name]
        assert tokens(deltas) == alone(PROMPT)
        found.append(deltas[-1].num_cached_tokens)
        computed.append(watch.num_tokens - before[0])
        looked_up.append(engine.stats().prefix_cache_queries - before[1])
    whole = len(PROMPT) + GREEDY.max_tokens - 1 if GREEDY.max_tokens else 0
    assert found == [0, 20, 0, 20]
    assert computed == [whole, whole - 20, whole, whole - 20]
    assert looked_up == [21, 21, 0, 21]


def test_others_go_on_from_what_was_computed() -> None:
    engine = null_engine()
    submit(engine, "fresh", PROMPT, FRESH)
    assert run(engine)["fresh"][-1].num_cached_tokens == 0
    submit(engine, "other", PROMPT)
    assert run(engine)["other"][-1].num_cached_tokens == 20


def test_nothing_is_loaded_from_a_tier() -> None:
    engine = null_engine(num_blocks=12, kv_host_memory=1 << 20, preemption="swap")
    submit(engine, "a", PROMPT)
    run(engine)
    for start in range(100, 400, 40):  # these take its blocks
        submit(engine, str(start), range(start, start + 30))
        run(engine)
    loaded = engine.stats().num_blocks_loaded
    submit(engine, "fresh", PROMPT, FRESH)
    deltas = run(engine)["fresh"]
    assert tokens(deltas) == alone(PROMPT)
    assert deltas[-1].num_cached_tokens == 0
    assert engine.stats().num_blocks_loaded == loaded
    for start in range(100, 400, 40):
        submit(engine, str(start), range(start, start + 30))
        run(engine)
    submit(engine, "b", PROMPT)
    assert run(engine)["b"][-1].num_cached_tokens == 20
    assert engine.stats().num_blocks_loaded > loaded


def test_several_at_once() -> None:
    """Also completions of one prompt, which share what their own request computed."""
    engine = null_engine(max_num_batched_tokens=12)
    watch = Watch(engine)
    for name in "abc":
        submit(engine, name, PROMPT, replace(FRESH, n=2))
    for deltas in run(engine).values():
        assert tokens(deltas, 0) == tokens(deltas, 1) == alone(PROMPT)
        assert {delta.num_cached_tokens for delta in deltas} == {0}
    assert watch.num_tokens == 3 * (len(PROMPT) + 2 * 11)


def test_none_waits_for_what_another_computes() -> None:
    """They begin alike, and start in one step, as where nothing is cached."""
    steps = []
    for cached in (True, False):
        engine = null_engine(
            max_num_batched_tokens=2048, num_blocks=256, enable_prefix_caching=cached
        )
        watch = Watch(engine)
        for number in range(8):
            submit(engine, str(number), PROMPT, FRESH)
        run(engine)
        steps.append(len(watch.steps))
    assert steps[0] == steps[1]


def test_without_a_cache_it_changes_nothing() -> None:
    engine = null_engine(enable_prefix_caching=False)
    submit(engine, "a", PROMPT, FRESH)
    assert tokens(run(engine)["a"]) == alone(PROMPT)


def test_what_is_no_switch() -> None:
    with pytest.raises(RequestError, match="skip_reading_prefix_cache is 1; give true or false"):
        SamplingParams(skip_reading_prefix_cache=1)  # type: ignore[arg-type]
