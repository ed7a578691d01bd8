"""The engine on the null provider, whose tokens change with any mistake in paging."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.errors import CapacityError, OnnxportError, RequestError
from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel
from onnxport.serving.outputs import FINISH_REASONS
from onnxport.serving.params import RequestOptions, SamplingParams
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

PROMPTS = [[(7 * i + j) % 500 for j in range(1 + 5 * i)] for i in range(8)]


def test_a_batch_gives_the_tokens_that_each_request_gets_alone() -> None:
    engine = null_engine()
    for index, prompt in enumerate(PROMPTS):
        submit(engine, str(index), prompt)
    deltas = run(engine)
    for index, prompt in enumerate(PROMPTS):
        assert tokens(deltas[str(index)]) == alone(prompt)
        assert reasons(deltas[str(index)]) == ["length"]
        assert all(len(delta.token_ids) == 1 for delta in deltas[str(index)])


@pytest.mark.parametrize("chunk", range(1, 24))
def test_every_chunk_size_gives_the_same_tokens(chunk: int) -> None:
    prompt = list(range(100, 123))
    engine = null_engine(max_num_seqs=1, max_num_batched_tokens=chunk)
    submit(engine, "a", prompt)
    assert tokens(run(engine)["a"]) == alone(prompt)
    assert engine.stats().num_steps == -(-23 // chunk) + 11


def test_each_step_of_a_prompt_is_told_where_that_was_asked_for() -> None:
    engine = null_engine(max_num_seqs=2, max_num_batched_tokens=10)
    prompt = list(range(100, 123))
    options = RequestOptions(tells_progress=True)
    engine.submit(engine.prepare("told", prompt, GREEDY, options))
    deltas = run(engine)["told"]
    assert [one.progress.num_computed for one in deltas if one.progress] == [10, 20, 23]
    assert [one.token_ids for one in deltas[:3]] == [(), (), ()]
    assert tokens(deltas) == alone(prompt)
    engine.submit(engine.prepare("again", prompt, GREEDY, options))
    submit(engine, "other", prompt)
    both = run(engine)
    [last] = [one for one in both["again"] if one.progress]
    assert last.progress is not None
    assert 0 < last.num_cached_tokens < last.progress.num_computed == 23
    assert not any(one.progress for one in both["other"])
    submit(engine, "silent", prompt)
    engine.submit(engine.prepare("aborted", prompt, GREEDY, options))
    engine.abort("aborted")
    assert not any(one.progress for one in run(engine)["silent"])
    assert not engine._sequences._telling  # nobody is looked at where nobody asks


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_preemption_changes_no_token(temperature: float) -> None:
    engine = null_engine(num_blocks=14)
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=16) for i in range(len(PROMPTS))
    ]
    for index, prompt in enumerate(PROMPTS):
        submit(engine, str(index), prompt, params[index])
    deltas = run(engine)
    assert engine.stats().num_preemptions > 3
    for index, prompt in enumerate(PROMPTS):
        assert tokens(deltas[str(index)]) == alone(prompt, params[index])


def test_a_seed_decides_the_tokens_whatever_else_runs() -> None:
    params = SamplingParams(temperature=1.0, seed=11, max_tokens=20)
    expected = alone([1, 2, 3], params)
    engine = null_engine()
    for index in range(6):
        submit(engine, f"other{index}", [index], SamplingParams(max_tokens=20))
    submit(engine, "a", [1, 2, 3], params)
    assert tokens(run(engine)["a"]) == expected
    assert alone([1, 2, 3], SamplingParams(temperature=1.0, seed=12, max_tokens=20)) != expected


def test_requests_without_a_seed_differ_and_follow_the_engine_s() -> None:
    def sample(seed: int | None) -> list[list[int]]:
        engine = null_engine(seed=seed)
        for name in "ab":
            submit(engine, name, [1], SamplingParams(max_tokens=12))
        deltas = run(engine)
        return [tokens(deltas[name]) for name in "ab"]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert sample(1)[0] != sample(1)[1]


def test_eos_ends_a_request_unless_it_is_ignored() -> None:
    expected = alone([5])
    end = expected[4]
    engine = null_engine(eos_token_ids=frozenset({end}))
    submit(engine, "a", [5])
    submit(engine, "b", [5], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True))
    deltas = run(engine)
    assert tokens(deltas["a"]) == expected[:5]
    assert (deltas["a"][-1].finish_reason, deltas["a"][-1].stop_reason) == ("stop", None)
    assert tokens(deltas["b"]) == expected
    assert deltas["b"][-1].finish_reason == "length"


def test_a_stop_token_ends_a_request_and_is_named() -> None:
    expected = alone([5])
    end = expected[3]
    engine = null_engine()
    params = SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=(end,), ignore_eos=True)
    submit(engine, "a", [5], params)
    deltas = run(engine)["a"]
    assert tokens(deltas) == expected[:4]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", end)


def test_without_max_tokens_a_request_goes_on_to_the_context_length() -> None:
    engine = null_engine(max_model_len=40)
    submit(engine, "a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=None))
    deltas = run(engine)["a"]
    assert len(tokens(deltas)) == 37
    assert deltas[-1].finish_reason == "length"


def test_without_max_tokens_a_request_may_fill_the_whole_cache() -> None:
    engine = null_engine(num_blocks=3, max_num_seqs=2)
    for name in "ab":
        submit(engine, name, [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=None))
    deltas = run(engine)
    assert [len(tokens(deltas[name])) for name in "ab"] == [10, 10]  # 12 cached and one not


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ([], GREEDY, RequestError, "empty"),
        ([1, 512], GREEDY, RequestError, "token 512; the model's tokens are 0 to 511"),
        ([1, -1], GREEDY, RequestError, "token -1"),
        ([1, 2**70], GREEDY, RequestError, "no token id"),
        ([1, 1.5], GREEDY, RequestError, "no token id"),
        ([1, "a"], GREEDY, RequestError, "no token id"),
        ("text", GREEDY, RequestError, "needs a tokenizer"),
        ([1], SamplingParams(stop=("x",)), RequestError, "needs a tokenizer"),
        ([1] * 60, GREEDY, CapacityError, r"60 prompt tokens \+ 12 to generate = 72, and the"),
        ([1] * 64, SamplingParams(max_tokens=None), CapacityError, "context length is 64"),
        (
            [1] * 30,
            SamplingParams(max_tokens=20),
            CapacityError,
            "30 .* 20 to generate = 50, which need 13 KV blocks of 4 tokens, and the cache has 12",
        ),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    prompt: list[Any] | str, params: SamplingParams, error: type[Exception], words: str
) -> None:
    engine = null_engine(num_blocks=12, max_model_len=64)
    with pytest.raises(error, match=words):
        submit(engine, "a", prompt, params)
    assert not engine.has_work


def test_the_last_token_needs_no_room_in_the_cache() -> None:
    engine = null_engine(num_blocks=12, max_model_len=64)
    submit(engine, "a", [1] * 30, SamplingParams(max_tokens=19, temperature=0.0))
    assert len(tokens(run(engine)["a"])) == 19


def test_the_prompt_alone_may_take_the_whole_context() -> None:
    engine = null_engine(num_blocks=16, max_model_len=64)
    one = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    submit(engine, "a", [1] * 64, one, only_prompt=True)
    (told,) = [delta for delta in run(engine)["a"] if delta.prompt_logprobs is not None]
    assert told.prompt_logprobs is not None
    assert len(told.prompt_logprobs) == 64
    with pytest.raises(CapacityError, match=r"^65 prompt tokens, and the context length is 64"):
        submit(engine, "b", [1] * 65, one, only_prompt=True)
    with pytest.raises(CapacityError, match=r"64 prompt tokens \+ 1 to generate = 65"):
        submit(engine, "c", [1] * 64, one)


def test_an_id_is_unique_among_the_unfinished() -> None:
    engine = null_engine()
    submit(engine, "a", [1])
    with pytest.raises(RequestError, match="in use"):
        submit(engine, "a", [2])
    run(engine)
    submit(engine, "a", [2])
    run(engine)


def test_abort_frees_waiting_and_running_requests_once() -> None:
    engine = null_engine(max_num_seqs=1, max_num_batched_tokens=4)
    submit(engine, "running", [1] * 9)
    submit(engine, "waiting", [2])
    checked_step(engine)
    for name in ("running", "waiting"):
        [delta] = engine.abort(name)
        assert (delta.request_id, delta.finish_reason) == (name, "abort")
        assert engine.abort(name) == []
    assert not engine.has_work
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    assert engine.stats().finished["abort"] == 2


def test_a_run_that_fails_with_one_request_ends_it_and_the_engine_goes_on() -> None:
    engine = null_engine(max_num_seqs=1, fails=lambda run: run == 3)
    for index in range(2):
        submit(engine, str(index), [index + 1])
    deltas = run(engine)
    assert reasons(deltas["0"]) == ["error"]
    assert deltas["0"][-1].error == "ProviderError: run 3 was told to fail"
    assert tokens(deltas["0"]) == alone([1])[:3]
    assert tokens(deltas["1"]) == alone([2])
    assert engine.stats().num_failed_steps == 1


def test_a_run_that_fails_once_ends_nobody() -> None:
    engine = null_engine(max_num_seqs=2, fails=lambda run: run == 3)
    for index in range(4):
        submit(engine, str(index), [index + 1])
    deltas = run(engine)
    for index in range(4):
        assert tokens(deltas[str(index)]) == alone([index + 1])
        assert reasons(deltas[str(index)]) == ["length"]
    assert engine.stats().num_failed_steps == 1


def test_a_failed_step_leaves_preempted_requests_queued() -> None:
    engine = null_engine(num_blocks=6, fails=lambda run: run == 1)
    submit(engine, "a", [1] * 12)
    submit(engine, "b", [2] * 12)
    deltas = run(engine)
    assert engine.stats().num_preemptions == 1
    assert reasons(deltas["a"]) == ["error"]
    assert tokens(deltas["b"]) == alone([2] * 12)


def test_a_row_without_finite_logits_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine()
    plain = NullModel.run

    def poisoned(self: NullModel, inputs: StepInputs) -> NDArray[np.float32]:
        logits = plain(self, inputs)
        logits[inputs.input_ids[inputs.logits_indices] == 13] = np.nan
        return logits

    monkeypatch.setattr(NullModel, "run", poisoned)
    submit(engine, "bad", [13])
    submit(engine, "good", [14])
    deltas = run(engine)
    assert reasons(deltas["bad"]) == ["error"]
    assert "not finite" in str(deltas["bad"][-1].error)
    assert reasons(deltas["good"]) == ["length"]


def test_an_interruption_leaves_the_engine_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = null_engine()
    submit(engine, "a", [1, 2, 3, 4, 5])
    with monkeypatch.context() as patch:
        patch.setattr(NullModel, "run", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    engine.check()
    assert tokens(run(engine)["a"]) == alone([1, 2, 3, 4, 5])


def _interrupt(self: NullModel, inputs: StepInputs) -> NDArray[np.float32]:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "limits", [{"max_batch_rows": 2}, {"max_batch_tokens": 3}, {"max_batch_tokens": 9}], ids=str
)
def test_the_provider_s_limits_win(limits: dict[str, int]) -> None:
    """The null model asserts them in every run."""
    engine = null_engine(max_num_seqs=8, **limits)  # type: ignore[arg-type]
    for index, prompt in enumerate(PROMPTS):
        submit(engine, str(index), prompt)
    deltas = run(engine)
    assert [tokens(deltas[str(i)]) for i in range(8)] == [alone(prompt) for prompt in PROMPTS]


def test_logprobs_of_each_token() -> None:
    engine = null_engine()
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=6, logprobs=2)
    submit(engine, "a", [1], params)
    submit(engine, "plain", [1], SamplingParams(temperature=1.0, seed=3, max_tokens=6))
    deltas = run(engine)
    assert all(delta.logprobs is None for delta in deltas["plain"])
    for delta in deltas["a"]:
        assert delta.logprobs is not None
        (entry,) = delta.logprobs
        (token_id,) = delta.token_ids
        assert token_id in entry
        assert len(entry) == (2 if entry[token_id].rank <= 2 else 3)
        assert {1, 2} <= {logprob.rank for logprob in entry.values()}
    assert tokens(deltas["a"]) == tokens(deltas["plain"])


def test_stats_count_what_happened() -> None:
    engine = null_engine()
    for index in range(3):
        submit(engine, str(index), [1, 2, 3])
    checked_step(engine)
    stats = engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (3, 0)
    assert stats.num_blocks - stats.num_free_blocks == 3
    run(engine)
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (9, 36)
    assert stats.finished == dict.fromkeys(FINISH_REASONS, 0) | {"length": 3}


def test_close_aborts_and_refuses() -> None:
    engine = null_engine()
    submit(engine, "a", [1])
    assert [delta.finish_reason for delta in engine.close()] == ["abort"]
    assert engine.close() == []
    with pytest.raises(OnnxportError, match="closed"):
        submit(engine, "b", [1])
