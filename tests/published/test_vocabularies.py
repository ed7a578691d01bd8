"""Published vocabularies have the tokens that llama.cpp keeps for its own test of them."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import normalizers

from onnxport.errors import UnsupportedModelError
from onnxport.exporter.gguf.shard import GgufShard
from onnxport.exporter.gguf.tokenizer import write_files
from onnxport.serving.tokenizer import Tokenizer
from tests.published.places import MODELS, needs_llama_cpp

pytestmark = needs_llama_cpp

SEPARATOR = "\n__ggml_vocab_test__\n"
LARGE = ("command-r", "deepseek-llm", "gemma-4", "llama-bpe", "qwen2", "qwen35")  # seconds each
NAMES = (
    *("baichuan", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2"),
    *("llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
)
REFUSED = {
    "aquila": "does not say how texts are cut",
    "gpt-neox": "does not say how texts are cut",
    "bert-bge": "the tokenizer is 'bert'",
    "nomic-bert-moe": "the tokenizer is 't5'",
}


class Case(NamedTuple):
    text: str
    ids: list[int]  # without tokens around it


def path_of(name: str) -> Path:
    return MODELS / f"ggml-vocab-{name}.gguf"


def tokenizer(name: str, folder: Path) -> FastTokenizer:
    """The tokenizer of a file as an export writes it."""
    path = path_of(name)
    shard = GgufShard(path)
    try:
        values = shard.metadata
        write_files(values, path, values["general.architecture"], folder)
    finally:
        shard.close()
    return FastTokenizer.from_file(str(folder / "tokenizer.json"))


def cases(name: str) -> list[Case]:
    path = path_of(name)
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split(SEPARATOR)
    lines = path.with_name(f"{path.name}.out").read_text("utf-8").split("\n")
    ids = [[int(one) for one in line.split()] for line in lines]
    assert not any(ids[len(texts) :])  # but an end of the file that is none of a line
    return [Case(*one) for one in zip(texts, ids[: len(texts)], strict=True)]


def marked(names: tuple[str, ...]) -> list[object]:
    return [pytest.param(one, marks=pytest.mark.slow) if one in LARGE else one for one in names]


def test_every_vocabulary_is_tried() -> None:
    found = {path.stem.removeprefix("ggml-vocab-") for path in MODELS.glob("ggml-vocab-*.gguf")}
    assert found == {*NAMES, *REFUSED}


@pytest.mark.parametrize("name", marked(tuple(one for one in NAMES if one != "baichuan")))
def test_tokens_of_texts(name: str, tmp_path: Path) -> None:
    fast = tokenizer(name, tmp_path)
    composes = isinstance(fast.normalizer, normalizers.NFC)
    found = Tokenizer(fast)
    expected = cases(name)
    assert len(expected) > 40
    for text, ids in expected:
        if not composes or normalize("NFC", text) == text:
            assert found.encode(text, add_special_tokens=False) == ids
    if composes:  # as the models' own do, and llama.cpp does not
        fast.normalizer = None
        for text, ids in expected:
            assert found.encode(text, add_special_tokens=False) == ids
    for text, ids in expected:
        assert found.decode(ids) == text
        pieces = found.detokenizer([])
        assert "".join([*map(pieces.add, ids), pieces.finish()]) == text


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
        tokenizer(name, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["deepseek-coder"])
def test_letters_that_are_added_tokens(name: str, tmp_path: Path) -> None:
    """In a file's own spelling, which names bytes in other tokens; llama.cpp reads them so."""
    found = Tokenizer(tokenizer(name, tmp_path))
    text = "nov\u00fd \u00f5 \u00fc"
    ids = found.encode(text)
    assert {32003, 32000, 32009} <= {*ids}
    assert found.decode(ids) == text
