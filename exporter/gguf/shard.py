"""One GGUF file: its metadata, where its tensors lie, and their bytes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
The header is read here and not by the package `gguf`, which needs seconds for the tokens of a large
vocabulary, maps the whole file, and does not tell a damaged file from an unknown one.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from onnxport.errors import CheckpointError
from onnxport.exporter.gguf.blocks import TYPES, BlockType
from onnxport.exporter.shard import MAX_HEADER_BYTES, Shard, StoredTensor

ALIGNMENT: Final = "general.alignment"

_MAGIC: Final = b"GGUF"
_LFS_POINTER: Final = b"vers"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MOST_DIMENSIONS: Final = 4
_SCALARS: Final[Mapping[int, str]] = {
    **{0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?"},
    **{10: "<u8", 11: "<i8", 12: "<f8"},
}
_STRING: Final = 8
_ARRAY: Final = 9

_Info = tuple[str, tuple[int, ...], BlockType, int]  # a tensor's name, shape, type and offset


class GgufShard(Shard):
    """One GGUF file: a validated header and an open file.

    Attributes:
        metadata: The value of each key; arrays are lists.
    """

    metadata: Mapping[str, Any]

    def _corrupt(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is not a valid GGUF file: {what}. Download it again.")

    def _read_header(self) -> dict[str, StoredTensor]:
        file_bytes = os.fstat(self._file.fileno()).st_size
        if file_bytes == 0:
            raise self._corrupt("it is empty")
        with mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            header = _Header(self, mapped)
            metadata, infos = header.read()
        self.metadata = metadata
        return self._place(infos, header.at, file_bytes)

    def _place(self, infos: list[_Info], end: int, file_bytes: int) -> dict[str, StoredTensor]:
        """Where each tensor lies; they must be inside the file, and not share bytes."""
        alignment = self.metadata.get(ALIGNMENT, _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self._corrupt(f"{ALIGNMENT} is {alignment!r}, which is no power of two")
        start = -(-end // alignment) * alignment
        found: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in infos:
            if name in found:
                raise self._corrupt(f"the tensor {name} is there twice")
            if shape[-1] % kind.size:
                raise self._corrupt(
                    f"the tensor {name}, {list(shape)}, has rows that are not whole blocks of "
                    f"{kind.name}, which have {kind.size} numbers"
                )
            size = math.prod(shape[:-1]) * kind.row_bytes(shape[-1])
            if start + offset + size > file_bytes:
                raise CheckpointError(
                    f"{self.path} is truncated: the tensor {name} ends at byte "
                    f"{start + offset + size} and the file holds {file_bytes}. Download it again."
                )
            found[name] = StoredTensor(name, kind.name, shape, start + offset, size)
        last = start
        for tensor in sorted(found.values(), key=lambda one: (one.offset, one.size_bytes)):
            if tensor.offset < last:
                raise self._corrupt(f"the tensor {tensor.name} begins inside another one")
            last = tensor.offset + tensor.size_bytes
        return found


class _Header:
    """Reads a header from its beginning; `at` is how far it is."""

    def __init__(self, shard: GgufShard, data: mmap.mmap) -> None:
        self._shard = shard
        self._data = data
        self.at = 0

    def read(self) -> tuple[dict[str, Any], list[_Info]]:
        """The metadata; and each tensor's name, shape, type and offset."""
        magic = bytes(self._take(4))
        if magic == _LFS_POINTER:
            raise CheckpointError(
                f"{self._shard.path} is a Git LFS pointer, not the model itself. Fetch it with "
                "`git lfs pull` in that folder."
            )
        if magic != _MAGIC:
            raise self._shard._corrupt(f"it begins with {magic!r} and not with {_MAGIC!r}")
        (version,) = self._unpack("<I")
        if version not in _VERSIONS:
            kind = "is big-endian" if version & 0xFFFF == 0 else f"has the version {version}"
            raise CheckpointError(
                f"{self._shard.path} {kind}; read are the versions "
                f"{' and '.join(map(str, _VERSIONS))}, little-endian. Convert the model again, "
                "with a newer llama.cpp."
            )
        num_tensors, num_keys = self._unpack("<QQ")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a key")
            if key in metadata:
                raise self._shard._corrupt(f"the key {key} is there twice")
            metadata[key] = self._value(key, *self._unpack("<I"))
        return metadata, [self._tensor() for _ in range(num_tensors)]

    def _tensor(self) -> _Info:
        name = self._string("a tensor's name")
        (count,) = self._unpack("<I")
        if not 1 <= count <= _MOST_DIMENSIONS:
            raise self._shard._corrupt(f"the tensor {name} has {count} dimensions")
        dims = self._unpack(f"<{count}Q")
        kind, offset = self._unpack("<IQ")
        if kind not in TYPES:
            raise CheckpointError(
                f"the tensor {name} of {self._shard.path} has the type {kind}, which is not known; "
                f"known are {', '.join(one.name for one in TYPES.values())}. Give a file in "
                "another type, such as Q8_0 or Q4_K_M."
            )
        if 0 in dims:
            raise self._shard._corrupt(f"the tensor {name} is {list(dims[::-1])}")
        return name, dims[::-1], TYPES[kind], offset

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY:
            return self._numbers(key, kind, 1)[0]
        inner, count = self._unpack("<IQ")
        if inner == _STRING:
            return [self._string(key) for _ in range(count)]
        return self._numbers(key, inner, count)

    def _numbers(self, key: str, kind: int, count: int) -> list[Any]:
        if kind not in _SCALARS:
            raise self._shard._corrupt(f"the key {key} has values of the type {kind}")
        dtype = np.dtype(_SCALARS[kind])
        numbers = np.frombuffer(self._take(dtype.itemsize * count), dtype)
        if dtype == np.float32 and count == 1:  # the decimal that was rounded to it was meant
            return [float(str(numbers[0]))]
        found: list[Any] = numbers.tolist()
        return found

    def _string(self, what: str) -> str:
        (size,) = self._unpack("<Q")
        try:
            return self._take(size).decode()
        except UnicodeDecodeError as error:
            raise self._shard._corrupt(f"{what} is not UTF-8 ({error})") from error

    def _unpack(self, form: str) -> tuple[int, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, size: int) -> bytes:
        start, self.at = self.at, self.at + size
        if self.at > len(self._data):
            raise self._shard._corrupt(f"it ends inside its header, at byte {len(self._data)}")
        if self.at > MAX_HEADER_BYTES:  # of large vocabularies they are a tenth of it
            raise self._shard._corrupt(f"its header claims more than {MAX_HEADER_BYTES} bytes")
        return self._data[start : self.at]
