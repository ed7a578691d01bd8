"""Workloads that every runner shares; no dependency but NumPy.

W1 is one stream, W2 eight, W4 one long prompt, W5 sixteen that begin alike, W6 eight that a small
KV cache cannot hold at once. Prompts are random token ids, greedy, with end tokens ignored: speed
does not depend on what the tokens mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

LOWEST_ID, HIGHEST_ID = 100, 31_000


@dataclass(frozen=True, slots=True)
class Workload:
    """`streams` equal requests that arrive together; their first `shared_tokens` are the same."""

    streams: int
    prompt_tokens: int
    new_tokens: int
    shared_tokens: int = 0

    def prompts(self, seed: int = 0) -> list[list[int]]:
        """Token ids of each request's prompt."""
        random = np.random.default_rng(seed)
        shape = (self.streams, self.prompt_tokens)
        ids = random.integers(LOWEST_ID, HIGHEST_ID, shape)
        ids[:, : self.shared_tokens] = ids[0, : self.shared_tokens]
        prompts: list[list[int]] = ids.tolist()
        return prompts


WORKLOADS = {
    "W1": Workload(streams=1, prompt_tokens=128, new_tokens=128),
    "W2": Workload(streams=8, prompt_tokens=128, new_tokens=128),
    "W4": Workload(streams=1, prompt_tokens=2048, new_tokens=2),
    "W5": Workload(streams=16, prompt_tokens=1056, new_tokens=32, shared_tokens=1024),
    "W6": Workload(streams=8, prompt_tokens=448, new_tokens=192),
}


def summary(workload: Workload, first_s: list[float], finished_s: list[float]) -> dict[str, float]:
    """Figures of one run from each request's first-token and finish times.

    Args:
        workload: What was run.
        first_s: Seconds from the common arrival to each request's first token.
        finished_s: Seconds from the common arrival to each request's last token.

    Returns:
        prefill_tok_s: prompt tokens over the time until the last first token.
        decode_tok_s: tokens after each first one, over the time after the last first token; exact
            for one stream, and for several a measure of the part that decodes alone.
        output_tok_s: all new tokens over the wall time.
        ttft_s: the last first token.
        wall_s: the last token.
    """
    last_first, wall = max(first_s), max(finished_s)
    decoded = workload.streams * (workload.new_tokens - 1)
    return {
        "prefill_tok_s": workload.streams * workload.prompt_tokens / last_first,
        "decode_tok_s": decoded / max(wall - last_first, 1e-9),
        "output_tok_s": workload.streams * workload.new_tokens / wall,
        "ttft_s": last_first,
        "wall_s": wall,
    }
