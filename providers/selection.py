"""How `auto` chooses between the providers that can run an artifact."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from onnxport.errors import CapacityError, OnnxportError, ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.graphs.contract import INT8_LEVEL
from onnxport.providers.base import LoadOptions, Model, Probe, Provider
from onnxport.providers.failures import forget
from onnxport.providers.features import Features
from onnxport.providers.trial import Clock, Figures, measure
from onnxport.providers.trial_store import TrialStore, trial_key

logger = logging.getLogger(__name__)

ANNOUNCED_BYTES: Final = 1 << 29  # of weights, from which on a trial takes so long that it is said


def choose(
    artifact: Artifact,
    providers: Mapping[str, Provider],
    options: LoadOptions,
    trials: Path | None = None,
    clock: Clock = time.perf_counter,
) -> Model:
    """Load the artifact on the best of `providers`, and log why each other one is not.

    Without trials that is the first one that loads: providers of GPUs and NPUs before those that
    run on the processor, else in the given order. With trials each one that loads is measured,
    once for an artifact, a machine and options; one model is in memory at a time.

    Args:
        artifact: what to load.
        providers: by name.
        options: what each is told.
        trials: folder of the measured trials; None: no trial.
        clock: what to measure with.

    Raises:
        ProviderError: none of them can run it.
        CapacityError: none of them can run it, and at least one for lack of memory.
    """
    selection = _Selection(artifact, options)
    probes = selection.rank(providers)
    ranked = {name: providers[name] for name in probes}
    if trials is None or len(ranked) < 2:
        model = selection.first(ranked)
    else:
        store = TrialStore(trials, trial_key(artifact.manifest.fingerprint, options, probes))
        model = selection.fastest(ranked, store, clock)
    if model is None:
        raise selection.failure()
    return model


class _Selection:
    """One choice, and the reasons against each provider."""

    def __init__(self, artifact: Artifact, options: LoadOptions) -> None:
        self._artifact = artifact
        self._options = options
        self._refused: dict[str, OnnxportError] = {}

    def rank(self, providers: Mapping[str, Provider]) -> dict[str, Probe]:
        """Probe them; those that are there and have what the options ask for, the best first."""
        probes = {}
        for name, provider in providers.items():
            probe = provider.probe()
            if not probe.available:
                self._refuse(name, ProviderError(f"it is not available: {probe.reason}"))
            elif lacks := _lacks(probe.features, self._options):
                self._refuse(name, ProviderError(lacks))
            else:
                probes[name] = probe
        # At other levels `cpu` has quantized experts compute for every token, too.
        rounds = self._options.matmul_accuracy_level in (None, INT8_LEVEL)
        if self._artifact.manifest.model.experts is not None and rounds:
            probes = self._without_idle_experts(probes)
        return dict(sorted(probes.items(), key=lambda item: _runs_on_the_processor(item[1])))

    def _without_idle_experts(self, probes: dict[str, Probe]) -> dict[str, Probe]:
        """Leave out who computes all experts for each token on a processor where another does not.

        It is several times the work, and to compile such graphs takes minutes.
        """
        here = {name for name, probe in probes.items() if _runs_on_the_processor(probe)}
        others = self._artifact.manifest.model.hidden_act != "silu"
        able = {name for name in here if _has_experts(probes[name], others=others)}
        left_out = here - able if able else set()
        for name in sorted(left_out):
            self._refuse(
                name,
                ProviderError(
                    f"it computes all experts for each token, and {', '.join(sorted(able))} on the "
                    "same processor those that it is given to; name this one to have it"
                ),
            )
        return {name: probe for name, probe in probes.items() if name not in left_out}

    def first(
        self, providers: Mapping[str, Provider], figures: Mapping[str, Figures] | None = None
    ) -> Model | None:
        """Load the first one that can; figures are what it was ranked by."""
        for name, provider in providers.items():
            model = self._load(name, provider)
            if model is not None:
                self._chosen(name, figures or {})
                return model
        return None

    def fastest(
        self, providers: Mapping[str, Provider], store: TrialStore, clock: Clock
    ) -> Model | None:
        """Measure those that have no figures yet, and load the fastest of all."""
        figures = store.read()
        last: tuple[str, Model] | None = None
        if providers.keys() - figures.keys():
            with store.locked():
                figures = store.read()  # another process may have measured meanwhile
                last = self._measure(providers, figures, store, clock)
        usable = [name for name in providers if name in figures and name not in self._refused]
        ranked = sorted(usable, key=lambda name: figures[name].score_s)
        if last is not None:
            name, model = last
            if ranked[0] == name:
                self._chosen(name, figures)
                return model
            model.close()
        return self.first({name: providers[name] for name in ranked}, figures)

    def failure(self) -> OnnxportError:
        """Why there is no model; all the reasons are its cause."""
        # More memory would help where any of them lacked it.
        full = any(isinstance(error, CapacityError) for error in self._refused.values())
        reasons = "; ".join(f"{name}: {error}" for name, error in self._refused.items())
        failure = (CapacityError if full else ProviderError)(
            f"no provider can run {self._artifact.path}. {reasons}"
        )
        failure.__cause__ = ExceptionGroup("providers", list(self._refused.values()))
        return failure

    def _measure(
        self,
        providers: Mapping[str, Provider],
        figures: dict[str, Figures],
        store: TrialStore,
        clock: Clock,
    ) -> tuple[str, Model] | None:
        """Add the figures that are missing; returns the model that is still loaded, if any."""
        last: tuple[str, Model] | None = None
        untried = [name for name in providers if name not in figures]
        if self._artifact.manifest.weight_bytes >= ANNOUNCED_BYTES:
            logger.warning(
                "%s is tried on %s, once, to be run by the fastest provider from then on; that may "
                "take minutes. Name a provider, or say --no-trial, to do without",
                *(self._artifact.path.name, " and ".join(untried)),
            )
        for name in untried:
            if last is not None:
                last[1].close()
                last = None
            model = self._load(name, providers[name])
            if model is None:
                continue
            best_s = min((figure.score_s for figure in figures.values()), default=None)
            try:
                figures[name] = measure(model, clock, best_s)
            except BaseException as error:
                model.close()
                if not isinstance(error, OnnxportError):
                    raise
                self._refuse(name, ProviderError(f"its trial failed: {error}"))
                continue
            logger.info("provider %s was tried: %s", name, figures[name])
            last = name, model
            store.write(figures)
        return last

    def _load(self, name: str, provider: Provider) -> Model | None:
        try:
            return provider.load(self._artifact, self._options)
        except OnnxportError as error:
            self._refuse(name, error)
            return None

    def _refuse(self, name: str, error: OnnxportError) -> None:
        logger.info("provider %s was not chosen: %s", name, error)
        self._refused[name] = error
        forget(error)

    def _chosen(self, name: str, figures: Mapping[str, Figures]) -> None:
        for other, figure in figures.items():
            if other not in (name, *self._refused):
                logger.info("provider %s was not chosen: its trial took %s", other, figure)
        by = f", its trial took {figures[name]}" if name in figures else ""
        logger.info("provider %s was chosen for %s%s", name, self._artifact.path, by)


def _runs_on_the_processor(probe: Probe) -> bool:
    """Whether the device that is used is the processor, itself or as a GPU in software."""
    return not probe.devices or probe.devices[0].kind == "cpu"


def _has_experts(probe: Probe, *, others: bool) -> bool:
    able = probe.features
    return able is not None and (able.has_other_experts if others else able.has_experts)


def _lacks(features: Features | None, options: LoadOptions) -> str:
    """The option that a provider does not take, as far as it tells before loading; "" for none."""
    if features is None:
        return ""
    asked: Sequence[tuple[str, str | None, Sequence[str]]] = (
        ("attention", options.attention, features.attention),
        ("dtype", options.dtype, ("auto", *features.dtypes)),
        ("kv_cache_dtype", options.kv_cache_dtype, ("auto", *features.kv_cache_dtypes)),
    )
    return "; ".join(
        f"{option} is {value!r}, but it has {', '.join(allowed)}"
        for option, value, allowed in asked
        if value is not None and value not in allowed
    )
