"""What `auto` chooses, and what it says about the others."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.errors import CapacityError, DeviceLostError, OnnxportError, ProviderError
from onnxport.graphs.experts_spec import ExpertsSpec
from onnxport.graphs.tensors import WEIGHTS_FILE
from onnxport.providers import registry
from onnxport.providers.base import Device, DeviceKind, LoadOptions, Probe, StepInputs
from onnxport.providers.features import Features
from onnxport.providers.null import NullModel, NullOptions
from onnxport.providers.selection import choose
from tests.providers.conftest import ArtifactMaker

WEIGHTS = SimpleNamespace(size=1 << 20)


class Manifest(SimpleNamespace):
    @property
    def weight_bytes(self) -> int:
        return sum(each.size for each in self.files.values())


def artifact(experts: ExpertsSpec | None, hidden_act: str = "silu") -> Any:
    model = SimpleNamespace(experts=experts, hidden_act=hidden_act)
    files = {WEIGHTS_FILE: WEIGHTS}
    manifest = Manifest(fingerprint="f" * 64, files=files, model=model)
    return SimpleNamespace(path=Path("model"), manifest=manifest)


ARTIFACT = artifact(None)
FEATURES = Features(("native",), ("float32",), ("float32",))


class Machine:
    """A clock that only runs of models move, and how many of them are in memory."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_open = self.most_open = 0

    def clock(self) -> float:
        return self.now_s


class TimedModel(NullModel):
    def __init__(self, machine: Machine, run_s: float, options: NullOptions) -> None:
        super().__init__(options)
        self._machine, self._run_s = machine, run_s
        machine.num_open += 1
        machine.most_open = max(machine.most_open, machine.num_open)

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        self._machine.now_s += self._run_s
        return super().run(inputs)

    def close(self) -> None:
        self._machine.num_open -= not self.closed
        super().close()


@dataclass
class FakeProvider:
    machine: Machine
    run_s: float = 0.01
    kind: DeviceKind = "cpu"
    features: Features | None = FEATURES
    missing: str = ""
    error: OnnxportError | None = None  # of load
    options: NullOptions = field(default_factory=NullOptions)
    loaded: list[TimedModel] = field(default_factory=list)
    name: str = "fake"

    def probe(self) -> Probe:
        device = Device("a device", 1 << 30, self.kind)
        return Probe(not self.missing, self.missing, (device,), {"fake": "1"}, (), self.features)

    def load(self, artifact: object, options: LoadOptions) -> TimedModel:
        if self.error is not None:
            raise self.error
        self.loaded.append(TimedModel(self.machine, self.run_s, self.options))
        return self.loaded[-1]


Maker = Callable[..., FakeProvider]


@pytest.fixture
def machine(caplog: pytest.LogCaptureFixture) -> Machine:
    caplog.set_level(logging.INFO)
    return Machine()


@pytest.fixture
def fake(machine: Machine) -> Maker:
    return lambda **fields: FakeProvider(machine, **fields)


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """What was logged since the last call."""

    def take() -> str:
        text = "\n".join(record.getMessage() for record in caplog.records)
        caplog.clear()
        return text

    return take


def pick(
    machine: Machine, providers: dict[str, FakeProvider], trials: Path | None = None, **options: Any
) -> str:
    """The name of the one that is chosen; its model alone is in memory."""
    model = choose(ARTIFACT, providers, LoadOptions(**options), trials, machine.clock)
    assert machine.num_open == machine.most_open == 1
    (name,) = [name for name, each in providers.items() if model in each.loaded]
    model.close()
    return name


def test_without_a_trial_the_first_that_loads_is_taken(
    machine: Machine, fake: Maker, said: Callable[[], str]
) -> None:
    providers = {
        "a": fake(missing="no driver"),
        "b": fake(error=CapacityError("too large")),
        "c": fake(run_s=9.0),
        "d": fake(),
    }
    assert pick(machine, providers) == "c"
    assert providers["c"].loaded[0].num_runs == 0
    assert not providers["d"].loaded
    text = said()
    assert "provider a was not chosen: it is not available: no driver" in text
    assert "provider b was not chosen: too large" in text
    assert "provider c was chosen for model" in text


def test_real_gpus_come_before_processors_and_gpus_in_software(
    machine: Machine, fake: Maker
) -> None:
    providers = {
        "cpu": fake(),
        "other": fake(),
        "gpu": fake(kind="gpu"),
        "npu": fake(kind="npu"),
        "software": fake(kind="cpu"),
    }
    found = []
    while providers:
        found.append(pick(machine, providers))
        del providers[found[-1]]
    assert found == ["gpu", "npu", "cpu", "other", "software"]


@pytest.mark.parametrize(
    "options",
    [{"attention": "custom"}, {"dtype": "float16"}, {"kv_cache_dtype": "int8"}],
)
def test_who_lacks_what_is_asked_for_is_not_loaded(
    machine: Machine, fake: Maker, said: Callable[[], str], options: dict[str, Any]
) -> None:
    able = Features(("native", "custom"), ("float32", "float16"), ("float32", "int8"))
    providers = {"a": fake(), "b": fake(features=able), "c": fake(features=None)}
    assert pick(machine, providers, **options) == "b"
    assert not providers["a"].loaded
    ((name, value),) = options.items()
    assert f"provider a was not chosen: {name} is '{value}', but it has " in said()


@pytest.mark.parametrize("hidden_act", ["silu", "gelu_tanh"])
def test_of_those_on_a_processor_one_with_experts_is_taken(
    machine: Machine, fake: Maker, said: Callable[[], str], tmp_path: Path, hidden_act: str
) -> None:
    """By the gate that they have."""
    silu = replace(FEATURES, has_experts=True)
    able = silu if hidden_act == "silu" else replace(silu, has_other_experts=True)
    providers = {
        "a": fake(features=FEATURES if hidden_act == "silu" else silu),
        "cpu": fake(features=able, run_s=0.5),
        "c": fake(features=None),
        "gpu": fake(kind="gpu", run_s=2.0),
    }
    spec = ExpertsSpec(count=8, per_token=2, size=48, normalized=True)
    mixed = artifact(spec, hidden_act)
    model = choose(mixed, providers, LoadOptions(), tmp_path, machine.clock)
    assert model in providers["cpu"].loaded
    assert providers["gpu"].loaded, "it is tried all the same"
    assert not providers["a"].loaded
    assert not providers["c"].loaded
    model.close()
    text = said()
    for name in ("a", "c"):
        assert f"provider {name} was not chosen: it computes all experts for each token" in text
    del providers["cpu"]  # then they are what there is
    choose(mixed, providers, LoadOptions(), None, machine.clock).close()
    del providers["gpu"]
    choose(mixed, providers, LoadOptions(), None, machine.clock).close()
    assert providers["a"].loaded


def test_all_reasons_are_reported(machine: Machine, fake: Maker, tmp_path: Path) -> None:
    providers = {
        "a": fake(missing="no driver"),
        "b": fake(error=ProviderError("no such type")),
        "c": fake(error=ProviderError("too new")),
    }
    for trials in (None, tmp_path):
        with pytest.raises(ProviderError, match="no driver; b: no such type; c: too") as caught:
            pick(machine, providers, trials)
        assert isinstance(caught.value.__cause__, ExceptionGroup)
        assert len(caught.value.__cause__.exceptions) == 3
    providers["b"].error = CapacityError("too large")
    with pytest.raises(CapacityError, match="too large"):
        pick(machine, providers)


def test_a_trial_finds_the_fastest(
    machine: Machine, fake: Maker, said: Callable[[], str], tmp_path: Path
) -> None:
    providers = {"a": fake(run_s=0.03), "b": fake(run_s=0.01), "c": fake(run_s=0.02)}
    assert pick(machine, providers, tmp_path) == "b"
    text = said()
    assert "provider a was not chosen: its trial took 4.05 s" in text
    assert "provider b was chosen for model, its trial took 1.35 s" in text
    assert "provider c was not chosen: its trial took" in text


def test_a_trial_that_takes_long_is_announced(
    machine: Machine,
    fake: Maker,
    said: Callable[[], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    providers = {"a": fake(run_s=0.02), "b": fake(run_s=0.01)}
    for size, is_long in ((1 << 20, False), (1 << 30, True)):
        monkeypatch.setattr(WEIGHTS, "size", size)
        pick(machine, providers, tmp_path / str(size))
        assert ("model is tried on a and b, once" in said()) is is_long
        pick(machine, providers, tmp_path / str(size))
        assert "is tried on" not in said()


def test_the_last_one_tried_is_kept_if_it_is_the_fastest(
    machine: Machine, fake: Maker, tmp_path: Path
) -> None:
    providers = {"a": fake(run_s=0.02), "b": fake(run_s=0.01)}
    assert pick(machine, providers, tmp_path) == "b"
    assert len(providers["b"].loaded) == 1


def test_a_trial_is_made_once(
    machine: Machine, fake: Maker, said: Callable[[], str], tmp_path: Path
) -> None:
    providers = {"a": fake(run_s=0.02), "b": fake(run_s=0.01)}
    assert pick(machine, providers, tmp_path) == "b"
    said()
    before_s = machine.now_s
    assert pick(machine, providers, tmp_path) == "b"
    assert machine.now_s == before_s
    assert [len(each.loaded) for each in providers.values()] == [1, 2]
    assert "provider b was chosen for model, its trial took 1.35 s" in said()
    assert pick(machine, providers, tmp_path, threads=1) == "b"  # other options, another trial
    assert machine.now_s > before_s
    (tmp_path / next(tmp_path.glob("*.json")).name).write_text("damaged")
    assert pick(machine, providers, tmp_path) == "b"


def test_who_could_not_load_is_asked_again_and_only_he_is_measured(
    machine: Machine, fake: Maker, tmp_path: Path
) -> None:
    providers = {
        "gpu": fake(run_s=0.001, kind="gpu", error=CapacityError("full")),
        "a": fake(run_s=0.02),
        "b": fake(run_s=0.03),
    }
    assert pick(machine, providers, tmp_path) == "a"
    assert pick(machine, providers, tmp_path) == "a"
    assert [len(providers[name].loaded) for name in "ab"] == [3, 1]
    providers["gpu"].error = None
    assert pick(machine, providers, tmp_path) == "gpu"
    assert [len(each.loaded) for each in providers.values()] == [1, 3, 1]


def test_the_fastest_may_not_load_any_more(
    machine: Machine, fake: Maker, said: Callable[[], str], tmp_path: Path
) -> None:
    providers = {"a": fake(run_s=0.01), "b": fake(run_s=0.02)}
    pick(machine, providers, tmp_path)
    providers["a"].error = CapacityError("full")
    said()
    assert pick(machine, providers, tmp_path) == "b"
    assert "provider a was not chosen: full" in said()


def test_who_fails_in_its_trial_is_refused(
    machine: Machine, fake: Maker, said: Callable[[], str], tmp_path: Path
) -> None:
    broken = NullOptions(fails=lambda run: run == 3)
    providers = {"a": fake(run_s=0.001, options=broken), "b": fake()}
    assert pick(machine, providers, tmp_path) == "b"
    assert "provider a was not chosen: its trial failed: run 3 was told to fail" in said()
    assert [model.closed for model in providers["a"].loaded] == [True]
    only = {"a": providers["a"], "c": fake(error=DeviceLostError("gone"))}
    with pytest.raises(ProviderError, match=r"a: its trial failed: .*; c: gone"):
        pick(machine, only, tmp_path)


def test_an_interrupted_trial_leaves_no_model(
    machine: Machine, fake: Maker, tmp_path: Path
) -> None:
    def interrupt(run: int) -> bool:
        raise KeyboardInterrupt

    providers = {"a": fake(run_s=0.01), "b": fake(options=NullOptions(fails=interrupt))}
    with pytest.raises(KeyboardInterrupt):
        pick(machine, providers, tmp_path)
    assert machine.num_open == 0
    providers["b"].options = NullOptions()
    assert pick(machine, providers, tmp_path) in providers
    assert len(providers["a"].loaded) <= 2  # what was measured before is kept


def test_one_provider_needs_no_trial(machine: Machine, fake: Maker, tmp_path: Path) -> None:
    providers = {"a": fake(), "b": fake(missing="no driver")}
    assert pick(machine, providers, tmp_path) == "a"
    assert machine.now_s == 0.0
    assert not list(tmp_path.iterdir())


def test_a_slow_one_is_given_up_early(machine: Machine, fake: Maker, tmp_path: Path) -> None:
    providers = {"a": fake(run_s=0.01), "software": fake(run_s=5.0)}
    assert pick(machine, providers, tmp_path) == "a"
    assert machine.now_s < 0.01 * 100 + 5.0 * 4


def test_real_providers(
    tiny_artifact: ArtifactMaker, said: Callable[[], str], machine: Machine, tmp_path: Path
) -> None:
    available = [name for name, probe in registry.probe_all() if probe.available]
    if len(available) < 2:
        pytest.skip("a trial needs two providers")
    chosen = []
    for _ in range(2):
        options = LoadOptions(kv_cache_tokens=2048)
        model = registry.open_model(tiny_artifact("llama", "int4"), "auto", options, tmp_path)
        chosen.append(model.capabilities.provider)
        assert model.capabilities.num_blocks * model.capabilities.block_size == 2048
        model.close()
        text = said()
        assert f"provider {chosen[-1]} was chosen" in text
        for name in available:
            assert f"provider {name} was" in text
    assert chosen[0] == chosen[1]
    assert "was tried" not in text
    (path,) = tmp_path.glob("*.json")
    assert all(f'"{name}": {{' in path.read_text() for name in available)


@dataclass
class FailingLate(FakeProvider):
    """It fails with a large model in its hands."""

    held: list[weakref.ref[Machine]] = field(default_factory=list)

    def load(self, artifact: object, options: LoadOptions) -> TimedModel:
        large = Machine()
        self.held.append(weakref.ref(large))
        try:
            raise RuntimeError("of the device's library")
        except RuntimeError as error:
            raise CapacityError("the cache does not fit") from error


def test_what_failed_to_load_is_not_in_memory(machine: Machine, fake: Maker) -> None:
    first = FailingLate(machine)

    class Second(FakeProvider):
        def load(self, artifact: object, options: LoadOptions) -> TimedModel:
            assert [one() for one in first.held] == [None]
            return super().load(artifact, options)

    assert pick(machine, {"a": first, "b": Second(machine)}) == "b"
