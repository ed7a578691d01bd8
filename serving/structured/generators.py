"""Schemas as generators write them, brought into the keywords that are enforced.

Whatever fits the schema that comes out fits the one that went in, by JSON Schema or by the dialect
that alone has such a keyword: what says nothing goes, what has another name gets it, and bounds
that are out of reach are tightened. `const` and `enum` stay. What is not known here stays as it is,
and `schema.check_schema` refuses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any
from urllib.parse import unquote

from onnxport.serving.structured.dependents import with_alternatives
from onnxport.serving.structured.lookahead import looks_around, without_lookahead
from onnxport.serving.structured.references import MOST_STEPS, References
from onnxport.serving.structured.schema import (
    ANNOTATIONS,
    COMPILER_OPTIONS,
    DRAFT_4,
    EXTENSION,
    FORMATS,
    MAX_EXACT,
    MAX_PATH,
    ONE_SCHEMA,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    TYPES,
    UNENFORCED_FORMATS,
    check_place,
    escaped,
    is_number,
    reference,
)

MOST_COUNTED = 2**31 - 1  # what the compiler counts to; no text is as long
MOST_REFERRED = 8  # schemas, each of which refers to the next one
MOST_WRITTEN = 1 << 18  # characters of names that are written or read for `propertyNames`
_COUNTS = (
    "maxItems",
    "maxLength",
    "maxProperties",
    "minItems",
    "minLength",
    "minProperties",
)
_IN_PLACE = ("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas")
_FORMATS_OF_NAMES: Mapping[str, str] = {
    "date": (
        "^(?:(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)-"
        "(?:02-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:0[1-9]|[12][0-9]|30)"
        "|(?:0[13578]|1[02])-31)"
        "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])"
        "|(?:0[48]|[2468][048]|[13579][26])00)-02-29)$"
    ),
    "uuid": "^[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}$",
}
_DYNAMIC = ("$dynamicRef", "$recursiveRef", "contains")


def rewritten(schema: Any) -> tuple[Any, list[Any]]:
    """Return a schema in the keywords that are enforced, so far as it can be said in them.

    Args:
        schema: as JSON is read; it stays as it is.

    Returns:
        The schema, and those inside it of which an alternative was left out: where others than
        these must not fit, as those of `oneOf`, it says more than before.

    Raises:
        ValueError: schemas are too deep inside of others.
    """
    rewriter = _Rewriter(schema)
    return rewriter.whole(), rewriter.narrowed


class _Rewriter:
    """Goes through one schema."""

    def __init__(self, root: Any) -> None:
        self._root = root
        given = root if isinstance(root, dict) else {}
        self._id = given.get("$id") if isinstance(given.get("$id"), str) else None
        self._has_ids = str(given.get("$schema")).removesuffix("#") == DRAFT_4
        self._moved: dict[str, str] = {}  # the pointers of schemas that have another one now
        self._refs: list[dict[str, Any]] = []
        self._room = MOST_WRITTEN
        self._references = References(root)
        self.narrowed: list[Any] = []

    def whole(self) -> Any:
        """Return the whole schema."""
        result = self._schema(self._root, "#", "#", 0)
        for one in self._refs if self._moved else ():
            one["$ref"] = self._now(one["$ref"])
        return result

    def _schema(self, given: Any, old: str, new: str, depth: int) -> Any:
        """Return one schema.

        Args:
            given: the schema.
            old: its JSON pointer.
            new: the one in the result.
            depth: how many schemas it is in.
        """
        check_place(new, depth, given)
        if not isinstance(given, dict):
            return given
        if is_anything(given.get("not", False)):
            return False
        one = {name: _copied(it) for name, it in given.items() if not self._is_silent(name, it)}
        if one.get("not") is False:
            del one["not"]
        if isinstance(one.get("$ref"), str):
            one["$ref"] = self._within(one["$ref"])
            self._refs.append(one)
        moved = _with_prefix_items(one)
        _with_bounds(one)
        _with_format(one)
        _without_unevaluated(one)
        moved |= self._with_names(one, old, new)
        with_alternatives(one)
        _with_patterns(one)
        if _without_texts_of_numbers(one):
            self.narrowed.append(one)
        self._with_schemas(one, old, new, depth, moved)
        return one

    def _with_schemas(
        self, one: dict[str, Any], old: str, new: str, depth: int, moved: Mapping[str, str]
    ) -> None:
        """Rewrite the schemas directly inside one.

        Args:
            one: whose keywords are rewritten.
            old: its JSON pointer.
            new: the one in the result.
            depth: how many schemas it is in.
            moved: where those were before that are elsewhere now, both from here.
        """
        for holder, key, place in list(_inside(one)):
            before = f"{old}/{moved.get(place, place)}"
            after = f"{new}/{place}"
            if place in moved:
                self._moved[before] = after
            holder[key] = self._schema(holder[key], before, after, depth + 1)

    def _is_silent(self, name: str, value: Any) -> bool:
        """Whether a keyword says nothing."""
        if name == "id":  # of a part it changes what references mean, in draft 4
            return isinstance(value, str) and (not self._has_ids or value == self._root.get("id"))
        if name.startswith(EXTENSION):
            return name != COMPILER_OPTIONS
        return name in ANNOTATIONS or (name in ("uniqueItems", "nullable") and value is False)

    def _within(self, reference: str) -> str:
        """Return a reference into the document itself, which may be called by its name."""
        if self._id and reference == self._id:
            return "#"
        if self._id and reference.startswith(f"{self._id}#"):
            return reference[len(self._id) :]
        return reference

    def _now(self, given: str) -> str:
        """Return what a reference is where schemas have moved."""
        text = unquote(given)
        if text.count("/") > MOST_STEPS:
            return given
        end = len(text)
        while end > 0:
            if text[:end] in self._moved:
                return reference(self._moved[text[:end]] + text[end:])
            end = text.rfind("/", 0, end)
        return given

    def _with_names(self, one: dict[str, Any], old: str, new: str) -> dict[str, str]:
        """Say with other keywords what names of properties may be.

        Returns:
            Where schemas were that are elsewhere now, both from here.
        """
        names = self._referred(one.get("propertyNames"))
        if names is None or not self._may_write(len(names)) or not _may_be_text(names):
            return {}
        names = {name: value for name, value in names.items() if not self._is_silent(name, value)}
        names.pop("type", None)
        _with_format(names)
        if not names:
            del one["propertyNames"]
            return {}
        if one.get("patternProperties") or not isinstance(one.get("properties", {}), dict):
            return {}
        if names.keys() <= {"const", "enum"} and isinstance(names.get("enum", []), list):
            if not self._may_write(len(names.get("enum", ()))):
                return {}
            return self._with_listed(_values(names), one, old, new)
        pattern = None if one.get("properties") else _of_names(names)
        if pattern is None or not self._may_write(len(pattern)):
            return {}
        rest = one.get("additionalProperties", True)
        del one["propertyNames"]
        one |= {"patternProperties": {pattern: rest}, "additionalProperties": False}
        return {f"patternProperties/{escaped(pattern)}": "additionalProperties"}

    def _with_listed(
        self, listed: list[Any], one: dict[str, Any], old: str, new: str
    ) -> dict[str, str]:
        """List the properties that there may be, where their names are known."""
        if not self._may_write(len(listed) * len(new)):
            return {}
        names = {name: None for name in listed if isinstance(name, str)}
        if not self._may_write(sum(map(len, names))):
            return {}
        properties, rest = one.get("properties", {}), one.get("additionalProperties", True)
        takes_rest = isinstance(rest, dict) and not names.keys() <= properties.keys()
        dropped = {} if takes_rest or rest is False else {"additionalProperties": rest}
        dropped |= {
            f"properties/{escaped(name)}": each
            for name, each in properties.items()
            if name not in names
        }
        moved = self._with_definitions(dropped, one, old)
        if moved is None:
            return {}
        kept = {name: each for name, each in properties.items() if name in names}
        has_place = False  # whether the schema of further properties has one
        for name in names if rest is not False else ():
            if name in properties:
                continue
            kept[name] = rest
            if isinstance(rest, dict) and not has_place:
                has_place = True
                place = f"properties/{escaped(name)}"
                moved[place] = "additionalProperties"
                rest = {"$ref": reference(f"{new}/{place}")}
        del one["propertyNames"]
        one |= {"properties": kept, "additionalProperties": False}
        return moved

    def _with_definitions(
        self, dropped: Mapping[str, Any], one: dict[str, Any], old: str
    ) -> dict[str, str] | None:
        """Define schemas that no property has any more, where references lead to them.

        Args:
            dropped: the schemas, by their places in one.
            one: which gets the definitions.
            old: its JSON pointer.

        Returns:
            Where they were that are elsewhere now, both from here; None: they cannot be there.
        """
        if not self._references.lead_to(old):
            return {}
        kept = [place for place in dropped if self._references.lead_to(f"{old}/{place}")]
        defs = one.get("$defs", {})
        if kept and not isinstance(defs, dict):
            return None
        free = (name for name in map(str, count()) if name not in defs)
        names = dict(zip(kept, free, strict=False))
        if names:
            one["$defs"] = defs | {name: dropped[place] for place, name in names.items()}
        return {f"$defs/{name}": place for place, name in names.items()}

    def _may_write(self, num_chars: int) -> bool:
        """Whether there may be so much more than was given, which one part may do many times."""
        self._room -= num_chars
        return self._room >= 0

    def _referred(self, schema: Any) -> dict[str, Any] | None:
        """Return the schema that another one refers to, or that itself; None: there is none."""
        for _ in range(MOST_REFERRED):
            if schema is True:
                return {}
            if not isinstance(schema, dict) or not self._may_write(len(schema)):
                return None
            refers = schema.keys() - ANNOTATIONS == {"$ref"} and isinstance(schema["$ref"], str)
            if not refers or len(schema["$ref"]) > MAX_PATH:
                return schema
            if not self._may_write(len(schema["$ref"])):
                return None
            schema = self._at(self._within(schema["$ref"]))
        return None

    def _at(self, reference: str) -> Any:
        """Return what a reference leads to; None: nothing."""
        start, *names = unquote(reference).split("/")
        found = self._root if start == "#" else None
        for name in names:
            name = name.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, dict) else None
        return found


def is_anything(schema: Any) -> bool:
    """Whether a schema says nothing."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= set(ANNOTATIONS))


def _is_nothing(schema: Any) -> bool:
    """Whether a schema is seen to fit no value."""
    return schema is False or (isinstance(schema, dict) and is_anything(schema.get("not", False)))


def _inside(one: Mapping[str, Any]) -> Iterator[tuple[Any, Any, str]]:
    """Yield where the schemas directly inside one are: what holds each, its key, its pointer."""
    for name in ONE_SCHEMA:
        if name in one:
            yield one, name, name
    for name in SCHEMA_LISTS:
        if isinstance(one.get(name), list):
            for index in range(len(one[name])):
                yield one[name], index, f"{name}/{index}"
    for name in SCHEMA_MAPS:
        if isinstance(one.get(name), dict):
            for key in one[name]:
                yield one[name], key, f"{name}/{escaped(key)}"


def _values(names: Mapping[str, Any]) -> list[Any]:
    """Return the values that `const` and `enum` allow, of texts at least."""
    if "const" not in names:
        return list(names["enum"])
    const = names["const"]
    is_allowed = "enum" not in names or (isinstance(const, str) and const in names["enum"])
    return [const] if is_allowed else []


def _copied(value: Any) -> Any:
    """Return a list or an object of its own, of the same members."""
    return value.copy() if isinstance(value, list | dict) else value


def _may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether the type of a schema lets texts fit it."""
    types = schema.get("type", "string")
    if isinstance(types, list):  # a long one is none, and others say so
        return "string" in types[: len(TYPES)]
    return bool(types == "string")


def _with_prefix_items(one: dict[str, Any]) -> dict[str, str]:
    """Write what is at places of a list as JSON Schema 2020-12 does.

    Returns:
        Where schemas were that are elsewhere now, both from here.
    """
    items = one.get("items")
    if not isinstance(items, list):
        if "items" in one:
            one.pop("additionalItems", None)  # which is for lists alone
        return {}
    if not items or "prefixItems" in one:
        return {}
    one["prefixItems"] = one.pop("items")
    moved = {f"prefixItems/{index}": f"items/{index}" for index in range(len(items))}
    if "additionalItems" in one:
        one["items"] = one.pop("additionalItems")
        moved["items"] = "additionalItems"
    return moved


def _with_bounds(one: dict[str, Any]) -> None:
    """Write exclusive bounds as numbers, and bring those that are out of reach within it."""
    for side, sign in (("Maximum", 1), ("Minimum", -1)):
        bound, exclusive = side.lower(), f"exclusive{side}"
        if one.get(exclusive) is False:
            del one[exclusive]
        elif one.get(exclusive) is True and is_number(one.get(bound)):
            one[exclusive] = one.pop(bound)
        for name in (bound, exclusive):
            value: Any = one.get(name)
            if is_number(value) and value * sign > MAX_EXACT:
                one[name] = MAX_EXACT * sign
    for name in _COUNTS:
        value = one.get(name)
        if isinstance(value, float) and value.is_integer():
            one[name] = value = int(value)
        if isinstance(value, int) and value > MOST_COUNTED and name.startswith("max"):
            one[name] = MOST_COUNTED


def _with_format(one: dict[str, Any]) -> None:
    """Leave out a format that says nothing: of what is no text, or unknown to JSON Schema."""
    name = one.get("format")
    if not isinstance(name, str):
        return
    if not _may_be_text(one) or name not in (*FORMATS, *UNENFORCED_FORMATS):
        del one["format"]


def _without_unevaluated(one: dict[str, Any]) -> None:
    """Say what is for all that is left with other keywords, where nothing else sees members."""
    others = {*_IN_PLACE, *_DYNAMIC} & one.keys()
    for name, plain in (
        ("unevaluatedProperties", "additionalProperties"),
        ("unevaluatedItems", "items"),
    ):
        if name in one and (is_anything(one[name]) or plain in one):
            del one[name]
        elif name in one and _is_nothing(one[name]) and not others:
            one[plain] = one.pop(name)


def _of_names(names: Mapping[str, Any]) -> str | None:
    """Return the pattern of names that a schema asks for; None: it asks for more."""
    if names.keys() == {"format"}:
        return _FORMATS_OF_NAMES.get(names["format"])
    if names.keys() == {"pattern"}:
        return names["pattern"] if isinstance(names["pattern"], str) else None
    if not names.keys() <= {"minLength", "maxLength"} or not all(map(_is_length, names.values())):
        return None
    return f"^(?s:.{{{names.get('minLength', 0)},{names.get('maxLength', '')}}})$"


def _is_length(value: Any) -> bool:
    return type(value) is int and 0 <= value < 10**9


def _with_patterns(one: dict[str, Any]) -> None:
    """Write several patterns for one that looks ahead, where that can be."""
    pattern, others = one.get("pattern"), one.get("allOf", [])
    if not isinstance(pattern, str) or not isinstance(others, list) or not looks_around(pattern):
        return
    if parts := without_lookahead(pattern):
        del one["pattern"]
        one["allOf"] = [*others, *({"pattern": part} for part in parts)]


def _without_texts_of_numbers(one: dict[str, Any]) -> bool:
    """Leave numbers alone where one may be a number or its text, whose pattern is out of reach.

    So is a decimal number of pydantic's written. Returns whether a text was left out.
    """
    among = one.get("anyOf")
    alternatives = (
        [each for each in among if isinstance(each, dict)] if isinstance(among, list) else []
    )
    if not any(each.get("type") in ("number", "integer") for each in alternatives):
        return False
    is_left_out = False
    for index, each in enumerate(among or ()):
        told = each.keys() - ANNOTATIONS if isinstance(each, dict) else set()
        if told == {"type", "pattern"} and each["type"] == "string":
            pattern = each["pattern"]
            if (
                isinstance(pattern, str)
                and looks_around(pattern)
                and not without_lookahead(pattern)
            ):
                one["anyOf"][index] = False
                is_left_out = True
    return is_left_out
