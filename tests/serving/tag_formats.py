"""Formats of structural tags: what reads them without a grammar, and what makes random ones."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jsonschema import Draft202012Validator

from onnxport.serving.structured.spec import StructuredOutputs

from .instances import Instances

ENDLESS = -1
LETTERS = "KRQABCDEFGHIJLMNOPSTUVWXYZ"
TIMES = {"optional": (0, 1), "plus": (1, ENDLESS), "star": (0, ENDLESS)}
# Where a format ends, and where the free text begins that it ends with.
Place = tuple[int, int | None]

DIGIT = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2, "</f>"]}},
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMAS: tuple[dict[str, Any], ...] = (
    DIGIT,
    {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 5}},
        "required": ["n"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"l": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3}},
        "additionalProperties": {"type": "null"},
    },
)
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


def often(kind: str, content: Any) -> dict[str, Any]:
    return {"type": kind, "content": content}


def repeat(least: Any, most: Any, content: Any) -> dict[str, Any]:
    return {"type": "repeat", "min": least, "max": most, "content": content}


def tag(begin: str, content: Any, end: Any) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(triggers: list[str], *tags: Any, **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers, "tags": list(tags), **more}


def separated(separator: str, *tags: Any, **more: Any) -> dict[str, Any]:
    return {"type": "tags_with_separator", "separator": separator, "tags": list(tags), **more}


def form(format_: Any) -> StructuredOutputs:
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": format_})


def ends_of(one: Mapping[str, Any]) -> list[str]:
    return [one["end"]] if isinstance(one["end"], str) else list(one["end"])


class Reader:
    """Finds every place of a text where a format may end that begins at a place.

    Free text ends with the first text that ends the tag around it. Other formats may end wherever
    they fit, of which a grammar may allow less (docs/structured_output.md).
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._known: dict[tuple[int, int, tuple[str, ...]], set[Place]] = {}

    def fits(self, format_: Any) -> bool:
        return len(self.text) in {end for end, _ in self.read(format_, 0)}

    def read(self, one: Mapping[str, Any], at: int, stops: tuple[str, ...] = ()) -> set[Place]:
        """Return the places; `stops` end the tag around that the format is the last part of."""
        key = id(one), at, stops
        if key not in self._known:
            self._known[key] = set(getattr(self, f"_{one['type']}")(one, at, stops))
        return self._known[key]

    def _const_string(self, one: Any, at: int, stops: Any) -> Iterable[Place]:
        return [(at + len(one["value"]), None)] if self.text.startswith(one["value"], at) else []

    def _json_schema(self, one: Any, at: int, stops: Any) -> Iterable[Place]:
        try:
            value, end = json.JSONDecoder().raw_decode(self.text, max(self._spaces(at)))
        except ValueError:
            return []
        if not Draft202012Validator(one["json_schema"]).is_valid(value):
            return []
        return [(each, None) for each in self._spaces(end)]

    def _spaces(self, at: int) -> range:
        """Return the places in white space, which may come where there may be two JSON texts."""
        found = re.compile(r"[ \t\r\n]*").match(self.text, at)
        return range(at, found.end() + 1 if found else at)

    def _regex(self, one: Any, at: int, stops: Any) -> Iterable[Place]:
        pattern = re.compile(one["pattern"])
        ends = range(at, len(self.text) + 1)
        return [(end, None) for end in ends if pattern.fullmatch(self.text, at, end)]

    def _grammar(self, one: Any, at: int, stops: Any) -> Iterable[Place]:
        found = re.compile(r"(\(*)x(\)*)").match(self.text, at)
        if found and len(found[2]) >= len(found[1]):
            return [(found.end(1) + 1 + len(found[1]), None)]
        return []

    def _any_text(self, one: Any, at: int, stops: Any) -> Iterable[Place]:
        return self._free(at, (*one.get("excludes", ()), *stops))

    def _free(self, at: int, never: Sequence[str]) -> Iterable[Place]:
        for end in range(at, len(self.text) + 1):
            if any(each in self.text[at:end] for each in never):
                return
            yield end, at

    def _sequence(self, one: Any, at: int, stops: Any) -> Iterable[Place]:
        *others, last = one["elements"]
        places = {at}
        for each in others:
            places = {end for begin in places for end, _ in self.read(each, begin)}
        return {found for begin in places for found in self.read(last, begin, stops)}

    def _or(self, one: Any, at: int, stops: Any) -> Iterable[Place]:
        return {found for each in one["elements"] for found in self.read(each, at, stops)}

    def _optional(self, one: Any, at: int, stops: Any) -> Iterable[Place]:
        least, most = TIMES.get(one["type"]) or (one["min"], one["max"])
        now: set[Place] = {(at, None)}
        found = set() if least else set(now)
        if not least and "json_schema" in repr(one):
            found |= {(each, None) for each in self._spaces(at)}
        for count in range(1, 1 + (least + len(self.text) + 1 if most == ENDLESS else most)):
            now = {each for begin, _ in now for each in self.read(one["content"], begin, stops)}
            found |= now if count >= least else set()
        return found

    _plus = _star = _repeat = _optional

    def _tag(self, one: Any, at: int, stops: Any) -> Iterable[Place]:
        if not self.text.startswith(one["begin"], at):
            return
        closing = tuple(filter(None, ends_of(one)))
        for end, free in self.read(one["content"], at + len(one["begin"]), closing):
            for close in ends_of(one):
                behind = end + len(close)
                if not self.text.startswith(close, end):
                    continue
                if free is not None and any(
                    each in self.text[free : behind - 1] for each in closing
                ):
                    continue
                yield behind, None

    def _tags(self, one: Any, at: int) -> set[int]:
        return {end for each in one["tags"] for end, _ in self._tag(each, at, ())}

    def _triggered_tags(self, one: Any, at: int, stops: Any) -> Iterable[Place]:
        once, must = one.get("stop_after_first", False), one.get("at_least_one", False)
        first = self._tags(one, at) if must else {at}
        if once and must:
            yield from ((end, None) for end in first)
            return
        behind, done = list(first), set(first)
        while behind:
            begin = behind.pop()
            for end, _ in self._free(begin, (*one["triggers"], *one.get("excludes", ()), *stops)):
                yield end, begin
                if any(self._is_trigger(each, one, begin, end) for each in one["triggers"]):
                    new = self._tags(one, end) - done
                    if once:
                        yield from ((each, None) for each in new)
                    else:
                        behind += new
                        done |= new

    def _is_trigger(self, trigger: str, one: Any, begin: int, at: int) -> bool:
        """Whether a trigger stands at a place, and is the first one that is complete."""
        before = self.text[begin : at + len(trigger) - 1]
        is_first = not any(each in before for each in one["triggers"])
        return is_first and self.text.startswith(trigger, at)

    def _tags_with_separator(self, one: Any, at: int, stops: Any) -> Iterable[Place]:
        if not one.get("at_least_one"):
            yield at, None
        behind = list(self._tags(one, at))
        yield from ((end, None) for end in behind)
        while behind and not one.get("stop_after_first"):
            begin = behind.pop()
            if self.text.startswith(one["separator"], begin):
                new = self._tags(one, begin + len(one["separator"]))
                yield from ((end, None) for end in new)
                behind += new


class Formats:
    """Makes random formats, and texts that have them."""

    def __init__(self, seed: int, *, is_clear: bool) -> None:
        """Make nothing yet.

        Args:
            seed: of what is made.
            is_clear: whether texts can be read in one way alone, so that a grammar allows all.
        """
        self.rng = random.Random(seed)
        self._is_clear = is_clear
        self._number = 0

    def format(self, depth: int, *, is_last: bool = True) -> Any:
        """Return a format; one that is not the last of others does not end with free text."""
        kinds = ["const_string", "json_schema", "regex", "grammar"]
        if depth:
            kinds = [*kinds[:3], "sequence", "sequence", "or", "tag", "tag", "tags_with_separator"]
            kinds += ["optional", "plus", "star", "repeat"]
        kinds += ["any_text"] if is_last else []
        kinds += ["triggered_tags", "triggered_tags"] if is_last and depth else []
        kind = self.rng.choice(kinds)
        return getattr(self, f"_{kind}")(depth - 1, is_last)

    def _name(self, *names: str) -> str:
        """Return a name; where texts are clear, one of its own."""
        self._number += 1
        name = self.rng.choice(names)
        return f"{name}{self._number}" if self._is_clear else name

    def _first(self) -> str:
        """Return a character that a text begins with, and no other one if texts are clear."""
        self._number += 1
        return LETTERS[self._number % len(LETTERS)] if self._is_clear else self.rng.choice("Kb]")

    def _const_string(self, depth: int, is_last: bool) -> Any:
        return const(self._first() + self.rng.choice(["", "<", '"]']))

    def _json_schema(self, depth: int, is_last: bool) -> Any:
        return {"type": "json_schema", "json_schema": self.rng.choice(SCHEMAS)}

    def _regex(self, depth: int, is_last: bool) -> Any:
        first = self._first()
        clear = (f"{first}[a-c]{{1,3}}", f"{first}[^;]*;", f"{first}(yes|no)?!")
        return regex(self.rng.choice(clear if self._is_clear else ("[a-c<]*", "a?b", "x|xy")))

    def _grammar(self, depth: int, is_last: bool) -> Any:
        return self.rng.choice([GRAMMAR, GBNF])

    def _any_text(self, depth: int, is_last: bool) -> Any:
        return self.rng.choice([ANY, {**ANY, "excludes": ["!!", "#"]}])

    def _sequence(self, depth: int, is_last: bool) -> Any:
        number = self.rng.randint(1, 3)
        elements = [self.format(depth, is_last=False) for _ in range(number - 1)]
        if elements and self._is_clear:  # free text could be what begins another time
            elements.append(self._const_string(depth, False))
        return some("sequence", *elements, self.format(depth, is_last=is_last))

    def _or(self, depth: int, is_last: bool) -> Any:
        is_last = is_last and not self._is_clear  # free text would hide the others
        number = self.rng.randint(1, 3)
        return some("or", *(self.format(depth, is_last=is_last) for _ in range(number)))

    def _optional(self, depth: int, is_last: bool) -> Any:
        return often("optional", self.format(depth, is_last=is_last and not self._is_clear))

    def _plus(self, depth: int, is_last: bool) -> Any:
        return often("plus", self.format(depth, is_last=False))

    def _star(self, depth: int, is_last: bool) -> Any:
        return often("star", self.format(depth, is_last=False))

    def _repeat(self, depth: int, is_last: bool) -> Any:
        least = self.rng.randrange(3)
        most = self.rng.choice([ENDLESS, max(1, least), least + 2])
        return repeat(least, most, self.format(depth, is_last=False))

    def _tag(self, depth: int, is_last: bool, *, begin: str = "<t") -> Any:
        name = self._name("", "a", "ab")
        ends = self.rng.choice([[f"</t{name}>"], [f"~{name}~"], [f"</t{name}>", "]"]])
        inner = self.format(depth, is_last=True)
        return tag(f"{begin}{name}>", inner, ends[0] if len(ends) == 1 else ends)

    def _flags(self) -> dict[str, Any]:
        return {
            name: True for name in ("at_least_one", "stop_after_first") if self.rng.random() < 0.3
        }

    def _tags_with_separator(self, depth: int, is_last: bool) -> Any:
        tags = [self._tag(depth, False) for _ in range(self.rng.randint(1, 2))]
        return separated(self.rng.choice([",", "", "<"]), *tags, **self._flags())

    def _triggered_tags(self, depth: int, is_last: bool) -> Any:
        tags = [self._tag(depth, False, begin=begin) for begin in ("<t", "<t", "{{")]
        more = {"excludes": ["!!"]} if self.rng.random() < 0.3 else {}
        return triggered(["<t", "{{"], *tags, **more, **self._flags())

    def near(self, text: str, number: int) -> Iterator[str]:
        """Yield texts of which a part differs."""
        for _ in range(number):
            at, end = sorted(self.rng.randint(0, len(text)) for _ in range(2))
            end = min(end, at + 2)
            yield text[:at] + self.rng.choice(["", "<", "]", "a", text[:5]]) + text[end:]

    def text(self, one: Mapping[str, Any], stops: tuple[str, ...] = ()) -> str:
        """Return a text that a clear format has; `stops` end the tag around."""
        return str(getattr(self, f"_text_of_{one['type']}")(one, stops))

    def _text_of_const_string(self, one: Any, stops: Any) -> str:
        return str(one["value"])

    def _text_of_json_schema(self, one: Any, stops: Any) -> str:
        values = list(Instances(one["json_schema"], self.rng.randrange(1 << 20)).some(1))
        separators = self.rng.choice([(",", ":"), (", ", ": "), (" ,\n", "\n\t: ")])
        return json.dumps(values[0], ensure_ascii=False, separators=separators)

    def _text_of_regex(self, one: Any, stops: Any) -> str:
        first, rest = one["pattern"][0], one["pattern"][1:]
        texts = {"[^;]*;": [";", "<x</;", "a~\n;"], "(yes|no)?!": ["!", "yes!"]}
        return str(first + self.rng.choice(texts.get(rest, ["a", "cb", "aaa"])))

    def _text_of_grammar(self, one: Any, stops: Any) -> str:
        deep = self.rng.randrange(3)
        return "(" * deep + "x" + ")" * deep

    def _text_of_any_text(self, one: Any, stops: Any) -> str:
        return self._free(stops or ("",), one.get("excludes", ()))

    def _free(self, behind: Sequence[str], never: Sequence[str]) -> str:
        """Return free text that only what stands behind it ends."""
        words = ["u", "<", "</", "!", " ", "é", "\n", "w", "{", "~", ">"]
        while True:
            text = "".join(self.rng.choices(words, k=self.rng.randrange(6)))
            # Either of several texts may stand behind, and none of them comes before it is whole.
            seen = [(text + each)[: -1 if each else None] for each in behind]
            if not any(each in one for one in seen for each in (*filter(None, behind), *never)):
                return text

    def _text_of_sequence(self, one: Any, stops: Any) -> str:
        *others, last = one["elements"]
        return "".join([*map(self.text, others), self.text(last, stops)])

    def _text_of_or(self, one: Any, stops: Any) -> str:
        return self.text(self.rng.choice(one["elements"]), stops)

    def _text_of_optional(self, one: Any, stops: Any) -> str:
        least, most = TIMES.get(one["type"]) or (one["min"], one["max"])
        number = self.rng.randint(least, least + 2 if most == ENDLESS else most)
        return "".join(self.text(one["content"], stops) for _ in range(number))

    _text_of_plus = _text_of_star = _text_of_repeat = _text_of_optional

    def _text_of_tag(self, one: Any, stops: Any) -> str:
        ends = ends_of(one)
        return str(one["begin"] + self.text(one["content"], tuple(ends)) + self.rng.choice(ends))

    def _text_of_tags_with_separator(self, one: Any, stops: Any) -> str:
        least, most = one.get("at_least_one", False), 1 if one.get("stop_after_first") else 3
        number = self.rng.randint(least, most)
        return str(one["separator"]).join(
            self.text(self.rng.choice(one["tags"])) for _ in range(number)
        )

    def _text_of_triggered_tags(self, one: Any, stops: Any) -> str:
        once, excludes = one.get("stop_after_first", False), one.get("excludes", ())
        parts = [self.text(self.rng.choice(one["tags"]))] if one.get("at_least_one") else []
        for _ in range(0 if parts and once else self.rng.randrange(2 if once else 3)):
            parts.append(self._free(one["triggers"], (*excludes, *stops)))
            parts.append(self.text(self.rng.choice(one["tags"])))
        if not (parts and once):
            parts.append(self._free(stops or ("",), (*one["triggers"], *excludes)))
        return "".join(parts)
