"""What `verify` says of types of KV cache, on models that are wrong in known ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from onnxport.cli.verify_table import lines
from onnxport.errors import (
    CapacityError,
    DeviceLostError,
    OnnxportError,
    OptionError,
    ProviderError,
)
from onnxport.providers.base import Capabilities, LoadOptions, StepInputs
from onnxport.providers.features import Features
from onnxport.serving.verify.caches import NUM_ROWS, compare_caches
from onnxport.serving.verify.machine import this_machine
from onnxport.serving.verify.report import SCHEMA, Report, describe
from onnxport.serving.verify.verifier import Checks, Verifier
from tests.serving.verifying import (
    GOLDEN,
    FakeProvider,
    WrongModel,
    fake_artifact,
    fake_verifier,
)

BYTES = {"float32": 400, "float16": 200, "int8": 104, "bfloat16": 200}  # of a token
KINDS = Features(("native",), ("float32",), ("float32", "int8", "float16"))


class CacheModel(WrongModel):
    """A null model that claims a type of cache, and adds `noise` to the logits."""

    def __init__(self, kind: str, noise: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self._kind, self._noise = kind, noise

    @property
    def capabilities(self) -> Capabilities:
        limits = super().capabilities
        size = limits.block_size * BYTES[self._kind]
        return replace(limits, kv_cache_dtype=self._kind, kv_block_bytes=size)

    def run(self, inputs: StepInputs) -> NDArray[np.float32]:
        logits = super().run(inputs)
        logits[:, 0] += np.float32(self._noise)
        return logits


class Loader:
    """Loads models of the types in `noises`; refuses others."""

    def __init__(self, noises: dict[str, float], **options: Any) -> None:
        self.noises, self.options = noises, options
        self.loaded: list[str] = []

    def make(self, options: LoadOptions) -> CacheModel:
        kind = options.kv_cache_dtype
        if kind not in self.noises:
            raise OptionError(f"no {kind} beside {options.dtype}")
        self.loaded.append(kind)
        return CacheModel(kind, self.noises[kind], **self.options)

    @contextmanager
    def __call__(self, options: LoadOptions) -> Iterator[CacheModel]:
        yield self.make(options)


def compared(loader: Loader, features: Features | None = KINDS) -> Any:
    return compare_caches(loader, LoadOptions(), features, GOLDEN.tolist(), has_experts=False)


def test_each_type_against_float32() -> None:
    spread = float(np.std(CacheModel("float32").run(one_step())))
    noises = {"float32": 0.0, "int8": 0.5 * spread, "float16": 0.01 * spread}
    first, int8, half = compared(Loader(noises))
    assert [one.dtype for one in (first, int8, half)] == ["float32", "int8", "float16"]
    assert [one.bytes_per_token for one in (first, int8, half)] == [400, 104, 200]
    assert [one.share_of_float32 for one in (first, int8, half)] == [1.0, 0.26, 0.5]
    assert first.error.max_diff == 0
    assert int8.error.max_diff == pytest.approx(0.5, rel=0.1)
    assert half.error.max_diff == pytest.approx(0.01, rel=0.1)
    assert int8.error.max_kl > half.error.max_kl > 0
    assert all((one.state, one.reason) == ("passed", "") for one in (first, int8, half))


def one_step() -> StepInputs:
    """NUM_ROWS tokens of a sequence in one step, all of their logits."""
    return StepInputs(
        input_ids=np.arange(NUM_ROWS, dtype=np.int64),
        block_table=np.arange(2, dtype=np.int32)[None],
        cumulative_sequence_lengths=np.array([0, NUM_ROWS], np.int32),
        past_sequence_lengths=np.zeros(1, np.int32),
        attention_metadata=np.full(3, NUM_ROWS, np.int32),
        logits_indices=np.arange(NUM_ROWS, dtype=np.int32),
    )


def test_more_than_a_type_explains_is_a_failure() -> None:
    _, int8, half = compared(Loader({"float32": 0.0, "int8": 0.0, "float16": 10.0}))
    assert (int8.state, half.state) == ("passed", "failed")
    _, int8, _ = compared(Loader({"float32": 0.0, "int8": np.nan, "float16": 0.0}))
    assert int8.state == "failed"


def test_a_type_that_is_refused_is_no_failure_and_says_why() -> None:
    _, int8, half = compared(Loader({"float32": 0.0, "float16": 0.0}))
    assert (int8.state, int8.reason, int8.error) == ("skipped", "no int8 beside auto", None)
    assert half.error.max_diff == 0


@pytest.mark.parametrize(
    "error", [DeviceLostError("lost"), ProviderError("no start"), CapacityError("no room")]
)
def test_what_fails_otherwise_is_a_failure_and_the_others_are_still_compared(
    error: OnnxportError,
) -> None:
    class Failing(Loader):
        def make(self, options: LoadOptions) -> CacheModel:
            if options.kv_cache_dtype == "int8":
                raise error
            return super().make(options)

    _, int8, half = compared(Failing({"float32": 0.0, "float16": 0.0}))
    assert (int8.state, int8.reason, int8.error) == ("failed", str(error), None)
    assert half.state == "passed"


def test_a_type_that_loads_and_then_fails_is_a_failure() -> None:
    class Failing(Loader):
        def make(self, options: LoadOptions) -> CacheModel:
            fails = options.kv_cache_dtype == "int8"
            self.options = {"fails": lambda run: fails and run == 1}
            return super().make(options)

    _, int8, half = compared(Failing({"float32": 0.0, "int8": 0.0, "float16": 0.0}))
    assert (int8.state, int8.bytes_per_token) == ("failed", None)
    assert int8.reason == "run 1 was told to fail"
    assert half.state == "passed"


def test_a_device_that_fails_is_no_refusal() -> None:
    loader = Loader({"float32": 0.0, "int8": 0.0, "float16": 0.0}, fails=lambda run: run == 1)
    with pytest.raises(ProviderError, match="told to fail"):
        compared(loader)


@pytest.mark.parametrize("kinds", [("float32",), ("float16", "int8"), None])
def test_without_a_choice_nothing_is_loaded(kinds: tuple[str, ...] | None) -> None:
    loader = Loader({})
    assert compared(loader, kinds and replace(KINDS, kv_cache_dtypes=kinds)) == ()
    assert loader.loaded == []


def test_a_type_that_no_float32_cache_goes_with_is_not_compared() -> None:
    loader = Loader({"float32": 0.0, "float16": 0.0})
    features = Features.one_type(("native",), ("float16", "float32"))
    options, tokens = LoadOptions(dtype="float16"), GOLDEN.tolist()
    assert compare_caches(loader, options, features, tokens, has_experts=False) == ()
    assert loader.loaded == []
    half_alone = Features.one_type(("native",), ("float16", "float32"), {"float16"})
    native = LoadOptions(attention="native")
    assert compare_caches(loader, native, half_alone, tokens, has_experts=False) == ()
    assert loader.loaded == []
    options = replace(options, dtype="float32")
    assert len(compare_caches(loader, options, features, tokens, has_experts=False)) == 2


def test_a_short_context_is_used_whole() -> None:
    loader = Loader({"float32": 0.0, "int8": 1.0, "float16": 0.0}, max_model_len=5)
    assert compared(loader)[1].error.max_diff > 0


class Choosing(FakeProvider):
    """A fake that loads what a `Loader` makes of the options."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(features=KINDS)
        self.loader = loader

    def load(self, artifact: Any, options: LoadOptions) -> CacheModel:
        kind = "float32" if options.kv_cache_dtype == "auto" else options.kv_cache_dtype
        return self.loader.make(replace(options, kv_cache_dtype=kind))


def verified(
    monkeypatch: pytest.MonkeyPatch, folder: Path, noises: dict[str, float], **checks: bool
) -> tuple[Loader, Verifier]:
    loader = Loader(noises)
    chosen = Checks(**{"variants": False, "speed": False, **checks})
    return loader, fake_verifier(monkeypatch, folder, {"fake": Choosing(loader)}, checks=chosen)


def test_a_cache_that_is_wrong_fails_its_provider(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    noises = {"float32": 0.0, "int8": 0.01, "float16": 20.0}
    _, verifier = verified(monkeypatch, tmp_path, noises)
    report = verifier.verify("fake")
    assert (report.state, report.reason) == ("failed", "")
    assert [one.state for one in report.caches] == ["passed", "passed", "failed"]
    artifact = describe(fake_artifact(tmp_path))
    whole = Report(SCHEMA, "1.0", "now", "verify", this_machine(), artifact, (report,))
    text = list(lines(whole))
    assert all(len(line) <= 100 for line in text)
    titles = next(line for line in text if line.startswith("KV cache"))
    int8 = next(line for line in text if line.startswith("fake") and " int8 " in line)
    assert titles.split()[2] == "type"
    assert int8.split()[1:4] == ["int8", "104", "26.0%"]
    assert any(line.startswith("  float16 cache against float32: max diff") for line in text)
    assert whole.to_json()["providers"][0]["caches"][1]["bytes_per_token"] == 104


def test_a_cache_that_is_refused_fails_nothing_and_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, verifier = verified(monkeypatch, tmp_path, {"float32": 0.0, "float16": 0.0})
    report = verifier.verify("fake")
    assert report.state == "passed"
    artifact = describe(fake_artifact(tmp_path))
    whole = Report(SCHEMA, "1.0", "now", "verify", this_machine(), artifact, (report,))
    text = list(lines(whole))
    int8 = next(line for line in text if line.startswith("fake") and " int8 " in line)
    assert int8.split() == ["fake", "int8", "-"]
    assert "  int8 cache: skipped, no int8 beside float32" in text
    broken = replace(report.caches[1], state="failed", reason="the device is gone")
    failed = replace(report, state="failed", caches=(report.caches[0], broken))
    text = list(lines(replace(whole, providers=(failed,))))
    int8 = next(line for line in text if line.startswith("fake") and " int8 " in line)
    assert int8.split() == ["fake", "int8", "FAILED"]
    assert "  int8 cache: the device is gone" in text
    assert whole.to_json()["providers"][0]["caches"][1]["state"] == "skipped"


def test_what_is_not_asked_for_or_chosen_already_is_not_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    noises = {"float32": 0.0, "int8": 0.0, "float16": 0.0}
    loader, verifier = verified(monkeypatch, tmp_path, noises, caches=False)
    assert (verifier.verify("fake").caches, "int8" in loader.loaded) == ((), False)
    loader, verifier = verified(monkeypatch, tmp_path, noises)
    monkeypatch.setattr(verifier, "_options", LoadOptions(kv_cache_dtype="float16"))
    assert (verifier.verify("fake").caches, set(loader.loaded)) == ((), {"float16"})
