"""Where `oneOf` says no more than `anyOf`: its alternatives exclude each other.

The compiler sees that of types, and of properties with other texts as their constants, but not with
other numbers, nor of an `enum`, nor where they are referred to. It refuses `oneOf` where it does
not see it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any
from urllib.parse import unquote

from onnxport.serving.structured.pointers import by_pointer, inner_schemas, reference

Schema = Mapping[str, Any]
Values = frozenset[Hashable]
Constants = frozenset[tuple[bool, Any]]  # each behind whether it is true or false
_TYPES: Mapping[type, str] = {
    bool: "boolean",
    float: "number",
    int: "number",
    str: "string",
    type(None): "null",
}
MOST_LOOKED_AT = 200_000  # schemas, names and constants, each time; a tenth of a second


class _TooMuchError(Exception):
    """Whether alternatives are apart is not looked into any further."""


class _Effort:
    """How much may still be looked at."""

    def __init__(self) -> None:
        self._left = MOST_LOOKED_AT

    def spend(self, number: int = 1) -> None:
        """Look at so much more. Raises _TooMuchError."""
        self._left -= number
        if self._left < 0:
            raise _TooMuchError


def let_any_of(schema: Any, *, always: bool = False) -> tuple[str, ...]:
    """Write `anyOf` for each `oneOf` of a checked schema whose alternatives are told apart.

    That is by their types, by constants, their own or those of one property that all objects among
    them require, or by a property that the one requires and the other may not have.

    Beside another `anyOf` it is one of the parts of `allOf`. References go along.

    Args:
        schema: of which this is done; changed.
        always: whether it is done where they are not told apart, too.

    Returns:
        Where they are not, by JSON pointers; nothing unless `always`.
    """
    schemas = dict(by_pointer(schema))
    found = {where: one for where, one in schemas.items() if isinstance(one, dict)}
    effort = _Effort()
    not_apart: list[str] = []
    moved: dict[str, str] = {}  # what each `oneOf` is called now, in its schema
    for where, one in found.items():
        if "oneOf" not in one:
            continue
        try:
            are_apart = _are_apart(one["oneOf"], schemas, effort)
        except _TooMuchError:
            are_apart = False  # the compiler refuses what it does not see itself
        if not are_apart and always:
            not_apart.append(f"{where}/oneOf")
        if are_apart or always:
            moved[f"{where}/oneOf"] = _as_any_of(one)
    for one in found.values() if moved else ():
        if "/oneOf/" in (old := unquote(one.get("$ref", ""))):
            one["$ref"] = reference(_now(old, moved))
    return tuple(not_apart)


def _as_any_of(one: dict[str, Any]) -> str:
    """Write `anyOf` for the `oneOf` of a schema; returns what leads there now."""
    if "anyOf" in one:
        parts = [*one.get("allOf", ()), {"anyOf": one.pop("oneOf")}]
        one["allOf"] = parts
        return f"allOf/{len(parts) - 1}/anyOf"
    items = [("anyOf" if name == "oneOf" else name, it) for name, it in one.items()]
    one.clear()
    one.update(items)
    return "anyOf"


def _now(pointer: str, moved: Mapping[str, str]) -> str:
    """Return what a JSON pointer is called where each `oneOf` in it may have moved."""
    old = ""
    parts: list[str] = []
    for part in pointer.split("/"):
        old = f"{old}/{part}" if parts else part
        parts.append(moved.get(old, part))
    return "/".join(parts)


def led_to(schema: Any) -> Iterator[Any]:
    """Yield the schemas that alternatives of each `oneOf` of a checked schema lead to."""
    schemas = dict(by_pointer(schema))
    pending = [
        f"{where}/oneOf/{index}"
        for where, one in schemas.items()
        if isinstance(one, dict)
        for index in range(len(one.get("oneOf", ())))
    ]
    seen: set[str] = set()
    while pending:
        where = pending.pop()
        if where in seen:
            continue
        seen.add(where)
        yield (one := schemas[where])
        if isinstance(one, dict):
            pending += (place for place, _ in inner_schemas(where, one))
            pending += [unquote(one["$ref"])] if "$ref" in one else []


def _are_apart(alternatives: Sequence[Any], schemas: Schema, effort: _Effort) -> bool:
    """Whether it can be seen that no value fits two of them."""
    parts = [list(_together(one, schemas, effort)) for one in alternatives]
    if _are_disjoint(_constants(part, effort) for part in parts):
        return True
    required = [_required(part, effort) for part in parts]
    for name in next(filter(None, required), ()):
        marks = (
            _marks(part, name if name in names else None, schemas, effort)
            for part, names in zip(parts, required, strict=True)
        )
        if _are_disjoint(marks):
            return True
    seen = [_seen(one, part, effort) for one, part in zip(alternatives, parts, strict=True)]
    return all(_exclude(one, other, effort) for one, other in combinations(seen, 2))


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is seen of the values of an alternative.

    Attributes:
        types: of which they are, integers among numbers; None: not known, here as below.
        constants: what they are.
        required: names that objects have.
        allowed: names that objects may have, no others.
    """

    types: frozenset[str] | None
    constants: Constants | None
    required: frozenset[str]
    allowed: frozenset[str] | None


def _seen(alternative: Any, part: Sequence[Schema], effort: _Effort) -> _Seen:
    """Return what is seen of an alternative, of which a part says all."""
    if alternative is False:
        return _Seen(frozenset(), None, frozenset(), None)
    given = next((one["type"] for one in part if "type" in one), None)
    constants = _constants(part, effort)
    if given is not None:
        told = {given} if isinstance(given, str) else set(given)
    else:
        told = {_TYPES[type(value)] for _, value in constants or ()}
    closed = next((one for one in part if _is_closed(one)), None)
    allowed = None if closed is None else frozenset(closed.get("properties", ()))
    effort.spend(len(allowed or ()))
    return _Seen(
        frozenset(one.replace("integer", "number") for one in told) or None,
        constants,
        frozenset(_required(part, effort)),
        allowed,
    )


def _is_closed(schema: Schema) -> bool:
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _exclude(one: _Seen, other: _Seen, effort: _Effort) -> bool:
    """Whether it can be seen that no value is one of both alternatives'."""
    effort.spend()
    if one.types is not None and other.types is not None:
        if one.types.isdisjoint(other.types):
            return True
        if one.types & other.types == {"object"}:
            for first, second in ((one, other), (other, one)):
                effort.spend(len(first.required))
                if second.allowed is not None and not first.required <= second.allowed:
                    return True
    constants = (one.constants, other.constants)
    return None not in constants and _are_disjoint(constants)


def _are_disjoint(sets: Iterable[Values | None]) -> bool:
    seen: set[Hashable] = set()
    for one in sets:
        if one is None or not seen.isdisjoint(one):
            return False
        seen |= one
    return True


def _together(schema: Any, schemas: Schema, effort: _Effort) -> Iterator[Schema]:
    """Yield schemas that a value of a schema has to fit, all of them."""
    pending, seen = [schema], set()
    while pending:
        one = pending.pop()
        if isinstance(one, dict) and id(one) not in seen:
            seen.add(id(one))
            effort.spend()
            yield one
            pending += one.get("allOf", ())
            if "$ref" in one:
                pending.append(schemas.get(unquote(one["$ref"])))


def _required(part: Sequence[Schema], effort: _Effort) -> set[str]:
    """The names that objects need to have."""
    effort.spend(sum(len(one.get("required", ())) for one in part))
    return {name for one in part for name in one.get("required", ())}


def _marks(
    part: Sequence[Schema], name: str | None, schemas: Schema, effort: _Effort
) -> Values | None:
    """What tells an alternative apart, by the constants of a property if it is an object.

    Args:
        part: what its values fit, all of it.
        name: of the property; None: objects need not have it.
        schemas: all, by their JSON pointers.
        effort: that is left.

    Returns:
        Its types, or the constants; None: neither is known.
    """
    effort.spend(len(part))
    given = next((one["type"] for one in part if "type" in one), ())
    types = {given} if isinstance(given, str) else set(given)
    if types and "object" not in types:
        return frozenset(("type", one.replace("integer", "number")) for one in types)
    if types != {"object"} or name is None:
        return None
    members = [one["properties"][name] for one in part if name in one.get("properties", ())]
    met = [each for member in members for each in _together(member, schemas, effort)]
    return _constants(met, effort)


def _constants(part: Iterable[Schema], effort: _Effort) -> Constants | None:
    """The values that are left; None: there are others than texts, numbers and the like."""
    for one in part:
        values = [one["const"]] if "const" in one else one.get("enum", ())
        effort.spend(len(values))
        if values and not any(isinstance(value, list | dict) for value in values):
            # True is no 1, and 1.0 is.
            return frozenset((isinstance(value, bool), value) for value in values)
    return None
