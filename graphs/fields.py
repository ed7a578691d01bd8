"""JSON objects with known fields: what manifests are read and written by."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Final, TypeVar

from onnxport.errors import ArtifactError

NONE: Final = type(None)

_T = TypeVar("_T")


def check_fields(what: str, value: Any, schema: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """Check a JSON object against field names and types, and return a copy of it.

    An integer is accepted where a float is asked for; a bool is never an integer.

    Args:
        what: The object's name in error messages.
        value: Anything that `json.loads` returns.
        schema: Every field and its allowed types; all are required, no other is allowed.

    Raises:
        ArtifactError: `value` is no object, or a field is missing, unknown or of a wrong type.
    """
    if not isinstance(value, dict):
        raise ArtifactError(f"{what} must be a JSON object, found {type(value).__name__}")
    problems = [f"missing {name!r}" for name in schema if name not in value]
    problems += [f"unknown {name!r}" for name in value if name not in schema]
    problems += [
        f"{name!r} is {value[name]!r}, expected {' or '.join(_json_name(t) for t in types)}"
        for name, types in schema.items()
        if name in value and not any(is_a(value[name], t) for t in types)
    ]
    if problems:
        raise ArtifactError(
            f"{what} does not match the schema of this version of onnxport: "
            f"{'; '.join(problems)}. Export the model again, or use the version that wrote it."
        )
    return {
        name: float(value[name]) if float in types and value[name] is not None else value[name]
        for name, types in schema.items()
    }


def flags(what: str, value: list[Any] | None) -> tuple[bool, ...] | None:
    """A flag for each layer, or None. Raises ArtifactError for entries of another type."""
    if value is None:
        return None
    if not all(isinstance(one, bool) for one in value):
        raise ArtifactError(f"{what} has an entry that is no bool: {value}")
    return tuple(value)


def numbers(what: str, value: list[Any] | None) -> tuple[float | None, ...] | None:
    """A number or null for each layer, or None. Raises ArtifactError for other entries."""
    if value is None:
        return None
    if not all(one is None or is_a(one, float) for one in value):
        raise ArtifactError(f"{what} has an entry that is no number: {value}")
    return tuple(None if one is None else float(one) for one in value)


def counts(what: str, value: list[Any] | None) -> tuple[int, ...] | None:
    """A number of things for each layer, or None. Raises ArtifactError for other entries."""
    if value is None:
        return None
    if not all(is_a(one, int) for one in value):
        raise ArtifactError(f"{what} has an entry that is no integer: {value}")
    return tuple(value)


def is_a(value: Any, kind: type) -> bool:
    """Whether a JSON value is of a type, as `check_fields` means it."""
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return isinstance(value, kind)


def _json_name(kind: type) -> str:
    names = {NONE: "null", float: "a finite number", int: "an integer", str: "a string"}
    return names.get(kind, kind.__name__)


def require(condition: bool, message: str) -> None:
    """Raise ValueError with a message unless a condition holds."""
    if not condition:
        raise ValueError(message)


def construct(cls: type[_T], what: str, fields: Mapping[str, Any]) -> _T:
    """Make an object of its fields. Raises ArtifactError where they contradict each other."""
    try:
        return cls(**fields)
    except ValueError as error:
        raise ArtifactError(f"{what} contradicts itself: {error}") from error


def without_nulls(fields: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The fields without those of some names that are null."""
    return {name: one for name, one in fields.items() if name not in names or one is not None}


def with_nulls(value: Any, names: tuple[str, ...]) -> Any:
    """A JSON object with nulls for those of some names that it lacks; anything else as it is."""
    return {**dict.fromkeys(names), **value} if isinstance(value, dict) else value


def plain(description: Any) -> dict[str, Any]:
    """The fields of a dataclass, tuples as lists."""
    fields = dataclasses.asdict(description)
    return {name: list(v) if isinstance(v, tuple) else v for name, v in fields.items()}
