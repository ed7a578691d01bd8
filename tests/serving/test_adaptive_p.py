"""Drawing near a probability, as llama.cpp's adaptive-p, against plain loops; and in an engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnxport.errors import RequestError
from onnxport.graphs.contract import ALL_ALLOWED, NO_SUMMARY
from onnxport.serving.adapting import AdaptiveP
from onnxport.serving.intake import SEED_STEP
from onnxport.serving.logprob_modes import processed
from onnxport.serving.params import SamplingParams
from onnxport.serving.row_params import (
    Adapting,
    RowParams,
    Thinning,
    exact_allowed,
    exact_logits,
    summary_scale,
)
from onnxport.serving.sampler import uniform
from onnxport.serving.sampling import Position, row_params
from onnxport.serving.structured.spec import StructuredOutputs
from tests.serving.helpers import alone, null_engine, run, submit, tokens
from tests.serving.prophet import Prophet
from tests.serving.samplers import ISAS, native, sampler_named
from tests.serving.sampling_cases import KINDS, make_edits, make_logits, make_mask
from tests.serving.slow_sampling import ROUNDING, SLACK, changed, probabilities
from tests.serving.structured import tokenizer
from tests.serving.test_rules import make_request
from tests.serving.test_sampling_engine import PREFIX, TOKENIZER, VOCAB, encode, null_logits
from tests.tiers import examples

kinds = st.sampled_from([kind for kind in KINDS if kind != "huge"])
MORE = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.sampled_from([2, 40]),
        "top_p": st.sampled_from([0.5, 0.95]),
        "min_p": st.sampled_from([0.01, 0.2]),
        "typical_p": st.sampled_from([0.4, 0.9]),
        "top_n_sigma": st.sampled_from([0.7, 3.0]),
        "xtc_probability": st.just(1.0),
    },
)


def bell(chances: dict[int, float], target: float) -> dict[int, float]:
    """What is drawn by, of each token of these probabilities, as llama.cpp has it."""
    logits = {}
    for token_id, chance in chances.items():
        distance = abs(chance - target) / 0.3
        logits[token_id] = 5.0 - 10.0 * distance**2 / (1.0 + distance)
    most = max(logits.values())
    weights = {token_id: math.exp(logit - most) for token_id, logit in logits.items()}
    total = sum(weights.values())
    return {token_id: weight / total for token_id, weight in weights.items()}


def possible_near(
    logits: Sequence[float], params: SamplingParams, target: float, number: float
) -> dict[int, list[float]]:
    """The tokens that `number` may draw, and how probable each was before, by what was left."""
    found: dict[int, list[float]] = {}
    for off in (-ROUNDING, 0.0, ROUNDING):
        chances = probabilities(logits, params, off)
        end = 0.0
        for token_id, share in sorted(bell(chances, target).items()):
            start, end = end, end + share
            if start - SLACK <= number < end + SLACK:
                found.setdefault(token_id, []).append(chances[token_id])
    return found


def row_of(params: SamplingParams, number: float, target: float) -> RowParams:
    """The row of a request, as the engine makes it."""
    return make_request(params, [0], []).row._replace(uniform=number, target=target)


@settings(max_examples=examples(150), deadline=None)
@given(
    target=st.floats(0, 1),
    more=MORE,
    number=st.floats(0, 1, exclude_max=True),
    kind=kinds,
    vocab=st.sampled_from([1, 2, 17, 300, 5000]),
    seed=st.integers(0, 99),
)
def test_what_is_drawn_is_what_plain_loops_allow(
    target: float, more: dict[str, Any], number: float, kind: str, vocab: int, seed: int
) -> None:
    logits = make_logits(kind, vocab, seed)
    params = SamplingParams(1.3, adaptive_target=0.5, **more)
    allowed = possible_near(logits.tolist(), params, target, number)
    for name in ("numpy", "portable"):
        sampled = sampler_named(name).sample(logits[None], [row_of(params, number, target)])
        [token_id] = sampled.token_ids
        assert sampled.surprises is not None
        if kind == "normal" or "typical_p" not in more:  # a tie of distances may fall otherwise
            assert token_id in allowed, name
            chance = 2.0 ** -sampled.surprises[0]
            assert any(chance == pytest.approx(one, abs=1e-4) for one in allowed[token_id])


def test_all_that_may_come_counts_however_unlikely() -> None:
    """Of 5,000 tokens that weigh nothing each is as far from the target as one that hardly does."""
    logits = np.full((200, 5000), -500.0, np.float32)
    logits[:, 0] = 0.0
    params = SamplingParams(1.0, adaptive_target=0.2)
    rows = [row_of(params, (i + 0.5) / 200, 0.2) for i in range(200)]
    for name in ("numpy", "portable"):
        sampled = sampler_named(name).sample(logits, rows)
        assert len({*sampled.token_ids}) == 200
        assert sampled.surprises is not None
        assert min(sampled.surprises) > 700.0


@pytest.mark.parametrize("gap", [200.0, 2000.0])
def test_what_weighs_nothing_beside_what_xtc_leaves_out(gap: float) -> None:
    """It leaves the least likely choice: here all are choices, and one is left, for certain."""
    params = SamplingParams(
        1.0, adaptive_target=0.5, xtc_probability=1.0, xtc_threshold=0.0, typical_p=1.0
    )
    logits = np.array([[0.0, -gap, -gap / 2]], np.float32)
    row = row_of(params, 0.3, 0.5)._replace(thinning=Thinning(xtc_threshold=0.0))
    for name in ("numpy", "portable"):
        sampled = sampler_named(name).sample(logits, [row])
        assert (sampled.token_ids, sampled.surprises) == ([1], [0.0]), name


@settings(max_examples=examples(40), deadline=None)
@given(
    kind=kinds,
    seed=st.integers(0, 99),
    target=st.floats(0, 1),
    number=st.floats(0, 1, exclude_max=True),
    share=st.sampled_from([0.01, 0.7]),
    more=MORE,
)
def test_what_is_forbidden_or_changed_does_not_count(
    kind: str, seed: int, target: float, number: float, share: float, more: dict[str, Any]
) -> None:
    vocab = 700
    logits = make_logits(kind, vocab, seed)
    row = row_of(SamplingParams(0.9, adaptive_target=0.5, **more), number, target)
    edited = row._replace(edits=make_edits(vocab, seed), mask=make_mask(vocab, seed, share))
    values = processed(logits, RowParams(edits=edited.edits, mask=edited.mask), 0)
    if not np.isfinite(values.max()):
        return
    before = logits.copy()
    for name in ("numpy", "portable"):
        one = sampler_named(name).sample(logits[None], [edited])
        same = sampler_named(name).sample(values[None], [row])
        assert (one.token_ids, one.surprises) == (same.token_ids, same.surprises)
    assert (logits == before).all()


def test_all_instruction_sets_and_batches_give_the_same_bits() -> None:
    vocab, count = 20_000, 24
    logits = np.stack([make_logits(KINDS[i % 6], vocab, i) for i in range(count)])
    several: list[dict[str, Any]] = [
        {},
        {"min_p": 0.02},
        {"top_p": 0.9, "typical_p": 0.8},
        {"dynatemp_range": 0.6, "top_k": 300},
        {"xtc_probability": 1.0, "xtc_threshold": 0.01},
    ]
    rows = []
    for i in range(count):
        params = SamplingParams(0.9, adaptive_target=0.5, logprobs=i % 2 or None, **several[i % 5])
        row = row_of(params, (i * 0.618) % 1, i / count)
        rows.append(row._replace(mask=make_mask(vocab, i, 0.5)) if i % 4 == 1 else row)
    rows[5] = RowParams(1.0, uniform=0.3)  # of those that have nothing to do with it
    wanted = native("portable").sample(logits, rows)
    assert wanted.surprises is not None
    for isa in ISAS[1:]:
        try:
            sampler = native(isa, num_threads=2)
        except pytest.skip.Exception:
            continue
        assert sampler.sample(logits, rows) == wanted
    plain = sampler_named("numpy").sample(logits, rows)
    assert plain.surprises is not None
    # Sums of 20,000 weights in float32 and in float64: a border between two may be elsewhere.
    alike = [i for i in range(count) if plain.token_ids[i] == wanted.token_ids[i]]
    assert len(alike) >= count - 2
    for i in alike:
        assert plain.surprises[i] == pytest.approx(wanted.surprises[i], abs=1e-3)
    for i in range(count):
        one = native("portable").sample(logits[i : i + 1], [rows[i]])
        assert one.token_ids == [wanted.token_ids[i]]
        assert (one.surprises or [0.0]) == [wanted.surprises[i]]


def test_rows_that_cannot_be_drawn_are_told_and_others_are_drawn() -> None:
    logits = np.array([[np.nan, 1.0], [-np.inf, -np.inf], [1.0, 0.0]], np.float32)
    row = row_of(SamplingParams(adaptive_target=0.5), 0.0, 0.5)
    for name in ("numpy", "portable"):
        sampled = sampler_named(name).sample(logits, [row] * 3)
        assert sampled.invalid == (0, 1)
        assert sampled.token_ids[2] == 0
        assert sampled.surprises is not None
        assert sampled.surprises[2] == pytest.approx(math.log2(1 + math.exp(-1)), abs=1e-5)


def test_a_temperature_that_moves_down_to_nothing_takes_the_likeliest() -> None:
    logits = np.array([[0.0, 300.0, -300.0]], np.float32)
    params = SamplingParams(0.0, dynatemp_range=1.0, dynatemp_exponent=100.0, adaptive_target=0.0)
    for name in ("numpy", "portable"):
        sampled = sampler_named(name).sample(logits, [row_of(params, 0.99, 0.0)])
        assert (sampled.token_ids, sampled.surprises) == ([1], [0.0])


def test_what_processed_log_probabilities_are_of() -> None:
    logits = make_logits("normal", 300, 3)
    params = SamplingParams(0.8, min_p=0.02, adaptive_target=0.5)
    values = processed(logits, row_of(params, 0.4, 0.3), 0)
    shares = bell(probabilities(logits.tolist(), params), 0.3)
    weights = np.exp(values.astype(np.float64))
    weights[0] = 0.0 if 0 not in shares else weights[0]  # what was drawn is told in any case
    for token_id, share in shares.items():
        assert weights[token_id] / weights.sum() == pytest.approx(share, abs=1e-5)


def test_all_logits_count() -> None:
    """Of those that may come: none may be left out by whoever computes them."""
    row = make_request(SamplingParams(0.9, top_k=4, adaptive_target=0.5), [0], []).row
    assert (exact_logits(row), exact_allowed(row), row.per_unit) == (0, ALL_ALLOWED, 0.0)
    assert summary_scale(row, is_edited=False, is_masked=False) == NO_SUMMARY


@pytest.mark.parametrize(
    ("given", "row"),
    [
        ({"adaptive_target": 0.5}, RowParams(1.0, target=0.5)),
        ({"adaptive_target": -1.0}, RowParams(1.0)),
        ({"adaptive_target": -0.25, "min_p": 0.5}, RowParams(1.0, min_p=0.5)),
        ({"adaptive_target": 0.5, "temperature": 0.0}, RowParams()),
        ({"adaptive_target": 0.5, "top_k": 1}, RowParams(1.0, 1)),
        (
            {"adaptive_target": 0.5, "mirostat": 2},
            RowParams(1.0, adapting=Adapting(mirostat=2)),
        ),
        (
            {"adaptive_target": 0.0, "dynatemp_range": 0.25, "typical_p": 0.5},
            RowParams(1.25, thinning=Thinning(0.0, 0.5), adapting=Adapting(0.75), target=0.0),
        ),
    ],
)
def test_how_a_request_s_rows_are_drawn(given: dict[str, float], row: RowParams) -> None:
    params = SamplingParams(**given)  # type: ignore[arg-type]
    request = make_request(params, [0], [])
    assert request.row == row
    assert isinstance(request.feedback, AdaptiveP) == (row.target is not None)


def test_the_target_follows_the_tokens() -> None:
    """By the average of llama.cpp, which begins as if all before had been as wanted."""
    request = make_request(SamplingParams(adaptive_target=0.4, adaptive_decay=0.5), [0], [])
    state = request.feedback
    assert isinstance(state, AdaptiveP)
    assert row_params(Position(request)).target == pytest.approx(0.4)
    state.note(0.0)  # a certain token: the average is (1 + 0.5 * 0.8) / 2
    assert row_params(Position(request)).target == pytest.approx(0.8 - 0.7)
    state.note(0.0)
    assert state.target == 0.0  # 0.8 - 0.85
    for _ in range(9):
        state.note(math.inf)  # one that weighed nothing
    assert state.target == pytest.approx(0.8 - 1.7 / 2 * 0.5**9)
    alike = AdaptiveP(SamplingParams(adaptive_target=0.6, adaptive_decay=0.0))
    alike.note(2.0)  # with no memory only the last one counts
    assert alike.target == pytest.approx(1.2 - 0.25)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("adaptive_target", value) for value in (1.01, "x", True, math.nan)),
        *(("adaptive_decay", value) for value in (-0.01, 1.0, None, "x", False)),
    ],
)
def test_bad_values_are_refused(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name) as error:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert error.value.param == name


def test_every_token_in_an_engine_is_one_that_the_reference_may_draw() -> None:
    """With forks, preemptions in a pool that is too small for all, and penalties."""
    engine = null_engine(
        num_blocks=14,
        max_num_seqs=5,
        max_num_batched_tokens=9,
        vocab_size=VOCAB,
        tokenizer=TOKENIZER,
    )
    accepted = {}
    for number in range(3):
        more: dict[str, Any] = [{"min_p": 0.02}, {"top_p": 0.9}, {"frequency_penalty": 0.7}][number]
        params = SamplingParams(
            *(0.8 + number / 2,),
            **{"adaptive_target": 0.3, "adaptive_decay": 0.8, "seed": number, "n": 1 + number % 2},
            **{"max_tokens": 14, "ignore_eos": True, **more},
        )
        prompt = [*PREFIX[: 2 + number], number]
        submit(engine, str(number), prompt, params)
        accepted[str(number)] = (prompt, params)
    deltas = run(engine)
    for name, (prompt, params) in accepted.items():
        for index in range(params.n):
            _check(prompt, tokens(deltas[name], index), params, index)
    engine.close()


def _check(prompt: list[int], output: list[int], params: SamplingParams, index: int) -> None:
    assert params.seed is not None
    assert len(output) == params.max_tokens
    logits = null_logits([*prompt, *output])
    state = AdaptiveP(params)
    for place, token_id in enumerate(output):
        own = logits[len(prompt) + place - 1]
        values = changed(own, params, prompt, output[:place], TOKENIZER.eos_token_ids, encode)
        number = uniform(params.seed + index * SEED_STEP, len(prompt) + place)
        found = possible_near(values, params, state.target, number)
        assert token_id in found, (place, params)
        each = found[token_id]
        state.note(-math.log2(each[len(each) // 2]))  # that of no rounding, if it is there


def test_probabilities_of_tokens_come_near_the_target() -> None:
    """On average, of a model that is sure of some tokens; by itself it is much surer."""
    found = []
    for target in (None, 0.35, 0.6):
        params = SamplingParams(
            *(0.02,),
            **{"adaptive_target": target, "min_p": 0.05},
            **{"max_tokens": 300, "seed": 1, "ignore_eos": True},
        )
        prompt = [5, 6]
        output = _output(prompt, params)
        logits = null_logits([*prompt, *output])[len(prompt) - 1 :]
        chances = [
            probabilities(own.tolist(), params)[token_id]
            for own, token_id in zip(logits, output, strict=False)
        ]
        found.append(sum(chances) / len(chances))
    assert found == pytest.approx([0.52, 0.35, 0.6], abs=0.06)


def _output(prompt: list[int], params: SamplingParams) -> list[int]:
    engine = null_engine(num_blocks=200, max_model_len=800, vocab_size=VOCAB, tokenizer=TOKENIZER)
    submit(engine, "a", prompt, params)
    return tokens(run(engine)["a"])


def test_nobody_guesses_ahead_of_it() -> None:
    params = {
        "near": SamplingParams(adaptive_target=0.3, max_tokens=20, seed=3, n=2),
        "plain": SamplingParams(temperature=0.0, max_tokens=20),
    }
    future = {name: alone([7, 8, number], one) for number, (name, one) in enumerate(params.items())}
    asked: set[str] = set()

    def tell(request: Any) -> list[int]:
        asked.add(request.request_id)
        return future[request.request_id]

    engine = null_engine(num_blocks=100, speculator=Prophet(tell))
    for number, (name, one) in enumerate(params.items()):
        submit(engine, name, [7, 8, number], one)
    deltas = run(engine)
    assert asked == {"plain"}
    for number, (name, one) in enumerate(params.items()):
        for index in range(one.n):
            assert tokens(deltas[name], index) == alone([7, 8, number], one, index)


def test_a_form_is_obeyed() -> None:
    engine = null_engine(tokenizer=tokenizer(), vocab_size=tokenizer().vocab_size)
    form = StructuredOutputs(regex="[a-d]{40}")
    params = SamplingParams(adaptive_target=0.2, max_tokens=64, structured_outputs=form, seed=2)
    submit(engine, "a", [5, 6], params)
    text = "".join(delta.text for delta in run(engine)["a"])
    assert len(text) == 40
    assert {*text} == {*"abcd"}
    engine.close()
