"""Imports that fail because they were interrupted, not because something is missing."""

from __future__ import annotations


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
