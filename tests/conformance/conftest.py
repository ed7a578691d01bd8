"""Which lanes run, and on which artifacts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from onnxport.providers import registry
from onnxport.providers.base import Model
from tests.conformance.lanes import Found, Lane, all_lanes
from tests.conformance.make import CASES, ONCE, SOFTWARE, artifact_path, make_artifact
from tests.conformance.models import Slotted
from tests.conformance.reference import Reference
from tests.conformance.rules import Rule, rule_of, with_experts

# The rest is left out of `make fast`.
FAST = {("mistral-window", "fp32"), ("qwen3", "int4")}
FAST_ONCE = ("cpu-custom", "glm", "int4")
WHOLE_EMULATION = registry.EMULATED[0]  # the others, lowered likewise, run a part of it


@dataclass(frozen=True, slots=True)
class Combination:
    """A lane and the artifact that it runs."""

    lane: Lane
    family: str
    precision: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """A combination that runs."""

    lane: Lane
    path: Path
    model: Model
    rule: Rule
    reference: Reference


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("conformance")
    group.addoption(
        "--lane",
        action="append",
        metavar="NAME",
        help="run this lane of tests/conformance only, and fail if it is missing; repeatable",
    )
    group.addoption(
        "--artifacts",
        type=Path,
        metavar="DIR",
        help="artifacts that `python -m tests.conformance.make DIR` made, where there is no "
        "PyTorch to make them",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse a lane that there is not, or that this machine cannot run."""
    for lane in chosen_lanes(config):
        # The option is known when pytest was started on this folder, else None.
        if config.getoption("--lane", None) and (reason := look(lane.name).missing):
            raise pytest.UsageError(f"lane {lane.name} cannot run here: {reason}")


def chosen_lanes(config: pytest.Config) -> list[Lane]:
    lanes = {lane.name: lane for lane in all_lanes()}
    names: list[str] = config.getoption("--lane", None) or list(lanes)
    for name in names:
        if name not in lanes:
            raise pytest.UsageError(f"there is no lane {name!r}; there are {', '.join(lanes)}")
    return [lanes[name] for name in names]


@cache
def look(name: str) -> Found:
    """What this machine has for a lane; looked for once."""
    return next(lane.look() for lane in all_lanes() if lane.name == name)


def combinations(lane: Lane) -> Iterator[Combination]:
    """What a lane runs: all cases in its precisions, or a part where software is the device."""
    found = look(lane.name)
    if found.missing:
        return
    is_copy = lane.emulated and lane.provider != WHOLE_EMULATION
    for family, precision in CASES:
        pair = (family, precision)
        if precision not in lane.precisions or family in lane.refused:
            continue
        if is_copy and pair in ONCE:
            continue
        if not found.is_software or pair in SOFTWARE:
            yield Combination(lane, family, precision)


def left_out(lane: Lane) -> Iterator[Combination]:
    """Families of which software that plays a device runs one sequence: all takes too long."""
    found = look(lane.name)
    if found.is_software and not found.missing:
        for family, precision in ONCE:
            if (family, precision) not in SOFTWARE and family not in lane.refused:
                yield Combination(lane, family, precision)


def is_fast(one: Combination) -> bool:
    """Whether `make fast` runs it: of most emulated providers, only int4 as they choose."""
    lane = one.lane
    if (lane.name, one.family, one.precision) == FAST_ONCE:
        return True
    if (one.family, one.precision) not in FAST:
        return False
    if not lane.emulated or lane.provider == WHOLE_EMULATION:
        return True
    return one.precision == "int4" and "dtype" not in lane.options


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Cross the lanes that are here with families and precisions."""
    lanes = chosen_lanes(metafunc.config)
    if "lane" in metafunc.fixturenames:
        metafunc.parametrize("lane", lanes, ids=lambda lane: lane.name)
    if "loaded" in metafunc.fixturenames:
        params = []
        for one in (one for lane in lanes for one in combinations(lane)):
            slow = [] if is_fast(one) else [pytest.mark.slow]
            name = f"{one.lane.name}-{one.family}-{one.precision}"
            params.append(pytest.param(one, marks=slow, id=name))
        metafunc.parametrize("loaded", params, indirect=True, scope="session")
    if "glimpsed" in metafunc.fixturenames:
        params = [
            pytest.param(one, id=f"{one.lane.name}-{one.family}-{one.precision}")
            for one in (one for lane in lanes for one in left_out(lane))
        ]
        metafunc.parametrize("glimpsed", params, indirect=True)


@pytest.fixture(scope="session")
def artifact(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Path]:
    """Returns `find(family, precision) -> artifact folder`."""
    folder: Path | None = request.config.getoption("--artifacts", None)
    if folder is None:
        temporary = tmp_path_factory.mktemp("conformance")
        return lambda family, precision: make_artifact(temporary, family, precision)
    return lambda family, precision: artifact_path(folder, family, precision)


@pytest.fixture(scope="session")
def reference(artifact: Callable[[str, str], Path]) -> Callable[[str, str], Reference]:
    """Returns `find(family, precision) -> reference`, which all lanes share."""
    return cache(lambda family, precision: Reference(artifact(family, precision)))


@pytest.fixture(scope="session")
def loaded(
    request: pytest.FixtureRequest,
    artifact: Callable[[str, str], Path],
    reference: Callable[[str, str], Reference],
) -> Iterator[Loaded]:
    """One combination at a time, loaded once for all tests."""
    with _load(request.param, artifact, reference) as found:
        yield found


@pytest.fixture
def movable(loaded: Loaded) -> Loaded:
    """One whose blocks can be read and written."""
    if not loaded.model.capabilities.moves_blocks:
        pytest.skip("caches of several shapes have no canonical form")
    return loaded


@pytest.fixture
def glimpsed(
    request: pytest.FixtureRequest,
    artifact: Callable[[str, str], Path],
    reference: Callable[[str, str], Reference],
) -> Iterator[Loaded]:
    """One of those that are left out."""
    with _load(request.param, artifact, reference) as found:
        yield found


@contextmanager
def _load(
    one: Combination,
    artifact: Callable[[str, str], Path],
    reference: Callable[[str, str], Reference],
) -> Iterator[Loaded]:
    path = artifact(one.family, one.precision)
    model = one.lane.open(path)
    if model.capabilities.state_slots:
        model = Slotted(model)
    rule = one.lane.rule or rule_of(model.capabilities)
    wanted = reference(one.family, one.precision)
    if wanted.spec.experts is not None:
        rule = with_experts(rule)
    yield Loaded(one.lane, path, model, rule, wanted)
    model.close()
