"""K/V blocks in the tiers: an engine's store, its format, and what is fit to be kept."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from onnxport.cache_rows import row_elements
from onnxport.kv.disk_file import DiskFormat, Entry
from onnxport.kv.host_tier import HostTier
from onnxport.kv.prefix import unit_tokens
from onnxport.kv.tiers import TieredStore
from onnxport.providers.base import Capabilities
from onnxport.providers.rows import INTEGERS, element_type, scales_of
from onnxport.serving.config import EngineConfig


def open_store(config: EngineConfig, format_: DiskFormat) -> TieredStore:
    """Return the tiers that `config` asks for, empty but for what is on disk.

    Raises:
        OnnxportError: the folder of the disk tier cannot be used.
    """
    disk = None
    if config.kv_disk is not None:
        from onnxport.kv.disk_tier import DiskTier

        find_fault = partial(fault_of, head_size=format_.head_size)
        disk = DiskTier(config.kv_disk, config.kv_disk_bytes, format_, find_fault=find_fault)
    return TieredStore(HostTier(config.host_memory), disk, format_.dtype)


def disk_format(limits: Capabilities) -> DiskFormat:
    """Return what a model's blocks look like in the tiers."""
    format_ = limits.kv_format
    return DiskFormat(
        model=format_.model,
        unit_tokens=unit_tokens(limits.block_size),
        num_layers=format_.num_layers,
        num_kv_heads=format_.num_kv_heads,
        head_size=format_.head_size,
        dtype=format_.dtype,
        places=format_.places,
        parts=format_.parts,
    )


def fault_of(entry: Entry, head_size: int) -> str | None:
    """Return why K/V from disk, of heads of a size, are of no use; None: they are.

    What is not finite is not written, but earlier builds did, and others may: whoever goes on from
    it fails.
    """
    elements = row_elements(entry.dtype, head_size)
    rows = np.frombuffer(entry.content, element_type(entry.dtype)).reshape(1, -1, elements)
    return None if are_finite(rows)[0] else "it holds numbers that are not finite"


def are_finite(blocks: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Return of each block, [num_blocks, ..., elements of a row], whether all of it is finite.

    Those of integers are if their scales are. By the bits: NumPy takes ten times as long to ask
    float16 or bfloat16.
    """
    if blocks.dtype in INTEGERS:
        blocks = scales_of(blocks)
    numbers = blocks.reshape(len(blocks), -1)
    found: NDArray[np.bool_]
    if numbers.dtype.itemsize != 2:
        found = np.isfinite(numbers).all(axis=1)
    else:
        infinity = np.array(np.inf, numbers.dtype).view(np.uint16) << 1  # without the sign
        found = (numbers.view(np.uint16) << 1).max(axis=1) < infinity
    return found
