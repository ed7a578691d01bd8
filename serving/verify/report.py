"""What `onnxport verify --json` prints: these dataclasses, field by field.

The object is a `Report`. Tuples are arrays, mappings are objects, None is null; so are figures that
are no finite number. A change of meaning raises SCHEMA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import Capabilities, Device
from onnxport.providers.features import Features
from onnxport.serving.verify.caches import CacheReport
from onnxport.serving.verify.comparison import Comparison, Tolerance
from onnxport.serving.verify.machine import Machine
from onnxport.serving.verify.speed import Speed
from onnxport.serving.verify.transfers import Transfer
from onnxport.serving.verify.variants import Variant

SCHEMA: Final = 1
State = Literal["passed", "failed", "missing"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """A provider's tokens against those of the reference provider."""

    reference: str  # the provider whose float32 arithmetic passed first
    tokens: Variant  # of the prompts that both decoded, each alone


@dataclass(frozen=True, slots=True)
class ModeReport:
    """One arithmetic of one provider."""

    tolerance: Tolerance  # its name is that of the arithmetic
    capabilities: Capabilities
    whole: Comparison  # golden logits, the sequence in one step
    stepwise: Comparison  # golden logits, half of it in one step, the rest token by token
    consistency: Comparison  # of the model with itself: a longer sequence stepwise against whole
    bit_invariant: bool  # whether stepwise and whole had the same bits; then tokens must agree
    variants: tuple[Variant, ...]  # empty where logits failed, or none were asked for
    agreement: Agreement | None  # None for the reference itself, where there is none

    @property
    def passed(self) -> bool:
        """Whether nothing failed."""
        tokens = [*self.variants, *([self.agreement.tokens] if self.agreement else [])]
        return (
            self.tolerance.allows(self.whole)
            and self.tolerance.allows(self.stepwise)
            and self.tolerance.allows(self.consistency)
            and all(one.state != "failed" for one in tokens)
        )


@dataclass(frozen=True, slots=True)
class ProviderReport:
    """One provider."""

    provider: str
    state: State
    reason: str  # why it is missing, or the error that ended its checks; "" otherwise
    emulated: bool  # its graphs ran on the CPU instead of its device
    versions: Mapping[str, str] = field(default_factory=dict)  # library name -> version
    devices: tuple[Device, ...] = ()
    features: Features | None = None
    modes: tuple[ModeReport, ...] = ()  # float32 arithmetic first, as it is served last
    # From itself, and from the reference, in each mode of other types or attention.
    transfers: tuple[Transfer, ...] = ()
    speed: Speed | None = None  # as it is served
    caches: tuple[CacheReport, ...] = ()  # float32 first; empty where there is no choice


@dataclass(frozen=True, slots=True)
class ArtifactReport:
    """What was verified."""

    name: str  # of its folder
    source: str  # hub id or folder name of the checkpoint
    family: str
    precision: str
    head_precision: str
    expert_precision: str | None  # null: that of the rest
    zero_points: bool  # whether some projections have them
    offsets: bool  # likewise
    int8_matrices: int | None  # projections in int8, where `precision` is int4; null: none
    group_size: int | None
    fingerprint: str
    format_version: int

    @property
    def weights(self) -> str:
        """What they are stored in, and experts where that is something else."""
        parts = [
            *(["zero points"] if self.zero_points else []),
            *(["offsets"] if self.offsets else []),
            *([f"{self.int8_matrices} matrices in int8"] if self.int8_matrices else []),
            *([f"experts in {self.expert_precision}"] if self.expert_precision else []),
        ]
        return self.precision + (f" with {' and '.join(parts)}" if parts else "")


@dataclass(frozen=True, slots=True)
class Report:
    """All of it."""

    schema: int
    onnxport: str  # version
    date_utc: str  # ISO 8601, to the second
    command: str  # without folders
    machine: Machine
    artifact: ArtifactReport
    providers: tuple[ProviderReport, ...]

    @property
    def passed(self) -> bool:
        """Whether some provider passed and none failed."""
        states = {one.state for one in self.providers}
        return "passed" in states and "failed" not in states

    def to_json(self) -> dict[str, Any]:
        """The report as JSON types."""
        value: dict[str, Any] = _plain({"passed": self.passed} | asdict(self))
        for found, provider in zip(value["providers"], self.providers, strict=True):
            for mode, source in zip(found["modes"], provider.modes, strict=True):
                mode["passed"] = source.passed
        return value


def describe(artifact: Artifact) -> ArtifactReport:
    """Return what the manifest says."""
    manifest = artifact.manifest
    return ArtifactReport(
        name=artifact.path.name,
        source=manifest.source.name,
        family=manifest.family,
        precision=manifest.precision,
        head_precision=manifest.head_precision,
        expert_precision=manifest.expert_precision,
        zero_points=bool(manifest.zero_points),
        offsets=bool(manifest.offsets),
        int8_matrices=manifest.int8_matrices,
        group_size=manifest.group_size,
        fingerprint=manifest.fingerprint,
        format_version=manifest.format_version,
    )


def _plain(value: Any) -> Any:
    """Replace what JSON has not."""
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
