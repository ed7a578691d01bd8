"""What is made after the start, one piece after the other. Nothing is timed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from onnxport.errors import ProviderError
from onnxport.providers.cpu import settling
from onnxport.providers.cpu.cache_pages import CachePages
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


NO_CACHES = CachePages([], 0)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("START_S", "BUSY_TIMES", "IDLE_S", "CHECK_S"):
        monkeypatch.setattr(settling, name, 0.0)
    monkeypatch.setattr(settling, "_models", weakref.WeakSet())  # without those of other tests


def start(model: Any, library: Library, monkeypatch: pytest.MonkeyPatch) -> threading.Thread | None:
    monkeypatch.setattr(settling, "load_library", lambda path: library)
    return settling.settle_later(model, Path("library"), [NO_CACHES])


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


class Pauses:
    """Pauses in place of a thread's, which take no time; `then` is what happens in each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
        """Names tell them apart, as long as one after a page takes 0 seconds."""
        self.turns: list[str] = []
        names = {0.0: "rest"}
        for seconds, name in enumerate(("START_S", "IDLE_S", "CHECK_S"), 1):
            monkeypatch.setattr(settling, name, float(seconds))
            names[float(seconds)] = name.removesuffix("_S").lower()

        class Pause(threading.Event):
            def wait(_, timeout: float | None = None) -> bool:  # noqa: N805
                assert timeout is not None
                self.turns.append(names[timeout])
                then()
                return False

        monkeypatch.setattr(settling.threading, "Event", Pause)

    def settle(self, model: Any, *kinds: Any) -> str:
        """What happened. Not in a thread: `Event` is also what a thread begins with."""
        settling._settle(settling.weakref.ref(model), kinds)
        return " ".join(self.turns)


def test_while_steps_run_each_page_waits_for_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()

    def step() -> None:
        model.progress += 2 if pauses.turns.count("page") < 3 else 0

    pauses = Pauses(monkeypatch, step)
    library = Library(6, lambda: pauses.turns.append("page"))
    text = pauses.settle(model, settling.WeightPages(library), NO_CACHES)  # type: ignore[arg-type]
    assert text == "start " + 3 * "idle page rest " + "idle page page page check"


def test_what_is_done_while_nothing_runs_waits_for_other_models_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They share the processor."""
    model, other = Model(), Model()
    assert start(other, Library(0), monkeypatch) is None

    def step() -> None:
        other.progress += 2 if pauses.turns.count("page") < 3 else 0

    pauses = Pauses(monkeypatch, step)
    library = Library(6, lambda: pauses.turns.append("page"))
    text = pauses.settle(model, settling.WeightPages(library), NO_CACHES)  # type: ignore[arg-type]
    assert text == "start " + 3 * "idle page rest " + "idle page page page check"


def test_one_long_step_counts_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    model.progress = 7
    pauses = Pauses(monkeypatch, lambda: None)
    library = Library(3, lambda: pauses.turns.append("page"))
    text = pauses.settle(model, settling.WeightPages(library))  # type: ignore[arg-type]
    assert text == "start" + 3 * " idle page rest"


def test_the_rest_is_many_times_what_a_page_took(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []

    class Pause(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            rests.append(timeout or 0.0)
            return False

    model = Model()
    model.progress = 1
    times = iter([10.0, 10.25, 20.0, 20.5])
    monkeypatch.setattr(settling.threading, "Event", Pause)
    monkeypatch.setattr(settling.time, "perf_counter", lambda: next(times))
    monkeypatch.setattr(settling, "BUSY_TIMES", 8)
    settling._settle(settling.weakref.ref(model), (settling.WeightPages(Library(2)),))  # type: ignore[arg-type]
    assert rests == [0, 0, 2.0, 0, 4.0]


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
    settling._settle(reference, (settling.WeightPages(library), NO_CACHES))  # type: ignore[arg-type]
    assert Pause.waited == 2
    assert library.left == 3


class Filling:
    """Pages of which some are worth it once the model has done so many steps."""

    waits = False

    def __init__(self, model: Model, needed: list[int]) -> None:
        self._model = model
        self.needed = needed
        self.looks = 0

    def __len__(self) -> int:
        return len(self.needed)

    def settle(self) -> bool:
        self.looks += 1
        if self._model.progress < self.needed[0]:
            return False
        del self.needed[0]
        return True


def test_pages_that_are_not_worth_it_yet_are_looked_at_again_after_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model()
    caches = Filling(model, [4, 4, 4, 6])

    def step() -> None:
        if pauses.turns[-4:] == ["idle", "check"] * 2:
            model.progress += 2
            pauses.turns.append("step")

    pauses = Pauses(monkeypatch, step)
    pauses.settle(model, caches)
    assert not caches.needed
    # At the start and after each of three steps, not again without one.
    assert pauses.turns.count("step") == 3
    assert caches.looks == 4 + 3


class Planes(Library):
    """Planes in so many parts, none of which is made before the model has done some steps."""

    def __init__(self, model: Model, parts: int, begin: int = 0) -> None:
        super().__init__(0)
        self.parts = parts
        self.made_at: list[int] = []
        self._model = model
        self._begin = begin

    def onnxport_cpu_plane_parts_left(self) -> int:
        return self.parts if self._model.progress >= self._begin else -1

    def onnxport_cpu_make_plane_part(self) -> int:
        if self._model.progress < self._begin or not self.parts:
            return 0
        self.made_at.append(self._model.progress)
        self.parts -= 1
        return 1


def test_planes_are_made_while_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before a step has begun one, nor while steps run."""
    model = Model()
    library = Planes(model, 5, begin=2)

    def step() -> None:
        model.progress += 1 if model.progress < 9 else 0
        if model.progress == 9 and len(pauses.turns) > 30:
            model.progress = 10

    pauses = Pauses(monkeypatch, step)
    pauses.settle(model, settling.WeightPages(library), settling.Planes(library))  # type: ignore[arg-type]
    assert library.made_at == [10] * 5


def test_only_a_model_that_needs_planes_has_a_thread_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Model()
    library = Planes(model, 3)
    assert start(model, library, monkeypatch) is None
    thread = settling.settle_later(model, Path("library"), [NO_CACHES], has_planes=True)  # type: ignore[arg-type]
    assert thread is not None
    thread.join(60)
    assert library.parts == 0
    assert settling.settle_later(model, Path("library"), [NO_CACHES], has_planes=True) is None  # type: ignore[arg-type]


def test_nothing_is_looked_at_while_it_lasts_once_caches_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model that was closed may live on."""
    model = Model()
    caches = Filling(model, [2])
    pauses = Pauses(monkeypatch, lambda: None)
    monkeypatch.setattr(
        Filling, "__len__", lambda self: len(self.needed) if len(pauses.turns) < 9 else 0
    )
    assert pauses.settle(model, caches) == "start" + 4 * " idle check"
    assert caches.looks == 1


def test_progress_is_odd_while_a_step_runs() -> None:
    seen: list[int] = []

    class Failing(OrtModel):
        def __init__(self) -> None:
            self._session: Any = object()
            self._adapters: Any = object()
            self._replay = None
            self._buckets = None
            self._step_memory = None
            self._device = "none"
            self._most_row_tokens = None
            self._capabilities: Any = SimpleNamespace(state_slots=0)
            self._progress = 0

        def _compute(self, inputs: Any, query_tile: int = 1) -> Any:
            seen.append(self.progress)
            raise ProviderError("as was to be shown")

    class Inputs:
        input_ids = block_table = np.zeros(1)
        state_reads = state_writes = None

    model = Failing()
    for _ in range(2):
        with pytest.raises(ProviderError, match="shown"):
            model.run(Inputs())  # type: ignore[arg-type]
    assert seen == [1, 3]
    assert model.progress == 4
