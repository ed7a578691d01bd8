"""The bytes of an entry's file: every one of them is checked."""

import dataclasses
import hashlib
import json
import struct

import pytest

from onnxport.errors import OnnxportError
from onnxport.kv.disk_file import (
    CorruptFileError,
    DiskFormat,
    Entry,
    ForeignFileError,
    decode,
    encode,
)

FORMAT = DiskFormat("5e" * 32, 2, 3, 1, 2, "float16")
KEY = bytes(range(32))
CONTENT = bytes(range(100, 148))
HEADER = {
    "model": "5e" * 32,
    "unit_tokens": 2,
    "shape": [3, 2, 1, 2, 2],
    "dtype": "float16",
    "key": "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f",
    "content_bytes": 48,
}
FILE = b"".join(encode(FORMAT, KEY, CONTENT, "float16"))


def file_of(header: bytes, content: bytes = CONTENT, version: int = 1) -> bytes:
    """An entry's file, made from the documentation alone."""
    body = b"\x89OXPKV\r\n" + struct.pack("<II", version, len(header)) + header + content
    return body + hashlib.sha256(body).digest()


def test_the_layout_is_the_documented_one() -> None:
    assert FILE[:8] == bytes.fromhex("894F58504B560D0A")
    version, header_bytes = struct.unpack("<II", FILE[8:16])
    assert version == 1
    assert json.loads(FILE[16 : 16 + header_bytes]) == HEADER
    assert FILE[16 + header_bytes : -32] == CONTENT
    assert (16 + header_bytes) % 64 == 0
    assert FILE[-32:] == hashlib.sha256(FILE[:-32]).digest()
    assert FORMAT.file_bytes("float16") == len(FILE)


def test_the_shape_tells_how_many_caches_a_layer_has() -> None:
    alone = dataclasses.replace(FORMAT, parts=1)
    assert alone.shape == (3, 1, 1, 2, 2)
    content = CONTENT[: alone.content_bytes("float16")]
    data = b"".join(encode(alone, KEY, content, "float16"))
    assert decode(data, alone, KEY).content == content
    with pytest.raises(ForeignFileError, match="its shape is"):
        decode(data, FORMAT, KEY)


@pytest.mark.parametrize(
    "header", [json.dumps(HEADER), json.dumps(HEADER, indent=1, sort_keys=True) + "   "]
)
def test_a_file_of_another_writer_is_read(header: str) -> None:
    assert decode(file_of(header.encode()), FORMAT, KEY) == Entry(CONTENT, "float16")


def test_no_flipped_bit_goes_unseen() -> None:
    for index in range(len(FILE)):
        for bit in range(8):
            damaged = bytearray(FILE)
            damaged[index] ^= 1 << bit
            error = ForeignFileError if index < 8 else CorruptFileError
            with pytest.raises(error):
                decode(bytes(damaged), FORMAT, KEY)


def test_no_truncation_and_no_extension_goes_unseen() -> None:
    for length in range(len(FILE)):
        with pytest.raises(CorruptFileError):
            decode(FILE[:length], FORMAT, KEY)
    with pytest.raises(CorruptFileError):
        decode(FILE + b"\0", FORMAT, KEY)
    with pytest.raises(CorruptFileError):
        decode(FILE[:8] + hashlib.sha256(FILE[:8]).digest(), FORMAT, KEY)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model": "00" * 32}, "its model is"),
        ({"unit_tokens": 4}, "its unit_tokens is 4, and not 2"),
        ({"shape": [3, 2, 2, 2, 1]}, "its shape is"),
        ({"dtype": "float8"}, "its dtype is 'float8', of no use for float16"),
        ({"dtype": ["float16"]}, "its dtype is"),
        ({"dtype": "float32"}, "its content_bytes is 48, and not 96"),
        ({"key": "00" * 32}, "its key is"),
        ({"content_bytes": 47}, "its content_bytes is 47, and not 48"),
        ({"rope": None}, "its header has .*content_bytes, rope, and not"),
    ],
)
def test_a_sound_file_of_another_entry_is_foreign(change: dict[str, object], reason: str) -> None:
    data = file_of(json.dumps(HEADER | change).encode())
    with pytest.raises(ForeignFileError, match=reason):
        decode(data, FORMAT, KEY)


@pytest.mark.parametrize("name", HEADER)
def test_a_header_lacks_nothing(name: str) -> None:
    header = {other: value for other, value in HEADER.items() if other != name}
    with pytest.raises(ForeignFileError):
        decode(file_of(json.dumps(header).encode()), FORMAT, KEY)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (file_of(json.dumps(HEADER).encode(), version=2), "format version is 2, and not 1"),
        (file_of(json.dumps(HEADER).encode(), CONTENT[:-1]), "its content has 47 bytes"),
        (file_of(b"{"), "not JSON"),
        (file_of(b"\xff"), "not JSON"),
        (file_of(b"[" * 100_000), "not JSON"),
        (file_of(b"[]"), "not a JSON object"),
        (b"not an entry at all", "magic"),
    ],
)
def test_what_is_no_entry_of_this_format_is_foreign(data: bytes, reason: str) -> None:
    with pytest.raises(ForeignFileError, match=reason):
        decode(data, FORMAT, KEY)


@pytest.mark.parametrize(
    ("own", "dtype", "readable"),
    [
        ("float16", "float32", True),
        ("float16", "bfloat16", True),
        ("float32", "float16", True),
        ("float32", "int64", False),
        ("int8", "float16", False),
        ("int8", "int8", True),
        ("float16", "int8", False),
        ("int4", "int4", True),
        ("int4", "int8", False),
        ("int64", "int64", True),
        ("int64", "float32", False),
    ],
)
def test_floating_point_is_read_for_floating_point(own: str, dtype: str, readable: bool) -> None:
    theirs = dataclasses.replace(FORMAT, dtype=dtype)
    content = bytes(theirs.content_bytes(dtype))
    data = b"".join(encode(theirs, KEY, content, dtype))
    ours = dataclasses.replace(FORMAT, dtype=own)
    if readable:
        assert decode(data, ours, KEY) == Entry(content, dtype)
        assert len(data) <= ours.max_file_bytes
    else:
        with pytest.raises(ForeignFileError, match=f"dtype is '{dtype}'"):
            decode(data, ours, KEY)


def test_caches_of_integers_have_files_of_their_own() -> None:
    """A server with floats neither reads them nor finds their names taken."""
    families = {
        dtype: dataclasses.replace(FORMAT, dtype=dtype).family
        for dtype in ("float32", "float16", "bfloat16", "int8", "int4")
    }
    assert len({families[dtype] for dtype in ("float32", "float16", "bfloat16")}) == 1
    assert len(set(families.values())) == 3


def test_a_format_that_files_cannot_have_is_refused() -> None:
    with pytest.raises(OnnxportError, match=r"'int16' cannot be kept on disk.*leave kv_disk out"):
        dataclasses.replace(FORMAT, dtype="int16")
    with pytest.raises(OnnxportError, match="head_size of the K/V on disk is 0"):
        dataclasses.replace(FORMAT, head_size=0)


def test_wrong_sizes_are_our_bugs() -> None:
    with pytest.raises(AssertionError, match="47 bytes of content, 48 expected"):
        encode(FORMAT, KEY, CONTENT[:-1], "float16")
    with pytest.raises(AssertionError, match="a key of 31 bytes"):
        encode(FORMAT, KEY[:-1], CONTENT, "float16")
