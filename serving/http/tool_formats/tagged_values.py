"""Values of arguments that stand in tags, and what schemas say of their types."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any, Final

from onnxport.serving.http.tool_formats.cursor import json_value

TEXT: Final = {"string"}
MOST_REFERRED: Final = 8  # schemas, each of which refers to the next one
_WHOLE: Final = {"integer", "number"}
_ZEROS: Final = re.compile("-?0+[0-9]{1,99}")  # before a number, which JSON does not take
_NAMES: Final[Mapping[type, tuple[str, ...]]] = {  # of the types of JSON
    str: ("string",),
    bool: ("boolean",),
    int: ("integer", "number"),
    float: ("number", "integer"),
    list: ("array",),
    dict: ("object",),
    type(None): ("null",),
}


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
