"""Streams that are told several tokens at once: fewer chunks, with the same in them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from onnxport.serving.http.generation import Job, generate
from onnxport.serving.http.service import Engine
from onnxport.serving.outputs import CompletionDelta


def spaced(engine: Engine, job: Job) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """Return what `generate` does, with deltas of a choice joined as the job wants it.

    As in vLLM the first token of a choice is told at once, and so is its end.
    """
    deltas = generate(engine, job)
    return deltas if job.stream_interval == 1 else _joined(deltas, job.stream_interval)


async def _joined(
    deltas: AsyncGenerator[tuple[int, CompletionDelta], None], interval: int
) -> AsyncGenerator[tuple[int, CompletionDelta], None]:
    """Yield deltas of at least so many tokens each, but for the first and the last of a choice."""
    begun: set[int] = set()
    held: dict[int, CompletionDelta] = {}
    failure: Exception | None = None
    async with aclosing(deltas):
        try:
            async for choice, delta in deltas:
                if choice in held:
                    delta = _join(held.pop(choice), delta)
                ends = delta.finish_reason is not None
                if choice in begun and not ends and len(delta.token_ids) < interval:
                    held[choice] = delta
                    continue
                begun.add(choice)
                yield choice, delta
        except Exception as error:
            failure = error
    for choice in sorted(held):
        yield choice, held[choice]
    if failure is not None:
        raise failure


def _join(first: CompletionDelta, then: CompletionDelta) -> CompletionDelta:
    """Return two deltas of a choice, one after the other, as one."""
    logprobs = None
    if first.logprobs is not None or then.logprobs is not None:
        logprobs = (*(first.logprobs or ()), *(then.logprobs or ()))
    return replace(
        then,
        text=first.text + then.text,
        token_ids=first.token_ids + then.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or then.prompt_logprobs,
    )
