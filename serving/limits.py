"""What a request may ask for, given the context and the KV cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from onnxport.errors import CapacityError, RequestError
from onnxport.kv.groups import CacheGroups
from onnxport.kv.table import blocks_for
from onnxport.providers.base import Capabilities
from onnxport.serving.params import SamplingParams
from onnxport.serving.request import TOKEN_ID_TYPECODE


def token_array(token_ids: Iterable[int], vocab_size: int) -> array[int]:
    """Return the prompt's tokens as the array that a request keeps.

    Raises:
        RequestError: there are none, or one is not a token of the model.
    """
    try:
        tokens = array(TOKEN_ID_TYPECODE, token_ids)
    except (TypeError, OverflowError) as error:
        raise RequestError(f"the prompt holds what is no token id: {error}", "prompt") from error
    if not tokens:
        raise RequestError("the prompt is empty; it must hold at least one token", "prompt")
    low, high = min(tokens), max(tokens)
    if low < 0 or high >= vocab_size:
        bad = low if low < 0 else high
        raise RequestError(
            f"the prompt holds token {bad}; the model's tokens are 0 to {vocab_size - 1}", "prompt"
        )
    return tokens


def max_total_tokens(
    num_prompt: int,
    max_tokens: int | None,
    limits: Capabilities,
    *,
    only_prompt: bool = False,
    ends_at_context: bool = False,
) -> int:
    """Return how long prompt and output together may get, in tokens.

    The last token of an output is never computed, so it needs no room in the cache.

    Args:
        num_prompt: tokens of the prompt.
        max_tokens: as the request asks.
        limits: of the model.
        only_prompt: as RequestOptions has it.
        ends_at_context: likewise.

    Raises:
        CapacityError: the context or the whole KV cache is too small; states the arithmetic.
    """
    wanted = 1 if max_tokens is None else max_tokens
    if ends_at_context:
        room = longest_total(limits, only_prompt=only_prompt) - num_prompt
        wanted = min(wanted, max(room, 1))
    total = num_prompt + wanted
    parts = f"{num_prompt} prompt tokens + {wanted} to generate = {total}"
    if only_prompt:
        parts = f"{num_prompt} prompt tokens"
    if total > limits.max_model_len + only_prompt:
        raise CapacityError(
            f"{parts}, and the context length is {limits.max_model_len} tokens; "
            "shorten the prompt or ask for fewer tokens",
            num_prompt,
            limits.max_model_len,
        )
    groups = CacheGroups(limits.windows, limits.block_size)
    needed = groups.resident(blocks_for(total - 1, limits.block_size))
    if needed > limits.num_blocks:
        raise CapacityError(
            f"{parts}, which need {needed} KV blocks of {limits.block_size} tokens, and the cache "
            f"has {limits.num_blocks}; shorten the prompt, ask for fewer tokens or give the cache "
            "more room (kv_cache_tokens)"
        )
    return longest_total(limits, only_prompt=only_prompt) if max_tokens is None else total


def beams_total(num_prompt: int, params: SamplingParams, longest: int, limits: Capabilities) -> int:
    """Return how long prompt and output of a beam search may get, in tokens.

    Its beams run together or not at all, so that the cache has to have room for all of them.

    Args:
        num_prompt: tokens of the prompt.
        params: of the request.
        longest: that each may get, were it alone.
        limits: of the model.

    Raises:
        CapacityError: the whole KV cache is too small; states the arithmetic.
    """
    width = params.num_sequences
    room = longest_beams(num_prompt, width, longest, limits)
    wanted = num_prompt + 1 if params.max_tokens is None else longest
    if room >= wanted:
        return room
    needed = beam_blocks(num_prompt, wanted, width, limits)
    raise CapacityError(
        f"{width} beams of {num_prompt} prompt tokens, whose blocks they share, + "
        f"{wanted - num_prompt} to generate need {needed} KV blocks of {limits.block_size} tokens, "
        f"and the cache has {limits.num_blocks}; ask for fewer beams or tokens, shorten the prompt "
        "or give the cache more room (kv_cache_tokens)"
    )


def longest_beams(num_prompt: int, width: int, longest: int, limits: Capabilities) -> int:
    """Return how long beams may get for which there is room together; at most `longest`.

    Args:
        num_prompt: tokens of the prompt.
        width: how many beams there may be.
        longest: that each may get, were it alone.
        limits: of the model.

    Returns:
        Prompt and output, in tokens; the prompt's if there is no room for a token more.
    """
    low, high = num_prompt, max(num_prompt, longest)
    while low < high:
        middle = (low + high + 1) // 2
        if beam_blocks(num_prompt, middle, width, limits) <= limits.num_blocks:
            low = middle
        else:
            high = middle - 1
    return low


def beam_blocks(num_prompt: int, total: int, width: int, limits: Capabilities) -> int:
    """Return how many blocks beams hold at once at most, on their way to `total` tokens.

    They share the whole blocks of the prompt, but for layers with a window each is counted alone.
    """
    groups = CacheGroups(limits.windows, limits.block_size)
    columns = blocks_for(total - 1, limits.block_size)
    if groups.windowed:
        return width * groups.resident(columns)
    shared = min(columns, num_prompt // limits.block_size)
    return (shared + width * (columns - shared)) * len(groups)


def remaining_total(
    num_tokens: int, max_total: int, limits: Capabilities, *, only_prompt: bool = False
) -> int:
    """Return how long a sequence that was accepted for another model may get on this one.

    Args:
        num_tokens: that it has, prompt and output.
        max_total: how long it was to get there.
        limits: of this model.
        only_prompt: as RequestOptions has it.

    Raises:
        CapacityError: there is no room for another token.
    """
    longest = longest_total(limits, only_prompt=only_prompt)
    if num_tokens >= longest:
        raise CapacityError(
            f"the request has {num_tokens} tokens, and the provider that took over when the first "
            f"one was lost ({limits.provider}) has room for {longest} with what is generated; send "
            "a shorter one, or give that provider more room (kv_cache_tokens, max_model_len)"
        )
    return min(max_total, longest)


def longest_total(limits: Capabilities, *, only_prompt: bool = False) -> int:
    """Return how long prompt and output of any sequence may get, in tokens."""
    longest = limits.max_model_len + only_prompt
    groups = CacheGroups(limits.windows, limits.block_size)
    return min(longest, groups.longest(limits.num_blocks) * limits.block_size + 1)
