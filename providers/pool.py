"""How large a KV pool may be: the arithmetic, without any memory."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from onnxport.errors import CapacityError, ProviderError
from onnxport.graphs.artifact import WEIGHTS_FILE, Artifact
from onnxport.graphs.cache_groups import LayerGroups
from onnxport.graphs.spec import ArchSpec
from onnxport.kv.groups import CacheGroups
from onnxport.providers.base import CACHE_FRACTION, LoadOptions
from onnxport.providers.layer_groups import cache_kinds

logger = logging.getLogger(__name__)

UNKNOWN_BYTES = 2 << 30  # for the pool of a device that does not tell its memory
MOST_SEQUENCES = 256  # of full length: what the default pool is cut to, on a machine with plenty


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The size of a KV pool."""

    block_size: int  # tokens
    num_blocks: int
    block_bytes: int  # over all layers that it has room for, keys and values
    max_model_len: int  # tokens


def plan_pool(
    spec: ArchSpec,
    options: LoadOptions,
    *,
    block_size: int,
    item_bytes: float,
    free_bytes: int | None,
    weight_bytes: int,
    state_bytes: int = 0,
    buffer_bytes: int | None = None,
    groups: LayerGroups | None = None,
    row_bytes: Callable[[int], float] | None = None,
) -> PoolPlan:
    """Size the pool from the options, or from the memory that is free.

    `kv_cache_tokens` and `kv_memory` are taken at their word and rounded down to whole blocks; a
    share of memory is of what the weights leave free, and must leave room for the activations of
    a step (`providers.step_memory` keeps those of decomposed attention within it). Without either,
    the pool takes `kv_share` of it, or as much of UNKNOWN_BYTES, for a share of CACHE_FRACTION,
    where the device does not tell, and no more than MOST_SEQUENCES sequences of full length can
    fill.

    Where layers are in several groups, a token takes room in a block of each: `kv_cache_tokens` fit
    even if no window gives a block up, and a sequence may be as long as it can get when they do.

    Args:
        spec: The model.
        options: `kv_cache_tokens`, `kv_memory`, `kv_share` and `max_model_len` are used.
        block_size: Tokens per block.
        item_bytes: Bytes of one cache element, its share of scales included.
        free_bytes: Memory that can be taken before the weights are loaded; None: not known.
        weight_bytes: What the weights will take of it.
        state_bytes: What the states of sequences will, which layers with a state have.
        buffer_bytes: The largest buffer that the device has, for the keys or values of a layer.
        groups: Layers that share block tables; None: all do, and none gives blocks up.
        row_bytes: Bytes of a row of so many channels, for layers whose heads have several sizes;
            None: `item_bytes` for each.

    Raises:
        ProviderError: `max_model_len` exceeds the model's context, or `kv_memory` is a share of
            memory that is not known.
        CapacityError: The weights and what was asked for, or a single block of each group, do not
            fit.
    """
    longest = options.max_model_len or spec.context_length
    if longest > spec.context_length:
        raise ProviderError(
            f"max_model_len is {longest} tokens, but the artifact was exported with a context of "
            f"{spec.context_length}; ask for at most that, or export with a longer "
            "--context-length"
        )
    groups = groups or LayerGroups.single(len(spec.cached_layers))
    num_groups = len(groups.windows)
    parts = spec.cache_parts
    place_bytes = _place_bytes(spec, groups, item_bytes, row_bytes)
    token_bytes = num_groups * place_bytes
    taken = weight_bytes + state_bytes
    left = None if free_bytes is None else max(0, free_bytes - taken)
    pool_bytes, asked = _asked(options, left, longest, token_bytes)
    fewer = "lower max_num_seqs (--max-num-seqs), " if state_bytes else ""
    block_bytes = block_size * place_bytes
    num_blocks = pool_bytes // block_bytes
    if options.kv_cache_tokens is not None:
        num_blocks -= num_blocks % num_groups  # whole columns
    if buffer_bytes is not None:
        # The widest cache is the first that does not fit.
        widths = [heads * size for _, heads, size in set(cache_kinds(spec, groups))]
        most = buffer_bytes * parts * sum(widths) // (block_bytes * max(widths))
        if most < num_blocks and is_exact(options):
            raise CapacityError(
                f"the KV cache does not fit: {asked}, and the device's buffers hold up to "
                f"{_size(buffer_bytes)}, so the keys or values of a layer can be {most} blocks of "
                f"{block_size} tokens; ask for {most // num_groups * block_size} tokens or fewer"
            )
        num_blocks = min(num_blocks, most)
    if num_blocks < num_groups or (left is not None and num_blocks * block_bytes > left):
        there = _there(options, free_bytes, weight_bytes, state_bytes)
        smallest = f"one block of {block_size} tokens"
        if num_groups > 1:
            smallest = f"{smallest} for each group"
        raise CapacityError(
            f"the KV cache does not fit: {asked}, and {there}. A token "
            f"takes {_told_bytes(spec, groups, item_bytes, row_bytes)} = {token_bytes} bytes, and "
            f"the smallest cache is {smallest}, {_size(num_groups * block_bytes)}. Ask for another "
            f"kv_cache_tokens or kv_memory, {fewer}free memory, or export at a lower precision."
        )
    # What a sequence gives up behind a window, it may take again.
    most_tokens = CacheGroups(groups.windows, block_size).longest(num_blocks) * block_size
    if options.max_model_len is None:
        longest = min(longest, most_tokens)
    elif longest > most_tokens:
        held = f"{most_tokens} tokens"
        if num_groups > 1:
            held = f"for {num_groups} groups of layers, which is a sequence of {held}"
        raise CapacityError(
            f"max_model_len is {longest} tokens, but the KV cache holds {num_blocks} blocks of "
            f"{block_size}, {held}; lower max_model_len, {fewer}or raise kv_cache_tokens or "
            "kv_memory"
        )
    return PoolPlan(block_size, num_blocks, block_bytes, longest)


def _place_bytes(
    spec: ArchSpec,
    groups: LayerGroups,
    item_bytes: float,
    row_bytes: Callable[[int], float] | None,
) -> int:
    """What a token takes in a block of one group."""
    if spec.has_even_caches:
        rows = spec.cache_parts * groups.num_places * spec.num_kv_heads
        return round(rows * spec.head_size * item_bytes)
    of_row = row_bytes or (lambda size: size * item_bytes)
    kinds = set(cache_kinds(spec, groups))
    return round(spec.cache_parts * sum(heads * of_row(size) for _, heads, size in kinds))


def _told_bytes(
    spec: ArchSpec,
    groups: LayerGroups,
    item_bytes: float,
    row_bytes: Callable[[int], float] | None,
) -> str:
    """What a token takes, as messages have it: a product that comes to `_place_bytes` a group."""
    of_groups = f"{len(groups.windows)} groups of " if len(groups.windows) > 1 else ""
    if spec.has_even_caches:
        return (
            f"{spec.cache_parts} x {of_groups}{groups.num_places} layers x {spec.num_kv_heads} "
            f"KV heads x {spec.head_size} channels x {item_bytes} bytes"
        )
    of_row = row_bytes or (lambda size: size * item_bytes)
    kinds = Counter((heads, size) for _, heads, size in set(cache_kinds(spec, groups)))
    told = [
        f"{count} layers x {heads} KV heads x {of_row(size)} bytes for {size} channels"
        for (heads, size), count in sorted(kinds.items())
    ]
    return f"{spec.cache_parts} x {of_groups}({' + '.join(told)})"


def _there(
    options: LoadOptions, free_bytes: int | None, weight_bytes: int, state_bytes: int
) -> str:
    """What memory there is for a pool."""
    if free_bytes is None:
        return "the device does not tell its memory"
    slots = (
        f", slots for {options.max_adapters} adapters of rank {options.max_adapter_rank} "
        "included (max_adapters, max_adapter_rank)"
        if options.max_adapters
        else ""
    )
    states = f", and states of sequences {_size(state_bytes)} (state_slots)" if state_bytes else ""
    return (
        f"{_size(max(0, free_bytes - weight_bytes - state_bytes))} are left, for "
        f"{_size(free_bytes)} are free and the weights take {_size(weight_bytes)}{slots}{states}"
    )


def is_exact(options: LoadOptions) -> bool:
    """Whether the pool's size was given in tokens or bytes, not as a share of what is there."""
    return options.kv_cache_tokens is not None or isinstance(options.kv_memory, int)


def check_weights(free_bytes: int | None, weight_bytes: int) -> None:
    """Refuse weights that leave nothing, before time is spent on them; see `plan_pool`.

    Raises:
        CapacityError: They do not fit.
    """
    if free_bytes is not None and weight_bytes >= free_bytes:
        raise CapacityError(
            f"the weights do not fit: they take {_size(weight_bytes)}, and {_size(free_bytes)} are "
            "free. Free memory, or export at a lower precision."
        )


def check_made(free_bytes: int, total_bytes: int, made_bytes: int, what: str, advice: str) -> None:
    """Refuse weights of a device that cannot fit on the host, where they are made first.

    Where they do not fit into what is free now, a warning says so: what a container may take is
    counted with files that the system has read and can let go of.

    Args:
        free_bytes: of the host.
        total_bytes: of the host.
        made_bytes: what is made beside what is stored.
        what: of them is made.
        advice: how to do without.

    Raises:
        CapacityError: the host has not so much memory.
    """
    taken = f"{what} take {_size(made_bytes)} of the host's memory"
    if made_bytes >= total_bytes:
        raise CapacityError(
            f"the weights do not fit: {taken}, which is {_size(total_bytes)}. Choose a host with "
            f"more memory, {advice}, or export at a lower precision."
        )
    if made_bytes and made_bytes >= free_bytes:
        logger.warning("%s, of which %s are free", taken, _size(free_bytes))


def least_bytes(artifact: Artifact) -> int:
    """What the weights take on a processor at least, by what the manifest says of them.

    What is converted is there twice: see `ort.weight_bytes`.
    """
    return max(artifact.manifest.files[WEIGHTS_FILE].size, 2 * converted_bytes(artifact))


def converted_bytes(artifact: Artifact) -> int:
    """What projections of 16 bits take as float32, at least; 0 where there are none.

    Experts may stay as they are, and attention of latents is not counted.
    """
    spec = artifact.manifest.model
    if artifact.manifest.precision != "fp16" or spec.experts is not None:
        return 0
    if spec.latent is not None:
        return 12 * spec.num_layers * spec.hidden_size * spec.intermediate_size
    linear = 0 if spec.linear is None else spec.linear.projected_width
    products = 2 if spec.ungated else 3
    numbers = 0
    for layer in range(spec.num_layers):
        parts = spec.qkv_parts(layer)
        numbers += linear * spec.is_linear(layer)
        numbers += (parts[0] + sum(parts)) * spec.has_attention(layer)
        if spec.has_mlp(layer):
            numbers += products * spec.inner_size(layer)
    return 4 * spec.hidden_size * numbers


def check_int8_experts(free_bytes: int, made_bytes: int) -> None:
    """Refuse experts in MXFP4 that do not fit in 8 bits, before they are made.

    Raises:
        CapacityError: They do not.
    """
    if made_bytes >= free_bytes:
        raise CapacityError(
            f"the weights do not fit: experts in MXFP4 become 8 bits here, which take "
            f"{_size(made_bytes)}, and {_size(free_bytes)} are free. Free memory, choose a "
            "provider that computes them as they are (see docs/providers.md), or export without "
            "--expert-precision."
        )


def _asked(
    options: LoadOptions, left: int | None, longest: int, token_bytes: int
) -> tuple[int, str]:
    """Bytes that the pool may take, and who said so."""
    if options.kv_cache_tokens is not None:
        asked = options.kv_cache_tokens * token_bytes
        return asked, f"kv_cache_tokens is {options.kv_cache_tokens}, {_size(asked)}"
    memory = options.kv_memory
    if isinstance(memory, int):
        return memory, f"kv_memory is {_size(memory)}"
    if memory is not None and left is None:
        raise ProviderError(
            f"kv_memory is {memory}, a share, but the device does not tell how much memory it has; "
            "give a size such as 2GiB"
        )
    if memory is not None and left is not None:
        asked = int(left * memory)
        return asked, f"kv_memory is {memory} of what the weights leave free, {_size(asked)}"
    most = MOST_SEQUENCES * longest * token_bytes
    if left is None:
        asked = min(int(UNKNOWN_BYTES * options.kv_share / CACHE_FRACTION), most)
        return asked, f"it takes {_size(asked)}, for the device does not tell its memory"
    asked = min(int(left * options.kv_share), most)
    return asked, f"it takes {options.kv_share} of what the weights leave free, {_size(asked)}"


def _size(count: int) -> str:
    return f"{count} bytes" if count < 2**20 else f"{count / 2**20:,.1f} MiB"
