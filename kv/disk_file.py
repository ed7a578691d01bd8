r"""The file of one entry of the disk tier: a unit of K/V in canonical form, described by itself.

The format belongs to no provider and no machine. Integers are little-endian.

    offset    bytes  content
    0         8      magic: 89 4F 58 50 4B 56 0D 0A (b"\x89OXPKV\r\n")
    8         4      format version, uint32: 1
    12        4      header length H in bytes, uint32
    16        H      header: one JSON object, UTF-8; spaces may follow it
    16 + H    N      content
    16 + H+N  32     SHA-256 of all bytes before, offset 0 to 16 + H + N

The header has exactly these members:

    model          string: what the weights are, `providers.base.KVFormat.model`
    unit_tokens    integer: tokens of one unit
    shape          [num_layers, parts, num_kv_heads, unit_tokens, head_size]
    dtype          "float32", "float16", "bfloat16", "int8", "int4" or "int64"
    key            64 lower-case hex digits: the SHA-256 chain over all tokens up to the unit's end
    content_bytes  integer: N, which is the product of `shape` without its last number times the
                   bytes of a row, a token's key or value in one head: `onnxport.cache_rows`

The content is the array of that shape in C order: keys, after RoPE, then values, or where parts are
1 the rows that both are made of; elements little-endian; of int8 and int4 it is rows with their
scales. This writer pads the header so that the content starts at a multiple of 64 bytes, where it
can be mapped into memory as it is; a reader must not rely on that. It writes finite numbers alone,
and its reader checks that, for earlier builds wrote others, too.

Every future version keeps the magic, the version and the checksum in these places, so a reader
can tell a damaged file from one that it does not know.

SHA-256 because a cache must never return wrong numbers, and what a CRC-32 misses (one damage in
four billion, and every pair of damages built to cancel) would be generated from without a sign.
It is what keys are made of already, any language has it, and processors have instructions for it:
1.7 GB/s where BLAKE2b reached 0.9 (hashlib, one core of a Xeon with SHA instructions, 393 KB). It
detects damage; it is no signature: who can write to the folder can write what the model reads.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from dataclasses import dataclass
from typing import Final

from onnxport import cache_rows
from onnxport.cache_rows import row_bytes
from onnxport.errors import OnnxportError

MAGIC: Final = b"\x89OXPKV\r\n"
VERSION: Final = 1
KEY_BYTES: Final = 32
CHECKSUM_BYTES: Final = 32
WHOLE: Final = "int64"  # of providers without numbers
FLOATS: Final = tuple(cache_rows.FLOAT_BYTES)  # these convert into each other
PACKED: Final = (cache_rows.INT8, cache_rows.INT4)
DTYPES: Final = (*FLOATS, *PACKED, WHOLE)

_PREFIX = struct.Struct("<8sII")  # magic, version, header length
_ALIGNMENT = 64
_HEADER_SLACK = 1 << 16  # bytes that another writer may spend on its header


class CorruptFileError(Exception):
    """A file starts as an entry does, and is damaged."""


class ForeignFileError(Exception):
    """A sound file that is not the entry asked for: not ours, or of another model or version."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The K/V of one unit, in C order."""

    content: bytes  # [num_layers, parts, num_kv_heads, unit_tokens, elements of a row]
    dtype: str  # of its elements


@dataclass(frozen=True, slots=True)
class DiskFormat:
    """What the entries of one model are: `providers.base.KVFormat` for units of tokens.

    Raises:
        OnnxportError: a number is below 1, or the dtype has no place in the file format.
    """

    model: str  # identifies the weights
    unit_tokens: int
    num_layers: int
    num_kv_heads: int
    head_size: int
    dtype: str  # that entries are written in
    # Of each layer of the model, its group and its place, as in KVFormat: blocks of the same tokens
    # are something else with others, so their files are, too.
    places: tuple[tuple[int, int], ...] = ()
    parts: int = 2  # keys and values, or rows of latents alone

    def __post_init__(self) -> None:
        for name in ("unit_tokens", "num_layers", "parts", "num_kv_heads", "head_size"):
            value = getattr(self, name)
            if value < 1:
                raise OnnxportError(f"{name} of the K/V on disk is {value}; it must be at least 1")
        if self.dtype not in DTYPES:
            raise OnnxportError(
                f"K/V of dtype {self.dtype!r} cannot be kept on disk; it must be one of "
                f"{', '.join(DTYPES)}: choose another kv_cache_dtype, or leave kv_disk out"
            )

    @property
    def family(self) -> str:
        """What all entries that can be of use have in common, in 16 hex digits."""
        identity = f"{VERSION}\n{self.unit_tokens}\n{self.model}"
        if self.dtype in PACKED:  # whoever has a finer cache shall not go on from these
            identity += f"\n{self.dtype}"
        if self.places:
            identity += f"\n{self.places}"
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The shape of a content: [num_layers, parts, num_kv_heads, unit_tokens, head_size]."""
        return (
            *(self.num_layers, self.parts, self.num_kv_heads),
            *(self.unit_tokens, self.head_size),
        )

    @property
    def readable_dtypes(self) -> tuple[str, ...]:
        """Dtypes of which an entry is of use: any floats for floats."""
        return FLOATS if self.dtype in FLOATS else (self.dtype,)

    @property
    def max_file_bytes(self) -> int:
        """Bytes that no file of this format exceeds."""
        largest = max(map(self.content_bytes, self.readable_dtypes))
        return _PREFIX.size + _HEADER_SLACK + largest + CHECKSUM_BYTES

    def content_bytes(self, dtype: str) -> int:
        """Bytes of a content of `dtype`."""
        whole = 8 * self.head_size if dtype == WHOLE else row_bytes(dtype, self.head_size)
        return math.prod(self.shape[:-1]) * whole

    def file_bytes(self, dtype: str) -> int:
        """Bytes of the file that `encode` makes of a content of `dtype`."""
        head = len(_head(self, bytes(KEY_BYTES), dtype))
        return head + self.content_bytes(dtype) + CHECKSUM_BYTES


def encode(format_: DiskFormat, key: bytes, content: bytes, dtype: str) -> tuple[bytes, ...]:
    """Return the file of an entry in parts, to be written one after another."""
    assert len(key) == KEY_BYTES, f"a key of {len(key)} bytes"
    expected = format_.content_bytes(dtype)
    assert len(content) == expected, f"{len(content)} bytes of content, {expected} expected"
    head = _head(format_, key, dtype)
    checksum = hashlib.sha256(head)
    checksum.update(content)
    return head, content, checksum.digest()


def decode(data: bytes, format_: DiskFormat, key: bytes) -> Entry:
    """Return the entry of `key` from the whole of its file, with every field checked.

    Raises:
        CorruptFileError: the file is ours and truncated, extended or changed.
        ForeignFileError: it is sound, or not ours, and not this entry; the message says why.
    """
    if not starts_like_an_entry(data):
        raise ForeignFileError("it does not start with the magic bytes of an entry")
    body = memoryview(data)[:-CHECKSUM_BYTES]
    if len(body) < _PREFIX.size or hashlib.sha256(body).digest() != data[-CHECKSUM_BYTES:]:
        raise CorruptFileError("its checksum does not match")
    _, version, header_bytes = _PREFIX.unpack_from(body)
    if version != VERSION:
        raise ForeignFileError(f"its format version is {version}, and not {VERSION}")
    start = _PREFIX.size + header_bytes
    try:
        header = json.loads(bytes(body[_PREFIX.size : start]))
    except (ValueError, RecursionError) as error:
        raise ForeignFileError("its header is not JSON") from error
    dtype = _check_header(header, format_, key)
    if len(body) - start != header["content_bytes"]:
        raise ForeignFileError(f"its content has {len(body) - start} bytes, not as the header says")
    return Entry(bytes(body[start:]), dtype)


def starts_like_an_entry(data: bytes) -> bool:
    """Whether `data`, a file's first bytes, are the magic, or what is left of it.

    A truncation leaves fewer bytes, and a power failure, on some file systems, zeros instead.
    """
    first = data[: len(MAGIC)]
    return MAGIC.startswith(first) or first == bytes(len(MAGIC))


def _check_header(header: object, format_: DiskFormat, key: bytes) -> str:
    """Return the dtype that a sound header states, or raise ForeignFileError."""
    if not isinstance(header, dict):
        raise ForeignFileError("its header is not a JSON object")
    dtype = header.get("dtype")
    if dtype not in format_.readable_dtypes:
        raise ForeignFileError(f"its dtype is {dtype!r}, of no use for {format_.dtype}")
    expected = _header(format_, key, dtype)
    if header.keys() != expected.keys():
        raise ForeignFileError(f"its header has {', '.join(header)}, and not {', '.join(expected)}")
    for name, value in expected.items():
        if header[name] != value:
            raise ForeignFileError(f"its {name} is {header[name]!r}, and not {value!r}")
    assert isinstance(dtype, str)
    return dtype


def _header(format_: DiskFormat, key: bytes, dtype: str) -> dict[str, object]:
    return {
        "model": format_.model,
        "unit_tokens": format_.unit_tokens,
        "shape": list(format_.shape),
        "dtype": dtype,
        "key": key.hex(),
        "content_bytes": format_.content_bytes(dtype),
    }


def _head(format_: DiskFormat, key: bytes, dtype: str) -> bytes:
    """All bytes before the content."""
    header = json.dumps(_header(format_, key, dtype)).encode()
    padding = -(_PREFIX.size + len(header)) % _ALIGNMENT
    return _PREFIX.pack(MAGIC, VERSION, len(header) + padding) + header + b" " * padding
