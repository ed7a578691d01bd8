"""Workloads that every runner shares; no dependency but NumPy.

W1 is one stream, W2 eight, W3 thirty-two ragged ones, W4 one long prompt, W5 sixteen that begin
alike, W6 eight that a small KV cache cannot hold at once. S1, S2, … S64 are as many streams, C128,
… C16384 one stream behind as long a prompt. Prompts are random token ids, greedy, with end tokens
ignored: speed does not depend on what the tokens mean.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

LOWEST_ID, HIGHEST_ID = 100, 31_000
STREAMS = (1, 2, 4, 8, 16, 32, 64)
CONTEXTS = (128, 512, 2048, 4096, 8192, 16_384)
Range = tuple[int, int]  # both included


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a workload."""

    prompt: list[int]
    new_tokens: int

    @property
    def total_tokens(self) -> int:
        """Prompt and answer."""
        return len(self.prompt) + self.new_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """`streams` requests that arrive together; their first `shared_tokens` are the same."""

    streams: int
    prompt_tokens: int | Range
    new_tokens: int | Range
    shared_tokens: int = 0

    @property
    def longest(self) -> int:
        """Tokens that a prompt and its answer have at most."""
        both = self.prompt_tokens, self.new_tokens
        return sum(one if isinstance(one, int) else one[1] for one in both)

    def requests(self, seed: int = 0, highest_id: int = HIGHEST_ID) -> list[Request]:
        """The requests; others for another seed."""
        random = np.random.default_rng(seed)
        prompts = _lengths(random, self.prompt_tokens, self.streams)
        answers = _lengths(random, self.new_tokens, self.streams)
        low = min(LOWEST_ID, highest_id)
        drawn = [random.integers(low, highest_id + 1, length).tolist() for length in prompts]
        shared = drawn[0][: self.shared_tokens]
        return [
            Request(shared + ids[self.shared_tokens :], new_tokens)
            for ids, new_tokens in zip(drawn, answers, strict=True)
        ]


def _lengths(random: np.random.Generator, given: int | Range, count: int) -> list[int]:
    low, high = (given, given) if isinstance(given, int) else given
    lengths: list[int] = random.integers(low, high + 1, count).tolist()
    return lengths


WORKLOADS = {
    "W1": Workload(streams=1, prompt_tokens=128, new_tokens=128),
    "W2": Workload(streams=8, prompt_tokens=128, new_tokens=128),
    "W3": Workload(streams=32, prompt_tokens=(32, 512), new_tokens=(16, 256)),
    "W4": Workload(streams=1, prompt_tokens=2048, new_tokens=2),
    "W5": Workload(streams=16, prompt_tokens=1056, new_tokens=32, shared_tokens=1024),
    "W6": Workload(streams=8, prompt_tokens=448, new_tokens=192),
    **{f"S{n}": Workload(streams=n, prompt_tokens=128, new_tokens=64) for n in STREAMS},
    **{f"C{n}": Workload(streams=1, prompt_tokens=n, new_tokens=32) for n in CONTEXTS},
}
WARM_UP = Workload(streams=1, prompt_tokens=128, new_tokens=4)


def seed_of(name: str, repetition: int) -> int:
    """A seed of its own for each run, so that no prefix cache finds the prompts of another."""
    return zlib.crc32(f"{name} {repetition}".encode())


def summary(requests: Sequence[Request], times_s: Sequence[Sequence[float]]) -> dict[str, float]:
    """Figures of one run.

    Args:
        requests: What was run; all arrived at once.
        times_s: For each request, seconds from that arrival to each of its tokens.

    Returns:
        prefill_tok_s: prompt tokens over the time until the last first token.
        decode_tok_s: tokens after each first one, over the time after the last first token; exact
            for one stream, and for several a measure of the part that decodes alone.
        output_tok_s: all new tokens over the wall time.
        itl_ms: median time from a token to the next of its stream.
        itl_p99_ms: likewise; 99 % are not longer.
        ttft_s: the last first token.
        wall_s: the last token.

    Raises:
        AssertionError: an answer has not as many tokens as were asked for.
    """
    found = [len(times) for times in times_s]
    asked = [request.new_tokens for request in requests]
    assert found == asked, f"{found} tokens came, and {asked} were asked for"
    last_first = max(times[0] for times in times_s)
    wall = max(times[-1] for times in times_s)
    gaps = [after - before for times in times_s for before, after in pairwise(times)] or [0.0]
    decoded = sum(asked) - len(requests)
    return {
        "prefill_tok_s": sum(len(request.prompt) for request in requests) / last_first,
        "decode_tok_s": decoded / max(wall - last_first, 1e-9),
        "output_tok_s": sum(asked) / wall,
        "itl_ms": 1000 * float(np.median(gaps)),
        "itl_p99_ms": 1000 * float(np.percentile(gaps, 99)),
        "ttft_s": last_first,
        "wall_s": wall,
    }
