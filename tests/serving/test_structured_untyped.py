"""Schemas without a type are of the one that their keywords speak of."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onnxport.serving.structured.spec import StructuredOutputs

from .structured import accepts, compiled

OBJECT, LIST = {"type": "object"}, {"type": "array"}
NULL = {"type": "null"}
NAME = {"properties": {"name": {"type": "string"}}}
NEEDS = {"required": ["name"]}
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


def enforced(schema: Any) -> Any:
    return json.loads(StructuredOutputs(json=schema).text)
