"""What scripts/software_gpu.py does when it cannot fetch, and when it has nothing to fetch."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import brotli
import pytest

from scripts import software_gpu

SCRIPT = Path(__file__).parents[1] / "scripts" / "software_gpu.py"

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or os.uname().machine != "x86_64",
    reason="SwiftShader is fetched for Linux on x86-64 only",
)


def run(folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Run the script with nothing but the folder `path` to find programs in."""
    command = [sys.executable, str(SCRIPT), str(folder)]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True)


def fake_npm(folder: Path, script: str) -> Path:
    """A folder with a program npm, which finds the place for its file in $4."""
    folder.mkdir()
    npm = folder / "npm"
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(0o755)
    return folder


def archive(name: str, content: bytes, mode: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_without_npm(tmp_path: Path) -> None:
    result = run(tmp_path / "to", tmp_path)
    assert result.returncode == 1
    assert "npm, which fetches @sparticuz/chromium@" in result.stderr
    assert not result.stdout


def test_npms_own_words_are_passed_on(tmp_path: Path) -> None:
    result = run(tmp_path / "to", fake_npm(tmp_path / "bin", "echo no such version >&2; exit 1"))
    assert result.returncode == 1
    assert "no such version" in result.stderr


def test_another_content_is_refused(tmp_path: Path) -> None:
    inner = brotli.compress(archive("libvk_swiftshader.so", b"other", "w"))
    package = tmp_path / "package.tgz"
    package.write_bytes(archive("package/bin/swiftshader.tar.br", inner, "w:gz"))
    npm = fake_npm(tmp_path / "bin", f'/bin/cp "{package}" "$4"')
    result = run(tmp_path / "to", npm)
    assert result.returncode == 1
    assert "not used" in result.stderr
    assert not (tmp_path / "to").exists()


def test_what_is_there_is_not_fetched_again(tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    names = ("vk_swiftshader_icd.json", "libvk_swiftshader.so", "libvulkan.so.1")
    for name in names:
        (folder / name).touch()
    result = run(folder, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert f"export VK_ICD_FILENAMES='{folder}/vk_swiftshader_icd.json'\n" in result.stdout
    (folder / names[1]).unlink()
    result = run(folder, tmp_path)
    assert result.returncode == 1
    assert f"remove {folder}" in result.stderr


def test_an_archive_is_unpacked_whole(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("other", *software_gpu.FILES):
            info = tarfile.TarInfo(name)
            info.size = len(name)
            tar.addfile(info, io.BytesIO(name.encode()))
    software_gpu.unpack(buffer.getvalue(), tmp_path / "to" / "folder")
    found = {path.name: path.read_text() for path in (tmp_path / "to" / "folder").iterdir()}
    assert found == {name: name for name in software_gpu.FILES}
