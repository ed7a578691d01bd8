"""A random model under a JSON schema writes what it allows; what is not enforced is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, combinations
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from onnxport.errors import RequestError
from onnxport.serving.structured.prepared import prepared
from onnxport.serving.structured.schema import (
    ANNOTATIONS,
    DRAFT_4,
    ENFORCED,
    FORMATS,
    MAX_DEPTH,
    check_schema,
)
from onnxport.serving.structured.spec import StructuredOutputs
from tests.tiers import every

from .instances import Instances
from .schemas import Schemas
from .structured import accepts, assert_valid, compiled, write

SHARE_WITHOUT_END = 0.05  # of texts; a random model may go on for long
SHARE_UNSATISFIABLE = 0.05  # of random schemas


def keywords(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from schema
        yield from (f"format {schema['format']}" for _ in [0] if "format" in schema)
        for value in schema.values():
            yield from keywords(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from keywords(value)


def check_random(seeds: range) -> set[str]:
    """Let a random model write two texts of each random schema; returns the keywords that were."""
    unsatisfiable = unfinished = finished = 0
    used: set[str] = set()
    for seed in seeds:
        schema = Schemas(seed).schema()
        used |= set(keywords(schema))
        try:
            grammar = compiled(StructuredOutputs(json=schema))
        except RequestError as error:
            if "Unsatisfiable" not in str(error):
                raise  # random parts may exclude each other, but nothing may be missing
            unsatisfiable += 1
            continue
        for number, patience in enumerate((5, 50)):
            text = write(grammar.sequence(3), seed * 2 + number, patience=patience)
            if text is None:
                unfinished += 1
            else:
                finished += 1
                assert_valid(schema, text)
    assert unsatisfiable <= SHARE_UNSATISFIABLE * len(seeds)
    assert unfinished <= SHARE_WITHOUT_END * finished
    return used


def test_random_schemas() -> None:
    assert {*ENFORCED} <= check_random(range(120))


@pytest.mark.slow
def test_many_random_schemas() -> None:
    used = check_random(range(1000, 1700))
    assert {*ENFORCED, *(f"format {name}" for name in FORMATS)} <= used


def check_complete(seeds: range) -> int:
    """Let random schemas read values that they allow; returns how many there were.

    Not those of another type than keywords speak of, where no type is asked for.
    """
    number = 0
    for seed in seeds:
        schema = Schemas(seed).schema()
        try:
            grammar = compiled(StructuredOutputs(json=schema))
        except RequestError:
            continue  # see `check_random`
        typed = Draft202012Validator(prepared(schema, "json").schema)
        for value in filter(typed.is_valid, Instances(schema, seed).some(4)):
            text = json.dumps(value, ensure_ascii=False)
            assert accepts(grammar, text), (schema, text)
            number += 1
    return number


def test_what_a_random_schema_allows_can_be_written() -> None:
    assert check_complete(range(120)) > 300


@pytest.mark.slow
def test_what_many_random_schemas_allow_can_be_written() -> None:
    assert check_complete(range(1000, 1700)) > 1750


def test_the_check_can_fail() -> None:
    """The other implementation knows all formats and keywords."""
    assert set(FORMATS) <= set(Draft202012Validator.FORMAT_CHECKER.checkers)
    for schema, text in (
        ({"type": "integer"}, '"a"'),
        ({"format": "date"}, '"2023-02-29"'),
        ({"multipleOf": 0.1}, "0.35"),
        ({"minLength": 2}, '"a"'),
    ):
        with pytest.raises(Exception, match=r"is not|too short"):
            assert_valid(schema, text)


@pytest.mark.parametrize("name", every(3, FORMATS))
def test_formats(name: str) -> None:
    grammar = compiled(StructuredOutputs(json={"type": "string", "format": name}))
    schema = {"format": name}
    texts = [write(grammar.sequence(3), seed, patience=seed % 20) for seed in range(30)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 3  # an e-mail address may go on for ever
    for text in ended:
        assert_valid(schema, text)


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("date", "2024-02-29", "2023-02-29"),
        ("date", "2000-02-29", "1900-02-29"),
        ("date", "2023-02-28", "2023-02-30"),
        ("date", "2023-12-31", "2023-13-01"),
        ("date", "0001-01-10", "0000-01-10"),
        ("date-time", "2024-02-29T23:59:59Z", "2023-02-29T23:59:59Z"),
        ("date-time", "2024-02-29T23:59:59Z", "2024-02-29T23:59:60Z"),
        ("time", "20:20:39+08:00", "20:20:60+08:00"),
        ("uuid", "2eb8aa08-aa98-11ea-b4aa-73b441d16380", "2eb8aa08-aa98-11ea-b4aa-73b441d1638"),
        ("ipv4", "127.0.0.1", "256.0.0.1"),
        ("ipv6", "::ffff:0:1", "1:1:1"),
        ("uri-reference", "", "a b"),
        ("uri-reference", "//u:p@[2001:db8::7]:80/x?y#/z?", "//[2001:db8::7"),
        ("uri-reference", "../a/b:c", "1a:b"),
        ("uri-reference", "mailto:x@y.org", "%7"),
        ("uri-reference", "a(1)!*'%c3%a9", "é"),
        ("uri-template", "/u/{id}/{?q*,n:12}é%20", "/u/{id"),
        ("uri-template", "{+a.b_1}🙂", "{a b}"),
        ("uri-template", "{a,b:9}", "{=a}"),
        ("uri-template", "a=1", "a'1"),
        ("json-pointer", "/a~1b/~0//0 é", "/a~2"),
        ("json-pointer", "", "a"),
        ("relative-json-pointer", "10/a~0", "01/a"),
        ("relative-json-pointer", "0#", "0#/a"),
        ("relative-json-pointer", "3", "-1/a"),
    ],
)
def test_formats_by_example(name: str, right: str, wrong: str) -> None:
    for schema in ({"type": "string", "format": name}, {"anyOf": [{"format": name}]}):
        grammar = compiled(StructuredOutputs(json=schema))
        assert accepts(grammar, json.dumps(right, ensure_ascii=False))
        assert not accepts(grammar, json.dumps(wrong, ensure_ascii=False))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            '{"a":1}',
            '{"\\u0061":"x"}',
        ),
        ({"type": "object", "properties": {"a/b": {"const": 1}}}, '{"a/b":1}', '{"a\\/b":2}'),
        ({"type": "object", "properties": {"a": {}, "b": {}}}, '{"a":1,"b":1}', '{"b":1,"b":1}'),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "string"}}, "minLength": 2}, '"ab"', '"a"'),
        ({"allOf": [{"minimum": 3}, {"type": "integer"}]}, "3", "2"),
        ({"properties": {"a": False}}, '{"b":1}', '{"a":1}'),
        ({"const": 1e15}, "1000000000000000", "1"),
        ({"type": "string", "pattern": "b"}, '"abc"', '"ac"'),
        (True, "[1]", "[1"),
        ({"type": ["null", "boolean"]}, "null", "0"),
        ({"$defs": {"a/b": {"const": 1}}, "$ref": "#/$defs/a~1b"}, "1", "2"),
        ({"$defs": {"a b": {"const": 1}}, "$ref": "#/$defs/a%20b"}, "1", "2"),
        (
            {"properties": {"a": {"const": 1}, "b": {"$ref": "#/properties/a"}}},
            '{"b":1}',
            '{"b":2}',
        ),
        ({"type": "array", "items": {"$ref": "#"}}, "[[],[[]]]", "[1]"),
        ({"pattern": '^[^"]*$', "type": "string"}, r'"a\\b"', r'"a\"b"'),
        ({"pattern": r"^[^\\]*$", "type": "string"}, r'"a\"b"', r'"a\\b"'),
        ({"pattern": '^[^"]+$', "type": "string", "maxLength": 4}, '"ab"', r'"\""'),
        ({"pattern": '^[^\u0000-\u001f"]*$', "type": "string"}, r'"\\"', r'"\""'),
        ({"pattern": r"^[^\]\\-]*$", "type": "string"}, r'"\""', r'"\\"'),
        ({"pattern": r"^[^]\\-]*$", "type": "string"}, r'"\""', '"]"'),
        ({"pattern": r"^[^-\\]*$", "type": "string"}, r'"\""', '"-"'),
        ({"pattern": r"^\P{Po}*$", "type": "string"}, '"ab"', r'"\""'),
        ({"pattern": r"^[^\P{L}]*$", "type": "string"}, '"é"', '"1"'),
        ({"pattern": "^[[:alpha:]]*$", "type": "string"}, '"ab"', '"1"'),
        ({"pattern": "^[\u0000-\u007f]*$", "type": "string"}, r'"\""', '"é"'),
        ({"pattern": "^.*$", "type": "string"}, r'"\"\\"', r'"\n"'),
        ({"pattern": r"^[\u{1F600}-\u{1F64F}]$", "type": "string"}, '"🙂"', '"a"'),
        ({"pattern": "^[\\p{L}\t]+$", "type": "string"}, r'"é\t"', '"1"'),
        ({"pattern": r"^[\s\d]+$", "type": "string"}, r'"1\n"', '"a"'),
        ({"pattern": r"^[^\p{Cc}]*$", "type": "string"}, r'"\"\\"', r'"\n"'),
        ({"pattern": "^[!-~~]*$", "type": "string"}, '"~"', '" "'),
        ({"pattern": "^[--/]*$", "type": "string"}, '"-./"', '"0"'),
        ({"pattern": r"^[^+\-\--]*$", "type": "string"}, '"~"', '"-"'),
        ({"pattern": "^(?![-+~-]).$", "type": "string"}, '"a"', '"-"'),
        ({"pattern": "^[[a]]$", "type": "string"}, '"[]"', '"a"'),  # ] stands behind the class
        ({"pattern": "^[^[a]$", "type": "string"}, '"b"', '"["'),
        ({"pattern": "^[^]$", "type": "string"}, r'"\n"', '""'),  # any character to ECMA-262
        ({"pattern": r"^[^]\[]$", "type": "string"}, '"^"', '"["'),
        ({"pattern": r"^[\b]$", "type": "string"}, r'"\b"', '"b"'),
        ({"pattern": r"^\uD83D\uDE42$", "type": "string"}, '"🙂"', '"a"'),
        ({"pattern": "^.{2}$", "type": "string"}, r'"\t\\"', r'"a\r"'),
        ({"pattern": "^(.)$", "type": "string"}, r'"\""', '"\u2028"'),
        ({"pattern": r"^[.]\.$", "type": "string"}, '".."', '"a."'),
        ({"pattern": r"^(?s:.)$", "type": "string"}, r'"\n"', '"ab"'),
        ({"pattern": r"^\S+$", "type": "string"}, '"aé"', '"\ufeff"'),
        ({"pattern": r"^[^\S]$", "type": "string"}, '"\u2028"', '"\u0085"'),
        ({"pattern": r"^[\s-]$", "type": "string"}, '"-"', '"\u0085"'),
        ({"pattern": r"^[^\s]$", "type": "string"}, '"a"', '"\ufeff"'),
        ({"maxLength": 2.0, "minLength": 1.0, "type": "string"}, '"ab"', '"abc"'),
        ({"maxItems": 1.0, "minItems": 1.0, "type": "array"}, "[1]", "[]"),
        ({"maximum": 1e15, "type": "number"}, "1000000000000000", "1000000000000001"),
        (
            {"maximum": 7788492509897377.0, "type": "number"},
            "7788492509897377.0",
            "7788492509897378.0",
        ),
        (
            {
                "properties": {"o": {"$ref": "#/$defs/o"}},
                "$defs": {
                    "o": {
                        "properties": {"a": {"type": "number", "exclusiveMinimum": 0}},
                        "additionalProperties": {"type": "number", "maximum": 0.5},
                    }
                },
            },
            '{"o":{"a":1,"b":0.5}}',
            '{"o":{"b":1}}',
        ),
        (
            {
                "properties": {"price": {"multipleOf": 0.01}},
                "patternProperties": {"^n_": {"multipleOf": 144}},
                "additionalProperties": False,
            },
            '{"price":0.01,"n_a":288}',
            '{"n_a":1}',
        ),
        (
            {"minimum": 845113747942862.2, "type": "number"},
            "845113747942863.0",
            "845113747942862.1",
        ),
        ({"minimum": 0.30000000000000004, "type": "number"}, "0.31", "0.3"),
        (
            {
                "properties": {
                    "rate": {"type": "number", "exclusiveMinimum": 0},
                    "share": {"type": "number", "maximum": 0.99, "multipleOf": 0.01},
                    "count": {"multipleOf": 144},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                },
                "additionalProperties": False,
            },
            '{"rate":1,"share":0.99,"count":288,"note":null}',
            '{"rate":0}',
        ),
        (
            {"patternProperties": {'^[^"]*$': {"type": "null"}}, "additionalProperties": False},
            '{"a":null}',
            r'{"\"":null}',
        ),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, "0.5", "0"),
        ({"type": "number", "exclusiveMinimum": 0.25, "maximum": 0.5}, "0.5", "0.25"),
        (
            {"allOf": [{"multipleOf": 0.5}, {"multipleOf": 0.2}], "type": "number"},
            "3",
            "1.5",
        ),
    ],
)
def test_corners(schema: Any, right: str, wrong: str) -> None:
    grammar = compiled(StructuredOutputs(json=json.dumps(schema)))
    assert accepts(grammar, right)
    assert not accepts(grammar, wrong)


@pytest.mark.parametrize(
    ("schema", "found"),
    [
        *(
            ({name: value}, repr(name))
            for name, value in {
                "not": {"type": "string"},
                "if": {},
                "then": {},
                "else": {},
                "uniqueItems": True,
                "contains": {},
                "minContains": 1,
                "maxContains": 1,
                "propertyNames": {"format": "email"},
                "dependentRequired": {"a": "b"},
                "dependentSchemas": {},
                "dependencies": {"a": {}},
                "unevaluatedItems": {"type": "null"},
                "unevaluatedProperties": {"type": "null"},
                "additionalItems": False,
                "$anchor": "x",
                "$dynamicRef": "#x",
                "$dynamicAnchor": "x",
                "$recursiveRef": "#",
                "$vocabulary": {},
                "nullable": True,
                "x-guidance": {"lenient": True},
                "minlength": 3,
                "anything": 1,
            }.items()
        ),
        ({"items": []}, "prefixItems"),
        ({"items": [{}], "prefixItems": [{}]}, "prefixItems"),
        ({"type": "text"}, "#/type"),
        ({"type": []}, "#/type"),
        ({"enum": []}, "#/enum"),
        ({"enum": [2**53 + 1]}, "#/enum"),
        ({"const": "\x01"}, "#/const"),
        ({"const": {"a": ["\x7f", "\x00"]}}, "#/const"),
        ({"minimum": 2**53 + 1}, "#/minimum"),
        ({"minimum": True}, "#/minimum"),
        ({"exclusiveMinimum": True}, "#/exclusiveMinimum"),
        ({"maximum": -(2**53) - 1}, "#/maximum"),
        ({"multipleOf": 0}, "#/multipleOf"),
        ({"multipleOf": 100_003}, "#/multipleOf"),
        ({"multipleOf": 0.12345}, "#/multipleOf"),
        ({"minLength": -1}, "#/minLength"),
        ({"minLength": 2.5}, "#/minLength"),
        ({"minItems": True}, "#/minItems"),
        ({"format": "iri"}, "#/format"),
        ({"type": ["integer", "string"], "format": "regex"}, "#/format"),
        ({"format": 1}, "#/format"),
        ({"$ref": "https://example.com/schema"}, "#/$ref"),
        ({"$ref": "#anchor"}, "#/$ref"),
        ({"$ref": "#/$defs/missing"}, "no schema"),
        ({"$ref": "#/title", "title": "x"}, "no schema"),
        ({"$ref": "#/properties", "properties": {}}, "no schema"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "$schema"),
        ({"items": {"$schema": "http://json-schema.org/draft-03/schema#"}}, "$schema"),
        ({"$schema": DRAFT_4, "items": {"id": "x"}}, "'id'"),
        ({"items": {"$id": "x"}}, "'$id'"),
        ({"anyOf": []}, "#/anyOf"),
        ({"properties": []}, "#/properties"),
        ({"required": "a"}, "#/required"),
        ({"items": 1}, "#/items"),
        ({"properties": {"not": {"not": {"a": 1}}}}, "#/properties/not has"),
        ({"allOf": [{}, {"items": {"uniqueItems": True}}]}, "#/allOf/1/items has"),
        ({"patternProperties": {"a/b": {"if": {}}}}, "#/patternProperties/a~1b has"),
        ({"$defs": {"unused": {"if": {}}}}, "#/$defs/unused has"),
        ({"type": "string", "pattern": "(?=a)b"}, "it has (?="),
        ({"pattern": r"^a\bc"}, r"it has \b"),
        ({"pattern": r"^(a)\1$"}, r"it has \1"),
        ({"patternProperties": {"^a(?!b)": {}}}, "it has (?!"),
        ({"properties": {"a": {}}, "minProperties": 1}, "minProperties beside optional"),
        ({"properties": {"a": {}}, "maxProperties": 1}, "maxProperties beside optional"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"minimum": 10**400}, "#/minimum"),
        ({"const": [10**400]}, "#/const"),
        ({"enum": [-(10**400)]}, "#/enum"),
        ({"multipleOf": 10**400}, "#/multipleOf"),
        (
            {
                "properties": {"ab": {"exclusiveMinimum": 0}},
                "patternProperties": {"^a": {"maximum": 0.5}},
            },
            "exclusiveMinimum 0 and maximum 0.5",
        ),
        ({"pattern": "a\x01"}, "control character"),
        ({"pattern": r"a\v"}, "control character"),
        ({"pattern": r"a\x1f"}, "control character"),
        ({"pattern": r"a\u007F"}, "control character"),
        ({"pattern": r"a(\u{0b}|b)"}, "control character"),
        ({"pattern": r"a[\v]"}, "of control characters"),
        ({"pattern": r"a[\x7f-\x7f\x0b]"}, "of control characters"),
        ({"enum": ["a\x7f"]}, "control characters"),
        ({"pattern": "^[^][a]$"}, "two meanings"),
        ({"pattern": "^a[]$"}, "nothing fits"),
        ({"pattern": "[a&&b]"}, "has && in a class"),
        ({"pattern": "^(?![+--])."}, "has -- in a class"),
        ({"pattern": "[a-z--9]"}, "has -- in a class"),
        ({"pattern": "[a~~b]"}, "has ~~ in a class"),
        ({"pattern": "[^-~~b]"}, "has ~~ in a class"),
        ({"pattern": "[a-z-~~b]"}, "has ~~ in a class"),
        ({"pattern": r"[\d-~~b]"}, "has ~~ in a class"),
        ({"pattern": "[!-~~~]"}, "has ~~ in a class"),
        ({"pattern": r"^\p{Cc}$"}, "cannot be written"),
        ({"pattern": "^[[:cntrl:]a]$"}, "cannot be written"),
        ({"pattern": r"(?:[\x00-\x0f]|[\x10-\x1f])"}, "cannot be written"),
        (
            {
                "allOf": [
                    {"properties": {"a": {"multipleOf": 9973}}},
                    {"additionalProperties": {"multipleOf": 9967}},
                ]
            },
            "common multiple",
        ),
        (
            {"allOf": [{"items": {"multipleOf": 83}}, {"prefixItems": [{"multipleOf": 8387}]}]},
            "common multiple",
        ),
        ({"pattern": "[[:^alpha:]]"}, "[^[:…:]]"),
        ({"pattern": r"^[\x00-\x21\x23-\x7f]*$"}, "begin it with a space"),
        ({"patternProperties": {"^\x01$": {}}}, "control character"),
        ({"exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum 0 and maximum 0.5"),
        ({"minimum": -1.5, "exclusiveMaximum": -1.0}, "minimum -1.5 and exclusiveMaximum -1"),
        (
            {"$ref": "#/$defs/x", "maximum": 0.5, "$defs": {"x": {"exclusiveMinimum": 0}}},
            "one value has to keep exclusiveMinimum 0 and maximum 0.5",
        ),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "common multiple"),
        (
            {"$ref": "#/$defs/x", "multipleOf": 991, "$defs": {"x": {"multipleOf": 997}}},
            "common multiple",
        ),
        (
            {"minProperties": 2, "additionalProperties": False, "patternProperties": {"a": {}}},
            "min",
        ),
    ],
)
def test_what_is_refused(schema: Any, found: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputs(json=schema)
    assert found in str(caught.value)
    assert caught.value.param == "structured_outputs.json"


def test_names_of_properties_are_no_keywords() -> None:
    names = ["not", "if", "$ref", "uniqueItems", "x-guidance", "$id", "enum"]
    schema = {
        "type": "object",
        "properties": {name: {"type": "null"} for name in names},
        "required": names,
        "additionalProperties": False,
        "default": {"not": 1},
        "examples": [{"if": 1}],
    }
    text = json.dumps(dict.fromkeys(names))
    assert accepts(compiled(StructuredOutputs(json=schema)), text)


@pytest.mark.parametrize("name", ANNOTATIONS)
def test_annotations_change_nothing(name: str) -> None:
    grammar = compiled(StructuredOutputs(json={"type": "integer", name: "$ref"}))
    assert accepts(grammar, "12")
    assert not accepts(grammar, '"a"')


def kind(value: Any, **more: Any) -> dict[str, Any]:
    """An object that its kind tells from others."""
    properties = {"kind": value if isinstance(value, dict) else {"const": value}}
    return {"type": "object", "properties": properties, "required": ["kind"], **more}


def variant(name: str, **more: Any) -> dict[str, Any]:
    """An object that the name of its property tells from others."""
    alone = {"properties": {name: {}}, "required": [name], "additionalProperties": False}
    return {"type": "object", **alone, **more}


@pytest.mark.parametrize(
    ("alternatives", "right", "wrong"),
    [
        ([kind(1), kind(2)], ['{"kind":1}', '{"kind":2}'], ['{"kind":3}', '{"kind":"1"}', "{}"]),
        ([kind(1), kind({"enum": [2, 3]})], ['{"kind":3}'], ['{"kind":4}']),
        ([kind(1), kind("1"), kind(True)], ['{"kind":true}', '{"kind":"1"}'], ['{"kind":false}']),
        ([kind(1), {"type": "null"}, kind(2)], ["null", '{"kind":2}'], ["1", '{"kind":null}']),
        ([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], ['{"kind":2}'], ['{"kind":3}']),
        ([{"allOf": [{"$ref": "#/$defs/a"}]}, kind(2)], ['{"kind":1}'], ['{"kind":3}']),
        ([variant("a"), variant("b")], ['{"a":1}', '{"b":1}'], ['{"a":1,"b":1}', "{}"]),
        ([{"type": "integer"}, {"const": "x"}, variant("a")], ["1", '"x"'], ['"y"', "1.5"]),
        ([{"const": 1}, {"const": 2.5}, {"enum": ["a", None]}], ["1", "2.5", "null"], ["2", '"b"']),
    ],
)
def test_one_of_several_that_constants_tell_apart(
    alternatives: list[Any], right: list[str], wrong: list[str]
) -> None:
    whole = {"oneOf": alternatives, "$defs": {"a": kind(1, title="A"), "b": kind(2)}}
    for schema, around in ((whole, "{}"), ({"items": whole, "$defs": whole["$defs"]}, "[{}]")):
        grammar = compiled(StructuredOutputs(json=schema))
        for text in right:
            assert accepts(grammar, around.replace("{}", text))
            assert_valid(schema, around.replace("{}", text))
        assert not any(accepts(grammar, around.replace("{}", text)) for text in wrong)


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [kind(1), kind(1.0)]},
        {"oneOf": [kind(1), kind({"enum": [2, 1]})]},
        {"oneOf": [kind(1), kind(2, required=[])]},
        {"oneOf": [variant(name, additionalProperties={}) for name in "ab"]},
        {
            "oneOf": [
                variant("a", patternProperties={"^b$": {}}),
                variant("b", patternProperties={"^a$": {}}),
            ]
        },
        {"oneOf": [variant("a", required=[]), variant("b", required=[])]},
        {"oneOf": [variant("a"), {**variant("b"), "type": ["object", "array"]}, {"type": "array"}]},
        {"oneOf": [{"type": "integer"}, {"const": 1.0}]},
        {"oneOf": [kind(1), kind(2, type=["object", "array"])]},
        {"oneOf": [kind(1), kind({"type": "integer"})]},
        {"oneOf": [kind(1), {"type": "integer"}, {"type": "number"}, kind(2)]},
        {"oneOf": [{"const": 1}, {"enum": [2, 1]}]},
        {"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}], "$defs": {"a": kind(1)}},
        {"oneOf": [kind(1), kind(1)], "anyOf": [{}]},
        {"oneOf": [kind(1), kind({"$ref": "#/oneOf/0/properties/kind"})]},
    ],
)
def test_one_of_several_that_may_fit_together_is_refused(schema: Any) -> None:
    with pytest.raises(RequestError, match=r"cannot be compiled: .*oneOf has .* write anyOf"):
        compiled(StructuredOutputs(json=schema))


def test_compiler_refuses_what_excludes_itself() -> None:
    for schema, reason in (
        ({"type": "integer", "minimum": 3, "maximum": 2}, "greater than maximum"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        (False, "schema is false"),
    ):
        with pytest.raises(RequestError, match="cannot be compiled: .*" + reason):
            compiled(StructuredOutputs(json=json.dumps(schema)))


@pytest.mark.parametrize("name", ["dependentRequired", "dependencies"])
def test_properties_that_ask_for_others(name: str) -> None:
    schema = {
        "type": "object",
        "properties": {key: {"type": "integer"} for key in "abcd"},
        "required": ["d"],
        "additionalProperties": False,
        name: {"a": ["b"], "b": ["b", "d"], "c": ["a"], "d": []},
    }
    grammar = compiled(StructuredOutputs(json=schema))
    validator = Draft202012Validator({**schema, "dependentRequired": schema[name]})
    for keys in chain.from_iterable(combinations("abcd", size) for size in range(5)):
        value = dict.fromkeys(keys, 1)
        assert accepts(grammar, json.dumps(value)) == validator.is_valid(value), value
    assert not accepts(grammar, '{"a": 1, "b": "x", "d": 1}')
    many = {**schema, name: {f"{one}": ["d"] for one in range(5)}}
    for wrong in (many, {**schema, "maxProperties": 9}):
        with pytest.raises(RequestError, match=rf"keyword '{name}'|maxProperties"):
            StructuredOutputs(json=wrong)


def test_depth() -> None:
    schema: Any = {}
    for _ in range(MAX_DEPTH):
        schema = {"items": schema}
    StructuredOutputs(json=schema)
    for deeper in ({"items": schema}, {"items": [schema]}):
        with pytest.raises(RequestError, match="deep"):
            StructuredOutputs(json=deeper)
    with pytest.raises(ValueError, match="deep"):
        check_schema({"items": schema})
    with pytest.raises(RequestError, match="the schema is nested too deep"):
        StructuredOutputs(json='{"items":' * 100_000)
    with pytest.raises(RequestError, match="deep"):
        StructuredOutputs(json='{"items":' * 900 + "{}" + "}" * 900)


def test_whitespace() -> None:
    schema = {"type": "object", "properties": {"a": {}}}
    usual = compiled(StructuredOutputs(json=schema))
    assert accepts(usual, '{\n  "a" : [ 1,\n\n\t\t2 ]\n}')
    for most in ("\n" + " " * 20, "\n\n" + "\t" * 20, " "):
        assert accepts(usual, "{" + most + "}")
        assert not accepts(usual, "{" + most + " }")
    assert not accepts(usual, "{\n\n\n}")
    assert not accepts(usual, "{\t}")
    none = compiled(StructuredOutputs(json=schema, disable_any_whitespace=True))
    assert accepts(none, '{"a":[1,2]}')
    assert not accepts(none, '{"a": 1}')
    own = compiled(StructuredOutputs(json=schema, whitespace_pattern=" ?"))
    assert accepts(own, '{ "a": 1}')
    assert not accepts(own, '{  "a": 1}')
    assert not accepts(own, '{\n"a":1}')
