"""What a model tells of its logits beside them changes no token, and spares passes over them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport import LLM, SamplingParams
from onnxport.graphs.contract import NO_SUMMARY, NO_SUMS, summary_floats
from onnxport.providers.base import StepInputs
from onnxport.providers.cpu import library
from onnxport.providers.ort_model import OrtModel
from onnxport.serving.batch import BatchPacker
from onnxport.serving.prompts import TokensPrompt
from onnxport.serving.row_params import LOG2_E, RowParams, Thinning, summary_scale
from onnxport.serving.sampler import sample, sample_greedy
from onnxport.serving.speculation.config import SpeculationConfig
from tests.kernels.summary_cases import check
from tests.providers.conftest import WIDE_VOCAB
from tests.serving.bench import Bench, saying
from tests.serving.samplers import ISAS, native
from tests.serving.sampling_cases import KINDS, make_edits, make_logits, make_mask, mixed_batch
from tests.tiers import every

# The sampler.


def scales_of(params: list[RowParams]) -> list[float]:
    """What the engine would ask for, or would if it knew of no changes, or anything else."""
    rng = np.random.default_rng(len(params))
    found = []
    for row in params:
        edited, masked = row.edits is not None, row.mask is not None
        asked = summary_scale(row, is_edited=edited, is_masked=masked)
        others = [asked, asked, NO_SUMMARY, NO_SUMS, LOG2_E, 0.3]
        found.append(float(rng.choice(others)))
    return found


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", every(2, [1, 15, 1000, 1024, 1025, 3001, 20_011]))
def test_it_makes_summaries_as_numpy_does(isa: str, vocab: int) -> None:
    rows = np.stack([make_logits(kind, vocab, 3) for kind in KINDS])
    rows[2, vocab // 2], rows[3, vocab // 3] = np.nan, np.inf
    for scale in (NO_SUMMARY, NO_SUMS, LOG2_E, 40.0):
        scales = np.full(len(rows), scale, np.float32)
        with np.errstate(invalid="ignore"):
            check(native(isa).summarize(rows, scales.tolist()), rows, scales)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [700, 3001, 20_011])
def test_a_row_gets_the_same_with_a_summary_and_without(isa: str, vocab: int) -> None:
    logits, params = mixed_batch(56, vocab)
    expected = native("portable").sample(logits, params)
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(params))
        rows = [params[i] for i in order]
        told = native(isa).summarize(logits[order], scales_of(rows))
        for threads in (1, 2):
            found = native(isa, threads).sample(logits[order], rows, told.copy())
            assert found.token_ids == [expected.token_ids[i] for i in order]
            assert found.logprobs == [expected.logprobs[i] for i in order]
            assert sorted(order[i] for i in found.invalid) == list(expected.invalid)


@pytest.mark.parametrize("kind", every(2, KINDS))
def test_changes_to_a_row_that_is_known(kind: str) -> None:
    vocab = 5003
    for seed in range(40):
        logits = make_logits(kind, vocab, seed)[None]
        rng = np.random.default_rng(seed)
        largest = np.argsort(-logits[0])[: rng.integers(1, 60)]
        edits = make_edits(vocab, seed)._replace(banned=largest[::3].copy())
        mask = make_mask(vocab, seed, 0.5) if seed % 4 == 0 else None
        number = float(rng.random())
        for row in (
            RowParams(edits=edits, mask=mask),
            RowParams(1.0, None, 1.0, number, edits=edits, mask=mask),
            RowParams(0.6, None, 0.9, number, edits=edits, mask=mask),
            RowParams(0.6, 20, 0.9, number, 3, 0.01, edits, mask),
        ):
            expected = native().sample(logits, [row])
            for scale in (NO_SUMS, LOG2_E, 2.0):
                told = native().summarize(logits, [scale])
                assert native().sample(logits, [row], told) == expected


def test_the_likeliest_tokens_are_read_from_the_summary_alone() -> None:
    """Also of equals the first one, wherever the lanes of a chunk have them."""
    logits = np.zeros((4, 3001), np.float32)
    logits[0, [2990, 1500, 1501]] = 3
    logits[1, [1030, 1029, 2999]] = [3, 3, 2]
    logits[2, 17] = np.nan
    logits[3] = -np.inf
    told = native().summarize(logits, [NO_SUMS] * 4)
    found = native().sample_greedy(logits, told)
    assert found.invalid == (2, 3)
    assert found.token_ids[:2] == [1500, 1029]
    other = logits.copy()
    other[0, 5], other[1, 5] = 9, 9  # in chunks that the summary says nothing of
    assert native().sample_greedy(other, told).token_ids[:2] == [1500, 1029]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("vocab", [33, 1000, 1025, 20_011])
def test_the_likeliest_of_what_is_allowed(isa: str, vocab: int) -> None:
    """By the summary of all logits, or of those that are allowed, where others are far below."""
    for seed in range(60):
        rng = np.random.default_rng(seed)
        logits = make_logits(KINDS[seed % len(KINDS)], vocab, seed)[None]
        share = float(rng.choice([0.0, 0.01, 0.5, 0.99]))
        mask = make_mask(vocab, seed, share)
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab] == 1
        if seed % 3 == 0:  # more than one of them is the likeliest
            equal = rng.permutation(np.flatnonzero(allowed))[:5]
            logits[0, equal] = logits[0][allowed].max()
        wanted = int(np.where(allowed, logits[0], -np.inf).argmax())
        is_possible = bool(np.isfinite(logits[0][allowed].max()))
        narrowed = np.where(allowed, logits, np.float32(-3.4e38)).astype(np.float32)
        for values in (logits, narrowed):
            told = native(isa).summarize(values, [NO_SUMS])
            found = native(isa).sample(values, [RowParams(mask=mask)], told.copy())
            batch = native(isa).sample_greedy(values, told, mask.view(np.int32)[None])
            for one in (found, batch):
                assert one.invalid == (() if is_possible else (0,))
                assert not is_possible or one.token_ids == [wanted]


def test_rows_of_which_nothing_is_allowed() -> None:
    logits = np.zeros((2, 3001), np.float32)
    masks = np.zeros((2, 94), np.int32)
    masks[0, 50] = 1 << 7
    told = native().summarize(logits, [NO_SUMS] * 2)
    for summaries in (told, None):
        found = native().sample_greedy(logits, summaries, masks)
        assert (found.token_ids[0], found.invalid) == (1607, (1,))


def test_masks_are_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call for the same arrays is made again, with what is in them by now."""
    logits = np.arange(2 * 700, dtype=np.float32).reshape(2, 700)
    masks = np.full((2, 22), -1, np.int32)
    assert sample_greedy(logits, 1, None, masks).token_ids == [699, 699]
    masks[1] = 0
    masks[1, 3] = 1
    assert sample_greedy(logits, 1, None, masks).token_ids == [699, 96]
    assert sample_greedy(logits, 1).token_ids == [699, 699]
    other = np.full((2, 22), 1, np.int32)
    assert sample_greedy(logits, 1, None, other).token_ids == [672, 672]
    monkeypatch.setattr("onnxport.serving.sampler.native_sampler", lambda threads: None)
    assert sample_greedy(logits, 1, None, masks).token_ids == [699, 96]


def test_sampling_takes_them_whichever_sampler_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, params = mixed_batch(8, 1000)
    told = native().summarize(logits, [NO_SUMS] * 8)
    greedy = sample_greedy(logits, 1)
    assert sample_greedy(logits, 1, told.copy()) == greedy
    assert sample(logits, params, 1, told.copy()) == sample(logits, params, 1)
    monkeypatch.setattr("onnxport.serving.sampler.native_sampler", lambda threads: None)
    assert sample_greedy(logits, 1, told).token_ids == greedy.token_ids
    sample(logits, params, 1, told)


@pytest.mark.parametrize(
    "told",
    [
        np.zeros((2, 39), np.float32),
        np.zeros((3, 38), np.float32),
        np.zeros((3, 39)),
        np.zeros((39, 3), np.float32).T,
        np.broadcast_to(np.zeros(39, np.float32), (3, 39)),
    ],
)
def test_what_cannot_be_of_the_logits_is_refused(told: Any) -> None:
    logits = np.zeros((3, 2000), np.float32)
    with pytest.raises(
        ValueError, match=r"summaries of 3 rows of 2000 logits are float32 \[3, 39\]"
    ):
        native().sample_greedy(logits, told)


# What is asked for.


@pytest.mark.parametrize(
    ("row", "scale"),
    [
        (RowParams(), NO_SUMS),
        (RowParams(num_logprobs=0), LOG2_E),
        (RowParams(2.0, None, 0.9, num_logprobs=3), LOG2_E),
        (RowParams(2.0), NO_SUMS),
        (RowParams(0.5, None, 0.9), 2 * LOG2_E),
        (RowParams(1.0, 40), NO_SUMS),
        (RowParams(1.0, 1), NO_SUMS),
        (RowParams(1.0, min_p=0.1), NO_SUMS),
        (RowParams(1.0, None, 0.9, thinning=Thinning(1.0)), NO_SUMS),
        (RowParams(1e-30, None, 0.9), LOG2_E / 1e-20),
    ],
)
def test_what_the_engine_asks_for(row: RowParams, scale: float) -> None:
    assert summary_scale(row, is_edited=False, is_masked=False) == pytest.approx(scale)
    reports = row.num_logprobs is not None
    edited = summary_scale(row, is_edited=True, is_masked=False)
    masked = summary_scale(row, is_edited=True, is_masked=True)
    assert edited == (LOG2_E if reports else NO_SUMS)
    is_told = reports or row.greedy or not row.truncated
    assert masked == (edited if is_told else NO_SUMMARY)


def asked(bench: Bench, packer: BatchPacker, drafts: Any = None) -> list[float] | None:
    """What is asked for in the next step, which is made then."""
    plan = bench.scheduler.plan(guess=saying(drafts or {}))
    reservation = bench.scheduler.reserve(plan)
    inputs = packer.pack(plan)
    bench.scheduler.commit(plan, reservation)
    for row in plan.sampled:
        plan.requests[row].tokens.append(7)
    if inputs.summary_scales is None:
        assert inputs.summaries is None
        return None
    assert inputs.summaries is not None
    assert inputs.summary_scales.dtype == inputs.summaries.dtype == np.float32
    assert inputs.summaries.shape == (len(inputs.logits_indices), 20)
    return inputs.summary_scales.tolist()


def submitted(*lengths: tuple[str, int, float], budget: int = 16) -> Bench:
    """Requests by name, with tokens and what is to be told of their logits."""
    bench = Bench(num_blocks=40, budget=budget)
    for name, length, scale in lengths:
        bench.submit(name, length)
        bench.requests[name].summary_scale = scale
    return bench


def packer() -> BatchPacker:
    return BatchPacker(8, 16, summary_floats=summary_floats(1000))


def test_a_number_for_each_row_of_logits() -> None:
    bench = submitted(("a", 3, 0.0), ("b", 2, -1.0), ("c", 4, 1.5))
    for _ in range(3):
        assert asked(bench, one := packer()) == [0, -1, 1.5]
    drafts = {bench.requests["a"]: [7, 7], bench.requests["b"]: [4]}
    assert asked(bench, one, drafts) == [0, 0, 0, -1, -1, 1.5]


def test_nothing_is_asked_for_that_nobody_reads() -> None:
    assert asked(submitted(("a", 3, -1.0), ("b", 2, -1.0)), packer()) is None
    assert asked(submitted(("a", 3, 0.0)), BatchPacker(8, 16)) is None
    bench = submitted(("a", 9, 0.0), budget=6)
    assert asked(bench, packer()) is None
    assert asked(bench, packer()) == [0]


def test_steps_alike_have_the_same_arrays() -> None:
    """A model that keeps them bound finds the next step's there."""
    bench, one = submitted(("a", 3, 0.0), ("b", 2, 1.0)), packer()
    arrays = []
    for _ in range(3):
        plan = bench.scheduler.plan()
        reservation = bench.scheduler.reserve(plan)
        inputs = one.pack(plan)
        arrays.append((inputs.summary_scales, inputs.summaries))
        bench.scheduler.commit(plan, reservation)
        for row in plan.sampled:
            plan.requests[row].tokens.append(7)
    assert all(one is other for one, other in zip(*arrays[1:], strict=True))


# The engine, on a model that tells.

MIX: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3, "n": 2},
    {"temperature": 1.3, "seed": 1, "n": 2},
    {"temperature": 0.8, "top_p": 0.9, "seed": 2, "logprobs": 0},
    {"temperature": 1.0, "top_k": 200, "min_p": 0.001, "seed": 3, "prompt_logprobs": 1},
    {"temperature": 0.9, "seed": 4, "repetition_penalty": 1.3, "logit_bias": {7: 3.0}},
    {"temperature": 1.0, "seed": 5, "allowed_token_ids": list(range(5, 4000))},
    {"temperature": 0.0, "presence_penalty": 1.0, "bad_words": [], "min_tokens": 4},
]


class Heard:
    """Counts rows of steps by whether something was told of their logits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told = self.silent = 0
        run = OrtModel.run

        def listen(model: OrtModel, inputs: StepInputs) -> Any:
            logits = run(model, inputs)
            told = 0
            if inputs.summaries is not None and inputs.summary_scales is not None:
                scales = inputs.summary_scales
                assert (inputs.summaries[:, -1] == scales).all()
                check(inputs.summaries, logits, scales)
                told = int((scales >= 0).sum())
            self.told += told
            self.silent += len(inputs.logits_indices) - told
            return logits

        monkeypatch.setattr(OrtModel, "run", listen)


def generated(artifact: Path, **options: Any) -> list[Any]:
    rng = np.random.default_rng(2)
    prompts = [
        TokensPrompt(prompt_token_ids=rng.integers(3, WIDE_VOCAB, 5 + 9 * i).tolist())
        for i in range(len(MIX))
    ]
    params = [SamplingParams(max_tokens=9, ignore_eos=True, **mix) for mix in MIX]
    chosen = {"threads": 2, "kv_cache_tokens": 2048, "coarse_head": False, **options}
    with LLM(artifact, provider="cpu", **chosen) as llm:
        outputs = llm.generate(prompts, params)
    found: list[Any] = [[(o.token_ids, o.logprobs) for o in one.outputs] for one in outputs]
    return [*found, [one.prompt_logprobs for one in outputs]]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"max_num_seqs": 3, "max_num_batched_tokens": 13}, id="few rows"),
        pytest.param({"speculation": SpeculationConfig("ngram")}, id="drafts"),
    ],
)
def test_an_engine_that_is_told_generates_the_same(
    wide_artifact: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    if not library.summarizes():
        pytest.skip("the library was not built, or this processor lacks what it needs")
    native()
    with monkeypatch.context() as patched:
        patched.setattr(library, "summarizes", lambda: False)
        heard = Heard(patched)
        expected = generated(wide_artifact, **options)
        assert heard.told == 0
    heard = Heard(monkeypatch)
    assert generated(wide_artifact, **options) == expected
    assert heard.told > 60
    assert heard.silent > 10  # the prompt's log probabilities, what a mask narrows down
