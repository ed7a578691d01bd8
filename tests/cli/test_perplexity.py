"""`onnxport perplexity`: what it prints is what a model says of a text's tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from onnxport import LLM, SamplingParams
from onnxport.cli.perplexity import _tokens
from onnxport.serving.tokenizer import Tokenizer

from .conftest import onnxport, write_checkpoint

FEW = ("--provider", "cpu", "--threads", "1", "--window", "16")
TEXT = "A text that is long enough, if not a good one: äöü. " * 3


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, "utf-8")
    return path


def measured(*arguments: str | Path) -> dict[str, Any]:
    done = onnxport("perplexity", *arguments, *FEW, "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_it_is_what_an_engine_says_of_prompts(artifact: Path, text: Path) -> None:
    found = measured(artifact, text, "--most-windows", "3")
    tokens = Tokenizer.from_folder(artifact, frozenset()).encode(TEXT)
    assert found["text_tokens"] == len(tokens)
    told = []
    with LLM(artifact, provider="cpu", threads=1, kv_cache_tokens=256) as llm:
        for at in (0, 16, 32):
            prompt = tokens[at : at + 16]
            params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
            (output,) = llm.generate([{"prompt_token_ids": prompt}], params)
            assert output.prompt_logprobs is not None
            rows = zip(output.prompt_logprobs[9:], prompt[9:], strict=True)
            told += [row[token].logprob for row, token in rows if row is not None]
    assert (found["windows"], found["num_tokens"]) == (3, len(told))
    assert found["mean_logprob"] == pytest.approx(np.mean(told), abs=1e-4)
    assert found["perplexity"]["mean"] == pytest.approx(math.exp(-np.mean(told)), rel=1e-4)


@pytest.mark.parametrize(
    ("around", "text", "expected"),
    [
        ("$A", "a b", ([3, 4], None)),
        ("<s> $A", "a b", ([1, 3, 4], 1)),
        ("<s> $A </s>", "a b", ([1, 3, 4], 1)),
        ("<s> </s> $A", "a b", ([1, 2, 3], 1)),
        ("$A </s>", "a a", ([3, 3], None)),
        ("<s> $A", "<s> a b", ([1, 1, 3, 4], 1)),  # the text says it once more
    ],
)
def test_what_stands_ahead_of_texts(
    tmp_path: Path, around: str, text: str, expected: tuple[list[int], int | None]
) -> None:
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}
    tokenizer = tokenizers.Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = TemplateProcessing(
        single=around, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert _tokens(tmp_path, text) == expected


def test_what_quantizing_costs(checkpoint: Path, artifact: Path, text: Path) -> None:
    found = measured(checkpoint, text, "--precision", "fp32", "--against", artifact)
    assert found["against"]["model"] == artifact.name
    assert found["against"]["perplexity"]["mean"] != found["perplexity"]["mean"]
    assert found["against"]["kl"]["mean"] > 0
    assert 0 < found["against"]["same_top"] < 1
    done = onnxport("perplexity", artifact, text, *FEW, "--against", artifact)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("tiny on cpu, computed in float32")
    assert lines[1].startswith("perplexity ")
    assert lines[2].startswith("of ")
    assert lines[4].startswith("KL divergence 0.0000 ± 0.0000 nats")
    assert lines[5] == "the same token likeliest at 100.00% of the places"


def test_what_a_type_of_cache_costs(artifact: Path, text: Path) -> None:
    types = ("--kv-cache-dtype", "int4", "--base-kv-cache-dtype", "fp32")
    found = measured(artifact, text, "--against", artifact, *types)
    assert found["kv_cache_dtype"] == "int4"
    assert found["against"]["kl"]["mean"] > 0
    assert (
        found["against"]["perplexity"] == measured(artifact, text, *types[:1], "fp32")["perplexity"]
    )


def test_what_is_refused(artifact: Path, text: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    other = write_checkpoint(tmp_path / "other", seed=1)
    cases = (
        ((artifact, tmp_path / "none.txt"), "none.txt, which cannot be read"),
        ((artifact, tmp_path / "binary.txt"), "binary.txt, which cannot be read"),
        ((artifact, tmp_path / "empty.txt"), "the text is empty"),
        ((artifact, text, "--window", "4"), "5 are the least"),
        ((artifact, text, "--window", "4096"), "take a longer text, or shorter windows"),
        ((artifact, text, "--against", other), "which is no artifact"),
        ((artifact, text, "--base-kv-cache-dtype", "fp32"), "which is not given"),
    )
    for arguments, words in cases:
        done = onnxport("perplexity", *FEW, *arguments)
        assert done.returncode == 1
        assert words in done.stderr
