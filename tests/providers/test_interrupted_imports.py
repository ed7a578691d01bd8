"""Imports that a signal interrupted are not taken for libraries that are missing.

Folders that are no packages are.
"""

from __future__ import annotations

import builtins
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import pytest

from onnxport.providers import directml, migraphx
from onnxport.providers.imports import unless_interrupted
from onnxport.providers.registry import get_provider


def failed_by(cause: BaseException | None) -> ImportError:
    """As pybind11 tells it."""
    error = ImportError("initialization failed")
    error.__cause__ = cause
    return error


def test_a_library_that_is_missing_is_just_that() -> None:
    unless_interrupted(failed_by(None))
    unless_interrupted(failed_by(OSError("libfoo.so: no such file")))


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interruption_is_raised(kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        unless_interrupted(failed_by(kind()))
    with pytest.raises(kind):
        unless_interrupted(failed_by(failed_by(kind())))


def test_errors_that_are_each_others_cause_end() -> None:
    error = failed_by(None)
    error.__context__ = failed_by(error)
    unless_interrupted(error)


@pytest.mark.parametrize(("name", "library"), [("cpu", "onnxruntime"), ("openvino", "openvino")])
def test_a_provider_lets_it_through(
    monkeypatch: pytest.MonkeyPatch, name: str, library: str
) -> None:
    provider, real = get_provider(name), builtins.__import__

    def importing(module: str, *given: Any, **more: Any) -> Any:
        if module == library:
            raise failed_by(SystemExit(143))
        return real(module, *given, **more)

    monkeypatch.setattr(builtins, "__import__", importing)
    with pytest.raises(SystemExit):
        provider.probe()


@pytest.mark.parametrize(
    ("name", "library"),
    [
        *((name, "onnxruntime") for name in ("cpu", "cuda", "webgpu", "migraphx", "directml")),
        ("openvino", "openvino"),
    ],
)
def test_a_folder_that_was_left_behind_is_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, library: str
) -> None:
    (tmp_path / library).mkdir()
    spec = PathFinder.find_spec(library, [str(tmp_path)])
    assert spec is not None
    monkeypatch.setitem(sys.modules, library, module_from_spec(spec))
    monkeypatch.setattr(migraphx.platform, "system", lambda: "Linux")
    if name == "directml":
        monkeypatch.setattr(directml.platform, "system", lambda: "Windows")
    probe = get_provider(name).probe()
    assert not probe.available
    assert probe.reason.startswith(f"{library} is missing ({tmp_path / library} is no package; ")
