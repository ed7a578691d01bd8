"""What a request may ask for, given the context and the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from onnxport.errors import CapacityError, RequestError
from onnxport.kv.table import blocks_for
from onnxport.providers.base import Capabilities


def check_tokens(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise RequestError unless there are tokens and each is in the vocabulary."""
    if not len(token_ids):
        raise RequestError("the prompt is empty; it must hold at least one token", "prompt")
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(
            f"the prompt holds token {bad}; the model's tokens are 0 to {vocab_size - 1}", "prompt"
        )


def max_total_tokens(num_prompt: int, max_tokens: int | None, limits: Capabilities) -> int:
    """Return how long prompt and output together may get, in tokens.

    The last token of an output is never computed, so it needs no room in the cache.

    Raises:
        CapacityError: the context or the whole KV cache is too small; states the arithmetic.
    """
    wanted = 1 if max_tokens is None else max_tokens
    total = num_prompt + wanted
    parts = f"{num_prompt} prompt tokens + {wanted} to generate = {total}"
    if total > limits.max_model_len:
        raise CapacityError(
            f"{parts}, and the context length is {limits.max_model_len} tokens; "
            "shorten the prompt or ask for fewer tokens"
        )
    needed = blocks_for(total - 1, limits.block_size)
    if needed > limits.num_blocks:
        raise CapacityError(
            f"{parts}, which need {needed} KV blocks of {limits.block_size} tokens, and the cache "
            f"has {limits.num_blocks}; shorten the prompt, ask for fewer tokens or give the cache "
            "more room (kv_cache_tokens)"
        )
    if max_tokens is not None:
        return total
    return min(limits.max_model_len, limits.num_blocks * limits.block_size + 1)
