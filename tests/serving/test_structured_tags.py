"""Structural tags: what a random model writes is read by a small reader of its own; refusals."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from onnxport.errors import RequestError
from onnxport.serving.reasoning import Thought
from onnxport.serving.structured.spec import MAX_CHARS, StructuredOutputs
from onnxport.serving.structured.structural import FORMATS, MAX_DEPTH, MAX_FORMATS, MAX_TEXTS
from tests.tiers import examples

from .structured import PROMPT, accepts, compiled, write

DIGIT = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, "</f>"]}},
    "required": ["a"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": DIGIT}
ANY = {"type": "any_text"}
GRAMMAR = {"type": "grammar", "grammar": 'start: "(" start ")" | "x"'}
GBNF = {"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def some(kind: str, *elements: Any) -> dict[str, Any]:
    return {"type": kind, "elements": list(elements)}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(triggers: list[str], *tags: Any, **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), **more}


def separated(separator: str, *tags: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "separator": separator, "tags": list(tags), **more}


def form(format_: Any) -> StructuredOutputs:
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": format_})


class Reader:
    """Yields every place where a format may end that begins at a place of a text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def fits(self, format_: Any) -> bool:
        return len(self.text) in set(self.read(format_, 0))

    def read(self, one: Mapping[str, Any], at: int) -> Iterator[int]:
        yield from getattr(self, one["type"])(one, at)

    def const_string(self, one: Any, at: int) -> Iterator[int]:
        if self.text.startswith(one["value"], at):
            yield at + len(one["value"])

    def json_schema(self, one: Any, at: int) -> Iterator[int]:
        begin = re.compile(r"[ \t\r\n]*").match(self.text, at)
        assert begin is not None
        try:
            value, end = json.JSONDecoder().raw_decode(self.text, begin.end())
        except ValueError:
            return
        if isinstance(value, dict) and value.keys() == {"a"} and value["a"] in (1, 2, "</f>"):
            behind = len(self.text[end:]) - len(self.text[end:].lstrip(" \t\r\n"))
            yield from range(end, end + behind + 1)

    def regex(self, one: Any, at: int) -> Iterator[int]:
        for end in range(at, len(self.text) + 1):
            if re.fullmatch(one["pattern"], self.text[at:end]):
                yield end

    def grammar(self, one: Any, at: int) -> Iterator[int]:
        found = re.compile(r"(\(*)x(\)*)").match(self.text, at)
        if found and len(found[2]) >= len(found[1]):
            yield found.end(1) + 1 + len(found[1])

    def any_text(self, one: Any, at: int) -> Iterator[int]:
        return self._free(at, one.get("excludes", ()))

    def _free(self, at: int, never: Any) -> Iterator[int]:
        for end in range(at, len(self.text) + 1):
            if any(each in self.text[at:end] for each in never):
                return
            yield end

    def sequence(self, one: Any, at: int) -> Iterator[int]:
        ends = {at}
        for each in one["elements"]:
            ends = {end for begin in ends for end in self.read(each, begin)}
        yield from ends

    def tag(self, one: Any, at: int) -> Iterator[int]:
        if not self.text.startswith(one["begin"], at):
            return
        closing = [one["end"]] if isinstance(one["end"], str) else one["end"]
        at += len(one["begin"])
        is_free = ANY in (one["content"], *one["content"].get("elements", ()))
        for end in set(self.read(one["content"], at)):
            for close in closing:
                if not self.text.startswith(close, end):
                    continue
                if is_free and any(
                    each in self.text[at : end + len(close) - 1] for each in closing
                ):
                    continue
                yield end + len(close)

    def _tags(self, one: Any, at: int) -> set[int]:
        return {end for each in one["tags"] for end in self.tag(each, at)}

    def triggered_tags(self, one: Any, at: int) -> Iterator[int]:
        once = one.get("stop_after_first", False)
        behind, done = ([at], {at}) if not one.get("at_least_one") else ([], set[int]())
        if one.get("at_least_one"):
            first = self._tags(one, at)
            if once:
                yield from first
                return
            behind, done = list(first), set(first)
        while behind:
            begin = behind.pop()
            for end in self._free(begin, (*one["triggers"], *one.get("excludes", ()))):
                yield end
                if any(self._is_trigger(each, one, begin, end) for each in one["triggers"]):
                    new = self._tags(one, end) - done
                    if once:
                        yield from new
                    else:
                        behind += new
                        done |= new

    def _is_trigger(self, trigger: str, one: Any, begin: int, at: int) -> bool:
        """Whether a trigger stands at a place, and is the first one that is complete."""
        before = self.text[begin : at + len(trigger) - 1]
        is_first = not any(each in before for each in one["triggers"])
        return is_first and self.text.startswith(trigger, at)

    def tags_with_separator(self, one: Any, at: int) -> Iterator[int]:
        if not one.get("at_least_one"):
            yield at
        behind = list(self._tags(one, at))
        yield from behind
        while behind and not one.get("stop_after_first"):
            begin = behind.pop()
            if self.text.startswith(one["separator"], begin):
                new = self._tags(one, begin + len(one["separator"]))
                yield from new
                behind += new


setattr(Reader, "or", lambda self, one, at: (e for o in one["elements"] for e in self.read(o, at)))

F = tag("<f>", JSON, "</f>")
G = tag("<g>", regex("[a-c]{1,3}"), "</g>")
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
    (
        some("sequence", tag("<think>", ANY, "</think>"), triggered(["<f"], F)),
        ["<think>a</think>b", '<think></think><f>{"a":1}</f>'],
        ["b", "<think>a", "<think></think><f"],
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
    assert whole or re.search("</t>|</think>|abc", str(format_))


class Maker:
    """Makes random formats."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def format(self, depth: int, is_last: bool) -> Any:
        """Return a format; only the last one of a sequence may end with free text."""
        kinds = ["const_string", "json_schema", "regex", "grammar"]
        kinds += ["any_text"] if is_last else []
        if depth:
            kinds += ["sequence", "or", "tag", "tags_with_separator"]
            kinds += ["triggered_tags"] if is_last else []
        match self.rng.choice(kinds):
            case "const_string":
                return const(self.rng.choice(["a", "b<", '"]']))
            case "json_schema":
                return JSON
            case "regex":
                return regex(self.rng.choice(["[a-c]", "a?b", "[0-9]{1,2}", "x|xy"]))
            case "grammar":
                return self.rng.choice([GRAMMAR, GBNF])
            case "any_text":
                return ANY
            case "sequence":
                first, last = self.format(depth - 1, False), self.format(depth - 1, is_last)
                return some("sequence", first, last)
            case "or":
                return some("or", *(self.format(depth - 1, is_last) for _ in range(2)))
            case "tag":
                return self.tag(depth, "<")
            case "tags_with_separator":
                more = {"at_least_one": self.rng.random() < 0.5}
                return separated(",", *(self.tag(depth, "<") for _ in range(2)), **more)
            case _:
                more = {name: self.rng.random() < 0.3 for name in ("stop_after_first",)}
                more["at_least_one"] = self.rng.random() < 0.3
                return triggered(["{", "("], self.tag(depth, "{"), self.tag(depth, "("), **more)

    def tag(self, depth: int, begin: str) -> Any:
        begin += self.rng.choice(["", "a", "ab"])
        return tag(begin, self.format(depth - 1, True), self.rng.choice(["]", "]}", "}"]))


@pytest.mark.parametrize("seed", range(examples(60)))
def test_random_formats(seed: int) -> None:
    format_ = Maker(seed).format(3, is_last=True)
    grammar = compiled(form(format_))
    for again in range(4):
        text = write(grammar.sequence(len(PROMPT)), again, most=80, patience=8)
        assert text is None or Reader(text).fits(format_), (text, format_)


def test_every_format_is_tested() -> None:
    assert {format_["type"] for format_, _, _ in CASES} == FORMATS.keys()


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
        ({"type": "qwen_xml_parameter", "json_schema": {}}, "it is one of const_string, "),
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
        (separated(1, F), "format.separator is 1"),  # type: ignore[arg-type]
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
    name = "x" * (MAX_CHARS - len(json.dumps(schema)))
    schema["properties"] = {name: {"type": "null"}}
    assert len(StructuredOutputs(json=schema).text) == MAX_CHARS
    closed = MAX_CHARS + len(', "additionalProperties": false')
    with pytest.raises(RequestError, match=f"of {MAX_CHARS} characters has {closed} as"):
        StructuredOutputs(json=schema, strict=True)
    size = len(json.dumps({"type": "structural_tag", "format": tag("", const("x"), "")}))
    format_ = tag("b" * (MAX_CHARS - size), const("x"), "")
    with pytest.raises(RequestError, match=f"structural tag of {MAX_CHARS} characters has") as it:
        form(format_)
    assert it.value.param == "structured_outputs.structural_tag"


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
    spec = form(tag("<", some("or", *[JSON] * 400), ends))
    with pytest.raises(RequestError, match="makes a grammar of more than") as caught:
        compiled(spec)
    assert caught.value.param == "structured_outputs.structural_tag"
