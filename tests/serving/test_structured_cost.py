"""What a request may ask for never takes longer than in proportion: nothing else runs meanwhile.

Nothing is timed. What would take minutes, or hours, runs into the time that each test has.
"""

from __future__ import annotations

import json
import tracemalloc
from contextlib import suppress
from typing import Any

import pytest

from onnxport.errors import RequestError
from onnxport.serving.http.tool_formats.forced import calls
from onnxport.serving.http.tool_formats.hermes import HERMES
from onnxport.serving.structured import closing
from onnxport.serving.structured.automaton import MOST_AT_ONCE, Automaton
from onnxport.serving.structured.exclusive import let_any_of
from onnxport.serving.structured.expression import UnknownSyntaxError
from onnxport.serving.structured.generators import MOST_WRITTEN, _Rewriter, rewritten
from onnxport.serving.structured.prepared import prepared
from onnxport.serving.structured.source import grammar_of
from onnxport.serving.structured.spec import MAX_CHARS, StructuredOutputs

pytestmark = pytest.mark.timeout(60)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("^(a+)+$", "a" * 60 + "!"),
        ("^(a|aa)*$", "a" * 60 + "!"),
        ("^(a|a)(a|a)*$", "a" * 60 + "!"),
        ("a*a*a*a*a*a*b", "a" * 4000),
        ("^a+$", "a" * 100_000),
    ],
)
def test_patterns_and_names_of_a_request(pattern: str, name: str) -> None:
    """They meet nothing that does not fit together; whether they fit is not tried at any cost."""
    schema = {"properties": {name[:1000]: {}}, "patternProperties": {pattern: {}}}
    StructuredOutputs(json=schema)


@pytest.mark.parametrize(
    ("pattern", "is_refused"),
    [("^a$", False), ("^[ab]+$", True), ("^b.*c?$", True), ("^c+$", False), ("^c.*d+$", True)],
)
def test_names_are_tried_where_that_is_cheap(pattern: str, is_refused: bool) -> None:
    """Multiples of two numbers are too much where the name `b` may be one of the pattern's."""
    schema = {
        "properties": {"b": {"multipleOf": 9973}},
        "patternProperties": {pattern: {"multipleOf": 9967}},
    }
    if not is_refused:
        StructuredOutputs(json=schema)
        return
    with pytest.raises(RequestError, match="common multiple"):
        StructuredOutputs(json=schema)


@pytest.mark.parametrize(
    "text",
    [
        "[" * MAX_CHARS,
        "\n" * (MAX_CHARS - 1) + "x",
        '"' + '\\"' * (MAX_CHARS // 2 - 1),
        '"' + '\\"' * (MAX_CHARS // 2 - 2) + "\\\n",
        "/" + "\\/" * (MAX_CHARS // 2 - 1),
        "temperature = " * (MAX_CHARS // 16),
        "::=" + "\n" * (MAX_CHARS - 4) + "x",
        "%json" + " " * (MAX_CHARS - 5),
    ],
    ids=["brackets", "lines", "text", "cut text", "regex", "temperatures", "gbnf", "json"],
)
def test_grammars(text: str) -> None:
    with suppress(RequestError):
        grammar_of(StructuredOutputs(grammar=text))


@pytest.mark.parametrize(
    ("grammar", "is_set"),
    [
        ('start: a\na[temperature=0.5]: "x"', True),
        ('start: a\na[capture, temperature = 1]: "x"', True),
        ('start: a\na[capture]: "temperature=1"', False),
        ("start: temperature\ntemperature: /[a]temperature=/", False),
    ],
)
def test_a_temperature_is_found_in_brackets_alone(grammar: str, is_set: bool) -> None:
    form = StructuredOutputs(grammar=grammar)
    if not is_set:
        grammar_of(form)
        return
    with pytest.raises(RequestError, match="sets a temperature"):
        grammar_of(form)


@pytest.mark.parametrize("begin", ["\\p{", "\\P{", "[\\p{"])
def test_patterns_of_texts(begin: str) -> None:
    for fill in (" ", "\\p{"):
        pattern = begin + fill * ((MAX_CHARS - 100) // len(fill) // 2)
        with suppress(RequestError):
            StructuredOutputs(json={"type": "string", "pattern": pattern})


@pytest.mark.parametrize("spaces", ["", " ", " " * 20])
@pytest.mark.parametrize("name", ["Cc", "gc=Control", "General_Category=Other", "cntrl"])
def test_classes_of_controls_however_they_are_written(name: str, spaces: str) -> None:
    written = spaces + f"{spaces}={spaces}".join(name.split("=")) + spaces
    with pytest.raises(RequestError, match="control characters cannot be written"):
        StructuredOutputs(json={"type": "string", "pattern": f"\\p{{{written}}}"})


@pytest.mark.parametrize("regex", ["a" + 3 * f"({'|' * 80_000})" + "b", f"(a{'|' * 260_000}){{9}}"])
def test_a_regex_that_leads_everywhere(regex: str) -> None:
    with pytest.raises(UnknownSyntaxError, match="too large"):
        Automaton(regex, 100)


def test_places_of_a_regex() -> None:
    """Three groups of empty alternatives are joined with each other."""
    automaton = Automaton(f"a{3 * ('(' + '|' * 5_000 + ')')}b", 100)
    assert automaton.start is not None
    after = automaton.after(automaton.start, b"a")
    assert after is not None
    assert 0 < len(after) <= MOST_AT_ONCE


def test_long_names_above_many_schemas() -> None:
    inner = {str(number): {} for number in range(9_000)}
    with pytest.raises(RequestError, match=r"has schemas in it, and a path of 262.* characters"):
        StructuredOutputs(json={"properties": {"/" * 131_000: {"properties": inner}}})
    nested: dict[str, Any] = {}
    for _ in range(20):
        nested = {"properties": {"n" * 50: nested}}
    StructuredOutputs(json=nested)
    names = "|".join(f"name{number}" for number in range(400))
    StructuredOutputs(json={"patternProperties": {f"^({names})$": {"type": "string"}}})


@pytest.mark.parametrize("depth", [900, 20_000])
def test_a_constant_that_is_nested_too_deep(depth: int) -> None:
    deep = "[" * depth + "]" * depth
    with pytest.raises(RequestError, match="nested too deep; flatten it"):
        StructuredOutputs(json='{"const":' + deep + "}")


def test_many_names_beside_many_patterns() -> None:
    """In many values: of all of them only so many are tried, and the others may fit."""
    patterns = {f"a*[{number}b]": {} for number in range(60)}
    names = {f"{'a' * 60}{number}": {} for number in range(60)}
    values = {str(n): {"properties": names, "patternProperties": patterns} for n in range(40)}
    StructuredOutputs(json={"properties": values})


def test_values_that_meet_one_after_the_other() -> None:
    """Each time what they refer to is found to meet, too."""
    defs: dict[str, Any] = {}
    for number in range(1500):
        following = {"$ref": f"#/$defs/N{number + 1}"}
        defs[f"N{number}"] = {"properties": {"a": following}}
        defs[f"P{number}"] = {"patternProperties": {"^a$": {"$ref": f"#/$defs/P{number + 1}"}}}
    defs |= {"N1500": {"multipleOf": 9973}, "P1500": {"multipleOf": 9967}}
    schema = {
        "properties": {"a": {"$ref": "#/$defs/N0"}},
        "patternProperties": {"^a$": {"$ref": "#/$defs/P0"}},
        "$defs": defs,
    }
    with pytest.raises(RequestError, match="common multiple"):
        StructuredOutputs(json=schema)


@pytest.mark.parametrize(
    "pattern",
    [
        r"[\x01[b](?:(?:(?:(?:(?:x?){99}){99}){99}){99}){99}|y]",
        r"[\x01[b]x{99999999999}]",
        r"[\]\x01[^b]]",
    ],
)
def test_classes_in_classes(pattern: str) -> None:
    """What stands behind an inner one is of the outer one, and no expression."""
    with pytest.raises(RequestError, match="control characters"):
        StructuredOutputs(json={"type": "string", "pattern": pattern})


def test_a_pattern_of_names_that_overflows() -> None:
    StructuredOutputs(
        json={"properties": {"a": {}}, "patternProperties": {"a{99999999999}": {"type": "null"}}}
    )


def test_rules_of_gbnf() -> None:
    rules = "root::=a0\n" + "".join(f"a{n}::=a{n + 1}\n" for n in range(15_000)) + 'a15000::="x"'
    with pytest.raises(RequestError, match="15002 rules in GBNF, at most 2000"):
        grammar_of(StructuredOutputs(grammar=rules))


def test_a_pattern_of_whitespace() -> None:
    with pytest.raises(RequestError, match="more than 1024 characters"):
        StructuredOutputs(json={}, whitespace_pattern=" " * 1025)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: /x\ny/ | %json {"type": "object", "foo": 1}',
        'start: "a" # it\'s "\n | %json {"type": "object", "foo": 1}',
        'start: /["]/ | %json {"type": "object", "foo": 1}',
        'start: /[^"]*/ | %json {"type": "object", "foo": 1}',
        'start: "/" | %json {"type": "object", "foo": 1}',
        'start: /\\// | %json {"type": "object", "foo": 1}',
    ],
)
def test_no_schema_hides_in_a_grammar(grammar: str) -> None:
    with pytest.raises(RequestError, match="the keyword 'foo'"):
        grammar_of(StructuredOutputs(grammar=grammar))


@pytest.mark.parametrize(
    ("grammar", "found"),
    [
        ('start: a\na[stop=/x\ny/, temperature=0.5]: "x"', "temperature"),
        ('start: a\na[stop=%regex {"substring_chunks": ["]"]}, temperature=0.5]: "x"', "temper"),
        ('start: "a" -> x %llguidance {"no_forcing": false}', "%llguidance options"),
        ('%llguidance {}\nroot ::= "x"', "%llguidance options"),
    ],
)
def test_no_setting_hides_in_a_grammar(grammar: str, found: str) -> None:
    with pytest.raises(RequestError, match=found):
        grammar_of(StructuredOutputs(grammar=grammar))


def test_comments_may_speak_of_anything() -> None:
    text = "# [temperature=0.5] %json { %llguidance\n// the same: temperature=1\nstart: /a/"
    assert "start: /a/" in grammar_of(StructuredOutputs(grammar=text))


def test_alternatives_that_refer_to_much() -> None:
    """It is not looked into whether they are apart; the compiler refuses what it does not see."""
    much = {"$ref": "#/$defs/a"}
    alternatives = [{"allOf": [much, {"const": number}]} for number in range(2000)]
    schema = {"oneOf": alternatives, "$defs": {"a": {"allOf": [{} for _ in range(30_000)]}}}
    assert len(json.dumps(schema)) < MAX_CHARS
    let_any_of(schema)
    assert "oneOf" in schema
    names = [f"n{number}" for number in range(10_000)]
    required = {"oneOf": [{"$ref": "#/$defs/r"} for _ in range(3000)]}
    of_enum = {"properties": {"n0": {"enum": names}}}
    for one in ({}, of_enum):
        let_any_of(required | {"$defs": {"r": {"type": "object", "required": names, **one}}})
    few = {"oneOf": alternatives[:3], "$defs": {"a": {"allOf": [{} for _ in range(30)]}}}
    let_any_of(few)
    assert "anyOf" in few


@pytest.mark.parametrize(
    "names", [{"enum": [str(number) for number in range(10_000)]}, {"const": "n" * 50_000}]
)
def test_names_that_many_objects_refer_to(names: dict[str, Any]) -> None:
    """They are written once for each of these, up to so many characters."""
    one = {"propertyNames": {"$ref": "#/$defs/names"}, "additionalProperties": {}}
    schema = {"properties": {str(number): one for number in range(2000)}, "$defs": {"names": names}}
    with pytest.raises(RequestError, match="'propertyNames', which is not supported"):
        StructuredOutputs(json=schema)
    few = {"properties": {str(number): one for number in range(2)}, "$defs": {"names": names}}
    few["$defs"] = {"names": {"enum": ["a", "b"]}}
    StructuredOutputs(json=few)


def test_a_pattern_of_names_that_many_objects_refer_to() -> None:
    one = {"propertyNames": {"$ref": "#/$defs/names"}}
    properties = {str(number): one for number in range(2000)}
    schema = {"properties": properties, "$defs": {"names": {"pattern": "n" * 100_000}}}
    with pytest.raises(RequestError, match="'propertyNames', which is not supported"):
        StructuredOutputs(json=schema)


@pytest.mark.parametrize(
    "defs",
    [
        {"n": {str(number): 0 for number in range(9_000)}},
        {"n": {"$ref": f"#/$defs/{'%41' * 600}0"}}
        | {"A" * 600 + str(n): {"$ref": f"#/$defs/{'%41' * 600}{n + 1}"} for n in range(6)}
        | {"A" * 600 + "6": {"type": "string"}},
    ],
    ids=["keywords", "references"],
)
def test_what_names_refer_to_is_read_so_often(
    defs: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each object anew, but no further than so many characters of all of them together."""
    read = 0
    at = _Rewriter._at

    def counted(self: _Rewriter, reference: str) -> Any:
        nonlocal read
        found = at(self, reference)
        read += len(reference) + len(found)
        return found

    monkeypatch.setattr(_Rewriter, "_at", counted)
    one = {"propertyNames": {"$ref": "#/$defs/n"}}
    schema = {"properties": {str(number): one for number in range(2400)}, "$defs": defs}
    rewritten(schema)
    assert read < 2 * MOST_WRITTEN
    few = {"properties": {"0": one}, "$defs": defs}
    read = 0
    rewritten(few)
    assert read


def test_pointers_are_held_once() -> None:
    """What is closed takes no more memory than a schema that is only checked."""
    alternatives = [{} for _ in range(20_000)]
    schema = {"properties": {"n" * 1950: {"anyOf": alternatives}}}
    sizes: dict[bool | None, int] = {}
    for strict in (None, True):
        tracemalloc.start()
        prepared(schema, "x", strict=strict)
        sizes[strict] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert sizes[True] < 1.5 * sizes[None]


@pytest.mark.parametrize("name", ["/" * 120_000, "a" * 600 + "/b" * 190, "~1" * 60_000])
def test_references_where_schemas_moved(name: str) -> None:
    items = [{}, *({"$ref": f"#/{name}"} for _ in range(120_000 // len(name)))]
    with pytest.raises(RequestError, match="where there is no schema"):
        StructuredOutputs(json={"items": items})


@pytest.mark.parametrize(
    "pattern",
    [
        "^" + "(?=a)" * 50_000,
        "^" + "(?=(" * 60_000,
        "^(?!" + "a" * 200_000 + ")",
        "^(?!.*" + "\\." * 60_000 + ")",
        "^(?![" + "\\" * 60_001 + "*$)",
        "^(?!.*" + "[a]" * 60_000 + ")",
    ],
    ids=["many", "nested", "text", "twice", "class", "classes"],
)
def test_patterns_that_look_ahead(pattern: str) -> None:
    with pytest.raises(RequestError, match="look-around"):
        StructuredOutputs(json={"type": "string", "pattern": pattern})


def test_many_alternatives_that_are_compared() -> None:
    """Each with each other one, up to a limit; beyond that `anyOf` says less, if that may be."""
    alternatives = [
        {
            "type": "object",
            "properties": {str(number): {}},
            "required": [str(number)],
            "additionalProperties": False,
        }
        for number in range(2000)
    ]
    schema = {"oneOf": alternatives}
    assert let_any_of(schema) == ()
    assert "oneOf" in schema
    assert let_any_of(schema, always=True) == ("#/oneOf",)
    assert "anyOf" in schema
    few = {"oneOf": alternatives[:300]}
    assert let_any_of(few, always=True) == ()
    assert "anyOf" in few


def test_many_parts_that_refer_to_each_other_are_closed() -> None:
    defs = {
        str(n): {
            "properties": {},
            "anyOf": [{"$ref": f"#/$defs/{n * 7 % 2000}"}, {"$ref": f"#/$defs/{n * 3 % 2000}"}],
        }
        for n in range(2000)
    }
    form = StructuredOutputs(json={"$defs": defs, "$ref": "#/$defs/0"}, strict=True)
    assert "additionalProperties" not in form.text


def test_parameters_of_tools_that_are_too_large() -> None:
    """They are refused before they are looked at, all of them together."""
    half = {"type": "object", "description": "n" * (MAX_CHARS // 2)}
    large = {"type": "object", "properties": {str(number): {} for number in range(100_000)}}
    for parameters in ([large], [half, half]):
        tools = [
            {"type": "function", "function": {"name": f"f{n}", "parameters": one}}
            for n, one in enumerate(parameters)
        ]
        with pytest.raises(RequestError, match="cannot be compiled, at most 262144") as caught:
            calls(tools, HERMES, several=False)
        assert caught.value.param == f"tools.{len(parameters) - 1}.function.parameters"


def test_parameters_of_tools_near_the_limit() -> None:
    """What is closed may be too much then; names in any script count as they are written."""

    def tool(size: int, **more: Any) -> dict[str, Any]:
        properties = {"日" * size: {"type": "null"}, **more}
        parameters = {"type": "object", "properties": properties}
        return {
            "type": "function",
            "function": {"name": "f", "parameters": parameters, "strict": True},
        }

    form = calls([tool(MAX_CHARS - 1000)], HERMES, several=False)
    assert MAX_CHARS - 1000 < len(form.text) < MAX_CHARS
    many = {str(number): {"properties": {}} for number in range(500)}
    size = MAX_CHARS - len(json.dumps(many, separators=(",", ":"))) - 100
    with pytest.raises(RequestError, match="calls of the functions make a grammar of") as caught:
        calls([tool(size, **many)], HERMES, several=False)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("strict", [False, None, True])
def test_many_keywords_far_inside_are_told_by_their_ends(strict: bool | None) -> None:
    """A copy of the pointer for each would be gigabytes."""
    size = MAX_CHARS // 4
    keywords = {f"k{index}": 0 for index in range(size // 12)}
    schema = {"properties": {"n" * size: keywords}}
    tracemalloc.start()
    with suppress(RequestError):
        found = prepared(schema, "json", strict=strict)
        assert len(found.left_out) == len(keywords)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("names", [{"minLength": [0] * 40_000}, {"type": [0] * 40_000}])
def test_what_is_no_length_or_type_of_names_is_not_read(names: dict[str, Any]) -> None:
    read = []

    class Counted(list[int]):
        def __repr__(self) -> str:
            read.append(len(self))
            return "[]"

        def __contains__(self, value: object) -> bool:
            read.append(len(self))
            return False

    (name, values), *_ = names.items()
    one = {"properties": {}, "propertyNames": {"$ref": "#/$defs/n"}}
    schema = {
        "properties": {str(index): dict(one) for index in range(20)},
        "$defs": {"n": {name: Counted(values)}},
    }
    with suppress(ValueError):
        rewritten(schema)
    assert not read


def test_references_that_are_no_texts_are_not_read() -> None:
    value: Any = [0] * 20_000
    for _ in range(500):
        value = {"$ref": value}
    long = {"$ref": "#/" + "a/additionalProperties/" * 80 + "b" * 5000 + "/additionalProperties"}
    StructuredOutputs(json={"default": value, "examples": [long]})


def test_members_that_meet_at_any_rate_are_told_once() -> None:
    members = {str(index): {"const": []} for index in range(3000)}
    schema = {"type": "object", "properties": members, "patternProperties": members}
    with suppress(RequestError):
        prepared(schema, "json", strict=True)
    closed = closing._members(
        {"#": schema}, {f"#/{name}/{each}" for name in schema for each in members}
    )
    assert len(list(closed)) == 2 * len(members)
