"""Schemas inside a schema, by their JSON pointers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote

ONE_SCHEMA = ("additionalProperties", "items")
SCHEMA_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
SCHEMA_MAPS = ("$defs", "definitions", "patternProperties", "properties")


def by_pointer(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield all schemas inside a checked one, and itself, by their JSON pointers."""
    pending = [("#", schema)]
    while pending:
        where, one = pending.pop()
        yield where, one
        if isinstance(one, dict):
            pending += inner_schemas(where, one)


def reference(pointer: str) -> str:
    """Return the `$ref` to the schema at a JSON pointer."""
    return f"#{quote(pointer.removeprefix('#'), safe='/~')}"


def inner_schemas(where: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the schemas directly inside a schema, and the JSON pointer of each.

    Raises:
        ValueError: there is something else where schemas should be.
    """
    for name in ONE_SCHEMA:
        if name in schema:
            if isinstance(schema[name], list):
                raise ValueError(f"{where}/{name} is a list; write prefixItems instead")
            yield f"{where}/{name}", schema[name]
    for name in SCHEMA_LISTS:
        if name in schema:
            if not isinstance(schema[name], list) or not schema[name]:
                raise ValueError(f"{where}/{name} must be a list of schemas, not empty")
            yield from ((f"{where}/{name}/{index}", one) for index, one in enumerate(schema[name]))
    for name in SCHEMA_MAPS:
        if name in schema:
            if not isinstance(schema[name], dict):
                raise ValueError(f"{where}/{name} must be an object of schemas")
            for key, one in schema[name].items():
                yield f"{where}/{name}/{escaped(key)}", one


def escaped(name: str) -> str:
    """Return a name as it stands in a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
