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
AB: Any = {**A, "properties": {**A["properties"], **B["properties"]}, "required": ["a", "b"]}
A_OR_AB: Any = {"oneOf": [{**A, "required": ["a"]}, AB]}  # which {"a":1,"b":2} fits twice
NULL = {"type": "null"}
OBJECT: Any = {"type": "object"}
NESTED: Any = {**OBJECT, "properties": {"n": {"$ref": "#/$defs/n"}}}


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
        (
            {**OBJECT, "patternProperties": {"^x": A}},
            closed({**OBJECT, "patternProperties": {"^x": closed(A)}}),
        ),
        (
            {**OBJECT, "properties": {"o": A}, "additionalProperties": B},
            {**OBJECT, "properties": {"o": closed(A)}, "additionalProperties": closed(B)},
        ),
        ({"type": "array", "items": A}, {"type": "array", "items": closed(A)}),
        ({"anyOf": [A, B, NULL]}, {"anyOf": [closed(A), closed(B), NULL]}),
        ({"allOf": [A], "title": "x"}, {"allOf": [closed(A)]}),
        ({"allOf": [A, {"type": "object"}]}, {"allOf": [closed(A), {"type": "object"}]}),
        (
            {"$ref": "#/$defs/n", "$defs": {"n": NESTED}},
            {"$ref": "#/$defs/n", "$defs": {"n": closed(NESTED)}},
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
        ({**A, "patternProperties": {"^x-": {}}, "required": ["z"]}, "# requires 'z'"),
        (
            {"patternProperties": {"^z": NULL}, "required": ["z"], "allOf": [{"type": "object"}]},
            "# requires 'z'",
        ),
        ({"patternProperties": {"^x": False}, "minProperties": 1}, "# asks for 1 properties"),
        (
            {"patternProperties": {"^x": NULL}, "minProperties": 1, "allOf": [{"type": "object"}]},
            "# asks for 1 properties",
        ),
        ({"patternProperties": {"^x": {}}, "enum": [{"y": 1}]}, "# lists whole values"),
        (
            {"properties": {"xa": {**A, "required": ["a"]}}, "patternProperties": {"^x": B}},
            "#/patternProperties/^x tells of one object",
        ),
    ],
)
def test_what_cannot_be_closed(schema: Any, where: str) -> None:
    """It is refused where it was asked for in so many words, and stays as it is otherwise."""
    with pytest.raises(RequestError, match="cannot be disabled there") as caught:
        StructuredOutputs(json=schema, disable_additional_properties=True)
    assert where in str(caught.value)
    left = enforced(schema, strict=True)
    as_it_was = enforced({"anyOf" if n == "oneOf" else n: it for n, it in schema.items()})
    if not where.startswith("# ") and "whole values" not in where:  # the object around it is
        as_it_was = closed(as_it_was)
    assert left == as_it_was
    assert compiled(StructuredOutputs(json=schema, strict=True))


@pytest.mark.parametrize(
    "schema",
    [
        A_OR_AB,
        {"type": "object", "properties": {"x": A_OR_AB}, "additionalProperties": False},
        {"oneOf": [{"$ref": "#/$defs/a"}, AB], "$defs": {"a": A_OR_AB["oneOf"][0]}},
        {"anyOf": [{"type": "null"}, A_OR_AB]},
    ],
)
def test_alternatives_of_which_one_may_fit_stay_open(schema: Any) -> None:
    """What is closed would fit one of them alone, where two fit before."""
    assert enforced(schema, strict=True) == schema
    with pytest.raises(RequestError, match="has oneOf, whose alternatives may exclude each other"):
        StructuredOutputs(json=schema, disable_additional_properties=True)
    for strict in (None, True):
        with pytest.raises(RequestError, match="not visibly exclusive; write anyOf"):
            compiled(StructuredOutputs(json=schema, strict=strict))


def test_alternatives_that_are_apart_are_closed() -> None:
    apart = [
        {**A, "properties": {"kind": {"const": kind}, "a": A}, "required": ["kind"]}
        for kind in ("x", "y")
    ]
    left = enforced({"oneOf": apart}, strict=True)
    inner = {"a": closed(A)}
    assert left == {
        "anyOf": [closed({**one, "properties": one["properties"] | inner}) for one in apart]
    }


def test_names_that_a_pattern_fits_too() -> None:
    """What both say of one member is left open, what nothing else speaks of is not."""
    named = {"xa": {**A, "required": ["a"]}, "ya": A, "xn": {"type": "integer"}}
    schema = {
        "type": "object",
        "properties": named,
        "patternProperties": {"^x": {**B, "type": ["object", "integer"]}, "^z": B},
    }
    left = enforced(schema, strict=True)
    patterned = schema["patternProperties"] | {"^z": closed(B)}
    assert left == closed(
        {**schema, "properties": named | {"ya": closed(A)}, "patternProperties": patterned}
    )
    grammar = compiled(StructuredOutputs(json=schema, strict=True))
    assert accepts(grammar, '{"xa":{"a":1,"b":1}}')
    assert not accepts(grammar, '{"ya":{"b":1}}')


def test_a_class_in_a_class_may_fit_any_name() -> None:
    """Python reads it in another way than the compiler."""
    schema = {
        **OBJECT,
        "properties": {"x": {**A, "required": ["a"]}},
        "patternProperties": {"^[[w-z]]$": {**B, "required": ["b"]}},
    }
    assert enforced(schema, strict=True) == closed(schema)


def test_a_required_name_that_no_pattern_fits_may_come() -> None:
    schema = {**A, "patternProperties": {"^x-": {}}, "required": ["a", "z"]}
    grammar = compiled(StructuredOutputs(json=schema, strict=True))
    assert accepts(grammar, '{"a":1,"z":1}')


def test_an_object_asks_for_more_properties_than_it_lists() -> None:
    schema = {**OBJECT, "properties": {}, "minProperties": 1}
    assert enforced(schema, strict=True) == schema
    with pytest.raises(RequestError, match="asks for 1 properties, and lists fewer"):
        StructuredOutputs(json=schema, disable_additional_properties=True)


def test_parts_beside_what_cannot_be_closed_are() -> None:
    properties = {"x": {"allOf": [A, B]}, "y": A, "z": {"$ref": "#/properties/x"}}
    schema = {**OBJECT, "properties": properties}
    found = enforced(schema, strict=True)
    assert found == closed({**OBJECT, "properties": {**properties, "y": closed(A)}})
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
