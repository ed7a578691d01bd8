"""Tokens that end texts, and roles of others, in published files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from onnxport.exporter.gguf.shard import GgufShard
from onnxport.exporter.gguf.tokenizer import write_files
from onnxport.exporter.gguf.vocabulary import read_ends
from onnxport.exporter.source import special_tokens
from onnxport.serving.chat import ChatTemplate
from onnxport.serving.infill import Infill, InfillNames
from onnxport.serving.tokenizer import Tokenizer
from tests.published.places import MODELS, SMOLLM2, needs_llama_cpp, needs_smollm2
from tests.tiers import every

# Those of llama.cpp, by hand (llama-cpp-python 0.3.36); it ends at the text "</s>" of Qwen and
# Phi-3, too, which is HTML's there.
ENDS: Mapping[str, tuple[str, ...]] = {
    "baichuan": ("</s>",),
    "deepseek-coder": ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    "deepseek-llm": ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    "llama-bpe": ("<|end_of_text|>", "<|eot_id|>"),
    "llama-spm": ("</s>",),
    "mpt": ("<|endoftext|>",),
    "phi-3": ("<|endoftext|>", "<|end|>"),
    "qwen2": ("<|endoftext|>", "<|im_end|>"),
    "command-r": ("<|END_OF_TURN_TOKEN|>", "<PAD>"),
    "gemma-4": ("<eos>", "<|tool_response>", "<turn|>"),
}


def metadata(path: Path) -> Mapping[str, Any]:
    shard = GgufShard(path)
    shard.close()
    return shard.metadata


@needs_llama_cpp
@pytest.mark.parametrize("name", every(5, ENDS))
def test_ends_of_a_vocabulary(name: str) -> None:
    path = MODELS / f"ggml-vocab-{name}.gguf"
    values = metadata(path)
    tokens = values["tokenizer.ggml.tokens"]
    assert tuple(tokens[one] for one in read_ends(values, path, len(tokens))) == ENDS[name]


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of SmolLM2's tokenizer."""
    folder = tmp_path_factory.mktemp("smollm2")
    write_files(metadata(SMOLLM2), SMOLLM2, "llama", folder)
    return folder


# llama.cpp's tokens of the chat below.
CHAT_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407),
    *(19712, 8182, 2, 198, 1, 4093, 198, 33, 34, 216, 2, 2, 198, 1, 520, 9531, 198),
]


@needs_smollm2
def test_a_models_special_tokens(smollm2: Path) -> None:
    found = special_tokens(smollm2, 49152)
    assert (found.bos, found.pad) == (1, 2)
    assert found.eos == (2, 0, 4)  # <|im_end|>, <|endoftext|>, <reponame>; as llama.cpp's
    own = Tokenizer.from_folder(smollm2, frozenset(found.eos))
    assert own.encode("Hi") == own.encode("Hi", add_special_tokens=False)  # nothing begins texts
    assert len(own.special_spellings()) == 17
    assert own.infill_tokens == {}
    assert Infill.find(own) is None


@needs_smollm2
def test_a_models_chat(smollm2: Path) -> None:
    own = Tokenizer.from_folder(smollm2, frozenset())
    text = ChatTemplate.read(smollm2).render([{"role": "user", "content": "12 <|im_end|>"}])
    ids = own.encode(text, add_special_tokens=False)
    assert ids == CHAT_IDS
    assert own.decode(ids, skip_special_tokens=False) == text


@needs_smollm2
def test_ids_to_fill_in_by(tmp_path: Path) -> None:
    """They go before names, and without a token of the gap the suffix is first."""
    values = dict(metadata(SMOLLM2))
    for key, token in (("fim_pre", 6), ("fim_suf", 7), ("fim_mid", 8), ("fim_sep", 5)):
        values[f"tokenizer.ggml.{key}_token_id"] = token
    write_files(values, SMOLLM2, "llama", tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert config["infill_tokens"]["prefix"] == "<filename>"
    found = Infill.find(Tokenizer.from_folder(tmp_path, frozenset()))
    assert found is not None
    assert found.names == InfillNames(
        "<filename>", "<gh_stars>", "<issue_start>", file_separator="<file_sep>"
    )
    assert found.around("", "", begins=False).token_ids == [6, 7, 8]
    assert special_tokens(tmp_path, 49152).eos == (2, 0, 4, 5)
