"""Which tokens a row may get: who tells the model of it, when, and that nothing comes of it.

The null model spoils what it need not compute, more than the largest where a token is not allowed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from onnxport.graphs.contract import ALL_ALLOWED, mask_words
from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel
from onnxport.serving import engine as engine_module
from onnxport.serving import sampling
from onnxport.serving.batch import BatchPacker
from onnxport.serving.beside import Beside
from onnxport.serving.engine import Engine
from onnxport.serving.narrowing import narrow, narrowed
from onnxport.serving.outputs import Failure
from onnxport.serving.params import SamplingParams
from onnxport.serving.row_params import RowParams, Thinning, exact_allowed
from onnxport.serving.sampler import uniform
from onnxport.serving.structured.spec import StructuredOutputs
from tests.serving.bench import Bench, saying
from tests.serving.helpers import null_engine, null_model, reasons, run, submit, tokens
from tests.serving.prophet import Prophet
from tests.serving.samplers import native
from tests.serving.structured import tokenizer, vocabulary

VOCAB = vocabulary().vocab_size
WORDS = mask_words(100)
LETTERS = StructuredOutputs(regex="[a-f]{2,12}(-[a-f]{1,3})*")
GREEDY: dict[str, Any] = {"temperature": 0.0}


# Who needs how many.


@pytest.mark.parametrize(
    ("row", "lowered", "wanted"),
    [
        (RowParams(), 0, 1),
        (RowParams(), 5, 6),
        (RowParams(), 64, ALL_ALLOWED),
        (RowParams(), None, ALL_ALLOWED),
        (RowParams(1.0, 20), 0, 20),
        (RowParams(1.0, 100), 0, ALL_ALLOWED),
        (RowParams(1.0), 0, 1),
        (RowParams(1.0), 3, 4),
        (RowParams(1.0), None, ALL_ALLOWED),
        (RowParams(1.0, None, 0.9), 0, ALL_ALLOWED),
        (RowParams(1.0, 20, thinning=Thinning(typical_p=0.9)), 0, 20),
        (RowParams(1.0, 20, thinning=Thinning(1.0)), 0, ALL_ALLOWED),
        (RowParams(1.0, thinning=Thinning(xtc_threshold=0.1)), 0, ALL_ALLOWED),
        (RowParams(1.0, None, 0.5, min_p=0.1), None, ALL_ALLOWED),
        (RowParams(num_logprobs=0), 0, 0),
        (RowParams(1.0, 20, num_logprobs=2), None, 0),
    ],
)
def test_how_many_of_those_it_may_get(row: RowParams, lowered: int | None, wanted: int) -> None:
    assert exact_allowed(row, lowered) == wanted


@pytest.mark.parametrize(
    ("params", "wanted"),
    [
        (GREEDY, (1, 0)),
        ({}, (1, 0)),
        ({"top_p": 0.9}, (0, 0)),
        (GREEDY | {"allowed_token_ids": [3, 4]}, (0, ALL_ALLOWED)),
        ({"allowed_token_ids": [3, 4], "logprobs": 1}, (0, 0)),
        (GREEDY | {"structured_outputs": LETTERS}, (0, 1)),
        ({"top_k": 7, "structured_outputs": LETTERS}, (0, 7)),
        ({"structured_outputs": LETTERS}, (0, 1)),
        ({"structured_outputs": LETTERS, "min_p": 0.1}, (0, ALL_ALLOWED)),
        (GREEDY | {"structured_outputs": LETTERS, "logit_bias": {3: -1.0}}, (0, 2)),
        (GREEDY | {"structured_outputs": LETTERS, "logit_bias": {3: 1.0}}, (0, ALL_ALLOWED)),
        (
            GREEDY | {"structured_outputs": LETTERS, "allowed_token_ids": [66, 67]},
            (0, ALL_ALLOWED),
        ),
        (GREEDY | {"structured_outputs": LETTERS, "logprobs": 0}, (0, 0)),
    ],
)
def test_who_needs_how_many(params: dict[str, Any], wanted: tuple[int, int]) -> None:
    engine = null_engine(tokenizer=tokenizer(), vocab_size=VOCAB)
    request = engine.prepare("a", "ab", SamplingParams(**params))
    assert (request.exact_logits, request.exact_allowed) == wanted
    engine.close()


# Packing.


def submitted(budget: int = 16, **lengths: int) -> Bench:
    bench = Bench(num_blocks=40, budget=budget)
    for name, length in lengths.items():
        bench.submit(name, length)
        bench.requests[name].exact_logits = 0
        bench.requests[name].per_unit = 0.0
    return bench


def words(*token_ids: int) -> Any:
    found = np.zeros(WORDS, np.int32)
    for one in token_ids:
        found[one // 32] |= np.int32(1 << one % 32)
    return found


def allow(bench: Bench, name: str, mask: Any, exact: int = ALL_ALLOWED) -> None:
    bench.requests[name].exact_logits = 0
    bench.requests[name].exact_allowed = exact
    bench.requests[name].allowed_words = mask


def follow_form(bench: Bench, name: str, exact: int = 1) -> None:
    allow(bench, name, None, exact)
    bench.requests[name].grammar = object()  # type: ignore[assignment]


def packer() -> BatchPacker:
    return BatchPacker(8, 16, takes_exact_logits=True, mask_words=WORDS)


def step(bench: Bench, pack: BatchPacker, masks: Any = None, drafts: Any = None) -> StepInputs:
    """Pack the next step, write its masks into it, and make it."""
    plan = bench.scheduler.plan(guess=saying(drafts or {}))
    reservation = bench.scheduler.reserve(plan)
    inputs = pack.pack(plan)
    if masks is not None:
        by_request = {bench.requests[name]: mask for name, mask in masks.items()}
        narrow(plan, inputs, by_request, native())
    sampled = [one for row in plan.sampled for one in sampling.with_siblings(plan.requests[row])]
    bench.scheduler.commit(plan, reservation)
    for request in sampled:
        request.tokens.append(7)
    return inputs


def told(inputs: StepInputs) -> tuple[list[int] | None, list[list[int]] | None]:
    exact, allowed = inputs.exact_logits, inputs.allowed_tokens
    assert allowed is None or (exact is not None and len(allowed) == len(exact))
    assert allowed is None or (allowed.dtype, allowed.shape[1]) == (np.int32, WORDS)
    return (
        None if exact is None else exact.tolist(),
        None if allowed is None else allowed.tolist(),
    )


ALL = [-1] * WORDS


def test_tokens_that_are_known_before() -> None:
    bench = submitted(a=3, b=2, c=4)
    allow(bench, "b", words(3, 64))
    bench.requests["c"].exact_logits = 5
    pack = packer()
    for _ in range(3):
        inputs = step(bench, pack)
        assert told(inputs) == ([0, ALL_ALLOWED, 5], [ALL, words(3, 64).tolist(), ALL])
        assert narrowed(inputs) is None  # of the first all logits count
    bench.requests["a"].exact_logits = 1
    bench.submit("d", 1)
    bench.requests["d"].exact_logits = 2
    inputs = step(bench, pack)
    assert told(inputs)[0] == [1, ALL_ALLOWED, 5, 2]
    assert narrowed(inputs) is inputs.allowed_tokens


def test_what_a_grammar_allows_is_written_later() -> None:
    bench = submitted(a=3, b=2)
    follow_form(bench, "a")
    bench.requests["b"].exact_logits = 1
    pack = packer()
    first = None
    for number in range(4):  # the later ones follow the first
        inputs = step(bench, pack)
        assert told(inputs)[0] == [0, 1]
        assert narrowed(inputs) is None
        mask = words(number, 99)
        inputs = step(bench, pack, {"a": mask.view(np.uint32)[None]})
        assert told(inputs) == ([1, 1], [mask.tolist(), ALL])
        assert narrowed(inputs) is inputs.allowed_tokens
        assert first is None or inputs.allowed_tokens is first  # a model keeps it bound
        first = inputs.allowed_tokens


def test_rows_that_draw_from_all_have_their_numbers() -> None:
    """Another one in each step, for each token of a draft, and none where nobody asks."""
    bench = submitted(a=3, b=2, c=4)
    one, other = bench.requests["a"], bench.requests["b"]
    one.exact_logits, one.per_unit, one.seed = 1, 2.0, 5
    other.exact_logits = 7
    pack = packer()
    first = None
    for number in range(3):
        races = step(bench, pack).races
        assert races is not None
        assert races.tolist() == [[uniform(5, 3 + number), 2.0], [0, 0], [0, 0]]
        assert first is None or races is first  # a model keeps it bound
        first = races
    inputs = step(bench, pack, None, {one: [7, 8], bench.requests["c"]: [4]})
    assert inputs.races is not None
    found = inputs.races[inputs.races[:, 1] > 0]
    assert found.tolist() == [[uniform(5, position), 2.0] for position in (6, 7, 8)]
    one.exact_logits = other.exact_logits = 0
    bench.submit("d", 1)
    bench.requests["d"].exact_logits = 0
    assert step(bench, pack).races is None


def test_siblings_draw_from_the_same_logits_by_numbers_of_their_own() -> None:
    bench = Bench(num_blocks=40)
    bench.submit("a", 3, n=2)
    bench.submit("b", 3)
    assert told(step(bench, packer()))[0] == [0, 1]
    assert told(step(bench, packer()))[0] == [1, 1, 1]


def test_drafts_have_a_mask_each() -> None:
    bench = submitted(a=3, b=2, c=1)
    follow_form(bench, "b", 4)
    pack = packer()
    step(bench, pack)
    drafts = {bench.requests["b"]: [7, 8], bench.requests["c"]: [4]}
    masks = np.arange(3 * WORDS, dtype=np.uint32).reshape(3, WORDS)
    inputs = step(bench, pack, {"b": masks}, drafts)
    exact, allowed = told(inputs)
    assert sorted(exact or []) == [0, 0, 0, 4, 4, 4]
    first = (exact or []).index(4)
    assert allowed is not None
    assert allowed[first : first + 3] == masks.tolist()


def test_what_is_not_written() -> None:
    """A mask that could not be made, or was not; of siblings each has its own grammar."""
    bench = Bench(num_blocks=40)
    bench.submit("a", 3, n=2)
    bench.submit("b", 3)
    bench.submit("c", 3)
    bench.requests["c"].per_unit = 0.0
    for name in "abc":
        follow_form(bench, name)
    mask = np.zeros((1, WORDS), np.uint32)
    inputs = step(bench, packer(), {"a": mask, "b": Failure("no"), "c": mask})
    assert told(inputs)[0] == [0, 0, 1]
    bench = submitted(a=3)
    follow_form(bench, "a")
    bench.requests["a"].scores = []  # of the prompt, which are missing
    inputs = step(bench, packer(), {"a": mask})
    assert told(inputs) == (None, None)


def test_a_model_without_use_for_it_is_told_nothing() -> None:
    bench = submitted(a=3, b=2)
    follow_form(bench, "a")
    allow(bench, "b", words(3))
    mask = np.zeros((1, WORDS), np.uint32)
    for pack in (BatchPacker(8, 16), BatchPacker(8, 16, takes_exact_logits=True)):
        assert told(step(bench, pack, {"a": mask})) == (None, None)
    bench.requests["a"].exact_logits = 2
    pack = BatchPacker(8, 16, takes_exact_logits=True)
    assert told(step(bench, pack, {"a": mask})) == ([2, 0], None)


# The engine.


class Counting(NullModel):
    """Counts rows of logits of which it knows that it need not compute all."""

    num_narrowed = 0

    def run(self, inputs: StepInputs) -> Any:
        if inputs.exact_logits is not None and inputs.allowed_tokens is not None:
            self.num_narrowed += int(np.count_nonzero(inputs.exact_logits))
        return super().run(inputs)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks are there before the model runs, however short its steps are."""
    monkeypatch.setattr(Beside, "_start", lambda beside, task: task())


MIX: list[dict[str, Any]] = [
    {"structured_outputs": LETTERS},
    {"structured_outputs": LETTERS, "temperature": 0.9, "seed": 2},
    {"structured_outputs": LETTERS, "temperature": 0.7, "top_k": 5, "seed": 3},
    {"structured_outputs": LETTERS, "repetition_penalty": 1.2},
    {"structured_outputs": LETTERS, "logit_bias": {70: 4.0, 71: -4.0}},
    {"structured_outputs": LETTERS, "temperature": 1.0, "top_p": 0.9, "min_p": 0.01, "seed": 5},
    {"allowed_token_ids": list(range(40, 90)), "min_tokens": 3, "max_tokens": 20},
    {"allowed_token_ids": [66, 67, 68], "temperature": 1.0, "seed": 1, "max_tokens": 20},
    {"structured_outputs": LETTERS, "allowed_token_ids": [*range(66, 80), 0]},
    {"max_tokens": 20},
]


def written(engine: Engine, mix: list[dict[str, Any]]) -> list[Any]:
    for number, more in enumerate(mix):
        given = {"temperature": 0.0, "max_tokens": 40, **more}
        submit(engine, str(number), range(20, 30 + number), SamplingParams(**given))
    deltas = run(engine)
    found = [
        (tokens(deltas[str(number)], index), reasons(deltas[str(number)]))
        for number, more in enumerate(mix)
        for index in range(more.get("n", 1))
    ]
    engine.close()
    return found


def engine_of(model_type: type[NullModel] = NullModel, **options: Any) -> Engine:
    return null_engine(
        tokenizer=tokenizer(), vocab_size=VOCAB, model_type=model_type, max_num_seqs=16, **options
    )


@pytest.fixture(params=["native", "numpy"])
def sampler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever sampler draws, those masks are written that are."""
    native()
    if request.param == "numpy":
        monkeypatch.setattr("onnxport.serving.sampler.native_sampler", lambda threads=None: None)


@pytest.mark.usefixtures("sampler", "at_once")
@pytest.mark.parametrize("options", [{}, {"num_blocks": 70, "max_num_batched_tokens": 17}])
def test_an_engine_that_tells_generates_the_same(options: dict[str, Any]) -> None:
    wanted = written(engine_of(takes_exact_logits=False), MIX)
    engine = engine_of(Counting, **options)
    model = null_model(engine)
    assert written(engine, MIX) == wanted
    assert isinstance(model, Counting)
    assert model.num_narrowed > 60


@pytest.mark.parametrize("latency_s", [0.0, 1e-3])
def test_it_may_be_told_at_any_time(latency_s: float) -> None:
    wanted = written(engine_of(takes_exact_logits=False), MIX)
    for _ in range(5):
        assert written(engine_of(latency_s=latency_s), MIX) == wanted


@pytest.mark.usefixtures("at_once")
def test_rows_of_forms_alone_are_drawn_by_what_the_model_was_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The likeliest tokens; all of them in one call, which reads the model's own masks."""
    native()
    mix = [one for one in MIX if set(one) == {"structured_outputs"}] * 3 + [{"max_tokens": 20}]
    wanted = written(engine_of(takes_exact_logits=False), mix)
    found: list[bool] = []
    sample_greedy = sampling.sample_greedy

    def listen(logits: Any, threads: Any, summaries: Any, allowed: Any) -> Any:
        found.append(allowed is not None)
        return sample_greedy(logits, threads, summaries, allowed)

    monkeypatch.setattr(sampling, "sample_greedy", listen)
    assert written(engine_of(Counting), mix) == wanted
    assert sum(found) > 5
    monkeypatch.setattr(engine_module, "narrowed", lambda inputs: None)
    found.clear()
    assert written(engine_of(Counting), mix) == wanted
    assert not any(found)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("errs", [0, 3])
def test_with_drafts_and_siblings(errs: int) -> None:
    mix = [one | {"n": 1 + number % 3} for number, one in enumerate(MIX)]
    wanted = written(engine_of(takes_exact_logits=False), mix)
    futures = {}
    number = 0
    for name, one in enumerate(mix):
        for index in range(one["n"]):
            futures[str(name), index] = wanted[number][0]
            number += 1

    def future(request: Any) -> Any:
        return futures[request.request_id, request.index]

    prophet = Prophet(future)
    prophet.errs = errs
    engine = engine_of(Counting, speculator=prophet, max_num_batched_tokens=64, num_blocks=200)
    model = null_model(engine)
    assert written(engine, mix) == wanted
    assert prophet.num_accepted > 30
    assert isinstance(model, Counting)
    assert model.num_narrowed > 60
