"""How long prompt and answer took, as llama.cpp's server tells it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onnxport.serving.outputs import CompletionDelta


@dataclass(slots=True)
class Span:
    """When the sequences of one request were computed, on `time.monotonic`'s clock."""

    start_s: float | None = None  # the first step of the first one
    prompted_s: float = 0.0  # the first token of the last one
    end_s: float = 0.0  # the last token of any

    def add(self, delta: CompletionDelta) -> None:
        """Take what is told of one sequence."""
        if delta.times is None:
            return
        start_s, first_s, last_s = delta.times
        self.start_s = start_s if self.start_s is None else min(self.start_s, start_s)
        self.prompted_s = max(self.prompted_s, first_s)
        self.end_s = max(self.end_s, last_s)

    def body(
        self, num_prompt: int, num_cached: int, num_generated: int, num_begun: int
    ) -> dict[str, Any]:
        """Return llama.cpp's `timings`.

        Time that requests wait for their first step is none of these.

        Args:
            num_prompt: tokens of the prompts.
            num_cached: those that were found in the cache.
            num_generated: tokens of the answers so far.
            num_begun: answers that have any; the first token of each comes with the prompt, so it
                takes none of the time behind that.
        """
        prompt_s = generated_s = 0.0
        if self.start_s is not None:
            prompt_s = self.prompted_s - self.start_s
            generated_s = self.end_s - self.prompted_s
        computed = num_prompt - num_cached
        return {
            "cache_n": num_cached,
            **_rates("prompt", computed, computed, prompt_s),
            **_rates("predicted", num_generated, num_generated - num_begun, generated_s),
        }


def prompt_progress(delta: CompletionDelta, num_prompt: int) -> dict[str, Any]:
    """Return what llama.cpp calls `prompt_progress`, as a part of a chunk; {}: nothing is told.

    Args:
        delta: that tells how much is computed; what has tokens does not.
        num_prompt: tokens of the prompt.
    """
    if delta.progress is None:
        return {}
    told = {
        "total": num_prompt,
        "cache": delta.num_cached_tokens,
        "processed": delta.progress.num_computed,
        "time_ms": round(1e3 * delta.progress.elapsed_s),
    }
    return {"prompt_progress": told}


def _rates(what: str, count: int, num_timed: int, elapsed_s: float) -> dict[str, Any]:
    """Return a number of tokens, their time, and how these go together; 0 where one is missing.

    Args:
        what: the tokens are.
        count: of all of them.
        num_timed: those that took the time.
        elapsed_s: the time.
    """
    return {
        f"{what}_n": count,
        f"{what}_ms": 1e3 * elapsed_s,
        f"{what}_per_token_ms": 1e3 * elapsed_s / num_timed if num_timed else 0.0,
        f"{what}_per_second": num_timed / elapsed_s if elapsed_s > 0.0 else 0.0,
    }
