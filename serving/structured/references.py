"""Where the references of a JSON schema lead to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from onnxport.serving.structured.schema import MAX_DEPTH

MOST_STEPS = 3 * (MAX_DEPTH + 1)  # of a reference; what has more leads nowhere


class References:
    """The references of one schema."""

    def __init__(self, root: Any) -> None:
        """Read a schema.

        Args:
            root: as JSON is read, checked or not.
        """
        self._pointers = sorted(_pointers(root))

    def lead_to(self, pointer: str) -> bool:
        """Whether one leads to the place of a JSON pointer, or through it."""
        index = bisect_left(self._pointers, pointer)
        if self._pointers[index : index + 1] == [pointer]:
            return True
        index = bisect_left(self._pointers, f"{pointer}/")
        return any(one.startswith(f"{pointer}/") for one in self._pointers[index : index + 1])


def _pointers(root: Any) -> Iterator[str]:
    """Yield the JSON pointers of references, whatever document they name."""
    pending = [root]
    while pending:
        one = pending.pop()
        if isinstance(one, list):
            pending += one
        if not isinstance(one, dict):
            continue
        pending += one.values()
        if not isinstance(reference := one.get("$ref"), str):
            continue
        _, _, path = unquote(reference).partition("#")
        if path.count("/") <= MOST_STEPS:
            yield f"#{path}"
