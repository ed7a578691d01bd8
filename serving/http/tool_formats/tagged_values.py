"""Values of arguments that stand in tags, and what schemas say of their types."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, Final

from onnxport.serving.http.tool_formats.cursor import json_value
from onnxport.serving.structured.schema import ANNOTATIONS

TEXT: Final = {"string"}
MOST_REFERRED: Final = 8  # schemas, each of which refers to the next one
_WHOLE: Final = {"integer", "number"}
_ZEROS: Final = re.compile("-?0+[0-9]{1,99}")  # before a number, which JSON does not take
_ANY_TEXT: Final = {"string", "number", "boolean", "null"}  # each of them, with nothing else asked
_NAMES: Final[Mapping[type, tuple[str, ...]]] = {  # of the types of JSON
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number", "integer"),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}
TYPES: Final = frozenset(name for names in _NAMES.values() for name in names)


def value_of(text: str, types: set[str]) -> Any:
    """Return the value of an argument: JSON, or what Python writes for it, where its schema can.

    What may be a text, and nothing of the type that JSON makes of it, is a text; and so is what
    JSON has no value for, such as Python's sets and an infinite number.
    """
    if types == TEXT:
        return text
    value, told = json_value(text.strip()), text.strip()
    if types & _WHOLE and "string" not in types and _ZEROS.fullmatch(told):
        return int(told)
    if value is None and told != "null":
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that speak of escapes that Python lacks
                value = ast.literal_eval(told)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return text
    if "string" in types and types.isdisjoint(_NAMES.get(type(value), ())):
        return text
    return value if _is_json(value) else text


def _is_json(value: Any) -> bool:
    """Whether JSON has such a value."""
    try:
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return False
    return True


def types_of(schema: Any, root: Mapping[str, Any]) -> set[str]:
    """Return the types that a schema of an argument names, or its alternatives do.

    Args:
        schema: where there is one.
        root: the parameters that it is a part of, and may refer to.

    Returns:
        None of them: all may be.
    """
    schema = referred(schema, root)
    named = named_types(schema)
    if named or not isinstance(schema, Mapping):
        return named
    for key in ("anyOf", "oneOf", "allOf"):
        if isinstance(among := schema.get(key), list):
            types = [named_types(referred(each, root)) for each in among]
            return set().union(*types) if all(types) else set()
    return set()


def referred(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that another one refers to, or that itself; None: there is none."""
    for _ in range(MOST_REFERRED):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            return schema
        place, *names = schema["$ref"].split("/")
        schema = root if place == "#" else None
        for name in names:
            name = name.replace("~1", "/").replace("~0", "~")
            schema = schema.get(name) if isinstance(schema, Mapping) else None
    return None


def named_types(schema: Any) -> set[str]:
    """Return the types that a schema names itself, or its values have."""
    if not isinstance(schema, Mapping):
        return set()
    found = schema.get("type")
    types = [found] if isinstance(found, str) else found
    if isinstance(types, list):
        return {each for each in types if isinstance(each, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list):
        return set()
    return {name for each in values for name in _NAMES.get(type(each), ())[:1]}


def written_value(schema: Any) -> Mapping[str, Any] | tuple[str, ...] | None:
    """Return what a value may be, as `Tagged` has it; no texts at all: that cannot be said."""
    if not isinstance(schema, Mapping) or "$ref" in json.dumps(schema):
        return ()
    types = types_of(schema, {})
    if types and "string" not in types:
        return schema
    if _may_be_any_text(schema):
        return None
    asked = set(schema) - set(ANNOTATIONS)
    if asked <= {"type", "enum", "const"}:
        texts = (*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ()))
        if len(asked & {"enum", "const"}) == 1 and all(_is_kept(each, schema) for each in texts):
            return texts
    return ()


def _may_be_any_text(schema: Mapping[str, Any]) -> bool:
    """Whether any text fits a schema: it is a string, or what `value_of` else makes of it."""
    asked = set(schema) - set(ANNOTATIONS)
    among = schema[asked.pop()] if len(asked) == 1 and asked <= {"anyOf", "oneOf"} else [schema]
    types: set[str] = set()
    for each in among:
        if not isinstance(each, Mapping) or set(each) - {"type", *ANNOTATIONS}:
            return False
        types |= named_types(each)
    return "string" in types and types <= _ANY_TEXT


def _is_kept(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value is a text that is read as it is written, and has no tag in it."""
    return (
        isinstance(value, str)
        and "<" not in value
        and value_of(value, types_of(schema, {})) == value
    )
