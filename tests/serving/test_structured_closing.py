"""Objects that say nothing of further properties have none, where that is asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from onnxport.errors import RequestError
from onnxport.serving.structured.spec import StructuredOutputs

from .structured import accepts, assert_valid, compiled

A: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: Any = {"type": "object", "properties": {"b": {"type": "integer"}}}
NULL = {"type": "null"}


def closed(schema: Any) -> Any:
    return {**schema, "additionalProperties": False}


def enforced(schema: Any, **how: bool) -> Any:
    return json.loads(StructuredOutputs(json=schema, **how).text)


@pytest.mark.parametrize(
    ("schema", "wanted"),
    [
        (A, closed(A)),
        ({"type": "object"}, {"type": "object"}),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "additionalProperties": NULL}, {**A, "additionalProperties": NULL}),
        ({"patternProperties": {"^x": A}}, closed({"patternProperties": {"^x": closed(A)}})),
        (
            {"properties": {"o": A}, "additionalProperties": B},
            {"properties": {"o": closed(A)}, "additionalProperties": closed(B)},
        ),
        ({"type": "array", "items": A}, {"type": "array", "items": closed(A)}),
        ({"anyOf": [A, B, NULL]}, {"anyOf": [closed(A), closed(B), NULL]}),
        ({"allOf": [A], "title": "x"}, {"allOf": [closed(A)]}),
        ({"allOf": [A, {"type": "object"}]}, {"allOf": [closed(A), {"type": "object"}]}),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"n": {"$ref": "#/$defs/n"}}}}},
            {
                "$ref": "#/$defs/n",
                "$defs": {"n": closed({"properties": {"n": {"$ref": "#/$defs/n"}}})},
            },
        ),
        (
            {"allOf": [closed(A), {**B, "additionalProperties": True}]},
            {"allOf": [closed(A), {**B, "additionalProperties": True}]},
        ),
    ],
)
def test_objects_are_closed(schema: Any, wanted: Any) -> None:
    for how in ({"disable_additional_properties": True}, {"strict": True}):
        assert enforced(schema, **how) == wanted
    open_ones = enforced(schema, disable_additional_properties=False)
    assert open_ones == {name: one for name, one in schema.items() if name != "title"}


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"allOf": [A, B]}, "# tells of one object in several places"),
        ({**A, "anyOf": [B, NULL]}, "# tells of one object in several places"),
        ({**A, "oneOf": [B]}, "# tells of one object in several places"),
        ({**A, "$ref": "#/$defs/b", "$defs": {"b": B}}, "# tells of one object"),
        ({"allOf": [{"anyOf": [NULL, A]}, {"$ref": "#/$defs/b"}], "$defs": {"b": B}}, "# tells"),
        ({"allOf": [A, {"required": ["b"]}]}, "# tells of one object"),
        ({"allOf": [A, {"const": {"b": 1}}]}, "# tells of one object"),
        (
            {"allOf": [{"items": A}, {"items": B}], "type": "array"},
            "# tells of one object",
        ),
        ({"properties": {"x": {"allOf": [A, B]}}}, "#/properties/x tells of one object"),
        ({**A, "required": ["a", "b"]}, "# requires 'b', which it does not list"),
        (
            {"patternProperties": {"^x": {**A, "minProperties": 2, "required": ["a", "b"]}}},
            "#/patternProperties/^x requires 'b'",
        ),
        ({**A, "required": ["a"], "minProperties": 1, "enum": [{"a": 1, "b": 2}]}, "whole values"),
    ],
)
def test_what_cannot_be_closed(schema: Any, where: str) -> None:
    """It is refused where it was asked for in so many words, and stays as it is otherwise."""
    with pytest.raises(RequestError, match="cannot be disabled there") as caught:
        StructuredOutputs(json=schema, disable_additional_properties=True)
    assert where in str(caught.value)
    left = enforced(schema, strict=True)
    for one in (left, left.get("properties", {}).get("x", left)):
        assert "additionalProperties" not in one or one is left
    assert compiled(StructuredOutputs(json=schema, strict=True))


def test_an_object_asks_for_more_properties_than_it_lists() -> None:
    schema = {"properties": {}, "minProperties": 1}
    assert enforced(schema, strict=True) == schema
    with pytest.raises(RequestError, match="asks for 1 properties, and lists fewer"):
        StructuredOutputs(json=schema, disable_additional_properties=True)


def test_parts_beside_what_cannot_be_closed_are() -> None:
    schema = {"properties": {"x": {"allOf": [A, B]}, "y": A, "z": {"$ref": "#/properties/x"}}}
    found = enforced(schema, strict=True)
    assert found == closed({"properties": {**schema["properties"], "y": closed(A)}})
    grammar = compiled(StructuredOutputs(json=schema, strict=True))
    assert accepts(grammar, '{"x":{"a":1,"b":2},"y":{"a":1}}')
    assert not accepts(grammar, '{"y":{"b":1}}')


def test_definitions_are_of_what_refers_to_them() -> None:
    among = [{**one, "additionalProperties": True} for one in (A, B)]
    schema = {"allOf": among, "$defs": {"unused": A}}
    found = enforced(schema, disable_additional_properties=True)
    assert found == {"allOf": among, "$defs": {"unused": closed(A)}}


def test_what_is_closed_fits_the_schema() -> None:
    form = StructuredOutputs(json={"anyOf": [A, B]}, disable_additional_properties=True)
    for text in ('{"a":1}', '{"b":1}', "{}"):
        assert accepts(compiled(form), text)
        assert_valid({"anyOf": [A, B]}, text)
    assert not accepts(compiled(form), '{"c":1}')


def test_it_is_for_json_alone() -> None:
    assert StructuredOutputs(json_object=True, disable_additional_properties=True)
    for name in ("disable_additional_properties", "strict"):
        with pytest.raises(RequestError, match=f"{name} is for json"):
            StructuredOutputs(regex="a", **{name: True})
        with pytest.raises(RequestError, match=f"{name} is 1; it must be true or false"):
            StructuredOutputs(json={}, **{name: 1})
