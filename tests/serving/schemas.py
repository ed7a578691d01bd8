"""Random JSON schemas of all supported keywords."""

from __future__ import annotations

import random
from typing import Any

from onnxport.serving.structured.schema import FORMATS

PATTERNS = ("^[a-z]{2,5}$", "b", r"^\d+-\d$", "^(yes|no)", r"[A-F]\.$", "^.{3}$", "^[^x]*$")
NAMES = ("a", "b", "name", "x y", 'quo"te', "new\nline", "é", "a/b~c", "")
DEFS = 2


class Schemas:
    """Makes schemas, some of which nothing fits."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._place = self._rng.choice(["$defs", "$defs", "definitions"])

    def schema(self) -> dict[str, Any]:
        """Return a whole schema, with definitions where it refers to any."""
        schema = self._any(3)
        if f"#/{self._place}/" in repr(schema):
            # Each may refer to itself where it may be left out.
            schema[self._place] = {f"d{index}": self._definition(index) for index in range(DEFS)}
        return schema

    def _definition(self, index: int) -> dict[str, Any]:
        this = {"$ref": f"#/{self._place}/d{index}"}
        inner = self._value()
        if self._rng.random() < 0.5:
            return {
                "type": "object",
                "properties": {"value": inner, "next": this},
                "required": ["value"],
                "additionalProperties": False,
            }
        return {"anyOf": [inner, {"type": "array", "items": this, "maxItems": 2}]}

    def _any(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        if depth == 0 or rng.random() < 0.3:
            return self._value()
        kinds = (
            self._object,
            self._object,
            self._array,
            self._array,
            self._any_of,
            self._all_of,
            self._one_of,
            self._reference,
            self._nullable,
            self._free,
        )
        return rng.choice(kinds)(depth - 1)

    def _value(self) -> dict[str, Any]:
        kinds = (
            self._string,
            self._string,
            self._number,
            self._integer,
            self._enum,
            lambda: {"type": "boolean"},
            lambda: {"type": "null"},
            lambda: {"const": self._rng.choice(["a", 3, -2.5, None, True, [1, "x"], {"k": 1}])},
        )
        return self._rng.choice(kinds)()

    def _string(self) -> dict[str, Any]:
        rng = self._rng
        kind = rng.randrange(3)
        if kind == 0:
            return {"type": "string", "format": rng.choice(FORMATS)}
        if kind == 1:
            return {"type": "string", "pattern": rng.choice(PATTERNS)}
        schema: dict[str, Any] = {"type": "string"}
        least = rng.randrange(4)
        if rng.random() < 0.6:
            schema["minLength"] = least
        if rng.random() < 0.6:
            schema["maxLength"] = least + rng.randrange(6)
        if rng.random() < 0.2:
            schema["pattern"] = "^[a-zé]*$"
        return schema

    def _bounds(self, low: float, high: float) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {}
        if rng.random() < 0.6:
            schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if rng.random() < 0.6:
            schema[rng.choice(["maximum", "exclusiveMaximum"])] = high
        return schema

    def _integer(self) -> dict[str, Any]:
        rng = self._rng
        low = rng.randrange(-120, 120)
        schema = {"type": "integer", **self._bounds(low, low + rng.randrange(30, 200))}
        if rng.random() < 0.3:
            schema["multipleOf"] = rng.choice([1, 2, 3, 7, 10, 1.5])
        return schema

    def _number(self) -> dict[str, Any]:
        rng = self._rng
        low = round(rng.uniform(-20, 20), rng.randrange(4))
        high = round(low + rng.uniform(1, 9), rng.randrange(1, 4))
        schema = {"type": "number", **self._bounds(low, high)}
        if rng.random() < 0.3:
            schema["multipleOf"] = rng.choice([0.5, 0.1, 0.01, 0.3, 1, 2])
        return schema

    def _enum(self) -> dict[str, Any]:
        values = ["red", "green", 'q"', "é", 1, -7, 2.5, True, None, [], [1, [2]], {"a": {"b": 1}}]
        return {"enum": self._rng.sample(values, self._rng.randrange(1, 5))}

    def _object(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(NAMES, rng.randrange(4))
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {name: self._any(depth) for name in names},
            "required": [name for name in names if rng.random() < 0.5],
        }
        kind = rng.randrange(5)
        if kind < 2:
            schema["additionalProperties"] = False
        elif kind == 2:
            schema["additionalProperties"] = self._any(0)
        elif kind == 3:
            schema["patternProperties"] = {"^p_[a-z]$": self._any(0), "^[0-9]{2}$": self._any(0)}
            schema["additionalProperties"] = rng.choice([False, {"type": "null"}])
        if rng.random() < 0.2:  # which go with properties that are all required
            schema["required"] = names
            schema["maxProperties"] = len(names) + rng.randrange(3)
            if rng.random() < 0.5:
                schema["minProperties"] = rng.randrange(max(1, len(names)) + 1)
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        schema: dict[str, Any] = {"type": "array"}
        if rng.random() < 0.4:
            schema["prefixItems"] = [self._any(depth) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.8:
            schema["items"] = False if rng.random() < 0.1 else self._any(depth)
        least = rng.randrange(3)
        if rng.random() < 0.5:
            schema["minItems"] = least
        if rng.random() < 0.7:
            schema["maxItems"] = least + rng.randrange(3)
        return schema

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._any(depth) for _ in range(self._rng.randrange(1, 4))]}

    def _one_of(self, depth: int) -> dict[str, Any]:
        """Return alternatives of which a tag tells which one it is."""
        kinds = [
            {
                "type": "object",
                "properties": {"kind": {"const": name}, "value": self._any(depth)},
                "required": ["kind", "value"],
                "additionalProperties": False,
            }
            for name in self._rng.choice([("one", "two"), (1, 2)])
        ]
        if self._rng.random() < 0.5:
            return {"oneOf": [{"type": "string"}, {"type": "integer"}]}
        return {"oneOf": kinds, "discriminator": {"propertyName": "kind"}}

    def _all_of(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.4:
            low = rng.randrange(10)
            return {"allOf": [{"type": "integer", "minimum": low}, {"maximum": low + 20}]}
        first, second = self._object(depth), self._object(depth)
        for each in (first, second):
            for name in ("additionalProperties", "patternProperties"):
                each.pop(name, None)  # of which one could forbid what the other requires
            for name in ("minProperties", "maxProperties"):
                each.pop(name, None)  # which need that all properties are required
        return {"allOf": [first, second]}

    def _reference(self, depth: int) -> dict[str, Any]:
        return {"$ref": f"#/{self._place}/d{self._rng.randrange(DEFS)}"}

    def _nullable(self, depth: int) -> dict[str, Any]:
        schema = self._integer()
        return {**schema, "type": ["integer", "null"]}

    def _free(self, depth: int) -> dict[str, Any]:
        """Return keywords without a type, which say something of some types alone."""
        options: list[dict[str, Any]] = [
            {},
            {"minLength": 2},
            {"minimum": 3, "maxItems": 1},
            {"format": "date"},
            {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"items": {"type": "null"}},
            {"type": ["string", "array"], "maxLength": 3, "maxItems": 2, "items": {}},
        ]
        return self._rng.choice(options)
