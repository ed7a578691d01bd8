"""What tells devices that ONNX Runtime drives apart; `providers.device` does the rest for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from onnxport.graphs.passes.native import NativeLimits
from onnxport.providers.device_logits import PageLock
from onnxport.providers.device_slots import Copy


@dataclass(frozen=True, slots=True)
class LoraKernel:
    """How a device computes adapters by a kernel of ours.

    Attributes:
        compile: type of activations and adapters -> the compiled kernel; raises ProviderError.
        library: with the operator AddLora for its execution provider; None: it was not built.
        copy: to the device's memory.
        max_rank: the largest rank that the kernel has room for.
    """

    compile: Callable[[str], bytes]
    library: Path | None
    copy: Copy
    max_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a device wants."""

    provider: str
    device: str  # its name
    dtypes: tuple[str, ...]  # of activations, the preferred first
    native: NativeLimits | None  # of its PagedAttention; None: it has none
    native_block_size: Callable[[int], int]  # head size -> tokens
    why_not_native: str = ""  # why `native` is None
    block_size_power: bool = True  # native blocks are powers of two of at least 16 tokens
    max_batch_rows: int | None = None
    # What its execution provider takes so that it can replay decode steps, see providers.replay;
    # None: it cannot.
    capture_options: Mapping[str, str] | None = None
    selects_logits: bool = False  # it runs graphs.logit_selection; see providers.device_logits
    page_lock: PageLock | None = None  # makes host memory fast to copy to; None: it cannot
    lora_kernel: LoraKernel | None = None  # None: adapters are computed in standard operators
    bucketed: bool = False  # it compiles a graph for each shape: pad to few of them
    # Caches of two layers may be one memory, for it runs node after node. A graph that is compiled
    # as a whole may copy one of them before the other is written.
    shares_caches: bool = True
    has_gelu: bool = True  # of ONNX, by tanh and exact; else they are written out
    has_min_max: bool = True  # of floats; else they are written out
    # Whether its products may round activations to int8 where accuracy_level is 4; others read no
    # level, and compute in the type of the activations.
    int8_products: bool = False
    joins_products: bool = False  # each node costs, or it has no Split in many parts
    expected_on_host: frozenset[str] = frozenset()  # operator types that it is known not to have
    free_bytes: int | None = None  # device memory; None: it does not tell
    buffer_bytes: int | None = None  # its largest buffer; None: no limit
