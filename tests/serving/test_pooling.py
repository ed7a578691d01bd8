"""Embedding a prompt: its vector is its own, whatever else the engine does."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from onnxport.errors import CapacityError, OverloadedError, RequestError, UnknownAdapterError
from onnxport.graphs.embedding_spec import EmbeddingSpec
from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.params import SamplingParams
from onnxport.serving.pooling import Embedder, Pooler, PoolingParams
from onnxport.serving.worker import AsyncEngine
from tests.serving.helpers import (
    GREEDY,
    Clock,
    alone,
    checked_step,
    null_engine,
    null_model,
    reasons,
    run,
    submit,
    tokens,
)
from tests.serving.pooling import LAST, MEAN, Floats, embed, states, vector
from tests.serving.watch import Watch

PROMPT = [7 * number % 500 for number in range(50)]


class Counting(NullModel):
    """Counts the steps of which somebody reads the states."""

    def __init__(self, options: NullOptions) -> None:
        super().__init__(options)
        self.num_told = 0

    def run(self, inputs: StepInputs) -> Floats:
        self.num_told += inputs.hidden_states is not None
        return super().run(inputs)


def unit(vector: Any) -> Any:
    return vector / np.sqrt((vector * vector).sum())


def test_a_vector_is_what_the_final_norm_makes_of_tokens() -> None:
    told = states(PROMPT[:9]).astype(np.float64)
    np.testing.assert_allclose(vector(PROMPT[:9], LAST), unit(told[-1]), rtol=1e-6)
    np.testing.assert_allclose(vector(PROMPT[:9], MEAN), unit(told.mean(axis=0)), rtol=1e-6)
    plain = Embedder("mean", normalized=False)
    np.testing.assert_allclose(vector(PROMPT[:9], plain), told.mean(axis=0), rtol=1e-6)
    np.testing.assert_array_equal(vector(PROMPT[:9], Embedder("last", normalized=False)), told[-1])
    cut = vector(PROMPT[:9], Embedder(dimensions="any"), params=PoolingParams(dimensions=3))
    np.testing.assert_allclose(cut, unit(told[-1][:3]), rtol=1e-6)
    longer = vector(PROMPT[:9], LAST, params=PoolingParams(normalize=False))
    np.testing.assert_array_equal(longer, told[-1])
    length = np.linalg.norm(vector(PROMPT[:9], plain, params=PoolingParams(normalize=True)))
    assert length == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("embedder", [LAST, MEAN])
@pytest.mark.parametrize("budget", [8, 9, 49, 50, 200])
def test_chunks_change_no_bit(embedder: Embedder, budget: int) -> None:
    engine = null_engine(max_num_batched_tokens=budget, embedder=embedder)
    watch = Watch(engine)
    embed(engine, "one", PROMPT)
    [delta] = run(engine)["one"]
    assert delta.finish_reason == "stop"
    assert delta.token_ids == ()
    np.testing.assert_array_equal(delta.embedding, vector(PROMPT, embedder))
    assert watch.kinds("one") == ["queued", "scheduled", "finished"]
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (50, 0)
    assert stats.num_steps == math.ceil(50 / budget)


@pytest.mark.parametrize("embedder", [LAST, MEAN])
def test_a_prompt_of_one_token(embedder: Embedder) -> None:
    engine = null_engine(embedder=embedder)
    embed(engine, "one", [5])
    np.testing.assert_array_equal(run(engine)["one"][0].embedding, vector([5], embedder))


@pytest.mark.parametrize("embedder", [LAST, MEAN])
def test_others_generate_beside_it(embedder: Embedder) -> None:
    """Each gets what it would get alone; nothing is told of steps without anybody to embed."""
    engine = null_engine(max_num_batched_tokens=12, embedder=embedder, model_type=Counting)
    for number in range(4):
        submit(engine, f"text-{number}", PROMPT[number : number + 10])
        embed(engine, f"vector-{number}", PROMPT[number * 3 : number * 7 + 5])
    deltas = run(engine)
    for number in range(4):
        assert tokens(deltas[f"text-{number}"]) == alone(PROMPT[number : number + 10])
        own = vector(PROMPT[number * 3 : number * 7 + 5], embedder)
        np.testing.assert_array_equal(deltas[f"vector-{number}"][0].embedding, own)
    model = null_model(engine)
    assert isinstance(model, Counting)
    num_told = model.num_told
    submit(engine, "text", PROMPT[:10])
    run(engine)
    assert model.num_told == num_told


def test_what_is_cached_is_not_computed_for_the_last_token() -> None:
    """And is computed for the mean of all; both leave it for others."""
    for embedder, num_cached in ((LAST, 48), (MEAN, 0)):
        engine = null_engine(embedder=embedder)
        watch = Watch(engine)
        submit(engine, "text", PROMPT, SamplingParams(max_tokens=1))
        run(engine)
        for name in ("one", "two"):
            before = watch.num_tokens
            embed(engine, name, PROMPT)
            [delta] = run(engine)[name]
            assert delta.num_cached_tokens == num_cached
            assert watch.num_tokens - before == 50 - num_cached
            np.testing.assert_array_equal(delta.embedding, vector(PROMPT, embedder))
        engine.reset_prefix_cache()
        embed(engine, "three", PROMPT)
        run(engine)
        submit(engine, "again", PROMPT, SamplingParams(max_tokens=1))
        assert run(engine)["again"][0].num_cached_tokens == 48


@pytest.mark.parametrize("embedder", [LAST, MEAN])
def test_it_yields_and_goes_on(embedder: Embedder) -> None:
    engine = null_engine(
        num_blocks=14,
        max_num_batched_tokens=8,
        max_num_seqs=3,
        embedder=embedder,
        scheduling_policy="priority",
    )
    watch = Watch(engine)
    embed(engine, "low", PROMPT, priority=1)
    for _ in range(4):
        checked_step(engine)
    submit(engine, "high", PROMPT[:20], SamplingParams(max_tokens=30, temperature=0.0), priority=0)
    deltas = run(engine)
    assert "preempted" in watch.kinds("low")
    np.testing.assert_array_equal(deltas["low"][0].embedding, vector(PROMPT, embedder))
    assert engine.stats().prompt_tokens == 70


@pytest.mark.parametrize("embedder", [LAST, MEAN])
@pytest.mark.parametrize("failing", [{0}, {1}, {1, 2, 5}])
def test_a_step_that_fails_is_tried_again(embedder: Embedder, failing: set[int]) -> None:
    engine = null_engine(
        max_num_batched_tokens=16, embedder=embedder, fails=lambda run: run in failing
    )
    for number in range(3):
        embed(engine, str(number), PROMPT[number : number + 20])
    submit(engine, "text", PROMPT[:10])
    deltas = run(engine)
    ended = {name: reasons(each)[0] for name, each in deltas.items()}
    for number in range(3):
        if ended[str(number)] == "stop":
            own = vector(PROMPT[number : number + 20], embedder)
            np.testing.assert_array_equal(deltas[str(number)][0].embedding, own)
    assert [*ended.values()].count("error") <= 1  # who was alone in a step that failed
    assert engine.stats().num_failed_steps == len(failing)


@pytest.mark.parametrize("embedder", [LAST, MEAN])
def test_another_device_takes_over(embedder: Embedder) -> None:
    spare = NullModel(NullOptions(block_size=8, max_model_len=512, final_features=8))
    engine = null_engine(
        max_num_batched_tokens=16,
        embedder=embedder,
        lost_at=lambda operation: operation == 2,
        fallbacks=[spare],
    )
    embed(engine, "one", PROMPT)
    [delta] = run(engine, max_steps=50)["one"]
    assert len(engine.losses) == 1
    np.testing.assert_array_equal(delta.embedding, vector(PROMPT, embedder))


def test_one_that_is_too_long_for_what_takes_over_ends() -> None:
    spare = NullModel(NullOptions(block_size=8, max_model_len=49, final_features=8))
    engine = null_engine(embedder=MEAN, lost_at=lambda one: one == 1, fallbacks=[spare])
    embed(engine, "long", PROMPT)
    embed(engine, "fits", PROMPT[:49])
    deltas = run(engine)
    assert reasons(deltas["long"]) == ["error"]
    np.testing.assert_array_equal(deltas["fits"][0].embedding, vector(PROMPT[:49], MEAN))


def test_ends_before_its_time() -> None:
    clock = Clock()
    engine = null_engine(max_num_batched_tokens=8, embedder=MEAN, clock=clock)
    embed(engine, "aborted", PROMPT)
    embed(engine, "late", PROMPT, timeout_s=1.0)
    checked_step(engine)
    [delta] = engine.abort("aborted")
    assert (delta.finish_reason, delta.embedding) == ("abort", None)
    clock.now_s += 2.0
    [delta] = run(engine)["late"]
    assert (delta.finish_reason, delta.embedding) == ("timeout", None)


class Broken(NullModel):
    """What it makes of one token is no number."""

    def run(self, inputs: StepInputs) -> Floats:
        logits = super().run(inputs)
        if inputs.hidden_states is not None:
            inputs.hidden_states[inputs.input_ids == 500] = np.array(
                [1, np.inf, -np.inf, np.nan] * 2
            )
        return logits


@pytest.mark.parametrize("embedder", [LAST, MEAN, Embedder("mean", normalized=False)])
def test_what_is_no_number_is_no_vector(embedder: Embedder) -> None:
    """Nor does anybody find it in the cache."""
    engine = null_engine(embedder=embedder, model_type=Broken, max_num_batched_tokens=16)
    broken = [*PROMPT[:20], 500]
    embed(engine, "broken", broken)
    embed(engine, "good", PROMPT[20:40])
    deltas = run(engine)
    assert deltas["broken"][0].error is not None
    assert "not finite" in deltas["broken"][0].error
    np.testing.assert_array_equal(deltas["good"][0].embedding, vector(PROMPT[20:40], embedder))
    submit(engine, "text", broken, SamplingParams(max_tokens=1))
    assert run(engine)["text"][0].num_cached_tokens == 0


def test_a_vector_of_zeros_stays_one() -> None:
    pooler = Pooler(LAST, PoolingParams(), 2)
    pooler.read(0, np.zeros((2, 4), np.float32))
    np.testing.assert_array_equal(pooler.vector(), np.zeros(4, np.float32))


def test_a_mean_of_large_numbers_is_one() -> None:
    pooler = Pooler(Embedder("mean", normalized=False), PoolingParams(), 2)
    pooler.read(0, np.full((2, 4), 3e38, np.float32))
    np.testing.assert_array_equal(pooler.vector(), np.full(4, 3e38, np.float32))


def test_what_is_read_again_counts_once() -> None:
    told = np.random.default_rng(1).standard_normal((40, 16)).astype(np.float32)
    whole, parts = (Pooler(MEAN, PoolingParams(), 40) for _ in range(2))
    whole.read(0, told)
    for first, end in ((0, 13), (0, 5), (5, 14), (14, 30), (0, 31), (31, 40)):
        parts.read(first, told[first:end])
    np.testing.assert_array_equal(whole.vector(), parts.vector())


def test_queues_have_their_limits() -> None:
    engine = null_engine(max_queued_requests=1, embedder=LAST)
    embed(engine, "one", PROMPT)
    with pytest.raises(OverloadedError, match="are waiting already"):
        embed(engine, "two", PROMPT)
    with pytest.raises(RequestError, match="in use"):
        embed(engine, "one", PROMPT)
    run(engine)


def test_what_cannot_be_embedded_is_refused() -> None:
    engine = null_engine(num_blocks=10, max_model_len=60, embedder=LAST)
    for prompt, error, words in (
        ([], RequestError, "the prompt is empty"),
        ([512], RequestError, "tokens are 0 to 511"),
        ("text", RequestError, "needs a tokenizer"),
        ([1] * 61, CapacityError, "61 prompt tokens, and the context length is 60"),
        (PROMPT, CapacityError, "50 prompt tokens, which need 13 KV blocks"),
    ):
        with pytest.raises(error, match=words):
            embed(engine, "one", prompt)
    with pytest.raises(RequestError, match="serves by arrival"):
        embed(engine, "one", [1], priority=1)
    with pytest.raises(UnknownAdapterError):
        embed(engine, "one", [1], adapter="none")
    embed(null_engine(max_model_len=50, embedder=LAST), "as long as may be", PROMPT)
    with pytest.raises(RequestError, match=r"start it with --embeddings \(LLM\(embeddings=True\)"):
        embed(null_engine(), "one", [1])
    only = null_engine(embedder=Embedder(generates=False))
    with pytest.raises(RequestError, match="embeds texts and generates none"):
        submit(only, "one", [1])


def test_dimensions_are_those_that_mean_something() -> None:
    for allowed, asked, words in (
        (None, 4, "not known to mean anything"),
        ("any", 9, "vectors have 8 numbers; ask for fewer"),
        ((4, 2), 3, "have 8 numbers, or are cut to 4, 2"),
        (None, 9, "vectors have 8 numbers; ask for fewer"),
        ((4, 9), 9, "vectors have 8 numbers; ask for fewer"),
    ):
        engine = null_engine(embedder=Embedder(dimensions=allowed))
        with pytest.raises(RequestError, match=words) as caught:
            embed(engine, "one", [1], PoolingParams(asked))
        assert caught.value.param == "dimensions"
        embed(engine, "all of them", [1], PoolingParams(8))
    for bad in (0, -1, 1.5, True, "8"):
        with pytest.raises(RequestError, match="whole number of at least 1"):
            PoolingParams(bad)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="give true or false"):
        PoolingParams(normalize=1)  # type: ignore[arg-type]


def test_who_runs_it_goes_before_the_checkpoint_and_that_before_the_default() -> None:
    assert Embedder.of(None) == Embedder("last", normalized=True)
    spec = EmbeddingSpec(pooling="mean", normalized=False, only=True)
    assert Embedder.of(spec) == Embedder("mean", normalized=False, generates=False)
    assert Embedder.of(spec, "last", (8,)) == Embedder("last", False, (8,), generates=False)
    assert Embedder.of(EmbeddingSpec(matryoshka=True)).dimensions == "any"
    assert Embedder.of(EmbeddingSpec(matryoshka=True, dimensions=(4, 8))).dimensions == (4, 8)


async def test_event_loops_get_vectors() -> None:
    async with AsyncEngine(null_engine(embedder=MEAN)) as worker:

        async def one(number: int) -> Floats:
            async for delta in worker.embed(PROMPT[number:]):
                assert delta.embedding is not None
                return delta.embedding
            raise AssertionError

        found = await asyncio.gather(*map(one, range(20)))
        for number, own in enumerate(found):
            np.testing.assert_array_equal(own, vector(PROMPT[number:], MEAN))
        with pytest.raises(RequestError, match="empty"):
            worker.embed([])
        stream = worker.embed(PROMPT, request_id="same")
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="in use"):
            worker.embed(PROMPT, request_id="same")
        await waiting
        async for delta in worker.stream(PROMPT[:10], GREEDY):
            assert delta.embedding is None
