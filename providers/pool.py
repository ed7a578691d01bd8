"""How large a KV pool may be: the arithmetic, without any memory."""

from __future__ import annotations

from dataclasses import dataclass

from onnxport.errors import CapacityError, ProviderError
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.base import LoadOptions

CACHE_FRACTION = 0.4  # of the memory that the weights leave free, unless told otherwise
MOST_SEQUENCES = 256  # of full length; a larger default pool could not be used


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The size of a KV pool."""

    block_size: int  # tokens
    num_blocks: int
    block_bytes: int  # over all layers, keys and values
    max_model_len: int  # tokens


def plan_pool(
    spec: ArchSpec,
    options: LoadOptions,
    *,
    block_size: int,
    item_bytes: int,
    free_bytes: int,
    weight_bytes: int,
) -> PoolPlan:
    """Size the pool from the options, or from the memory that is free.

    Args:
        spec: The model.
        options: `kv_cache_tokens` and `max_model_len` are used; None lets the memory decide.
        block_size: Tokens per block.
        item_bytes: Bytes of one cache element.
        free_bytes: Memory that can be taken before the weights are loaded.
        weight_bytes: What the weights will take of it.

    Raises:
        ProviderError: `max_model_len` exceeds the model's context.
        CapacityError: Weights and the smallest useful cache do not fit.
    """
    longest = options.max_model_len or spec.context_length
    if longest > spec.context_length:
        raise ProviderError(
            f"max_model_len is {longest} tokens, but the artifact was exported with a context of "
            f"{spec.context_length}; ask for at most that, or export with a longer "
            "--context-length"
        )
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_size * item_bytes
    usable = int((free_bytes - weight_bytes) * CACHE_FRACTION)
    tokens = options.kv_cache_tokens
    if tokens is None:
        tokens = min(usable // token_bytes, MOST_SEQUENCES * longest)
    num_blocks = tokens // block_size
    needed = weight_bytes + num_blocks * block_size * token_bytes
    if num_blocks < 1 or needed > free_bytes:
        raise CapacityError(
            f"the weights take {_mib(weight_bytes)} and a KV cache of {tokens} tokens takes "
            f"{_mib(tokens * token_bytes)} ({token_bytes} bytes a token), but {_mib(free_bytes)} "
            "are free; ask for fewer --kv-cache-tokens (at least one block of "
            f"{block_size}), free memory, or export at a lower precision"
        )
    pool_tokens = num_blocks * block_size
    if options.max_model_len is None:
        longest = min(longest, pool_tokens)
    elif longest > pool_tokens:
        raise CapacityError(
            f"max_model_len is {longest} tokens, but the KV cache holds {num_blocks} blocks of "
            f"{block_size}, {pool_tokens} tokens; lower max_model_len or raise kv_cache_tokens"
        )
    return PoolPlan(block_size, num_blocks, block_size * token_bytes, longest)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f} MiB"
