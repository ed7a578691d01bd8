"""Where rows and columns of tensors are that llama.cpp puts in another order.

Value heads that share a key head lie one behind the other in other checkpoints. In files of Qwen3.5
the first ones of all key heads come first, then all second ones, and so on, for ggml repeats keys
so. Names: llama.cpp's `conversion/qwen.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from onnxport.exporter.families.base import TensorNames
from onnxport.graphs.linear_spec import LinearAttentionSpec
from onnxport.graphs.spec import ArchSpec

Numbers = TypeVar("Numbers", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Order:
    """In which order a tensor's rows, or its columns, are read.

    Attributes:
        places: int64, for each row (or group of columns) as others have it, its place in the file.
        columns: of a group, if it is columns; None: it is rows.
    """

    places: NDArray[np.int64]
    columns: int | None = None

    def across(self, rows: NDArray[Numbers]) -> NDArray[Numbers]:
        """The columns of rows, or what stands for them, in the order of others; [rows, …]."""
        groups = rows.reshape(len(rows), len(self.places), -1)
        return np.ascontiguousarray(groups[:, self.places]).reshape(rows.shape)


def orders(spec: ArchSpec, names: TensorNames) -> Mapping[str, Order]:
    """The tensors that have another order, by their names in the file."""
    linear = spec.linear
    if not isinstance(linear, LinearAttentionSpec) or linear.key_heads == linear.value_heads:
        return {}
    heads = np.arange(linear.value_heads, dtype=np.int64)
    heads = np.ascontiguousarray(heads.reshape(-1, linear.key_heads).T).ravel()
    values = _each(heads, linear.value_size)
    behind = 2 * linear.key_width  # queries and keys, which are as others have them
    mixed = np.concatenate([np.arange(behind), behind + values])
    qkv, z, *gates = (f"{name}.weight" for name in names.linear_in)
    (o,) = names.linear_o
    own = {qkv: Order(mixed), names.linear_conv: Order(mixed), z: Order(values)}
    own |= dict.fromkeys((*gates, names.linear_a_log, names.linear_dt_bias), Order(heads))
    own[f"{o}.weight"] = Order(heads, linear.value_size)
    return {
        names.layer.format(layer) + name: order
        for layer in spec.linear_layers
        for name, order in own.items()
    }


def _each(heads: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The places of the rows of heads, each of which has so many."""
    return (heads[:, None] * size + np.arange(size)).ravel()
