"""What options of loading may be, whoever loads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxport.errors import ProviderError
from onnxport.graphs.contract import ACCURACY_LEVELS

if TYPE_CHECKING:
    from onnxport.providers.base import LoadOptions

MOST_THREADS = 1024
ADAPTER_DTYPES = ("float32", "float16", "bfloat16", "int8", "int4")
SIZES = ("threads", "kv_cache_tokens", "block_size", "max_model_len", "state_slots")


def check_load_options(options: LoadOptions) -> None:
    """Refuse what no provider could mean.

    Raises:
        ProviderError: a number is out of its range, or two contradict each other; names the option.
    """
    if options.adapter_dtype not in ("auto", *ADAPTER_DTYPES):
        raise ProviderError(
            f"adapter_dtype is {options.adapter_dtype!r}; it must be auto or one of "
            f"{', '.join(ADAPTER_DTYPES)}"
        )
    _check_types(options)
    _check_ranges(options)
    _check_memory(options)
    if options.matmul_accuracy_level not in (None, *ACCURACY_LEVELS):
        raise ProviderError(
            f"matmul_accuracy_level is {options.matmul_accuracy_level}; it must be one of "
            f"{', '.join(map(str, ACCURACY_LEVELS))}, or be left out to keep the artifact's"
        )


def _check_types(options: LoadOptions) -> None:
    """Refuse what is no number, no list of layers, and neither true nor false."""
    for name in (*SIZES, "max_adapters", "max_adapter_rank", "matmul_accuracy_level"):
        value = getattr(options, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ProviderError(f"{name} is {value!r}; give a whole number")
    layers = options.hidden_layers
    whole = all(type(layer) is int and layer >= 0 for layer in layers)
    if not whole or len(set(layers)) < len(layers):
        raise ProviderError(
            f"hidden_layers are {list(layers)}; they must be distinct layers, numbered from 0"
        )
    for name in ("coarse_head", "hybrid_kv_cache", "final_states"):
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise ProviderError(f"{name} is {value!r}; give true or false")
    if not isinstance(options.capture_graphs, bool | None):
        raise ProviderError(
            f"capture_graphs is {options.capture_graphs!r}; give true or false, or leave it out "
            "to let the provider choose"
        )


def _check_ranges(options: LoadOptions) -> None:
    """Refuse numbers that are too small or too large."""
    for name in SIZES:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ProviderError(
                f"{name} is {value}; it must be at least 1, or be left out to let the "
                "provider choose"
            )
    if options.threads is not None and options.threads > MOST_THREADS:
        raise ProviderError(f"threads is {options.threads}; it must be at most {MOST_THREADS}")
    if options.max_adapters < 0 or options.max_adapter_rank < 1:
        raise ProviderError(
            f"max_adapters is {options.max_adapters} and max_adapter_rank is "
            f"{options.max_adapter_rank}; they must be at least 0 and 1"
        )


def _check_memory(options: LoadOptions) -> None:
    """Refuse a size of the KV cache that is none, or two of them."""
    if options.kv_memory is not None and not _is_memory(options.kv_memory):
        raise ProviderError(
            f"kv_memory is {options.kv_memory!r}; it must be bytes (an integer of at least 1) or "
            "a share of the memory that the weights leave free (a float above 0 and at most "
            "1.0), or be left out to let the provider choose"
        )
    if not 0 < options.kv_share <= 1:
        raise ProviderError(f"kv_share is {options.kv_share}; it must be above 0 and at most 1.0")
    if options.kv_memory is not None and options.kv_cache_tokens is not None:
        raise ProviderError(
            f"kv_cache_tokens is {options.kv_cache_tokens} and kv_memory is {options.kv_memory}; "
            "both size the KV cache, give one of them"
        )


def _is_memory(value: object) -> bool:
    if isinstance(value, float):
        return 0 < value <= 1
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
