"""GGUF files that are damaged, split, of other models, or say what is not understood."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from onnxport.errors import CheckpointError, ExportError, UnsupportedModelError
from onnxport.exporter.draft_head import export_head
from onnxport.exporter.export import export_model
from onnxport.exporter.gguf.model import GgufModel
from onnxport.exporter.gguf.parts import parts_of
from onnxport.exporter.gguf.shard import GgufShard
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from tests.exporter import checkpoints, ggufs
from tests.exporter.test_gguf import DEMO

FILES = ("model.onnx", "model.onnx.data", "golden.npz")
FLOATS = ExportOptions(precision="fp32", threads=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama's checkpoint."""
    checkpoints.make(checkpoints.CASES["llama"], tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


# The header.


def header(*keys: bytes, tensors: bytes = b"", count: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, count, len(keys)) + b"".join(keys) + tensors


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def test_values_of_every_type(tmp_path: Path) -> None:
    values = {
        "u1": key(b"u1", 0, b"\xff"),
        "i1": key(b"i1", 1, b"\xff"),
        "u2": key(b"u2", 2, b"\x01\x80"),
        "i2": key(b"i2", 3, b"\x01\x80"),
        "u4": key(b"u4", 4, struct.pack("<I", 2**32 - 1)),
        "i4": key(b"i4", 5, struct.pack("<i", -7)),
        "f4": key(b"f4", 6, struct.pack("<f", 1e-5)),
        "yes": key(b"yes", 7, b"\x01"),
        "text": key(b"text", 8, text("ä".encode())),
        "u8": key(b"u8", 10, struct.pack("<Q", 2**63)),
        "i8": key(b"i8", 11, struct.pack("<q", -1)),
        "f8": key(b"f8", 12, struct.pack("<d", 0.1)),
        "list": key(b"list", 9, struct.pack("<IQ3i", 5, 3, 1, -2, 3)),
        "texts": key(b"texts", 9, struct.pack("<IQ", 8, 2) + text(b"a") + text(b"")),
        "none": key(b"none", 9, struct.pack("<IQ", 8, 0)),
    }
    (tmp_path / "x.gguf").write_bytes(header(*values.values()))
    shard = GgufShard(tmp_path / "x.gguf")
    shard.close()
    assert shard.metadata == {
        **{"u1": 255, "i1": -1, "u2": 0x8001, "i2": -0x7FFF, "u4": 2**32 - 1, "i4": -7},
        **{"f4": 1e-5, "yes": True, "text": "ä", "u8": 2**63, "i8": -1, "f8": 0.1},
        **{"list": [1, -2, 3], "texts": ["a", ""], "none": []},
    }


def test_the_package_reads_the_same(folder: Path, tmp_path: Path) -> None:
    path = ggufs.write(folder, tmp_path / "model.gguf", Kind.Q8_0)
    shard = GgufShard(path)
    reader = gguf.GGUFReader(path)
    for one in reader.tensors:
        found = shard.tensors[one.name]
        assert found.shape == tuple(int(size) for size in reversed(one.shape))
        assert (found.offset, found.dtype) == (one.data_offset, one.tensor_type.name)
        data = shard.read(found, 0, found.size_bytes)
        np.testing.assert_array_equal(data, one.data.view(np.uint8).ravel())
    for name, value in shard.metadata.items():
        found = reader.fields[name].contents()
        assert found == pytest.approx(value) if isinstance(value, float) else found == value
    shard.close()


BROKEN: Mapping[str, tuple[bytes, str]] = {
    "empty": (b"", "it is empty"),
    "another file": (b"PK\x03\x04" + b"x" * 40, "begins with b'PK"),
    "a pointer": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "version 1": (header(version=1), "has the version 1; read are the versions 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
    "only a magic": (b"GGUF\x03", "ends inside its header, at byte 5"),
    "a key too long": (header(struct.pack("<Q", 2**60)), "ends inside its header"),
    "a list too long": (
        header(key(b"k", 9, struct.pack("<IQ", 8, 2**50))),
        "ends inside its header",
    ),
    "numbers too many": (
        header(key(b"k", 9, struct.pack("<IQ", 5, 2**50))),
        "ends inside its header",
    ),
    "a list of lists": (header(key(b"k", 9, struct.pack("<IQ", 9, 1))), "k has values of the type"),
    "an unknown value": (header(key(b"k", 13, b"")), "the key k has values of the type 13"),
    "a key twice": (header(key(b"k", 7, b"\x01"), key(b"k", 7, b"\x01")), "the key k is there twi"),
    "a text of no letters": (header(key(b"k", 8, text(b"\xff"))), "k is not UTF-8"),
    "an odd alignment": (
        header(key(b"general.alignment", 4, struct.pack("<I", 24))),
        "general.alignment is 24, which is no power of two",
    ),
    "no dimensions": (header(tensors=tensor(b"t", ()), count=1), "t has 0 dimensions"),
    "a size of 0": (header(tensors=tensor(b"t", (4, 0)), count=1), r"tensor t is \[0, 4\]"),
    "an unknown type": (header(tensors=tensor(b"t", (4,), 99), count=1), "has the type 99, whi"),
    "ragged blocks": (
        header(tensors=tensor(b"t", (40, 2), 2), count=1) + bytes(200),
        r"t, \[2, 40\], has rows that are not whole blocks of Q4_0",
    ),
    "truncated": (header(tensors=tensor(b"t", (64,)), count=1) + bytes(64), "is truncated: the"),
    "far away": (
        header(tensors=tensor(b"t", (64,), offset=2**62), count=1) + bytes(512),
        "is truncated: the",
    ),
    "a tensor twice": (
        header(tensors=tensor(b"t", (1,)) + tensor(b"t", (1,), offset=32), count=2) + bytes(200),
        "the tensor t is there twice",
    ),
    "shared bytes": (
        header(tensors=tensor(b"t", (8,)) + tensor(b"u", (8,), offset=16), count=2) + bytes(200),
        "the tensor u begins inside another one",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_file(name: str, tmp_path: Path) -> None:
    data, message = BROKEN[name]
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        export_model(tmp_path / "model.gguf", tmp_path / "artifact")


@pytest.mark.parametrize("kind", [8, 9])
def test_little_is_read_of_a_file_whose_header_claims_much(kind: int, tmp_path: Path) -> None:
    """A text, or numbers, of all that a large file holds, and of more."""
    size = 2**32
    for claimed, message in (
        (size, "header claims more than 100000000 bytes"),
        (2 * size, f"ends inside its header, at byte {size}"),
    ):
        value = struct.pack("<Q", claimed) if kind == 8 else struct.pack("<IQ", 0, claimed)
        if claimed == size:
            value = value[:-8] + struct.pack("<Q", size - 100)
        with (tmp_path / "model.gguf").open("wb") as file:
            file.write(header(key(b"k", kind, value)))
            file.truncate(size)  # there are no bytes on the disk
        tracemalloc.start()
        with pytest.raises(CheckpointError, match=message):
            GgufShard(tmp_path / "model.gguf")
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert most < 2**24


def test_any_prefix_of_a_file_is_refused(folder: Path, tmp_path: Path) -> None:
    data = ggufs.write(folder, tmp_path / "model.gguf").read_bytes()
    for size in [*range(0, 4000, 37), len(data) - 40]:
        (tmp_path / "cut.gguf").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"not a valid GGUF file|is truncated"):
            GgufModel(tmp_path / "cut.gguf")


# Files that are parts of a model.


def test_a_split_model_is_read_whole(folder: Path, tmp_path: Path) -> None:
    whole = export_model(ggufs.write(folder, tmp_path / "a.gguf"), tmp_path / "whole", FLOATS)
    path = ggufs.write(folder, tmp_path / "b.gguf", split=5)
    assert [one.name for one in parts_of(path)] == [
        f"b-0000{part}-of-00005.gguf" for part in range(1, 6)
    ]
    found = export_model(path, tmp_path / "split", FLOATS)
    for file in FILES:
        assert (found / file).read_bytes() == (whole / file).read_bytes()


def test_parts_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    first, second, *_, last = parts_of(ggufs.write(folder, tmp_path / "b.gguf", split=5))
    with pytest.raises(CheckpointError, match=r"part 2 of 5 .*ends in -00001-of-00005.gguf"):
        export_model(second, tmp_path / "artifact")
    renamed = tmp_path / "model.gguf"
    renamed.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match=r"part 1 of 5"):
        export_model(renamed, tmp_path / "artifact")
    data = second.read_bytes()
    second.write_bytes(last.read_bytes())
    with pytest.raises(CheckpointError, match=r"part 4 of 5, counted from 0, and its name .* 1 of"):
        export_model(first, tmp_path / "artifact")
    second.unlink()
    with pytest.raises(CheckpointError, match=r"cannot open the shard .*-00002-of-00005"):
        export_model(first, tmp_path / "artifact")
    second.write_bytes(data)
    shard = GgufShard(first)
    shard.close()
    total = shard.metadata["split.tensors.count"]
    name = b"split.tensors.count" + struct.pack("<I", 5)
    damaged = first.read_bytes().replace(
        name + struct.pack("<i", total), name + struct.pack("<i", total + 1)
    )
    first.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=rf"hold {total} tensors, and .* is {total + 1}"):
        export_model(first, tmp_path / "artifact")


# Metadata.

Extra = Mapping[str, Any]
CONTRADICTIONS: Mapping[str, tuple[Extra, str]] = {
    "no architecture": ({"general.architecture": None}, "does not say what it holds"),
    "an unknown key": ({"llama.attention.scale": 0.5}, "llama.attention.scale = 0.5"),
    "a window": ({"llama.attention.sliding_window": 7}, "llama.attention.sliding_window = 7"),
    "pooling": ({"llama.pooling_type": 4}, "llama.pooling_type is 4"),
    "a mixture": (
        {"llama.expert_group_count": 4},
        "has 1 key.s. that the exporter does not understand for the architecture 'llama'",
    ),
    "an adapter": ({"general.type": "adapter"}, "holds no model: general.type is 'adapter'"),
    "no width": ({"llama.embedding_length": None}, "lacks the key llama.embedding_length"),
    "a width of no type": ({"llama.embedding_length": "x"}, "is 'x', expected a value of type int"),
    "heads by layer": (
        {"llama.attention.head_count_kv": [2, 4]},
        r"head_count_kv differs between layers, \[2, 4\]",
    ),
    "other values": ({"llama.attention.value_length": 8}, "values have 8 channels .* keys 16"),
    "a part that rotates": ({"llama.rope.dimension_count": 8}, "makes 8 of 16 channels rotate"),
    "another vocabulary": ({"llama.vocab_size": 7}, "vocab_size is 7, and token_embd.weight has"),
    "experts by sigmoids": (
        {"llama.expert_count": 4, "llama.expert_used_count": 2, "llama.expert_gating_func": 2},
        "expert_gating_func is 2; of the architecture llama it is 1",
    ),
    "an unknown rope": ({"llama.rope.scaling.type": "ntk"}, "rope.scaling.type is 'ntk'"),
    "yarn of no length": (
        {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0},
        "lacks the key llama.rope.scaling.original_context_length",
    ),
    "yarn of no factor": ({"llama.rope.scaling.type": "yarn"}, r"is 'yarn', with the factors \[\]"),
    "two factors": (
        {"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0},
        r"with the factors \[2.0, 4.0\]",
    ),
    "longrope of nothing": ({"llama.rope.scaling.type": "longrope"}, "lacks rope_factors_long"),
    "a magnitude": ({"llama.rope.scaling.attn_factor": 1.5}, "attn_factor is 1.5, of a RoPE of"),
    "yarn's own": (
        {"llama.rope.scaling.yarn_log_multiplier": 0.1},
        "yarn_log_multiplier = 0.1",
    ),
    "too many layers": ({"llama.block_count": 3}, "lacks 9 of 30 tensors"),
    "layers without end": (
        {"llama.block_count": 2**32 - 1},
        "llama.block_count is 4294967295, and there are 21 tensors in all",
    ),
    "no layers": ({"llama.block_count": 0}, "block_count is 0, expected at least 1"),
    "no heads": ({"llama.attention.head_count": 0}, "head_count is 0, expected at least 1"),
    "more heads than channels": (
        {"llama.attention.head_count": 1000, "llama.attention.key_length": None},
        "key_length is 0, expected at least 1",
    ),
    "heads of no channels": (
        {"llama.attention.key_length": 0, "llama.attention.value_length": 0},
        "key_length is 0, expected at least 1",
    ),
    "no keys": ({"llama.attention.head_count_kv": 0}, "head_count_kv is 0, expected at least 1"),
    "no context": ({"llama.context_length": 0}, "context_length is 0, expected at least 1"),
    "no channels": ({"llama.embedding_length": 0}, "embedding_length is 0, expected at least 1"),
    "a part of a number": ({"split.count": 2.5}, "split.count is '2.5', expected a whole number"),
    "no number of a part": ({"split.no": "x"}, "split.no is 'x', expected a whole number"),
    "too few layers": ({"llama.block_count": 1}, "holds 9 tensor.s. that a llama model"),
    "another width": ({"llama.feed_forward_length": 64}, "do not have the shape"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_metadata_that_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    extra, message = CONTRADICTIONS[name]
    path = tmp_path / "model.gguf"
    if "general.architecture" in extra:
        writer = gguf.GGUFWriter(path, "llama")
        del writer.kv_data[0]["general.architecture"]
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    else:
        ggufs.write(folder, path, extra=extra)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        export_model(path, tmp_path / "artifact")
    assert not (tmp_path / "artifact").exists()


NEUTRAL: Extra = {
    "llama.attention.causal": True,
    "llama.attention.sliding_window": 0,
    "llama.expert_count": 0,
    "llama.logit_scale": 1.0,
    "llama.rope.scaling.finetuned": True,
    "llama.rope.scaling.type": "none",
    "llama.rope.scaling.factor": 1.0,
    "llama.rope.scaling.attn_factor": 1.0,
    "llama.tensor_data_layout": "Meta AI original pth",
    "llama.attention.head_count_kv": [2, 2],
    "llama.vocab_size": None,
    "llama.rope.dimension_count": None,
    "general.quantized_by": "somebody",
    "somebody.else": "x",
}


def test_metadata_that_changes_nothing(folder: Path, tmp_path: Path) -> None:
    plain = export_model(ggufs.write(folder, tmp_path / "a.gguf"), tmp_path / "plain", FLOATS)
    path = ggufs.write(folder, tmp_path / "b.gguf", extra=NEUTRAL)
    found = export_model(path, tmp_path / "found", FLOATS)
    for file in FILES:
        assert (found / file).read_bytes() == (plain / file).read_bytes()


def test_an_older_linear_factor(folder: Path, tmp_path: Path) -> None:
    new = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    old = {"llama.rope.scale_linear": 4.0}
    for name, extra in (("new", new), ("old", old)):
        path = ggufs.write(folder, tmp_path / f"{name}.gguf", extra=extra)
        export_model(path, tmp_path / name, FLOATS)
    data = "model.onnx.data"
    assert (tmp_path / "new" / data).read_bytes() == (tmp_path / "old" / data).read_bytes()
    rope = Artifact.read(tmp_path / "old").manifest.model.rope
    assert (rope.type, rope.factor) == ("linear", 4.0)


def test_factors_beside_another_scaling(tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES["llama-llama3"], tmp_path / "checkpoint")
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf", extra=extra)
    with pytest.raises(UnsupportedModelError, match=r"holds rope_freqs.weight, with RoPE scaling"):
        export_model(path, tmp_path / "artifact")


def test_an_architecture_that_is_not_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        UnsupportedModelError, match=r"architecture 'mamba'; of GGUF files read are"
    ):
        export_model(tmp_path / "model.gguf", tmp_path / "artifact")


def test_a_tensor_that_nothing_uses(folder: Path, tmp_path: Path) -> None:
    writer: list[gguf.GGUFWriter] = []
    change: Callable[..., None] = gguf.GGUFWriter.write_header_to_file

    def with_one_more(self: gguf.GGUFWriter, *arguments: Any) -> None:
        writer.append(self)
        self.add_tensor("blk.0.attn_q.scale", np.ones(1, np.float32))
        change(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_one_more)
        path = ggufs.write(folder, tmp_path / "model.gguf")
    assert len(writer) == 1
    with pytest.raises(CheckpointError, match=r"does not use: blk\.0\.attn_q\.scale"):
        export_model(path, tmp_path / "artifact")


def test_a_draft_head_is_no_gguf_file(folder: Path, tmp_path: Path) -> None:
    path = ggufs.write(folder, tmp_path / "model.gguf")
    with pytest.raises(ExportError, match="is a GGUF file, in which no draft head is read"):
        export_head(path, folder, tmp_path / "artifact")


# The tokenizer, and what is beside it.


def test_the_tokenizer_comes_along(folder: Path, tmp_path: Path) -> None:
    vocab = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["a", "b", "ab", "<|im_end|>", "<|im_start|>"],
        "tokenizer.ggml.token_type": [1, 1, 1, 3, 3],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": 3,
        "tokenizer.ggml.bos_token_id": 4,
        "tokenizer.chat_template": "{{ messages }}",
    }
    path = ggufs.write(folder, tmp_path / "model.gguf", vocab=vocab)
    artifact = Artifact.read(export_model(path, tmp_path / "artifact", FLOATS))
    assert artifact.manifest.eos_token_ids == (3,)
    assert artifact.manifest.bos_token_id == 4
    assert (artifact.path / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (artifact.path / "tokenizer.json").is_file()
    assert artifact.manifest.source.name == "model"


def test_more_tokens_than_rows(tmp_path: Path) -> None:
    checkpoints.make(checkpoints.Case("llama", {"vocab_size": 4}), tmp_path / "checkpoint")
    vocab = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.merges": ["a b"],
    }
    for tokens in (["a", "b", "ab"], ["a", "b", "ab", "c"], ["a", "b", "ab", "c", "d"]):
        own = {**vocab, "tokenizer.ggml.tokens": tokens}
        path = ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf", vocab=own)
        if len(tokens) <= 4:
            export_model(path, tmp_path / f"{len(tokens)}", FLOATS)
            continue
        with pytest.raises(CheckpointError, match=r"has 5 tokens, .* 4 rows: .*--tokenizer"):
            export_model(path, tmp_path / "artifact", FLOATS)


@pytest.mark.parametrize("pre", ["qwen2", "unheard-of"])
def test_a_folders_tokenizer_wins(folder: Path, tmp_path: Path, pre: str) -> None:
    """Also where that of the file could not be read."""
    demo = tmp_path / "demo"
    demo.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (demo / name).write_bytes((DEMO / name).read_bytes())
    checkpoints.make(checkpoints.Case("llama", {"vocab_size": 2048}), tmp_path / "large")
    vocab = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre}
    options = ExportOptions(precision="fp32", tokenizer=demo)
    for name, large in (("small", folder), ("large", tmp_path / "large")):
        path = ggufs.write(large, tmp_path / f"{name}.gguf", vocab=vocab)
        if name == "small":
            with pytest.raises(CheckpointError, match=r"the token 2042, and the model has 160"):
                export_model(path, tmp_path / "artifact", options)
            continue
        artifact = Artifact.read(export_model(path, tmp_path / "artifact", options))
        assert artifact.manifest.eos_token_ids == (2045, 2043)
        for file in demo.iterdir():
            assert (artifact.path / file.name).read_bytes() == file.read_bytes()
    of_checkpoint = export_model(tmp_path / "large", tmp_path / "other", options)
    assert (of_checkpoint / "tokenizer.json").is_file()


@pytest.mark.parametrize(("rows", "is_told"), [(2046, True), (2048, False)])
def test_added_tokens_behind_the_embedding(
    rows: int, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As Gemma 3's original folder has one for images, which its files of text have no row for."""
    checkpoints.make(checkpoints.Case("llama", {"vocab_size": rows}), tmp_path / "checkpoint")
    path = ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf")
    options = ExportOptions(precision="fp32", tokenizer=DEMO)
    artifact = export_model(path, tmp_path / "artifact", options)
    assert (artifact / "tokenizer.json").is_file()
    told = "has 2 added tokens, such as '<tool_call>' (2046), behind the last of the model's 2046"
    assert (told in caplog.text) == is_told


ENDS: Mapping[str, tuple[Mapping[str, Any], tuple[int, ...]]] = {
    "named": ({"eos_token_id": 7, "eot_token_id": 9}, (7, 9)),
    "known, of a tokenizer that is not read": (
        {
            **{"model": "unheard-of", "eos_token_id": 1, "tokens": ["a", "b", "<|im_end|>"]},
            "token_type": [1, 3, 3],
        },
        (1, 2),
    ),
    "of no types": ({"eos_token_id": 1, "tokens": ["<|im_end|>"]}, (1,)),
    "behind the embedding": (
        {"tokens": [*map(str, range(2048)), "<|im_end|>"], "token_type": [3] * 2049},
        (),
    ),
    "none": ({"model": "gpt2"}, ()),
}


@pytest.mark.parametrize("name", ENDS)
def test_ends_that_a_tokenizers_folder_does_not_name(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys, ends = ENDS[name]
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    checkpoints.make(checkpoints.Case("llama", {"vocab_size": 2048}), tmp_path / "checkpoint")
    vocab = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    path = ggufs.write(tmp_path / "checkpoint", tmp_path / "model.gguf", vocab=vocab)
    options = ExportOptions(precision="fp32", tokenizer=tmp_path / "files")
    artifact = Artifact.read(export_model(path, tmp_path / "artifact", options))
    assert artifact.manifest.eos_token_ids == ends
    assert ("model.gguf names no token that ends texts" in caplog.text) == (not ends)


def test_ends_of_a_checkpoint_that_a_tokenizers_folder_does_not_name(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "tokenizer.json").write_bytes((DEMO / "tokenizer.json").read_bytes())
    checkpoints.make(checkpoints.Case("llama", {"vocab_size": 2048}), tmp_path / "checkpoint")
    named = tmp_path / "checkpoint" / "generation_config.json"
    named.write_text('{"eos_token_id": [8, 9]}', encoding="utf-8")
    options = ExportOptions(precision="fp32", tokenizer=tmp_path / "files")
    artifact = Artifact.read(export_model(tmp_path / "checkpoint", tmp_path / "artifact", options))
    assert artifact.manifest.eos_token_ids == (8, 9)


def test_an_end_that_is_no_token(tmp_path: Path, folder: Path) -> None:
    """Where the folder names none; a file whose tokenizer could not be read has no other."""
    vocab = {"tokenizer.ggml.model": "none", "tokenizer.ggml.eos_token_id": 160}
    path = ggufs.write(folder, tmp_path / "model.gguf", vocab=vocab)
    with pytest.raises(CheckpointError, match="eos_token_id is 160, of 160 tokens"):
        export_model(path, tmp_path / "artifact", FLOATS)


def test_a_folder_without_a_tokenizer(folder: Path, tmp_path: Path) -> None:
    path = ggufs.write(folder, tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"named as the tokenizer's folder, holds no tokeni"):
        export_model(path, tmp_path / "artifact", ExportOptions(tokenizer=folder))


def test_no_tokenizer_is_told(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export_model(ggufs.write(folder, tmp_path / "model.gguf"), tmp_path / "artifact", FLOATS)
    assert "model.gguf has no tokenizer.json" in caplog.text
    assert "--tokenizer" in caplog.text
