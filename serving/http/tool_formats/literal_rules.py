"""Grammars of arguments that are values in a language of their own; see `Literals`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from onnxport.serving.http.tool_formats.base import Literals
from onnxport.serving.structured.schema import ANNOTATIONS, ROOT_ONLY
from onnxport.serving.structured.spec import compact

Schema = Mapping[str, Any]
_BARE: Final = re.compile(r"[A-Za-z0-9_.$-]+")  # a name that needs no marks
_DEFINED: Final = ("$defs", "definitions")
_SAID: Final = {*ANNOTATIONS, *ROOT_ONLY, *_DEFINED}  # what asks nothing of a value
_NUMBERS: Final = (
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
)
_WORDS: Final = {"boolean": ("true", "false"), "null": ("null", "None")}


class NotSaidError(Exception):
    """A schema asks for more than values of the language can say."""


class LiteralRules:
    """Writes the rules of values that a schema allows.

    Objects have their members in the order of their names, which is the one of chat templates.
    """

    def __init__(
        self,
        literals: Literals,
        prefix: str,
        root: Schema,
        spelled: Callable[[str], str],
        text: Callable[[str, str], list[str]],
    ) -> None:
        """Write nothing yet.

        Args:
            literals: the language.
            prefix: of the names of rules.
            root: the schema that others may refer to.
            spelled: returns a text of the format as a grammar has it.
            text: returns the rule of a name for any text up to and with a text of the format.
        """
        self.rules: list[str] = []
        self._literals = literals
        self._prefix = prefix
        self._root = root
        self._spelled = spelled
        self._text = text
        self._referred: dict[str, str] = {}  # what a schema refers to -> its rule
        self._any = ""  # the rule of any value

    def value(self, schema: Any, name: str | None = None) -> str:
        """Write the rule of a value; returns its name.

        Raises:
            NotSaidError: the schema asks for more than can be said.
        """
        if schema is True or (isinstance(schema, Mapping) and not schema.keys() - _SAID):
            return self._any_value(name)
        name = name or self._name()
        self.rules.append(f"{name}: {' | '.join(self._ways(schema))}")
        return name

    def _name(self) -> str:
        self.rules.append("")  # keeps the number
        return f"{self._prefix}_{len(self.rules)}"

    def _ways(self, schema: Any) -> list[str]:
        """Return the ways to write a value."""
        if not isinstance(schema, Mapping):
            raise NotSaidError
        asked = schema.keys() - _SAID
        if asked == {"$ref"}:
            return [self._reference(schema["$ref"])]
        if asked in ({"anyOf"}, {"oneOf"}):
            return [self.value(each) for each in schema[next(iter(asked))]]
        if asked == {"allOf"} and len(schema["allOf"]) == 1:
            return [self.value(schema["allOf"][0])]
        if asked <= {"type", "enum", "const"} and asked != {"type"}:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            if {"enum", "const"} <= asked or not values:
                raise NotSaidError
            return [self._constant(each) for each in values]
        types = schema.get("type")
        if types is None:
            raise NotSaidError
        named = types if isinstance(types, list) else [types]
        return [way for each in named for way in self._of_type(each, schema, asked, named)]

    def _of_type(
        self, kind: str, schema: Schema, asked: set[str], named: Sequence[str]
    ) -> list[str]:
        """Return the ways to write a value of a type, of which a schema may name several."""
        allowed = {
            "array": {"items", "minItems", "maxItems"},
            "object": {"properties", "required", "additionalProperties"},
            **{each: set(_NUMBERS) for each in ("integer", "number")},
        }
        others = set().union(*(allowed.get(each, set()) for each in named))
        if asked - {"type"} - others:
            raise NotSaidError
        if kind == "string":
            return [self._any_text()]
        if kind == "array":
            return [self._array(schema), *self._held(schema, kind)]
        if kind == "object":
            return [self.members(schema), *self._held(schema, kind)]
        if kind in _WORDS:
            bare = " | ".join(f'"{word}"' for word in _WORDS[kind])
        elif kind in ("integer", "number"):
            bounds = {key: schema[key] for key in _NUMBERS if key in schema}
            bare = f"%json {compact({'type': kind, **bounds})}"
        else:
            raise NotSaidError
        name = self._name()
        self.rules.append(f"{name}: {bare}")
        return [name, *self._quoted(name)]

    def _held(self, schema: Schema, kind: str) -> list[str]:
        """Return the ways to write a list or an object between quotes."""
        if not self._literals.holds_any:
            return []
        defined = {key: self._root[key] for key in _DEFINED if key in self._root}
        name = self._name()
        self.rules.append(f"{name}: %json {compact({**defined, **schema, 'type': kind})}")
        return self._quoted(name)

    def _quoted(self, rule: str) -> list[str]:
        if not self._literals.holds_any:
            return []
        quote = self._spelled(self._literals.quote)
        return [f"{quote} {rule} {quote}"]

    def _any_text(self) -> str:
        """Write the rules of any text between quotes; returns the name of the last one."""
        name, text = self._name(), self._name()
        self.rules += self._text(text, self._literals.quote)
        self.rules.append(f"{name}: {self._spelled(self._literals.quote)} {text}")
        return name

    def _constant(self, value: Any) -> str:
        """Return one value as it is written."""
        if isinstance(value, str):
            quote = self._literals.quote
            if quote in value:
                raise NotSaidError
            return f"{self._spelled(quote)} {self._plain(value)} {self._spelled(quote)}".strip()
        if isinstance(value, list | dict):
            raise NotSaidError
        return self._plain(json.dumps(value))

    def _plain(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False) if text else ""

    def _reference(self, place: str) -> str:
        """Return the rule of what a schema refers to; it may refer to itself."""
        if place in self._referred:
            return self._referred[place]
        schema: Any = self._root if place.startswith("#") else None
        for part in place.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, Mapping) else None
        if schema is None:
            raise NotSaidError
        name = self._referred[place] = self._name()
        self.rules.append(f"{name}: {self.value(schema)}")
        return name

    def _array(self, schema: Schema) -> str:
        """Write the rule of a list; returns its name."""
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        name = self._name()
        if most == 0:
            self.rules.append(f'{name}: "[" "]"')
            return name
        item = self.value(schema.get("items", True))
        times = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        items = f'{item} ("," {item}){times}'
        self.rules.append(f'{name}: "[" {items if least else f"({items})?"} "]"')
        return name

    def members(self, schema: Schema) -> str:
        """Write the rules of an object; returns the name of the last one.

        Raises:
            NotSaidError: the schema asks for more than can be said.
        """
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        additional = schema.get("additionalProperties", True)
        if not isinstance(additional, bool) or not set(required) <= properties.keys():
            raise NotSaidError
        name = self._name()
        if not properties:
            inner = "" if additional is False else self._any_members()
            self.rules.append(f'{name}: "{{" {inner} "}}"')
            return name
        if not all(map(_BARE.fullmatch, properties)):
            raise NotSaidError
        first, behind = f"{name}_end", f"{name}_end"  # what follows none, and at least one
        self.rules.append(f'{first}: ""')
        ordered = sorted(properties, key=lambda key: (key.lower(), key))
        for at, key in reversed(list(enumerate(ordered))):
            pair = f"{self._plain(f'{key}:')} {self.value(properties[key])}"
            optional = key not in required
            skipped = f" | {first}" if optional else ""
            self.rules.append(f"{name}_first_{at}: {pair} {behind}{skipped}")
            skipped = f" | {behind}" if optional else ""
            self.rules.append(f'{name}_more_{at}: "," {pair} {behind}{skipped}')
            first, behind = f"{name}_first_{at}", f"{name}_more_{at}"
        self.rules.append(f'{name}: "{{" {first} "}}"')
        return name

    def _any_members(self) -> str:
        """Return any members of an object, or none."""
        member = f'/{_BARE.pattern}/ ":" {self._any_value()}'
        return f'({member} ("," {member})*)?'

    def _any_value(self, name: str | None = None) -> str:
        """Return the rule of any value."""
        if not self._any:
            self._any = self._name()
            ways = [self._any_text()]
            for kind in ("number", "boolean", "null", "array", "object"):
                ways += self._of_type(kind, {"type": kind}, {"type"}, [kind])
            self.rules.append(f"{self._any}: {' | '.join(ways)}")
        if name is not None:
            self.rules.append(f"{name}: {self._any}")
        return name or self._any
