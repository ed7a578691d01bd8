"""From a structural tag, as `structural.read` gives it, to a grammar in llguidance's syntax.

The library's lexer takes the longest text that fits, and never goes back. So whatever is regular
(texts, expressions, free text, and what is made of them) is one lexeme together with what ends it,
and free text ends with the first text that may end it: its lexemes are lazy. But what may come
again is no lexeme where something else stands behind it, which could begin as another time does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from onnxport.errors import RequestError
from onnxport.serving.structured.edges import flat, last_ones, takes, times_of
from onnxport.serving.structured.expression import (
    ASCII,
    UnknownSyntaxError,
    ascii_chars,
    read_expression,
)
from onnxport.serving.structured.structural import ENDLESS, free_end

ANY_TEXT = "(?s:.*)"
NOTHING = ("",)  # what ends the last format of a text
OTHERS = ()  # what ends a format that another one stands behind
MAX_CHARS = 1 << 21  # of a grammar; a request's own are far fewer
MAX_VISITS = 100_000  # of formats, each of which is looked at with each that it is in
MAX_TOTAL = 100_000_000  # times that a format comes which is repeated in others


class TagWriter:
    """Writes the rules of one structural tag."""

    def __init__(
        self,
        literally: Callable[[str], str],
        regex: Callable[[str], str],
        schema: Callable[[Any], str],
        grammar: Callable[[str], str],
        where: str,
    ) -> None:
        """Write nothing yet.

        Args:
            literally: returns a regular expression of one text.
            regex: returns a request's expression as it stands in a grammar.
            schema: returns a checked schema as it is compiled.
            grammar: returns a checked grammar in Lark's syntax.
            where: the field of a request that errors name.
        """
        self._literally = cache(literally)
        self._regex = cache(regex)
        self._schema = schema
        self._grammar = grammar
        self._rules: list[str] = []
        self._where = where
        self._num_chars = 0
        self._num_visits = 0
        self._rule_of: dict[str, str] = {}  # the names of rules, by what they say
        self._written_as: dict[int, str] = {}  # the names of rules, by the formats that they are
        self._repeated_as: dict[tuple[int, tuple[str, ...]], str] = {}
        self._chars_of: dict[str, int] = {}  # the ASCII characters of an expression, as bits

    def whole(self, format_: Mapping[str, Any]) -> str:
        """Return the grammar of a text that has a format."""
        body = self._format(format_, NOTHING, "")
        return "\n".join((f"start: {body}", *self._rules))

    def _write(self, rule: str) -> None:
        """Write a line.

        Raises:
            RequestError: there are too many characters. What ends a format is written with each of
                its alternatives, so that they may be many more than a request's.
        """
        self._num_chars += len(rule)
        if self._num_chars > MAX_CHARS:
            raise RequestError(
                f"the structural tag makes a grammar of more than {MAX_CHARS} characters; give it "
                "fewer tags, alternatives or ends, or nest fewer of them",
                self._where,
            )
        self._rules.append(rule)

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        """Write a rule; returns its name."""
        name = f"part_{len(self._rules)}{'[lazy]' if lazy else ''}"
        self._write(f"{name}: {body}")
        return name.removesuffix("[lazy]")

    def _lexeme(self, body: str, *, lazy: bool = False) -> str:
        """Write one lexeme; returns its name."""
        name = f"PART_{len(self._rules)}"
        self._write(f"{name}: {body}")
        return self._rule(name, lazy=lazy) if lazy else name

    def _first(self, body: str, ends: Iterable[str]) -> str:
        """Write a lexeme that ends with the first text that may end it; returns its name.

        The library does not see such an end in the one byte that told it that the lexeme before has
        ended, so where there may be one, nothing may follow it in the lexeme.
        """
        if any(len(end.encode()) == 1 for end in ends):
            body = f"({body}) & ~(({body}) /(?s:.+)/)"
        return self._lexeme(body, lazy=True)

    def _format(self, format_: Mapping[str, Any], ends: Sequence[str], before: str) -> str:
        """Return a format between the text before it and one of the texts that end it.

        Args:
            format_: the format.
            ends: the texts; also NOTHING or OTHERS.
            before: "" where there is none.
        """
        if (regular := self._regular(format_, ends)) is not None:
            if not ends or "" in ends:
                return self._lexeme(_joined(self._plain(before), regular))
            if before:
                return self._lexeme(_joined(self._plain(before), regular), lazy=True)
            return self._first(regular, ends)  # a tag ends with the first end
        kind = format_["type"]
        if kind == "or":
            if takes(format_, ends):
                return self._or(format_["elements"], ends, before)
            return _joined(self._text(before), self._or(format_["elements"], ends, ""))
        if kind == "sequence":
            return self._sequence(format_["elements"], ends, before)
        if kind == "tag":
            return self._closed(self._tag(format_, before), ends)
        if kind == "triggered_tags":
            return self._triggered(format_, ends, before)
        if kind == "tags_with_separator":
            return self._separated(format_, ends, before)
        if kind == "repeat" and before and takes(format_, ends):  # so it comes at most once
            some = self._format(format_["content"], ends, before)
            return some if format_["min"] else _or_none(some, self._none(ends, before))
        if kind == "repeat":
            return _joined(self._text(before), self._repeated(format_, ends))
        return self._closed(_joined(self._text(before), self._content(format_)), ends)

    def _content(self, format_: Mapping[str, Any]) -> str:
        """Return a schema or a grammar, as a rule of its own that is written once."""
        if id(format_) not in self._written_as:
            if format_["type"] == "grammar":
                told = f"%lark {{\n{self._grammar(format_['grammar'])}\n}}"
            else:
                told = f"%json {self._schema(format_['json_schema'])}"
            if told not in self._rule_of:
                self._rule_of[told] = self._rule(told)
            self._written_as[id(format_)] = self._rule_of[told]
        return self._written_as[id(format_)]

    def _or(self, elements: Sequence[Mapping[str, Any]], ends: Sequence[str], before: str) -> str:
        """Return one of some elements, which begin and end alike where others may do so."""
        ways, closed = [], []
        for one in elements:
            if self._may_take(one, ends):
                ways.append(self._format(one, ends, before))
            else:
                closed.append(self._format(one, OTHERS, before))
        return _either([*ways, self._closed(_either(closed), ends)] if closed else ways)

    def _sequence(self, elements: Sequence[Mapping[str, Any]], ends: Any, before: str) -> str:
        """Return elements behind each other, those that are regular as one lexeme."""
        groups: list[list[Mapping[str, Any]]] = []  # from the last one on
        is_run = False  # whether the group at hand is regular
        for one in reversed(list(flat(elements))):
            behind = NOTHING if is_run else OTHERS if groups else ends
            is_regular = self._regular(one, behind) is not None
            if is_regular and is_run:
                groups[-1].insert(0, one)
            else:
                groups.append([one])
            is_run = is_regular
        parts: list[str] = []
        for index, group in reversed(list(enumerate(groups))):
            one = group[0] if len(group) == 1 else {"type": "sequence", "elements": group}
            parts.append(self._format(one, OTHERS if index else ends, "" if parts else before))
        return _joined(*parts)

    def _repeated(self, format_: Mapping[str, Any], ends: Sequence[str]) -> str:
        """Return a format several times; only where it has to be is the last one with its end.

        Otherwise text that may go on as the end does could not be another time instead.
        """
        content, least, most = self._times_of(format_)
        if not self._may_take(content, ends):
            return self._closed(f"{self._one(content, OTHERS)}{_times(least, most)}", ends)
        some = self._one(content, ends)
        if most != 1:
            before = _times(max(0, least - 1), max(ENDLESS, most - 1))
            some = f"{self._one(content, OTHERS)}{before} {some}"
        return some if least else _or_none(some, self._none(ends, ""))

    def _times_of(self, format_: Mapping[str, Any]) -> tuple[Mapping[str, Any], int, int]:
        """Return what `times_of` does.

        Raises:
            RequestError: it is so often that it could not be counted.
        """
        content, least, most = times_of(format_)
        if max(least, most) > MAX_TOTAL:
            raise RequestError(
                f"a format that is repeated in others comes {max(least, most)} times in all, at "
                f"most {MAX_TOTAL} are supported; lower a min or max, or give a max of {ENDLESS}",
                self._where,
            )
        return content, least, most

    def _one(self, content: Mapping[str, Any], ends: Sequence[str]) -> str:
        """Return a format that is repeated, as a rule of its own that is written once."""
        key = id(content), tuple(ends)
        if key not in self._repeated_as:
            self._repeated_as[key] = self._rule(self._format(content, ends, ""))
        return self._repeated_as[key]

    def _tag(self, tag: Mapping[str, Any], before: str, skip: int = 0) -> str:
        """Return a tag behind a text, without the first characters of its beginning."""
        return self._format(tag["content"], tag["end"], before + tag["begin"][skip:])

    def _separated(self, format_: Mapping[str, Any], ends: Sequence[str], before: str) -> str:
        tags, separator = format_["tags"], format_["separator"]
        if not format_["at_least_one"]:
            some = {**format_, "at_least_one": True}
            if takes(format_, ends):
                return _or_none(self._separated(some, ends, before), self._none(ends, before))
            told = _or_none(self._separated(some, ends, ""), self._none(ends, ""))
            return _joined(self._text(before), told)
        first = _either(self._tag(tag, before) for tag in tags)
        more = ""
        if not format_["stop_after_first"]:
            more = f"({_either(self._tag(tag, separator) for tag in tags)})*"
        return self._closed(_joined(first, more), ends)

    def _triggered(self, format_: Mapping[str, Any], ends: Sequence[str], before: str) -> str:
        """Return free text with tags; what is in it before a tag ends with the trigger."""
        tags, triggers = format_["tags"], format_["triggers"]
        if format_["at_least_one"]:
            first = _either(self._tag(tag, before) for tag in tags)
            if format_["stop_after_first"]:
                return self._closed(first, ends)
            return _joined(first, self._free(format_, ends))
        free = self._free(format_, ends)
        if format_["stop_after_first"]:
            tag = self._closed(self._triggered_tag(tags, triggers, format_, ends), ends)
            free = f"({tag} | {self._last(format_, ends)})"
        return _joined(self._text(before), free)

    def _free(self, format_: Mapping[str, Any], ends: Sequence[str]) -> str:
        tag = self._triggered_tag(format_["tags"], format_["triggers"], format_, ends)
        return f"({tag})* {self._last(format_, ends)}"

    def _triggered_tag(
        self,
        tags: Sequence[Mapping[str, Any]],
        triggers: Sequence[str],
        format_: Mapping[str, Any],
        ends: Sequence[str],
    ) -> str:
        """Return free text up to a trigger, and a tag that begins with it."""
        never = [*format_["excludes"], *filter(None, ends)]
        ways = []
        for trigger in triggers:
            text = f"/{ANY_TEXT}{self._literally(trigger)}/{self._without(never)}"
            rest = _either(
                self._tag(tag, "", len(trigger)) for tag in tags if tag["begin"].startswith(trigger)
            )
            ways.append(_joined(self._first(text, [trigger]), rest))
        return _either(ways)

    def _last(self, format_: Mapping[str, Any], ends: Sequence[str]) -> str:
        """Return free text behind which no tag comes, and what ends it."""
        never = [*format_["triggers"], *format_["excludes"]]
        if "" in ends:
            return self._lexeme(f"/{ANY_TEXT}/{self._without(never)}")
        closing = "|".join(map(self._literally, ends))
        return self._first(f"/{ANY_TEXT}({closing})/{self._without(never)}", ends)

    def _without(self, never: Collection[str]) -> str:
        """Return what keeps texts out of a lexeme."""
        told = "|".join(map(self._literally, never))
        return f" & ~/{ANY_TEXT}({told}){ANY_TEXT}/" if never else ""

    def _may_take(self, format_: Mapping[str, Any], ends: Sequence[str] | None = None) -> bool:
        """Whether free text or an expression at the end of a format may take what stands behind.

        Args:
            format_: the format.
            ends: what stands behind; None: anything.
        """
        kind = format_["type"]
        if kind == "regex":
            begins = {end[0] for end in ends if end} if ends is not None else None
            return self._may_hold(format_["pattern"], begins)
        if kind == "triggered_tags":
            return free_end(format_)
        parts = format_.get("elements", ())
        if kind == "sequence":
            parts = last_ones(parts)
        elif kind == "repeat" or (kind == "tag" and "" in format_["end"]):
            parts = [format_["content"]]
        return kind == "any_text" or any(self._may_take(part, ends) for part in parts)

    def _may_hold(self, pattern: str, chars: Collection[str] | None) -> bool:
        """Whether a text of an expression may have one of some characters; None: of any."""
        if chars is None or not all(char.isascii() for char in chars):
            return True
        if pattern not in self._chars_of:
            try:
                self._chars_of[pattern] = ascii_chars(read_expression(pattern))
            except UnknownSyntaxError:
                self._chars_of[pattern] = ASCII
        return any(self._chars_of[pattern] >> ord(char) & 1 for char in chars)

    def _closed(self, told: str, ends: Sequence[str]) -> str:
        return _joined(told, self._either_text(ends))

    def _none(self, ends: Sequence[str], before: str) -> str:
        """Return one of the texts that end a format of which nothing is there."""
        return self._either_text([before + end for end in ends])

    def _either_text(self, texts: Sequence[str]) -> str:
        told = [self._text(text) for text in texts if text]
        return f"({' | '.join(told)}){'?' if '' in texts else ''}" if told else ""

    def _text(self, text: str) -> str:
        return self._plain(text) and self._lexeme(self._plain(text))

    def _plain(self, text: str) -> str:
        return f"/{self._literally(text)}/" if text else ""

    def _regular(self, format_: Mapping[str, Any], ends: Sequence[str]) -> str | None:
        """Return a format and what ends it as one lexeme; None: it is not one.

        Raises:
            RequestError: too many formats were looked at. Tags are written twice where others may
                come behind the first ones, so formats deep in each other are many more than a
                request's.
        """
        self._num_visits += 1
        if self._num_visits > MAX_VISITS:
            raise RequestError(
                f"the structural tag makes more than {MAX_VISITS} formats, as the tags of each "
                "tags_with_separator and triggered_tags are written twice; nest fewer of them",
                self._where,
            )
        kind = format_["type"]
        inner: str | None
        told: str | None = None
        if kind == "const_string":
            told = self._plain(format_["value"])
        elif kind == "regex":
            told = self._regex(format_["pattern"])
        elif kind == "any_text":
            told = f"(/{ANY_TEXT}/{self._without(format_['excludes'])})"
        elif kind == "repeat" and (ends or self._may_take(format_["content"])):
            content, least, most = self._times_of(format_)
            inner = self._regular(content, NOTHING)
            told = inner and f"({inner}){_times(least, most)}"
        elif kind == "tag" and not free_end(format_["content"]):
            inner = self._regular(format_["content"], format_["end"])
            told = inner and _joined(self._plain(format_["begin"]), inner)
        elif kind in ("sequence", "or"):
            elements, behind = format_["elements"], NOTHING if ends else OTHERS
            last = len(elements) - 1 if kind == "sequence" else 0
            parts = [
                self._regular(one, NOTHING if index < last else behind)
                for index, one in enumerate(elements)
            ]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts):
                return None
            told = _joined(*known) if kind == "sequence" else _either(known)
        if told is None or tuple(ends) in (NOTHING, OTHERS):
            return told
        closing = [self._literally(end) for end in ends]
        return _joined(told, f"/{'|'.join(closing)}/")


def _times(least: int, most: int) -> str:
    """Return what stands behind that which comes so many times."""
    return f"{{{least},{'' if most == ENDLESS else most}}}"


def _or_none(some: str, none: str) -> str:
    return f"({some} | {none})" if none else f"({some})?"


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _either(ways: Iterable[str]) -> str:
    told = list(ways)
    return told[0] if len(told) == 1 else f"({' | '.join(f'({way})' for way in told)})"
