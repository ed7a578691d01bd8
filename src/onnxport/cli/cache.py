"""Artifacts that commands exported by themselves, once each, in a cache folder."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxport.cli.arguments import EXPORT_OPTIONS
from onnxport.cli.export import export, export_options
from onnxport.errors import CheckpointError, ExportError
from onnxport.serving.speculation.config import SpeculationConfig
from onnxport.version import __version__

if TYPE_CHECKING:
    from onnxport.exporter.hub import CheckpointFolder
    from onnxport.exporter.options import ExportOptions

CACHE_VARIABLE = "ONNXPORT_CACHE"
NO_PART_OF_THE_KEY = ("overwrite", "revision", "token", "threads")


def cache_folder() -> Path:
    """Return the folder that keeps artifacts: $ONNXPORT_CACHE, or one in the home directory.

    Raises:
        ExportError: neither is there.
    """
    given = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(given).expanduser() if given else Path.home() / ".cache" / "onnxport"
    except RuntimeError as error:
        raise ExportError(
            f"this user has no home directory ({error}), where exported models are kept; name a "
            f"folder in {CACHE_VARIABLE}"
        ) from error


def cache_folder_if_any() -> Path | None:
    """Return the same; None where there is none, for what can be done without."""
    with suppress(ExportError):
        return cache_folder()
    return None


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the model of a command, for `find_artifact`; `add_export_options` belongs to it."""
    parser.add_argument(
        "source",
        metavar="MODEL",
        help="an artifact; a checkpoint, GGUF file or hub id is exported first",
    )


def find_artifact(options: argparse.Namespace) -> Path:
    """Return the artifact of the model that a command names, exporting it first if it is none.

    Raises:
        OnnxportError: the model cannot be found or exported, or options to export it by were given
            with an artifact.
    """
    from onnxport.exporter.config import CONFIG_FILE
    from onnxport.graphs.artifact import MANIFEST_FILE

    source: str = options.source
    path = Path(source)
    if is_artifact(source):
        if given := [each for each in EXPORT_OPTIONS if getattr(options, each) is not None]:
            flags = ", ".join("--" + each.replace("_", "-") for each in given)
            raise ExportError(
                f"{source} is exported already, so {flags} cannot change it; leave that out, or "
                "give the checkpoint"
            )
        return path
    if path.is_dir() and not (path / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{source} is neither an artifact nor a checkpoint: it has no {MANIFEST_FILE} and no "
            f"{CONFIG_FILE}. Give a folder that `onnxport export` wrote, one of a checkpoint, a "
            "GGUF file, or a hub id."
        )
    changes = {"mtp": True} if _guesses_for_itself(options) else {}
    return cached_artifact(source, export_options(options, **changes))


def _guesses_for_itself(options: argparse.Namespace) -> bool:
    """Whether the model's own layer of multi-token prediction is to guess, which is exported too.

    Raises:
        CapacityError: the speculative config is not valid.
    """
    given = getattr(options, "speculation", None)
    if given is None:
        return False
    config = SpeculationConfig.parse(given)
    return config.method == "mtp" and config.model is None


def is_artifact(source: str) -> bool:
    """Whether `source` is an artifact and not something to export."""
    from onnxport.graphs.artifact import MANIFEST_FILE

    return (Path(source) / MANIFEST_FILE).is_file()


def cached_artifact(source: str, options: ExportOptions) -> Path:
    """Return the artifact of a checkpoint, exporting it unless that was done before.

    The key is the checkpoint (the commit of a hub id; names, sizes and times of a folder's files,
    or of those of a GGUF model), the export options and the version of onnxport.

    Raises:
        OnnxportError: the checkpoint cannot be found or exported.
    """
    from onnxport.exporter.export import settled_options
    from onnxport.exporter.hub import find_checkpoint

    checkpoint = find_checkpoint(source, revision=options.revision, token=options.token)
    options = settled_options(checkpoint, options)
    name = _name(checkpoint, options)
    folder = cache_folder() / name
    with _only_one(folder):
        if not folder.is_dir():
            print(f"{source} is exported first, once, to {folder}", file=sys.stderr)
            export(source, folder, replace(options, revision=checkpoint.revision))
    return folder


def _name(checkpoint: CheckpointFolder, options: ExportOptions) -> str:
    """Return the folder's name: what a person recognizes, and the key."""
    chosen = {k: v for k, v in asdict(options).items() if k not in NO_PART_OF_THE_KEY}
    if (tokenizer := chosen.pop("tokenizer")) is not None:
        chosen["tokenizer"] = _fingerprint(tokenizer)
    key = {
        "onnxport": __version__,
        "name": checkpoint.name,
        "revision": checkpoint.revision or _fingerprint(checkpoint.path),
        "options": chosen,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    readable = re.sub(r"[^\w.-]+", "--", checkpoint.name)
    return f"{readable}-{options.projections}-{digest[:12]}"


def _fingerprint(path: Path) -> list[Any]:
    """Return what changes when a local checkpoint, a folder or a GGUF file, does."""
    from onnxport.exporter.gguf.parts import parts_of

    files = sorted(path.iterdir()) if path.is_dir() else parts_of(path)
    stats = [(each.name, each.stat()) for each in files if each.is_file()]
    return [str(path.resolve()), *([n, s.st_size, s.st_mtime_ns] for n, s in stats)]


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Let one process at a time export to `folder`; the others wait."""
    from filelock import FileLock, Timeout

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.with_name(f".{folder.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            print("another process exports this model; waiting for it", file=sys.stderr)
            lock.acquire()
    except OSError as error:
        raise ExportError(
            f"the cache folder {folder.parent} cannot be used: {error.strerror}. Choose another "
            f"with the environment variable {CACHE_VARIABLE}, or use `onnxport export`."
        ) from error
    try:
        yield
    finally:
        lock.release()
