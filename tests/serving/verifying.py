"""Null models that can be wrong, as providers that `verify` knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.errors import ProviderError
from onnxport.providers.base import Device, LoadOptions, Probe, StepInputs
from onnxport.providers.features import Features
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.verify import verifier
from onnxport.serving.verify.golden import rows_of
from onnxport.serving.verify.verifier import Checks, Verifier

VOCAB = 64
GOLDEN = np.arange(1, 21, dtype=np.int64) * 2_654_435_761 % VOCAB
ROWS = [4, 9, 14, 19]
Rows = NDArray[np.bool_]


def all_right(inputs: StepInputs) -> bool:
    return False


def late(inputs: StepInputs) -> Rows:
    """Rows that are later than any logits are compared."""
    at = inputs.logits_indices
    row = np.searchsorted(inputs.cumulative_sequence_lengths, at, side="right") - 1
    starts = inputs.cumulative_sequence_lengths[row]
    return np.asarray(inputs.past_sequence_lengths[row] + at - starts > 50)


class WrongModel(NullModel):
    """Gives other logits in the steps, or rows of them, that `wrong` picks."""

    def __init__(
        self,
        wrong: Callable[[StepInputs], bool | Rows] = all_right,
        block_size: int = 16,
        **options: Any,
    ) -> None:
        defaults = {"vocab_size": VOCAB, "num_blocks": 4096 // block_size, "max_model_len": 1024}
        super().__init__(NullOptions(block_size=block_size, **{**defaults, **options}))
        self._wrong = wrong

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        logits = super().run(inputs)
        rows = np.broadcast_to(self._wrong(inputs), len(logits))
        return np.where(rows[:, None], np.roll(logits, 1, axis=1), logits)


class AloneModel(WrongModel):
    """Fails in every step of more than one sequence."""

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        if len(inputs.past_sequence_lengths) > 1:
            raise ProviderError("no batches here")
        return super().run(inputs)


class FakeProvider:
    """Loads what it is told to, or fails as it is told."""

    def __init__(
        self,
        load: Callable[[], NullModel] = WrongModel,
        reason: str = "",
        features: Features | None = None,
    ) -> None:
        self.name = "fake"
        self.loaded: list[NullModel] = []
        self.options: list[LoadOptions] = []
        self._load = load
        self._probe = Probe(
            not reason, reason, (Device("a fake", None),), {"fake": "1.0"}, (), features
        )

    def probe(self) -> Probe:
        return self._probe

    def load(self, artifact: Any, options: LoadOptions) -> NullModel:
        self.options.append(options)
        self.loaded.append(self._load())
        return self.loaded[-1]


def fail(error: Exception) -> Callable[[], NullModel]:
    def load() -> NullModel:
        raise error

    return load


def fake_artifact(folder: Path, precision: str = "fp32", *, has_states: bool = False) -> Any:
    """What a verifier reads of an artifact; its golden logits are the null model's."""
    model = WrongModel(state_slots=2 if has_states else 0)
    logits = rows_of(model, GOLDEN, ROWS, len(GOLDEN))
    np.savez(
        folder / "golden.npz",
        token_ids=GOLDEN,
        logits_indices=np.array(ROWS, np.int32),
        logits=logits,
    )
    manifest = SimpleNamespace(
        model=SimpleNamespace(
            vocab_size=VOCAB, experts=None, linear=SimpleNamespace() if has_states else None
        ),
        source=SimpleNamespace(name="nothing"),
        family="null",
        precision=precision,
        head_precision=precision,
        expert_precision=None,
        zero_points=None,
        offsets=None,
        int8_matrices=None,
        group_size=None,
        fingerprint="0123456789abcdef",
        format_version=1,
    )
    return SimpleNamespace(path=folder, manifest=manifest)


def fake_verifier(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    providers: Mapping[str, FakeProvider],
    *,
    precision: str = "fp32",
    checks: Checks | None = None,
    has_states: bool = False,
) -> Verifier:
    def get_provider(name: str, *, emulate: bool = False) -> FakeProvider:
        if name not in providers:
            raise ProviderError(f"there is no provider {name!r}")
        return providers[name]

    monkeypatch.setattr(verifier, "get_provider", get_provider)
    artifact = fake_artifact(folder, precision, has_states=has_states)
    return Verifier(artifact, LoadOptions(), checks or Checks(speed=False))
