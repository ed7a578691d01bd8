"""Schemas that say nothing of a type, but something of objects alone, or of lists alone.

To JSON Schema a text fits `{"properties": …}` as an object does. Who writes that means objects, and
llama.cpp and xgrammar, which vLLM takes first, let nothing else be written. What a schema is given
here fits it as before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from onnxport.serving.structured.schema import by_pointer

_KEYWORDS: Mapping[str, frozenset[str]] = {
    "object": frozenset(
        (
            "additionalProperties",
            "maxProperties",
            "minProperties",
            "patternProperties",
            "properties",
            "required",
        )
    ),
    "array": frozenset(("items", "maxItems", "minItems", "prefixItems")),
}
_TOLD = frozenset(("$ref", "allOf", "anyOf", "const", "enum", "type"))
_PART = re.compile(r"(.*)/(allOf|anyOf)/[0-9]+")


def with_types(schema: Any) -> None:
    """Give schemas the type that their keywords speak of, where they have none and that is one.

    Those stay as they are that have more to say of what fits (`const`, `anyOf` and the like), and
    parts of `allOf`, and of `anyOf` beside a type, of which the whole tells the type. So does all
    of a schema with a `oneOf`: what an alternative does not fit any more might fit another alone.

    Args:
        schema: as `check_schema` has let it through; changed.
    """
    schemas = {where: one for where, one in by_pointer(schema) if isinstance(one, dict)}
    if any("oneOf" in one for one in schemas.values()):
        return
    kinds = {
        where: kind
        for where, one in schemas.items()
        if not _TOLD & one.keys() and (kind := _kind(one)) and not _is_part(where, schemas)
    }
    for where, kind in kinds.items():
        schemas[where]["type"] = kind


def _kind(one: Mapping[str, Any]) -> str | None:
    """Return the type that the keywords of a schema speak of; None: none, or both."""
    told = {name for name, it in one.items() if name != "additionalProperties" or not _is_any(it)}
    kinds = [kind for kind, names in _KEYWORDS.items() if names & told]
    return kinds[0] if len(kinds) == 1 else None


def _is_any(schema: Any) -> bool:
    return schema is True or schema == {}


def _is_part(where: str, schemas: Mapping[str, Any]) -> bool:
    """Whether a schema is a part of one that tells of the type, by their JSON pointers."""
    while (part := _PART.fullmatch(where)) is not None:
        where, keyword = part.groups()
        if keyword == "allOf" or "type" in schemas[where]:
            return True
    return False
