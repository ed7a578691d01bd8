"""Objects that say nothing of further properties, closed: they have no others than they list.

What is closed fits the schema as before. But where several parts of a schema tell of one object, as
those of `allOf` do, each lists some of its properties alone, and closing one would forbid those of
the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from onnxport.serving.structured.schema import inner_schemas

_LISTED = ("properties", "patternProperties")
_MEMBERS = (*_LISTED, "additionalProperties", "required", "minProperties", "items", "prefixItems")
_VALUES = ("const", "enum")
_AMONG = ("anyOf", "oneOf")
_Graph = Mapping[str, Collection[str]]


def close(schema: Any, *, always: bool) -> None:
    """Close the objects of a checked schema that list properties, and say nothing of others.

    Args:
        schema: as `check_schema` has let it through; changed.
        always: whether one that cannot be closed is refused; otherwise it stays as it is.

    Raises:
        ValueError: says which one cannot be closed, and why.
    """
    schemas = dict(_all(schema))
    openings = {where for where, one in schemas.items() if _is_open(one)}
    if not openings:
        return
    parts = {where: set(_parts(where, one)) for where, one in schemas.items()}
    inside = {where: parts[where] | set(_places(where, one)) for where, one in schemas.items()}
    opening = _reached(openings, _turned(inside))
    together = dict(
        _not_alone({where: schemas[where] for where in opening}, _telling(schemas, parts))
    )
    alone = {where: why for where in openings if (why := _why_not(schemas[where]))}
    if always and (together or alone):
        where, why = min({**together, **alone}.items())
        raise ValueError(
            f"{where} {why}, so additional properties cannot be disabled there; write "
            "additionalProperties where they are to be forbidden or allowed"
        )
    for where in openings - _reached(together, inside) - alone.keys():
        schemas[where]["additionalProperties"] = False


def _all(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield all schemas inside one, and itself, by their JSON pointers."""
    pending = [("#", schema)]
    while pending:
        where, one = pending.pop()
        yield where, one
        if isinstance(one, dict):
            pending += inner_schemas(where, one)


def _is_open(one: Any) -> bool:
    return (
        isinstance(one, dict)
        and any(name in one for name in _LISTED)
        and "additionalProperties" not in one
    )


def _why_not(one: Mapping[str, Any]) -> str | None:
    """Return why an object cannot be closed by itself; None: it can."""
    if one.get("patternProperties"):
        return None
    listed = one.get("properties", {}).keys()
    if further := [name for name in one.get("required", ()) if name not in listed]:
        return f"requires {further[0][:80]!r}, which it does not list"
    if one.get("minProperties", 0) > len(listed):
        return f"asks for {one['minProperties']} properties, and lists fewer"
    if any(name in one for name in _VALUES):
        return "lists whole values, too"
    return None


def _not_alone(schemas: Mapping[str, Any], telling: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield schemas of which several parts tell of the members of one value, and why not.

    Args:
        schemas: those that have open objects in them.
        telling: those that tell of members, themselves or in parts.
    """
    for where, one in schemas.items():
        if not isinstance(one, dict):
            continue
        sources = [[unquote(one["$ref"])]] if "$ref" in one else []
        sources += [[f"{where}/allOf/{index}"] for index in range(len(one.get("allOf", ())))]
        sources += [
            [f"{where}/{name}/{index}" for index in range(len(one[name]))]
            for name in _AMONG
            if name in one
        ]
        told = sum(any(part in telling for part in source) for source in sources)
        if told + _tells(one) > 1:
            yield where, "tells of one object in several places (such as allOf, anyOf or $ref)"


def _telling(schemas: Mapping[str, Any], parts: _Graph) -> set[str]:
    """Return the schemas that tell of members, themselves or in parts."""
    return _reached((where for where, one in schemas.items() if _tells(one)), _turned(parts))


def _tells(one: Any) -> bool:
    """Whether a schema itself tells of members."""
    return isinstance(one, dict) and (
        any(name in one for name in _MEMBERS)
        or any(isinstance(each, dict | list) for each in _values(one))
    )


def _values(one: Mapping[str, Any]) -> Iterable[Any]:
    return (*one.get("enum", ()), *([one["const"]] if "const" in one else ()))


def _parts(where: str, one: Any) -> Iterator[str]:
    """Yield the schemas that tell of the same value."""
    if not isinstance(one, dict):
        return
    if "$ref" in one:
        yield unquote(one["$ref"])
    for name in ("allOf", *_AMONG):
        yield from (f"{where}/{name}/{index}" for index in range(len(one.get(name, ()))))


def _places(where: str, one: Any) -> Iterator[str]:
    """Yield the schemas directly inside one; not its definitions, which are for others."""
    if isinstance(one, dict):
        for place, _ in inner_schemas(where, one):
            if not place.startswith((f"{where}/$defs/", f"{where}/definitions/")):
                yield place


def _turned(graph: _Graph) -> dict[str, list[str]]:
    """Return a graph whose edges go the other way."""
    turned: dict[str, list[str]] = {where: [] for where in graph}
    for where, others in graph.items():
        for other in others:
            turned[other].append(where)
    return turned


def _reached(starts: Iterable[str], graph: _Graph) -> set[str]:
    """Return what a graph leads to from some places, and these."""
    reached = set(starts)
    pending = list(reached)
    while pending:
        further = set(graph[pending.pop()]) - reached
        reached |= further
        pending += further
    return reached
