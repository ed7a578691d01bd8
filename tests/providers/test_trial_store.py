"""Trials on disk: kept, told apart, and never trusted."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from onnxport.providers import memory, trial_store
from onnxport.providers.base import Device, LoadOptions, Probe
from onnxport.providers.trial import Figures
from onnxport.providers.trial_store import TrialStore, trial_key
from tests.waiting import PATIENCE_S

PROBES = {
    "cpu": Probe(True, "", (Device("a processor", 1 << 30),), {"onnxruntime": "1.31.1"}),
    "cuda": Probe(True, "", (Device("a GPU", 1 << 34, "gpu"),), {"driver": "580"}),
}
FULL = {"cpu": Figures(0.01, 0.02, 0.3), "cuda": Figures(0.001, None, None)}


def store(folder: Path, **options: Any) -> TrialStore:
    return TrialStore(folder, trial_key("ab" * 32, LoadOptions(**options), PROBES))


def test_figures_are_kept(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    assert store(folder).read() == {}
    with store(folder).locked():
        store(folder).write(FULL)
    assert store(folder).read() == FULL
    assert sorted(path.suffix for path in folder.iterdir() if path.name != ".lock") == [".json"]


def test_what_matters_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def paths() -> set[Path]:
        gpu, cpu = PROBES["cuda"], PROBES["cpu"]
        variants = [
            PROBES,
            {"cpu": cpu},
            {**PROBES, "cuda": replace(gpu, versions={"driver": "590"})},
            {**PROBES, "cuda": replace(gpu, devices=(Device("another", 1 << 34, "gpu"),))},
        ]
        keys = [trial_key("a", LoadOptions(), each) for each in variants]
        keys.append(trial_key("b", LoadOptions(), PROBES))
        for options in (
            {"threads": 1},
            {"dtype": "float16"},
            {"kv_cache_dtype": "int8"},
            {"attention": "native"},
            {"block_size": 16},
            {"matmul_accuracy_level": 1},
            {"allowed_on_host": ("Gather",)},
            {"kv_cache_tokens": 64},  # less than a trial would take
            {"kv_memory": 4096},
            {"max_model_len": 64},
        ):
            keys.append(trial_key("a", LoadOptions(**options), PROBES))  # type: ignore[arg-type]
        return {TrialStore(tmp_path, key).path for key in keys}

    first = paths()
    assert len(first) == 15
    monkeypatch.setattr(memory, "physical_cores", lambda: 77)
    second = paths()
    monkeypatch.setattr(memory, "total_bytes", lambda: 1)
    third = paths()
    monkeypatch.setattr(trial_store, "__version__", "99")
    assert len(first | second | third | paths()) == 60


def test_what_does_not_matter_is_not(tmp_path: Path) -> None:
    same = [{}, {"kv_cache_tokens": 2048}, {"kv_cache_tokens": 10**6}, {"max_model_len": 4096}]
    same.append({"graph_cache": tmp_path})
    assert len({store(tmp_path, **options).path for options in same}) == 1


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
        b"null",
        b"[]",
        b"{}",
        b'{"key": 1, "figures": {"cpu": {"decode_s": 1.0}}}',
    ],
)
def test_a_damaged_file_holds_nothing(tmp_path: Path, content: bytes) -> None:
    store(tmp_path).path.write_bytes(content)
    assert store(tmp_path).read() == {}
    store(tmp_path).write(FULL)
    assert store(tmp_path).read() == FULL


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"decode_s": 1.0},
        {"decode_s": None, "decode_rows_s": 1.0, "prefill_s": 1.0},
        {"decode_s": "1", "decode_rows_s": 1.0, "prefill_s": 1.0},
        {"decode_s": 1.0, "decode_rows_s": -1.0, "prefill_s": 1.0},
        {"decode_s": 1.0, "decode_rows_s": float("nan"), "prefill_s": 1.0},
        {"decode_s": 1.0, "decode_rows_s": 1.0, "prefill_s": float("inf")},
        {"decode_s": 1.0, "decode_rows_s": 1.0, "prefill_s": 1.0, "more": 1.0},
        {"decode_s": True, "decode_rows_s": 1.0, "prefill_s": 1.0},
    ],
)
def test_figures_that_are_none_are_left_out(tmp_path: Path, value: object) -> None:
    store(tmp_path).write(FULL)
    content = json.loads(store(tmp_path).path.read_text())
    content["figures"]["cpu"] = value
    store(tmp_path).path.write_text(json.dumps(content))
    assert store(tmp_path).read() == {"cuda": FULL["cuda"]}
    content["figures"] = [value]
    store(tmp_path).path.write_text(json.dumps(content))
    assert store(tmp_path).read() == {}


def test_a_file_of_another_key_is_ignored(tmp_path: Path) -> None:
    store(tmp_path).write(FULL)
    other = store(tmp_path, threads=3)
    store(tmp_path).path.rename(other.path)
    assert other.read() == {}


def test_a_provider_that_is_not_compared_is_ignored(tmp_path: Path) -> None:
    store(tmp_path).write({**FULL, "webgpu": Figures(1.0)})
    assert store(tmp_path).read() == FULL


def test_a_folder_that_cannot_be_used_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    blocked = store(tmp_path / "file")
    with blocked.locked():
        blocked.write(FULL)
    assert blocked.read() == {}
    assert [record.levelname for record in caplog.records[:2]] == ["WARNING", "WARNING"]
    assert "cannot be locked" in caplog.text
    assert "is not kept in" in caplog.text


def _hold(folder: Path, order: list[str]) -> None:
    with store(folder).locked():
        order.append(f"{os.getpid()} in")
        time.sleep(0.02)
        order.append(f"{os.getpid()} out")


def test_processes_take_turns(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        order = manager.list()
        processes = [context.Process(target=_hold, args=(tmp_path, order)) for _ in range(3)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(PATIENCE_S)
        assert [process.exitcode for process in processes] == [0, 0, 0]
        pairs = list(order)
    assert len(pairs) == 6
    for entered, left in zip(pairs[::2], pairs[1::2], strict=True):
        assert entered.split() == [left.split()[0], "in"]


def test_another_trial_that_never_ends_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trial_store, "PATIENCE_S", 0.05)
    with store(tmp_path).locked(), store(tmp_path).locked():
        assert "cannot be locked" in caplog.text
