"""What is said about the installed ONNX Runtime, whole or not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from onnxport.providers.ort_devices import find_onnxruntime, installed_wheels

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put distributions into a folder that is the only one Python finds."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def add(name: str, version: str, package: str = "onnxruntime") -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
        (folder / "top_level.txt").write_text(f"{package}\n")

    return add


def test_the_one_that_is_installed() -> None:
    found = find_onnxruntime()
    assert set(found.wheels.values()) == {found.version}
    assert "CPUExecutionProvider" in found.execution_providers
    assert "CPUExecutionProvider" in [device.execution_provider for device in found.devices]
    assert found.problems == ()


def test_two_wheels_are_a_problem(install: Install) -> None:
    install("onnxruntime", "1.31.1")
    install("onnxruntime-genai", "0.18", package="onnxruntime_genai")
    assert installed_wheels() == {"onnxruntime": "1.31.1"}
    assert find_onnxruntime().problems == ()
    install("onnxruntime-gpu", "1.30.0")
    assert installed_wheels() == {"onnxruntime": "1.31.1", "onnxruntime-gpu": "1.30.0"}
    (problem,) = find_onnxruntime().problems
    assert problem.startswith("onnxruntime 1.31.1 and onnxruntime-gpu 1.30.0 are installed; ")
    assert "pip uninstall -y onnxruntime onnxruntime-gpu)" in problem


def test_a_missing_one_is_none_and_a_broken_one_a_problem(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    found = find_onnxruntime()
    assert (found.version, found.wheels, found.problems) == (None, {}, ())
    install("onnxruntime", "1.31.1")
    (problem,) = find_onnxruntime().problems
    assert "onnxruntime 1.31.1 is installed, but cannot be imported" in problem
    monkeypatch.setitem(sys.modules, "onnxruntime", ModuleType("onnxruntime"))
    assert "has no attribute '__version__'" in find_onnxruntime().problems[0]


def runtime(**fields: Any) -> ModuleType:
    module = ModuleType("onnxruntime")
    module.__dict__.update({"__version__": "1.20", "get_available_providers": lambda: ["A"]})
    module.__dict__.update(fields)
    return module


def test_an_old_one_cannot_list_its_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", runtime())
    found = find_onnxruntime()
    assert (found.version, found.execution_providers, found.devices) == ("1.20", ("A",), ())
    assert "onnxruntime 1.20 is too old to list its devices" in found.problems[0]


def test_a_failing_list_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("the driver hangs")

    monkeypatch.setitem(sys.modules, "onnxruntime", runtime(get_ep_devices=fail))
    found = find_onnxruntime()
    assert found.version == "1.20"
    assert found.problems == ("onnxruntime 1.20 could not list its devices: the driver hangs",)
