"""How many of a row's logits must be exact: who needs how many, and what the model is told.

That nobody looks at others is what all tests of engines show: their null model spoils the rest.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving import numpy_sampler, sampler
from onnxport.serving.batch import BatchPacker
from onnxport.serving.edits import RowEdits
from onnxport.serving.params import SamplingParams
from onnxport.serving.row_params import MOST_EXACT, RowParams, Thinning, exact_logits
from onnxport.serving.speculation.packing import DraftPacker, DraftRow, advance
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.tokenizer import Tokenizer
from tests.serving.bench import Bench, saying
from tests.serving.helpers import null_engine, null_model, run, submit
from tests.serving.tokenizers_for_tests import byte_level
from tests.tiers import examples

TOKENIZER = Tokenizer(byte_level(), frozenset({0, 5}))
VOCAB = 512
GREEDY, TOP = {"temperature": 0.0}, {"top_k": 7}
PROMPT = "the sea"
PROMPT_TOKENS = len(TOKENIZER.encode(PROMPT))


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (GREEDY, 1),
        (TOP, 7),
        ({"top_k": 1}, 1),
        ({"top_k": MOST_EXACT}, MOST_EXACT),
        ({"top_k": MOST_EXACT + 1}, 0),
        ({"top_k": 10**9}, 0),
        (GREEDY | {"top_k": 40}, 1),
        (GREEDY | {"top_k": 400}, 1),
        (GREEDY | {"top_p": 0.5, "min_p": 0.5, "seed": 3}, 1),
        (TOP | {"top_p": 0.5, "min_p": 0.5, "seed": 3, "temperature": 3.0}, 7),
        ({}, 1),  # it draws from all
        ({"temperature": 0.3, "seed": 1, "n": 2}, 1),
        ({"min_tokens": 2}, 3),
        ({"logit_bias": {3: 1.0}}, 0),
        ({"logprobs": 1}, 0),
        ({"top_p": 0.5}, 0),
        ({"min_p": 0.5}, 0),
        # What is asked for besides: log probabilities, and what raises logits or forbids most.
        (GREEDY | {"logprobs": 0}, 0),
        (TOP | {"logprobs": 3}, 0),
        (GREEDY | {"logprob_token_ids": [3]}, 0),
        (GREEDY | {"best_of": 2}, 0),
        (TOP | {"best_of": 3, "n": 2}, 0),
        (GREEDY | {"repetition_penalty": 0.9, "max_tokens": 3}, 0),
        (GREEDY | {"presence_penalty": -0.1, "max_tokens": 3}, 0),
        (TOP | {"frequency_penalty": -0.1, "max_tokens": 3}, 0),
        (GREEDY | {"logit_bias": {3: -1.0, 4: 0.1}}, 0),
        (GREEDY | {"allowed_token_ids": [3, 4]}, 0),
        (TOP | {"structured_outputs": StructuredOutputs(regex="[a-c]+")}, 0),
        (TOP | {"min_tokens": 2, "logprobs": 3}, 0),
        # What lowers some: so many more.
        (GREEDY | {"logit_bias": {3: -1.0, 4: 0.0}}, 3),
        (TOP | {"min_tokens": 2, "logit_bias": {5: -100.0, 6: -100.0}}, 10),  # ends: 0 and 5
        (GREEDY | {"bad_words": ["a", "bc"]}, 3),  # whatever begins them, they end in a or c
        (TOP | {"presence_penalty": 0.1, "max_tokens": 9}, 7 + 9),
        (GREEDY | {"frequency_penalty": 0.1, "logit_bias": {3: -1.0}, "max_tokens": 9}, 11),
        (GREEDY | {"repetition_penalty": 1.1, "max_tokens": 9}, 1 + PROMPT_TOKENS + 9),
        (GREEDY | {"presence_penalty": 0.1, "max_tokens": MOST_EXACT - 1}, MOST_EXACT),
        (GREEDY | {"presence_penalty": 0.1, "max_tokens": MOST_EXACT}, 0),
        # What changes nothing about a row's logits.
        (GREEDY | {"n": 3, "stop": "x", "stop_token_ids": [4], "ignore_eos": True}, 1),
        (TOP | {"best_of": 2, "n": 2, "max_tokens": 3, "include_stop_str_in_output": True}, 7),
        (GREEDY | {"repetition_penalty": 1.0, "min_tokens": 0, "logit_bias": {}}, 1),
        (GREEDY | {"prompt_logprobs": 1}, 1),  # once the prompt's are computed, see below
    ],
)
def test_who_needs_how_many(params: dict[str, Any], wanted: int) -> None:
    engine = null_engine(tokenizer=TOKENIZER, vocab_size=TOKENIZER.vocab_size)
    request = engine.prepare("a", PROMPT, SamplingParams(**params))
    assert [one.exact_logits for one in (request, *request.siblings)] == [wanted] * request.num_rows
    engine.close()


def test_rows_of_which_some_logits_are_lowered() -> None:
    row = RowParams(temperature=1.0, top_k=5)
    assert exact_logits(row) == 5
    assert exact_logits(row, 3) == 8
    assert exact_logits(row, None) == 0
    assert exact_logits(row, MOST_EXACT - 5) == MOST_EXACT
    assert exact_logits(row, MOST_EXACT - 4) == 0
    assert exact_logits(row._replace(top_k=None), 3) == 4  # it draws from all
    assert exact_logits(row._replace(top_k=None, top_p=0.9), 3) == 0
    assert exact_logits(row._replace(num_logprobs=0)) == 0


# Packing.


def told(bench: Bench, packer: BatchPacker, drafts: Any = None) -> list[int] | None:
    """What the model is told in the next step, which is made then."""
    plan = bench.scheduler.plan(guess=saying(drafts or {}))
    reservation = bench.scheduler.reserve(plan)
    inputs = packer.pack(plan)
    assert inputs.exact_logits is None or inputs.exact_logits.dtype == np.int32
    assert inputs.exact_logits is None or inputs.exact_logits.shape == inputs.logits_indices.shape
    found = None if inputs.exact_logits is None else inputs.exact_logits.tolist()
    bench.scheduler.commit(plan, reservation)
    for row in plan.sampled:
        plan.requests[row].tokens.append(7)
    return found


def packer() -> BatchPacker:
    return BatchPacker(8, 16, takes_exact_logits=True)


def submitted(*lengths: tuple[str, int, int], budget: int = 16) -> Bench:
    """Requests by name, with tokens and logits that must be exact."""
    bench = Bench(num_blocks=40, budget=budget)
    for name, length, exact in lengths:
        bench.submit(name, length)
        bench.requests[name].exact_logits = exact
    return bench


def test_a_number_for_each_row_of_logits() -> None:
    bench = submitted(("a", 3, 1), ("b", 2, 0), ("c", 4, 20))
    assert told(bench, packer()) == [1, 0, 20]
    assert told(bench, packer()) == [1, 0, 20]


def test_rows_that_sample_nothing_have_none() -> None:
    bench = submitted(("a", 2, 1), ("b", 9, 5), budget=6)
    assert told(bench, packer()) == [1]
    assert told(bench, packer()) == [1, 5]
    bench = submitted(("a", 9, 1), budget=6)
    assert told(bench, packer()) is None
    assert told(bench, packer()) == [1]


def test_of_a_row_that_nobody_reads_one_logit_is_computed() -> None:
    bench = submitted(("a", 9, 1), budget=6)
    bench.requests["a"].per_unit = 1.5  # its token is drawn from all
    masking = BatchPacker(8, 16, takes_exact_logits=True, mask_words=16)
    plan = bench.scheduler.plan()
    reservation = bench.scheduler.reserve(plan)
    inputs = masking.pack(plan)
    assert inputs.exact_logits is not None
    assert inputs.allowed_tokens is not None
    assert inputs.exact_logits.tolist() == [1]
    assert inputs.allowed_tokens.tolist() == [[1] + [0] * 15]
    assert inputs.races is None
    bench.scheduler.commit(plan, reservation)
    inputs = masking.pack(bench.scheduler.plan())  # its token is drawn
    assert inputs.exact_logits is not None
    assert (inputs.exact_logits.tolist(), inputs.allowed_tokens) == ([1], None)
    bench = submitted(("a", 9, 1), budget=6)
    bench.requests["a"].scores = []  # log probabilities of its prompt are wanted
    inputs = masking.pack(bench.scheduler.plan())
    assert (inputs.exact_logits, inputs.allowed_tokens) == (None, None)


def test_a_draft_has_the_number_of_its_row() -> None:
    bench = submitted(("a", 3, 1), ("b", 2, 9), ("c", 1, 0))
    told(bench, packer())
    drafts = {bench.requests["b"]: [7, 7, 8], bench.requests["c"]: [4]}
    assert told(bench, packer(), drafts) == [1, 9, 9, 9, 9, 0, 0]


def test_the_model_is_told_nothing_that_it_has_no_use_for() -> None:
    assert told(submitted(("a", 3, 0), ("b", 2, 0)), packer()) is None
    assert told(submitted(("a", 3, 1)), BatchPacker(8, 16)) is None


def test_rows_of_a_draft_model() -> None:
    blocks = array("i", Bench(2).pool.allocate(2, []))
    rows = [DraftRow([3, 4], 0, blocks, 5), DraftRow([6], 2, blocks, 0)]
    pack = DraftPacker(4).pack
    exact = pack(rows).exact_logits
    assert exact is not None
    assert (exact.tolist(), exact.dtype) == ([5, 0], np.int32)
    assert pack(rows).races is None
    drawn = [rows[0], replace(rows[1], exact_logits=1, race=(0.25, 2.0))]
    inputs = pack(drawn)
    assert inputs.races is not None
    assert (inputs.races.tolist(), inputs.races.dtype) == ([[0, 0], [0.25, 2.0]], np.float64)
    inputs = pack([replace(one, tokens=one.tokens[:1]) for one in drawn])
    advance(inputs, [5, 6], [(0.0, 0.0), (0.5, 2.0)])
    assert inputs.races is not None
    assert inputs.races.tolist() == [[0, 0], [0.5, 2.0]]
    nobody = [replace(one, exact_logits=0) for one in drawn]
    assert pack(nobody).exact_logits is None
    assert pack(nobody).races is None


# The engine.


class Listening(NullModel):
    """Remembers what it was told."""

    def __init__(self, options: NullOptions) -> None:
        super().__init__(options)
        self.told: list[list[int] | None] = []

    def run(self, inputs: StepInputs) -> Any:
        exact = inputs.exact_logits
        self.told.append(None if exact is None else exact.tolist())
        return super().run(inputs)


def test_log_probabilities_of_a_prompt_need_all() -> None:
    """Until they are there; siblings go on from the same logits."""
    engine = null_engine(model_type=Listening, max_num_batched_tokens=8)
    params = SamplingParams(temperature=0.0, max_tokens=3, prompt_logprobs=1, n=2)
    submit(engine, "a", range(12), params)
    submit(engine, "b", [1], SamplingParams(temperature=0.0, max_tokens=4))
    run(engine)
    model = null_model(engine)
    assert isinstance(model, Listening)
    assert model.told == [None, [0, 0, 0, 0, 1], [1, 1, 1], [1, 1, 1], [1]]


def test_a_model_without_use_for_them_is_told_nothing() -> None:
    engine = null_engine(model_type=Listening, takes_exact_logits=False)
    submit(engine, "a", range(12))
    run(engine)
    model = null_model(engine)
    assert isinstance(model, Listening)
    assert model.told == [None] * 12


# The samplers.


@st.composite
def lowering(
    draw: st.DrawFn, logits: NDArray[np.float32], random: np.random.Generator
) -> tuple[RowEdits, int]:
    """Edits that lower logits, most of them large, and how many at most."""
    order = np.argsort(-logits)
    places = np.concatenate((np.arange(40), random.integers(40, len(order), 20)))
    tokens = order[random.permutation(places)]
    sizes = [draw(st.integers(0, 20)) for _ in range(3)]
    biased, banned, seen = (random.permutation(tokens)[:size] for size in sizes)
    biases = random.choice([0.0, -0.5, -3.0, -100.0], len(biased)).astype(np.float32)
    edits = RowEdits(
        biased,
        biases,
        banned,
        seen,
        random.integers(0, 3, len(seen)).astype(np.float32),
        draw(st.sampled_from([1.0, 1.3])),
        draw(st.sampled_from([0.0, 0.7])),
        draw(st.sampled_from([0.0, 0.2])),
    )
    return edits, len({*biased.tolist(), *banned.tolist(), *seen.tolist()})


@settings(max_examples=examples(150), deadline=None)
@given(data=st.data())
def test_samplers_look_at_no_others(data: st.DataObject) -> None:
    """Nor at how far below the others are, where the last of those that count has equals."""
    number, width = data.draw(st.integers(0, 2**31)), data.draw(st.sampled_from([VOCAB, 20_000]))
    random = np.random.default_rng(number)
    logits = random.standard_normal((1, width)).astype(np.float32)
    if data.draw(st.booleans(), "ties"):
        logits = np.round(logits * 2) / 2
    edits, lowered = data.draw(st.just((None, 0)) | lowering(logits[0], random))
    counts = [1, 2, 3, 20, 63, MOST_EXACT]
    row = RowParams(
        data.draw(st.sampled_from([0.0, 0.3, 1.0, 5.0, 100.0])),
        data.draw(st.sampled_from([one for one in counts if one + lowered <= MOST_EXACT])),
        data.draw(st.sampled_from([0.2, 0.9, 1.0])),
        data.draw(st.floats(0, 1, exclude_max=True)),
        min_p=data.draw(st.sampled_from([0.0, 0.01, 0.5])),
        edits=edits,
        thinning=data.draw(st.none() | st.just(Thinning(0.0, 0.7, 0.05))),
    )
    spoiled = logits.copy()
    count = exact_logits(row, lowered)
    assert count > 0
    least = np.partition(logits[0], -count)[-count]
    others = logits < least
    near = np.nextafter(least, np.float32(-np.inf))
    wrong = data.draw(st.sampled_from(["near", "far", "mixed"]))
    spoiled[others] = {"near": near, "far": -2e38, "mixed": None}[wrong]
    if wrong == "mixed":
        drawn = least - np.abs(random.standard_normal(others.sum())).astype(np.float32) * 9
        spoiled[others] = np.minimum(drawn, near)
    for one in (sampler.native_sampler(1), numpy_sampler):
        if one is not None:
            assert one.sample(spoiled, [row]) == one.sample(logits, [row])
