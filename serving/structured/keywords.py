"""Keywords of one schema, written as those that are enforced; `generators.py` goes through all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onnxport.serving.structured.lookahead import looks_around, without_lookahead
from onnxport.serving.structured.schema import (
    ANNOTATIONS,
    FORMATS,
    MAX_EXACT,
    TYPES,
    UNENFORCED_FORMATS,
    is_number,
)

MOST_COUNTED = 2**31 - 1  # what the compiler counts to; no text is as long
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


def is_anything(schema: Any) -> bool:
    """Whether a schema says nothing."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= set(ANNOTATIONS))


def _is_nothing(schema: Any) -> bool:
    """Whether a schema is seen to fit no value."""
    return schema is False or (isinstance(schema, dict) and is_anything(schema.get("not", False)))


def may_be_text(schema: Mapping[str, Any]) -> bool:
    """Whether the type of a schema lets texts fit it."""
    types = schema.get("type", "string")
    if isinstance(types, list):  # a long one is none, and others say so
        return "string" in types[: len(TYPES)]
    return bool(types == "string")


def with_prefix_items(one: dict[str, Any]) -> dict[str, str]:
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


def with_bounds(one: dict[str, Any]) -> None:
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


def with_format(one: dict[str, Any]) -> None:
    """Leave out a format that says nothing: of what is no text, or unknown to JSON Schema."""
    name = one.get("format")
    if not isinstance(name, str):
        return
    if not may_be_text(one) or name not in (*FORMATS, *UNENFORCED_FORMATS):
        del one["format"]


def without_unevaluated(one: dict[str, Any]) -> None:
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


def pattern_of_names(names: Mapping[str, Any]) -> str | None:
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


def with_patterns(one: dict[str, Any]) -> None:
    """Write several patterns for one that looks ahead, where that can be."""
    pattern, others = one.get("pattern"), one.get("allOf", [])
    if not isinstance(pattern, str) or not isinstance(others, list) or not looks_around(pattern):
        return
    if parts := without_lookahead(pattern):
        del one["pattern"]
        one["allOf"] = [*others, *({"pattern": part} for part in parts)]


def without_texts_of_numbers(one: dict[str, Any]) -> bool:
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
