"""Structural tags: what a random model writes is read by a small reader of its own; refusals."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from onnxport.errors import RequestError
from onnxport.serving.structured import cache, compiler
from onnxport.serving.structured.cache import GrammarCompiler
from onnxport.serving.structured.compiler import ROW
from onnxport.serving.structured.edges import times_of
from onnxport.serving.structured.spec import MAX_CHARS, StructuredOutputs
from onnxport.serving.structured.structural import (
    FORMATS,
    MAX_DEPTH,
    MAX_FORMATS,
    MAX_TEXTS,
    MAX_TIMES,
    REFUSED,
    SILENT,
)
from onnxport.serving.structured.tags import MAX_VISITS, TagWriter
from onnxport.serving.thoughts import Thought
from tests.tiers import examples

from .structured import LIMITS, PROMPT, accepts, compiled, vocabulary, write
from .tag_formats import (
    ANY,
    DIGIT,
    ENDLESS,
    GBNF,
    GRAMMAR,
    JSON,
    Formats,
    Reader,
    const,
    form,
    often,
    regex,
    repeat,
    separated,
    some,
    tag,
    triggered,
)

F = tag("<f>", JSON, "</f>")
H = tag("<h>", ANY, "</h>")
F1 = '<f>{"a":1}</f>'
G = tag("<g>", regex("[a-c]{1,3}"), "</g>")
JSON1 = '{"a":1}'
CALL = "<call>", "</call>"
# A format, texts that have it, texts that have not.
CASES: list[tuple[Any, list[str], list[str]]] = [
    (const("a<b"), ["a<b"], ["a", "a<bc"]),
    (JSON, ['{"a": 1}'], ["1", "{}", '{"a": 3}']),
    (ANY, ["", "x\ny"], []),
    ({**ANY, "excludes": ["ab", "ba"]}, ["", "aacbb"], ["xab", "bba"]),
    (regex("[a-f]{2}|x"), ["ab", "x"], ["abc"]),
    (GRAMMAR, ["((x))", "x"], ["((x)"]),
    (GBNF, ["((x))", "x"], ["((x)"]),
    (some("or", const("a"), const("ab"), JSON), ["a", "ab", '{"a":2}'], ["b", "abb"]),
    (some("sequence", regex("[a-z]+"), const("abc"), JSON), ['xabc{"a":1}'], ['x{"a":1}']),
    (some("sequence", JSON, const("-"), regex("[0-9]+")), ['{"a":1}-12'], ['{"a":1}', "-1"]),
    (some("sequence", const("a"), ANY), ["a", "ab"], ["", "b"]),
    (F, ['<f>{"a":"</f>"}</f>'], ["<f></f>", '<f>{"a":1}', 'x<f>{"a":1}</f>']),
    (tag("<t>", ANY, ["</t>", ";"]), ["<t></t>", "<t>a<b;"], ["<t>a;;", "<t>;x</t>"]),
    (tag("<t>", regex("[a-z<]*"), "</t>"), ["<t></t>", "<t>a<</t>"], ["<t>A</t>"]),
    (tag("n=", regex("[0-9]+"), ""), ["n=12"], ["n=", "n=x"]),
    (tag("a", tag("b", JSON, "c"), "d"), ['ab{"a":1}cd'], ['ab{"a":1}d']),
    (tag("a", separated(",", F, G), "d"), ["ad", "a<g>a</g>,<g>b</g>d"], ["a<g>a</g>,d", "a"]),
    (tag("(", some("or", JSON, ANY), ")"), ["()", '({"a":1})', "(x)"], ["(x", "())"]),
    (tag("[", triggered(["<"], F, G), "]"), ["[]", "[x<g>a</g>y]"], ["[<]", "[x]y", "x"]),
    (
        triggered(["<f", "<g"], F, G),
        ["", "<<", 'a<f>{"a":1}</f><g>abc</g>b'],
        ["<f", "a<g>x", "<g>d</g>", "<g></g>", "<f>{}</f>", "<g>a</g><g"],
    ),
    (  # triggers that overlap: the first that is complete counts
        triggered(["aab", "bc"], tag("aab", const("1"), ";"), tag("bc>", const("2"), "")),
        ["aaab1;bc>2", "b", "aa"],
        ["aabc>2", "aab", "xbc"],
    ),
    (triggered(["<"], F, G, at_least_one=True), ["<g>a</g>", "<g>a</g> <g>b</g>x"], ["", "x"]),
    (triggered(["<"], F, G, stop_after_first=True), ["x", "x<g>a</g>"], ["<g>a</g>x", "<"]),
    (
        triggered(["<"], F, G, stop_after_first=True, at_least_one=True),
        ["<g>a</g>", '<f>{"a":1}</f>'],
        ["", "x<g>a</g>", "<g>a</g>x"],
    ),
    (triggered(["<"], G, excludes=["x", ">>"]), ["a<g>a</g>", ">a"], ["x", "x<g>a</g>", ">>"]),
    (separated(", ", F, G), ["", "<g>a</g>, <g>b</g>"], ["<g>a</g>,", "<g>a</g>, "]),
    (separated("", G), ["", "<g>a</g><g>b</g>"], ["<g>a</g>,"]),
    (separated("<", tag("<a>", JSON, ""), at_least_one=True), ['<a>{"a":1}<<a>{"a":2}'], [""]),
    (separated(",", G, stop_after_first=True), ["", "<g>a</g>"], ["<g>a</g>,<g>a</g>"]),
    (
        separated(",", G, at_least_one=True, stop_after_first=True),
        ["<g>a</g>"],
        ["", "<g>a</g>,<g>a</g>"],
    ),
    (often("optional", const("a")), ["", "a"], ["aa", "b"]),
    (often("plus", regex("[a-c];")), ["a;", "a;b;c;"], ["", "a;b"]),
    (often("star", JSON), ["", '{"a":1}{"a":2}'], ['{"a":1}{"a":3}']),
    (repeat(2, 3, const("ab")), ["abab", "ababab"], ["ab", "abababab", "aba"]),
    (repeat(2, 2, F), ['<f>{"a":1}</f><f>{"a":2}</f>'], ['<f>{"a":1}</f>']),
    (repeat(0, 2, G), ["", "<g>a</g><g>b</g>"], ["<g>a</g><g>b</g><g>c</g>"]),
    (repeat(2, -1, G), ["<g>a</g>" * 2, "<g>a</g>" * 9], ["", "<g>a</g>"]),
    (
        repeat(0, 99, repeat(0, 99, const("ab"))),
        ["", "ab", "ab" * 100],
        ["ab" * 100 + "a"],
    ),
    (
        tag("[t]", repeat(2, 3, often("plus", JSON)), "[/t]"),
        [f"[t]{JSON1 * 2}[/t]", f"[t]{JSON1 * 9}[/t]"],
        [f"[t]{JSON1}[/t]"],
    ),
    (repeat(2, 3, repeat(2, 2, const("ab"))), ["ab" * 4, "ab" * 6], ["ab" * 5, "ab" * 3]),
    (often("optional", ANY), ["", "x\ny"], []),
    (tag("<t>", often("optional", some("sequence", JSON, ANY)), ";"), ["<t>;"], ["<t>x;", "<t>"]),
    (tag("t", often("optional", triggered(["<g"], G)), "</t>"), ["t</t>", "ta<g>b</g></t>"], ["t"]),
    (tag("<t>", often("star", F), "</t>"), ["<t></t>", '<t><f>{"a":1}</f></t>'], ["<t>", "</t>"]),
    (tag("[t]", repeat(0, 2, JSON), ["[/t]", ""]), ["[t]", '[t]{"a":1}[/t]'], ["[t][t]"]),
    # What comes again, what follows, and what ends all, begin alike.
    (
        tag("<a>", often("plus", some("sequence", F, regex("\n*"))), "</a>"),
        ['<a><f>{"a":1}</f>\n<f>{"a":1}</f>\n\n</a>', '<a><f>{"a":2}</f></a>'],
        ["<a></a>", '<a>\n<f>{"a":1}</f></a>'],
    ),
    (
        some("sequence", often("star", G), tag("<go>", ANY, "</go>")),
        ["<g>a</g><g>b</g><go></go>", "<go>x</go>"],
        ["<g>a</g>", "<g>a</g><go>"],
    ),
    (
        tag("<a>", some("or", often("star", G), often("plus", F), separated("<", F)), "</a>"),
        ["<a></a>", "<a><g>a</g><g>b</g></a>", '<a><f>{"a":1}</f></a>', f"<a>{F1}<{F1}</a>"],
        ["<a><g>a</g><f></a>", "<a><</a>"],
    ),
    (  # so does one that may be the last
        tag("<a>", some("or", some("sequence", regex("[^;]*"), often("star", const("x"))), F), "]"),
        ["<a>]", "<a>abxx]", f"<a>{F1}]"],
        ["<a>;]", "<a>"],
    ),
    (
        tag("<a>", some("or", const("x"), some("sequence", const("x"), H)), "</a>"),
        ["<a>x</a>", "<a>x<h>y</h></a>"],
        ["<a><h></h></a>"],
    ),
    (
        tag("<a>", some("sequence", separated(",", G), H), "</a>"),
        ["<a><h></h></a>", "<a><g>a</g>,<g>b</g><h>y</h></a>"],
        ["<a></a>", "<a><g>a</g></a>"],
    ),
    (
        some("sequence", some("sequence", JSON, regex("[a-c]+")), const("b!"), JSON),
        ['{"a":1}abb!{"a":1}'],
        ['{"a":1}b!{"a":1}'],
    ),
    (
        tag("<", triggered(["<f"], F, at_least_one=True, stop_after_first=True), ""),
        [f"<{F1}"],
        ["<", f"<{F1}x"],
    ),
    (
        tag("<a>", often("plus", some("sequence", JSON, regex("[^;]*"))), "»"),
        ['<a>{"a":1}x»', '<a>{"a":1}»'],
        ["<a>»", '<a>{"a":1};»'],
    ),
    (  # what tells that one part has ended may end the next one
        some("sequence", {**JSON, "json_schema": {"type": "integer"}}, triggered(["<"], G, H)),
        ["12<g>a</g>", "1", "12 <h></h>", "1<g>a</g>b<h>x</h>"],
        ["12<", "12<x", "12<x<g>a</g>", "1x<x<g>a</g>"],
    ),
    (
        some("sequence", regex("[a-c]+"), tag("d", some("or", JSON, ANY), "]"), separated("", G)),
        ["ad]", "abd]<g>a</g>", "adb]"],
        ["ad]]", "ad]<g>]", "adb]b]"],
    ),
    (
        some("sequence", regex("[a-c]+|a<b>c"), tag("<b>", some("or", JSON, ANY), [";", "]"])),
        ["ac<b>]", "ac<b>x;"],
        ["ac<b>]]", "a<b>];", "a<b>"],
    ),
    (  # an expression that may be what ends the tag ends with the first of these
        tag("<a>", repeat(1, 2, some("sequence", JSON, regex("[a-z<]*"))), "<b>"),
        ['<a>{"a":1}<b>', '<a>{"a":1}a<{"a":2}bb<b>'],
        ["<a><b>", '<a>{"a":1}{"a":1}{"a":1}<b>'],
    ),
    (
        some("sequence", tag("<think>", ANY, "</think>"), triggered(["<f"], F)),
        ["<think>a</think>b", '<think></think><f>{"a":1}</f>'],
        ["b", "<think>a", "<think></think><f"],
    ),
    # What stands before alternatives stands before other tags, too.
    (
        some("or", tag(CALL[0], some("or", F, G), CALL[1]), tag(CALL[0], H, CALL[1])),
        [f"<call>{F1}</call>", "<call><g>a</g></call>", "<call><h>x</h></call>"],
        ["<call></call>", f"<call>{F1}<g>a</g></call>", "<call><h>x</call>"],
    ),
    (
        some(
            "or",
            tag(
                "<f=",
                some("or", *(some("sequence", const(name), JSON) for name in ("get>", "put>"))),
                "</f>",
            ),
            tag("<f=get_all>", ANY, "</f>"),
        ),
        ['<f=get>{"a":1}</f>', '<f=put>{"a":1}</f>', "<f=get_all>x</f>"],
        ["<f=get></f>", '<f=get_all>{"a":1}<f>'],
    ),
    *(
        (
            some("or", tag(CALL[0], one, CALL[1]), tag(CALL[0], H, CALL[1])),
            ["<call></call>", f"<call>{F1}</call>", "<call><h>x</h></call>"],
            ["<call>", f"<call>{F1}{F1}</call>", "<call><g>a</g></call>"],
        )
        for one in (separated(",", F), often("optional", F), often("optional", some("or", F, F)))
    ),
    (
        some("or", tag("<t>", some("or", G, JSON), "</t>"), tag("<t>", const("<end>"), "</t>")),
        ['<t>{"a":1}</t>', "<t><g>a</g></t>", "<t><end></t>"],
        ["<t></t>", '<t><end>{"a":1}</t>', '<t><g>a</g>{"a":1}</t>'],
    ),
    (  # and apart from them where one of them may be empty, or begin as another does
        tag("<a>", some("or", often("optional", G), F), "</a>"),
        ["<a></a>", "<a><g>a</g></a>", f"<a>{F1}</a>"],
        ["<a><g></g></a>", f"<a><g>a</g>{F1}</a>"],
    ),
    (
        tag("<a>", some("or", JSON, some("sequence", const("{{"), JSON)), ["</a>", ""]),
        ['<a>{"a":1}</a>', '<a>{"a":1}', '<a>{{{"a":1}'],
        ["<a>", "<a></a>", '<a>{"a":1}{{'],
    ),
]


@pytest.mark.parametrize(("format_", "right", "wrong"), CASES)
def test_a_format(format_: Any, right: list[str], wrong: list[str]) -> None:
    grammar = compiled(form(format_))
    for text in right:
        assert Reader(text).fits(format_), text
        assert accepts(grammar, text), text
    for text in wrong:
        assert not Reader(text).fits(format_), text
        assert not accepts(grammar, text), text
    written = [write(grammar.sequence(len(PROMPT)), seed) for seed in range(12)]
    whole = [text for text in written if text is not None]
    for text in whole:
        assert Reader(text).fits(format_), text
    # Some ends have to be spelled, which a random model does not do.
    assert whole or re.search("</t>|</think>|</go>|</a>|<b>|»|abc", str(format_))


@pytest.mark.parametrize("seed", range(examples(60)))
def test_a_random_model_writes_what_random_formats_say(seed: int) -> None:
    format_ = Formats(seed, is_clear=False).format(3)
    grammar = compiled(form(format_))
    for again in range(4):
        text = write(grammar.sequence(len(PROMPT)), again, most=90, patience=10)
        assert text is None or Reader(text).fits(format_), (text, format_)


@pytest.mark.parametrize("seed", range(examples(150)))
def test_what_random_formats_say_may_be_written(seed: int) -> None:
    """And what is nearly the same is not, unless it says the same."""
    formats = Formats(seed, is_clear=True)
    format_ = formats.format(4 if seed % 4 == 0 else 3)
    grammar = compiled(form(format_))
    for _ in range(3):
        text = formats.text(format_)
        assert Reader(text).fits(format_), (text, format_)
        assert accepts(grammar, text), (text, format_)
        for near in formats.near(text, 4):
            assert not accepts(grammar, near) or Reader(near).fits(format_), (near, format_)


def test_every_format_is_tested() -> None:
    assert {format_["type"] for format_, _, _ in CASES} == FORMATS.keys()


def test_a_tag_among_tags_needs_no_type() -> None:
    bare = {name: value for name, value in G.items() if name != "type"}
    assert form(triggered(["<"], bare, F)) == form(triggered(["<"], G, F))
    assert form(separated(",", bare)) == form(separated(",", G))
    with pytest.raises(RequestError, match=r"format\.content has the type None"):
        form(tag("a", bare, "b"))


def test_members_that_say_nothing_are_as_left_out() -> None:
    for kind, members in SILENT.items():
        plain = {"any_text": ANY, "json_schema": JSON}[kind]
        assert form({**plain, **members}) == form(plain)
        for name in members:
            with pytest.raises(RequestError, match=f"format has '{name}'; it needs"):
                form({**plain, name: 0})


@pytest.mark.parametrize(
    ("format_", "place"),
    [
        (triggered(["<"], F, G, tag("<n>", regex(r"[^\s\S]"), "</n>")), "tags[2].content"),
        (separated(",", F, tag("<n>", regex(r"a[^\s\S]"), "</n>")), "tags[1].content"),
        (triggered(["<"], tag("<n>", {**JSON, "json_schema": False}, "</n>")), "tags[0].content"),
        (
            triggered(["<"], F, tag("<n>", {**GRAMMAR, "grammar": "start: b"}, "")),
            "tags[1].content",
        ),
        (triggered(["<"], F, tag("<n>", {**GRAMMAR, "grammar": "%llguidance {}"}, "")), "tags[1]"),
        (triggered(["<"], F, tag("<n>", {**GBNF, "grammar": "root ::= ("}, "")), "tags[1].content"),
        (triggered(["<"], F, tag("<n>", regex("("), "")), "tags[1].content"),
        (triggered(["<"], F, tag("<n>", regex("a\\"), "")), "tags[1].content"),
        (some("sequence", const("a"), regex(r"[^\s\S]")), "elements[1]"),
        (often("star", some("or", const("a"), regex(r"[^\s\S]"))), "content.elements[1]"),
    ],
)
def test_a_content_that_nothing_fits_is_refused_with_its_place(format_: Any, place: str) -> None:
    for thought in (None, Thought(opens=("<think>",), closes=("</think>",))):
        with pytest.raises(RequestError) as caught:
            compiled(replace(form(format_), thought=thought))
        assert f"format.{place}" in str(caught.value)
        assert re.search(
            "no text fits|cannot be compiled|remove them|GBNF|backslash", str(caught.value)
        )
        assert caught.value.param == "structured_outputs.structural_tag"


OLDER = {
    "type": "structural_tag",
    "structures": [{"begin": "<function=f>", "schema": DIGIT, "end": "</function>"}],
    "triggers": ["<function="],
}


def test_the_older_dialect_is_the_newer_one() -> None:
    newer = form(triggered(["<function="], tag("<function=f>", JSON, "</function>")))
    older = StructuredOutputs(structural_tag=OLDER)
    assert older == newer == StructuredOutputs(structural_tag=json.dumps(OLDER))
    assert replace(older, param="x") == older  # it may be read again
    grammar = compiled(older)
    assert accepts(grammar, 'so <function=f>{"a": 1}</function> then')
    assert not accepts(grammar, 'so <function=f>{"a": 3}</function> then')
    assert not accepts(grammar, 'so <function=g>{"a": 1}</function> then')


def test_a_trigger_leads_to_a_tag_in_any_tokens() -> None:
    """A model that wants to write nothing but triggers writes tags."""
    format_ = triggered(["<"], tag("<b>", const("x"), "</b>"))
    grammar = compiled(form(format_))
    assert accepts(grammar, "<b>x</b>" * 9)
    for text in ("<", "<b", "<b>", "<b>x", "<b>x</b", "<b>x</b><", "a<a"):
        assert not accepts(grammar, text)


def test_behind_reasoning() -> None:
    thought = Thought(opens=("<think>",), closes=("</think>",))
    grammar = compiled(replace(StructuredOutputs(structural_tag=OLDER), thought=thought))
    assert accepts(grammar, '<think> <function=x </think>\n<function=f>{"a":1}</function>')
    assert accepts(grammar, "hello")
    assert not accepts(grammar, "<think>a</think><function=x")


@pytest.mark.parametrize(
    ("format_", "found"),
    [
        ([], "format is []"),
        ({}, "has the type None"),
        ({"type": "xml"}, "has the type 'xml', which is not supported; choose another one"),
        *(({"type": kind}, f"{hint}; the types are const") for kind, hint in REFUSED.items()),
        ({"type": ["tag"]}, "has the type ['tag']"),
        ({"type": "regex", "pattern": "a", "flags": "i"}, "format has 'flags'; it needs pattern"),
        ({"type": "tag", "begin": "a", "end": "b"}, "format lacks 'content'"),
        (const(""), "format.value is ''; it must be a text that is not empty"),
        (regex("("), "cannot be compiled"),
        (regex("a(?!b)"), "look-around"),
        ({"type": "grammar", "grammar": '%llguidance {}\nstart: "a"'}, "options"),
        ({"type": "grammar", "grammar": "start: b"}, "unknown name"),
        ({**JSON, "style": "qwen_xml"}, "only 'json' is supported"),
        ({"type": "json_schema", "json_schema": []}, "must be a schema"),
        ({"type": "json_schema", "json_schema": {"uniqueItems": True}}, "'uniqueItems'"),
        ({**ANY, "excludes": "x"}, "format.excludes is 'x'; it must be a list"),
        ({**ANY, "excludes": [""]}, "format.excludes is ''"),
        (some("sequence"), "format.elements is []"),
        (some("sequence", ANY, const("a")), "format.elements[0] ends with free text"),
        (some("sequence", triggered(["<"], F), const("a")), "format.elements[0] ends with free"),
        (tag("", JSON, "x"), "format.begin is ''"),
        (tag("a", JSON, None), "format.end is None"),
        (tag("a", JSON, []), "format.end is []"),
        (tag("a", ANY, ""), "format.end is empty behind free text"),
        (triggered([], F), "format.triggers is []"),
        (triggered(["<"]), "format.tags is []"),
        (triggered(["<"], JSON), "format.tags[0] has the type 'json_schema'"),
        (triggered(["<"], F, at_least_one=1), "format.at_least_one is 1"),
        (triggered(["<g"], F), "'<f>' begins with none of the triggers '<g'"),
        (triggered(["<f", "<g"], F), "no tag begins with the trigger '<g'"),
        (triggered(["<", "<f"], F), "'<' is a part of '<f'"),
        (triggered(["<f"], F, excludes=["f"]), "'f' is a part of '<f'"),
        (tag("a", triggered(["<"], F), "</a>"), "in format.content '<' is a part of '</a>'"),
        (tag("a", {**ANY, "excludes": ["b"]}, "b!"), "'b' is a part of 'b!'"),
        (
            often("star", ANY),
            "format.content ends with free text, whose end nothing tells, and may",
        ),
        (often("plus", some("sequence", JSON, ANY)), "format.content ends with free text"),
        (repeat(0, 2, triggered(["<"], F)), "format.content ends with free text"),
        (some("sequence", often("optional", ANY), const("a")), "format.elements[0] ends with free"),
        ({"type": "star", "contents": ANY}, "format has 'contents'; it needs content"),
        ({"type": "repeat", "content": JSON}, "format lacks 'min'"),
        (repeat(True, 1, JSON), "format.min is True; it must be a whole number"),
        (repeat(0, 1.0, JSON), "format.max is 1.0; it must be a whole number"),
        (repeat(-1, 1, JSON), "format comes -1 to 1 times; min is 0 to"),
        (repeat(0, 0, JSON), "format comes 0 to 0 times; min is 0 to"),
        (repeat(0, MAX_TIMES + 1, JSON), f"max is 1 to {MAX_TIMES}, or -1 for any number"),
        (repeat(MAX_TIMES + 1, -1, JSON), f"min is 0 to {MAX_TIMES}"),
        (repeat(3, 2, JSON), "format.max is 2, less than min, which is 3"),
        (separated(1, F), "format.separator is 1"),  # type: ignore[arg-type]
        (
            repeat(0, MAX_TIMES, repeat(0, MAX_TIMES, repeat(0, 2, const("a")))),
            "comes 200000000 times in all, at most 100000000 are supported",
        ),
        (some("or", *[const("a")] * MAX_FORMATS), f"more than {MAX_FORMATS}"),
    ],
)
def test_what_is_refused(format_: Any, found: str) -> None:
    with pytest.raises(RequestError) as caught:
        compiled(form(format_))
    assert found in str(caught.value)
    assert caught.value.param == "structured_outputs.structural_tag"
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("{", "not valid JSON"),
        (3, "must be a structural tag"),
        ("3", "the structural tag is 3"),
        ({"type": "tag", "format": ANY}, "has the type 'tag'"),
        ({"type": "structural_tag"}, "has nothing else"),
        ({**OLDER, "format": ANY}, "has 'format', 'structures', 'triggers'"),
        ({**OLDER, "structures": []}, "structures is []"),
        ({**OLDER, "structures": [{"begin": "<function=f>"}]}, "structures[0] lacks 'schema'"),
        ({**OLDER, "triggers": ["<x"]}, "begins with none"),
        ({"type": "structural_tag", "format": const("x" * MAX_CHARS)}, "characters"),
        ({"type": "structural_tag", "format": const("\ud800")}, "half of a character"),
    ],
)
def test_what_is_no_structural_tag(given: Any, found: str) -> None:
    with pytest.raises(RequestError) as caught:
        StructuredOutputs(structural_tag=given)
    assert found in str(caught.value)


def test_what_is_too_long_as_it_is_enforced_alone() -> None:
    schema: Any = {"type": "object", "properties": {"": {"type": "null"}}}
    name = "x" * (MAX_CHARS - len(json.dumps(schema, separators=(",", ":"))))
    schema["properties"] = {name: {"type": "null"}}
    assert len(StructuredOutputs(json=schema).text) == MAX_CHARS
    assert len(json.dumps(schema, indent=9)) > MAX_CHARS  # white space is not counted
    assert StructuredOutputs(json=json.dumps(schema, indent=9)).text
    closed = MAX_CHARS + len(',"additionalProperties":false')
    with pytest.raises(RequestError, match=f"of {MAX_CHARS} characters has {closed} as"):
        StructuredOutputs(json=schema, strict=True)
    tagged = {"type": "structural_tag", "format": tag("", const("x"), "")}
    size = len(json.dumps(tagged, separators=(",", ":")))
    format_ = tag("b" * (MAX_CHARS - size), const("x"), "")
    with pytest.raises(RequestError, match=f"structural tag of {MAX_CHARS} characters has") as it:
        form(format_)
    assert it.value.param == "structured_outputs.structural_tag"


def test_contents_that_are_alike_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count(monkeypatch)
    compiled(form(triggered(["<"], *[tag(f"<{number}>", JSON, "") for number in range(9)])))
    assert len(made) == 2  # it alone, and all together
    assert made[1].count("%json") == 1


@pytest.mark.parametrize("leaf", [JSON, GRAMMAR])
def test_what_is_in_tags_in_each_other_is_written_once(leaf: Any) -> None:
    made: list[Any] = []

    def told(content: Any) -> str:
        made.append(content)
        return "{}"

    writer = TagWriter(re.escape, str, told, told, "")
    grammar = writer.whole(json.loads(form(nested(leaf, 7)).text)["format"])
    assert grammar.count(" part_1 ") > 100  # the rule of it
    assert len(made) == 1


def test_tags_in_each_other_are_not_written_for_ever() -> None:
    """Each of them twice as often as the one around it."""
    compiled(form(nested(JSON, 7)))
    many = some("sequence", JSON, *[const("a")] * 1900)
    compiled(form(nested(many, 2)))
    with pytest.raises(RequestError, match=f"makes more than {MAX_VISITS} formats, as the") as it:
        compiled(form(nested(many, 7)))
    assert it.value.param == "structured_outputs.structural_tag"


def nested(format_: Any, depth: int) -> Any:
    for number in range(depth):
        format_ = separated(",", tag(f"<{number}>", format_, f"</{number}>"))
    return format_


@pytest.mark.parametrize("wrong", [r"a[^\s\S]", "a(b", "[^\\s\\S]|[^\\s\\S]b"])
def test_many_small_expressions_are_looked_at_together(
    monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    made = count(monkeypatch)
    large = [regex(f"[a-c]{{1,300}}{number}") for number in range(3)]
    small = [regex(f"{number}[a-z]+ {{0,99}}x") for number in range(2 * ROW + 1)]
    compiled(form(tag("<", some("or", *large, *small), ">")))
    assert len(made) == 3 + 3 + 1  # those alone, rows of them, and all
    small[ROW] = regex(wrong)
    with pytest.raises(RequestError, match=rf"content\.elements\[{3 + ROW}\] of the struct"):
        compiled(form(tag("<", some("or", *large, *small), ">")))


def test_looking_at_contents_ends_when_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one who asks is refused, too, for a while; then it is looked at anew."""
    made = count(monkeypatch)
    spec = form(tag("<", some("or", *[regex(f"[a-c]{{1,300}}{one}") for one in range(9)]), ">"))
    now_s, tick_s = 0.0, 1.0

    def monotonic() -> float:
        nonlocal now_s
        now_s += tick_s
        return now_s

    for each in (compiler, cache):
        monkeypatch.setattr(each, "time", SimpleNamespace(monotonic=monotonic))
    own = GrammarCompiler(vocabulary, replace(LIMITS, timeout_s=5.0, refused_s=30.0))
    told = r"took more than 5\.0 s to compile; make it smaller\. It is refused for 30 s now"
    for times in (1, 2):
        for _ in range(9):
            with pytest.raises(RequestError, match=told) as caught:
                own.compile(spec)
            assert caught.value.param == "structured_outputs.structural_tag"
            assert len(made) == times * 5
        with pytest.raises(RequestError, match=told) as caught:
            asyncio.run(own.prepare(replace(spec, param="response_format")))
        assert caught.value.param == "response_format"
        assert len(made) == times * 5
        now_s += 30.0
    tick_s = 0.001  # it takes less now
    assert own.compile(spec)
    own.close()


def test_what_took_too_long_is_forgotten_like_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    made = count(monkeypatch)
    specs = [form(tag("<", regex(f"[a-c]{{1,300}}{one}"), ">")) for one in range(3)]
    own = GrammarCompiler(vocabulary, replace(LIMITS, max_entries=2))
    now = iter(range(0, 10**9, 1000))
    monkeypatch.setattr(compiler, "time", SimpleNamespace(monotonic=lambda: next(now)))
    monkeypatch.setattr(cache, "time", SimpleNamespace(monotonic=lambda: 0.0))
    for spec in (*specs, *specs):
        with pytest.raises(RequestError, match="took more than"):
            own.compile(spec)
        assert len(own._cache) <= 2
    assert own._num_chars == sum(spec.num_chars for spec in specs[1:])
    assert made == []
    own.close()


def count(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what is compiled from now on, as it will be."""
    made: list[str] = []
    matcher = compiler._matcher

    def counted(grammar: str, *rest: Any) -> Any:
        made.append(grammar)
        return matcher(grammar, *rest)

    monkeypatch.setattr(compiler, "_matcher", counted)
    return made


@pytest.mark.parametrize("outer", [*product(range(4), (1, 2, 3, ENDLESS))])
def test_what_is_repeated_in_another_comes_so_often_in_all(outer: tuple[int, int]) -> None:
    """Or it stays in it, where some numbers between the least and the most are none."""
    for inner in product(range(4), (1, 2, 3, ENDLESS)):
        (least, most), (low, high) = outer, inner
        if most < least != most != ENDLESS or high < low != high != ENDLESS:
            continue
        content, fewest, whole = times_of(repeat(*outer, repeat(*inner, JSON)))
        numbers = {0} if least == 0 else set()
        for times in range(max(1, least), 10 if most == ENDLESS else most + 1):
            numbers |= set(range(times * low, 10 if high == ENDLESS else times * high + 1))
        told = set(range(fewest, 10 if whole == ENDLESS else whole + 1))
        told &= set(range(10))
        numbers &= set(range(10))
        assert (told == numbers) == (content is JSON or content == JSON), (outer, inner)


def test_depth() -> None:
    format_: Any = const("x")
    for _ in range(MAX_DEPTH):
        format_ = tag("(", format_, ")")
    assert accepts(compiled(form(format_)), "(" * MAX_DEPTH + "x" + ")" * MAX_DEPTH)
    with pytest.raises(RequestError, match=f"more than {MAX_DEPTH} formats deep"):
        form(tag("(", format_, ")"))


def test_no_calls_beside_it() -> None:
    with pytest.raises(RequestError, match="would hide calls of tools"):
        StructuredOutputs(structural_tag=OLDER, calls=StructuredOutputs(regex="a"))
    with pytest.raises(RequestError, match="strict is for json"):
        StructuredOutputs(structural_tag=OLDER, strict=True)


def test_lists_of_texts_are_short() -> None:
    texts = [f"{number:03}" for number in range(MAX_TEXTS + 1)]
    with pytest.raises(RequestError, match="has 129 texts; it may have 128 at most"):
        form({"type": "any_text", "excludes": texts})
    with pytest.raises(RequestError, match="has 129 texts"):
        form(tag("<", JSON, texts))
    form(tag("<", JSON, texts[1:]))


def test_a_grammar_that_grows_is_refused() -> None:
    ends = [f"{number:0400}" for number in range(MAX_TEXTS)]
    expressions = [regex(f".{number}") for number in range(400)]
    spec = form(tag("<", some("or", JSON, *expressions), ends))
    with pytest.raises(RequestError, match="makes a grammar of more than") as caught:
        compiled(spec)
    assert caught.value.param == "structured_outputs.structural_tag"
