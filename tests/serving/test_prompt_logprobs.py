"""prompt_logprobs: the same whatever a prompt is cut into, and whatever is cached."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxport.errors import RequestError
from onnxport.serving import draft
from onnxport.serving.collect import OutputCollector
from onnxport.serving.engine import Engine
from onnxport.serving.outputs import TokenLogprobs
from onnxport.serving.params import SamplingParams
from tests.serving.helpers import alone, null_engine, reasons, run, submit, tokens
from tests.serving.prophet import Prophet
from tests.serving.test_sampling_engine import null_logits

PROMPT = [7, 3, 3, 9, 300, 4, 12, 8, 1, 0, 5, 77]
PARAMS = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=2)

Entries = tuple[TokenLogprobs | None, ...]


def computed(engine: Engine, params: SamplingParams = PARAMS) -> Entries:
    submit(engine, "a", PROMPT, params)
    deltas = run(engine)["a"]
    given = [(delta.index, one) for delta in deltas if (one := delta.prompt_logprobs) is not None]
    assert len(given) == 1, "they come once"
    index, entries = given[0]
    assert index == 0
    for number in range(params.n):
        assert tokens(deltas, number) == alone(PROMPT, params, number)
    return entries


@pytest.fixture(scope="module")
def expected() -> Entries:
    return computed(null_engine())


def test_they_are_the_log_softmax_of_the_logits_before_each_token() -> None:
    engine = null_engine()
    request = engine.prepare("a", PROMPT, PARAMS)
    collector = OutputCollector(request)
    engine.submit(request)
    for delta in run(engine)["a"]:
        collector.add(delta)
    entries = collector.output().prompt_logprobs
    assert entries is not None
    first, *rest = entries
    assert first is None
    logits = null_logits(PROMPT, 512).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for values, entry, token_id in zip(logprobs, rest, PROMPT[1:], strict=False):
        assert entry is not None
        best = np.argsort(-values, kind="stable")[:2].tolist()
        assert {*best, token_id} == entry.keys()
        for one, found in entry.items():
            assert found.logprob == pytest.approx(values[one], abs=1e-5)
            assert found.rank == 1 + np.count_nonzero(values > values[one])


@pytest.mark.parametrize("budget", [8, 9, 11])
def test_chunks_make_no_difference(expected: Entries, budget: int) -> None:
    assert computed(null_engine(max_num_batched_tokens=budget)) == expected


def test_a_step_scores_so_many_tokens_and_no_more(
    expected: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft, "MOST_SCORED", 5)
    engine = null_engine()
    assert computed(engine) == expected
    assert engine.stats().num_steps == 3 + 5  # 5, 5 and 2 tokens of the prompt, then 5 more


def test_a_cached_prompt_is_computed_again(expected: Entries) -> None:
    engine = null_engine()
    submit(engine, "first", PROMPT)
    run(engine)
    assert computed(engine) == expected
    assert computed(engine) == expected
    assert engine.stats().prefix_cache_hits == 0


def test_preemption_makes_no_difference(expected: Entries) -> None:
    engine = null_engine(num_blocks=6, max_num_batched_tokens=9, scheduling_policy="priority")
    submit(engine, "a", PROMPT, PARAMS, priority=1)
    engine.step()  # a chunk of it
    urgent = SamplingParams(temperature=0.0, max_tokens=4)
    submit(engine, "urgent", list(range(16)), urgent, priority=0)
    assert engine.step() == []
    assert engine.stats().num_preemptions == 1
    deltas = run(engine)
    [entries] = [one for delta in deltas["a"] if (one := delta.prompt_logprobs) is not None]
    assert entries == expected
    assert tokens(deltas["a"]) == alone(PROMPT, PARAMS)


def test_a_failed_step_leaves_none_behind(expected: Entries) -> None:
    engine = null_engine(max_num_batched_tokens=9, fails=lambda run: run == 1)
    submit(engine, "b", [4])
    engine.step()
    assert computed(engine) == expected  # its first step, beside another request, fails
    assert engine.stats().num_failed_steps == 1


@pytest.mark.parametrize("more", [{"n": 3}, {"max_tokens": 1}, {"logprobs": 1}])
def test_other_parameters_make_no_difference(expected: Entries, more: dict[str, Any]) -> None:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 6, "prompt_logprobs": 2, **more})
    assert computed(null_engine(), params) == expected


def test_drafts_make_no_difference(expected: Entries) -> None:
    assert computed(null_engine(speculator=Prophet(lambda one: alone(PROMPT, PARAMS)))) == expected


def test_a_prompt_of_one_token_has_none() -> None:
    engine = null_engine()
    submit(engine, "a", [5], PARAMS)
    deltas = run(engine)["a"]
    assert deltas[0].prompt_logprobs == (None,)


def test_a_request_that_ends_before_its_first_token_has_none() -> None:
    engine = null_engine(max_num_batched_tokens=8)
    submit(engine, "a", PROMPT, PARAMS)
    engine.step()
    deltas = engine.abort("a")
    assert reasons(deltas) == ["abort"]
    assert deltas[0].prompt_logprobs is None


@pytest.mark.parametrize("value", [-2, 1.5, True])
def test_what_is_no_number_of_logprobs_is_refused(value: Any) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=value)
