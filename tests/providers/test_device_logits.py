"""Logits that are left on a device: what the host gets of them, and that it draws the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from onnxport.graphs import contract
from onnxport.graphs.builder import GraphBuilder
from onnxport.providers import device, device_logits, page_lock
from onnxport.providers.base import StepInputs
from onnxport.providers.device_logits import COUNTS, LEAST, DeviceLogits
from onnxport.providers.ort import CPU, quiet_options, start_session
from onnxport.serving import numpy_sampler, sampler
from onnxport.serving.config import EngineConfig
from onnxport.serving.edits import RowEdits
from onnxport.serving.engine import Engine
from onnxport.serving.params import SamplingParams
from onnxport.serving.row_params import MOST_EXACT, RowParams
from tests.providers.test_device_providers import emulated
from tests.tiers import examples

Floats = NDArray[np.float32]
VOCAB = 3000  # neither whole chunks nor whole groups


class Place:
    """Where a session leaves logits, and what comes from there."""

    def __init__(self, vocab: int = VOCAB, fewest: int = 1, **options: Any) -> None:
        self.logits = DeviceLogits(vocab, CPU, fewest=fewest, **options)
        g = GraphBuilder("model")
        given = g.input("given", TensorProto.FLOAT, ["n", vocab])
        g.output(contract.LOGITS, TensorProto.FLOAT, ["n", vocab])
        g.node("Identity", [given], outputs=[contract.LOGITS])
        self._session = start_session(g.build().SerializeToString(), None, quiet_options())
        self._binding = self._session.io_binding()

    def run(self, logits: Floats, inputs: StepInputs) -> Floats:
        self._binding.bind_cpu_input("given", logits)
        self.logits.bind(self._binding, len(logits))
        self._session.run_with_iobinding(self._binding)
        return self.logits.fetch(len(logits), inputs)


def inputs_of(
    exact: list[int] | None,
    vocab: int = VOCAB,
    scales: list[float] | None = None,
    races: list[float] | None = None,
    *,
    masked: bool = False,
) -> StepInputs:
    """A step of a token a row, of which nothing but what it wants of logits is read."""
    rows = len(exact or scales or [0])
    summaries = None if scales is None else np.full((rows, contract.summary_floats(vocab)), np.nan)
    return StepInputs(
        input_ids=np.zeros(rows, np.int64),
        block_table=np.zeros((rows, 1), np.int32),
        cumulative_sequence_lengths=np.arange(rows + 1, dtype=np.int32),
        past_sequence_lengths=np.zeros(rows, np.int32),
        attention_metadata=np.ones(3, np.int32),
        logits_indices=np.arange(rows, dtype=np.int32),
        exact_logits=None if exact is None else np.array(exact, np.int32),
        allowed_tokens=np.full((rows, contract.mask_words(vocab)), -1, np.int32)
        if masked
        else None,
        races=None if races is None else np.array([[0.5, unit] for unit in races]),
        summary_scales=None if scales is None else np.array(scales, np.float32),
        summaries=None if summaries is None else summaries.astype(np.float32),
    )


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> Floats:
    return np.random.default_rng(seed).standard_normal((rows, vocab)).astype(np.float32) * 4


def test_the_largest_of_each_row_are_exact_and_all_others_less() -> None:
    place = Place()
    for seed, exact in enumerate([[1, 7, 31], [64, 1], [3, 3, 3, 3], [1]]):
        logits = random_logits(len(exact), seed)
        found = place.run(logits, inputs_of(exact))
        assert found.shape == logits.shape
        for own, row, count in zip(logits, found, exact, strict=True):
            largest = np.argsort(-own)[:count]
            np.testing.assert_array_equal(row[largest], own[largest])
            others = np.setdiff1d(np.arange(VOCAB), largest)
            assert (row[others] < row[largest].min()).all()
            np.testing.assert_array_equal(row[row > LEAST], own[row > LEAST])
        assert (found > LEAST).sum(axis=1).max() <= COUNTS[-1]  # nothing of the step before


@pytest.mark.parametrize(
    ("wanted", "change"),
    [
        (inputs_of(None), []),
        (inputs_of([1, 0]), []),
        (inputs_of([1, 1], masked=True), []),
        (inputs_of([1, 1], races=[0.0, 0.7]), []),
        (inputs_of([1, COUNTS[-1]]), []),
        (inputs_of([1, 1]), [(0, 5, np.nan)]),
        (inputs_of([1, 1]), [(0, VOCAB - 1, np.nan)]),
        (inputs_of([1, 64]), [(1, VOCAB // 2, -np.float32(np.nan))]),
        (inputs_of([1, 1]), [(1, 5, np.inf)]),
        (inputs_of([1, 1]), [(1, slice(None), -np.inf)]),
        (inputs_of([1, 1]), [(1, slice(20, 40), 50.0)]),  # more are the largest than are selected
        (inputs_of([7, 1]), [(0, slice(20, 40), 50.0)]),
    ],
    ids=[
        "unasked",
        "all",
        "masked",
        "race",
        "many",
        "nan",
        "nan-at-the-end",
        "nan-of-many",
        "inf",
        "no-finite",
        "ties",
        "ties-of-7",
    ],
)
def test_where_more_may_decide_all_logits_come(
    wanted: StepInputs, change: list[tuple[int, Any, float]]
) -> None:
    logits = random_logits(2)
    for row, where, value in change:
        logits[row, where] = value
    np.testing.assert_array_equal(Place().run(logits, wanted), logits)


def test_few_logits_come_as_they_are() -> None:
    logits = random_logits(2)
    found = Place(fewest=2 * VOCAB + 1).run(logits, inputs_of([1, 1]))
    np.testing.assert_array_equal(found, logits)
    found = Place(fewest=2 * VOCAB).run(logits, inputs_of([1, 1]))
    assert (found == LEAST).sum() == 2 * (VOCAB - COUNTS[0])
    narrow = random_logits(2, vocab=5)  # fewer than would be selected
    np.testing.assert_array_equal(Place(5).run(narrow, inputs_of([1, 1], 5)), narrow)


def test_a_race_that_no_row_runs_is_none() -> None:
    found = Place().run(random_logits(2), inputs_of([1, 1], races=[0.0, 0.0]))
    assert (found == LEAST).any()


def test_summaries_say_what_is_known() -> None:
    place, logits = Place(), random_logits(3)
    chosen = inputs_of([1, 1, 1], scales=[contract.NO_SUMS, contract.NO_SUMMARY, contract.NO_SUMS])
    place.run(logits, chosen)
    assert chosen.summaries is not None
    told = chosen.summaries[:, -1].tolist()
    assert told == [contract.NO_SUMS, contract.NO_SUMMARY, contract.NO_SUMS]
    everything = inputs_of(None, scales=[contract.NO_SUMS, 1.5, contract.NO_SUMMARY])
    place.run(logits, everything)
    assert everything.summaries is not None
    assert (everything.summaries[:, -1] == contract.NO_SUMMARY).all()


@pytest.mark.skipif(sampler.native_sampler() is None, reason="the sampler was not built")
def test_summaries_are_those_of_the_row() -> None:
    """The sampler's own of the same row, but for what nobody reads: smallest values and sums."""
    place, logits = Place(), random_logits(2)
    wanted = inputs_of([1, 20], scales=[contract.NO_SUMS] * 2)
    found = place.run(logits, wanted)
    native = sampler.native_sampler()
    assert native is not None
    expected = native.summarize(found, [contract.NO_SUMS] * 2)
    known = -(-VOCAB // 1024) * 17  # groups, and the largest of chunks
    assert wanted.summaries is not None
    np.testing.assert_array_equal(wanted.summaries[:, :known], expected[:, :known])


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data(), seed=st.integers(0, 2**16), ties=st.booleans())
def test_what_is_drawn_is_the_same(data: st.DataObject, seed: int, ties: bool) -> None:
    """By both samplers, with what lowers logits and without."""
    rows = data.draw(st.integers(1, 4))
    logits = random_logits(rows, seed)
    if ties:
        logits = logits.round()
    params, exact = [], []
    for row in range(rows):
        top_k = data.draw(st.sampled_from([None, 1, 5, 40]))
        lowered = data.draw(st.sampled_from([0, 3]))
        banned = np.argsort(-logits[row])[:lowered]
        edits = RowEdits(banned=banned) if lowered else None
        temperature = 0.0 if top_k is None else 0.8
        params.append(RowParams(temperature, top_k, 0.9, 0.3, None, 0.0, edits, None))
        exact.append((top_k or 1) + lowered)
    assert max(exact) <= MOST_EXACT
    wanted = inputs_of(exact, scales=[contract.NO_SUMS] * rows)
    found = Place().run(logits, wanted)
    expected = numpy_sampler.sample(logits.copy(), params).token_ids
    assert numpy_sampler.sample(found.copy(), params).token_ids == expected
    native = sampler.native_sampler()
    if native is not None:
        kept = found.copy()
        assert list(native.sample(found, params, wanted.summaries).token_ids) == list(expected)
        np.testing.assert_array_equal(found, kept)  # what is lowered is put back


def test_memory_of_the_host_is_locked_while_it_is_used() -> None:
    locked: list[Floats] = []

    def lock(array: Floats) -> Callable[[], None]:
        locked.append(array)
        return lambda: locked.remove(next(one for one in locked if one is array))

    place = Place(page_lock=lock)
    place.run(random_logits(2), inputs_of([1, 1]))
    assert not locked  # a selection does not need it
    place.run(random_logits(2), inputs_of(None))
    place.run(random_logits(1), inputs_of(None))
    assert [len(one) for one in locked] == [2]
    place.run(random_logits(5), inputs_of(None))
    assert [len(one) for one in locked] == [5]  # the smaller one was let go of
    place.logits.close()
    assert not locked


def test_what_was_recorded_goes_on_to_write_where_it_did() -> None:
    """A step with more logits, as log probabilities of a prompt want them, has another place."""
    place = Place()
    place.logits.reserve(4)
    session, recorded = place._session, place._session.io_binding()
    place.logits.bind(recorded, 3)
    for rows in (2, 9, 30, 4):
        logits = random_logits(rows, rows)
        np.testing.assert_array_equal(place.run(logits, inputs_of(None)), logits)
    logits = random_logits(3)
    recorded.bind_cpu_input("given", logits)
    session.run_with_iobinding(recorded)
    np.testing.assert_array_equal(place.logits.fetch(3, inputs_of(None)), logits)


def test_very_many_logits_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_logits, "MOST_LOCKED", 4 * VOCAB * 4)
    locked: list[int] = []

    def lock(array: Floats) -> Callable[[], None]:
        locked.append(len(array))
        return lambda: None

    place = Place(page_lock=lock)
    for rows in (5, 4, 6):
        logits = random_logits(rows, rows)
        np.testing.assert_array_equal(place.run(logits, inputs_of(None)), logits)
    assert locked == [4]
    assert place.logits._memory is None  # nor on the device
    logits = random_logits(2)
    np.testing.assert_array_equal(place.run(logits, inputs_of(None)), logits)


def test_without_cuda_memory_stays_as_it_is() -> None:
    page_lock.page_lock(np.zeros(10))()
    page_lock.page_lock(np.zeros(0))()


@pytest.mark.parametrize("captured", [False, True], ids=["run", "replayed"])
def test_a_provider_serves_the_same_tokens(
    wide_artifact: Path, monkeypatch: pytest.MonkeyPatch, captured: bool
) -> None:
    """Greedy and drawn from few, beside a row that draws from all and alone."""
    requests = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
        SamplingParams(top_k=5, seed=3, max_tokens=9, ignore_eos=True),
        SamplingParams(top_k=20, top_p=0.9, repetition_penalty=1.3, seed=4, max_tokens=5),
        SamplingParams(seed=5, max_tokens=3, ignore_eos=True),
    ]
    selected = 0
    own = DeviceLogits._spread

    def spread(self: DeviceLogits, *arguments: Any) -> Floats:
        nonlocal selected
        selected += 1
        return own(self, *arguments)

    monkeypatch.setattr(DeviceLogits, "_spread", spread)

    def served(fewest: int) -> list[list[int]]:
        monkeypatch.setattr(device, "DeviceLogits", partial(DeviceLogits, fewest=fewest))
        model = emulated(wide_artifact, "cuda", block_size=16, capture_graphs=captured)
        engine = Engine(model, config=EngineConfig(8, 64))
        for number, params in enumerate(requests):
            prompt = [5, 7 + number, 9, 11]
            engine.submit(engine.prepare(str(number), prompt, params))
        tokens: list[list[int]] = [[] for _ in requests]
        while engine.has_work:
            for delta in engine.step():
                assert delta.finish_reason in (None, "length", "stop"), delta.error
                tokens[int(delta.request_id)] += delta.token_ids
        engine.close()
        return tokens

    everything = served(1 << 40)
    assert selected == 0
    assert served(1) == everything
    assert selected > 3
