"""One file of a safetensors checkpoint: what its header says, and its bytes.

Format: https://huggingface.co/docs/safetensors (8 bytes little-endian header length, a JSON
header, then the tensors' bytes, little-endian, row-major).
"""

from __future__ import annotations

import json
import math
import os
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from onnxport.errors import CheckpointError

MAX_HEADER_BYTES: Final = 100_000_000  # the limit that the safetensors library sets

_LFS_POINTER: Final = b"version "  # what the small text file in their place begins with

DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
INTEGERS: Final[Mapping[str, np.dtype[Any]]] = {
    "I8": np.dtype(np.int8),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "BOOL": np.dtype(np.bool_),
}
# Bytes of a number of each type that has whole ones; what lies in parts of bytes is never read.
_ITEM_BYTES: Final[Mapping[str, int]] = {
    **{name: dtype.itemsize for name, dtype in (*DTYPES.items(), *INTEGERS.items())},
    **dict.fromkeys(("U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **{"I16": 2, "U16": 2, "U32": 4, "U64": 8, "F64": 8, "C64": 8},
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies in a shard."""

    name: str
    dtype: str  # safetensors' name: BF16, F16, F32, I64, …
    shape: tuple[int, ...]
    offset: int  # of the first byte, from the start of the file
    size_bytes: int


class Shard:
    """One safetensors file: a validated header and an open file."""

    def __init__(self, path: Path) -> None:
        """Open `path` and read its header. Raises CheckpointError if it is missing or corrupt."""
        self.path = path
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"cannot open the shard {path}: {error.strerror}.") from error
        self._position = threading.Lock()
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def read(self, tensor: StoredTensor, offset: int, size_bytes: int) -> NDArray[np.uint8]:
        """Read `size_bytes` of `tensor` from `offset` within it; uint8 [size_bytes]."""
        data = np.empty(size_bytes, np.uint8)
        if self._read_at(tensor.offset + offset, data.data) < size_bytes:
            raise CheckpointError(
                f"the shard {self.path} ends inside the tensor {tensor.name}: it changed "
                "while it was read. Download it again."
            )
        return data

    def _read_at(self, offset: int, into: memoryview) -> int:
        """Fill `into` from `offset`; returns how many bytes there were."""
        done = 0
        with self._position:
            self._file.seek(offset)
            while done < len(into) and (count := self._file.readinto(into[done:])):
                done += count
        return done

    def _corrupt(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"the shard {self.path} is not a valid safetensors file: {what}. Download it again."
        )

    def _read_header(self) -> dict[str, StoredTensor]:
        file_bytes = os.fstat(self._file.fileno()).st_size
        prefix = self._file.read(8)
        if len(prefix) < 8:
            raise self._corrupt(f"it holds {file_bytes} bytes, less than a header")
        if prefix == _LFS_POINTER:
            raise CheckpointError(
                f"the shard {self.path} is a Git LFS pointer, not the weights themselves. Fetch "
                "them with `git lfs pull` in that folder, or export from the hub id."
            )
        (header_bytes,) = struct.unpack("<Q", prefix)
        if header_bytes > min(MAX_HEADER_BYTES, file_bytes - 8):
            raise self._corrupt(
                f"its header claims {header_bytes} bytes and the file holds {file_bytes}"
            )
        try:
            header = json.loads(self._file.read(header_bytes))
        except (ValueError, RecursionError) as error:
            raise self._corrupt(f"its header is not JSON ({error})") from error
        if not isinstance(header, dict):
            raise self._corrupt("its header is not a JSON object")
        header.pop("__metadata__", None)
        data_start = 8 + header_bytes
        found = {
            name: self._entry(name, entry, data_start, file_bytes) for name, entry in header.items()
        }
        end = data_start
        for tensor in sorted(found.values(), key=lambda one: (one.offset, one.size_bytes)):
            if tensor.offset != end:
                raise self._corrupt(f"the tensor {tensor.name} does not begin where another ends")
            end += tensor.size_bytes
        if end != file_bytes:
            raise self._corrupt(f"{file_bytes - end} bytes at its end belong to no tensor")
        return found

    def _entry(self, name: str, entry: Any, data_start: int, file_bytes: int) -> StoredTensor:
        try:
            dtype = str(entry["dtype"])
            shape = tuple(map(_whole, entry["shape"]))
            begin, end = map(_whole, entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._corrupt(f"its entry for the tensor {name} is malformed") from error
        if begin < 0 or end < begin or min(shape, default=0) < 0:
            raise self._corrupt(f"its entry for the tensor {name} has negative sizes")
        item_bytes = _ITEM_BYTES.get(dtype)
        if item_bytes is not None and end - begin != math.prod(shape) * item_bytes:
            raise self._corrupt(
                f"the tensor {name}, {dtype} {list(shape)}, is given {end - begin} bytes"
            )
        if data_start + end > file_bytes:
            raise CheckpointError(
                f"the shard {self.path} is truncated: the tensor {name} ends at byte "
                f"{data_start + end} and the file holds {file_bytes}. Download it again."
            )
        return StoredTensor(name, dtype, shape, data_start + begin, end - begin)


def _whole(value: Any) -> int:
    """Return an integer of JSON, which true and 1.0 are not."""
    if type(value) is not int:
        raise TypeError(f"{value!r} is no integer")
    return value
