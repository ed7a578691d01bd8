"""Without `strict` what cannot be enforced is left out, nothing else is, and the log says so."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from onnxport.errors import RequestError
from onnxport.serving.http.tool_formats.forced import calls
from onnxport.serving.http.tool_formats.hermes import HERMES
from onnxport.serving.structured.spec import StructuredOutputs

from .structured import accepts, compiled

TEXT = {"type": "string"}


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "onnxport.serving.structured.prepared")


def left_of(schema: Any) -> Any:
    return json.loads(StructuredOutputs(json=schema, strict=False).text)


@pytest.mark.parametrize(
    ("schema", "left", "named"),
    [
        *(
            ({"type": "array", "items": TEXT, name: value}, {"type": "array", "items": TEXT}, name)
            for name, value in {
                "uniqueItems": True,
                "contains": {},
                "not": TEXT,
                "if": {},
                "maxContains": 2,
                "nullable": True,
                "minlength": 3,
                "dependentSchemas": {"a": {"required": ["b"]}},
                "$dynamicRef": "#x",
                "x-guidance": {"lenient": True},
            }.items()
        ),
        ({**TEXT, "format": "regex", "maxLength": 3}, {**TEXT, "maxLength": 3}, "format"),
        ({**TEXT, "pattern": "(?<=a)b", "minLength": 1}, {**TEXT, "minLength": 1}, "pattern"),
        ({**TEXT, "pattern": "a\x01"}, TEXT, "pattern"),
        ({"type": "integer", "minimum": 2**60, "maximum": 2**61}, None, "minimum"),
        ({"type": "integer", "multipleOf": 100_003, "minimum": 1}, None, "multipleOf"),
        ({"const": 2**60, "type": "integer"}, {"type": "integer"}, "const"),
        ({"enum": [1, 2**60], "type": "integer"}, {"type": "integer"}, "enum"),
        ({"type": "object", "minProperties": 2}, {"type": "object"}, "minProperties"),
        (
            {"type": "object", "properties": {"a": {}}, "maxProperties": 3},
            {"type": "object", "properties": {"a": {}}},
            "maxProperties",
        ),
        (
            {"oneOf": [TEXT, TEXT], "anyOf": [TEXT], "allOf": [TEXT]},
            {"anyOf": [TEXT], "allOf": [TEXT, {"anyOf": [TEXT, TEXT]}]},
            "oneOf",
        ),
        (
            {"oneOf": [TEXT, TEXT], "properties": {"oneOf": {"$ref": "#/oneOf/1"}}},
            {"anyOf": [TEXT, TEXT], "properties": {"oneOf": {"$ref": "#/anyOf/1"}}},
            "oneOf",
        ),
        (
            {"oneOf": [{"type": "number"}, {"type": "integer", "minimum": 3}]},
            {"anyOf": [{"type": "number"}, {"type": "integer", "minimum": 3}]},
            "oneOf",
        ),
    ],
)
def test_what_is_left_out(
    schema: Any, left: Any, named: str, caplog: pytest.LogCaptureFixture
) -> None:
    found = left_of(schema)
    if left is None:
        left = {name: one for name, one in schema.items() if name != named}
        left |= {"maximum": 2**53} if "maximum" in left else {}
    assert found == left
    [record] = caplog.records
    assert record.levelno == logging.INFO  # it is the client's affair
    assert f"'#/{named}'" in record.getMessage()
    assert "structured_outputs.json is enforced but for" in record.getMessage()
    assert compiled(StructuredOutputs(json=schema, strict=False))
    with pytest.raises(RequestError):
        compiled(StructuredOutputs(json=schema))
    with pytest.raises(RequestError):
        compiled(StructuredOutputs(json=schema, strict=True))


def test_all_else_is_enforced(caplog: pytest.LogCaptureFixture) -> None:
    items = {"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True, "maxItems": 2}
    schema = {
        "type": "object",
        "properties": {"a/b": {"$ref": "#/$defs/t"}},
        "required": ["a/b"],
        "additionalProperties": False,
        "$defs": {"t": items},
    }
    grammar = compiled(StructuredOutputs(json=schema, strict=False, param="x\ny"))
    for text in ('{"a/b":["a","b"]}', '{"a/b":["a","a"]}'):
        assert accepts(grammar, text)
    for text in ('{"a/b":["c"]}', "{}", '{"a/b":["a","b","a"]}', '{"a/b":[],"c":1}'):
        assert not accepts(grammar, text)
    [record] = caplog.records
    assert "'#/$defs/t/uniqueItems'" in record.getMessage()


def test_what_is_enforced_in_full_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    apart = [{"type": "null"}, {"$ref": "#/$defs/a"}, {"const": "x"}]
    schema = {"oneOf": apart, "$defs": {"a": {"type": "integer", "format": "int32"}}, "x-a": 1}
    assert compiled(StructuredOutputs(json=schema, strict=False))
    assert not caplog.records


def test_references_through_one_of_go_along() -> None:
    inner = {"oneOf": [{"const": 1}, {"const": 1.0}], "anyOf": [{}, {}]}
    schema = {
        "oneOf": [{"properties": {"~a/oneOf/0 ": inner}}, {"type": "object"}],
        "$defs": {
            "oneOf": TEXT,
            "b": {"$ref": "#/oneOf/0/properties/~0a~1oneOf~10%20/oneOf/1"},
            "c": {"$ref": "#/$defs/oneOf"},
        },
    }
    left = left_of(schema)
    assert left["anyOf"][0]["properties"]["~a/oneOf/0 "] == {
        "anyOf": [{}, {}],
        "allOf": [{"anyOf": inner["oneOf"]}],
    }
    where = "#/anyOf/0/properties/~0a~1oneOf~10%20/allOf/0/anyOf/1"
    assert [left["$defs"][name]["$ref"] for name in "bc"] == [where, "#/$defs/oneOf"]
    assert compiled(StructuredOutputs(json=schema, strict=False))


def test_one_request_writes_one_line(caplog: pytest.LogCaptureFixture) -> None:
    one = {"properties": {"a": {"uniqueItems": True}}}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "parameters": one}} for n in range(300)
    ]
    calls(tools, HERMES, several=False)
    [record] = caplog.records
    told = record.getMessage()
    assert told.startswith("tools is enforced but for 'tools.0.function.parameters#/properties/a/u")
    assert "and 295 more" in told
    assert len(told) < 1000


def test_names_of_a_client_do_not_break_the_log(caplog: pytest.LogCaptureFixture) -> None:
    properties = {f"a\n{'n' * 500}{number}": {"uniqueItems": True} for number in range(9)}
    left_of({"properties": properties})
    [record] = caplog.records
    told = record.getMessage()
    assert "\n" not in told
    assert "and 4 more" in told
    assert len(told) < 1200


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "text"},
        {"enum": []},
        {"items": 1},
        {"required": "a"},
        {"minimum": "1"},
        {"multipleOf": 0},
        {"format": 1},
        {"pattern": 1},
        {"minLength": -1},
        {"$ref": "#/$defs/missing"},
        {"$ref": "http://x"},
        {"$ref": "#/not", "not": {"type": "string"}},
        {"$schema": "http://x"},
        {"items": {"$id": "x"}},
        {"patternProperties": {"(?<=a)b": {}}},
        {"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]},
    ],
)
def test_what_is_no_schema_is_refused_all_the_same(schema: Any) -> None:
    with pytest.raises(RequestError, match="cannot be enforced"):
        StructuredOutputs(json=schema, strict=False)
