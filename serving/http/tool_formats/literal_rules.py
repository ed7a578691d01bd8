"""Grammars of arguments that are values in a language of their own; see `Literals`."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from onnxport.serving.http.tool_formats.base import Literals
from onnxport.serving.structured.schema import ANNOTATIONS, ROOT_ONLY
from onnxport.serving.structured.spec import compact

Schema = Mapping[str, Any]
_DEFINED: Final = ("$defs", "definitions")
_SAID: Final = {*ANNOTATIONS, *ROOT_ONLY, *_DEFINED}  # what asks nothing of a value
_BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_ASKED: Final[Mapping[str, set[str]]] = {  # what may be asked of a value of a type
    "string": {"minLength", "maxLength"},
    "boolean": set(),
    "null": set(),
    "integer": set(_BOUNDS),
    "number": set(_BOUNDS),
    "array": {"items", "minItems", "maxItems"},
    "object": {"properties", "required", "additionalProperties"},
}

_BARE: Final = "[A-Za-z0-9_.$-]+"  # a name that needs no marks
_WORD: Final = "[A-Za-z_][A-Za-z0-9_]*"
_WHOLE: Final = "-?(0|[1-9][0-9]{0,99})"  # what every reader can hold
_NUMBERS: Final = {
    "integer": _WHOLE,
    "number": rf"{_WHOLE}(\.[0-9]{{1,99}})?([eE][+-]?[0-9]{{1,2}})?",
}
_ESCAPE: Final = r"""\\(["'\\bfnrt]|u[0-9a-fA-F]{4})"""
_PYTHON_TEXTS: Final = tuple(
    rf"{quote}([^{quote}\\\x00-\x1f]|{_ESCAPE})*{quote}" for quote in "\"'"
)


class NotSaidError(Exception):
    """A schema asks for more than values of the language can say."""


class LiteralRules:
    """Writes the rules of values that a schema allows."""

    def __init__(
        self,
        literals: Literals,
        prefix: str,
        root: Schema,
        spelled: Callable[[str], str],
        text: Callable[[str, str, str], list[str]],
    ) -> None:
        """Write nothing yet.

        Args:
            literals: the language.
            prefix: of the names of rules.
            root: the schema of the arguments, which others may refer to.
            spelled: returns a text of the format as a grammar has it.
            text: returns the rules of a name for a text up to one of the format and with it; the
                third argument is a regular expression of what stands before.
        """
        self._literals = literals
        self._prefix = prefix
        self._root = root
        self._spelled = spelled
        self._text = text
        self._rules: list[str] = []
        self._num_names = 0
        self._referred: dict[str, str] = {}  # what a schema refers to -> its rule
        self._any = ""  # the rule of any value

    def arguments(self) -> tuple[str, list[str]]:
        """Return the rule of the arguments of a call, and all rules.

        Raises:
            NotSaidError: the schema asks for more than can be said.
        """
        asked = self._root.keys() - _SAID - {"type"}
        if not asked <= _ASKED["object"]:
            raise NotSaidError
        return self._object(self._root, is_call=True), self._rules

    def _rule(self, body: str, name: str | None = None) -> str:
        """Write a rule and return its name."""
        name = name or self._name()
        self._rules.append(f"{name}: {body}")
        return name

    def _name(self) -> str:
        self._num_names += 1
        return f"{self._prefix}_{self._num_names}"

    def _value(self, schema: Any) -> str:
        """Write the rule of a value; returns its name."""
        if schema is True or (isinstance(schema, Mapping) and not schema.keys() - _SAID):
            return self._any_value()
        if not isinstance(schema, Mapping):
            raise NotSaidError
        return self._rule(" | ".join(self._ways(schema)))

    def _ways(self, schema: Schema) -> list[str]:
        """Return the ways to write a value."""
        asked = schema.keys() - _SAID
        if asked == {"$ref"}:
            return [self._reference(schema["$ref"])]
        if asked in ({"anyOf"}, {"oneOf"}):
            return [self._value(each) for each in schema[next(iter(asked))]]
        if asked == {"allOf"} and len(schema["allOf"]) == 1:
            return [self._value(schema["allOf"][0])]
        if asked in ({"const"}, {"type", "const"}):
            return [self._constant(schema["const"])]
        if asked in ({"enum"}, {"type", "enum"}) and schema["enum"]:
            return [self._constant(each) for each in schema["enum"]]
        types = schema.get("type", [])
        named = types if isinstance(types, list) else [types]
        if not named or not asked <= {"type"}.union(*(_ASKED[each] for each in named)):
            raise NotSaidError
        return [way for each in named for way in self._of_type(each, schema)]

    def _of_type(self, kind: str, schema: Schema) -> list[str]:
        """Return the ways to write a value of a type that a schema names."""
        if kind == "string":
            return [self._any_text(schema.get("minLength", 0), schema.get("maxLength"))]
        if kind in ("array", "object"):
            written = self._array(schema) if kind == "array" else self._object(schema)
            defined = {key: self._root[key] for key in _DEFINED if key in self._root}
            whole = {**defined, **schema, "type": kind}
            return [written, *self._held(whole)]
        if kind in ("boolean", "null"):
            words = self._literals.words[kind]
            bare = self._rule(" | ".join(map(self._plain, words)))
            return [bare, *self._quoted(bare)]
        bounds = {key: schema[key] for key in _BOUNDS if key in schema}
        number = f"%json {compact({'type': kind, **bounds})}" if bounds else f"/{_NUMBERS[kind]}/"
        number = self._rule(number)
        return [number, *self._quoted(number)]

    def _held(self, schema: Schema) -> list[str]:
        """Return how a value that is no text is written between quotes, where it may be."""
        if not self._literals.holds_any:
            return []
        return self._quoted(self._rule(f"%json {compact(schema)}"))

    def _quoted(self, rule: str) -> list[str]:
        if not self._literals.holds_any:
            return []
        quote = self._spelled(self._literals.quote)
        return [f"{quote} {rule} {quote}"]

    def _any_text(self, least: int = 0, most: int | None = None) -> str:
        """Write the rules of any text of some length; returns the name of the last one."""
        times = "*" if not least and most is None else f"{{{least},{'' if most is None else most}}}"
        if self._literals.is_python:
            return self._rule(f"/{'|'.join(one.replace('*', times) for one in _PYTHON_TEXTS)}/")
        text = self._name()
        self._rules += self._text(text, self._literals.quote, f"(?s:.{times})")
        return self._rule(f"{self._spelled(self._literals.quote)} {text}")

    def _constant(self, value: Any) -> str:
        """Return one value as it is written."""
        if isinstance(value, list | dict):
            raise NotSaidError
        if isinstance(value, bool) or value is None:
            words = self._literals.words["null" if value is None else "boolean"]
            named = words if value is None else words[0 if value else 1 :: 2]
            return " | ".join(map(self._plain, named))
        if not isinstance(value, str) or self._literals.is_python:
            return self._plain(json.dumps(value, ensure_ascii=False))
        quote = self._literals.quote
        if quote in value:
            raise NotSaidError
        return f"{self._spelled(quote)} {self._plain(value)} {self._spelled(quote)}"

    def _plain(self, text: str) -> str:
        return json.dumps(text, ensure_ascii=False) if text else ""

    def _reference(self, place: str) -> str:
        """Return the rule of what a schema refers to, which may refer to itself."""
        if place in self._referred:
            return self._referred[place]
        schema: Any = self._root if place.startswith("#") else None
        for part in place.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            schema = schema.get(part) if isinstance(schema, Mapping) else None
        if schema is None:
            raise NotSaidError
        name = self._referred[place] = self._name()
        return self._rule(self._value(schema), name)

    def _array(self, schema: Schema) -> str:
        """Write the rule of a list; returns its name."""
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return self._rule('"[" "]"')
        item = self._value(schema.get("items", True))
        times = f"{{{max(0, least - 1)},{'' if most is None else most - 1}}}"
        items = f"{item} ({self._comma} {item}){times}"
        return self._rule(f'"[" {items if least else f"({items})?"} "]"')

    def _object(self, schema: Schema, *, is_call: bool = False) -> str:
        """Write the rules of an object; returns the name of the last one.

        Args:
            schema: of it.
            is_call: whether it is the arguments of a call.
        """
        properties, required = schema.get("properties") or {}, schema.get("required") or ()
        additional = schema.get("additionalProperties", True)
        if not isinstance(additional, bool) or not set(required) <= properties.keys():
            raise NotSaidError
        bare = is_call and self._literals.is_python
        opening, closing = ("", "") if bare else ('"{"', '"}"')
        if properties:
            inner = self._members(properties, required, is_call=is_call)
        else:
            inner = "" if additional is False else self._any_members(is_call=is_call)
        return self._rule(f"{opening} {inner} {closing}".strip() or '""')

    def _members(self, properties: Schema, required: Sequence[str], *, is_call: bool) -> str:
        """Write the rules of members that are there or not; returns the name of the first one."""
        first = behind = self._rule('""')  # what follows none, and what follows another one
        names = list(properties)
        if self._literals.is_sorted:
            names.sort(key=lambda name: (name.lower(), name))
        for name in reversed(names):
            pair = f"{self._key(name, is_call=is_call)} {self._value(properties[name])}"
            is_needed = name in required
            begun = self._rule(f"{pair} {behind}" + ("" if is_needed else f" | {first}"))
            more = f"{self._comma} {pair} {behind}" + ("" if is_needed else f" | {behind}")
            first, behind = begun, self._rule(more)
        return first

    def _key(self, name: str, *, is_call: bool) -> str:
        """Return the name of a member, and what is between it and the value."""
        if not self._literals.is_python:
            if not re.fullmatch(_BARE, name):
                raise NotSaidError
            return self._plain(f"{name}:")
        if not is_call:
            return f"{self._plain(json.dumps(name, ensure_ascii=False))} {self._colon}"
        if not name.isidentifier() or name in ("True", "False", "None"):
            raise NotSaidError
        return f'{self._plain(name)} "="'

    def _any_members(self, *, is_call: bool) -> str:
        """Return any members of an object, or none."""
        name, sign = f"/{_BARE}/", '":"'
        if self._literals.is_python:
            name, sign = (f"/{_WORD}/", '"="') if is_call else (self._any_text(), self._colon)
        member = f"{name} {sign} {self._any_value()}"
        return f"({member} ({self._comma} {member})*)?"

    def _any_value(self) -> str:
        """Return the rule of any value."""
        if not self._any:
            self._any = self._name()
            kinds = ("string", "number", "boolean", "null", "array", "object")
            ways = [way for kind in kinds for way in self._of_type(kind, {"type": kind})]
            self._rule(" | ".join(ways), self._any)
        return self._any

    @property
    def _comma(self) -> str:
        return "/, ?/" if self._literals.is_python else '","'

    @property
    def _colon(self) -> str:
        return "/: ?/" if self._literals.is_python else '":"'


def is_name(text: str) -> bool:
    """Whether Python can name a function so."""
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in text.split("."))
