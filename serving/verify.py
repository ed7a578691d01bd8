"""Does this machine compute what the export recorded? Logits against the artifact's golden ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from onnxport.errors import ArtifactError, ProviderError
from onnxport.graphs.artifact import Artifact
from onnxport.providers.base import Capabilities, LoadOptions, Model, StepInputs
from onnxport.providers.registry import get_provider

GOLDEN_FILE = "golden.npz"


@dataclass(frozen=True, slots=True)
class Golden:
    """The reference, computed in float32 from the weights as they are stored."""

    token_ids: NDArray[np.int64]  # [num_tokens]
    logits_indices: NDArray[np.int32]  # [num_logits], indices into token_ids, ascending
    logits: NDArray[np.float32]  # [num_logits, vocab]


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far logits are from the reference."""

    max_diff: float  # largest absolute difference over the standard deviation of the reference
    max_kl: float  # largest Kullback-Leibler divergence of a row from the reference, in nats
    top1_agreement: float  # share of rows whose likeliest token is the reference's


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far logits may be; a top token may differ only within `max_diff`."""

    name: str
    max_diff: float
    max_kl: float

    def allows(self, found: Comparison) -> bool:
        """Whether both figures are within their limits; not-a-number is not."""
        return found.max_diff <= self.max_diff and found.max_kl <= self.max_kl


# Measured on random models of 2 to 8 layers: 6e-5 and 4e-10 in float32; 0.6 and 0.05 with 8-bit
# activations, which are coarse on purpose. That limit catches what is broken, not what is inexact.
EXACT = Tolerance("float32 arithmetic", 2e-3, 1e-6)
HALF = Tolerance("16-bit arithmetic", 1e-1, 1e-2)
COARSE = Tolerance("8-bit activations", 1.5, 0.5)
FLOAT32_LEVEL = 1  # MatMulNBits' accuracy_level for float32 arithmetic


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one provider computed in one arithmetic."""

    provider: str
    capabilities: Capabilities
    whole: Comparison  # the sequence in one step
    stepwise: Comparison  # half of it in one step, the rest token by token
    tolerance: Tolerance

    @property
    def passed(self) -> bool:
        """Whether both are within the tolerance."""
        return self.tolerance.allows(self.whole) and self.tolerance.allows(self.stepwise)


def verify(artifact: Artifact, provider: str, options: LoadOptions) -> list[Verdict]:
    """Load the artifact with one provider, run its golden tokens and compare.

    Quantized weights are run twice: in float32 arithmetic, which has to be exact, and as they are
    served, with 8-bit activations where the provider has them.

    Raises:
        ArtifactError: the golden file is missing or is not one.
        ProviderError: the provider is missing or cannot run the artifact.
        CapacityError: it does not fit the memory.
    """
    golden = read_golden(artifact.path)
    vocab = artifact.manifest.model.vocab_size
    if (
        golden.logits.shape[1] != vocab
        or not 0 <= golden.token_ids.min() <= golden.token_ids.max() < vocab
    ):
        raise ArtifactError(
            f"{GOLDEN_FILE} in {artifact.path} is not of this model, which has {vocab} tokens. "
            "Export the model again."
        )
    probe = get_provider(provider).probe()
    if not probe.available:
        raise ProviderError(f"provider {provider!r} is not available: {probe.reason}")
    precisions = {artifact.manifest.precision, artifact.manifest.head_precision}
    if not precisions & {"int4", "int8"} or options.matmul_accuracy_level is not None:
        return [_verify(artifact, golden, provider, options, coarse=False)]
    exact = replace(options, matmul_accuracy_level=FLOAT32_LEVEL)
    return [
        _verify(artifact, golden, provider, exact, coarse=False),
        _verify(artifact, golden, provider, options, coarse=True),
    ]


def _verify(
    artifact: Artifact, golden: Golden, provider: str, options: LoadOptions, *, coarse: bool
) -> Verdict:
    """Load the artifact in one arithmetic and compare."""
    model = get_provider(provider).load(artifact, options)
    try:
        capabilities = model.capabilities
        half = max(1, len(golden.token_ids) // 2)
        return Verdict(
            provider,
            capabilities,
            compare(golden.logits, run(model, golden, len(golden.token_ids))),
            compare(golden.logits, run(model, golden, half)),
            COARSE if coarse else choose_tolerance(capabilities),
        )
    finally:
        model.close()


def read_golden(folder: Path) -> Golden:
    """Read the golden file of an artifact. Raises ArtifactError."""
    path = folder / GOLDEN_FILE
    try:
        with np.load(path, allow_pickle=False) as file:
            golden = Golden(file["token_ids"], file["logits_indices"], file["logits"])
    except (OSError, ValueError, KeyError, BadZipFile) as error:
        raise ArtifactError(f"cannot read {path}: {error}. Export the model again.") from error
    rows, tokens = golden.logits_indices, golden.token_ids
    if golden.logits.ndim != 2 or len(golden.logits) != len(rows) or not len(rows):
        raise ArtifactError(f"{path} has logits of shape {golden.logits.shape}. Export again.")
    if rows.min() < 0 or rows.max() >= len(tokens):
        raise ArtifactError(f"{path} has logits of tokens that it does not hold. Export again.")
    return golden


def choose_tolerance(capabilities: Capabilities) -> Tolerance:
    """Return how exact a provider has to be, given the types it computes and caches in."""
    if capabilities.kv_cache_dtype == "int8":
        return COARSE
    types = {capabilities.compute_dtype, capabilities.kv_cache_dtype}
    return EXACT if types == {"float32"} else HALF


def compare(expected: NDArray[np.float32], actual: NDArray[np.float32]) -> Comparison:
    """Compare logits, both [num_logits, vocab]."""
    if not np.isfinite(actual).all():
        return Comparison(math.inf, math.inf, 0.0)
    reference, found = expected.astype(np.float64), actual.astype(np.float64)
    spread = float(reference.std()) or 1.0
    log_p, log_q = log_softmax(reference), log_softmax(found)
    divergences = (np.exp(log_p) * (log_p - log_q)).sum(axis=-1)
    agree = reference.argmax(axis=-1) == found.argmax(axis=-1)
    return Comparison(
        max_diff=float(np.abs(reference - found).max()) / spread,
        max_kl=max(0.0, float(divergences.max())),
        top1_agreement=float(agree.mean()),
    )


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return log probabilities over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def run(model: Model, golden: Golden, first: int) -> NDArray[np.float32]:
    """Return the logits of the golden rows, [num_logits, vocab].

    The first `first` tokens are one step; each of the others is a step of its own.
    """
    total = len(golden.token_ids)
    bounds = [0, *range(first, total), total] if first < total else [0, total]
    found: list[NDArray[np.float32]] = []
    for start, stop in pairwise(bounds):
        rows = [int(row) - start for row in golden.logits_indices if start <= row < stop]
        asked = rows or [stop - start - 1]  # a step gives at least one row
        logits = model.run(step_inputs(golden, start, stop, asked, model.capabilities))
        if rows:
            found.extend(logits.copy())
    return np.stack(found)


def step_inputs(
    golden: Golden, start: int, stop: int, rows: list[int], limits: Capabilities
) -> StepInputs:
    """Return a step that computes tokens `start` to `stop` of the one sequence."""
    num_blocks = -(-stop // limits.block_size)
    return StepInputs(
        input_ids=np.ascontiguousarray(golden.token_ids[start:stop]),
        block_table=np.array([list(_blocks(num_blocks, limits.num_blocks))], np.int32),
        cumulative_sequence_lengths=np.array([0, stop - start], np.int32),
        past_sequence_lengths=np.array([start], np.int32),
        attention_metadata=np.array([stop - start, stop, stop], np.int32),
        logits_indices=np.array(rows, np.int32),
    )


def _blocks(count: int, num_blocks: int) -> Iterator[int]:
    """Yield block ids from the end of the pool, so that order and offset matter."""
    assert count <= num_blocks, "the pool is smaller than the golden sequence"
    return iter(range(num_blocks - 1, num_blocks - 1 - count, -1))
