"""What `onnxport bench --json` writes: these dataclasses, field by field.

Tuples are arrays, mappings are objects, None is null. A change of meaning raises SCHEMA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from onnxport.graphs.artifact import Artifact
from onnxport.providers import memory
from onnxport.providers.base import Capabilities
from onnxport.providers.registry import get_provider
from onnxport.serving.bench.records import Distribution, RequestRecord, Summary
from onnxport.serving.engine import Engine
from onnxport.serving.fallback import Loss
from onnxport.serving.verify.machine import Machine
from onnxport.serving.verify.report import ArtifactReport, describe

SCHEMA: Final = 1
Kind = Literal["latency", "throughput", "serve"]


@dataclass(frozen=True, slots=True)
class Incidents:
    """What an engine had to do besides, warm-ups included; figures are of that, too."""

    num_failed_steps: int = 0  # whose requests were tried again, as far as they could be
    num_preemptions: int = 0  # of requests that had to make room, or lost their device
    losses: tuple[Loss, ...] = ()  # providers that were lost or did not load, and who took over


@dataclass(frozen=True, slots=True)
class Setup:
    """What ran in this process."""

    artifact: ArtifactReport
    capabilities: Capabilities  # as it was loaded; `incidents` says who took over later
    threads: int  # that compute
    versions: Mapping[str, str]  # library name -> version
    load_s: float  # from the artifact's folder to an engine that takes requests
    peak_memory_bytes: int | None = None  # resident, of the process; None where not known
    incidents: Incidents = Incidents()


@dataclass(frozen=True, slots=True)
class ServerSetup:
    """What was asked over HTTP; what it runs on is not known here."""

    base_url: str
    endpoint: str
    model: str
    request_rate_per_s: float | None  # None: all at once
    max_concurrency: int | None  # None: no limit


@dataclass(frozen=True, slots=True)
class BenchReport:
    """One benchmark."""

    schema: int
    kind: Kind
    onnxport: str  # version
    date_utc: str  # ISO 8601, to the second
    command: str  # without folders and keys
    machine: Machine
    setup: Setup | ServerSetup
    summary: Summary
    batch_s: Distribution | None  # of `latency`: the time of a whole batch, one an iteration
    requests: tuple[RequestRecord, ...]

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types."""
        return asdict(self)


def engine_setup(artifact: Artifact, engine: Engine, threads: int | None, load_s: float) -> Setup:
    """Describe what was loaded; to be called before it is measured, for its device may be lost."""
    loaded = engine.capabilities
    return Setup(
        artifact=describe(artifact),
        capabilities=loaded,
        threads=threads or memory.physical_cores(),
        versions=dict(get_provider(loaded.provider).probe().versions),
        load_s=load_s,
    )


def with_outcome(setup: Setup, engine: Engine) -> Setup:
    """Add what came of it; to be called when all is measured."""
    stats = engine.stats()
    found = Incidents(stats.num_failed_steps, stats.num_preemptions, engine.losses)
    return replace(setup, peak_memory_bytes=memory.peak_bytes(), incidents=found)
