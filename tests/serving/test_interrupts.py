"""Ctrl-C in offline inference: the engine is whole afterwards."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from onnxport.serving.interrupts import Interrupts
from onnxport.serving.llm import LLM
from onnxport.serving.params import SamplingParams
from tests.serving.helpers import null_engine


def test_a_signal_waits_for_the_next_check() -> None:
    seen = []

    def work() -> None:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            seen.append("still here")
            interrupts.check()
            seen.append("not here")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["still here"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_signal_does_not_wait() -> None:
    def work() -> None:
        with Interrupts():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("it came through")

    with pytest.raises(KeyboardInterrupt):
        work()


def test_a_signal_at_the_end_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGINT)


def test_an_error_goes_before_a_signal() -> None:
    def work() -> None:
        with Interrupts():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        work()


def test_other_threads_are_left_alone() -> None:
    found = []

    def run() -> None:
        with Interrupts() as interrupts:
            interrupts.check()
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_a_handler_of_the_callers_is_called() -> None:
    calls = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: calls.append(number))
    try:
        with Interrupts() as interrupts:
            signal.raise_signal(signal.SIGINT)
            assert calls == []
            interrupts.check()
    finally:
        signal.signal(signal.SIGINT, previous)
    assert calls == [signal.SIGINT]


@pytest.mark.parametrize("place", ["submit", "step"])
def test_an_interrupted_generation_leaves_an_engine_that_works(
    monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    engine = null_engine()
    llm = LLM.from_engine(engine)
    params = SamplingParams(temperature=0, max_tokens=8)
    prompts = [[1, 2, 3], [4, 5]]

    def generate() -> list[tuple[int, ...]]:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(given, params, use_tqdm=False)  # type: ignore[arg-type]
        return [one.outputs[0].token_ids for one in outputs]

    expected = generate()
    real, calls = getattr(engine, place), []

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(engine, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate()
    assert len(calls) == 2
    assert not engine.has_work
    engine.check()
    assert generate() == expected
