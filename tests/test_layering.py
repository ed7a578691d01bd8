"""Imports point down, and only through the package's own name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "onnxport"
LEAF = {"cache_rows", "errors", "version"}
MAY_IMPORT: dict[str, set[str]] = {
    "kv": LEAF,
    "graphs": LEAF,
    "exporter": LEAF | {"graphs"},
    "providers": LEAF | {"graphs", "kv"},
    "serving": LEAF | {"graphs", "kv", "providers"},
}
# Third parties that a folder must never load, not even lazily.
BANNED: dict[str, set[str]] = {
    "kv": {"numpy", "onnx", "onnxruntime", "torch", "transformers"},
    "graphs": {"onnxruntime", "torch", "transformers"},
    "exporter": {"onnxruntime", "torch", "transformers"},
    "providers": {"torch", "transformers", "fastapi"},
    "serving": {"onnxruntime", "onnx", "torch", "transformers"},
}


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield every imported module, `from a import b` as `a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def violations(source: str, folder: str) -> list[str]:
    """What `source`, a file of `folder`, imports though it must not."""
    found = []
    for name in imported(ast.parse(source)):
        head, _, rest = name.partition(".")
        part = rest.partition(".")[0]
        if (
            head in MAY_IMPORT
            or head in BANNED[folder]
            or (head == PACKAGE and part != folder and part not in MAY_IMPORT[folder])
        ):
            found.append(name)
    return found


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_down(folder: str) -> None:
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    found = {str(path): names for path in paths if (names := violations(path.read_text(), folder))}
    assert not found


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("kv", "import numpy as np"),
        ("kv", "from onnxport.graphs import contract"),
        ("graphs", "from onnxport import providers"),
        ("exporter", "import onnxport.serving.llm"),
        ("serving", "def f():\n    from onnxport.exporter.export import export_model"),
        ("providers", "import kv"),
    ],
)
def test_the_check_catches_each_kind(folder: str, source: str) -> None:
    assert violations(source, folder)


def test_the_leaf_names_no_folder_at_import_time() -> None:
    for path in (ROOT / "src" / PACKAGE).glob("*.py"):
        tree = ast.parse(path.read_text())
        top = ast.Module([n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)], [])
        parts = {name.split(".")[1] for name in imported(top) if name.startswith(f"{PACKAGE}.")}
        assert not parts & set(MAY_IMPORT), path
