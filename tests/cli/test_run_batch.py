"""`onnxport run-batch`: a file of requests in, a file of answers out."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from onnxport.cli import main

from .conftest import onnxport

FEW = ("--threads", "1", "--kv-cache-tokens", "256", "--no-trial")


def write(path: Path, *requests: tuple[str, dict[str, Any]]) -> Path:
    """Write a batch; each request has its number as custom_id."""
    lines = [
        json.dumps({"custom_id": str(number), "method": "POST", "url": url, "body": body})
        for number, (url, body) in enumerate(requests)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.slow
def test_answers_of_a_file(artifact: Path, tmp_path: Path) -> None:
    """As a server gives them, those that fail among them, in the order of the requests."""
    ask = {"max_tokens": 4, "temperature": 0}
    chat = {"messages": [{"role": "user", "content": "é"}], "model": "named", **ask}
    source = write(
        tmp_path / "in.jsonl",
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "ab", "max_tokens": 4000}),
        *[("/v1/completions", {"prompt": "ab", **ask})] * 6,
        ("/tokenize", {"prompt": "abc"}),
    )
    target = tmp_path / "out.jsonl"
    options = ("--served-model-name", "named", "--max-num-seqs", "2", "--max-queued-requests", "1")
    files = ("-i", "-", "-o", target)
    done = onnxport("run-batch", artifact, *files, *FEW, *options, stdin=source.read_text())
    assert done.returncode == 1, done.stderr
    assert "8 of 9 requests were answered, 1 failed." in done.stderr
    found = [json.loads(line) for line in target.read_text().splitlines()]
    assert [one["custom_id"] for one in found] == [str(number) for number in range(9)]
    statuses = [one["response"]["status_code"] for one in found]
    assert statuses == [200, 400, *[200] * 7]
    assert found[0]["response"]["body"]["model"] == "named"
    texts = {one["response"]["body"]["choices"][0]["text"] for one in found[2:8]}
    assert len(texts) == 1
    assert found[8]["response"]["body"]["count"] == 3
    assert "context length" in found[1]["error"]["message"]


def test_what_is_wrong_is_told_before_the_model_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", ("/v1/completions", {"prompt": "ab"}))
    bad = write(tmp_path / "bad.jsonl", ("/v1/images", {}))
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b"\xff\xfe")
    for given, target, reason in (
        (tmp_path / "none.jsonl", tmp_path / "out", "is not there"),
        (bad, tmp_path / "out", "line 1: url is '/v1/images'"),
        (latin, tmp_path / "out", "no text in UTF-8"),
        ("https://files.example/in.jsonl", tmp_path / "out", "is a URL"),
        (source, "s3://batches/out.jsonl", "is a URL"),
        (source, source, "would be lost"),
        (source, tmp_path / "none" / "out", "cannot be written"),
        (source, tmp_path, "cannot be written"),
    ):
        assert main(["run-batch", "nowhere", "-i", str(given), "-o", str(target)]) == 1
        assert reason in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    assert source.read_text()


def test_an_output_that_may_not_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", ("/v1/completions", {"prompt": "ab"}))
    target = tmp_path / "out.jsonl"
    asked: list[Path] = []
    monkeypatch.setattr(os, "access", lambda path, mode: asked.append(path))
    assert main(["run-batch", "nowhere", "-i", str(source), "-o", str(target)]) == 1
    assert "may not be written" in capsys.readouterr().err
    target.touch()
    assert main(["run-batch", "nowhere", "-i", str(source), "-o", str(target)]) == 1
    assert asked == [tmp_path, target]
