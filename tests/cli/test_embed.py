"""`onnxport embed`, and a server that embeds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI

from onnxport.cli import build_parser, main
from onnxport.cli.embed import texts_of
from onnxport.cli.engine_arguments import engine_config
from onnxport.errors import RequestError
from onnxport.serving.config import EngineConfig

from .conftest import onnxport, serving

FEW = ("--threads", "1", "--kv-cache-tokens", "256", "--no-trial")


def parse(*arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(arguments)


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_a_line_for_each_text(artifact: Path, tmp_path: Path) -> None:
    file = tmp_path / "texts.txt"
    file.write_text("cd\n\nef\n")
    done = onnxport("embed", artifact, "ab", "-f", file, *FEW)
    assert done.returncode == 0, done.stderr
    found = lines(done.stdout)
    assert [(one["index"], one["text"]) for one in found] == [(0, "ab"), (1, "cd"), (2, "ef")]
    assert all(one["num_tokens"] == 2 for one in found)
    vectors = np.array([one["embedding"] for one in found])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)
    more = ("--pooling", "mean", "--no-normalize", "--matryoshka-dimensions", "8,4")
    done = onnxport("embed", artifact, "ab", "--dimensions", "4", *more, *FEW)
    [mean] = lines(done.stdout)
    assert len(mean["embedding"]) == 4
    assert np.linalg.norm(mean["embedding"]) != pytest.approx(1, rel=1e-3)


def test_what_is_too_long_is_cut(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At its end, to as many tokens as the context has."""
    long = "abc " * 2000
    arguments = ["embed", str(artifact), long, *FEW]
    assert main(arguments) == 1
    assert "shorten" in capsys.readouterr().err
    assert main([*arguments, "--truncate"]) == 0
    [found] = lines(capsys.readouterr().out)
    assert found["num_tokens"] <= 256


def test_what_is_wrong_is_told(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", str(artifact), "ab", "--dimensions", "4", *FEW]) == 1
    assert "Matryoshka" in capsys.readouterr().err
    with pytest.raises(RequestError, match="there is no text"):
        texts_of(parse("embed", "m"))
    for option, value in (("--matryoshka-dimensions", "0"), ("--matryoshka-dimensions", "x")):
        with pytest.raises(SystemExit):
            parse("embed", "m", "x", option, value)
        assert "neither a list of numbers above 0" in capsys.readouterr().err


def test_which_commands_embed() -> None:
    assert engine_config(parse("embed", "m", "x")) == EngineConfig(embeddings=True)
    assert engine_config(parse("serve", "m", "--embeddings")) == EngineConfig(embeddings=True)
    off = engine_config(parse("serve", "m", "--no-embeddings"))
    assert off == EngineConfig(embeddings=False)
    given = parse("serve", "m", "--pooling", "mean", "--matryoshka-dimensions", "any")
    config = EngineConfig(pooling="mean", matryoshka_dimensions="any")
    assert engine_config(given) == config


def test_a_server_embeds_for_openais_client(artifact: Path) -> None:
    with serving(artifact, "--embeddings") as (url, _):
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        name = client.models.list().data[0].id
        answer = client.embeddings.create(model=name, input=["ab", "cd"])
        numbers = client.embeddings.create(model=name, input=["ab", "cd"], encoding_format="float")
        assert [one.embedding for one in answer.data] == [one.embedding for one in numbers.data]
        done = onnxport("embed", artifact, "ab", "cd", *FEW)
        expected = [one["embedding"] for one in lines(done.stdout)]
        np.testing.assert_allclose([one.embedding for one in answer.data], expected, atol=1e-6)
        assert client.completions.create(model=name, prompt="ab", max_tokens=2).choices
    with serving(artifact) as (url, _):
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with pytest.raises(BadRequestError, match="start it with --embeddings"):
            client.embeddings.create(model=name, input="ab")
