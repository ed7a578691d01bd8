"""From a structural tag, as `structural.read` gives it, to a grammar in llguidance's syntax.

The library's lexer takes the longest text that fits, and never goes back. So whatever is regular
(texts, expressions, free text, and what is made of them) is one lexeme together with what ends it,
and free text ends with the first text that may end it: its lexemes are lazy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from onnxport.errors import RequestError
from onnxport.serving.structured.structural import free_end

ANY_TEXT = "(?s:.*)"
MAX_CHARS = 1 << 21  # of a grammar; a request's own are far fewer


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
        self._literally = literally
        self._regex = regex
        self._schema = schema
        self._grammar = grammar
        self._rules: list[str] = []
        self._where = where
        self._num_chars = 0

    def whole(self, format_: Mapping[str, Any]) -> str:
        """Return the grammar of a text that has a format."""
        body = self._format(format_, ("",), "")
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

    def _format(self, format_: Mapping[str, Any], ends: Sequence[str], before: str) -> str:
        """Return a format between the text before it and one of the texts that end it.

        Args:
            format_: the format.
            ends: [""] where nothing does.
            before: "" where there is none.
        """
        if (regular := self._regular(format_, ends)) is not None:
            lazy = "" not in ends  # a tag ends with the first end
            return self._lexeme(_joined(self._plain(before), regular), lazy=lazy)
        kind = format_["type"]
        if kind == "or":
            return _either(self._format(one, ends, before) for one in format_["elements"])
        if kind == "sequence":
            return self._sequence(format_["elements"], ends, before)
        if kind == "tag":
            return self._closed(self._tag(format_, before), ends)
        if kind == "triggered_tags":
            return self._triggered(format_, ends, before)
        if kind == "tags_with_separator":
            return self._separated(format_, ends, before)
        if kind == "grammar":
            told = f"%lark {{\n{self._grammar(format_['grammar'])}\n}}"
        else:
            told = f"%json {self._schema(format_['json_schema'])}"
        return self._closed(_joined(self._text(before), self._rule(told)), ends)

    def _sequence(self, elements: Sequence[Mapping[str, Any]], ends: Any, before: str) -> str:
        """Return elements behind each other, those that are regular as one lexeme."""
        parts: list[str] = []
        run: list[Mapping[str, Any]] = []
        for index, one in enumerate(elements):
            is_last = index == len(elements) - 1
            if self._regular(one, ("",)) is not None:
                run.append(one)
            if run and (is_last or run[-1] is not one):
                joined = {"type": "sequence", "elements": run}
                closes = is_last and run[-1] is one
                parts.append(self._format(joined, ends if closes else ("",), before))
                before = ""
                if closes:
                    break
                run = []
            if not run:
                parts.append(self._format(one, ends if is_last else ("",), before))
                before = ""
        return _joined(*parts)

    def _tag(self, tag: Mapping[str, Any], before: str, skip: int = 0) -> str:
        """Return a tag behind a text, without the first characters of its beginning."""
        return self._format(tag["content"], tag["end"], before + tag["begin"][skip:])

    def _separated(self, format_: Mapping[str, Any], ends: Sequence[str], before: str) -> str:
        tags, separator = format_["tags"], format_["separator"]
        first = _either(self._tag(tag, before) for tag in tags)
        more = ""
        if not format_["stop_after_first"]:
            more = f"({_either(self._tag(tag, separator) for tag in tags)})*"
        some = self._closed(_joined(first, more), ends)
        if format_["at_least_one"]:
            return some
        none = self._either_text([before + end for end in ends])
        return f"({some})?" if not none else f"({some} | {none})"

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
            ways.append(_joined(self._lexeme(text, lazy=True), rest))
        return _either(ways)

    def _last(self, format_: Mapping[str, Any], ends: Sequence[str]) -> str:
        """Return free text behind which no tag comes, and what ends it."""
        never = [*format_["triggers"], *format_["excludes"]]
        if "" in ends:
            return self._lexeme(f"/{ANY_TEXT}/{self._without(never)}")
        closing = "|".join(map(self._literally, ends))
        return self._lexeme(f"/{ANY_TEXT}({closing})/{self._without(never)}", lazy=True)

    def _without(self, never: Collection[str]) -> str:
        """Return what keeps texts out of a lexeme."""
        told = "|".join(map(self._literally, never))
        return f" & ~/{ANY_TEXT}({told}){ANY_TEXT}/" if never else ""

    def _closed(self, told: str, ends: Sequence[str]) -> str:
        return told if tuple(ends) == ("",) else _joined(told, self._either_text(ends))

    def _either_text(self, texts: Sequence[str]) -> str:
        told = [self._text(text) for text in texts if text]
        return f"({' | '.join(told)}){'?' if '' in texts else ''}" if told else ""

    def _text(self, text: str) -> str:
        return self._plain(text) and self._lexeme(self._plain(text))

    def _plain(self, text: str) -> str:
        return f"/{self._literally(text)}/" if text else ""

    def _regular(self, format_: Mapping[str, Any], ends: Sequence[str]) -> str | None:
        """Return a format and what ends it as one expression; None: it is not regular."""
        kind = format_["type"]
        told: str | None = None
        if kind == "const_string":
            told = self._plain(format_["value"])
        elif kind == "regex":
            told = self._regex(format_["pattern"])
        elif kind == "any_text":
            told = f"(/{ANY_TEXT}/{self._without(format_['excludes'])})"
        elif kind == "tag" and not free_end(format_["content"]):
            inner = self._regular(format_["content"], format_["end"])
            told = inner and _joined(self._plain(format_["begin"]), inner)
        elif kind in ("sequence", "or"):
            parts = [self._regular(one, ("",)) for one in format_["elements"]]
            known = [part for part in parts if part is not None]
            if len(known) < len(parts):
                return None
            told = _joined(*known) if kind == "sequence" else _either(known)
        if told is None or tuple(ends) == ("",):
            return told
        closing = [self._literally(end) for end in ends]
        return _joined(told, f"/{'|'.join(closing)}/")


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _either(ways: Iterable[str]) -> str:
    told = list(ways)
    return told[0] if len(told) == 1 else f"({' | '.join(f'({way})' for way in told)})"
