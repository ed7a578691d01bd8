"""The files of a GGUF model, by their names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

SUFFIX: Final = ".gguf"

_PART: Final = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file."""
    return path.suffix.lower() == SUFFIX and path.is_file()


def parts_of(path: Path) -> list[Path]:
    """All files of the model that a file belongs to, in order; of most it is the only one."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    prefix, _, count = match.groups()
    numbers = range(1, int(count) + 1)
    return [path.with_name(f"{prefix}-{number:05d}-of-{count}{SUFFIX}") for number in numbers]
