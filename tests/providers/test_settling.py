"""Huge pages of weights that are made after the start. Nothing is timed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import ProviderError
from onnxport.providers.cpu import settling
from onnxport.providers.ort_model import OrtModel


class Model:
    """One that counts its steps."""

    progress = 0


class Library:
    """Small pages, and what is done whenever one becomes a huge one."""

    def __init__(self, pages: int, then: Callable[[], None] = lambda: None) -> None:
        self.left = pages
        self._then = then

    def onnxport_cpu_unsettled_pages(self) -> int:
        return self.left

    def onnxport_cpu_settle(self) -> int:
        self.left -= 1
        self._then()
        return self.left


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("START_S", "BUSY_S", "IDLE_S"):
        monkeypatch.setattr(settling, name, 0.0)


def start(model: Any, library: Library, monkeypatch: pytest.MonkeyPatch) -> threading.Thread | None:
    monkeypatch.setattr(settling, "load_library", lambda path: library)
    return settling.settle_later(model, Path("library"))


def test_nothing_is_started_where_nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(Model(), Library(0), monkeypatch) is None


@pytest.mark.parametrize("steps", [0, 1, 2])  # that begin or end at each page
def test_all_become_huge_whatever_the_model_does(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()

    def step() -> None:
        model.progress += steps

    library = Library(7, step)
    thread = start(model, library, monkeypatch)
    assert thread is not None
    assert thread.daemon
    thread.join(60)
    assert library.left == 0


def test_while_steps_run_each_page_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[str] = []

    class Pause(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            turns.append("pause")
            return False

    model = Model()

    def step() -> None:
        turns.append("page")
        model.progress += 2 if len(turns) < 8 else 0

    monkeypatch.setattr(settling.threading, "Event", Pause)
    library = Library(6, step)
    # Not a thread: `Event` is also what a thread begins with.
    monkeypatch.setattr(settling, "load_library", lambda path: library)
    settling._settle(settling.weakref.ref(model), library)
    text = " ".join(turns)
    assert text.startswith("pause pause page pause page pause"), text
    assert text.endswith("page page page"), text
    assert turns.count("page") == 6


def test_it_ends_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Model()]
    library = Library(1_000_000, models.clear)
    model, thread = models[0], None
    thread = start(model, library, monkeypatch)
    del model
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()
    assert library.left > 0


def test_it_ends_when_the_model_goes_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Model()]

    class Pause(threading.Event):
        waited = 0

        def wait(self, timeout: float | None = None) -> bool:
            Pause.waited += 1
            if Pause.waited == 2:  # after the start's own
                models.clear()
            return False

    monkeypatch.setattr(settling.threading, "Event", Pause)
    library = Library(3)
    reference: Any = settling.weakref.ref(models[0])
    settling._settle(reference, library)
    assert Pause.waited == 2
    assert library.left == 3


def test_progress_is_odd_while_a_step_runs() -> None:
    seen: list[int] = []

    class Failing(OrtModel):
        def __init__(self) -> None:
            self._session: Any = object()
            self._adapters: Any = object()
            self._replay = None
            self._buckets = None
            self._device = "none"
            self._progress = 0

        def _compute(self, inputs: Any, query_tile: int = 1) -> Any:
            seen.append(self.progress)
            raise ProviderError("as was to be shown")

    class Inputs:
        input_ids = block_table = np.zeros(1)

    model = Failing()
    for _ in range(2):
        with pytest.raises(ProviderError, match="shown"):
            model.run(Inputs())  # type: ignore[arg-type]
    assert seen == [1, 3]
    assert model.progress == 4
