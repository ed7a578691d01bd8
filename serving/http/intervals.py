"""Streams that are told several tokens at once: fewer chunks, with the same in them."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from onnxport.serving.http.generation import generate
from onnxport.serving.http.job import Job
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
    held: dict[int, list[CompletionDelta]] = {}  # joined when they are told, and not before
    counts: dict[int, int] = {}  # tokens of these
    failure: Exception | None = None
    async with aclosing(deltas):
        try:
            async for choice, delta in deltas:
                if delta.progress is not None:  # before the first token, so nothing is held
                    yield choice, delta
                    continue
                own = held.setdefault(choice, [])
                own.append(delta)
                counts[choice] = counts.get(choice, 0) + len(delta.token_ids)
                ends = delta.finish_reason is not None
                if choice in begun and not ends and counts[choice] < interval:
                    continue
                begun.add(choice)
                del held[choice], counts[choice]
                yield choice, _join(own)
        except Exception as error:
            failure = error
    for choice in sorted(held):
        yield choice, _join(held[choice])
    if failure is not None:
        raise failure


def _join(deltas: list[CompletionDelta]) -> CompletionDelta:
    """Return deltas of a choice, one after the other, as one."""
    if len(deltas) == 1:
        return deltas[0]
    logprobs = None
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = tuple(one for delta in deltas for one in delta.logprobs or ())
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(one for delta in deltas for one in delta.token_ids),
        logprobs=logprobs,
        prompt_logprobs=next(
            (delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None
        ),
    )
