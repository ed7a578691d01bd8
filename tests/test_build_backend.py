"""What the build asks for beside its backend."""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "scripts" / "backend"


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """The module, as the backend finds it."""
    found: dict[str, object] = {}
    exec((FOLDER / "openvino_wheels.py").read_text(), found)  # it is in no package
    return found


@pytest.mark.parametrize(
    ("system", "machine", "libc", "python", "found"),
    [
        ("linux", "x86_64", ("glibc", "2.36"), (3, 11), True),
        ("linux", "x86_64", ("glibc", "2.28"), (3, 14), True),
        ("linux", "x86_64", ("glibc", "2.27"), (3, 11), False),
        ("linux", "x86_64", ("", ""), (3, 11), False),  # musl
        ("linux", "x86_64", ("glibc", "2.36"), (3, 15), False),
        ("linux", "aarch64", ("glibc", "2.35"), (3, 12), True),
        ("linux", "aarch64", ("glibc", "2.34"), (3, 12), False),
        ("linux", "riscv64", ("glibc", "2.40"), (3, 12), False),
        ("darwin", "arm64", ("", ""), (3, 12), True),
        ("darwin", "x86_64", ("", ""), (3, 12), False),
        ("win32", "AMD64", ("", ""), (3, 12), True),
        ("win32", "ARM64", ("", ""), (3, 12), False),
    ],
)
def test_openvino_is_asked_for_where_it_has_a_wheel(
    monkeypatch: pytest.MonkeyPatch,
    wheels: dict[str, object],
    system: str,
    machine: str,
    libc: tuple[str, str],
    python: tuple[int, int],
    found: bool,
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(sys, "version_info", python)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(platform, "libc_ver", lambda: libc)
    requirement = wheels["requirement"]
    assert callable(requirement)
    assert requirement() == ([wheels["OPENVINO"]] if found else [])


def test_the_release_is_that_of_the_extra(wheels: dict[str, object]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["optional-dependencies"]["openvino"] == [wheels["OPENVINO"]]
    assert (ROOT / project["build-system"]["backend-path"][0]) == FOLDER
    assert not [one for one in project["build-system"]["requires"] if re.match("openvino", one)]
