"""Engines on the null provider, and what every test does with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from onnxport.providers.null import NullModel, NullOptions
from onnxport.serving.config import EngineConfig
from onnxport.serving.engine import Engine
from onnxport.serving.outputs import CompletionDelta
from onnxport.serving.llm import EngineOptions
from onnxport.serving.params import RequestOptions, SamplingParams
from onnxport.serving.tokenizer import Tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def never(run: int) -> bool:
    return False


def null_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 512,
    vocab_size: int = 512,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_batch_rows: int | None = None,
    fails: Callable[[int], bool] = never,
    latency_s: float = 0.0,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: frozenset[int] | None = None,
    seed: int | None = 0,
    **config: Unpack[EngineOptions],
) -> Engine:
    model = NullModel(
        NullOptions(
            vocab_size=vocab_size,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_batch_rows=max_batch_rows,
            latency_s=latency_s,
            fails=fails,
        )
    )
    engine_config = EngineConfig(max_num_seqs, max_num_batched_tokens, seed, **config)
    return Engine(model, tokenizer, engine_config, eos_token_ids)


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
    model = engine._model
    assert isinstance(model, NullModel)
    model.poison(engine._pool.blank_blocks())
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


def tokens(deltas: Sequence[CompletionDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def text(deltas: Sequence[CompletionDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def alone(prompt: Sequence[int], params: SamplingParams = GREEDY) -> list[int]:
    """The tokens of a request that has an engine to itself, its prompt computed at once."""
    engine = null_engine(num_blocks=512, max_num_batched_tokens=512)
    submit(engine, "alone", prompt, params)
    return tokens(run(engine)["alone"])
