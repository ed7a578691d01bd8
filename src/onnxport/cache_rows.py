"""How a KV cache stores a row, the key or the value of a token in one head, by the cache's type.

Rows of floats are head_size numbers. Rows of integers have their scales behind them:

- int8, elements int8: head_size numbers, then the bytes of a float32 scale: number = int8 * scale;
- int4, elements uint8: for each group of INT4_GROUP channels (the last one may have fewer) bytes of
  two levels, those of channels half a group apart, the first one's in the low half; then a `step`
  for each group, then as many `first` (int8), then the bytes of the scale:
  number = (first + level * step) * scale.
"""

from __future__ import annotations

from typing import Final

INT8, INT4 = "int8", "int4"
FLOAT_BYTES: Final = {"float32": 4, "float16": 2, "bfloat16": 2}
DTYPES: Final = (*FLOAT_BYTES, INT8, INT4)
SCALE_BYTES: Final = 4
INT4_GROUP: Final = 32


def int4_groups(head_size: int) -> int:
    """Groups of channels that share a step."""
    return -(-head_size // INT4_GROUP)


def row_elements(dtype: str, head_size: int) -> int:
    """Elements of a row, its scales included."""
    if dtype == INT4:
        return head_size // 2 + 2 * int4_groups(head_size) + SCALE_BYTES
    return head_size + (SCALE_BYTES if dtype == INT8 else 0)


def row_bytes(dtype: str, head_size: int) -> int:
    """Bytes of a row of one of DTYPES, its scales included."""
    return row_elements(dtype, head_size) * FLOAT_BYTES.get(dtype, 1)


def int4_head_size(elements: int) -> int | None:
    """The head size whose rows of int4 have so many elements; None: there is none."""
    most = 2 * elements
    return next((n for n in range(2, most, 2) if row_elements(INT4, n) == elements), None)
