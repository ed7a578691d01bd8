"""`onnxport rerank`, and a server that judges pairs: a real model, exported from a causal one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from onnxport.cli import build_parser, main
from onnxport.cli.engine_arguments import engine_config
from onnxport.cli.export import export_options
from onnxport.graphs.classification_spec import SCORE_TEMPLATE_FILE
from onnxport.serving.config import EngineConfig

from .conftest import onnxport, serving

FEW = ("--threads", "1", "--kv-cache-tokens", "256", "--no-trial")
TEMPLATE = "{{ messages[-2].content }}?{{ messages[-1].content }}."
TEXTS = ("ab", "cd", "e")


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(arguments)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture(scope="module")
def reranker(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact that judges by two letters, and the checkpoint's folder beside it."""
    folder = tmp_path_factory.mktemp("reranker")
    template = folder / "template.jinja"
    template.write_text(TEMPLATE)
    tokens = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    assert all(tokens.token_to_id(letter) is not None for letter in "ny")
    made = folder / "artifact"
    options = ("--classifier-from-token", "n,y", "--score-template", template)
    done = onnxport("export", checkpoint, made, "--precision", "fp32", *options)
    assert done.returncode == 0, done.stderr
    assert (made / SCORE_TEMPLATE_FILE).read_text() == TEMPLATE
    return made


def test_the_best_text_comes_first(
    reranker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("cd\n\ne\n")
    done = onnxport("rerank", reranker, "why", "ab", "-f", file, *FEW)
    assert done.returncode == 0, done.stderr
    found = lines(done.stdout)
    assert sorted((one["index"], one["text"]) for one in found) == [*enumerate(TEXTS)]
    scores = [one["score"] for one in found]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert main(["rerank", str(reranker), "why", *TEXTS, "--top-n", "1", *FEW]) == 0
    assert lines(capsys.readouterr().out) == found[:1]
    with serving(reranker) as (url, _):
        body = {"query": "why", "documents": [*TEXTS]}
        results = httpx.post(f"{url}/v1/rerank", json=body).json()["results"]
        assert [one["index"] for one in results] == [one["index"] for one in found]
        np.testing.assert_allclose([one["relevance_score"] for one in results], scores, rtol=1e-5)
        completion = httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "max_tokens": 2})
        assert completion.json()["choices"]
    other = tmp_path / "other.jinja"
    other.write_text("{{ messages[-1].content }}, {{ messages[-2].content }}!")
    template = ("--score-template", str(other))
    assert main(["rerank", str(reranker), "why", *TEXTS, *template, *FEW]) == 0
    assert [one["score"] for one in lines(capsys.readouterr().out)] != scores


def test_vectors_are_compared_where_that_is_asked_for(
    artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rerank", str(artifact), "ab", "cd", "ab", "--embeddings", *FEW]) == 0
    best, other = lines(capsys.readouterr().out)
    assert (best["index"], best["text"]) == (1, "ab")
    assert best["score"] == pytest.approx(1, rel=1e-6)
    assert other["score"] < 1


def test_what_is_wrong_is_told(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rerank", str(artifact), "ab", "cd", *FEW]) == 1
    assert "no score head" in capsys.readouterr().err
    assert main(["rerank", str(artifact), "ab", "cd", "--classifier-from-token", "n,y"]) == 1
    assert "exported already, so --classifier-from-token" in capsys.readouterr().err
    assert main(["rerank", "m", "ab"]) == 1
    assert "there is no text" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        parse("export", "m", "n", "--classifier-from-token", "no,,yes")
    assert "no list of tokens" in capsys.readouterr().err


def test_which_options_go_where() -> None:
    given = parse("export", "m", "n", "--classifier-from-token", "no,yes")
    assert export_options(given).classifier_from_token == ("no", "yes")
    path = Path("pairs.jinja")
    for command in (("serve", "m"), ("rerank", "m", "q", "t")):
        options = parse(*command, "--score-template", "pairs.jinja")
        assert engine_config(options) == EngineConfig(score_template=path)
    assert engine_config(parse("rerank", "m", "q", "t")).embeddings is None
