"""Schemas without a type are of the one that their keywords speak of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onnxport.serving.structured.spec import StructuredOutputs

from .structured import accepts, compiled

OBJECT, LIST = {"type": "object"}, {"type": "array"}
NULL = {"type": "null"}
MAYBE = {"type": ["object", "null"]}
NAME = {"properties": {"name": {"type": "string"}}}
NEEDS = {"required": ["name"]}
ONE_OF_ONE = {"anyOf": [NEEDS]}
KINDS = [
    {"type": "object", "properties": {"kind": {"const": one}}, "required": ["kind"]}
    for one in ("cat", "dog")
]


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (NAME, {**NAME, **OBJECT}),
        (NEEDS, {**NEEDS, **OBJECT}),
        ({"additionalProperties": NULL}, {"additionalProperties": NULL, **OBJECT}),
        ({"items": NULL}, {"items": NULL, **LIST}),
        ({"prefixItems": [NAME]}, {"prefixItems": [{**NAME, **OBJECT}], **LIST}),
        (
            {**NAME, "properties": {"in": {"minItems": 1}}},
            {**OBJECT, "properties": {"in": {"minItems": 1, **LIST}}},
        ),
        ({"anyOf": [NAME, NULL]}, {"anyOf": [{**NAME, **OBJECT}, NULL]}),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": NAME}},
            {"$ref": "#/$defs/n", "$defs": {"n": {**NAME, **OBJECT}}},
        ),
        # What the parts of allOf say, the whole says.
        ({"allOf": [NAME, NEEDS]}, {"allOf": [NAME, NEEDS], **OBJECT}),
        (
            {**NAME, "allOf": [{"anyOf": [NEEDS]}]},
            {**NAME, "allOf": [{"anyOf": [NEEDS]}], **OBJECT},
        ),
        # What is referred to from where the type is the same may be alone elsewhere.
        (
            {**OBJECT, "allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": NAME}},
            {**OBJECT, "allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": {**NAME, **OBJECT}}},
        ),
        # A list of names is no schema.
        (
            {"properties": {"properties": {"enum": ["a"]}, "allOf": NAME}},
            {"properties": {"properties": {"enum": ["a"]}, "allOf": {**NAME, **OBJECT}}, **OBJECT},
        ),
    ],
)
def test_the_type_is_that_of_the_keywords(schema: Any, wanted: Any) -> None:
    assert enforced(schema) == wanted


@pytest.mark.parametrize(
    "schema",
    [
        {"additionalProperties": True},
        {"minLength": 2},
        {**NAME, "items": NULL},
        {**NAME, "type": ["object", "null"]},
        {"const": 1, **NEEDS},
        {"allOf": [NAME, {"type": ["object", "null"]}]},
        {"type": ["object", "null"], "anyOf": [NAME, NEEDS]},
        {"type": ["array", "null"], "anyOf": [{"anyOf": [{"minItems": 2}, NULL]}]},
        {**MAYBE, "$ref": "#/$defs/n", "$defs": {"n": NAME}},
        {**MAYBE, "allOf": [{"$ref": "#/$defs/n"}], "$defs": {"n": NAME}},
        {"allOf": [{"$ref": "#/$defs/n"}, MAYBE], "$defs": {"n": {"anyOf": [NAME, NEEDS]}}},
        {"type": "null", "$ref": "#/$defs/m", "$defs": {"n": NAME, "m": {"$ref": "#/$defs/n"}}},
        {**OBJECT, "patternProperties": {"a\nb": {**MAYBE, "allOf": [NAME]}}},
        {"allOf": [NAME, {"const": None}]},
        {"allOf": [NAME, {"items": NULL}]},
        {"properties": {"x": {"oneOf": [{"$ref": "#"}, NULL]}}},
        {"items": {"oneOf": KINDS}},
    ],
)
def test_it_is_not_where_others_may_be_meant(schema: Any) -> None:
    assert enforced(schema) == schema


def test_alternatives_that_are_told_apart_leave_it_so() -> None:
    schema, wanted = {"items": {"oneOf": KINDS}}, {"items": {"anyOf": KINDS}, **LIST}
    for strict in (True, False):
        form = json.loads(StructuredOutputs(json=schema, strict=strict).text)
        assert form.keys() == wanted.keys()
        assert form["type"] == "array"


def test_no_text_comes_for_an_object() -> None:
    form = compiled(StructuredOutputs(json={**NAME, **NEEDS}, strict=False))
    assert accepts(form, '{"name": "x"}')
    assert not any(accepts(form, text) for text in ('"x"', "5", "null", '["name"]', "{}"))


def test_null_comes_where_what_is_referred_to_says_nothing_of_types() -> None:
    reference = {"properties": {"x": {**MAYBE, "allOf": [{"$ref": "#/$defs/n"}]}}}
    form = compiled(StructuredOutputs(json={**reference, "$defs": {"n": NAME}}, strict=False))
    assert accepts(form, '{"x": null}')
    assert accepts(form, '{"x": {"name": "y"}}')
    assert not accepts(form, '{"x": {"name": 5}}')


def test_names_that_need_others_are_those_of_an_object() -> None:
    needing = {**NAME, "dependentRequired": {"name": ["id"]}}
    form = compiled(StructuredOutputs(json=needing, strict=False))
    assert accepts(form, '{"name": "x", "id": 1}')
    assert not any(accepts(form, text) for text in ('"x"', "5", '{"name": "x"}'))


def enforced(schema: Any) -> Any:
    return json.loads(StructuredOutputs(json=schema).text)
