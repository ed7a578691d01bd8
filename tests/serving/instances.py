"""Random values that fit a JSON schema of `schemas.py`, in the spelling that grammars have."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any

from jsonschema import Draft202012Validator

from .format_checks import format_checker

TEXTS = (
    *("", "a", "ab", "abc", "abcd", "b", "xyz", "é", "éé", "aéz", "xx yy", 'q"q', "back\\slash"),
    *(
        "tab\t",
        "12-3",
        "7-7",
        "yes",
        "no",
        "yes!",
        "wA.x",
        "1",
        "hello",
        "<&>",
        "🙂",
        "日本",
        "red",
    ),
    *("2024-02-29", "12:30:05Z", "2024-02-29T12:30:05Z", "P1D", "a@b.de", "host.example"),
    *("127.0.0.1", "::1", "550e8400-e29b-41d4-a716-446655440000", "https://a.example/b?c=1"),
)
NUMBERS = (0, 1, -1, 2, 3, 7, 10, 21, 100, -100, 0.5, -2.5, 3.25, 0.1, 0.3, 12.75)
OTHERS = (None, True, 1, "a", [], {}, [1, "x"], {"k": None})
KEYS = ("p_a", "p_z", "42", "other", "z")
TRIES = 30
DEEP = 5


class Instances:
    """Guesses values from a schema, and keeps those that another implementation allows."""

    def __init__(self, schema: Mapping[str, Any], seed: int) -> None:
        self._whole = schema
        self._rng = random.Random(seed)
        self._is_valid = _validator(schema).is_valid

    def some(self, most: int) -> Iterator[Any]:
        """Yield up to so many, not always different ones."""
        for _ in range(TRIES):
            value = self._any(self._whole, 0)
            if most and self._is_valid(value):
                most -= 1
                yield value

    def _any(self, schema: Any, depth: int) -> Any:
        rng = self._rng
        if not isinstance(schema, Mapping) or not schema or depth > DEEP + 3:
            return rng.choice(OTHERS)
        if "$ref" in schema:
            _, place, name = schema["$ref"].split("/")
            return self._any(self._whole[place][name], depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        if "allOf" in schema:
            return self._any(_merged(schema["allOf"]), depth + 1)
        if parts := schema.get("anyOf", schema.get("oneOf")):
            return self._any(rng.choice(parts), depth + 1)
        kinds = schema.get("type", ["string", "integer", "object", "array", "null"])
        match rng.choice(kinds) if isinstance(kinds, list) else kinds:
            case "null":
                return None
            case "boolean":
                return rng.random() < 0.5
            case "string":
                fitting = [one for one in TEXTS if _validator(schema).is_valid(one)]
                return rng.choice(fitting or TEXTS)
            case "array":
                return self._array(schema, depth + 1)
            case "object":
                return self._object(schema, depth + 1)
            case kind:
                return self._number(schema, is_integer=kind == "integer")

    def _number(self, schema: Mapping[str, Any], *, is_integer: bool) -> int | float:
        rng = self._rng
        low = schema.get("minimum", schema.get("exclusiveMinimum", -50))
        high = max(low, schema.get("maximum", schema.get("exclusiveMaximum", low + 60)))
        step = schema.get("multipleOf")
        value: float = rng.choice([low, high, *NUMBERS]) if rng.random() < 0.3 else 0.0
        value = value or rng.uniform(low, high)
        value = round(value // step * step, 4) if step else round(value, rng.randrange(4))
        return int(value) if is_integer or value == int(value) else value  # never -0.0, nor 2.0

    def _array(self, schema: Mapping[str, Any], depth: int) -> list[Any]:
        prefix, items = schema.get("prefixItems", []), schema.get("items", {})
        least = schema.get("minItems", 0)
        number = self._rng.randint(least, max(least, min(schema.get("maxItems", 9), least + 3)))
        if items is False:
            number = min(number, len(prefix))
        each = [prefix[index] if index < len(prefix) else items for index in range(number)]
        return [self._any(one, depth) for one in each]

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        rng, properties = self._rng, schema.get("properties", {})
        required = schema.get("required", [])
        found = {
            name: self._any(inner, depth)
            for name, inner in properties.items()
            if name in required or (depth < DEEP and rng.random() < 0.5)
        }
        more = [name for name in rng.sample(KEYS, 2) if name not in properties]
        for name in more if rng.random() < 0.4 else ():
            inner = schema.get("additionalProperties", {})
            for pattern, one in schema.get("patternProperties", {}).items():
                inner = one if pattern.startswith(f"^{name[:2]}") else inner
            if inner is not False:
                found[name] = self._any(inner, depth)
        return found


def _validator(schema: Mapping[str, Any]) -> Draft202012Validator:
    checker = format_checker(Draft202012Validator.FORMAT_CHECKER)
    return Draft202012Validator(schema, format_checker=checker)


def _merged(parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what parts say together; of a property that two tell of, either."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if name == "properties":
                own = merged.setdefault(name, {})
                own |= {
                    key: {"allOf": [own[key], one]} if key in own else one
                    for key, one in value.items()
                }
            elif name == "required":
                merged[name] = [*merged.get(name, ()), *value]
            else:
                merged[name] = value
    return merged
