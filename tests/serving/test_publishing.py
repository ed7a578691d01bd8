"""What a step adds is made text, and sent, while the next one runs; in order, whatever fails."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.providers.base import StepInputs
from onnxport.providers.null import NullModel
from onnxport.serving.detokenizer import ByteDetokenizer
from onnxport.serving.engine import Engine
from onnxport.serving.growth import Growth
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import SamplingParams
from onnxport.serving.publisher import MOST_STEPS, Publisher
from onnxport.serving.tokenizer import Tokenizer
from onnxport.serving.worker import AsyncEngine
from tests.serving.helpers import checked_step, null_engine, run, submit, text, tokens
from tests.serving.tokenizers_for_tests import byte_level
from tests.waiting import PATIENCE_S

TOKENIZER = Tokenizer(byte_level(), frozenset({0}))
LONG = SamplingParams(temperature=0.0, max_tokens=30, logprobs=2, ignore_eos=True)


def words_engine() -> Engine:
    return null_engine(vocab_size=TOKENIZER.vocab_size, tokenizer=TOKENIZER)


def growth(name: str) -> Growth:
    return Growth(name, 0, 0)


async def collect(worker: AsyncEngine, prompt: str, params: SamplingParams = LONG) -> str:
    return text([delta async for delta in worker.stream(prompt, params)])


def test_deltas_may_be_made_when_all_is_over() -> None:
    at_once, later = words_engine(), words_engine()
    for engine in (at_once, later):
        submit(engine, "a", "the sea", LONG)
        submit(engine, "b", "naïve café", SamplingParams(max_tokens=20, seed=3, prompt_logprobs=1))
    growths: list[Growth] = []
    while later.has_work:
        growths += later.advance()
    expected = run(at_once)
    for name in ("a", "b"):
        found = [one for one in later.deltas(growths) if one.request_id == name]
        assert found == expected[name]
        growths = [one for one in growths if one.request_id != name]


async def test_text_is_made_beside_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step's text is made only when the next run has begun, which waits for it to be made."""
    began, made = threading.Event(), threading.Event()
    plain, deltas = NullModel.run, Engine.deltas
    num_runs = 0

    def second(self: NullModel, inputs: StepInputs) -> NDArray[np.float32]:
        nonlocal num_runs
        num_runs += 1
        if num_runs == 2:
            began.set()
            assert made.wait(PATIENCE_S)
        return plain(self, inputs)

    def make(self: Engine, growths: Iterable[Growth]) -> list[CompletionDelta]:
        assert began.wait(PATIENCE_S)
        result = deltas(self, growths)
        made.set()
        return result

    monkeypatch.setattr(NullModel, "run", second)
    monkeypatch.setattr(Engine, "deltas", make)
    async with AsyncEngine(words_engine()) as worker:
        found = await collect(worker, "the sea")
    assert made.is_set()
    monkeypatch.undo()
    engine = words_engine()
    submit(engine, "a", "the sea", LONG)
    assert found == text(run(engine)["a"])


def test_steps_are_published_in_order() -> None:
    published: list[str] = []
    publisher = Publisher(lambda growths: published.extend(one.request_id for one in growths))
    for number in range(50):
        publisher.put([growth(str(number)), growth("-")] if number % 3 else [])
    publisher.flush()
    assert published == [name for n in range(50) if n % 3 for name in (str(n), "-")]
    publisher.put([growth("last")])
    publisher.close()
    assert published[-1] == "last"
    publisher.close()


def test_the_engine_waits_for_those_that_are_late() -> None:
    go, published = threading.Event(), 0

    def publish(growths: list[Growth]) -> None:
        nonlocal published
        assert go.wait(PATIENCE_S)
        published += 1

    publisher = Publisher(publish)
    for _ in range(1 + MOST_STEPS):  # one in hand
        publisher.put([growth("a")])
    waiting = threading.Thread(target=publisher.put, args=([growth("b")],))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    go.set()
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    publisher.close()
    assert published == 2 + MOST_STEPS


def test_what_publishing_raises_reaches_the_engine() -> None:
    published: list[str] = []

    def publish(growths: list[Growth]) -> None:
        if growths[0].request_id == "bad":
            raise LookupError("lost")
        published.append(growths[0].request_id)

    publisher = Publisher(publish)
    publisher.put([growth("good")])
    publisher.put([growth("bad")])
    with pytest.raises(LookupError, match="lost"):
        publisher.flush()
    with pytest.raises(LookupError, match="lost"):
        publisher.put([growth("good")])
    publisher.close()
    assert published == ["good"]


async def test_a_bug_in_publishing_ends_every_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(self: Engine, growths: Iterable[Growth]) -> list[CompletionDelta]:
        raise LookupError("lost")

    monkeypatch.setattr(Engine, "deltas", bug)
    worker = AsyncEngine(null_engine())
    async with asyncio.timeout(PATIENCE_S):
        deltas = [delta async for delta in worker.stream([1], LONG)]
    assert [delta.finish_reason for delta in deltas] == ["error"]
    assert "LookupError: lost" in str(deltas[0].error)
    assert not worker.healthy
    await worker.close()


def broken_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the text of the first request fail at its token number `count`, from 0."""
    plain = ByteDetokenizer.add
    seen = 0

    def add(self: ByteDetokenizer, token_id: int) -> str:
        nonlocal seen
        seen += 1
        if seen == count + 1:
            raise LookupError("no such byte")
        return plain(self, token_id)

    monkeypatch.setattr(ByteDetokenizer, "add", add)


@pytest.mark.parametrize("stop", [(), ("never",)], ids=["text later", "text at once"])
@pytest.mark.parametrize("count", [0, 5, 29])
def test_a_sequence_whose_text_fails_ends_alone(
    stop: tuple[str, ...], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = words_engine()
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=stop)
    submit(engine, "a", "the sea", params)
    deltas = checked_step(engine) if count else []
    broken_after(count - bool(count), monkeypatch)
    while engine.has_work and not any(one.finish_reason for one in deltas):
        deltas += checked_step(engine)
    last = deltas[-1]
    assert last.finish_reason == "error"
    assert last.failure is not None
    assert "LookupError: no such byte" in last.failure.message
    assert [one.finish_reason for one in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert len(tokens(deltas)) in (count, count + 1)
    assert not engine.has_work
    monkeypatch.undo()
    submit(engine, "b", "the sea", params)
    assert run(engine)["b"][-1].finish_reason == "length"
    engine.check()
