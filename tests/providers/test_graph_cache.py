"""Lowered graphs on disk: the same as those that are made anew, told apart, and never trusted."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxport.graphs.artifact import GRAPH_FILES, WEIGHTS_FILE, Artifact
from onnxport.graphs.passes import retype
from onnxport.providers import graph_cache
from onnxport.providers.base import LoadOptions, Model
from onnxport.providers.cpu import graph_source, library, lowering
from onnxport.providers.cpu import provider as cpu
from onnxport.providers.cpu.graph_source import find_graph_cache
from onnxport.providers.graph_cache import Conversion, GraphCache, LoweredGraph, graph_key
from onnxport.providers.registry import open_model
from tests.providers.conftest import ArtifactMaker
from tests.providers.test_cpu_matmul import step

EARLIER = "lowered by an earlier start"
PROMPT = [(0, 0, [5, 6, 7, 8, 9, 10])]
GRAPH = LoweredGraph(
    model=bytes(range(256)) * 4,
    is_exact=False,
    stored_bytes=77,
    conversions=(Conversion("a", "model.onnx.data", 64, (2, 3), "float16", "float32"),),
)


def opened(path: Path, cache: Path | None, **options: Any) -> Model:
    return open_model(
        path, "cpu", LoadOptions(threads=1, kv_cache_tokens=512, graph_cache=cache, **options)
    )


def logits(path: Path, cache: Path | None, **options: Any) -> np.ndarray:
    model = opened(path, cache, **options)
    found = step(model, PROMPT)
    model.close()
    return found


def graphs(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.graph"))


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The models that sessions are started from, as they are."""
    found: list[bytes] = []
    start = cpu.start_session

    def note(model: bytes, *others: Any) -> Any:
        found.append(model)
        return start(model, *others)

    monkeypatch.setattr(cpu, "start_session", note)
    return found


@pytest.mark.parametrize("attention", ["custom", "decomposed"])
@pytest.mark.parametrize(
    ("family", "precision"),
    [("llama", "int4"), ("qwen2", "int4"), ("qwen3", "int8"), ("llama", "fp16"), ("qwen2", "fp32")],
)
def test_a_kept_graph_is_the_one_that_was_made(
    tiny_artifact: ArtifactMaker,
    tmp_path: Path,
    sessions: list[bytes],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    family: str,
    precision: str,
    attention: str,
) -> None:
    if attention == "custom" and library.find_library() is None:
        pytest.skip("the C++ kernels were not built")
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(retype, "INLINE_BYTES", 128)  # some are converted beside the graph
    path = tiny_artifact(family, precision)
    wanted = logits(path, None, attention=attention)
    first = opened(path, tmp_path, attention=attention)
    assert EARLIER not in caplog.text
    second = opened(path, tmp_path, attention=attention)
    assert EARLIER in caplog.text
    assert sessions[0] == sessions[1] == sessions[2]
    assert first.capabilities == second.capabilities
    for model in (first, second):
        assert step(model, PROMPT).tobytes() == wanted.tobytes()
        model.close()
    (file,) = graphs(tmp_path)
    assert (b'"stored": "float16"' in file.read_bytes()) == (precision != "fp32")


def test_other_weights_make_another_graph(tiny_artifact: ArtifactMaker, tmp_path: Path) -> None:
    """Norms are a part of the graph; here they change, and nothing that the manifest says."""
    path, cache = tmp_path / "artifact", tmp_path / "cache"
    shutil.copytree(tiny_artifact("llama", "int4"), path)
    before = logits(path, cache)
    artifact = Artifact.read(path)
    graph = artifact.load_graph("paged")
    norm = next(t for t in graph.graph.initializer if t.name.endswith("final_norm.weight"))
    _, offset, length = artifact.external(norm)
    stored = bytearray((path / WEIGHTS_FILE).read_bytes())
    halves = np.frombuffer(stored, np.float16, length // 2, offset)
    halves *= np.float16(2)
    (path / WEIGHTS_FILE).write_bytes(stored)
    after = logits(path, cache)
    assert after.tobytes() == logits(path, None).tobytes()
    assert after.tobytes() != before.tobytes()
    assert len(graphs(cache)) == 2


def test_what_matters_is_told_apart(
    tiny_artifact: ArtifactMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, code = tmp_path / "artifact", tmp_path / "code"
    shutil.copytree(tiny_artifact("llama", "int4"), path)
    code.mkdir()
    (code / "a.py").write_text("a = 1")
    artifact = Artifact.read(path)
    found: list[Path] = []

    def note(of: Artifact = artifact, **choices: Any) -> None:
        key = graph_key(of, [code], choices)
        assert key is not None
        found.append(GraphCache(tmp_path, key).path)

    note()
    note(level=1)
    note(level=4)
    (code / "b.py").write_text("")
    note()
    (code / "a.py").write_text("a = 10")
    note()
    os.utime(code / "a.py", ns=(1, 1))
    note()
    os.utime(path / WEIGHTS_FILE, ns=(1, 1))
    note()
    (path / GRAPH_FILES["paged"]).write_bytes(b"another graph")
    note()
    files = {name: replace(one, sha256="0" * 64) for name, one in artifact.manifest.files.items()}
    note(replace(artifact, manifest=replace(artifact.manifest, files=files)))
    monkeypatch.setattr(graph_cache, "__version__", "0.0.1")
    note()
    monkeypatch.setattr(graph_cache, "FORMAT", 0)
    note()
    assert len(set(found)) == len(found)
    (code / "notes.txt").write_text("no module")
    note()
    assert found[-1] == found[-2]


def test_a_module_by_itself_is_told_apart(tiny_artifact: ArtifactMaker, tmp_path: Path) -> None:
    artifact, module = Artifact.read(tiny_artifact("llama", "int4")), tmp_path / "a.py"
    assert graph_key(artifact, [module], {}) is None
    keys = []
    for text in ("a = 1", "a = 10"):
        module.write_text(text)
        (tmp_path / "beside.py").write_text(text)
        keys.append(graph_key(artifact, [module], {}))
    assert keys[0] != keys[1]
    (tmp_path / "beside.py").write_text("")
    assert graph_key(artifact, [module], {}) == keys[1]


def test_whatever_lowers_is_in_the_key(
    tiny_artifact: ArtifactMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The modules of providers that `cpu.lowering` reads, but for what is told by choices."""
    told: list[Path] = []

    def note(artifact: Artifact, code: Iterable[Path], choices: Any) -> None:
        told.extend(code)

    monkeypatch.setattr(graph_source, "graph_key", note)
    options = LoadOptions(graph_cache=tmp_path)
    artifact = Artifact.read(tiny_artifact("llama", "int4"))
    graph_source.find_graph_cache(artifact, options, custom=True)
    folders = {path for path in told if path.is_dir()}
    for name in re.findall(
        r"^from onnxport\.([a-z0-9_.]+) import", inspect.getsource(lowering), re.MULTILINE
    ):
        path = Path(importlib.import_module(f"onnxport.{name}").__file__ or "")
        if name != "providers.base":
            assert path in told or path.parent in folders, name


def test_what_cannot_be_known_is_not_kept(tiny_artifact: ArtifactMaker, tmp_path: Path) -> None:
    artifact = Artifact.read(tiny_artifact("llama", "int4"))
    assert graph_key(artifact, [tmp_path / "in-an-archive"], {}) is None


@pytest.mark.parametrize(
    ("options", "name", "result"),
    [
        ({"matmul_accuracy_level": 1}, None, None),
        ({"attention": "decomposed"}, None, None),
        ({"kv_cache_dtype": "float16"}, None, None),
        ({"coarse_head": False}, None, None),
        ({"final_states": True}, None, None),
        ({}, "matmul_isa", None),
        ({}, "prefers_pairs", "another"),
        ({}, "converts_half", "another"),
    ],
)
def test_each_choice_is_told_apart(
    tiny_artifact: ArtifactMaker,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    options: dict[str, Any],
    name: str | None,
    result: object,
) -> None:
    if library.matmul_isa() is None:
        pytest.skip("the C++ kernels were not built, or this processor has no kernel of ours")
    artifact = Artifact.read(tiny_artifact("llama", "int4"))
    chosen = LoadOptions(graph_cache=tmp_path)

    def path(of: LoadOptions) -> Path:
        kept = find_graph_cache(artifact, of, custom=of.attention != "decomposed")
        assert kept is not None
        return kept.path

    first = path(chosen)
    assert path(replace(chosen, threads=3, kv_cache_tokens=99)) == first
    if name is not None:
        monkeypatch.setattr(library, name, lambda: result)
    assert path(replace(chosen, **options)) != first


def test_adapters_keep_none(tiny_artifact: ArtifactMaker, tmp_path: Path) -> None:
    opened(tiny_artifact("llama", "int4"), tmp_path, max_adapters=1).close()
    assert not graphs(tmp_path)


def kept(folder: Path, name: str = "a") -> GraphCache:
    return GraphCache(folder, {"name": name})


def test_a_graph_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    assert kept(folder).read() is None
    kept(folder).write(GRAPH)
    assert kept(folder).read() == GRAPH
    assert kept(folder, "b").read() is None
    assert folder.stat().st_mode & 0o077 == 0
    assert [path.suffix for path in folder.iterdir()] == [".graph"]


def _flip(place: int) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda whole: b"", id="empty"),
        pytest.param(lambda whole: whole[:10], id="cut in the magic"),
        pytest.param(lambda whole: whole[:-1], id="cut at the end"),
        pytest.param(lambda whole: whole + b"x", id="longer"),
        pytest.param(_flip(0), id="magic"),
        pytest.param(_flip(20), id="checksum"),
        pytest.param(_flip(48), id="length"),
        pytest.param(_flip(80), id="header"),
        pytest.param(_flip(-2), id="graph"),
    ],
)
def test_a_damaged_file_is_none(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    kept(tmp_path).write(GRAPH)
    whole = kept(tmp_path).path.read_bytes()
    kept(tmp_path).path.write_bytes(damage(whole))
    assert kept(tmp_path).read() is None
    kept(tmp_path).write(GRAPH)
    assert kept(tmp_path).path.read_bytes() == whole


def test_a_file_of_another_key_is_none(tmp_path: Path) -> None:
    kept(tmp_path).write(GRAPH)
    kept(tmp_path).path.rename(kept(tmp_path, "b").path)
    assert kept(tmp_path, "b").read() is None


def test_a_damaged_file_is_made_anew(
    tiny_artifact: ArtifactMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_artifact("llama", "int4")
    wanted = logits(path, tmp_path)
    (file,) = graphs(tmp_path)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    caplog.set_level(logging.INFO)
    assert logits(path, tmp_path).tobytes() == wanted.tobytes()
    assert "is made anew: the file is damaged" in caplog.text
    assert EARLIER not in caplog.text
    assert file.read_bytes() == whole


def test_a_folder_that_cannot_be_used_is_left_alone(
    tiny_artifact: ArtifactMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "file").write_text("no folder")
    path = tiny_artifact("llama", "int4")
    found = logits(path, tmp_path / "file" / "cache")
    assert "is not kept in" in caplog.text
    assert found.tobytes() == logits(path, None).tobytes()


def test_a_folder_that_is_only_read_gives_its_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(tmp_path).write(GRAPH)

    def refuse(*given: object) -> None:
        raise PermissionError("read only")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "write_bytes", refuse)
    assert kept(tmp_path).read() == GRAPH
    kept(tmp_path, "b").write(GRAPH)
    assert kept(tmp_path, "b").read() is None


def test_a_graph_with_contents_of_unknown_origin_is_not_kept(tmp_path: Path) -> None:
    kept(tmp_path).write(replace(GRAPH, conversions=None))
    assert not list(tmp_path.iterdir())


def test_the_least_recently_used_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept(tmp_path).write(GRAPH)
    size = kept(tmp_path).path.stat().st_size
    monkeypatch.setattr(graph_cache, "MOST_BYTES", 3 * size)
    for name in "bc":
        kept(tmp_path, name).write(GRAPH)
    (tmp_path / "c0ffee.1.new").write_bytes(bytes(size))  # a process was ended while it wrote
    for age, path in enumerate(
        [kept(tmp_path, "c").path, kept(tmp_path, "b").path, kept(tmp_path).path]
    ):
        os.utime(path, ns=(10**9 * (100 - age),) * 2)
    os.utime(tmp_path / "c0ffee.1.new", ns=(10**9, 10**9))
    assert kept(tmp_path).read() == GRAPH  # it was the oldest graph
    kept(tmp_path, "d").write(GRAPH)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {kept(tmp_path, name).path.name for name in "acd"}
