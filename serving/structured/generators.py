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
from onnxport.serving.structured.keywords import (
    is_anything,
    may_be_text,
    pattern_of_names,
    with_bounds,
    with_format,
    with_patterns,
    with_prefix_items,
    without_texts_of_numbers,
    without_unevaluated,
)
from onnxport.serving.structured.pointers import (
    ONE_SCHEMA,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    escaped,
    reference,
)
from onnxport.serving.structured.references import MOST_STEPS, References
from onnxport.serving.structured.schema import (
    ANNOTATIONS,
    COMPILER_OPTIONS,
    DRAFT_4,
    EXTENSION,
    MAX_PATH,
    check_place,
)

MOST_REFERRED = 8  # schemas, each of which refers to the next one
MOST_WRITTEN = 1 << 18  # characters of names that are written or read for `propertyNames`


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
        moved = with_prefix_items(one)
        with_bounds(one)
        with_format(one)
        without_unevaluated(one)
        moved |= self._with_names(one, old, new)
        with_alternatives(one)
        with_patterns(one)
        if without_texts_of_numbers(one):
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
        if names is None or not self._may_write(len(names)) or not may_be_text(names):
            return {}
        names = {name: value for name, value in names.items() if not self._is_silent(name, value)}
        names.pop("type", None)
        with_format(names)
        if not names:
            del one["propertyNames"]
            return {}
        if one.get("patternProperties") or not isinstance(one.get("properties", {}), dict):
            return {}
        if names.keys() <= {"const", "enum"} and isinstance(names.get("enum", []), list):
            if not self._may_write(len(names.get("enum", ()))):
                return {}
            return self._with_listed(_values(names), one, old, new)
        pattern = None if one.get("properties") else pattern_of_names(names)
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
