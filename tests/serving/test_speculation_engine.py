"""Real drafters in the engine: the tokens are those without them, whatever happens."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from prometheus_client.parser import text_string_to_metric_families

from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.engine import Engine
from onnxport.serving.metrics import CacheConfig, Metrics
from onnxport.serving.params import SamplingParams
from onnxport.serving.sampler import uniform
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.serving.speculation.draft_model import ModelDrafter
from onnxport.serving.speculation.drafter import Drafter
from onnxport.serving.speculation.ngram import NgramDrafter
from onnxport.serving.speculation.speculator import Speculator
from onnxport.serving.speculation.suffix import SuffixDrafter
from onnxport.serving.stats import SpeculationCounters
from tests.serving.helpers import (
    alone,
    check_completions,
    checked_step,
    never,
    null_engine,
    reasons,
    run,
    submit,
    tokens,
)
from tests.serving.speculating import Eager
from tests.tiers import examples

CONFIG = SpeculationConfig("ngram", num_speculative_tokens=4)
LONG = SamplingParams(temperature=0.0, max_tokens=40)
CACHE = CacheConfig(16, 10, "float16", True)


class Doubtful(NullModel):
    """A model that agrees with the null model after two prefixes of three."""

    def _logits(self, hashes: NDArray[np.uint64]) -> NDArray[np.float32]:
        logits = super()._logits(hashes)
        logits[hashes % 3 == 0] = np.roll(logits[hashes % 3 == 0], 1, axis=1)
        return logits


def speculator(drafter: Drafter) -> Speculator:
    return Eager(drafter, CONFIG)


def drafting(
    model_type: type[NullModel] = NullModel,
    *,
    num_blocks: int = 256,
    fails: Callable[[int], bool] = never,
    lost_at: Callable[[int], bool] = never,
) -> Speculator:
    options = NullOptions(
        num_blocks=num_blocks,
        block_size=4,
        fails=fails,
        lost_at=lost_at,
        takes_exact_logits=True,
    )
    model = model_type(options)
    return speculator(ModelDrafter(model, 64, 512))


def counters(engine: Engine) -> SpeculationCounters:
    found = engine.stats().speculation
    assert found is not None
    return found


def test_the_same_model_guesses_everything_right() -> None:
    engine = null_engine(speculator=drafting(), max_num_batched_tokens=64)
    prompts = {str(start): range(start, start + 9) for start in range(4)}
    for name, prompt in prompts.items():
        submit(engine, name, prompt, LONG)
    deltas = run(engine)
    for name, prompt in prompts.items():
        assert tokens(deltas[name]) == alone(prompt, LONG)
    done = counters(engine)
    assert done.num_draft_tokens > 80
    assert done.num_accepted_tokens == done.num_draft_tokens
    told = [deltas[name][-1].drafts or (0, 0) for name in prompts]
    assert sum(checked for checked, _ in told) == done.num_draft_tokens
    assert all(checked == right > 0 for checked, right in told)
    assert sum(done.accepted_per_position) == done.num_accepted_tokens
    assert engine.stats().num_steps < 25


def test_another_model_is_sometimes_right() -> None:
    engine = null_engine(speculator=drafting(Doubtful))
    submit(engine, "a", [1, 2, 3], LONG)
    deltas = run(engine)["a"]
    assert tokens(deltas) == alone([1, 2, 3], LONG)
    done = counters(engine)
    assert deltas[-1].drafts == (done.num_draft_tokens, done.num_accepted_tokens)
    assert 0 < done.num_accepted_tokens < done.num_draft_tokens
    first, second, *_ = done.accepted_per_position
    assert first > second


def test_no_speculation_no_counters() -> None:
    assert null_engine().stats().speculation is None


MIXES: Sequence[dict[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "seed": 4, "top_p": 0.7, "repetition_penalty": 1.4},
    {"temperature": 0.7, "seed": 5, "top_k": 7, "frequency_penalty": 2.0, "presence_penalty": 1.0},
    {"temperature": 0.0, "allowed_token_ids": range(9, 400, 11), "frequency_penalty": 2.0},
    {"temperature": 1.0, "seed": 8, "logprobs": 2, "min_p": 0.01, "n": 2},
    {"temperature": 0.0, "logit_bias": {5: 4.0, 6: 4.0}, "min_tokens": 5, "stop_token_ids": (5,)},
)


@settings(max_examples=examples(60), deadline=None)
@given(
    mixes=st.lists(st.sampled_from(MIXES), min_size=4, max_size=4),
    guesser=st.sampled_from(["same", "doubtful", "ngram"]),
    num_blocks=st.integers(16, 40),
    draft_blocks=st.integers(8, 60),
    budget=st.integers(8, 40),
    caching=st.booleans(),
    fail_at=st.integers(0, 40),
    lost_at=st.integers(5, 60),
    draft_fails_at=st.integers(0, 30),
    draft_lost_at=st.integers(10, 90),
    state_slots=st.sampled_from([0, 0, 9, 16]),
)
def test_whatever_happens_the_tokens_are_the_same(
    mixes: list[dict[str, Any]],
    guesser: str,
    num_blocks: int,
    draft_blocks: int,
    budget: int,
    caching: bool,
    fail_at: int,
    lost_at: int,
    draft_fails_at: int,
    draft_lost_at: int,
    state_slots: int,
) -> None:
    shared = [7, 8, 9, 7, 8, 9, 7, 8]
    prompts = {"a": shared, "b": [*shared, 1, 2], "c": [5], "d": [*range(30, 44)]}
    params = {
        name: SamplingParams(max_tokens=16, **mix) for name, mix in zip(prompts, mixes, strict=True)
    }
    guessing = speculator(NgramDrafter(3, 1))
    if guesser != "ngram":
        guessing = drafting(
            NullModel if guesser == "same" else Doubtful,
            num_blocks=draft_blocks,
            fails=lambda number: number == draft_fails_at,
            lost_at=lambda number: number == draft_lost_at,
        )
    engine = null_engine(
        num_blocks=num_blocks,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        fails=lambda number: number == fail_at,
        lost_at=lambda number: number == lost_at,
        fallbacks=[
            NullModel(NullOptions(num_blocks=num_blocks, block_size=8, state_slots=state_slots))
        ],
        state_slots=state_slots,
        speculator=guessing,
    )
    for name, prompt in prompts.items():
        submit(engine, name, prompt, params[name])
    deltas = run(engine)
    check_completions(deltas, prompts, params, partial(alone, has_states=state_slots > 0))
    done = counters(engine)
    if guesser == "same" and not state_slots and not any("logprobs" in mix for mix in mixes):
        assert done.num_accepted_tokens == done.num_draft_tokens
    drafter = guessing._asker.drafter
    if isinstance(drafter, ModelDrafter):
        drafter.check()
        assert not drafter._sequences  # every request was forgotten
    engine.close()
    assert guessing._asker.drafter is None


def test_guesses_go_on_after_the_target_is_lost() -> None:
    spare = NullModel(NullOptions(block_size=8))
    engine = null_engine(
        lost_at=lambda number: number == 12, fallbacks=[spare], speculator=drafting()
    )
    submit(engine, "a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=120))
    before = 0
    while engine.has_work:
        checked_step(engine)
        if not spare.num_runs:
            before = counters(engine).num_drafts
    done = counters(engine)
    assert done.num_drafts > before > 0
    assert done.num_accepted_tokens == done.num_draft_tokens


@pytest.mark.parametrize("lost", [True, False])
def test_a_failing_drafter_fails_no_request(lost: bool, caplog: pytest.LogCaptureFixture) -> None:
    guessing = drafting(
        fails=lambda number: not lost and number >= 8, lost_at=lambda number: lost and number == 8
    )
    engine = null_engine(speculator=guessing)
    submit(engine, "a", [1, 2, 3], LONG)
    submit(engine, "b", [4, 5], LONG)
    deltas = run(engine)
    assert tokens(deltas["a"]) == alone([1, 2, 3], LONG)
    assert tokens(deltas["b"]) == alone([4, 5], LONG)
    assert reasons(deltas["a"]) == reasons(deltas["b"]) == ["length"]
    assert "speculation is off" in caplog.text
    assert guessing._asker.drafter is None
    engine.close()


def test_repetition_is_guessed() -> None:
    # A bias keeps the output to two tokens, so that n-grams of one come again and again.
    params = SamplingParams(temperature=0.0, max_tokens=60, allowed_token_ids=(7, 8))
    engine = null_engine(speculator=speculator(NgramDrafter(3, 1)))
    submit(engine, "a", [7, 8], params)
    assert tokens(run(engine)["a"]) == alone([7, 8], params)
    done = counters(engine)
    assert done.num_accepted_tokens > 10
    assert engine.stats().num_steps < 52


# The distribution.

TOKENS = 6
PROMPT = [3, 1]
HOT = SamplingParams(temperature=2.5, top_k=5, max_tokens=4)


def null_logits(sequence: Sequence[int]) -> NDArray[np.float32]:
    """What the null model says after a sequence."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=TOKENS)
    engine = null_engine(vocab_size=TOKENS)
    submit(engine, "a", sequence, params)
    [delta] = run(engine)["a"]
    assert delta.logprobs is not None
    found = {token_id: one.logprob for token_id, one in delta.logprobs[0].items()}
    return np.array([found[token_id] for token_id in range(TOKENS)], np.float32)


def expected_shares() -> dict[tuple[int, ...], float]:
    """The probability of each output, from the logits alone."""
    shares = {(): 1.0}
    for _ in range(HOT.max_tokens or 0):
        longer = {}
        for output, share in shares.items():
            logits = null_logits([*PROMPT, *output]).astype(np.float64)
            kept = np.argsort(-logits, kind="stable")[: HOT.top_k]
            weights = np.exp(logits[kept] / HOT.temperature)
            for token_id, weight in zip(kept.tolist(), weights / weights.sum(), strict=True):
                longer[*output, token_id] = share * weight
        shares = longer
    return shares


def excess(counts: Counter[tuple[int, ...]], shares: dict[tuple[int, ...], float]) -> float:
    """Pearson's chi-square against the shares, in standard deviations above its mean."""
    number = counts.total()
    assert counts.keys() <= shares.keys()
    cells: list[tuple[float, float]] = []  # what is found and what was expected, 8 or more
    found = wanted = 0.0
    for output, share in sorted(shares.items(), key=lambda item: item[1]):
        found, wanted = found + counts[output], wanted + share * number
        if wanted >= 8:
            cells.append((found, wanted))
            found = wanted = 0.0
    statistic = sum((found - wanted) ** 2 / wanted for found, wanted in cells)
    degrees = len(cells) - 1
    assert degrees > 100
    return (statistic - degrees) / math.sqrt(2 * degrees)


class Stubborn:
    """Guesses the same whatever was said: right now and then, and biased as can be."""

    is_cheap = True

    def num_behind(self, request: Any) -> int:
        return 0

    def propose(self, requests: Sequence[Any], lengths: Sequence[int]) -> list[Sequence[int]]:
        return [[2, 2, 2, 2][:length] for length in lengths]

    def forget(self, request: Any) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["stubborn", "model", "ngram", "suffix"])
def test_samples_have_the_distribution_of_the_target(drafter: str) -> None:
    number = 3000
    options = NullOptions(vocab_size=TOKENS, num_blocks=256, block_size=4)
    chosen = {
        "stubborn": Stubborn,
        "model": lambda: ModelDrafter(Doubtful(options), 64, TOKENS),
        "ngram": lambda: NgramDrafter(2, 1),
        "suffix": lambda: SuffixDrafter(6, 3.0, 0.0, most_answers=50, most_tokens=1024),
    }[drafter]()
    engine = null_engine(
        vocab_size=TOKENS, speculator=speculator(chosen), max_queued_requests=number
    )
    for index in range(number):
        submit(engine, str(index), PROMPT, HOT)
    outputs: dict[str, tuple[int, ...]] = {str(index): () for index in range(number)}
    while engine.has_work:
        for delta in engine.step():
            outputs[delta.request_id] += tuple(delta.token_ids)
    done = counters(engine)
    assert 300 < done.num_accepted_tokens < done.num_draft_tokens
    shares = expected_shares()
    assert sum(shares.values()) == pytest.approx(1)
    assert abs(excess(Counter(outputs.values()), shares)) < 4
    # The same with guesses taken at their word, one time in eight: that shows.
    biased = Counter(
        (*output[:2], 2, output[3]) if uniform(1, number) < 1 / 8 and output[:2] else output
        for number, output in enumerate(outputs.values())
    )
    known = Counter({output: count for output, count in biased.items() if output in shares})
    assert excess(known, shares) > 5


# Metrics.


def test_metrics_have_the_names_of_vllm() -> None:
    engine = null_engine(speculator=drafting(Doubtful))
    submit(engine, "a", [1, 2, 3], LONG)
    run(engine)
    text, _ = Metrics("m", engine.stats, lambda: CACHE).render()
    found = {
        (sample.name, sample.labels.get("position")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if sample.name.startswith("vllm:spec_decode")
    }
    done = counters(engine)
    assert found == {
        ("vllm:spec_decode_num_drafts_total", None): done.num_drafts,
        ("vllm:spec_decode_num_draft_tokens_total", None): done.num_draft_tokens,
        ("vllm:spec_decode_num_accepted_tokens_total", None): done.num_accepted_tokens,
        **{
            ("vllm:spec_decode_num_accepted_tokens_per_pos_total", str(place)): count
            for place, count in enumerate(done.accepted_per_position)
        },
    }
    assert len(found) == 3 + CONFIG.longest_draft
    assert done.num_accepted_tokens > 0
    text, _ = Metrics("m", null_engine().stats, lambda: CACHE).render()
    assert b"spec_decode" not in text


def test_orders_of_requests_do_not_matter() -> None:
    prompts = {"a": [1, 2, 1, 2, 1], "b": [4, 4, 4], "c": list(range(9))}
    for order in itertools.permutations(prompts):
        engine = null_engine(speculator=drafting(Doubtful, num_blocks=20))
        for name in order:
            submit(engine, name, prompts[name], LONG)
        deltas = run(engine)
        for name, prompt in prompts.items():
            assert tokens(deltas[name]) == alone(prompt, LONG)
