"""Imports that fail because they were interrupted, and those that find nothing but a folder."""

from __future__ import annotations

from types import ModuleType


def unless_interrupted(error: BaseException) -> None:
    """Raise the interruption that made an import fail, if that is what did.

    A module of C++ tells whatever is raised while it starts as an ImportError, also what the
    handler of a signal raised: Ctrl-C would pass for a library that is missing, and another
    provider be chosen.
    """
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        if isinstance(found, KeyboardInterrupt | SystemExit):
            raise found
        seen.add(id(found))
        found = found.__cause__ or found.__context__


def unless_left_behind(module: ModuleType) -> None:
    """Raise ImportError where a module is a folder that has no package in it.

    Uninstalling leaves one behind where two wheels shared it, as those of ONNX Runtime do, and
    importing it succeeds.
    """
    if module.__spec__ is not None and module.__spec__.origin is None:
        folders = ", ".join(module.__path__)
        raise ImportError(f"{folders} is no package; remove what an older one left there")
