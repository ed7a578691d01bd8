"""Schemas as everyday generators write them: texts fit what was given, in its own dialect."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
from jsonschema import Draft4Validator, Draft7Validator, Draft202012Validator
from pydantic import AnyUrl, Base64Bytes, BaseModel, Field, Json, SecretStr

from onnxport.errors import RequestError
from onnxport.serving.structured.generators import rewritten
from onnxport.serving.structured.schema import MAX_EXACT
from onnxport.serving.structured.spec import StructuredOutputs
from tests.tiers import every

from .structured import accepts, assert_valid, compiled, write

DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
EMAIL = (  # zod's
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]"
    r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"  # pydantic's
DECIMAL_OF_DIGITS = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,6}|(?=[\d.]{1,9}0*$)\d{0,6}\.\d{0,2}0*$)"


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


def just(name: str, **more: Any) -> dict[str, Any]:
    """An object of one property, such as Rust's variants are."""
    return {
        **of(**{name: {"type": "null"}}),
        "required": [name],
        "additionalProperties": False,
        **more,
    }


@dataclass(frozen=True)
class Case:
    """A schema, and JSON that fits it and does not."""

    schema: Any
    right: list[str]
    wrong: list[str] = field(default_factory=list)
    validator: Any = Draft202012Validator


CASES: dict[str, Case] = {
    "OpenAPI's formats of numbers": Case(
        of(
            a={"type": "integer", "format": "int32"},
            b={"type": "number", "format": "double"},
            c={"type": ["integer", "null"], "format": "regex"},
        ),
        ['{"a":1,"b":0.5,"c":null}'],
        ['{"a":1.5}', '{"b":"x"}'],
    ),
    "OpenAPI's formats of texts": Case(
        {"type": "string", "format": "password", "maxLength": 3}, ['"abc"'], ['"abcd"', "1"]
    ),
    "a format without a type": Case({"format": "int64"}, ["1", '"x"']),
    "OpenAPI's annotations": Case(
        of(a={"type": "integer", "example": 1, "xml": {"name": "x"}, "x-go-name": {"not": 1}})
        | {"externalDocs": {"url": "x"}, "x-order": ["a"]},
        ['{"a":2}'],
        ['{"a":"2"}'],
    ),
    "OpenAPI's nullable: false": Case({"type": "string", "nullable": False}, ['"a"'], ["null"]),
    "uniqueItems: false": Case(
        {"type": "array", "items": {"const": 1}, "uniqueItems": False}, ["[1,1]"], ["[2]"]
    ),
    "content": Case(
        {"type": "string", "contentEncoding": "base64", "contentMediaType": "text/html"}
        | {"contentSchema": {"not": {"a": 1}}},
        ['"a"'],
        ["1"],
    ),
    "exclusive bounds of draft 4": Case(
        {**DRAFT_4, "type": "integer", "minimum": 1, "exclusiveMinimum": True}
        | {"maximum": 3, "exclusiveMaximum": False, "id": "http://x/y"},
        ["2", "3"],
        ["1", "4"],
        Draft4Validator,
    ),
    "places of a tuple": Case(
        {**DRAFT_7, "type": "array", "items": [{"type": "string"}, {"const": 1}], "minItems": 2}
        | {"additionalItems": False},
        ['["a",1]'],
        ["[1,1]", '["a"]', '["a",1,1]'],
        Draft7Validator,
    ),
    "the rest of a tuple": Case(
        {"type": "array", "items": [{"type": "string"}], "additionalItems": {"const": 1}},
        ['["a",1,1]'],
        ['["a","a"]'],
        Draft7Validator,
    ),
    "additionalItems beside items": Case(
        {"type": "array", "items": {"const": 1}, "additionalItems": False}, ["[1,1]"], ["[2]"]
    ),
    "references to places of a tuple": Case(
        {
            **DRAFT_7,
            **of(
                a={
                    "type": "array",
                    "items": [of(n={"const": 1}), {"type": "array", "items": [{"const": 2}]}],
                },
                b={"$ref": "#/properties/a/items/0/properties/n"},
                c={"$ref": "#/properties/a/items/1/items/0"},
                d={"$ref": "#/properties/a/items/0"},
            ),
        },
        ['{"a":[{"n":1},[2]],"b":1,"c":2,"d":{"n":1}}'],
        ['{"b":2}', '{"c":1}', '{"d":{"n":2}}'],
        Draft7Validator,
    ),
    "a reference to the name of the whole": Case(
        {"$id": "T0", **of(a={"type": "array", "items": {"$ref": "T0"}}), "required": ["a"]}
        | {"additionalProperties": False},
        ['{"a":[{"a":[]}]}'],
        ['{"a":[{}]}'],
    ),
    "a reference below the name of the whole": Case(
        {"$id": "http://x/y", "$ref": "http://x/y#/$defs/a", "$defs": {"a": {"const": 1}}},
        ["1"],
        ["2"],
    ),
    "an id of a part": Case(
        {"$ref": "#/$defs/a", "$defs": {"a": {"id": "a", "const": 1}}}, ["1"], ["2"]
    ),
    "a dialect of a part": Case(of(a={**DRAFT_7, "type": "null"}), ['{"a":null}'], ['{"a":1}']),
    "never": Case(
        {**of(a={"not": {}}, b={"not": False, "const": 1}), "additionalProperties": {"not": {}}},
        ["{}", '{"b":1}'],
        ['{"a":1}', '{"c":1}'],
    ),
    "never among alternatives": Case(
        {"anyOf": [{"not": {"description": "none"}}, {"type": "string"}]}, ['"a"'], ["1"]
    ),
    "no unevaluated properties": Case(
        {**of(a={"const": 1}), "unevaluatedProperties": {"not": {}}}, ['{"a":1}'], ['{"b":1}']
    ),
    "no unevaluated items": Case(
        {"type": "array", "prefixItems": [{"const": 1}], "unevaluatedItems": False},
        ["[1]"],
        ["[1,1]"],
    ),
    "unevaluated where nothing is": Case(
        {**of(a={}), "additionalProperties": {"const": 1}, "unevaluatedProperties": False},
        ['{"b":1}'],
        ['{"b":2}'],
    ),
    "unevaluated may be anything": Case(
        {"allOf": [of(a={"const": 1})], "unevaluatedProperties": {}}, ['{"b":1}'], ['{"a":2}']
    ),
    "names are texts": Case(
        {
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"const": 1},
        },
        ['{"a":1}'],
        ['{"a":2}'],
    ),
    "names that are listed": Case(
        {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b/c", "a"]}}
        | {"additionalProperties": {"type": "array", "items": {"const": 1}}, "required": ["a"]},
        ['{"a":[1],"b/c":[1]}'],
        ['{"b/c":[1]}', '{"a":[2]}', '{"a":[1],"b/c":[2]}', '{"a":[],"d":[]}'],
    ),
    "names that are listed elsewhere": Case(
        {"propertyNames": {"$ref": "#/$defs/a"}, "additionalProperties": {"$ref": "#/$defs/n"}}
        | {"type": "object", "$defs": {"a": {"$ref": "#/$defs/b"}, "n": {"const": 1}}}
        | {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"enum": ["x", 1]}, "n": {"const": 1}}},
        ["{}", '{"x":1}'],
        ['{"x":2}', '{"y":1}'],
    ),
    "some of the names that are listed": Case(
        {**of(a={"const": 1}, b={"const": 2}), "propertyNames": {"enum": ["b", "c"]}}
        | {"additionalProperties": False},
        ["{}", '{"b":2}'],
        ['{"a":1}', '{"c":1}', '{"b":1}'],
    ),
    "a reference to what names have": Case(
        of(
            a={
                "type": "object",
                "propertyNames": {"const": "x"},
                "additionalProperties": of(n={"const": 1}),
            },
            b={"$ref": "#/properties/a/additionalProperties/properties/n"},
        ),
        ['{"a":{"x":{"n":1}},"b":1}'],
        ['{"b":2}', '{"a":{"x":{"n":2}}}', '{"a":{"y":{}}}'],
    ),
    "a reference to a property that names leave out": Case(
        {**of(a={"const": 1}, b={"$ref": "#/properties/a"}), "propertyNames": {"enum": ["b"]}},
        ['{"b":1}', "{}"],
        ['{"b":2}', '{"a":1}'],
    ),
    "references through what names leave out": Case(
        {
            **of(
                **{"a/b": {"type": "array", "items": of(n={"const": 1})}, "c": {"const": 2}},
                d={"$ref": "#/properties/a~1b/items"},
                e={"$ref": "#/properties/c"},
                f={"$ref": "#/$defs/0"},
                g={"$ref": "#/properties/a~1b/items/properties/n"},
            ),
            "$defs": {"0": {"const": 3}, "2": {}},
            "propertyNames": {"enum": ["d", "e", "f", "g"]},
        },
        ['{"d":{"n":1},"e":2,"f":3,"g":1}'],
        ['{"d":{"n":2}}', '{"e":1}', '{"f":2}', '{"g":2}', '{"c":2}'],
    ),
    "names leave out what names are left out of": Case(
        {
            **of(
                a={**of(b={"const": 1}, c={"const": 2}), "propertyNames": {"const": "c"}},
                d={"$ref": "#/properties/a/properties/b"},
                e={"$ref": "#/properties/a"},
            ),
            "propertyNames": {"enum": ["d", "e"]},
        },
        ['{"d":1,"e":{"c":2}}'],
        ['{"d":2}', '{"e":{"b":1}}', '{"e":{"c":1}}', '{"a":{}}'],
    ),
    "references to what names do not have": Case(
        of(
            a={
                **of(x={}),
                "propertyNames": {"const": "x"},
                "additionalProperties": {"items": {"const": 1}},
            },
            b={"$ref": "#/properties/a/%61dditionalProperties/items"},
            c={"$ref": "#/properties/a/additionalProperties"},
        ),
        ['{"a":{"x":[2]},"b":1,"c":[1]}'],
        ['{"b":2}', '{"c":[2]}', '{"a":{"y":1}}'],
    ),
    "names that two keywords list": Case(
        of(
            a={"type": "object", "propertyNames": {"const": "#a/ b%", "enum": ["x", "#a/ b%"]}},
            b={"type": "object", "propertyNames": {"const": "a", "enum": ["b", 1]}},
        ),
        ['{"a":{"#a/ b%":1},"b":{}}'],
        ['{"a":{"x":1}}', '{"b":{"a":1}}', '{"b":{"b":1}}'],
    ),
    "references to names with signs": Case(
        of(
            a={"type": "object", "propertyNames": {"enum": ["#x/ %41", "y"]}}
            | {"additionalProperties": of(n={"const": 1})},
            b={"$ref": "#/properties/a/additionalProperties/properties/n"},
        ),
        ['{"a":{"#x/ %41":{"n":1},"y":{"n":1}},"b":1}'],
        ['{"b":2}', '{"a":{"y":{"n":2}}}', '{"a":{"#x/ %41":{"n":2}}}'],
    ),
    "names of a pattern": Case(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[a/]+$"},
            "additionalProperties": {"const": 1},
        },
        ['{"a":1,"a/":1}'],
        ['{"b":1}', '{"a":2}'],
    ),
    "names of a length": Case(
        {"type": "object", "propertyNames": {"minLength": 1, "maxLength": 2}},
        ['{"a":1,"ab":2}'],
        ['{"":1}', '{"abc":1}'],
    ),
    "names of dates": Case(
        {"type": "object", "propertyNames": {"type": "string", "format": "date"}},
        ['{"2024-02-29":1,"2000-02-29":1,"2023-12-31":1,"0010-01-10":1}'],
        [
            *('{"2023-02-29":1}', '{"1900-02-29":1}', '{"2023-04-31":1}', '{"0000-01-01":1}'),
            *('{"2023-00-10":1}', '{"2023-13-10":1}', '{"2023-01-00":1}', '{"0000-02-29":1}'),
            '{"a":1}',
        ],
    ),
    "bounds of 64 bits": Case(
        {"type": "integer", "minimum": -(2**63), "exclusiveMaximum": 2**64},
        [str(-MAX_EXACT), str(MAX_EXACT - 1)],
        [str(2**64)],
    ),
    "bounds of a number": Case(
        {"type": "number", "minimum": -1.7976931348623157e308, "maximum": 2**63},
        ["0.5", "-7.5"],
        ["1e99"],
    ),
    "a length without end": Case({"type": "string", "maxLength": 2**64 - 1}, ['"abc"'], ["1"]),
    "a pattern that looks ahead": Case(
        {"type": "string", "pattern": r"^(?=.*[A-Z])(?=.*\d)(?!.*\s).{4,}$"},
        ['"abC1"', '"1Cab"'],
        ['"abc1"', '"abCd"', '"aC1"', '"aC 1"'],
    ),
    "zod's e-mail address": Case(
        {"type": "string", "format": "email", "pattern": EMAIL},
        ['"a.b@example.com"'],
        ['".a@example.com"', '"a..b@example.com"', '"a.@example.com"', '"a@b"'],
    ),
    "pydantic's decimal": Case(
        {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]},
        ["1.5", '"-01.50"', '".5"'],
        ['"-."', '""', '"1.5.1"', "null"],
    ),
    "pydantic's decimal of some digits": Case(  # its number alone
        {"anyOf": [{"type": "string", "pattern": DECIMAL_OF_DIGITS}, {"type": "number"}]},
        ["1.5"],
        ['"x"', "null"],
    ),
    "Rust's variants": Case(
        {"oneOf": [{"type": "string", "enum": ["A"]}, just("B"), just("C")]},
        ['"A"', '{"B":null}', '{"C":null}'],
        ['{"B":null,"C":null}', "{}"],
    ),
    "Rust's variants that are referred to": Case(
        {"oneOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"}]}
        | {"$defs": {"b": just("B"), "c": just("C")}},
        ['{"B":null}', '{"C":null}'],
        ['{"B":null,"C":null}', "{}"],
    ),
    "null or what is referred to": Case(
        {"oneOf": [{"type": "null"}, {"$ref": "#/definitions/x"}]}
        | {"definitions": {"x": of(a={"const": 1})}},
        ["null", '{"a":1}'],
        ['{"a":2}', "1"],
    ),
    "all names fit": Case(
        {"type": "object", "patternProperties": {"^(.*)$": {"const": 1}}}, ['{"a":1}'], ['{"a":2}']
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_generators_write(name: str) -> None:
    case = CASES[name]
    before = json.dumps(case.schema)
    grammar = compiled(StructuredOutputs(json=case.schema))
    assert json.dumps(case.schema) == before
    for text in case.right:
        assert accepts(grammar, text), text
        assert_valid(case.schema, text, case.validator)
    for text in case.wrong:
        assert not accepts(grammar, text), text
    written = [write(grammar.sequence(3), seed, patience=seed * 4) for seed in range(5)]
    assert any(written)
    for text in filter(None, written):
        assert_valid(case.schema, text, case.validator)


@pytest.mark.parametrize("name", every(4, CASES))
def test_what_is_rewritten_stays_so(name: str) -> None:
    once = rewritten(CASES[name].schema)[0]
    assert rewritten(once)[0] == once


def test_what_all_names_have_is_written_once() -> None:
    rest = {"enum": ["n" * 1000]}
    names = {"enum": [str(number) for number in range(100)]}
    schema = {"propertyNames": names, "additionalProperties": rest}
    assert len(json.dumps(rewritten(schema)[0])) < 5000
    assert accepts(compiled(StructuredOutputs(json=schema)), f'{{"99":"{"n" * 1000}"}}')


def test_values_are_never_changed() -> None:
    values = [{"x-a": 1, "format": "int32", "title": "x"}, [{"not": {}}], 1]
    schema = {"enum": values, "properties": {"title": {"const": values}}}
    assert rewritten(schema)[0] == schema
    with pytest.raises(RequestError, match=r"#/const is 18446744073709551615"):
        StructuredOutputs(json={"const": 2**64 - 1})


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"enum": ["a"]}, "patternProperties": {"^a": {}}},
        {"propertyNames": {"pattern": "^a"}, "properties": {"a": {}}},
        {"propertyNames": {"pattern": "^a", "minLength": 1}},
        {"propertyNames": {"minLength": -1}},
        {"propertyNames": {"type": "integer"}},
        {"propertyNames": {"format": "regex"}},
        {"propertyNames": {"$ref": "#/propertyNames"}},
        {"propertyNames": {"$ref": "http://x"}},
        {"propertyNames": False},
        {"propertyNames": {"const": "a", "enum": {"a": 1}}},
        {**of(a={}, b={"$ref": "#/properties/a"}), "propertyNames": {"const": "b"}, "$defs": []},
        {**of(a={}, b={"$ref": "#/properties/c"}), "propertyNames": {"const": "b"}},
        {"unevaluatedProperties": False, "allOf": [{"properties": {"a": {}}}]},
        {"unevaluatedProperties": False, "$ref": "#/$defs/a", "$defs": {"a": {}}},
        {"unevaluatedItems": False, "anyOf": [{"prefixItems": [{}]}, {}]},
        {"not": {"x-guidance": {}}},
        {"x-guidance": {"lenient": True}},
        {"anyOf": [{"type": "null"}, {"type": "string", "pattern": DECIMAL_OF_DIGITS}]},
    ],
)
def test_what_cannot_be_said_in_other_words_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError, match="cannot be enforced"):
        StructuredOutputs(json=schema)


def test_what_names_leave_out_and_nothing_refers_to_is_gone() -> None:
    rest = {"propertyNames": {"enum": ["x"]}, "additionalProperties": {"type": "string"}}
    schema = of(a={**of(x={"type": "integer"}), **rest}, b={"additionalProperties": {}})
    grammar = compiled(StructuredOutputs(json=schema))
    assert accepts(grammar, '{"a":{"x":1}}')
    assert not accepts(grammar, '{"a":{"y":"a"}}')
    assert "$defs" not in json.loads(StructuredOutputs(json=schema).text)["properties"]["a"]


NUMBER_OR_DIGITS = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL_OF_DIGITS}]}


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [NUMBER_OR_DIGITS, {"type": "string"}]},
        {"oneOf": [{"$ref": "#/$defs/d"}, {"type": "string"}], "$defs": {"d": NUMBER_OR_DIGITS}},
        of(a={"oneOf": [of(n=NUMBER_OR_DIGITS), of(n={"type": "string"})]}),
    ],
)
def test_a_text_that_is_left_out_would_fit_another_alternative(schema: Any) -> None:
    for strict in (None, True):
        with pytest.raises(RequestError, match="a number or its text"):
            StructuredOutputs(json=schema, strict=strict)
    grammar = compiled(StructuredOutputs(json=schema, strict=False))
    assert accepts(grammar, '{"a":{"n":1}}' if "properties" in schema else "1")


def test_a_text_is_left_out_among_alternatives_that_are_apart() -> None:
    both = [
        {**of(kind={"const": kind}, n=NUMBER_OR_DIGITS), "required": ["kind", "n"]}
        for kind in ("a", "b")
    ]
    for strict in (None, True):
        grammar = compiled(StructuredOutputs(json={"oneOf": both}, strict=strict))
        assert accepts(grammar, '{"kind":"b","n":1}')
        assert not accepts(grammar, '{"kind":"b","n":"x"}')


def test_a_whole_class_of_pydantic() -> None:
    class Kind(Enum):
        A = "a"
        B = "b"

    class Cat(BaseModel):
        kind: Literal["cat"]
        lives: Annotated[int, Field(ge=0, lt=10)]

    class Dog(BaseModel):
        kind: Literal["dog"]
        name: str | None = None

    class Everything(BaseModel):
        price: Decimal
        at: datetime
        by_day: dict[date, Annotated[int, Field(le=2**63 - 1)]]
        by_kind: dict[Kind, bool]
        by_id: dict[UUID, None]
        some: dict[Literal["x", "y"], Cat]
        named: dict[Annotated[str, Field(min_length=1)], None]
        secret: SecretStr
        data: Base64Bytes
        url: AnyUrl
        told: Json[list[int]]
        pair: tuple[int, Literal[True]]
        pet: Annotated[Cat | Dog, Field(discriminator="kind")]
        share: Annotated[float, Field(gt=0, lt=1, examples=[0.5], json_schema_extra={"example": 1})]

    schema = Everything.model_json_schema()
    for strict in (None, True):
        grammar = compiled(StructuredOutputs(json=schema, strict=strict))
        texts = [write(grammar.sequence(3), seed, 1500, patience=0) for seed in range(4)]
        assert any(texts)
        for text in filter(None, texts):
            assert_valid(schema, text)
