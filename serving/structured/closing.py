"""Objects that say nothing of further properties, closed: they have no others than they list.

What is closed fits the schema as before. But where several parts of a schema tell of one object, as
those of `allOf` do, each lists some of its properties alone, and closing one would forbid those of
the others. And what an alternative of `oneOf` no longer fits might fit another one alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from onnxport.serving.structured.meeting import MOST_TRIED, may_fit
from onnxport.serving.structured.pointers import by_pointer, escaped, inner_schemas

_LISTED = ("properties", "patternProperties")
_MEMBERS = (*_LISTED, "additionalProperties", "required", "minProperties", "items", "prefixItems")
_VALUES = ("const", "enum")
SEVERAL = "tells of one object in several places (such as allOf, anyOf or $ref)"
_Graph = Mapping[str, Collection[str]]


def close(schema: Any, *, always: bool) -> None:
    """Close the objects of a checked schema that list properties, and say nothing of others.

    Args:
        schema: as `check_schema` has let it through; changed.
        always: whether one that cannot be closed is refused; otherwise it stays as it is.

    Raises:
        ValueError: says which one cannot be closed, and why.
    """
    schemas = dict(by_pointer(schema))
    openings = {where for where, one in schemas.items() if _is_open(one)}
    if not openings:
        return
    known = {where: where for where in schemas}  # each pointer, which may be long, is held once
    parts = {where: [known[it] for it in parts_of(where, one)] for where, one in schemas.items()}
    inside = {
        where: [*parts[where], *(known[it] for it in _places(where, one))]
        for where, one in schemas.items()
    }
    opening = reached(openings, turned(inside))
    telling = _telling(schemas, parts)
    together = dict(_not_alone({where: schemas[where] for where in opening}, telling))
    together |= dict.fromkeys((opening & telling).intersection(_members(schemas, telling)), SEVERAL)
    alone = dict(_alone({where: schemas[where] for where in openings}))
    if always and (together or alone):
        where, why = min({**together, **alone}.items())
        raise ValueError(
            f"{where} {why}, so additional properties cannot be disabled there; write "
            "additionalProperties where they are to be forbidden or allowed"
        )
    for where in openings - reached(together, inside) - alone.keys():
        schemas[where]["additionalProperties"] = False


def _is_open(one: Any) -> bool:
    return (
        isinstance(one, dict)
        and any(name in one for name in _LISTED)
        and "additionalProperties" not in one
    )


def _alone(schemas: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield those open objects that cannot be closed by themselves, and why not."""
    for where, one in schemas.items():
        listed = one.get("properties", {}).keys()
        # The compiler does not always see that a pattern may have others.
        if further := [name for name in one.get("required", ()) if name not in listed]:
            yield where, f"requires {further[0][:80]!r}, which it does not list"
        elif one.get("minProperties", 0) > len(listed):
            yield where, f"asks for {one['minProperties']} properties, and lists fewer"
        elif any(name in one for name in _VALUES):
            yield where, "lists whole values, too"


def _not_alone(schemas: Mapping[str, Any], telling: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield schemas of which several parts tell of the members of one value, and why not.

    Args:
        schemas: those that have open objects in them.
        telling: those that tell of members, themselves or in parts.
    """
    for where, one in schemas.items():
        if not isinstance(one, dict):
            continue
        if "oneOf" in one:
            yield where, "has oneOf, whose alternatives may exclude each other while they are open"
            continue
        told = int(_tells(one)) + ("$ref" in one and unquote(one["$ref"]) in telling)
        told += sum(
            f"{where}/allOf/{index}" in telling for index in range(len(one.get("allOf", ())))
        )
        told += any(
            f"{where}/anyOf/{index}" in telling for index in range(len(one.get("anyOf", ())))
        )
        if told > 1:
            yield where, SEVERAL


def _members(schemas: Mapping[str, Any], telling: Collection[str]) -> Iterator[str]:
    """Yield the schemas of properties whose names a pattern may fit, too, and those of the pattern.

    Args:
        schemas: all, by their JSON pointers.
        telling: those that tell of members; of others nothing has to be known.
    """
    left = MOST_TRIED
    for where, one in schemas.items():
        if not isinstance(one, dict) or not one.get("properties"):
            continue
        named, patterned = (
            [
                (key, at)
                for key in one.get(name, ())
                if (at := f"{where}/{name}/{escaped(key)}") in telling
            ]
            for name in _LISTED
        )
        left -= len(named) * len(patterned)
        if left < 0:  # each may fit each
            yield from (at for _, at in (*named, *patterned) if named and patterned)
            continue
        for pattern, there in patterned:
            met = [at for name, at in named if may_fit(pattern, name)]
            yield from (there, *met) if met else ()


def _telling(schemas: Mapping[str, Any], parts: _Graph) -> set[str]:
    """Return the schemas that tell of members, themselves or in parts."""
    return reached((where for where, one in schemas.items() if _tells(one)), turned(parts))


def _tells(one: Any) -> bool:
    """Whether a schema itself tells of members."""
    return isinstance(one, dict) and (
        any(name in one for name in _MEMBERS)
        or any(isinstance(each, dict | list) for each in _values(one))
    )


def _values(one: Mapping[str, Any]) -> Iterable[Any]:
    return (*one.get("enum", ()), *([one["const"]] if "const" in one else ()))


def parts_of(where: str, one: Any) -> Iterator[str]:
    """Yield the pointers of the schemas that tell of the same value as the one at a pointer."""
    if not isinstance(one, dict):
        return
    if "$ref" in one:
        yield unquote(one["$ref"])
    for name in ("allOf", "anyOf", "oneOf"):
        yield from (f"{where}/{name}/{index}" for index in range(len(one.get(name, ()))))


def _places(where: str, one: Any) -> Iterator[str]:
    """Yield the schemas directly inside one; not its definitions, which are for others."""
    if isinstance(one, dict):
        for place, _ in inner_schemas(where, one):
            if not place.startswith((f"{where}/$defs/", f"{where}/definitions/")):
                yield place


def turned(graph: _Graph) -> dict[str, list[str]]:
    """Return a graph whose edges go the other way."""
    turned: dict[str, list[str]] = {where: [] for where in graph}
    for where, others in graph.items():
        for other in others:
            turned[other].append(where)
    return turned


def reached(starts: Iterable[str], graph: _Graph) -> set[str]:
    """Return what a graph leads to from some places, and these."""
    reached = set(starts)
    pending = list(reached)
    while pending:
        further = set(graph[pending.pop()]) - reached
        reached |= further
        pending += further
    return reached
