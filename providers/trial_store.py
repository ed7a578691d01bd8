"""What trials measured, kept in a folder: one JSON file for a machine, an artifact and options."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Final

from onnxport.providers import memory
from onnxport.providers.base import LoadOptions, Probe
from onnxport.providers.trial import PROMPT_TOKENS, ROWS, Figures
from onnxport.version import __version__

logger = logging.getLogger(__name__)

FORMAT: Final = 1  # of the files and of the trial; another one is measured anew
PATIENCE_S: Final = 600.0  # for the trials of other processes
LARGEST_BLOCK: Final = 256  # tokens
# A pool of this many tokens, or a longest sequence, changes nothing about a trial.
ENOUGH_TOKENS: Final = max(PROMPT_TOKENS, ROWS * LARGEST_BLOCK)


def trial_key(
    fingerprint: str, options: LoadOptions, probes: Mapping[str, Probe]
) -> dict[str, Any]:
    """Everything that a trial's outcome depends on, in JSON types.

    Args:
        fingerprint: of the artifact.
        options: with which it is loaded.
        probes: of the providers that are compared, by name.
    """
    limited = replace(
        options,
        kv_cache_tokens=_relevant(options.kv_cache_tokens),
        max_model_len=_relevant(options.max_model_len),
        graph_cache=None,
    )
    key = {
        "format": FORMAT,
        "onnxport": __version__,
        "artifact": fingerprint,
        "options": asdict(limited),
        "machine": {
            "processor": platform.machine(),
            "cores": memory.physical_cores(),
            "memory_bytes": memory.total_bytes(),
        },
        "providers": {
            name: {
                "versions": dict(probe.versions),
                "devices": [asdict(device) for device in probe.devices],
            }
            for name, probe in probes.items()
        },
    }
    plain: dict[str, Any] = json.loads(json.dumps(key))
    return plain


def _relevant(tokens: int | None) -> int | None:
    """A limit that leaves less than a trial takes."""
    return None if tokens is None or tokens >= ENOUGH_TOKENS else tokens


class TrialStore:
    """The figures of one key. Files that are damaged, or of something else, hold nothing."""

    def __init__(self, folder: Path, key: Mapping[str, Any]) -> None:
        """Name the file; nothing is read or written.

        Args:
            folder: of all trials; it need not exist.
            key: what `trial_key` returned.
        """
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self._key = key
        self._folder = folder
        self.path = folder / f"{str(key['artifact'])[:12]}-{digest[:12]}.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from measuring, for they would disturb each other.

        A folder that cannot be used is a warning, and so is one that stays locked.
        """
        from filelock import FileLock

        lock = FileLock(self._folder / ".lock")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=PATIENCE_S)
        except OSError as error:  # filelock's Timeout is one
            logger.warning("%s cannot be locked for a trial of providers: %s", self._folder, error)
        try:
            yield
        finally:
            lock.release()

    def read(self) -> dict[str, Figures]:
        """The figures of each provider that has some."""
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            logger.info("the trial in %s is measured anew: %s", self.path, error)
            return {}
        if not isinstance(content, dict) or content.get("key") != self._key:
            logger.info("the trial in %s is measured anew: it is of something else", self.path)
            return {}
        found = content.get("figures")
        return {
            name: figures
            for name, value in (found.items() if isinstance(found, dict) else ())
            if name in self._key["providers"] and (figures := _figures(value)) is not None
        }

    def write(self, figures: Mapping[str, Figures]) -> None:
        """Replace the file in one step. A folder that cannot be written to is a warning."""
        plain = {"key": self._key, "figures": {k: asdict(value) for k, value in figures.items()}}
        new = self.path.with_suffix(f".{os.getpid()}.new")
        try:
            new.write_text(json.dumps(plain, indent=2), encoding="utf-8")
            new.replace(self.path)
        except OSError as error:
            logger.warning("the trial of providers is not kept in %s: %s", self._folder, error)


def _figures(value: object) -> Figures | None:
    """Figures as they were stored; None for anything else."""
    if not isinstance(value, dict) or value.keys() != {each.name for each in fields(Figures)}:
        return None
    decode_s, *others = (value[each.name] for each in fields(Figures))
    if not _is_time(decode_s) or not all(time is None or _is_time(time) for time in others):
        return None
    return Figures(decode_s, *others)


def _is_time(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0
