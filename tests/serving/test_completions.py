"""Several completions of one prompt, and what requests have in common in the engine."""

import dataclasses
from collections.abc import Sequence

import pytest

from onnxport.errors import RequestError
from onnxport.serving.collect import OutputCollector
from onnxport.serving.outputs import CompletionDelta, CompletionOutput, Failure, Logprob
from onnxport.serving.params import SamplingParams
from tests.serving.helpers import (
    GREEDY,
    alone,
    checked_step,
    null_engine,
    reasons,
    run,
    submit,
    tokens,
)
from tests.serving.watch import Watch

PROMPT = list(range(100, 122))  # five blocks and a half


def greedy(n: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=12, n=n)


def seeded(n: int, seed: int = 5) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=12, n=n)


def test_greedy_completions_are_equal_and_the_prompt_is_computed_once() -> None:
    engine = null_engine(max_num_batched_tokens=64)
    watch = Watch(engine)
    submit(engine, "a", PROMPT, greedy(5))
    deltas = run(engine)["a"]
    assert [tokens(deltas, index) for index in range(5)] == [alone(PROMPT)] * 5
    assert reasons(deltas) == ["length"] * 5
    assert watch.num_tokens == 22 + 5 * 11


@pytest.mark.parametrize("caching", [True, False])
def test_each_completion_is_what_its_own_seed_gives(caching: bool) -> None:
    engine = null_engine(enable_prefix_caching=caching)
    submit(engine, "a", PROMPT, seeded(4))
    submit(engine, "b", PROMPT[:9], seeded(3, seed=6))
    submit(engine, "c", PROMPT[:5], greedy(1))
    deltas = run(engine)
    found = [tokens(deltas["a"], index) for index in range(4)]
    assert found == [alone(PROMPT, seeded(4), index) for index in range(4)]
    assert len(set(map(tuple, found))) == 4
    assert [tokens(deltas["b"], i) for i in range(3)] == [
        alone(PROMPT[:9], seeded(3, seed=6), i) for i in range(3)
    ]


def test_completions_are_the_same_in_a_tiny_pool() -> None:
    engine = null_engine(num_blocks=9)
    submit(engine, "a", PROMPT, seeded(4))
    submit(engine, "b", PROMPT, greedy(3))
    deltas = run(engine)
    assert engine.stats().num_preemptions > 2
    for index in range(4):
        assert tokens(deltas["a"], index) == alone(PROMPT, seeded(4), index)
    for index in range(3):
        assert tokens(deltas["b"], index) == alone(PROMPT)


def test_completions_go_on_where_the_pool_holds_only_their_prompt() -> None:
    engine = null_engine(num_blocks=2, max_num_seqs=2)
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=2, n=2)
    submit(engine, "a", PROMPT[:6], params)
    deltas = run(engine, max_steps=50)["a"]
    assert [tokens(deltas, i) for i in range(2)] == [alone(PROMPT[:6], params, i) for i in range(2)]


def test_completions_end_one_by_one() -> None:
    params = seeded(4)
    expected = [alone(PROMPT, params, index) for index in range(4)]
    end = expected[2][3]
    engine = null_engine(eos_token_ids=frozenset({end}))
    submit(engine, "a", PROMPT, params)
    deltas = run(engine)["a"]
    for index in range(4):
        cut = expected[index].index(end) + 1 if end in expected[index] else 12
        assert tokens(deltas, index) == expected[index][:cut]
    assert sorted(reasons(deltas)) != ["length"] * 4


def test_an_abort_ends_every_completion_once() -> None:
    engine = null_engine()
    submit(engine, "early", PROMPT, greedy(3))
    assert reasons(engine.abort("early")) == ["abort"] * 3
    submit(engine, "late", PROMPT, greedy(3))
    checked_step(engine)
    checked_step(engine)
    deltas = engine.abort("late")
    assert reasons(deltas) == ["abort"] * 3
    assert sorted(delta.index for delta in deltas) == [0, 1, 2]
    assert engine.abort("late") == []
    assert not engine.has_work
    assert engine.stats().finished["abort"] == 6


def test_more_completions_than_rows_are_refused() -> None:
    engine = null_engine(max_num_seqs=8, max_batch_rows=2)
    with pytest.raises(RequestError, match="n is 3, and the engine runs 2 sequences"):
        submit(engine, "a", PROMPT, greedy(3))


def test_cached_tokens_are_told() -> None:
    engine = null_engine(max_num_batched_tokens=64)
    submit(engine, "a", PROMPT)
    submit(engine, "b", PROMPT, greedy(2))
    first = run(engine)
    submit(engine, "c", [*PROMPT, 1])
    submit(engine, "d", [1, *PROMPT])
    second = run(engine)
    assert {delta.num_cached_tokens for delta in first["a"]} == {0}
    assert {delta.num_cached_tokens for delta in first["b"]} == {20}
    assert {delta.num_cached_tokens for delta in second["c"]} == {20}
    assert {delta.num_cached_tokens for delta in second["d"]} == {0}
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (22 + 22 + 23 + 23, 40)
    assert tokens(second["c"]) == alone([*PROMPT, 1])


def test_a_chat_finds_its_own_answers() -> None:
    engine = null_engine(num_blocks=64)
    prompt = PROMPT
    for turn in range(4):
        submit(engine, str(turn), prompt)
        deltas = run(engine)[str(turn)]
        assert tokens(deltas) == alone(prompt)
        if turn:
            assert deltas[0].num_cached_tokens >= len(prompt) - 3 - 4 - 1
        prompt = [*prompt, *tokens(deltas), 1, 2, 3]


def test_a_salt_isolates() -> None:
    engine = null_engine()
    options = [{}, {"cache_salt": "x"}, {"cache_salt": "y"}]
    for index, option in enumerate(options):
        submit(engine, f"a{index}", PROMPT, **option)
    run(engine)
    assert engine.stats().prefix_cache_hits == 0
    for index, option in enumerate(options):
        submit(engine, f"b{index}", PROMPT, **option)
    deltas = run(engine)
    for index in range(3):
        assert deltas[f"b{index}"][0].num_cached_tokens == 20
        assert tokens(deltas[f"b{index}"]) == alone(PROMPT)


def test_without_prefix_caching_nothing_is_shared_or_kept() -> None:
    engine = null_engine(enable_prefix_caching=False, max_num_batched_tokens=128)
    watch = Watch(engine)
    for name in "ab":
        submit(engine, name, PROMPT)
    deltas = run(engine)
    assert watch.num_tokens == 2 * (22 + 11)
    assert {delta.num_cached_tokens for delta in deltas["b"]} == {0}
    stats = engine.stats()
    assert (stats.prefix_cache_queries, stats.num_cached_blocks) == (0, 0)


def test_a_reset_forgets_what_is_cached_while_requests_run() -> None:
    engine = null_engine(max_num_batched_tokens=8)
    submit(engine, "a", PROMPT)
    submit(engine, "b", PROMPT)
    checked_step(engine)
    checked_step(engine)
    engine.reset_prefix_cache()
    engine.check()
    deltas = run(engine)
    assert tokens(deltas["a"]) == tokens(deltas["b"]) == alone(PROMPT)
    engine.reset_prefix_cache()
    assert engine.stats().num_cached_blocks == 0
    submit(engine, "c", PROMPT)
    assert run(engine)["c"][0].num_cached_tokens == 0


def test_sixteen_with_one_prefix_compute_it_once() -> None:
    engine = null_engine(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=64, block_size=16)
    watch = Watch(engine)
    prefix = [(i * i) % 500 for i in range(256)]
    for index in range(16):
        submit(engine, str(index), [*prefix, index, 1, 2])
    deltas = run(engine)
    assert watch.num_tokens == 256 + 16 * 3 + 16 * 11
    assert [deltas[str(i)][0].num_cached_tokens for i in range(16)] == [0] + [256] * 15
    for index in range(16):
        assert tokens(deltas[str(index)]) == alone([*prefix, index, 1, 2])


@pytest.mark.parametrize("steps", range(1, 6))
def test_an_aborted_leader_holds_up_nobody(steps: int) -> None:
    """Whenever the first is aborted, the others are done as soon as if they had been alone."""
    prefix = list(range(100, 140))

    def steps_taken(names: str, abort_after: int | None) -> int:
        engine = null_engine(max_num_batched_tokens=8)
        for name in names:
            submit(engine, name, [*prefix, ord(name)])
        for count in range(1, 200):
            deltas = checked_step(engine)
            if count == abort_after:
                engine.abort("a")
            if any(delta.request_id == "c" and delta.finish_reason for delta in deltas):
                return count
        raise AssertionError("c did not end")

    assert steps_taken("abc", abort_after=steps) <= steps_taken("bc", None) + 1
    assert GREEDY.max_tokens == 12


def test_best_of_keeps_the_likeliest_per_token() -> None:
    params = SamplingParams(temperature=1.3, seed=5, max_tokens=6, n=5, logprobs=1)
    outputs = collected(params)
    ranked = sorted(outputs, key=mean_of, reverse=True)
    best = collected(dataclasses.replace(params, n=2, best_of=5))
    assert [one.token_ids for one in best] == [one.token_ids for one in ranked[:2]]
    assert [one.index for one in best] == [0, 1]
    assert [one.logprobs for one in best] == [one.logprobs for one in ranked[:2]]
    silent = collected(dataclasses.replace(params, n=2, best_of=5, logprobs=None))
    assert [one.token_ids for one in silent] == [one.token_ids for one in best]
    assert all(one.logprobs is None for one in silent)


def test_a_completion_that_failed_is_not_the_best() -> None:
    engine = null_engine()
    request = engine.prepare("a", [1, 2], SamplingParams(seed=1, n=1, best_of=2, max_tokens=4))
    collector = OutputCollector(request)
    likely = {5: Logprob(-0.1, 1, "")}
    unlikely = {5: Logprob(-9.0, 3, "")}
    collector.add(CompletionDelta("a", 0, "", (5,), (likely,), "error", failure=Failure("broken")))
    collector.add(CompletionDelta("a", 1, "", (5,), (unlikely,), "length"))
    [output] = collector.output().outputs
    assert output.finish_reason == "length"


def collected(params: SamplingParams) -> Sequence[CompletionOutput]:
    engine = null_engine()
    request = engine.prepare("a", [3, 1, 4], params)
    collector = OutputCollector(request)
    engine.submit(request)
    for delta in run(engine)["a"]:
        collector.add(delta)
    output = collector.output()
    assert output.finished
    return output.outputs


def mean_of(output: CompletionOutput) -> float:
    assert output.logprobs is not None
    values = [
        entry[token_id].logprob
        for token_id, entry in zip(output.token_ids, output.logprobs, strict=True)
    ]
    return sum(values) / len(values)
