"""Which JSON schemas are supported: every keyword is enforced, is an annotation, or is refused.

A grammar compiler that skips what it does not know would give output that only looks right, so
each keyword of each schema is looked at here first. What is left the compiler enforces; the tests
prove it keyword by keyword. The keywords are those of JSON Schema 2020-12 (json-schema.org);
`generators.py` has brought what says the same in other words into these before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from functools import reduce
from math import ceil, floor, gcd, lcm
from typing import Any
from urllib.parse import unquote

from onnxport.serving.structured.meeting import values
from onnxport.serving.structured.pointers import (
    ONE_SCHEMA,
    SCHEMA_LISTS,
    SCHEMA_MAPS,
    inner_schemas,
)
from onnxport.serving.structured.writable import writable

MAX_DEPTH = 64  # schemas inside schemas
MAX_PATH = 2048  # characters of the JSON pointer to a schema, which each of those in it begins with
MAX_MULTIPLE = 10_000  # of multipleOf without its point: each remainder is a state of the grammar
MAX_EXACT = 2**53  # beyond, the compiler's floating point numbers skip integers
TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
FORMATS = (
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "json-pointer",
    "relative-json-pointer",
    "time",
    "uri",
    "uri-reference",
    "uri-template",
    "uuid",
)
# Which JSON Schema knows and nothing here enforces. All others it lets mean nothing.
UNENFORCED_FORMATS = (
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "regex",
)
DRAFT_4 = "http://json-schema.org/draft-04/schema"
DIALECTS = (
    DRAFT_4,
    "http://json-schema.org/draft-06/schema",
    "http://json-schema.org/draft-07/schema",
    "https://json-schema.org/draft/2019-09/schema",
    "https://json-schema.org/draft/2020-12/schema",
)
ANNOTATIONS = (
    "$comment",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "default",
    "deprecated",
    "description",
    "discriminator",
    "example",
    "examples",
    "externalDocs",
    "readOnly",
    "title",
    "writeOnly",
    "xml",
)
EXTENSION = "x-"  # how names begin that mean nothing, as in OpenAPI
COMPILER_OPTIONS = "x-guidance"  # the compiler would obey them
ROOT_ONLY = ("$id", "$schema")
HINTS = {
    "additionalItems": "write items and prefixItems as JSON Schema 2020-12 has them",
    "id": "remove it",
    "nullable": 'write a list of types, such as ["string", "null"]',
    "propertyNames": "beside no properties it may be one pattern, lengths, or some formats; "
    "otherwise values (enum, const)",
    "unevaluatedProperties": "it may be false, without allOf, $ref and the like beside it",
}
Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    """Whether a number is exact as a float."""
    return is_number(value) and abs(value) <= MAX_EXACT  # of any size, and NaN is not


def _without_point(value: float) -> Decimal:
    """Return a number times the power of ten that makes it whole."""
    return abs(Decimal(repr(value)).scaleb(_places(value)))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_multiple(value: Any) -> bool:
    return _is_number(value) and value > 0 and _without_point(value) <= MAX_MULTIPLE


def _is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(one, str) and one in TYPES for one in names)


def _is_constant(value: Any) -> bool:
    """Whether a value can be written: whole numbers up to 2^53, no odd control characters."""
    if isinstance(value, dict):
        return all(map(_is_constant, value)) and all(map(_is_constant, value.values()))
    if isinstance(value, list):
        return all(map(_is_constant, value))
    if isinstance(value, str):
        return "\x7f" not in value and all(char >= " " or char in "\b\f\n\r\t" for char in value)
    return isinstance(value, bool | None) or _is_number(value)


def _is_list(value: Any, check: Check) -> bool:
    return isinstance(value, list) and bool(value) and all(map(check, value))


def is_number(value: Any) -> bool:
    """Whether a value is a number of JSON, of whatever size."""
    return isinstance(value, int | float) and not isinstance(value, bool)


_COUNT: tuple[Check, str] = (_is_count, "a whole number from 0 on")
_NUMBER: tuple[Check, str] = (_is_number, "a number, at most 2^53 in size")
_WRITABLE = "without numbers beyond 2^53 and control characters other than \\b \\f \\n \\r \\t"
ASSERTIONS: Mapping[str, tuple[Check, str]] = {
    "$ref": (
        lambda value: isinstance(value, str) and (value == "#" or value.startswith("#/")),
        "a JSON pointer into the schema itself, such as #/$defs/name",
    ),
    "const": (_is_constant, f"a value {_WRITABLE}"),
    "enum": (lambda value: _is_list(value, _is_constant), f"a list of values {_WRITABLE}"),
    "exclusiveMaximum": _NUMBER,
    "exclusiveMinimum": _NUMBER,
    "format": (
        lambda value: isinstance(value, str) and value in FORMATS,
        "one of " + ", ".join(FORMATS),
    ),
    "maxItems": _COUNT,
    "maxLength": _COUNT,
    "maxProperties": _COUNT,
    "maximum": _NUMBER,
    "minItems": _COUNT,
    "minLength": _COUNT,
    "minProperties": _COUNT,
    "minimum": _NUMBER,
    "multipleOf": (_is_multiple, f"a number above 0, without its point at most {MAX_MULTIPLE}"),
    "pattern": (lambda value: isinstance(value, str), "a regular expression"),
    "required": (
        lambda value: isinstance(value, list) and all(isinstance(one, str) for one in value),
        "a list of names",
    ),
    "type": (_is_type, "one of " + ", ".join(TYPES) + ", or a list of these"),
}
# Values that JSON Schema allows, so that only enforcing them is what cannot be done.
_VALID: Mapping[str, Check] = {
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"), is_number),
    "const": lambda _: True,
    "enum": lambda value: isinstance(value, list) and bool(value),
    "format": lambda value: isinstance(value, str),
    "multipleOf": lambda value: is_number(value) and value > 0,
}
MOST_SHOWN = 200  # characters of a JSON pointer, of which each keyword may be told
BOUNDS = ("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum")
ENFORCED = tuple(sorted({*ASSERTIONS, *ONE_SCHEMA, *SCHEMA_LISTS, *SCHEMA_MAPS}))


def check_schema(schema: Any, *, strict: bool = True) -> tuple[str, ...]:
    """Refuse a schema that would not be enforced in every word, or take such words out of it.

    Args:
        schema: as JSON is read; changed where it is not strict.
        strict: whether a keyword that cannot be enforced is refused; otherwise it is taken out.

    Returns:
        The keywords that were taken out, by the ends of their JSON pointers.

    Raises:
        ValueError: says where, what was found and what is supported.
    """
    schemas: dict[str, Any] = {}
    pending: list[tuple[str, Any, int]] = [("#", schema, 0)]
    left_out: list[str] = []
    while pending:
        where, one, depth = pending.pop()
        check_place(where, depth, one)
        schemas[where] = one
        if isinstance(one, dict):
            shown = where if len(where) <= MOST_SHOWN else f"…{where[-MOST_SHOWN:]}"
            unenforced = _unenforced(shown, one)
            if strict and (found := next(unenforced, None)):
                raise ValueError(found[1])
            for name, _ in list(unenforced):
                if name in one:
                    del one[name]
                    left_out.append(f"{shown}/{name[:MOST_SHOWN]}")
            pending += [(path, inner, depth + 1) for path, inner in inner_schemas(where, one)]
        elif not isinstance(one, bool):
            raise ValueError(f"{where} is {repr(one)[:80]}; a schema is an object, or true")
    for where, one in schemas.items():
        if isinstance(one, dict) and "$ref" in one and unquote(one["$ref"]) not in schemas:
            raise ValueError(
                f"{where} refers to {one['$ref']!r}, where there is no schema; define it there"
            )
    _check_merged(schemas)
    return tuple(left_out)


def check_place(where: str, depth: int, schema: Any) -> None:
    """Raise ValueError for a schema that is too deep inside of others."""
    if depth > MAX_DEPTH:
        raise ValueError(f"{where[:80]}… is more than {MAX_DEPTH} schemas deep; flatten it")
    if len(where) > MAX_PATH and isinstance(schema, dict) and _has_schemas(schema):
        raise ValueError(
            f"{where[:80]}… has schemas in it, and a path of {len(where)} characters, "
            f"at most {MAX_PATH} are supported; shorten names, or flatten it"
        )


def _has_schemas(schema: Mapping[str, Any]) -> bool:
    names = (*ONE_SCHEMA, *SCHEMA_LISTS, *SCHEMA_MAPS)
    return any(schema.get(name) not in (None, {}, []) for name in names)


def _unenforced(where: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keywords of one schema that would not be enforced, and why.

    Raises:
        ValueError: it is no schema, or what it refers to would not be clear.
    """
    for name, value in schema.items():
        if name in ASSERTIONS:
            check, wanted = ASSERTIONS[name]
            if check(value):
                continue
            reason = f"{where}/{name} is {repr(value)[:80]}; it must be {wanted}"
            if name not in _VALID or not _VALID[name](value):
                raise ValueError(reason)
            yield name, reason
        elif name == "$schema":
            if not isinstance(value, str) or value.removesuffix("#") not in DIALECTS:
                raise ValueError(f"{where}/$schema is {value!r}; use one of {', '.join(DIALECTS)}")
        elif name == "$id" and where != "#":
            raise ValueError(f"{where} has {name!r}, which only the whole schema may have")
        elif name not in (*ANNOTATIONS, *ROOT_ONLY, *ENFORCED):
            hint = HINTS.get(name, f"what is supported: {', '.join(ENFORCED)}")
            yield name, f"{where} has the keyword {name!r}, which is not supported; {hint}"
    yield from _counts_of_properties(where, schema)
    yield from _patterns(where, schema)


def _patterns(where: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a pattern that would not be enforced.

    Raises:
        ValueError: it is one of names; what these may have cannot be told without it.
    """
    named = schema.get("patternProperties", {})
    for pattern in named if isinstance(named, dict) else []:
        if reason := _why_unwritable(pattern):
            raise ValueError(f"{where} has the pattern {pattern[:80]!r}: {reason}")
    if "pattern" in schema and (reason := _why_unwritable(schema["pattern"])):
        yield "pattern", f"{where} has the pattern {schema['pattern'][:80]!r}: {reason}"


def _why_unwritable(pattern: str) -> str | None:
    try:
        writable(pattern)
    except ValueError as error:
        return str(error)
    return None


def _counts_of_properties(where: str, schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield counts of properties that would not be enforced.

    A name that comes twice would be counted twice, and the compiler counts no optional ones.
    """
    least, named = schema.get("minProperties", 0), schema.get("properties", {})
    required = set(schema.get("required", ()))
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if least > 1 and not closed and least > len(required):
        yield (
            "minProperties",
            f"{where}/minProperties is {least}, with names that the schema does not list; set "
            "additionalProperties to false without patternProperties, or use required",
        )
    if isinstance(named, dict) and not named.keys() <= required:
        counts = ["minProperties"] if least else []
        counts += ["maxProperties"] if "maxProperties" in schema else []
        for name in counts:
            yield (
                name,
                f"{where} has {name} beside optional properties, which are not counted; make them "
                "required, or remove it",
            )


def _let_through(schemas: Iterable[Mapping[str, Any]]) -> str | None:
    """Return bounds that the compiler does not keep where they meet; None: it keeps all.

    It lets an exclusive bound through that is whole, if the other one is less than 1 away.
    """
    bounds: dict[str, set[Any]] = {name: set() for name in BOUNDS}
    for schema in schemas:
        for name, found in bounds.items():
            if name in schema:
                found.add(schema[name])
    for name in ("maximum", "exclusiveMaximum"):
        fractions = {floor(high): high for high in bounds[name] if high != int(high)}
        for low in bounds["exclusiveMinimum"] & fractions.keys():
            return f"exclusiveMinimum {low} and {name} {fractions[low]}"
    for name in ("minimum", "exclusiveMinimum"):
        fractions = {ceil(low): low for low in bounds[name] if low != int(low)}
        for high in bounds["exclusiveMaximum"] & fractions.keys():
            return f"{name} {fractions[high]} and exclusiveMaximum {high}"
    return None


def _check_merged(schemas: Mapping[str, Any]) -> None:
    """Refuse numbers that would be too much for the compiler where they meet in one value.

    The remainders of all its multiples are states of the grammar, and its bounds become one.
    """
    for group in values(schemas):
        numbers = [one for one in group if one.get("type") != "integer"]
        if found := _let_through(numbers):
            raise ValueError(
                f"one value has to keep {found}; an exclusive bound that is whole has to be at "
                "least 1 from the other one. Choose another number, such as one with a fraction"
            )
        given = [one["multipleOf"] for one in group if "multipleOf" in one]
        multiples = {Fraction(repr(one)) for one in given}
        if len(multiples) < 2:
            continue
        if reduce(_common_multiple, multiples) * 10 ** max(map(_places, given)) > MAX_MULTIPLE:
            told = ", ".join(sorted(str(one) for one in given))[:80]
            raise ValueError(
                f"one value may have to be a multiple of all of {told}, whose common multiple is "
                f"above {MAX_MULTIPLE} without its point; use smaller ones, or fewer"
            )


def _places(value: float) -> int:
    return max(0, -int(Decimal(repr(value)).as_tuple().exponent))


def _common_multiple(one: Fraction, other: Fraction) -> Fraction:
    return Fraction(lcm(one.numerator, other.numerator), gcd(one.denominator, other.denominator))
