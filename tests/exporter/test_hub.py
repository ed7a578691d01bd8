"""Hub ids: what is asked for, and what a user is told when the hub cannot give it."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors
from huggingface_hub.utils import _http

from onnxport.errors import CheckpointError, ExportError, UnsupportedModelError
from onnxport.exporter.draft_head import export_head
from onnxport.exporter.export import export_model
from onnxport.exporter.hub import fetch_weights, find_checkpoint
from onnxport.exporter.options import ExportOptions
from onnxport.graphs.artifact import Artifact
from tests.exporter import checkpoints, heads

# The HTTP client that huggingface_hub uses, which is no longer httpx since its version 2.
NETWORK: Any = getattr(_http, "httpx2", None) or httpx
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


class Hub:
    """A hub whose models are folders; notes what is asked of it, and gives no more than that."""

    def __init__(self, cache: Path, **models: Path) -> None:
        self.cache = cache
        self.models = {f"owner/{name}": folder for name, folder in models.items()}
        self.asked: list[tuple[str, str | None, str | None]] = []
        self.given: list[tuple[str, str]] = []  # (model, file), in order

    def download(
        self, hub_id: str, *, revision: str | None, token: str | None, allow_patterns: list[str]
    ) -> str:
        self.asked.append((hub_id, revision, token))
        folder = self.models[hub_id]
        snapshot = self.cache / hub_id / "snapshots" / COMMIT
        snapshot.mkdir(parents=True, exist_ok=True)
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(folder).as_posix()
            if any(fnmatch(name, pattern) for pattern in allow_patterns):
                self.given.append((hub_id, name))
                (snapshot / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, snapshot / name)
        return str(snapshot)

    def files(self, name: str) -> list[str]:
        return [file for model, file in self.given if model == f"owner/{name}"]


OTHERS = (
    "pytorch_model.bin",
    "consolidated.safetensors",
    "original/model.safetensors",
    "README.md",
)
TEMPLATE = "additional_chat_templates/tools.jinja"


def weights(files: list[str]) -> list[str]:
    return [name for name in files if ".safetensors" in name]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Has the model `plain`, with all that hubs have beside it."""
    folder = tmp_path / "plain"
    checkpoints.make(checkpoints.CASES["llama-tied"], folder)
    for name in (*OTHERS, TEMPLATE):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    made = Hub(tmp_path / "cache", plain=folder)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", made.download)
    return made


def test_small_files_come_first_and_weights_of_the_same_commit(hub: Hub, tmp_path: Path) -> None:
    options = ExportOptions(revision="main", token="secret")
    path = export_model("owner/plain", tmp_path / "artifact", options)
    source = Artifact.read(path).manifest.source
    assert (source.name, source.revision) == ("owner/plain", COMMIT)
    assert hub.asked == [("owner/plain", "main", "secret"), ("owner/plain", COMMIT, "secret")]
    files = hub.files("plain")
    last = weights(files)
    assert len(last) > 1
    assert files[-len(last) :] == last
    assert {"config.json", TEMPLATE} <= set(files)
    assert not {*OTHERS} & {*files}
    assert (path / TEMPLATE).read_text() == "x"


def test_all_shards_are_weights_and_nothing_else_is(hub: Hub) -> None:
    folder = hub.models["owner/plain"]
    for path in folder.glob("model*.safetensors"):
        path.unlink()
    shards = [
        *("model-00001-of-00002.safetensors", "model.safetensors-00001-of-00002.safetensors"),
        *("pytorch_model-00001-of-00002.safetensors", "model.safetensors.index.json"),
        "model.safetensors",
    ]
    for name in shards:
        (folder / name).write_text("x")
    found = find_checkpoint("owner/plain")
    assert hub.given
    assert not weights(hub.files("plain"))
    hub.given.clear()
    assert fetch_weights(found) == found
    assert sorted(hub.files("plain")) == sorted(shards)


def test_a_model_that_has_only_gguf_files(hub: Hub) -> None:
    folder = hub.models["owner/plain"]
    (folder / "config.json").unlink()
    (folder / "model-Q4_K_M.gguf").write_text("x")
    with pytest.raises(CheckpointError, match=r"no config.json.*hf download owner/plain FILE"):
        find_checkpoint("owner/plain")
    assert not any(name.endswith(".gguf") for name in hub.files("plain"))
    with pytest.raises(CheckpointError, match="not chosen by OWNER/NAME:TYPE"):
        find_checkpoint("owner/plain:Q4_K_M")


def test_a_gguf_file_is_never_looked_up(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no file owner/plain\.gguf"):
        find_checkpoint("owner/plain.gguf")
    (tmp_path / "x.gguf").touch()
    assert find_checkpoint(tmp_path / "x.gguf").name == "x"
    assert not hub.asked


def test_a_local_folder_has_its_weights(hub: Hub) -> None:
    found = find_checkpoint(hub.models["owner/plain"])
    assert fetch_weights(found) is found
    assert not hub.asked


REFUSED: dict[str, tuple[str, object, str]] = {
    "architecture": ("architectures", ["MambaForCausalLM"], "MambaForCausalLM"),
    "key": ("surprise", 1, "surprise"),
    "quantization": ("quantization_config", {"quant_method": "exl3"}, "quantized with 'exl3'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_config_says_is_refused_before_the_weights_come(
    hub: Hub, tmp_path: Path, case: str
) -> None:
    key, value, words = REFUSED[case]
    path = hub.models["owner/plain"] / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(UnsupportedModelError, match=words):
        export_model("owner/plain", tmp_path / "artifact")
    assert "config.json" in hub.files("plain")
    assert not weights(hub.files("plain"))


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
def test_a_tokenizer_is_refused_before_the_weights_come(
    hub: Hub, tmp_path: Path, name: str
) -> None:
    (hub.models["owner/plain"] / name).write_text("{")
    with pytest.raises(CheckpointError, match=name):
        export_model("owner/plain", tmp_path / "artifact")
    assert not weights(hub.files("plain"))


def test_a_destination_is_refused_before_anything_comes(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one").write_text("dear")
    for options in (None, ExportOptions(overwrite=True)):
        with pytest.raises(ExportError, match="letters"):
            export_model("owner/plain", tmp_path / "letters", options)
        with pytest.raises(ExportError, match="letters"):
            export_head("owner/plain", "owner/plain", tmp_path / "letters", options)
    assert not hub.asked


@pytest.mark.parametrize("own", [True, False], ids=["an embedding", "none"])
def test_a_target_s_weights_come_for_a_head_without_an_embedding(
    hub: Hub, tmp_path: Path, own: bool
) -> None:
    target = tmp_path / "target"
    checkpoints.make(heads.TARGET, target)
    head = heads.Head(own_embedding=own).make(tmp_path / "head")
    hub.models |= {"owner/target": target, "owner/head": head}
    options = ExportOptions(token="secret")
    path = export_head("owner/head", "owner/target", tmp_path / "artifact", options)
    assert Artifact.read(path).manifest.source.revision == COMMIT
    assert weights(hub.files("head"))
    assert ("tokenizer.json" in hub.files("target")) == (path / "tokenizer.json").is_file()
    assert bool(weights(hub.files("target"))) != own
    assert {token for _, _, token in hub.asked} == {"secret"}


def test_a_head_that_does_not_fit_is_refused_before_weights_come(hub: Hub, tmp_path: Path) -> None:
    checkpoints.make(checkpoints.CASES["llama"], tmp_path / "short")
    head = heads.Head().make(tmp_path / "head")
    hub.models |= {"owner/target": tmp_path / "short", "owner/head": head}
    with pytest.raises(CheckpointError, match="that of half their number"):
        export_head("owner/head", "owner/target", tmp_path / "artifact")
    assert not weights([file for _, file in hub.given])


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
        (OSError("disk"), "cannot be downloaded from the hub: OSError: disk"),
        (NETWORK.ReadError("reset by\npeer"), "cannot be downloaded .* ReadError: reset by peer"),
        (NETWORK.ProxyError("403"), "cannot be downloaded from the hub: ProxyError: 403"),
        (NETWORK.ConnectError(""), r"cannot be downloaded from the hub: ConnectError\. Try again"),
        (Exception("no ref"), "cannot be downloaded from the hub: Exception: no ref"),
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


@pytest.mark.parametrize("name", ["RevisionResolutionError", "IncompleteSnapshotError"])
def test_what_newer_hubs_refuse(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not hasattr(errors, name):
        pytest.skip(f"this huggingface_hub has no {name}")

    def refuse(*_: Any, **__: Any) -> str:
        raise getattr(errors, name)("no ref")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=r"owner/some-model .* the hub"):
        find_checkpoint(HUB_ID)


def test_weights_that_break_off_are_told_of(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_checkpoint("owner/plain")

    def refuse(*_: Any, **__: Any) -> str:
        raise NETWORK.ReadError("reset")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(CheckpointError, match=f"owner/plain at revision {COMMIT} cannot be down"):
        fetch_weights(found)


def test_an_interruption_is_no_error_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface_hub, "snapshot_download", interrupt)
    with pytest.raises(KeyboardInterrupt):
        find_checkpoint(HUB_ID)


def test_offline_for_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with pytest.raises(CheckpointError, match="is not, or not all of it, in the local cache"):
        find_checkpoint(HUB_ID)
