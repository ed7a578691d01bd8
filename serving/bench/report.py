"""What `onnxport bench --json` writes: these dataclasses, field by field.

Tuples are arrays, mappings are objects, None is null. A change of meaning raises SCHEMA.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal

from onnxport.graphs.artifact import Artifact
from onnxport.providers import memory
from onnxport.providers.base import Capabilities
from onnxport.providers.registry import get_provider
from onnxport.serving.bench.records import Distribution, RequestRecord, Summary
from onnxport.serving.verify.machine import Machine
from onnxport.serving.verify.report import ArtifactReport, describe

SCHEMA: Final = 1
Kind = Literal["latency", "throughput", "serve"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What ran in this process."""

    artifact: ArtifactReport
    capabilities: Capabilities
    threads: int  # that compute
    versions: Mapping[str, str]  # library name -> version
    load_s: float  # from the artifact's folder to an engine that takes requests
    peak_memory_bytes: int | None  # resident, of the whole process; None where not known


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


def engine_setup(
    artifact: Artifact, capabilities: Capabilities, threads: int | None, load_s: float
) -> Setup:
    """Describe what was loaded; to be called at the end, for the memory."""
    return Setup(
        artifact=describe(artifact),
        capabilities=capabilities,
        threads=threads or memory.physical_cores(),
        versions=dict(get_provider(capabilities.provider).probe().versions),
        load_s=load_s,
        peak_memory_bytes=peak_memory_bytes(),
    )


def peak_memory_bytes() -> int | None:
    """The most memory that this process had resident; None where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
