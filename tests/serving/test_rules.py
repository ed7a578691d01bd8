"""Changes to logits and what is drawn then, against an obvious, slow reference: plain loops."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxport.errors import RequestError
from onnxport.serving.edits import RowEdits, address_of, edited
from onnxport.serving.params import SamplingParams
from onnxport.serving.request import Request
from onnxport.serving.row_params import NOTHING_LEFT_OUT, RowParams, Thinning
from onnxport.serving.rules import SequenceRules, logit_rules
from onnxport.serving.sampler import sample, uniform
from onnxport.serving.sampling import Position, row_params, sample_positions
from tests.serving.helpers import null_engine, run, submit, tokens
from tests.serving.slow_sampling import changed, possible, probabilities
from tests.tiers import examples

VOCAB = 40
END_IDS = frozenset({1, 2})


def encode(texts: Sequence[str]) -> list[list[int]]:
    return [encode_one(text) for text in texts]


def encode_one(text: str) -> list[int]:
    """A tokenizer of which every letter is a token, and a space before `a` to `c` one with it."""
    tokens = []
    for index, letter in enumerate(text):
        if letter != " ":
            after_space = letter in "abc" and index > 0 and text[index - 1] == " "
            tokens.append(ord(letter) - ord("a") + (10 if after_space else 3))
        elif text[index + 1] not in "abc":
            tokens.append(30)
    return tokens


def make_request(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int], seed: int = 0
) -> Request:
    rules = logit_rules(params, END_IDS | {*params.stop_token_ids}, VOCAB, encode)
    request = Request("r", array("q", prompt), params, max_total_tokens=999, rules=rules, seed=seed)
    request.tokens.extend(output)
    return request


def random_logits(seed: int, rows: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32)


token_ids = st.integers(0, VOCAB - 1)
words = st.text("abcde", min_size=1, max_size=3)
mixes = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 0.4, 1.0, 1.7]),
        "top_k": st.sampled_from([1, 3, 20]),
        "top_p": st.sampled_from([0.3, 0.9]),
        "min_p": st.sampled_from([0.001, 0.1, 0.5, 1.0]),
        "repetition_penalty": st.sampled_from([0.5, 1.1, 3.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-1.0, 0.3, 2.0]),
        "repeat_last_n": st.sampled_from([None, -1, 0, 1, 3, 8, 64]),
        "logit_bias": st.dictionaries(token_ids, st.sampled_from([-100.0, -1.5, 2.0, 100.0])),
        "bad_words": st.lists(words, max_size=3),
        "allowed_token_ids": st.lists(token_ids, min_size=12),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(token_ids, max_size=2),
        "ignore_eos": st.booleans(),
        "logprobs": st.just(2),
    },
)
outputs = st.lists(st.integers(0, 15), max_size=12)


def valid(mix: dict[str, Any]) -> SamplingParams | None:
    """The parameters, or None if they leave nothing to draw."""
    params = SamplingParams(**mix)
    try:
        logit_rules(params, END_IDS | {*params.stop_token_ids}, VOCAB, encode)
    except RequestError as error:
        if error.param != "allowed_token_ids":
            raise
        return None
    return params


@settings(max_examples=examples(80), deadline=None)
@given(mixes=st.lists(st.tuples(mixes, outputs, outputs), min_size=1, max_size=5), seed=token_ids)
def test_what_a_batch_draws_is_what_the_reference_allows_each_row(
    mixes: list[tuple[dict[str, Any], list[int], list[int]]], seed: int
) -> None:
    logits = random_logits(seed, len(mixes))
    before = logits.copy()
    requests = []
    for index, (mix, prompt, output) in enumerate(mixes):
        params = valid(mix)
        if params is not None:
            requests.append((index, make_request(params, [0, *prompt], output, seed + index)))
    if not requests:
        return
    rows = logits[[index for index, _ in requests]]
    together = sample_positions([Position(request) for _, request in requests], rows)
    assert (rows == before[[index for index, _ in requests]]).all()
    for line, (index, request) in enumerate(requests):
        _, prompt, output = mixes[index]
        mine = changed(before[index], request.params, [0, *prompt], output, END_IDS, encode_one)
        if max(mine) == -math.inf:
            assert line in together.invalid
            continue
        allowed = possible(mine, request.params, uniform(request.seed, len(request.tokens)))
        assert together.token_ids[line] in allowed
        again = make_request(request.params, [0, *prompt], output, request.seed)
        alone = sample_positions([Position(again)], before[index : index + 1])
        assert alone.token_ids == [together.token_ids[line]]
        if together.logprobs and request.params.logprobs is not None:
            assert alone.logprobs == [together.logprobs[line]]


@settings(max_examples=examples(60), deadline=None)
@given(mix=mixes, prompt=outputs, output=outputs, cuts=st.sets(st.integers(0, 12)))
def test_counting_token_by_token_is_counting_at_once(
    mix: dict[str, Any], prompt: list[int], output: list[int], cuts: set[int]
) -> None:
    params = valid(mix)
    if params is None:
        return
    step_by_step = make_request(params, [0, *prompt], [])
    for cut in sorted({cut for cut in cuts if cut < len(output)}):
        step_by_step.tokens.extend(output[step_by_step.num_output_tokens : cut])
        row_params(Position(step_by_step))
    step_by_step.tokens.extend(output[step_by_step.num_output_tokens :])
    at_once = make_request(params, [0, *prompt], output)
    ahead = make_request(params, [0, *prompt], output[: min(cuts, default=0)])
    draft = tuple(output[ahead.num_output_tokens :])
    logits = random_logits(3)
    found = []
    for position in (Position(step_by_step), Position(at_once), Position(ahead, draft)):
        row = row_params(position)
        assert row.uniform == row_params(Position(at_once)).uniform
        with edited(logits, [(0, row.edits or RowEdits())]) as values:
            found.append(values.copy())
    assert (found[0] == found[1]).all()
    assert (found[0] == found[2]).all()
    ahead.tokens.extend(draft)
    with edited(logits, [(0, row_params(Position(ahead)).edits or RowEdits())]) as values:
        assert (found[0] == values).all()  # the draft left no trace


@settings(max_examples=examples(60), deadline=None)
@given(mix=mixes, prompt=outputs, begun=outputs, ends=st.tuples(outputs, outputs))
def test_what_is_forked_goes_on_on_its_own(
    mix: dict[str, Any],
    prompt: list[int],
    begun: list[int],
    ends: tuple[list[int], list[int]],
) -> None:
    params = valid(mix)
    if params is None:
        return
    one = make_request(params, [0, *prompt], begun)
    row_params(Position(one))
    other = make_request(params, [0, *prompt], begun)
    other.rules = None if one.rules is None else one.rules.fork()
    logits = random_logits(3)
    for size in range(max(map(len, ends)) + 1):
        for request, end in zip((one, other), ends, strict=True):
            output = [*begun, *end[:size]]
            request.tokens = array("q", [0, *prompt, *output])
            edits = row_params(Position(request)).edits or RowEdits()
            fresh = row_params(Position(make_request(params, [0, *prompt], output))).edits
            with edited(logits, [(0, edits)]) as values:
                found = values.copy()
            with edited(logits, [(0, fresh or RowEdits())]) as values:
                assert (found == values).all()
            if edits.addresses is not None and params.repeat_last_n != 0 and len(edits.seen):
                at = edits.addresses
                assert (at.seen, at.counts) == (address_of(edits.seen), address_of(edits.counts))


@pytest.mark.parametrize(
    "row",
    [
        {"min_p": 0.05},
        {"min_p": 0.3, "temperature": 2.0},
        {"min_p": 0.02, "top_k": 12, "top_p": 0.8, "temperature": 1.5},
        {"min_p": 0.001, "top_p": 0.95},
        {"top_k": 7, "temperature": 0.6},
        {"top_p": 0.6},
        {"temperature": 3.0},
        {"top_n_sigma": 1.0, "temperature": 2.0},
        {"typical_p": 0.7},
        {"typical_p": 0.5, "top_k": 30, "top_p": 0.8},
        {"xtc_probability": 1.0, "xtc_threshold": 0.02, "temperature": 1.5},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05, "top_n_sigma": 2.0, "typical_p": 0.95},
    ],
)
@pytest.mark.parametrize("allowed", [False, True])
def test_what_is_drawn_follows_the_reference_s_distribution(
    row: dict[str, float], allowed: bool
) -> None:
    """Chi-square over 8,000 positions of one seed; 99.9 % of the time below the bound."""
    number, vocab = examples(8000), 300
    logits = np.random.default_rng(8).normal(0, 2, (1, vocab)).astype(np.float32)
    ids = np.arange(3, vocab, 5) if allowed else None
    params = SamplingParams(**row, allowed_token_ids=None if ids is None else tuple(ids.tolist()))  # type: ignore[arg-type]
    rows = [
        RowParams(
            params.temperature,
            params.top_k,
            params.top_p,
            uniform(77, position),
            min_p=params.min_p,
            edits=RowEdits(allowed=ids),
            thinning=Thinning(
                params.top_n_sigma,
                params.typical_p,
                params.xtc_threshold if params.xtc_probability else NOTHING_LEFT_OUT,
            ),
        )
        for position in range(number)
    ]
    drawn = sample(np.repeat(logits, number, axis=0), rows).token_ids
    mine = [v if ids is None or i in ids else -math.inf for i, v in enumerate(logits[0].tolist())]
    expected = {t: number * p for t, p in probabilities(mine, params).items()}
    counts = np.bincount(drawn, minlength=vocab)
    assert {*np.flatnonzero(counts).tolist()} <= expected.keys()
    often = [token_id for token_id, count in expected.items() if count >= 5]
    rest = number - sum(expected[token_id] for token_id in often)
    square = sum((counts[t] - expected[t]) ** 2 / expected[t] for t in often)
    if rest > 5:
        square += (number - counts[often].sum() - rest) ** 2 / rest
    freedom = max(1, len(often) - (rest <= 5))
    assert square < freedom * (1 - 2 / (9 * freedom) + 3.1 * math.sqrt(2 / (9 * freedom))) ** 3


def test_a_floor_beyond_the_first_nucleus() -> None:
    """More tokens pass min_p than are looked at first."""
    logits = np.linspace(1, 0, 500, dtype=np.float32)[None]
    rows = [RowParams(1.0, uniform=(i + 0.5) / 2000, min_p=0.5) for i in range(2000)]
    drawn = sample(np.repeat(logits, 2000, axis=0), rows).token_ids
    passed = int((logits[0] >= 1 + math.log(0.5)).sum())
    assert set(drawn) == set(range(passed))


def test_a_min_p_of_one_leaves_the_likeliest_and_their_equals() -> None:
    logits = np.array([[1, 3, 2.999, 3, 0]], np.float32)
    rows = [RowParams(0.7, uniform=number, min_p=1.0) for number in (0.0, 0.49, 0.51, 0.99)]
    assert sample(np.repeat(logits, 4, axis=0), rows).token_ids == [1, 1, 3, 3]


def test_penalties_by_hand() -> None:
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={4: 3.0}
    )
    request = make_request(params, [0, 3], [4, 4, 5])
    logits = np.full((1, VOCAB), 1.0, np.float32)
    logits[0, [0, 5]] = -1.0
    edits = row_params(Position(request)).edits
    assert edits is not None
    with edited(logits, [(0, edits)]) as values:
        found = values[0, [0, 1, 3, 4, 5]].tolist()
    assert found == [-2.0, 1.0, 0.5, (1 + 3) / 2 - 2 * 0.25 - 0.5, -2.0 - 0.25 - 0.5]
    assert set(logits[0].tolist()) == {1.0, -1.0}


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], {3}),  # "a" alone; "bcd" has not begun
        ([10], {3, 10}),
        ([4, 5], {3, 10, 6}),  # "bc" then "d"
        ([11, 5], {3, 10, 6}),
        ([5, 5], {3, 10}),
        ([5], {3, 10}),  # what the prompt began is no bad word
    ],
)
def test_bad_words_by_hand(output: list[int], banned: set[int]) -> None:
    """Tokens of "a" are [3] and [10], of "bcd" [4, 5, 6] and [11, 5, 6]."""
    request = make_request(SamplingParams(bad_words=("a", "bcd")), [0, 4], output)
    edits = row_params(Position(request)).edits
    assert edits is not None
    assert {*edits.banned.tolist()} == banned | {3, 10}


@pytest.mark.parametrize("prompt", [[0, 4], [0] * 50])
@pytest.mark.parametrize("output", [[], [10], [4, 5], [11, 5], [5, 5], [9] * 20 + [4, 5]])
def test_tokens_that_are_assumed_ban_what_written_ones_do(
    prompt: list[int], output: list[int]
) -> None:
    """Of guesses, wherever they begin; also of a number of tokens that there must be."""
    params = SamplingParams(bad_words=("a", "bcd"), min_tokens=3, max_tokens=30)
    written = row_params(Position(make_request(params, prompt, output))).edits
    assert written is not None
    for split in range(len(output)):
        request = make_request(params, prompt, output[:split])
        edits = row_params(Position(request, tuple(output[split:]))).edits
        assert edits is not None
        assert {*edits.banned.tolist()} == {*written.banned.tolist()}


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5, "bad_words": ["a", "bcd", "c d"]},
        {"frequency_penalty": 0.5, "logit_bias": {7: -1.0, 8: -2.0}},
        {"presence_penalty": 0.5, "repetition_penalty": 1.1, "repeat_last_n": 6},
        {"min_tokens": 4, "bad_words": ["f"], "repetition_penalty": 1.1},
    ],
)
def test_no_more_logits_fall_than_is_told(fields: dict[str, Any]) -> None:
    prompt, output = [*range(9, 29)], [5, 4, 4, 5, 30, 31, 32, 33]
    rules = logit_rules(SamplingParams(**fields), END_IDS, VOCAB, encode)
    assert rules is not None
    most = rules.most_lowered(len(prompt), len(output))
    assert most is not None
    sequence, most_seen = SequenceRules(rules, len(prompt)), 0
    for length in range(len(output) + 1):
        logits = np.ones((1, VOCAB), np.float32)
        with edited(logits, [(0, sequence.edits(array("q", prompt + output[:length])))]) as changed:
            most_seen = max(most_seen, int((changed < 1).sum()))
    assert 0 < most_seen <= most


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 0.9},
        {"presence_penalty": -0.1},
        {"frequency_penalty": -0.1},
        {"logit_bias": {1: 0.5, 2: -1.0}},
        {"allowed_token_ids": [5, 6]},
    ],
)
def test_nothing_is_told_where_logits_may_rise(fields: dict[str, Any]) -> None:
    rules = logit_rules(SamplingParams(**fields), END_IDS, VOCAB, encode)
    assert rules is not None
    assert rules.most_lowered(5, 9) is None


def test_white_space_may_be_a_bad_word() -> None:
    """It has no other spelling: a space before it would be white space too."""
    rules = logit_rules(SamplingParams(bad_words=("\n", " \t")), END_IDS, VOCAB, whole)
    assert rules is not None
    assert rules.banned.tolist() == [1, 2]


def test_bad_words_that_the_model_cannot_write_need_no_ban() -> None:
    """A tokenizer may know more tokens than the model has logits for."""

    def encode(texts: Sequence[str]) -> list[list[int]]:
        return [
            [VOCAB] if "x" in text else [3, VOCAB + 7] if "y" in text else [4] for text in texts
        ]

    rules = logit_rules(SamplingParams(bad_words=("x", "y", "z")), END_IDS, VOCAB, encode)
    assert rules is not None
    assert (rules.banned.tolist(), dict(rules.bad_words)) == ([4], {})
    assert logit_rules(SamplingParams(bad_words=("x", "y")), END_IDS, VOCAB, encode) is None


def whole(texts: Sequence[str]) -> list[list[int]]:
    return [[["\n", " \t"].index(text) + 1] for text in texts]


def test_logits_that_may_not_be_written_are_copied() -> None:
    logits = random_logits(1)
    logits.flags.writeable = False
    request = make_request(SamplingParams(temperature=0.0, allowed_token_ids=(7,)), [0], [])
    assert sample_positions([Position(request)], logits).token_ids == [7]
    request = make_request(SamplingParams(temperature=0.0, logit_bias={9: 100}), [0], [])
    assert sample_positions([Position(request)], logits).token_ids == [9]


def test_logits_come_back_when_drawing_fails() -> None:
    logits = random_logits(1)
    before = logits.copy()
    edits = RowEdits(
        banned=np.array([1, 1, 2]), bias_ids=np.array([2]), bias=np.ones(1, np.float32)
    )

    def draw(values: NDArray[np.float32]) -> None:
        assert values[0, 2] == -np.inf
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), edited(logits, [(0, edits)]) as values:
        draw(values)
    assert (logits == before).all()


def test_logits_that_are_not_finite_stay_the_models_fault() -> None:
    logits = random_logits(1, 3)
    logits[0, 7] = np.nan
    logits[1, 7] = np.nan
    rows = [RowParams(edits=RowEdits(allowed=np.array(ids))) for ids in ([7, 8], [8], [8])]
    found = sample(logits, rows)
    assert found.invalid == (0,)
    assert found.token_ids[1:] == [8, 8]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"min_p": 1.5}, "min_p", "must be in [0.0, 1.0]"),
        ({"repetition_penalty": 0.0}, "repetition_penalty", "[0.01, 100.0]"),
        ({"presence_penalty": 2.1}, "presence_penalty", "2.1; it must be in [-2.0, 2.0]"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty", "nan"),
        ({"logit_bias": {3: 101}}, "logit_bias", "[-100.0, 100.0]"),
        ({"logit_bias": {"3": 1}}, "logit_bias", "token ids are integers"),
        ({"logit_bias": {-3: 1}}, "logit_bias", "-3"),
        ({"bad_words": ["a", ""]}, "bad_words", "must be text, not empty"),
        ({"bad_words": ["a"] * 1025}, "bad_words", "at most 1024"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "name a token"),
        ({"allowed_token_ids": [True]}, "allowed_token_ids", "True"),
        ({"min_tokens": -1}, "min_tokens", "-1"),
        ({"min_tokens": None}, "min_tokens", "None"),
        ({"min_tokens": 17}, "min_tokens", "max_tokens is 16"),
        ({"stop_token_ids": 5}, "stop_token_ids", "is 5; give a list of token ids"),
        ({"allowed_token_ids": "ab"}, "allowed_token_ids", "give a list of token ids"),
        ({"logit_bias": [1]}, "logit_bias", "by token id"),
        ({"ignore_eos": "no"}, "ignore_eos", "true or false"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "true or false"),
        ({"temperature": np.float32(0.5)}, "temperature", "must be a Python number"),
    ],
)
def test_parameters_that_are_refused(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**fields)
    assert caught.value.param == param
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"logit_bias": {VOCAB: 1}}, "logit_bias", "token 40; the model's tokens are 0 to 39"),
        ({"allowed_token_ids": [3, 50]}, "allowed_token_ids", "token 50"),
        ({"bad_words": [" "]}, "bad_words", "no tokens"),
        ({"allowed_token_ids": [3, 10], "bad_words": ["a"]}, "allowed_token_ids", "forbid all"),
        ({"allowed_token_ids": [1], "min_tokens": 1}, "allowed_token_ids", "min_tokens"),
    ],
)
def test_what_the_model_cannot_do_is_refused(
    fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(RequestError) as caught:
        logit_rules(
            SamplingParams(**fields),
            END_IDS,
            VOCAB,
            lambda texts: [encode_one(text) if text.strip() else [] for text in texts],
        )
    assert caught.value.param == param
    assert words in str(caught.value)


def test_neutral_values_change_nothing() -> None:
    params = SamplingParams(logit_bias={}, bad_words=[], min_tokens=0, presence_penalty=0)  # type: ignore[arg-type]
    assert logit_rules(params, END_IDS, VOCAB, encode) is None
    assert logit_rules(SamplingParams(min_tokens=3), (), VOCAB, None) is None
    assert make_request(SamplingParams(temperature=0.0, min_p=0.5), [0], []).plain


def test_parameters_are_values() -> None:
    """They are compared and hashed, so biases are kept as pairs."""
    one, two = SamplingParams(logit_bias={5: 1, 3: 2}), SamplingParams(logit_bias={3: 2, 5: 1})
    assert one == two
    assert hash(one) == hash(two)
    assert dict(one.logit_bias) == {3: 2, 5: 1}


def test_a_bias_that_bans() -> None:
    """-inf, where no number would do for every model; whoever bans all of them is told."""
    params = SamplingParams(logit_bias={5: -math.inf, 7: 1.5})
    assert params.logit_bias == ((5, -math.inf), (7, 1.5))
    for wrong in (math.inf, math.nan, -101.0, False):
        with pytest.raises(RequestError, match="logit_bias"):
            SamplingParams(logit_bias={5: wrong})
    engine = null_engine(vocab_size=8)
    bans = dict.fromkeys(range(7), -math.inf)
    for temperature in (0.0, 1.0):
        params = SamplingParams(logit_bias=bans, temperature=temperature, max_tokens=3)
        submit(engine, "a", [1, 2], params)
        assert tokens(run(engine)["a"]) == [7, 7, 7]
    submit(engine, "b", [1, 2], SamplingParams(logit_bias={**bans, 7: -math.inf}))
    [last] = run(engine)["b"]
    assert last.failure is not None
    assert last.failure.refused
    assert "logit_bias" in last.failure.message
