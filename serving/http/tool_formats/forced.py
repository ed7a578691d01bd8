"""Forms of texts that call tools, as grammars in the model's own format."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onnxport.errors import RequestError
from onnxport.serving.http.tool_formats.base import (
    ARGUMENTS,
    BREAK,
    ID,
    NAME,
    QUOTED,
    Matched,
    Nested,
    Tagged,
    ToolFormat,
    Value,
)
from onnxport.serving.http.tool_formats.literal_rules import LiteralRules, NotSaidError, is_name
from onnxport.serving.structured.pointers import inner_schemas
from onnxport.serving.structured.prepared import prepared, tell
from onnxport.serving.structured.spec import MAX_CHARS, StructuredOutputs, compact

NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_TEXT = "(?s:.*)"
NO_TOKENS: Mapping[str, int] = {}


def calls(
    tools: Sequence[Mapping[str, Any]],
    syntax: ToolFormat,
    special: Mapping[str, int] = NO_TOKENS,
    *,
    several: bool,
    forced: bool = True,
    alone: bool = False,
    name: str | None = None,
) -> StructuredOutputs:
    """Return the form of a text that calls tools.

    Where calls are forced the text is nothing else, and arguments have the form of their function's
    parameters; of a function that is not strict what cannot be enforced is left out of it.
    Otherwise there may be text before, between and after calls, or no call at all; arguments of
    functions that are not strict are any object then.

    Args:
        tools: those of the request, in OpenAI's shape.
        syntax: how the model writes calls.
        special: those texts of the syntax that are special tokens, and their ids.
        several: whether there may be more than one call.
        forced: whether there has to be one.
        alone: whether there is no text beside calls, and one at least, though they are not forced.
        name: of the only function that may be called; None: each may.

    Raises:
        RequestError: the parameters of a tool cannot be enforced.
    """
    functions = {index: tool["function"] for index, tool in enumerate(tools)}
    if name is not None:
        functions = {index: each for index, each in functions.items() if each["name"] == name}
    names = [each["name"] for each in functions.values()]
    writer = _Writer(syntax, special, names, in_json=alone)
    rules = writer.forced(several) if forced or alone else writer.free(several)
    rules.append("call: " + " | ".join(f"call_{index}" for index in functions))
    offered = {}
    left = MAX_CHARS
    left_out: list[str] = []
    for index, function in functions.items():
        enforced = forced or function.get("strict")
        if enforced:
            left -= _num_chars(function)
            if left < 0:
                raise RequestError(
                    f"the parameters of functions up to {function['name'][:40]!r} have "
                    f"{MAX_CHARS - left} characters and cannot be compiled, at most {MAX_CHARS} "
                    "are; make them smaller, or send fewer tools",
                    f"tools.{index}.function.parameters",
                )
        parameters = _parameters(index, function, left_out) if enforced else {"type": "object"}
        offered[index] = function["name"], parameters
    rules += writer.functions(offered)
    tell("tools", left_out)
    grammar = "\n".join(rules)
    if len(grammar) > MAX_CHARS:
        raise RequestError(
            f"calls of the functions make a grammar of {len(grammar)} characters, which cannot be "
            f"compiled, at most {MAX_CHARS} are; make parameters smaller, or send fewer tools",
            "tools",
        )
    return StructuredOutputs(grammar=grammar, param="tools", has_channels=syntax.has_channels)


def _num_chars(function: Mapping[str, Any]) -> int:
    return len(compact(function.get("parameters")))


def _parameters(index: int, function: Mapping[str, Any], left_out: list[str]) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object.

    A model may go on with arguments that the function does not have, small ones without an end, so
    there are none of these where the parameters do not speak of them, as in vLLM and llama.cpp.

    Args:
        index: of the tool.
        function: its function.
        left_out: gets the places of what is not enforced.

    Raises:
        RequestError: it cannot be enforced.
    """
    given = function.get("parameters")
    if given is None:  # which is a function without parameters, in OpenAI's words
        return NO_PARAMETERS
    param = f"tools.{index}.function.parameters"
    ready = prepared(given, param, strict=bool(function.get("strict")), closes=True)
    left_out += (param + place for place in ready.left_out)
    parameters = ready.schema
    if not isinstance(parameters, dict):
        raise RequestError(
            f"no arguments fit the parameters of {function['name'][:40]!r}, which exclude "
            "everything; describe an object",
            param,
        )
    if "object" not in parameters.setdefault("type", "object"):
        raise RequestError(
            f"the parameters of {function['name'][:40]!r} have the type "
            f"{parameters['type']!r}, and arguments are an object; describe that",
            param,
        )
    return {**parameters, "type": "object"}  # other arguments would be no call


class _Writer:
    """Writes the rules of one format."""

    def __init__(
        self,
        syntax: ToolFormat,
        special: Mapping[str, int],
        names: Sequence[str],
        *,
        in_json: bool,
    ) -> None:
        """Write nothing yet.

        Args:
            syntax: see `calls`.
            special: see `calls`.
            names: of the functions.
            in_json: whether calls that begin as JSON does are of the same lexemes, since the text
                may be other JSON: the longest lexeme is taken, and a longer one would forbid that.
        """
        self._syntax = syntax
        is_json = not syntax.written.opening and syntax.written.call.startswith('{"')
        self._in_json = in_json and is_json
        self._begins = "|".join(map(_pattern, syntax.begins(names)))
        self._written = syntax.written
        self._special = special

    def functions(self, offered: Mapping[int, tuple[str, Mapping[str, Any]]]) -> list[str]:
        """Return the rules of `call_{index}` for each function: its name and its parameters.

        Where a block may hold several calls they are all of one kind.
        """
        rules: dict[int, list[str]] = {}
        for index, function in offered.items():
            with contextlib.suppress(NotSaidError):
                rules[index] = self._literal(index, *function)
        if len(rules) < len(offered) and self._written.between_calls is not None:
            rules = {}
        told = (rules.get(index) or self._function(index, *offered[index]) for index in offered)
        return [rule for each in told for rule in each]

    def _function(self, index: int, name: str, parameters: Mapping[str, Any]) -> list[str]:
        """Return the rules of `call_{index}`, a call of a function."""
        if self._in_json:
            return [f"call_{index}: %json {compact(self._schema(name, parameters))}"]
        tagged = self._syntax.tagged and self._syntax.tagged(name, parameters)
        if not tagged:
            ways = (self._written.call, *self._written.other_calls)
            call = " | ".join(self._call(way, name, f"arguments_{index}") for way in ways)
            return [f"call_{index}: {call}", f"arguments_{index}: %json {compact(parameters)}"]
        arguments, rules = self._arguments(f"{index}", tagged.arguments)
        call = _joined(self._spelled(tagged.before), arguments, self._spelled(tagged.behind))
        return [f"call_{index}: {call}", *rules]

    def _literal(self, index: int, name: str, parameters: Mapping[str, Any]) -> list[str]:
        """Return the rules of a call whose arguments are no JSON.

        Raises:
            NotSaidError: it has to be JSON.
        """
        literals = self._syntax.literals
        if literals is None or (literals.is_python and not is_name(name)):
            raise NotSaidError
        writer = LiteralRules(
            literals, f"literal_{index}", parameters, self._spelled, self._text_up_to
        )
        arguments, rules = writer.arguments()
        return [f"call_{index}: {self._call(literals.call, name, arguments)}", *rules]

    def _text_up_to(self, name: str, closing: str, pattern: str) -> list[str]:
        """Return the rules of a name for a text of a pattern up to another one, and with it."""
        first, *_ = self._atoms(closing)
        if not isinstance(first, str):
            return [f"{name}: /{pattern}/ {self._spelled(closing)}"]
        behind = self._spelled(closing[len(first) :])
        return [
            f"{name}: {_joined(f'{name}_text', behind)}",
            f"{name}_text[lazy]: /{pattern}{_pattern(first)}/",
        ]

    def _schema(self, name: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON schema of a call, whose arguments follow another one."""
        told = self._written.call.replace(QUOTED, "0").replace(ARGUMENTS, "0")
        of_name, of_arguments = json.loads(told)
        return {
            "type": "object",
            "properties": {
                of_name: {"const": name},
                of_arguments: _moved(parameters, f"#/properties/{of_arguments}"),
            },
            "required": [of_name, of_arguments],
            "additionalProperties": False,
        }

    def _arguments(self, place: str, tagged: Sequence[Tagged]) -> tuple[str, list[str]]:
        """Return arguments in their tags, one after the other, and the rules they are made of."""
        names = [f"argument_{place}_{at}" for at in range(len(tagged))]
        told = [f"{name}{each.times}" for name, each in zip(names, tagged, strict=True)]
        rules: list[str] = []
        for at, (name, each) in enumerate(zip(names, tagged, strict=True)):
            ways: list[str] = []
            way: Tagged | None = each
            while way is not None:
                written, more = self._argument(f"{place}_{at}_{len(ways)}", way)
                ways.append(written)
                rules += more
                way = way.other
            rules.append(f"{name}: {' | '.join(ways)}")
        return _joined(*told), rules

    def _argument(self, place: str, argument: Tagged) -> tuple[str, list[str]]:
        """Return an argument in its tags, written in one way, and the rules it is made of."""
        name = '/[^<>"\\s]+/' if argument.name is None else _text(argument.name)
        opening = _joined(self._spelled(argument.before), name, self._spelled(argument.between))
        closing = argument.after
        value, rules = self._value(f"value_{place}", argument.value)
        if argument.value is None:
            first, *rest = self._atoms(argument.after)
            value, rules = f"value_{place}", [f"value_{place}: /{ANY_TEXT}/"]
            if isinstance(first, str):
                # A special token ends any text: the first end of a line need not be the last.
                lazy = "" if rest and isinstance(rest[0], int) else "[lazy]"
                rules = [f"value_{place}{lazy}: /{ANY_TEXT}{_pattern(first)}/"]
                closing = argument.after[len(first) :]
        return _joined(opening, value, self._spelled(closing)), rules

    def _value(self, rule: str, value: Value) -> tuple[str, list[str]]:
        """Return a value that is not any text, and the rules it is made of."""
        match value:
            case None:
                return "", []
            case Nested(tagged):
                return self._arguments(rule, tagged)
            case Matched(pattern):
                return f"{rule}?", [f"{rule}: /({pattern})+/"]
            case tuple():
                return rule, [f"{rule}: {' | '.join(map(_text, value))}"]
        return rule, [f"{rule}: %json {compact(value)}"]

    def _call(self, way: str, name: str, arguments: str) -> str:
        """Return a call of a function, written in one way; arguments follow another rule."""
        quoted = json.dumps(name, ensure_ascii=False)  # as chat templates write it
        places = {
            NAME: _text(name),
            QUOTED: _text(quoted),
            ID: f"/{self._written.id_pattern}/",
            ARGUMENTS: arguments,
        }
        parts = re.split(f"({'|'.join(map(re.escape, places))})", way)
        return _joined(*(places.get(part) or self._spelled(part) for part in parts))

    def forced(self, several: bool) -> list[str]:
        """Return the rules of a text that is calls and nothing else."""
        written = self._written
        optional = written.optional_marker
        tag = f"({self._spelled(optional)})?" if optional else ""
        block = _joined(self._spelled(written.opening), self._inner(several))
        rules = [f"block: {_joined(block, self._spelled(written.closing))}"]
        if several and written.between_blocks is not None:
            more = _joined(self._spelled(written.between_blocks), "block")
            return [f"start: {_joined(tag, 'block')} ({more})*", *rules]
        return [f"start: {_joined(tag, 'block')}", *rules]

    def free(self, several: bool) -> list[str]:
        """Return the rules of a text that may hold calls, each as it has to be."""
        if self._written.told:
            return self._messages(several)
        inner = _joined(self._inner(several), self._spelled(self._written.closing))
        text = self._behind if self._begins else ANY_TEXT
        rules = [f"TEXT: {self._content(text)}", *self._marked("marked", "TEXT", text, inner)]
        if not self._begins:
            return ["start: marked* TEXT" if several else "start: marked | TEXT", *rules]
        if not several:
            rules = []
        return [
            "start: FIRST | first" + (" marked* TEXT" if several else ""),
            f"first: begun | {_joined(self._spelled(self._written.opening), inner)}",
            f"FIRST: {self._content(ANY_TEXT)} & ~/\\s*({self._begins}){ANY_TEXT}/",
            *self._marked("begun", "FIRST", "\\s*", inner),
            *rules,
        ]

    def _messages(self, several: bool) -> list[str]:
        """Return the rules of texts and calls that are blocks of their own."""
        begins = " | ".join(map(self._spelled, self._written.told))
        between = self._spelled(self._written.between_blocks or "")
        last = "(told | block)"
        return [
            f"start: {f'({last} {between})*' if several else f'(told {between})*'} {last}",
            f"told: ({begins}) TEXT",
            f"TEXT: {self._content(ANY_TEXT)}",
            f"block: {_joined(self._spelled(self._written.opening), 'call')}",
        ]

    @property
    def _behind(self) -> str:
        """What may stand behind a block: it does not begin as a further one does there."""
        signs = "".join(map(_pattern, self._syntax.goes_on))
        return f"\\s*([^\\s{signs}]{ANY_TEXT})?" if signs else ANY_TEXT

    def _content(self, text: str) -> str:
        """Return a lexeme of content: a text that has none in it that opens a block."""
        texts = [each for each in self._syntax.markers if each not in self._special]
        if not texts:
            return f"/{text}/"
        return f"/{text}/ & ~/{ANY_TEXT}({'|'.join(map(_pattern, texts))}){ANY_TEXT}/"

    def _marked(self, name: str, lexeme: str, before: str, inner: str) -> list[str]:
        """Return the rules of content up to a block that a marker opens, and the block.

        Args:
            name: of the rule.
            lexeme: the content, where the marker is a special token.
            before: the content, where the marker is text, as a regular expression.
            inner: of the block.
        """
        opening = (self._written.optional_marker or "") + self._written.opening
        first, *_ = self._atoms(opening)
        if isinstance(first, int):
            return [f"{name}: {_joined(lexeme, self._spelled(opening), inner)}"]
        behind = self._spelled(opening[len(first) :])
        return [
            f"{name}: {_joined(f'opens_{name}', behind, inner)}",
            f"opens_{name}[lazy]: /{before}{_pattern(first)}/",
        ]

    def _inner(self, several: bool) -> str:
        """Return the calls of a block."""
        between = self._written.between_calls
        if not several or between is None:
            return "call"
        return f"call ({_joined(self._spelled(between), 'call')})*"

    def _atoms(self, text: str) -> Iterator[str | int]:
        """Yield the texts, special tokens and places of BREAK that a text of the format is of."""
        found = "|".join(map(re.escape, [BREAK, *sorted(self._special, key=len, reverse=True)]))
        for part in re.split(f"({found})", text):
            if part:
                yield self._special.get(part, part)

    def _spelled(self, text: str) -> str:
        """Return a text of the format as a grammar has it."""
        return _joined(*map(_atom, self._atoms(text)))


def _moved(schema: Mapping[str, Any], to: str) -> dict[str, Any]:
    """Return a checked schema for another place in a document; what it refers to moves with it."""
    moved: dict[str, Any] = json.loads(json.dumps(schema))
    pending: list[Any] = [moved]
    while pending:
        if isinstance(one := pending.pop(), dict):
            pending += [inner for _, inner in inner_schemas("", one)]
            if "$ref" in one:
                one["$ref"] = to + one["$ref"].removeprefix("#")
    return moved


def _atom(atom: str | int) -> str:
    """Return a text, a special token or a place of BREAK as a grammar has it."""
    if isinstance(atom, int):
        return f"<[{atom}]>"
    return '("\\n")?' if atom == BREAK else _text(atom)


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _text(text: str) -> str:
    """Return a text as a grammar has it; JSON's escapes are those of its texts."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def _pattern(text: str) -> str:
    """Return a regular expression of one text, as it may stand between slashes."""
    return "".join(
        char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text
    )
