"""Every provider is verified, whatever becomes of the others; on fake providers."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.errors import ArtifactError, CapacityError, DeviceMemoryError, ProviderError
from onnxport.providers.base import Capabilities, LoadOptions, StepInputs
from onnxport.providers.features import Features
from onnxport.serving.verify.comparison import (
    COARSE,
    COARSE_CACHE,
    COARSE_OF_EXPERTS,
    COARSEST_CACHE,
    EXACT,
    HALF,
    HALF_OF_EXPERTS,
    choose_tolerance,
    compare,
    measured_error,
)
from onnxport.serving.verify.golden import Golden, read_golden, run
from onnxport.serving.verify.machine import this_machine
from onnxport.serving.verify.report import SCHEMA, Report, describe
from onnxport.serving.verify.speed import DECODE_STEPS, measure_speed
from onnxport.serving.verify.verifier import Checks, plan_modes
from tests.serving.verifying import (
    GOLDEN,
    AloneModel,
    FakeProvider,
    WrongModel,
    fail,
    fake_artifact,
    fake_verifier,
    late,
)

LOGITS = np.random.default_rng(0).standard_normal((4, 50)).astype(np.float32) * 3
VARIANTS = ["batched", "chunked", "cached", "preempted"]


def test_equal_logits() -> None:
    found = compare(LOGITS, LOGITS)
    assert (found.max_diff, found.max_kl, found.top1_agreement) == (0, 0, 1)
    assert EXACT.allows(found)


def test_an_offset_moves_logits_but_not_probabilities() -> None:
    found = compare(LOGITS, LOGITS + 1)
    assert found.max_diff == pytest.approx(1 / LOGITS.std(), rel=1e-4)
    assert found.max_kl < 1e-9
    same = compare(LOGITS, LOGITS)
    assert measured_error(COARSE, same, found) == found.max_diff
    assert measured_error(COARSE, same, same) == EXACT.max_diff
    assert measured_error(HALF, same, found) == HALF.max_diff
    assert measured_error(COARSE, same, found, has_experts=True) == COARSE.max_diff
    assert measured_error(EXACT, same, same, has_experts=True) == EXACT.max_diff


def test_divergence_is_that_of_the_worst_row() -> None:
    changed = LOGITS.copy()
    changed[2, changed[2].argmin()] += 20
    found = compare(LOGITS, changed)
    p = np.exp(LOGITS[2]) / np.exp(LOGITS[2]).sum()
    q = np.exp(changed[2]) / np.exp(changed[2]).sum()
    assert found.max_kl == pytest.approx(float((p * np.log(p / q)).sum()), rel=1e-4)
    assert found.top1_agreement == 0.75
    assert not EXACT.allows(found)


def test_experts_may_make_rows_others_but_not_all() -> None:
    spread = np.float32(LOGITS.std())
    changed = LOGITS + np.random.default_rng(1).normal(0, 0.1 * spread, LOGITS.shape)
    changed[:3, 0] += 4 * spread
    found = compare(LOGITS, changed.astype(np.float32))
    assert found.nearest_diff < 1 < found.max_diff
    assert COARSE_OF_EXPERTS.allows(found)
    assert not COARSE.allows(found)
    changed[3, 0] += 4 * spread
    found = compare(LOGITS, changed.astype(np.float32))
    assert found.max_diff < COARSE_OF_EXPERTS.max_diff
    assert not COARSE_OF_EXPERTS.allows(found)
    assert not COARSE_OF_EXPERTS.allows(compare(LOGITS, np.roll(LOGITS, 1, axis=0)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_fails(value: float) -> None:
    changed = LOGITS.copy()
    changed[0, 0] = value
    assert not EXACT.allows(compare(LOGITS, changed))


@pytest.mark.parametrize("first", [1, 5, 19, 20])
def test_steps_of_any_size_give_the_same_rows(first: int) -> None:
    golden = Golden(np.arange(20), np.array([3, 4, 11, 19], np.int32), LOGITS)
    whole = run(WrongModel(block_size=4, vocab_size=50), golden, 20)
    assert whole.shape == (4, 50)
    assert np.array_equal(run(WrongModel(block_size=4, vocab_size=50), golden, first), whole)


@pytest.mark.parametrize(
    ("types", "coarse", "tolerance", "of_experts"),
    [
        (("float32", "float32"), False, EXACT, EXACT),
        (("float32", "float32"), True, COARSE, COARSE_OF_EXPERTS),
        (("float32", "float16"), False, HALF, HALF_OF_EXPERTS),
        (("bfloat16", "float32"), False, HALF, HALF_OF_EXPERTS),
        (("bfloat16", "int8"), False, COARSE_CACHE, COARSE_CACHE),
        (("float32", "int4"), False, COARSEST_CACHE, COARSEST_CACHE),
        (("float32", "int4"), True, COARSEST_CACHE, COARSEST_CACHE),
    ],
)
def test_the_tolerance_follows_from_the_types(
    types: tuple[str, str], coarse: bool, tolerance: Any, of_experts: Any
) -> None:
    capabilities = replace(
        WrongModel().capabilities,
        compute_dtype=types[0],
        kv_cache_dtype=types[1],
        int8_products=coarse,
    )
    found = [choose_tolerance(capabilities, has_experts=one) for one in (False, True)]
    assert found == [tolerance, of_experts]


def test_a_golden_file_of_another_model_is_refused(tmp_path: Path) -> None:
    artifact = fake_artifact(tmp_path)
    artifact.manifest.model.vocab_size += 1
    with pytest.raises(ArtifactError, match="not of this model, which has 65 tokens"):
        read_golden(artifact)


def always(inputs: StepInputs) -> bool:
    return True


def batched(inputs: StepInputs) -> bool:
    return len(inputs.past_sequence_lengths) > 1


def test_one_provider_after_the_other(monkeypatch: Any, tmp_path: Path) -> None:
    providers = {
        "gone": FakeProvider(reason="no such device"),
        "broken": FakeProvider(fail(CapacityError("no memory"))),
        "crashing": FakeProvider(fail(RuntimeError("a bug"))),
        "wrong": FakeProvider(lambda: WrongModel(always)),
        "good": FakeProvider(lambda: WrongModel()),
        "late": FakeProvider(lambda: WrongModel(late, block_size=32)),
        "other": FakeProvider(lambda: WrongModel(block_size=64)),
        "alone": FakeProvider(lambda: AloneModel()),
        "lost": FakeProvider(lambda: WrongModel(fails=lambda run: run > 30)),
    }
    verifier = fake_verifier(monkeypatch, tmp_path, providers)
    found = {name: verifier.verify(name) for name in providers}
    assert {name: (one.state, one.reason) for name, one in found.items()} == {
        "gone": ("missing", "no such device"),
        "broken": ("failed", "no memory"),
        "crashing": ("failed", "RuntimeError: a bug"),
        "wrong": ("failed", ""),
        "good": ("passed", ""),
        "late": ("failed", ""),
        "other": ("passed", ""),
        "alone": ("failed", ""),
        "lost": (
            "failed",
            "a request failed while decoding: ProviderError: run 31 was told to fail",
        ),
    }
    assert all(model.closed for one in providers.values() for model in one.loaded)
    (good,) = found["good"].modes
    assert good.bit_invariant
    assert good.agreement is None
    assert [one.name for one in good.variants] == VARIANTS
    assert [one.source for one in found["good"].transfers] == ["good"]
    (other,) = found["other"].modes
    assert other.agreement is not None
    assert (other.agreement.reference, other.agreement.tokens.agreement) == ("good", 1)
    assert [one.source for one in found["other"].transfers] == ["other", "good"]
    (mode,) = found["late"].modes
    assert all(one.state == "passed" for one in mode.variants)  # equally wrong in every way
    assert mode.agreement is not None
    assert mode.agreement.tokens.state == "failed"
    assert mode.agreement.tokens.agreement == 42 / 48  # all but 6 of the longest's tokens
    assert found["wrong"].modes[0].variants == ()
    with pytest.raises(ProviderError, match="no provider 'unknown'"):
        verifier.verify("unknown")


def test_a_reference_is_one_that_passed(monkeypatch: Any, tmp_path: Path) -> None:
    providers = {
        "wrong": FakeProvider(lambda: WrongModel(always)),
        "wrong in batches": FakeProvider(lambda: WrongModel(batched)),
        "right": FakeProvider(lambda: WrongModel()),
    }
    verifier = fake_verifier(monkeypatch, tmp_path, providers)
    assert verifier.verify("wrong").state == "failed"
    in_batches = verifier.verify("wrong in batches")
    assert (in_batches.state, in_batches.modes[0].passed) == ("failed", False)
    assert all(one.tokens.state == "passed" for one in in_batches.transfers)
    assert verifier.verify("right").modes[0].agreement is None


def test_logits_alone(monkeypatch: Any, tmp_path: Path) -> None:
    providers = {"good": FakeProvider(), "wrong": FakeProvider(lambda: WrongModel(always))}
    checks = Checks(variants=False, speed=False)
    verifier = fake_verifier(monkeypatch, tmp_path, providers, checks=checks)
    good, wrong = verifier.verify("good"), verifier.verify("wrong")
    assert (good.state, wrong.state) == ("passed", "failed")
    assert (good.modes[0].variants, good.transfers, good.speed) == ((), (), None)
    assert providers["good"].loaded[0].num_runs < 50


class LevelProvider(FakeProvider):
    """Rounds activations to int8, if it does at all, where it is not told to compute in float32."""

    def __init__(self, *, rounds: bool, features: Features) -> None:
        super().__init__(features=features)
        self.rounds = rounds

    def load(self, artifact: Any, options: LoadOptions) -> WrongModel:
        rounds = self.rounds and options.matmul_accuracy_level != 1
        self.options.append(options)
        return WrongModel(int8_products=rounds)


@pytest.mark.parametrize(
    ("precision", "rounds"), [("fp32", False), ("int4", True), ("int4", False)]
)
def test_float32_first_then_as_it_is_served(
    monkeypatch: Any, tmp_path: Path, precision: str, rounds: bool
) -> None:
    features = Features(("native",), ("float16", "float32"), ("float16", "float32"))
    provider = LevelProvider(rounds=rounds, features=features)
    checks = Checks(variants=False, speed=True, caches=False)
    verifier = fake_verifier(
        monkeypatch, tmp_path, {"fake": provider}, precision=precision, checks=checks
    )
    report = verifier.verify("fake")
    exact, served = provider.options
    assert (exact.dtype, exact.kv_cache_dtype) == ("float32", "float32")
    assert exact.matmul_accuracy_level == (1 if precision == "int4" else None)
    assert (served.dtype, served.kv_cache_dtype, served.matmul_accuracy_level) == (
        "auto",
        "auto",
        None,
    )
    # The null model has the same types however it is loaded: what is not coarse is known then,
    # whatever the weights are.
    names = ["float32 arithmetic", "8-bit activations"]
    assert [one.tolerance.name for one in report.modes] == names[: 2 if rounds else 1]
    assert report.speed is not None


class TypedModel(WrongModel):
    """Says that it computes in a type."""

    def __init__(self, dtype: str, **options: Any) -> None:
        super().__init__(**options)
        self._dtype = dtype

    @property
    def capabilities(self) -> Capabilities:
        return replace(super().capabilities, compute_dtype=self._dtype, kv_cache_dtype=self._dtype)


class TypedProvider(LevelProvider):
    def load(self, artifact: Any, options: LoadOptions) -> WrongModel:
        rounds = self.rounds and options.matmul_accuracy_level != 1
        dtype = "float16" if options.dtype == "auto" else options.dtype
        found = TypedModel(dtype, int8_products=rounds)
        self.loaded.append(found)
        return found


@pytest.mark.parametrize("precision", ["fp16", "int4"])
def test_blocks_are_moved_in_each_of_the_types(
    monkeypatch: Any, tmp_path: Path, precision: str
) -> None:
    features = Features.one_type(("native",), ("float16", "float32"))
    rounds = precision == "int4"
    providers: dict[str, FakeProvider] = {
        name: TypedProvider(rounds=rounds, features=features) for name in ("first", "second")
    }
    one_type = Features.one_type(("native",), ("float32",))
    providers["one type"] = LevelProvider(rounds=rounds, features=one_type)
    checks = Checks(speed=False, caches=False)
    verifier = fake_verifier(monkeypatch, tmp_path, providers, precision=precision, checks=checks)
    exact, served = "float32 arithmetic", {"fp16": "16-bit arithmetic", "int4": "8-bit activations"}
    found = {name: verifier.verify(name) for name in providers}
    moved = {name: [(m.source, m.arithmetic) for m in one.transfers] for name, one in found.items()}
    assert all(one.state == "passed" for one in found.values())
    last = served[precision]
    assert moved["first"] == [("first", exact), ("first", last), ("first", last)]
    assert moved["second"] == [
        (source, name) for name in (exact, last) for source in ("second", "first")
    ]
    # What is loaded twice in the same types moves the same blocks in the same way.
    assert [source for source, _ in moved["one type"]] == ["one type", "first"]
    assert len(found["one type"].modes) == (2 if precision == "int4" else 1)


def test_experts_in_mxfp4_are_quantized(tmp_path: Path) -> None:
    artifact = fake_artifact(tmp_path, "fp16")
    features = Features(("native",), ("float32",), ("float32",))
    options = LoadOptions(dtype="float32", kv_cache_dtype="float32")
    assert plan_modes(artifact, options, features) == (options,)
    assert describe(artifact).weights == "fp16"
    artifact.manifest.expert_precision = "mxfp4"
    exact, served = plan_modes(artifact, options, features)
    assert (exact.matmul_accuracy_level, served.matmul_accuracy_level) == (1, None)
    assert describe(artifact).weights == "fp16 with experts in mxfp4"
    artifact.manifest.zero_points = True
    assert describe(artifact).weights == "fp16 with zero points and experts in mxfp4"
    artifact.manifest.expert_precision = None
    assert describe(artifact).weights == "fp16 with zero points"
    artifact.manifest.zero_points = None
    artifact.manifest.precision, artifact.manifest.offsets = "int4", True
    assert describe(artifact).weights == "int4 with offsets"
    artifact.manifest.int8_matrices = 3
    assert describe(artifact).weights == "int4 with offsets and 3 matrices in int8"


def test_what_the_caller_chose_stays(tmp_path: Path) -> None:
    features = Features(("native",), ("float16", "float32"), ("float16", "float32"))
    artifact = fake_artifact(tmp_path, "int4")
    chosen = LoadOptions(dtype="float16", kv_cache_dtype="float16", matmul_accuracy_level=4)
    assert plan_modes(artifact, chosen, features) == (chosen,)
    exact, served = plan_modes(artifact, LoadOptions(dtype="float16"), features)
    assert (exact.dtype, exact.kv_cache_dtype) == ("float16", "float32")
    assert served == LoadOptions(dtype="float16")
    exact_alone = LoadOptions(matmul_accuracy_level=1)
    assert plan_modes(artifact, exact_alone, None) == (exact_alone,)


ONE_TYPE = Features.one_type(("native",), ("float16", "float32"))
BY_TYPE = Features(  # as OpenVINO's on a processor
    ("native",),
    ("bfloat16", "float32"),
    ("int8", "float16", "bfloat16", "float32"),
    {"bfloat16": ("int8", "bfloat16"), "float32": ("int8", "float16", "float32")},
    {1: "float32", 3: "bfloat16"},
)
# As CUDA's: its own attention takes 16 bits alone.
NATIVE_HALF = Features.one_type(("native", "decomposed"), ("float16", "float32"), {"float16"})
EXACT_TYPES = {"dtype": "float32", "kv_cache_dtype": "float32", "matmul_accuracy_level": 1}


@pytest.mark.parametrize(
    ("features", "chosen", "exact"),
    [
        (ONE_TYPE, {}, EXACT_TYPES),
        (ONE_TYPE, {"dtype": "float16"}, {"matmul_accuracy_level": 1}),
        (ONE_TYPE, {"kv_cache_dtype": "float16"}, {"matmul_accuracy_level": 1}),
        (ONE_TYPE, {"dtype": "float16", "kv_cache_dtype": "float32"}, {}),  # it is refused
        (ONE_TYPE, {"matmul_accuracy_level": 4}, EXACT_TYPES | {"matmul_accuracy_level": 4}),
        (BY_TYPE, {}, EXACT_TYPES),
        (BY_TYPE, {"dtype": "bfloat16"}, {}),
        (BY_TYPE, {"kv_cache_dtype": "bfloat16"}, {}),
        (BY_TYPE, {"kv_cache_dtype": "int8"}, EXACT_TYPES | {"kv_cache_dtype": "int8"}),
        (BY_TYPE, {"matmul_accuracy_level": 3}, {}),
        (NATIVE_HALF, {}, EXACT_TYPES),
        (NATIVE_HALF, {"attention": "decomposed"}, EXACT_TYPES),
        (NATIVE_HALF, {"attention": "native"}, {"matmul_accuracy_level": 1}),
        (NATIVE_HALF, {"attention": "native", "dtype": "float32"}, {}),  # it is refused
        (ONE_TYPE, {"attention": "native"}, EXACT_TYPES),
        (None, {"dtype": "float16"}, {"matmul_accuracy_level": 1}),
    ],
)
def test_options_are_planned_such_that_they_go_together(
    tmp_path: Path, features: Features | None, chosen: dict[str, Any], exact: dict[str, Any]
) -> None:
    options = LoadOptions(**chosen)
    modes = plan_modes(fake_artifact(tmp_path, "int4"), options, features)
    assert modes == ((replace(options, **exact), options) if exact else (options,))


class TickingModel(WrongModel):
    """Lets a tenth of a second pass in every run."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.now_s = 0.0

    def run(self, inputs: StepInputs) -> np.ndarray:
        self.now_s += 0.1
        return super().run(inputs)


def test_speed_is_tokens_over_the_time_of_their_steps() -> None:
    model = TickingModel()
    found = measure_speed(model, GOLDEN.tolist(), lambda: model.now_s)
    assert found.prefill_num_tokens == 512
    assert found.prefill_tokens_per_s == pytest.approx(5120)
    assert [(one.rows, pytest.approx(one.tokens_per_s)) for one in found.decode] == [
        (1, 10),
        (8, 80),
    ]
    assert all(10 < one.num_steps <= DECODE_STEPS for one in found.decode)
    assert model.now_s < 15
    assert not model.closed


def test_speed_of_what_fits() -> None:
    model = TickingModel(max_model_len=100, num_blocks=10)
    found = measure_speed(model, GOLDEN.tolist(), lambda: model.now_s)
    assert found.prefill_num_tokens == 99
    assert [one.rows for one in found.decode] == [1]
    tiny = TickingModel(max_model_len=20, num_blocks=2)
    assert measure_speed(tiny, GOLDEN.tolist(), lambda: tiny.now_s).decode == ()


def test_a_step_that_was_tried_again_has_no_speed() -> None:
    why = r"timed, \d* ?\w* ?steps? failed and were tried again: ProviderError: no batches here"
    with pytest.raises(ProviderError, match=why):
        measure_speed(AloneModel(), GOLDEN.tolist())
    prefills: list[int] = []

    class Once(WrongModel):
        def run(self, inputs: StepInputs) -> np.ndarray:
            prefills.append(len(inputs.input_ids))
            if len(prefills) == 1:
                raise DeviceMemoryError("no memory")
            return super().run(inputs)

    with pytest.raises(ProviderError, match="timed, a step failed and were tried again: DeviceM"):
        measure_speed(Once(), GOLDEN.tolist())
    assert prefills == [512, 256, 256]


def test_a_slow_device_ends_in_time_and_still_has_figures() -> None:
    class Slow(TickingModel):
        def run(self, inputs: StepInputs) -> np.ndarray:
            self.now_s += 9.9
            return super().run(inputs)

    model = Slow()
    found = measure_speed(model, GOLDEN.tolist(), lambda: model.now_s)
    assert found.num_prefills == 1
    assert [one.num_steps for one in found.decode] == [1, 1]
    assert model.num_runs == 7


def test_the_report_is_json(monkeypatch: Any, tmp_path: Path) -> None:
    class Nan(WrongModel):
        def run(self, inputs: StepInputs) -> np.ndarray:
            return super().run(inputs) * np.float32(np.nan)

    providers = {"good": FakeProvider(), "nan": FakeProvider(lambda: Nan())}
    verifier = fake_verifier(monkeypatch, tmp_path, providers, checks=Checks())
    artifact = fake_artifact(tmp_path)
    report = Report(
        SCHEMA,
        "1.2.3",
        "2026-01-02T03:04:05+00:00",
        "onnxport verify x",
        this_machine(),
        describe(artifact),
        tuple(verifier.verify(name) for name in providers),
    )
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (found["passed"], found["schema"], found["onnxport"]) == (False, SCHEMA, "1.2.3")
    assert found["artifact"]["fingerprint"] == "0123456789abcdef"
    assert found["machine"]["processor"]
    good, bad = found["providers"]
    assert (good["state"], good["modes"][0]["passed"]) == ("passed", True)
    assert good["modes"][0]["capabilities"]["kv_format"]["model"] == "null"
    assert [one["name"] for one in good["modes"][0]["variants"]] == VARIANTS
    assert [one["rows"] for one in good["speed"]["decode"]] == [1, 8]
    assert (bad["state"], bad["modes"][0]["whole"]["max_diff"]) == ("failed", None)
