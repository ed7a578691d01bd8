"""Safetensors: lazy, exact, and clear about what is wrong with a file."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from onnxport.errors import CheckpointError
from onnxport.exporter.checkpoint import Checkpoint, to_float32

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(4, 3),
    "b": torch.arange(6, dtype=torch.float16).reshape(3, 2) / 3,
    "c": torch.tensor([1.5, -2.25, 3e38, 1e-40], dtype=torch.bfloat16),
}


def write_raw(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"})
    return tmp_path


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_reads_every_tensor(layout: str, request: pytest.FixtureRequest) -> None:
    with Checkpoint.open(request.getfixturevalue(layout)) as checkpoint:
        assert checkpoint.names == {"a", "b", "c"}
        for name, expected in TENSORS.items():
            found = checkpoint.read(name)
            assert found.shape == tuple(expected.shape)
            assert found.dtype.name == str(expected.dtype).removeprefix("torch.")
            np.testing.assert_array_equal(to_float32(found), expected.float().numpy())
        np.testing.assert_array_equal(checkpoint.read_rows("a", 1, 3), TENSORS["a"][1:3].numpy())
        assert checkpoint.read_rows("b", 2, 2).shape == (0, 2)


def test_widens_every_bfloat16() -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(to_float32(values), values.astype(np.float32))


def test_checks_names_shapes_and_types(single: Path) -> None:
    save_file({**TENSORS, "i": torch.zeros(2, dtype=torch.int8)}, single / "model.safetensors")
    with Checkpoint.open(single) as checkpoint:
        checkpoint.require({"a": (4, 3), "c": (4,)})
        with pytest.raises(CheckpointError, match="lacks 2 of 3 tensors") as caught:
            checkpoint.require({"a": (4, 3), "x": (1,), "y": (1,)})
        assert "x, y" in str(caught.value)
        with pytest.raises(CheckpointError, match="1 tensors do not have the shape") as caught:
            checkpoint.require({"a": (3, 4)})
        assert "a is [4, 3], expected [3, 4]" in str(caught.value)
        with pytest.raises(CheckpointError, match=r"i is I8 in model\.safetensors"):
            checkpoint.require({"i": (2,)})


@pytest.mark.parametrize("keep", [0, 7, 40, -1])
def test_a_truncated_file(single: Path, keep: int) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(single)
    assert str(path) in str(caught.value)
    if keep == -1:  # the data is cut, so the tensor is known
        assert "the tensor b ends at byte" in str(caught.value)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff\xfe garbage", "its header is not JSON"),
        (b"[]", "its header is not a JSON object"),
        ({"t": 3}, "its entry for the tensor t is malformed"),
        ({"t": {"dtype": "F32"}}, "its entry for the tensor t is malformed"),
        ({"t": entry(data_offsets=[8, 0])}, "negative sizes"),
        ({"t": entry(shape=[-2])}, "negative sizes"),
        ({"t": entry(shape=[3])}, "the tensor t, F32 [3], is given 8 bytes"),
        ({"t": entry(data_offsets=[4, 12])}, "the tensor t ends at byte"),
    ],
)
def test_a_corrupt_header(tmp_path: Path, header: Any, message: str) -> None:
    write_raw(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    assert message in str(caught.value)
    assert str(tmp_path / "model.safetensors") in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "given", "needed"),
    [
        ("BF16", 4, 8),
        ("I64", 16, 32),
        *((name, 2, 4) for name in ("U8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "BOOL", "I8")),
        ("F64", 16, 32),
    ],
)
def test_a_tensor_that_would_be_read_into_the_next_one(
    tmp_path: Path, dtype: str, given: int, needed: int
) -> None:
    """Four numbers, in the bytes of two."""
    first = entry(dtype=dtype, shape=[4], data_offsets=[0, given])
    next_one = entry(dtype="U8", shape=[64 - given], data_offsets=[given, 64])
    write_raw(tmp_path / "model.safetensors", {"t": first, "u": next_one}, bytes(64))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(tmp_path)
    assert f"the tensor t, {dtype} [4], is given {given} bytes" in str(caught.value)
    first["data_offsets"] = [0, needed]
    next_one |= {"shape": [64 - needed], "data_offsets": [needed, 64]}
    write_raw(tmp_path / "model.safetensors", {"t": first, "u": next_one}, bytes(64))
    with Checkpoint.open(tmp_path) as checkpoint:
        assert checkpoint.names == {"t", "u"}


def test_bytes_that_are_no_one_s_or_two_tensors(tmp_path: Path) -> None:
    """As the library refuses them."""
    path = tmp_path / "model.safetensors"
    twice = {"a": entry(), "b": entry()}
    write_raw(path, twice, bytes(entry()["data_offsets"][1]))
    with pytest.raises(CheckpointError, match="does not begin where another ends"):
        Checkpoint.open(tmp_path)
    write_raw(path, {"a": entry()}, bytes(entry()["data_offsets"][1] + 3))
    with pytest.raises(CheckpointError, match="3 bytes at its end belong to no tensor"):
        Checkpoint.open(tmp_path)
    write_raw(path, b"[" * 100_000)
    with pytest.raises(CheckpointError, match="is not JSON"):
        Checkpoint.open(tmp_path)


def test_a_single_file_goes_before_an_index(single: Path) -> None:
    """As transformers has it: one of the two may be left from before."""
    save_file({"a": TENSORS["a"] + 1}, single / "old.safetensors")
    write_index(single, {"a": "old.safetensors"})
    with Checkpoint.open(single) as checkpoint:
        assert checkpoint.names == {"a", "b", "c"}
        np.testing.assert_array_equal(checkpoint.read("a"), TENSORS["a"].numpy())


def test_a_header_that_claims_more_than_the_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 60) + b"{}")
    with pytest.raises(CheckpointError, match="its header claims"):
        Checkpoint.open(tmp_path)


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(CheckpointError, match="is a Git LFS pointer"):
        Checkpoint.open(tmp_path)


def test_a_missing_shard(sharded: Path) -> None:
    (sharded / "two.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"cannot open the shard .*two\.safetensors"):
        Checkpoint.open(sharded)


def test_an_index_that_its_shards_do_not_keep(sharded: Path) -> None:
    write_index(sharded, {"a": "one.safetensors", "z": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"two\.safetensors holds the tensor z"):
        Checkpoint.open(sharded)


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    save_file({"a": TENSORS["a"], "b": TENSORS["b"]}, sharded / "one.safetensors")
    with pytest.raises(CheckpointError, match="the tensor b is in"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("name", ["../one.safetensors", "/etc/passwd"])
def test_an_index_that_leads_out_of_the_folder(sharded: Path, name: str) -> None:
    write_index(sharded, {"a": name})
    with pytest.raises(CheckpointError, match="outside the folder"):
        Checkpoint.open(sharded)


@pytest.mark.parametrize("weight_map", [[], None, 3])
def test_an_index_that_is_no_index(sharded: Path, weight_map: Any) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(CheckpointError, match="is not readable"):
        Checkpoint.open(sharded)


def test_no_weights_names_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"holds pytorch_model\.bin: convert"):
        Checkpoint.open(tmp_path)
    (tmp_path / "x-Q8_0.gguf").touch()  # which is read as it is
    (tmp_path / "x-F16.gguf").touch()
    message = rf"holds x-F16\.gguf, x-Q8_0\.gguf: give .* {re.escape(str(tmp_path))}/x-F16\.gguf\.$"
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(tmp_path)
