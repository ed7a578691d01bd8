"""Commands that are given a GGUF file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import httpx
import pytest
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from onnxport.cli import main
from onnxport.cli.cache import cached_artifact
from onnxport.cli.export import export_options
from onnxport.errors import CheckpointError, ExportError
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from tests.exporter import ggufs
from tests.exporter.test_gguf_tokenizer import DEMO, keys

from .conftest import serving
from .test_arguments import parse


def demo(path: Path, kind: Kind, pre: str = "qwen2") -> str:
    """The demo model as a file."""
    vocab = keys(Tokenizer.from_file(str(DEMO / "tokenizer.json")), pre, eos=2045, padding=2043)
    config = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    vocab["tokenizer.chat_template"] = config["chat_template"]
    return str(ggufs.write(DEMO, path, kind, vocab=vocab))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ONNXPORT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_generate_as_from_the_checkpoint(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["Once upon a time", "--precision", "fp32", "--provider", "cpu", "--temperature", "0"]
    said = []
    for source in (demo(tmp_path / "story.gguf", Kind.BF16), str(DEMO)):
        assert main(["generate", source, *options, "--max-tokens", "24"]) == 0
        out, err = capsys.readouterr()
        assert f"{source} is exported first, once" in err
        assert "to fp32: " in err
        said.append(out)
    assert said[0] == said[1]
    assert len(said[0].split()) > 8
    assert len(list(cache.glob("story-fp32-*/manifest.json"))) == 1


@pytest.mark.slow
def test_a_server_chats_by_the_files_template(tmp_path: Path) -> None:
    request = {
        "messages": [{"role": "user", "content": "What is onnxport?"}],
        "temperature": 0,
        "max_tokens": 32,
    }
    answers = []
    for source in (demo(tmp_path / "story.gguf", Kind.BF16), str(DEMO)):
        options = ("--precision", "fp16", "--served-model-name", "story")
        with serving(source, *options, ONNXPORT_CACHE=str(tmp_path / "cache")) as (address, _):
            answer = httpx.post(f"{address}/v1/chat/completions", json=request, timeout=60)
            (choice,) = answer.raise_for_status().json()["choices"]
            answers.append((choice["message"]["content"], choice["finish_reason"]))
    assert answers[0] == answers[1]
    assert "onnxport" in answers[0][0]


def test_the_cache_knows_files_and_what_suits_them(tmp_path: Path, cache: Path) -> None:
    source = demo(tmp_path / "story.gguf", Kind.Q8_0)
    first = cached_artifact(source, ExportOptions())
    assert first.name.startswith("story-int8-")
    assert Artifact.read(first).manifest.precision == "int8"
    assert cached_artifact(source, ExportOptions(precision="int8")) == first
    smaller = cached_artifact(source, ExportOptions(precision="int4"))
    named = ExportOptions(tokenizer=tmp_path / "tokenizer")
    (tmp_path / "tokenizer").mkdir()
    shutil.copyfile(DEMO / "tokenizer.json", tmp_path / "tokenizer" / "tokenizer.json")
    other = cached_artifact(source, named)
    (tmp_path / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": 7}')
    changed = cached_artifact(source, named)
    demo(tmp_path / "story.gguf", Kind.Q4_0)
    newer = cached_artifact(source, ExportOptions())
    assert newer.name.startswith("story-int4-")
    assert len({first, smaller, other, changed, newer}) == 5
    assert Artifact.read(changed).manifest.eos_token_ids == (7,)


def test_export_says_what_it_chose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = demo(tmp_path / "story.gguf", Kind.Q8_0, pre="unheard-of")
    arguments = ["export", source, str(tmp_path / "artifact")]
    assert main(arguments) != 0
    assert "says 'unheard-of' how texts are cut" in capsys.readouterr().err
    assert main([*arguments, "--tokenizer", str(DEMO)]) == 0
    out, err = capsys.readouterr()
    assert f"Exported {source} to int8: " in err
    assert "Wrote" in out
    assert main(["generate", str(tmp_path / "artifact"), "x", "--tokenizer", str(DEMO)]) != 0
    assert "is exported already, so --tokenizer cannot change it" in capsys.readouterr().err


def test_a_file_has_no_revisions(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.touch()
    for given, message in (
        ("--revision", "is a local file, which has no revisions"),
        ("--token", "is a local file, which needs none"),
    ):
        with pytest.raises(ExportError, match=message):
            export_options(parse("export", str(path), "b", given, "x"))


def test_a_file_that_is_not_there(cache: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no file models/x\.gguf"):
        cached_artifact("models/x.gguf", ExportOptions())
