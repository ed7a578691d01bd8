"""The native sampler against plain loops, against NumPy's, and against itself in other batches."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxport.serving import numpy_sampler
from onnxport.serving.edits import NO_IDS, NO_VALUES, RowEdits, edited
from onnxport.serving.native.library import REQUEST_SIZE, RESULTS, Batch
from onnxport.serving.native.sampler import NativeSampler
from onnxport.serving.params import SamplingParams
from onnxport.serving.row_params import RowParams
from onnxport.serving.sampled import Sampled
from onnxport.serving.sampler import native_sampler, sample
from tests.serving.samplers import ISAS, native
from tests.serving.sampling_cases import KINDS, make_edits, make_logits, make_mask, mixed_batch
from tests.serving.slow_sampling import possible, race
from tests.tiers import every, examples

CSRC = Path(__file__).parents[2] / "serving/native/csrc"
Floats = NDArray[np.float32]
VOCABS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 1000, 1023, 1025, 2049, 5003)
NUDGE = 1e-6  # how far rounding may move the end of what is kept


@st.composite
def rows(draw: st.DrawFn, vocab: int) -> RowParams:
    edits = draw(st.none() | st.builds(make_edits, st.just(vocab), st.integers(0, 99)))
    mask = draw(
        st.none()
        | st.builds(
            make_mask, st.just(vocab), st.integers(0, 99), st.sampled_from([0.0, 0.1, 0.9, 1.0])
        )
    )
    return RowParams(
        temperature=draw(st.sampled_from([0.0, 1e-3, 0.4, 1.0, 2.5, 100.0])),
        top_k=draw(st.sampled_from([None, None, 1, 2, 40, 700, 100_000, 1 << 70])),
        top_p=draw(st.sampled_from([1e-6, 0.3, 0.5, 0.9, 0.9999, 1.0, 1.0])),
        uniform=draw(st.floats(0, 1, exclude_max=True)),
        num_logprobs=draw(st.sampled_from([None, 0, 1, 5, 20, 3000])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-4, 0.07, 1.0])),
        edits=edits,
        mask=mask,
    )


def allowed_logits(logits: Floats, row: RowParams) -> list[float]:
    """The logits after all changes; -inf where the row forbids a token."""
    changed = logits[None].copy()
    if row.edits is not None:
        with edited(changed, [(0, row.edits)]) as values:
            changed = values.copy()
    for token_id in range(len(logits)):
        allowed = row.edits is None or row.edits.allowed is None
        allowed = allowed or token_id in row.edits.allowed
        if row.mask is not None:
            allowed = allowed and bool(int(row.mask[token_id // 32]) >> token_id % 32 & 1)
        if not allowed:
            changed[0, token_id] = -np.inf
    return [float(value) for value in changed[0]]


def slowly(logits: Floats, row: RowParams) -> set[int]:
    """The tokens that plain loops allow; none: the row cannot be drawn from."""
    values = allowed_logits(logits, row)
    if not np.isfinite(max(values)):
        return set()
    found: set[int] = set()
    for nudge in (1.0, 1 - NUDGE, 1 + NUDGE):
        top_p, min_p = min(1.0, row.top_p * nudge), min(1.0, row.min_p * nudge)
        params = SamplingParams(row.temperature, top_p, row.top_k, min_p=min_p)
        found |= possible(values, params, row.uniform)
    if row.min_p == 1.0:  # which has no larger one: others that are as probable but for rounding
        found.add(values.index(max(values)))
    return found


@settings(max_examples=examples(100), deadline=None)
@given(
    st.data(), st.sampled_from(VOCABS), st.sampled_from(KINDS), st.integers(0, 99), st.booleans()
)
def test_what_is_drawn_is_what_plain_loops_allow(
    data: st.DataObject, vocab: int, kind: str, seed: int, writeable: bool
) -> None:
    """And NumPy's, whatever the row; only where rounding decides the two may differ."""
    logits = make_logits(kind, vocab, seed)[None]
    row = data.draw(rows(vocab))
    before = logits.copy()
    logits.flags.writeable = writeable
    with np.errstate(over="ignore"):  # huge ones
        expected = numpy_sampler.sample(logits, [row])
    found = native().sample(logits, [row])
    assert (logits == before).all()
    choice = slowly(logits[0], row)
    assert found.invalid == expected.invalid == (() if choice else (0,))
    if choice:
        assert {*found.token_ids, *expected.token_ids} <= choice
        if found.token_ids == expected.token_ids:
            same_logprobs(found, expected)


def quickly(logits: Floats, row: RowParams) -> set[int]:
    """As `slowly`, for wide rows without changes: the tokens that may be drawn."""
    if not row.truncated:
        return race(logits.tolist(), row.temperature, row.uniform)
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / row.temperature)
    kept = (weights >= row.min_p * (1 - 1e-9)) & (np.arange(len(logits)) < (row.top_k or 1 << 62))
    weights[~kept] = 0.0
    found: set[int] = set()
    for nudge in (1.0, 1 - NUDGE, 1 + NUDGE):
        sums = np.cumsum(weights)
        left = weights.copy()
        if row.top_p < 1.0:
            left[sums - weights >= row.top_p * nudge * sums[-1]] = 0.0
        ends = np.cumsum(left) / left.sum()
        first, last = np.searchsorted(ends, [row.uniform - NUDGE, row.uniform + NUDGE])
        found |= {*order[first : last + 1].tolist()}
    return found


@settings(max_examples=examples(100), deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 9),
    row=st.builds(
        RowParams,
        temperature=st.sampled_from([0.05, 0.5, 1.0, 2.5, 40.0]),
        top_k=st.sampled_from([None, None, 50, 9000]),
        top_p=st.sampled_from([0.01, 0.3, 0.9, 0.9999, 1.0]),
        uniform=st.floats(0, 1, exclude_max=True),
        min_p=st.sampled_from([0.0, 0.0, 1e-9, 0.01]),
        **dict.fromkeys(("num_logprobs", "edits", "mask", "thinning", "adapting"), st.none()),
    ),
    masked=st.booleans(),
)
def test_many_candidates_that_a_sample_is_taken_of(
    kind: str, seed: int, row: RowParams, masked: bool
) -> None:
    logits = make_logits(kind, 40_009, seed)
    if masked:
        row = row._replace(mask=make_mask(40_009, seed, 0.9))
        allowed = np.unpackbits(row.mask.view(np.uint8), bitorder="little")[:40_009] == 1
        choice = quickly(np.where(allowed, logits, -np.inf).astype(np.float32), row)
    else:
        choice = quickly(logits, row)
    assert {*native().sample(logits[None], [row]).token_ids} <= choice


@pytest.mark.parametrize("first", every(2, [0, 1024, 5000, 19_999]))
def test_rows_that_begin_with_tokens_that_cannot_be_drawn(first: int) -> None:
    """And whose largest values so far grow from one end to the other."""
    logits = np.linspace(-90, 3, 20_000, dtype=np.float32)
    logits[:first] = -np.inf
    for number in (0.0, 1e-9, 0.3, 0.99999):
        row = RowParams(1.0, uniform=number, num_logprobs=2)
        found = native().sample(logits[None], [row])
        assert {*found.token_ids} <= quickly(logits, row)
        assert found.token_ids[0] >= first
        reported = numpy_sampler.row_logprobs(logits, found.token_ids[0], 2)
        same_logprobs(found, Sampled(found.token_ids, [reported], ()))


@pytest.mark.parametrize("others", [-2.0, 2.0])
@pytest.mark.parametrize("top_p", [0.2, 0.6, 0.95, 1.0])
def test_a_sample_that_deceives_is_not_trusted(others: float, top_p: float) -> None:
    """What is sampled, 16 of 256 values, differs from all the others."""
    logits = np.random.default_rng(3).normal(0, 1, 40_960).astype(np.float32)
    logits[np.arange(40_960) % 256 >= 16] += others
    row = RowParams(1.0, None, top_p, min_p=1e-9)
    for number in (0.0, 0.05, 0.4, 0.6, 0.9, 0.999):
        row = row._replace(uniform=number, min_p=row.min_p if top_p == 1.0 else 0.0)
        assert {*native().sample(logits[None], [row]).token_ids} <= quickly(logits, row)


@pytest.mark.parametrize("min_p", [1e-3, 0.05, 0.2])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_what_min_p_leaves_out_has_no_part_in_the_sums(min_p: float, top_p: float) -> None:
    """Of tokens too many to be copied, the half that is left out has a good part of all weight."""
    logits = np.random.default_rng(7).normal(0, 0.5, 60_000).astype(np.float32)
    for number in (0.0, 0.3, 0.7, 0.95, 0.9999):
        row = RowParams(1.0, None, top_p, number, min_p=min_p)
        assert {*native().sample(logits[None], [row]).token_ids} <= quickly(logits, row)


def test_tokens_beyond_the_first_look_are_part_of_the_nucleus() -> None:
    """5000 tokens of a probability of exp(-11) each have 8 % together."""
    logits = np.full((1, 5001), -11.0, np.float32)
    logits[0, 700] = 0.0
    for top_p, kept in ((0.9, False), (0.99, True)):
        row = RowParams(1.0, None, top_p, 0.97)
        token = native().sample(logits, [row]).token_ids[0]
        assert (token != 700) == kept
        assert token in quickly(logits[0], row)


@pytest.mark.parametrize("count", [4, 400, 40_000])
def test_a_token_is_left_out_once_those_before_it_have_reached_top_p(count: int) -> None:
    logits = np.zeros((1, count), np.float32)
    last = RowParams(1.0, None, 0.5, 1 - 2**-53)
    for sampler in (native(), numpy_sampler):
        assert sampler.sample(logits, [last]).token_ids == [count // 2 - 1]


def seen(token_id: int, count: float, **penalties: float) -> RowEdits:
    return RowEdits(seen=np.array([token_id]), counts=np.array([count], np.float32), **penalties)


@pytest.mark.parametrize(
    ("edits", "token"),
    [
        (RowEdits(), 0),
        (RowEdits(bias_ids=np.array([2]), bias=np.array([3.5], np.float32)), 2),
        (RowEdits(banned=np.array([0, 1, 0])), 2),
        (RowEdits(allowed=np.array([1, 3])), 1),
        (seen(0, 0.0, presence=1.5), 0),  # of the prompt alone
        (seen(0, 1.0, presence=1.5), 1),
        (seen(0, 0.0, frequency=0.6), 0),
        (seen(0, 1.0, frequency=0.6), 0),
        (seen(0, 2.0, frequency=0.6), 1),
        (seen(0, 0.0, repetition=1.4), 0),
        (seen(0, 0.0, repetition=1.6), 1),
        (seen(3, 0.0, repetition=0.5), 0),
        (seen(3, 1.0, presence=-5.5), 3),
    ],
)
def test_changes_by_hand(edits: RowEdits, token: int) -> None:
    logits = np.array([[3, 2, 1, -2]], np.float32)
    for sampler in (native(), numpy_sampler):
        assert sampler.sample(logits, [RowParams(edits=edits)]).token_ids == [token]
        assert logits.tolist() == [[3, 2, 1, -2]]


@pytest.mark.parametrize(("repetition", "token"), [(1.7, 0), (1.9, 1), (0.5, 0)])
def test_small_logits_are_made_less_likely_too(repetition: float, token: int) -> None:
    logits = np.array([[0.9, 0.5, -0.2]], np.float32)
    for sampler in (native(), numpy_sampler):
        row = RowParams(edits=seen(0, 0.0, repetition=repetition))
        assert sampler.sample(logits, [row]).token_ids == [token]


@pytest.mark.parametrize("kind", ["normal", "ties", "holes", "peaks"])
def test_what_is_changed_is_drawn_whether_the_row_was_looked_at_before_or_not(kind: str) -> None:
    """Log probabilities are of the row as given, and what is known then is used to draw."""
    vocab = 3001
    rng = np.random.default_rng(5)
    for seed in range(40):
        logits = make_logits(kind, vocab, seed)[None]
        tokens = np.argsort(-logits[0])[: rng.integers(1, 60)]  # the largest of many groups
        raised = rng.permutation(vocab)[: rng.integers(0, 4)]
        edits = RowEdits(
            bias_ids=raised,
            bias=np.full(len(raised), rng.choice([1.0, 9.0, 30.0]), np.float32),
            banned=tokens[::3].copy(),
            seen=tokens[1::2].copy(),
            counts=np.ones(len(tokens[1::2]), np.float32),
            presence=float(rng.choice([0.1, 4.0, -4.0])),
        )
        for row in (RowParams(), RowParams(1.0, None, 0.9, 0.3), RowParams(0.8, 40, uniform=0.7)):
            alone = native().sample(logits, [row._replace(edits=edits)])
            reported = native().sample(logits, [row._replace(edits=edits, num_logprobs=2)])
            assert reported.token_ids == alone.token_ids


def same_logprobs(found: Sampled, expected: Sampled) -> None:
    """Assert that two samplers report the same, but for rounding."""
    assert (found.logprobs is None) == (expected.logprobs is None)
    for one, other in zip(found.logprobs or (), expected.logprobs or (), strict=True):
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        assert (one.token_id, one.rank, one.top_ids) == (other.token_id, other.rank, other.top_ids)
        assert one.logprob == pytest.approx(other.logprob, rel=1e-6, abs=3e-6)
        assert one.top_logprobs == pytest.approx(other.top_logprobs, rel=1e-6, abs=3e-6)


def test_a_row_has_the_same_bits_in_any_batch_and_with_any_instruction_set() -> None:
    logits, params = mixed_batch(56, 20_011)  # wide enough to be sampled and shared
    expected = native("portable").sample(logits, params)
    assert expected.logprobs is not None
    single = native()
    for index, row in enumerate(params):
        alone = single.sample(logits[index : index + 1], [row])
        assert alone.token_ids == expected.token_ids[index : index + 1]
        assert bool(alone.invalid) == (index in expected.invalid)
        if row.num_logprobs is not None:
            assert alone.logprobs == expected.logprobs[index : index + 1]
    backwards = single.sample(logits[::-1].copy(), params[::-1])
    assert backwards.token_ids == expected.token_ids[::-1]
    assert backwards.logprobs == expected.logprobs[::-1]


@pytest.mark.parametrize("isa", ISAS)
def test_instruction_sets_agree_on_every_bit(isa: str) -> None:
    logits, params = mixed_batch(56, 3001)
    sampler = native(isa)
    assert sampler.isa == isa
    assert sampler.sample(logits, params) == native("portable").sample(logits, params)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_products_and_sums_are_rounded_once_without_an_instruction_for_it(tmp_path: Path) -> None:
    """Also where double precision would round a sum to the middle between two floats."""
    source, executable = Path(__file__).with_name("fused_driver.cpp"), tmp_path / "driver"
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unused-function"]
    command = ["g++", *flags, "-ffp-contract=off", f"-I{CSRC}", str(source), "-o", str(executable)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([str(executable)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr


def test_the_vocabulary_of_a_model_with_peaked_and_flat_logits() -> None:
    vocab = 151_936
    logits = np.random.default_rng(0).normal(0, 1, (9, vocab)).astype(np.float32)
    logits[3:6, ::5000] += 14
    logits[6:] *= 0.01
    choices = [RowParams(1.0), RowParams(1.0, None, 0.9), RowParams(1.0, 50, num_logprobs=5)]
    params = [choices[i % 3]._replace(uniform=0.1 + 0.09 * i) for i in range(9)]
    found = native(num_threads=2).sample(logits, params)
    expected = numpy_sampler.sample(logits, params)
    assert found.token_ids == expected.token_ids
    same_logprobs(found, expected)


def test_columns_and_rows_that_are_not_side_by_side() -> None:
    wide = np.random.default_rng(0).normal(0, 1, (8, 300)).astype(np.float32)
    params = [RowParams(1.0, None, 0.9, 0.1 * i) for i in range(4)]
    for view in (wide[::2], wide[4:, 100:], wide[:4, ::3], wide[3::-1], wide.T[:4]):
        found = native().sample(view, params)
        assert found == native().sample(view.copy(), params)


def test_nan_and_infinity_matter_where_they_can_be_drawn_or_reported() -> None:
    logits = np.zeros((6, 100), np.float32)
    logits[:, 7] = [np.nan, np.nan, np.inf, -np.inf, np.nan, np.nan]
    ban = RowEdits(banned=np.array([7]))
    no_seven = np.full(4, ~np.uint32(0))
    no_seven[0] ^= 1 << 7
    params = [
        RowParams(1.0),
        RowParams(1.0, edits=ban),
        RowParams(1.0, edits=ban),
        RowParams(1.0),
        RowParams(1.0, mask=no_seven),
        RowParams(1.0, mask=no_seven, num_logprobs=1),
    ]
    for sampler in (native(), numpy_sampler):
        found = sampler.sample(logits, params)
        assert found.invalid == (0, 5)
        assert found.logprobs == [None] * 6
        for row in (0, 2):
            with pytest.raises(FloatingPointError):
                sampler.logprobs(logits[row : row + 1], [0], [1])


def test_nothing_allowed_is_invalid() -> None:
    logits = np.zeros((3, 40), np.float32)
    nothing = np.zeros(2, np.uint32)
    params = [
        RowParams(1.0, mask=nothing),
        RowParams(edits=RowEdits(allowed=NO_IDS)),
        RowParams(edits=RowEdits(allowed=np.array([3, 5])), mask=np.array([32, 0], np.uint32)),
    ]
    for sampler in (native(), numpy_sampler):
        found = sampler.sample(logits, params)
        assert found.invalid == (0, 1)
        assert found.token_ids[2] == 5


@pytest.mark.parametrize(
    "edits",
    [
        RowEdits(banned=np.array([40])),
        RowEdits(bias_ids=np.array([-1]), bias=np.ones(1, np.float32)),
        RowEdits(allowed=np.array([3, 40])),
        RowEdits(seen=np.array([1 << 40]), counts=np.ones(1, np.float32)),
    ],
)
def test_tokens_beyond_the_vocabulary_are_refused(edits: RowEdits) -> None:
    logits = np.zeros((2, 40), np.float32)
    with pytest.raises(IndexError, match="row 1 names a token that the vocabulary of 40 lacks"):
        native().sample(logits, [RowParams(), RowParams(edits=edits)])
    assert not logits.any()


def test_what_does_not_fit_is_refused() -> None:
    logits = np.zeros((1, 40), np.float32)
    with pytest.raises(ValueError, match="a mask has 1 words; 40 tokens need 2"):
        native().sample(logits, [RowParams(mask=np.ones(1, np.uint32))])
    with pytest.raises(IndexError):
        native().logprobs(logits, [40], [0])
    with pytest.raises(ValueError, match="cannot run 'sse9'"):
        NativeSampler(Path(native()._library._name), "sse9")


def test_the_structures_have_the_size_that_the_library_expects() -> None:
    library = native()._library
    assert library.onnxport_sampling_request_size() == REQUEST_SIZE == RESULTS.size
    assert library.onnxport_sampling_batch_size() == ctypes.sizeof(Batch)


def test_the_engine_s_sampler_is_the_native_one_where_it_was_built() -> None:
    best = native()
    chosen = native_sampler()
    assert chosen is not None
    assert chosen.isa == best.isa
    logits = np.random.default_rng(1).normal(0, 1, (3, 50)).astype(np.float32)
    row = RowParams(1.0, None, 0.7, 0.4, 2)
    assert sample(logits, [row] * 3) == best.sample(logits, [row] * 3)


def test_greedy_rows_and_empty_batches() -> None:
    logits = make_logits("ties", 3001, 3).reshape(1, -1).repeat(4, axis=0)
    logits[2, 17] = np.nan
    for sampler in (native(), numpy_sampler):
        found = sampler.sample_greedy(logits)
        assert found.invalid == (2,)
        assert [found.token_ids[i] for i in (0, 1, 3)] == [int(logits[0].argmax())] * 3
        assert sampler.sample(logits[:0], []) == Sampled([], None, ())


def even_draws(row: RowParams, logits: Floats, number: int) -> NDArray[np.int64]:
    """How often each token is drawn by evenly spread numbers."""
    params = [row._replace(uniform=(i + 0.5) / number) for i in range(number)]
    drawn = native().sample(np.repeat(logits[None], number, axis=0), params).token_ids
    return np.bincount(drawn, minlength=len(logits))


def test_many_candidates_are_drawn_with_their_probabilities() -> None:
    """More candidates than are sorted, in buckets of their own and in common ones."""
    logits = np.concatenate([make_logits(kind, 300, 1) for kind in ("normal", "ties", "scales")])
    row = RowParams(3.0, 800)
    kept: Sequence[int] = sorted(range(900), key=lambda i: (-logits[i], i))[: row.top_k]
    weights = np.zeros(900)
    weights[kept] = np.exp((logits[kept].astype(np.float64) - logits.max()) / 3.0)
    expected = weights / weights.sum() * 20_000
    assert np.abs(even_draws(row, logits, 20_000) - expected).max() <= 1.1


def test_no_values_are_no_edits() -> None:
    logits = make_logits("normal", 500, 0)[None]
    row = RowParams(1.0, uniform=0.3)
    empty = row._replace(edits=RowEdits(NO_IDS, NO_VALUES))
    assert native().sample(logits, [empty]) == native().sample(logits, [row])


def test_the_likeliest_tokens_of_one_array_are_those_in_it_by_now() -> None:
    """A model writes each step's logits and summaries where the last ones were."""
    sampler = native()
    rng = np.random.default_rng(3)
    room = np.zeros((8, 3001), np.float32)
    told = sampler.summarize(room, [0.0] * 8)
    for step in range(12):
        rows = (8, 8, 3, 1)[step % 4]
        logits, summaries = room[:rows], told[:rows]
        for _ in range(2):
            logits[:] = rng.standard_normal(logits.shape)
            logits[0, 7] = np.nan if step == 5 else 0
            summaries[:] = sampler.summarize(logits, [0.0] * rows)
            expected = [0 if np.isnan(row).any() else int(row.argmax()) for row in logits]
            for one in (summaries, None, summaries):
                found = sampler.sample_greedy(logits, one)
                assert found == Sampled(expected, None, (0,) if step == 5 else ())
    logits = room[:3].copy()
    summaries = sampler.summarize(logits, [0.0] * 3)
    assert sampler.sample_greedy(logits, summaries).token_ids == logits.argmax(axis=1).tolist()
    summaries[:] = 0
    del summaries  # what was told of the logits is gone, and with it the call
    assert sampler.sample_greedy(logits).token_ids == logits.argmax(axis=1).tolist()
    kept = np.asfortranarray(room)
    assert sampler.sample_greedy(kept) == sampler.sample_greedy(room)
    kept[:, 5] = 9
    assert sampler.sample_greedy(kept).token_ids == [5] * 8


@pytest.mark.parametrize("vocab", [65, 3001, 40_007])
def test_what_is_told_of_other_logits_never_leads_outside_of_the_row(vocab: int) -> None:
    """Summaries are trusted; a provider's that are wrong cost tokens, not the process."""
    sampler = native()
    kinds = ["normal", "ties", "peaks", "scales"]
    for seed in range(12):
        few, params = mixed_batch(40, vocab)
        logits = np.stack([make_logits(kinds[i % 4], vocab, seed + i) for i in range(len(few))])
        others = np.stack([make_logits(kinds[i // 4 % 4], vocab, i) for i in range(len(few))])
        others *= np.float32(10.0 ** (seed - 6))
        summaries = sampler.summarize(others, [float(seed % 2)] * len(few))
        wide = [RowParams(1.0, 50, 1.0, 0.5, 20), RowParams(), RowParams(1.0, None, 0.9, 0.99)]
        rows = [wide[i % 4] if i % 4 < 3 else params[i] for i in range(len(few))]
        found = sampler.sample(logits, rows, summaries)
        assert all(0 <= token < vocab for token in found.token_ids)
        for entry in found.logprobs or ():
            assert entry is None or all(0 <= token < vocab for token in entry.top_ids)
            assert entry is None or len(set(entry.top_ids)) == len(entry.top_ids)
        likeliest = sampler.sample_greedy(logits, sampler.summarize(others, [0.0] * len(few)))
        assert all(0 <= token < vocab for token in likeliest.token_ids)
