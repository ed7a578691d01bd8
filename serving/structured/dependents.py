"""Properties that ask for others, said with alternatives: either it is not there, or all are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_ASKING = 4  # properties of one object; the compiler has a rule for each way they may go
_COUNTS = ("minProperties", "maxProperties")  # which it does not keep beside these alternatives


def with_alternatives(one: dict[str, Any]) -> None:
    """Write `dependentRequired`, and `dependencies` of names alone, as parts of `allOf`.

    Args:
        one: a schema; changed, but for what is no schema or would be too much.
    """
    parts = one.get("allOf", [])
    if not isinstance(parts, list) or any(name in one for name in _COUNTS):
        return
    for name in ("dependentRequired", "dependencies"):
        asked = one.get(name)
        if isinstance(asked, dict) and _are_names(asked) and len(asked) <= MOST_ASKING:
            del one[name]
            parts = [*parts, *(_either(key, asked[key]) for key in asked if asked[key])]
    if parts:
        one["allOf"] = parts


def _are_names(asked: Mapping[str, Any]) -> bool:
    return all(
        isinstance(names, list) and all(isinstance(name, str) for name in names)
        for names in asked.values()
    )


def _either(name: str, others: list[str]) -> dict[str, Any]:
    """Return the schema of what has no such property, or has it and others."""
    required = list(dict.fromkeys([name, *others]))
    return {"anyOf": [{"properties": {name: False}}, {"required": required}]}
