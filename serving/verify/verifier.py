"""Every provider in turn: loaded, compared, decoded in every way, and timed."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import numpy as np

from onnxport.errors import OnnxportError
from onnxport.graphs.artifact import Artifact
from onnxport.kv.states import SLOTS_PER_SEQUENCE
from onnxport.providers.base import Capabilities, LoadOptions, Model, Provider
from onnxport.providers.features import Features
from onnxport.providers.registry import get_provider
from onnxport.serving.verify.caches import CacheReport, compare_caches
from onnxport.serving.verify.comparison import (
    EXACT,
    Comparison,
    choose_tolerance,
    compare,
    measured_error,
    tie_limit,
)
from onnxport.serving.verify.decoding import Tokens
from onnxport.serving.verify.golden import Golden, read_golden, rows_of, run
from onnxport.serving.verify.prompts import MOST_PROMPTS, Prompt, make_prompts, stream
from onnxport.serving.verify.report import Agreement, ModeReport, ProviderReport
from onnxport.serving.verify.speed import measure_speed
from onnxport.serving.verify.transfers import SavedPrompt, Transfer, check_transfer, save_prompt
from onnxport.serving.verify.variants import decode_alone, judge, run_variants, skipped

logger = logging.getLogger(__name__)

EMULATOR = "cpu"  # the provider whose library runs the graphs of those that are emulated
FLOAT32_LEVEL = 1  # MatMulNBits' accuracy_level for float32 arithmetic
CACHE_TOKENS = 8192  # of the pool, where the caller names no size
STATE_SLOTS = (SLOTS_PER_SEQUENCE + 1) * MOST_PROMPTS  # likewise, for all at once, and one is kept
NUM_TRANSFERS = 3  # prompts whose blocks are moved, the longest ones
CONSISTENCY_TOKENS = 48
CONSISTENCY_ROWS = 8  # the last ones; each is a step of its own


@dataclass(frozen=True, slots=True)
class Checks:
    """What to do besides comparing logits."""

    variants: bool = True  # decode in every way, and move blocks
    speed: bool = True
    caches: bool = True  # compare the types of KV cache, where the caller has chosen none


@dataclass(frozen=True, slots=True)
class Reference:
    """The first provider whose float32 arithmetic passed."""

    provider: str
    alone: Mapping[Prompt, Tokens]  # of the prompts that all providers share
    saved: tuple[SavedPrompt, ...]  # their K/V
    error: float  # see `comparison.measured_error`


@dataclass(frozen=True, slots=True)
class Checked:
    """What one mode gave."""

    report: ModeReport
    transfers: tuple[Transfer, ...]


class Verifier:
    """Verifies one artifact on one provider after the other."""

    def __init__(self, artifact: Artifact, options: LoadOptions, checks: Checks) -> None:
        """Read the golden file.

        Args:
            artifact: to verify.
            options: what every provider is told.
            checks: what to do besides comparing logits.

        Raises:
            ArtifactError: the golden file is missing or is not one.
        """
        self._artifact = artifact
        self._has_experts = artifact.manifest.model.experts is not None
        self._golden = read_golden(artifact)
        self._token_ids = self._golden.token_ids.tolist()
        self._checks = checks
        self._options = options
        if options.kv_cache_tokens is None and options.kv_memory is None:
            tokens = max(CACHE_TOKENS, options.max_model_len or 0)
            self._options = replace(options, kv_cache_tokens=tokens)
        if artifact.manifest.model.linear is not None and options.state_slots is None:
            self._options = replace(self._options, state_slots=STATE_SLOTS)
        self._reference: Reference | None = None

    def verify(self, name: str, *, emulate: bool = False) -> ProviderReport:
        """Verify with one provider; what goes wrong is in the report.

        Args:
            name: of the provider.
            emulate: run its graphs on the CPU.

        Raises:
            ProviderError: there is no such provider, or it cannot be emulated.
        """
        provider = get_provider(name, emulate=emulate)
        probe = provider.probe()
        report = ProviderReport(
            provider=name,
            state="missing",
            reason=probe.reason,
            emulated=emulate,
            versions=dict(get_provider(EMULATOR).probe().versions if emulate else probe.versions),
            devices=probe.devices,
            features=probe.features,
        )
        if not probe.available and not emulate:
            return report
        return self._check(report, provider, probe.features)

    def _check(
        self, report: ProviderReport, provider: Provider, features: Features | None
    ) -> ProviderReport:
        """Go through the modes; an error ends them, and is this provider's alone."""
        found: list[Checked] = []
        speed = None
        caches: tuple[CacheReport, ...] = ()
        reason = ""
        try:
            modes = plan_modes(self._artifact, self._options, features)
            for options in modes:
                with _loaded(provider, self._artifact, options) as model:
                    if not found or _is_other(found[-1].report, model):
                        moves = not found or _types(found[-1].report.capabilities) != _types(
                            model.capabilities
                        )
                        found.append(self._run(report.provider, model, moves))
                    if options is modes[-1] and self._checks.speed:
                        speed = measure_speed(model, self._token_ids)
            passed = all(one.report.passed for one in found)
            if self._checks.caches and passed and self._options.kv_cache_dtype == "auto":
                load = partial(_loaded, provider, self._artifact)
                caches = compare_caches(
                    load,
                    modes[0],
                    features,
                    self._token_ids,
                    has_experts=self._has_experts,
                )
        except OnnxportError as error:
            reason = str(error)
        except Exception as error:  # a vendor's library, or our own bug: the others still run
            logger.error("verifying %s failed", report.provider, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
        transfers = tuple(one for checked in found for one in checked.transfers)
        passed = not reason and all(one.report.passed for one in found)
        passed = passed and all(one.tokens.state != "failed" for one in transfers)
        passed = passed and all(one.state != "failed" for one in caches)
        return replace(
            report,
            state="passed" if passed else "failed",
            reason=reason,
            modes=tuple(one.report for one in found),
            transfers=transfers,
            speed=speed,
            caches=caches,
        )

    def _run(self, name: str, model: Model, moves: bool) -> Checked:
        """Compare logits, and tokens if those are right; move K/V, if it `moves` them."""
        capabilities = model.capabilities
        tolerance = choose_tolerance(capabilities, has_experts=self._has_experts)
        logits = _compare_logits(model, self._golden, self._token_ids)
        report = ModeReport(
            tolerance=tolerance,
            capabilities=capabilities,
            whole=logits.whole,
            stepwise=logits.stepwise,
            consistency=logits.consistency,
            bit_invariant=logits.bit_invariant,
            variants=(),
            agreement=None,
        )
        if not self._checks.variants or not report.passed:
            return Checked(report, ())  # wrong logits say all that wrong tokens could
        prompts = make_prompts(self._token_ids, capabilities)
        alone = decode_alone(model, prompts.all)
        measured = (logits.whole, logits.stepwise, logits.consistency)
        error = measured_error(tolerance, *measured, has_experts=self._has_experts)
        own_limit = 0.0 if logits.bit_invariant else tie_limit(error, error)
        report = replace(report, variants=run_variants(model, prompts, alone, own_limit))
        reference = self._reference
        if reference is not None:
            limit = tie_limit(error, reference.error)
            tokens = judge("agreement", model, reference.alone, list(alone.items()), limit)
            report = replace(report, agreement=Agreement(reference.provider, tokens))
        if not moves:
            return Checked(report, ())
        if capabilities.state_slots or not capabilities.moves_blocks:
            reason = "K/V alone are of no use to a model that has states"
            if not capabilities.moves_blocks:
                reason = "K/V of layers whose heads differ stay where they are"
            tokens = skipped("transfer", reason)
            if reference is None and tolerance is EXACT and report.passed:
                self._reference = Reference(name, alone, (), error)
            return Checked(report, (Transfer(name, tolerance.name, tokens),))
        saved = tuple(save_prompt(model, prompt) for prompt in prompts.fixed[-NUM_TRANSFERS:])
        arithmetic = tolerance.name
        transfers = [check_transfer(name, saved, alone, model, arithmetic, own_limit)]
        if reference is not None:
            theirs = [one for one in reference.saved if one.prompt in alone]
            transfers.append(
                check_transfer(
                    reference.provider, theirs, reference.alone, model, arithmetic, limit
                )
            )
        elif tolerance is EXACT and report.passed:
            self._reference = Reference(name, alone, saved, error)
        return Checked(report, tuple(transfers))


@dataclass(frozen=True, slots=True)
class _Logits:
    """What the logits of one mode are like."""

    whole: Comparison
    stepwise: Comparison
    consistency: Comparison
    bit_invariant: bool


def plan_modes(
    artifact: Artifact, options: LoadOptions, features: Features | None
) -> tuple[LoadOptions, ...]:
    """How to load a provider: in float32 as far as it can, then as it is served.

    What the caller has chosen stays; where that leaves no difference there is one way.

    Args:
        artifact: to load.
        options: of the caller.
        features: of the provider.
    """
    manifest = artifact.manifest
    precisions = {manifest.precision, manifest.head_precision, manifest.expert_precision}
    quantized = bool(precisions & {"int4", "int8", "mxfp4"})
    level = options.matmul_accuracy_level
    levels = (FLOAT32_LEVEL, None) if quantized and level is None else (level,)
    if features is None:
        exact = replace(options, matmul_accuracy_level=levels[0])
    else:
        exact = _most_exact(options, features, levels)
    return (options,) if exact == options else (exact, options)


def _most_exact(
    options: LoadOptions, features: Features, levels: Sequence[int | None]
) -> LoadOptions:
    """What the caller left open in float32, as much of it as goes together; types come first.

    Attention that was asked for may take other activations alone.
    """
    dtypes, caches = (
        ("float32", "auto") if asked == "auto" and "float32" in has else (asked,)
        for asked, has in (
            (options.dtype, features.dtypes),
            (options.kv_cache_dtype, features.kv_cache_dtypes),
        )
    )
    for dtype, cache, level in product(dtypes, caches, levels):
        if features.go_together(dtype, cache, level, options.attention):
            return replace(options, dtype=dtype, kv_cache_dtype=cache, matmul_accuracy_level=level)
    return options  # they contradict each other: the provider says how


def _compare_logits(model: Model, golden: Golden, token_ids: list[int]) -> _Logits:
    """Compute golden rows and those of a longer sequence, each whole and in steps."""
    num_golden = len(golden.token_ids)
    whole = run(model, golden, num_golden)
    stepwise = run(model, golden, max(1, num_golden // 2))
    limits = model.capabilities
    length = min(CONSISTENCY_TOKENS, limits.max_model_len, limits.kv_tokens)
    tokens = np.array([stream(token_ids, at, 0) for at in range(length)], np.int64)
    first = max(1, length - CONSISTENCY_ROWS)
    rows = list(range(first, length)) or [0]
    at_once, in_steps = (rows_of(model, tokens, rows, size) for size in (length, first))
    return _Logits(
        whole=compare(golden.logits, whole),
        stepwise=compare(golden.logits, stepwise),
        consistency=compare(at_once, in_steps),
        bit_invariant=np.array_equal(whole, stepwise) and np.array_equal(at_once, in_steps),
    )


@contextmanager
def _loaded(provider: Provider, artifact: Artifact, options: LoadOptions) -> Iterator[Model]:
    """A model, closed at the end."""
    model = provider.load(artifact, options)
    try:
        yield model
    finally:
        model.close()


def _is_other(report: ModeReport, model: Model) -> bool:
    """Whether a model has another arithmetic than one that was checked already."""
    one, other = report.capabilities, model.capabilities
    return (*_types(one), one.int8_products) != (*_types(other), other.int8_products)


def _types(capabilities: Capabilities) -> tuple[str, ...]:
    """What decides how K/V lie in a cache, and which kernels read them."""
    return (capabilities.attention, capabilities.compute_dtype, capabilities.kv_cache_dtype)
