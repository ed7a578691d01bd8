"""Link the source folders into one importable `onnxport` package, for development and for mypy.

The wheel maps `exporter/ graphs/ providers/ kv/ serving/` into `onnxport.*`. This makes the same
package out of symbolic links, so an edit is seen without reinstalling:

    python scripts/dev_tree.py .dev && PYTHONPATH=.dev python -m onnxport --help
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDERS = ("exporter", "graphs", "providers", "kv", "serving")


def link(target: Path, name: Path) -> None:
    """Make `name` a symbolic link to `target`, replacing an older link."""
    if name.is_symlink():
        name.unlink()
    name.symlink_to(target)


def main(destination: str) -> None:
    """Build the link tree under `destination`."""
    root = Path(__file__).resolve().parents[1]
    package = Path(destination).resolve() / "onnxport"
    package.mkdir(parents=True, exist_ok=True)
    for old in package.iterdir():
        if old.is_symlink():
            old.unlink()
    for source in (root / "src" / "onnxport").iterdir():
        if source.name != "__pycache__":
            link(source, package / source.name)
    for folder in FOLDERS:
        link(root / folder, package / folder)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".dev")
