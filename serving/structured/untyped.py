"""Schemas that say nothing of a type, but something of objects alone, or of lists alone.

To JSON Schema a text fits `{"properties": …}` as an object does. Who writes that means objects, and
llama.cpp and xgrammar, which vLLM takes first, let nothing else be written. What a schema is given
here fits it as before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxport.serving.structured.closing import parts_of, reached, turned
from onnxport.serving.structured.pointers import by_pointer

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
_WHOLE_VALUES = frozenset(("const", "enum"))
_TOLD = frozenset(("$ref", "anyOf")) | _WHOLE_VALUES
_Parts = Mapping[str, Sequence[str]]


def with_types(schema: Any) -> None:
    """Give schemas the type that their keywords speak of, where they have none and that is one.

    Of a schema with `allOf` the keywords of its parts are taken for its own. Those stay as they are
    that have more to say of what fits (`const`, `anyOf` and the like), and parts of `allOf`, and of
    `anyOf` beside a type, of which the whole tells the type; so does what `$ref` refers to where
    the type beside it is another one, such as a list with "null". And all of a schema with a
    `oneOf`: what an alternative does not fit any more might fit another alone.

    Args:
        schema: as `check_schema` has let it through; changed.
    """
    schemas = {where: one for where, one in by_pointer(schema) if isinstance(one, dict)}
    if any("oneOf" in one for one in schemas.values()):
        return
    kinds = {where: found for where, one in schemas.items() if (found := _kinds(one))}
    if not kinds:
        return
    known = {where: where for where in schemas}  # each pointer, which may be long, is held once
    parts = {
        where: [known[part] for part in parts_of(where, one) if part in known]
        for where, one in schemas.items()
    }
    of_all = _within(parts, "allOf")
    typed = reached((where for where, one in schemas.items() if "type" in one), turned(of_all))
    for kind in _KEYWORDS:
        speaking = reached((where for where, its in kinds.items() if kind in its), turned(of_all))
        if not speaking:
            continue
        others = (where for where, one in schemas.items() if _is_of_another(one, kind))
        excluded = reached(others, turned(parts)) | _told(schemas, parts, of_all, kind)
        for where in speaking - excluded - typed:
            if not _TOLD & schemas[where].keys():
                schemas[where]["type"] = kind


def _kinds(one: Mapping[str, Any]) -> list[str]:
    """Return the types that the keywords of a schema speak of."""
    told = {name for name, it in one.items() if name != "additionalProperties" or not _is_any(it)}
    return [kind for kind, names in _KEYWORDS.items() if names & told]


def _is_of_another(one: Mapping[str, Any], kind: str) -> bool:
    """Whether a schema speaks of values that are not of a type."""
    return (
        bool(_WHOLE_VALUES & one.keys())
        or one.get("type", kind) not in (kind, [kind])
        or any(each != kind for each in _kinds(one))
    )


def _within(parts: _Parts, *keywords: str) -> dict[str, list[str]]:
    """Return those parts of each schema that stand in it, under some keywords."""
    return {
        where: [it for it in its if it.startswith(tuple(f"{where}/{name}/" for name in keywords))]
        for where, its in parts.items()
    }


def _told(schemas: Mapping[str, Any], parts: _Parts, of_all: _Parts, kind: str) -> set[str]:
    """Return the schemas of which a whole tells the type, by their JSON pointers.

    Args:
        schemas: all.
        parts: of each; what it refers to is one.
        of_all: likewise, parts of `allOf` alone.
        kind: the type that they would have. Where the whole has no other it does not matter to what
            is referred to, which may be alone elsewhere.
    """
    within = _within(parts, "allOf", "anyOf")
    typed = {where for where, one in schemas.items() if "type" in one}
    others = {where for where in typed if schemas[where]["type"] not in (kind, [kind])}
    others = reached(others, turned(of_all))  # a part of allOf may tell the type of the whole
    standing = (it for where in schemas for it in (within if where in typed else of_all)[where])
    return reached(standing, within) | reached((it for one in others for it in parts[one]), parts)


def _is_any(schema: Any) -> bool:
    return schema is True or schema == {}
