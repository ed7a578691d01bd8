"""Hub ids: what is asked for, and what a user is told when the hub cannot give it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

from onnxport.errors import CheckpointError
from onnxport.exporter.export import export_model
from onnxport.exporter.hub import find_checkpoint
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from tests.exporter import checkpoints

HUB_ID = "owner/some-model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def response(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "https://huggingface.co"))


def test_a_folder_is_never_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "some-model").mkdir(parents=True)
    found = find_checkpoint(HUB_ID)
    assert (found.name, found.revision) == ("some-model", None)


@pytest.mark.parametrize(
    "source",
    [
        *("nowhere", "a/b/c", "/absolute/nowhere", "owner/bad name", "./model", "../model"),
        *("owner/model.git", "owner/model-", "owner/a..b"),
    ],
)
def test_neither_folder_nor_id(source: str) -> None:
    with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
        find_checkpoint(source)


def test_downloads_only_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "snapshots" / COMMIT
    checkpoints.make(checkpoints.CASES["llama-tied"], snapshot)
    asked: dict[str, Any] = {}

    def download(hub_id: str, **arguments: Any) -> str:
        asked.update(arguments, hub_id=hub_id)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    options = ExportOptions(revision="main", token="secret")
    path = export_model(HUB_ID, tmp_path / "artifact", options)
    source = Artifact.read(path).manifest.source
    assert (source.name, source.revision) == (HUB_ID, COMMIT)
    assert (asked["hub_id"], asked["revision"], asked["token"]) == (HUB_ID, "main", "secret")
    patterns = asked["allow_patterns"]
    kept = {
        name
        for name in (
            "config.json",
            "model.safetensors",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
            "chat_template.jinja",
            "pytorch_model.bin",
            "consolidated.safetensors",
            "original/model.safetensors",
            "README.md",
        )
        if any(Path(name).match(pattern) and "/" not in name for pattern in patterns)
    }
    assert kept == {
        "config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "chat_template.jinja",
    }


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errors.GatedRepoError("gated", response=response(403)), "is gated: accept its terms"),
        (errors.RepositoryNotFoundError("no", response=response(404)), "the hub has no model"),
        (errors.RevisionNotFoundError("no", response=response(404)), "no revision 'v9'"),
        (errors.LocalEntryNotFoundError("offline"), "the hub cannot be reached"),
        (
            errors.HfHubHTTPError("boom", response=response(500)),
            "cannot be downloaded from the hub",
        ),
        (OSError("disk"), "cannot be downloaded from the hub: disk"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_hub_refuses(
    error: Exception, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=message):
        export_model(HUB_ID, tmp_path / "artifact", ExportOptions(revision="v9"))
    assert not list(tmp_path.iterdir())


def test_offline_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match="is not in the local cache"):
        find_checkpoint(HUB_ID)
