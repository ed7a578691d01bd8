"""The same prompts in every way the engine can compute them: the tokens must not change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from onnxport.errors import ProviderError
from onnxport.providers.base import Model
from onnxport.serving.config import EngineConfig
from onnxport.serving.verify.comparison import gap
from onnxport.serving.verify.decoding import Decoded, Tokens, decode
from onnxport.serving.verify.prompts import Prompt, Prompts, longest_need
from onnxport.serving.verify.sequence import last_logits

State = Literal["passed", "failed", "skipped"]
CHUNK_ROWS = 4
CHUNK_TOKENS = 13  # of one step; divides no block


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a run first chose another token; what comes after is of another text."""

    prompt_tokens: int  # length of the prompt
    position: int  # of the token, from 0, in what was generated
    expected: int
    found: int
    gap: float  # of the worse of both below the likeliest, in standard deviations of the logits
    allowed: float  # the largest gap that rounding explains


@dataclass(frozen=True, slots=True)
class Variant:
    """The tokens of one way to compute, against those that were expected."""

    name: str
    state: State
    reason: str  # why it was skipped, or failed whatever its tokens are; "" otherwise
    num_tokens: int  # that were compared
    agreement: float  # share of them up to each prompt's first divergence
    divergences: tuple[Divergence, ...]


def skipped(name: str, reason: str) -> Variant:
    """A variant that could not be tried."""
    return Variant(name, "skipped", reason, 0, 0.0, ())


def judge(
    name: str,
    model: Model,
    expected: Mapping[Prompt, Tokens],
    found: Sequence[tuple[Prompt, Tokens]],
    allowed: float,
) -> Variant:
    """Compare generated tokens; another one must be a near tie by the model's own logits.

    Args:
        name: of the variant.
        model: computes the logits at a divergence, anew and in one step.
        expected: the tokens of each prompt.
        found: prompts and their tokens; those that are not expected are left out.
        allowed: see `comparison.tie_limit`; 0 where the arithmetic gives the same bits always.
    """
    compared = [(prompt, tokens) for prompt, tokens in found if prompt in expected]
    if not compared:
        return skipped(name, "no prompt fits the context and the KV cache")
    total = agreed = 0
    divergences = []
    for prompt, tokens in compared:
        wanted = expected[prompt]
        same = _num_same(wanted, tokens)
        total += len(wanted)
        agreed += same
        if same < len(wanted):
            both = wanted[same], tokens[same]
            found_gap = gap(last_logits(model, [*prompt, *wanted[:same]]), both)
            divergences.append(Divergence(len(prompt), same, *both, found_gap, allowed))
    passed = not divergences or (allowed > 0 and all(one.gap <= allowed for one in divergences))
    return Variant(
        name, "passed" if passed else "failed", "", total, agreed / total, tuple(divergences)
    )


def _num_same(expected: Tokens, found: Tokens) -> int:
    """How many tokens come before the first that differs."""
    pairs = enumerate(zip(expected, found, strict=True))
    return next((at for at, (one, other) in pairs if one != other), len(expected))


def decode_alone(model: Model, prompts: Sequence[Prompt]) -> dict[Prompt, Tokens]:
    """Return the tokens of each prompt by itself: whole, and nothing shared.

    Raises:
        ProviderError: a request failed, or a step that was tried again.
    """
    config = _config(rows=1, tokens=max(map(len, prompts), default=1))
    found = decode(model, prompts, config, one_by_one=True)
    if found.failure:
        raise ProviderError(f"while prompts were decoded alone, {found.failure}")
    return dict(zip(prompts, found.tokens, strict=True))


def run_variants(
    model: Model, prompts: Prompts, alone: Mapping[Prompt, Tokens], allowed: float
) -> tuple[Variant, ...]:
    """Decode batched, chunked, cached and preempted; each must give the tokens of `alone`.

    A step that fails is a failure of its variant, also where the engine got over it.

    Raises:
        ProviderError: the device failed.
    """
    variants: dict[str, Callable[[Model, Prompts], tuple[list[Prompt], Decoded] | str]] = {
        "batched": _batched,
        "chunked": _chunked,
        "cached": _cached,
        "preempted": _preempted,
    }
    return tuple(
        _variant(name, model, run(model, prompts) if alone else "", alone, allowed)
        for name, run in variants.items()
    )


def _variant(
    name: str,
    model: Model,
    done: tuple[list[Prompt], Decoded] | str,
    alone: Mapping[Prompt, Tokens],
    allowed: float,
) -> Variant:
    if isinstance(done, str):
        return skipped(name, done or "no prompt fits the context and the KV cache")
    order, decoded = done
    found = judge(name, model, alone, list(zip(order, decoded.tokens, strict=True)), allowed)
    return replace(found, state="failed", reason=decoded.failure) if decoded.failure else found


def _batched(model: Model, prompts: Prompts) -> tuple[list[Prompt], Decoded] | str:
    """All at once, each whole."""
    order = list(prompts.all)
    if len(order) < 2 or model.capabilities.max_batch_rows == 1:
        return "there is one prompt, or one row, alone"
    config = _config(rows=len(order), tokens=sum(map(len, order)))
    return order, decode(model, order, config)


def _chunked(model: Model, prompts: Prompts) -> tuple[list[Prompt], Decoded] | str:
    """In steps of a few tokens, which prompts and decodes share."""
    order = list(prompts.all)
    return order, decode(model, order, _config(CHUNK_ROWS, CHUNK_TOKENS))


def _cached(model: Model, prompts: Prompts) -> tuple[list[Prompt], Decoded] | str:
    """All at once with the prefix cache, and all again when it is warm."""
    order = list(prompts.all)
    config = _config(rows=len(order), tokens=sum(map(len, order)), caching=True)
    decoded = decode(model, [*order, *order], config)
    if not (decoded.failure or decoded.stats.prefix_cache_hits):
        return f"no prompt fills a block of {model.capabilities.block_size} tokens"
    return [*order, *order], decoded


def _preempted(model: Model, prompts: Prompts) -> tuple[list[Prompt], Decoded] | str:
    """In so few blocks that requests have to yield to each other."""
    limits = model.capabilities
    # Those that need another block while they decode come first and start together.
    order = list(dict.fromkeys((*prompts.own, *prompts.fixed)))
    num_blocks = max(3 * len(limits.windows), longest_need(order, limits))
    if num_blocks > limits.num_blocks:
        return f"the KV cache has {limits.num_blocks} blocks, too few to share"
    config = _config(rows=len(order), tokens=sum(map(len, order)))
    decoded = decode(model, order, config, num_blocks=num_blocks)
    if not (decoded.failure or decoded.stats.num_preemptions):
        return f"nothing had to yield in {num_blocks} blocks of {limits.block_size} tokens"
    return order, decoded


def _config(rows: int, tokens: int, *, caching: bool = False) -> EngineConfig:
    """An engine's limits."""
    return EngineConfig(
        max_num_seqs=rows,
        max_num_batched_tokens=max(rows, tokens),
        enable_prefix_caching=caching,
        preemption="recompute",
    )
