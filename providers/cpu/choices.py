"""What the `cpu` provider chooses by a load's options and the processor, and what it refuses."""

from __future__ import annotations

import logging
from pathlib import Path

from onnxport.errors import OptionError, ProviderError
from onnxport.graphs.spec import ArchSpec
from onnxport.providers.base import LoadOptions
from onnxport.providers.cpu import library
from onnxport.providers.cpu.caches import TILE, Layout, supported_dtypes
from onnxport.providers.host_options import refuse_device_options

logger = logging.getLogger(__name__)

COMPUTE_DTYPE = "float32"  # of activations
MAX_HEAD_SIZE, HEAD_SIZE_MULTIPLE = 512, 8  # of the kernel
MAX_LATENT_SIZE, LATENT_MULTIPLE = 1024, TILE  # of its rows of latents
MAX_KEY_SIZE, MAX_TAPS = 256, 8  # of those of linear attention
BLOCK_SIZE = TILE  # tokens; the kernel takes multiples
NO_KERNEL = (
    "the C++ attention kernel was not built (no C++17 compiler when onnxport was installed), so "
    "attention runs in the slower decomposed graph; install a compiler and reinstall onnxport"
)


def check(options: LoadOptions) -> None:
    """Refuse what the processor has not, and what could have no effect."""
    if options.dtype not in ("auto", COMPUTE_DTYPE):
        raise ProviderError(
            f"dtype is {options.dtype!r}; the cpu provider computes in {COMPUTE_DTYPE} only, ask "
            "for that or auto"
        )
    refuse_device_options("cpu", options)


def choose_kernel(options: LoadOptions, spec: ArchSpec) -> Path | None:
    """The kernel library to use, None for the decomposed graph.

    Raises:
        ProviderError: Another attention was asked for than there is, or ours, whose kernels have no
            room for the sizes of layers with a state.
    """
    if options.attention not in (None, "custom", "decomposed"):
        raise ProviderError(
            f"the cpu provider has no {options.attention!r} attention, for ONNX Runtime ships no "
            "CPU kernel; ask for custom or decomposed"
        )
    kernel = None if options.attention == "decomposed" else library.find_library()
    if kernel is None and options.attention == "custom":
        raise ProviderError(f"custom attention was asked for, but {NO_KERNEL}")
    if kernel is None and options.attention is None:
        logger.warning("%s", NO_KERNEL)
    if kernel and (reason := _why_not_linear(spec)):
        if options.attention == "custom":
            raise ProviderError(f"custom attention was asked for, but {reason}; leave it out")
        logger.warning("%s, so attention runs in the slower decomposed graph", reason)
        return None
    if kernel and options.attention is None and (unfit := _unfit(spec)):
        logger.warning("%s, so attention runs in the slower decomposed graph", unfit)
        return None
    return kernel


def _unfit(spec: ArchSpec) -> str:
    """Why the kernel does not take a model's heads; "" if it does."""
    most, multiple = MAX_HEAD_SIZE, HEAD_SIZE_MULTIPLE
    sizes = {spec.heads_of(layer).head_size for layer in range(spec.num_layers)}
    what = "heads have"
    if spec.latent is not None:
        most, multiple = MAX_LATENT_SIZE, LATENT_MULTIPLE
        sizes, what = {spec.head_size, spec.latent.kv_rank}, "rows of latents, or these, have"
    wrong = [size for size in sorted(sizes) if size > most or size % multiple]
    if not wrong:
        return ""
    return (
        f"the model's {what} {wrong[0]} channels, and the C++ attention kernel takes multiples of "
        f"{multiple} up to {most}"
    )


def _why_not_linear(spec: ArchSpec) -> str:
    """Why the kernels cannot run layers with a state; "" where they can."""
    linear = spec.linear
    if linear is None:
        return ""
    key_size = linear.recurrent_state[-1] if linear.recurrent_state else 0
    if key_size <= MAX_KEY_SIZE and linear.kernel <= MAX_TAPS:
        return ""
    return (
        f"the keys of linear attention have {key_size} channels and its convolution "
        f"{linear.kernel} taps, and the C++ kernels take up to {MAX_KEY_SIZE} and {MAX_TAPS}"
    )


def choose_cache(
    options: LoadOptions, kernel: Path | None, *, is_exact: bool, latent: bool = False
) -> tuple[str, Layout]:
    """The type of the caches, and how they lie in memory.

    Where weights are multiplied with int8, 16 bits in attention are no loss of precision: the
    automatic choice is bfloat16 if the processor multiplies it, else float16 if it converts that.
    """
    dtype = options.kv_cache_dtype
    allowed = supported_dtypes(custom=kernel is not None, latent=latent)
    if dtype not in ("auto", *allowed):
        attention = f"{'custom' if kernel else 'decomposed'} attention"
        raise OptionError(
            f"kv_cache_dtype is {dtype!r}; the cpu provider's {attention}{' of latents' * latent} "
            f"stores {', '.join(allowed)} or auto"
        )
    if kernel is None:
        return "float32", "plain"
    in_pairs = not is_exact and library.prefers_pairs()
    if dtype == "auto":
        half = "float32" if is_exact or not library.converts_half() else "float16"
        dtype = "bfloat16" if in_pairs else half
    if in_pairs and dtype == "bfloat16":
        return dtype, "paired"
    return dtype, "rows" if latent else "tiled"


def choose_block_size(options: LoadOptions, kernel: Path | None) -> int:
    """The tokens of a block of the cache."""
    size = BLOCK_SIZE if options.block_size is None else options.block_size
    if size < 1 or (kernel and size % BLOCK_SIZE):
        raise ProviderError(
            f"block_size is {size}; the cpu provider's kernel takes positive multiples of "
            f"{BLOCK_SIZE}, the decomposed graph any positive number"
        )
    return size
