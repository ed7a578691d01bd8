"""Engines on the null provider, and what every test does with them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Unpack

from onnxport.graphs.spec import ArchSpec
from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.classifying import Classifier
from onnxport.serving.config import EngineConfig, EngineOptions
from onnxport.serving.engine import Engine
from onnxport.serving.fallback import Fallback, Standby
from onnxport.serving.guesses import Guesses
from onnxport.serving.intake import SEED_STEP
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.pooling import Embedder
from onnxport.serving.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def never(run: int) -> bool:
    return False


class Clock:
    """A time that stands still, or goes on by itself at every look."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


def null_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    windows: tuple[int | None, ...] = (None,),
    one_table: bool = False,
    max_model_len: int = 512,
    vocab_size: int = 512,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_batch_rows: int | None = None,
    max_batch_tokens: int | None = None,
    max_adapters: int = 0,
    state_slots: int = 0,
    host_states: bool = False,
    fails: Callable[[int], bool] = never,
    transfer_fails: Callable[[int], bool] = never,
    lost_at: Callable[[int], bool] = never,
    fallbacks: Sequence[NullModel] = (),
    latency_s: float = 0.0,
    takes_exact_logits: bool = True,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: frozenset[int] | None = None,
    seed: int | None = 0,
    clock: Callable[[], float] = time.monotonic,
    model_type: Callable[[NullOptions], NullModel] = NullModel,
    speculator: Guesses | None = None,
    embedder: Embedder | None = None,
    classifier: Classifier | None = None,
    base: ArchSpec | None = None,
    final_features: int | None = None,
    **config: Unpack[EngineOptions],
) -> Engine:
    told = 8 if embedder is not None or classifier is not None else 0
    model = model_type(
        NullOptions(
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            block_size=block_size,
            windows=windows,
            one_table=one_table,
            max_model_len=max_model_len,
            max_batch_rows=max_batch_rows,
            max_batch_tokens=max_batch_tokens,
            max_adapters=max_adapters,
            state_slots=state_slots,
            host_states=host_states,
            latency_s=latency_s,
            takes_exact_logits=takes_exact_logits,
            fails=fails,
            transfer_fails=transfer_fails,
            lost_at=lost_at,
            final_features=told if final_features is None else final_features,
        )
    )
    engine_config = EngineConfig(max_num_seqs, max_num_batched_tokens, seed, **config)
    standby = Standby(tuple(Fallback("null", lambda model=one: model) for one in fallbacks))
    return Engine(
        *(model, tokenizer, engine_config, eos_token_ids, clock, standby, speculator),
        embedder=embedder,
        classifier=classifier,
        base=base,
    )


def null_model(engine: Engine) -> NullModel:
    model = engine._runtime.model
    assert isinstance(model, NullModel)
    return model


def submit(
    engine: Engine,
    request_id: str,
    prompt: str | Sequence[int],
    params: SamplingParams = GREEDY,
    **options: Any,
) -> None:
    engine.submit(engine.prepare(request_id, prompt, params, RequestOptions(**options)))


def checked_step(engine: Engine) -> list[CompletionDelta]:
    """Step, check the invariants, and make what free blocks hold unreadable."""
    deltas = engine.step()
    for delta in deltas:  # a broken contract is an AssertionError inside the step
        assert "AssertionError" not in (delta.error or ""), delta.error
    engine.check()
    null_model(engine).poison(engine._runtime.pool.blank_blocks())
    if engine._runtime.states is not None:
        null_model(engine).poison_states(engine._runtime.states.blank_slots())
    return deltas


def run(engine: Engine, max_steps: int = 10_000) -> dict[str, list[CompletionDelta]]:
    """Step until there is no more work; returns every request's deltas."""
    deltas: dict[str, list[CompletionDelta]] = {}
    for _ in range(max_steps):
        if not engine.has_work:
            break
        for delta in checked_step(engine):
            deltas.setdefault(delta.request_id, []).append(delta)
    assert not engine.has_work, f"work is left after {max_steps} steps"
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    return deltas


def tokens(deltas: Sequence[CompletionDelta], index: int = 0) -> list[int]:
    """The tokens of one completion."""
    return [token_id for delta in deltas if delta.index == index for token_id in delta.token_ids]


def reasons(deltas: Sequence[CompletionDelta]) -> list[str]:
    """The finish reasons of all completions, in the order of their ends."""
    return [delta.finish_reason for delta in deltas if delta.finish_reason is not None]


def text(deltas: Sequence[CompletionDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def alone(
    prompt: Sequence[int],
    params: SamplingParams = GREEDY,
    index: int = 0,
    windows: tuple[int | None, ...] = (None,),
    *,
    has_states: bool = False,
) -> list[int]:
    """The tokens of completion `index`, computed as a request of its own.

    It has an engine without prefix cache to itself, its prompt is computed at once, all of its
    logits are exact, and no block is given up. With `has_states` the model has layers with states.
    """
    if params.use_beam_search:  # all of them are looked for together
        return list(_alone(tuple(prompt), params, windows, has_states, index))
    seed = None if params.seed is None else params.seed + index * SEED_STEP
    return list(
        _alone(tuple(prompt), dataclasses.replace(params, n=1, seed=seed), windows, has_states)
    )


@cache
def _alone(
    prompt: tuple[int, ...],
    params: SamplingParams,
    windows: tuple[int | None, ...],
    has_states: bool,
    index: int = 0,
) -> tuple[int, ...]:
    engine = null_engine(
        num_blocks=512,
        max_num_batched_tokens=512,
        windows=windows,
        one_table=True,
        state_slots=16 if has_states else 0,
        takes_exact_logits=False,
        enable_prefix_caching=False,
    )
    submit(engine, "alone", prompt, params)
    return tuple(tokens(run(engine)["alone"], index))


def check_completions(
    deltas: Mapping[str, Sequence[CompletionDelta]],
    prompts: Mapping[str, Sequence[int]],
    params: Mapping[str, SamplingParams],
    alone: Callable[[Sequence[int], SamplingParams, int], Sequence[int]],
) -> None:
    """Each completion is the one of its prompt alone, but for one that failed, the only one."""
    failed = [name for name in prompts if "error" in reasons(deltas[name])]
    assert len(failed) <= 1  # the one that was alone in the step that failed
    for name, prompt in prompts.items():
        for index in range(params[name].n):
            own = alone(prompt, params[name], index)
            found = tokens(deltas[name], index)
            assert found == own[: len(found)]
            assert found == own or name in failed
