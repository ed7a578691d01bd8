"""From what a request asks to a grammar that llguidance compiles."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llguidance import regex_to_lark

from onnxport.errors import RequestError
from onnxport.serving.channels import (
    ANALYSIS,
    CHANNEL,
    CONSTRAIN,
    END,
    FINAL,
    MESSAGE,
    ROLE,
    START,
    Channels,
)
from onnxport.serving.structured.exclusive import let_any_of
from onnxport.serving.structured.formats import tightened
from onnxport.serving.structured.gbnf import TooLargeError, lark_of
from onnxport.serving.structured.json_text import WHITESPACE
from onnxport.serving.structured.names import NO_NAMES, TokenNames
from onnxport.serving.structured.prepared import prepared
from onnxport.serving.structured.spec import StructuredOutputs
from onnxport.serving.structured.structural import contents
from onnxport.serving.structured.tags import TagWriter
from onnxport.serving.thoughts import MOST_BREAKS, Thought

# Where only one text is possible, llguidance would allow only the tokens that the tokenizer makes
# of it alone. A model chooses how to write it, and the tokenizer is not asked.
HEAD = '%llguidance {"no_forcing": true}\n'
# Whitespace between the parts of JSON has an end, llama.cpp's, or a model may write it for ever.
# There is no \u, so that each name has one spelling, and no name comes disguised.
JSON_OPTIONS: Mapping[str, str | bool | None] = {
    "whitespace_flexible": True,
    "whitespace_pattern": WHITESPACE,
    "lenient": False,
    "coerce_one_of": False,
    "json_allowed_escapes": 'bfnrt"\\',
}
# An answer in messages, each in its channel (`serving/channels.py`), behind the prompt's header, or
# within a message that the prompt has begun. Models name the type of JSON in the header.
_START = "start: thought* answer\n"
_START_WITHIN = "start: THOUGHT next thought* answer\n"
_THOUGHTS = f"""thought: {CHANNEL} "{ANALYSIS}" {MESSAGE} THOUGHT next
next: {END} {START} "{ROLE}"
THOUGHT: /(?s:.*)/
"""
_IN_FINAL = f"""start: {CHANNEL} "{FINAL}" type? {MESSAGE} body
type: /[ ]?/ {CONSTRAIN} /[a-z]+/
"""
# Nothing here takes longer than in proportion to a grammar, which may be long: nothing else runs
# meanwhile.
_TEMPERATURE = re.compile(r"\btemperature\s*=")  # = stands nowhere else
# A comment, a text, an expression, which may have several lines, or a special token by its name, as
# the compiler has them. One without an end goes as far as it may; the compiler refuses it.
_ATOM = re.compile(
    r"""(?:\#|//)[^\n]*
    |"(?:\\.|[^"\\\n])*+(?:"|\\?(?=\n|\Z))
    |/(?:\\.|[^/\\])++(?:/|\\|\Z)
    |<[^<>\s]+>""",
    re.VERBOSE,
)
_ATOM_OR_SCHEMA = re.compile(rf"{_ATOM.pattern}|(?P<schema>%json\s*(?=\{{))", re.VERBOSE)
_OPTIONS = re.compile(r"%llguidance\b.*")
MOST_RULES = 2000  # of a grammar in GBNF; some may stand in others as deep, on the compiler's stack
SMALL_CHARS = 64  # of an expression that needs no look of its own
_LARGE_COUNT = re.compile(r"\{[^}]*[0-9]{3}")
_IN_LARK = re.compile(r"^[^\S\n]*+start[^\S\n]*+:(?!:=)", re.MULTILINE)
CUT = "it ends in a backslash that escapes nothing; write two for a backslash"


def grammar_of(spec: StructuredOutputs, names: TokenNames = NO_NAMES) -> str:
    """Return the grammar that llguidance compiles, in its own syntax, which extends Lark's.

    Args:
        spec: the form.
        names: of the model's tokens.

    Raises:
        RequestError: the grammar has what would not be obeyed.
    """
    has_names = spec.kind in ("grammar", "structural_tag")
    texts = names.texts
    form = _with_texts(_form(spec, names), texts) if has_names else _form(spec, names)
    calls = None if spec.calls is None else _with_texts(_form(spec.calls, names), texts)
    if isinstance(spec.thought, Channels):
        if spec.calls is not None and calls is not None and not spec.calls.has_channels:
            form, calls = _or(calls, form), None
        if spec.thought.is_final and not spec.has_channels:
            return HEAD + form
        if not spec.has_channels:
            form = _with_texts(_IN_FINAL, texts) + _rule("body", form)
        form = form if calls is None else _or(calls, form)
        start = _START_WITHIN if spec.thought.begun else _START
        return HEAD + start + _with_texts(_THOUGHTS, texts) + _rule("answer", form)
    form = form if calls is None else _or(calls, form)
    return HEAD + (form if spec.thought is None else _behind(spec.thought, form))


@dataclass(frozen=True, slots=True)
class Content:
    """A content of a structural tag that may be wrong.

    Attributes:
        place: where it stands.
        grammar: of it alone.
        small: an expression, as it stands in a grammar, of which nothing but its syntax may be
            wrong, or that nothing fits it; None: it is another content.
    """

    place: str
    grammar: str
    small: str | None = None


def contents_of(spec: StructuredOutputs, names: TokenNames = NO_NAMES) -> Iterator[Content]:
    """Yield the contents of a structural tag that may be wrong.

    Args:
        spec: the form.
        names: of the model's tokens.

    Raises:
        RequestError: a grammar has what would not be obeyed; says which.
    """
    for place, one in contents(json.loads(spec.text)["format"]):
        small = None
        if one["type"] == "regex" and is_cut(one["pattern"]):
            raise RequestError(f"{place}: {CUT}", spec.where)
        if one["type"] == "json_schema":
            form = f"start: %json {_with_options(one['json_schema'])}"
        elif one["type"] == "regex":
            told = _regex(one["pattern"])
            form = f"start: {told}"
            small = told if _is_small(one["pattern"]) else None
        elif one["type"] == "grammar":
            try:
                form = _lark(one["grammar"], spec.where, names)
            except RequestError as error:
                raise RequestError(f"{place}: {error}", spec.where) from error
        else:
            continue
        yield Content(place, HEAD + _with_texts(form, names.texts), small)


def is_cut(pattern: str) -> bool:
    """Whether a regular expression ends in a backslash that has nothing to escape."""
    return (len(pattern) - len(pattern.rstrip("\\"))) % 2 == 1


def row_of(parts: Iterable[str]) -> str:
    """Return the grammar of some expressions in a row, which nothing fits if nothing fits one."""
    return f"{HEAD}start: ROW\nROW: {' '.join(parts)}"


def _is_small(pattern: str) -> bool:
    """Whether an expression is far from the compiler's limits."""
    counted = pattern.count("{")  # one in another makes many
    is_counted_high = counted > 1 or _LARGE_COUNT.search(pattern) is not None
    return len(pattern) <= SMALL_CHARS and not is_counted_high


def _form(spec: StructuredOutputs, names: TokenNames) -> str:
    """Return the grammar of a text that has no reasoning before it."""
    is_whole = spec.calls is None  # reasoning comes before it
    if spec.kind == "json":
        return f"start: %json {_json(spec)}"
    if spec.kind == "regex":
        if is_cut(spec.text):  # which llguidance would leave out
            raise RequestError(f"the regex cannot be compiled: {CUT}", spec.where)
        return f"start: {_regex(spec.text)}"
    if spec.choice is not None:
        return f"start: {_regex(_any_of(spec.choice))}"
    if spec.kind == "structural_tag":
        where = spec.where
        writer = TagWriter(
            _literally, _regex, _with_options, lambda text: _lark(text, where, names), where
        )
        return writer.whole(json.loads(spec.text)["format"])
    return _lark(spec.text, spec.where, names, is_whole=is_whole)


def _or(*forms: str) -> str:
    """Return the grammar of a text that has one of some forms."""
    names = [f"form_{index}" for index in range(len(forms))]
    rules = (_rule(name, form) for name, form in zip(names, forms, strict=True))
    return "\n".join((f"start: {' | '.join(names)}", *rules))


def _rule(name: str, form: str) -> str:
    """Return a rule of a whole grammar."""
    return f"{name}: %lark {{\n{form}\n}}"


def _behind(thought: Thought, form: str) -> str:
    """Return the grammar of a text that may have reasoning before the form.

    It is what `ReasoningSplitter` makes of a text: it begins with an opening tag, ends with the
    first closing tag, and has the ends of lines next to that. An opening tag is lazy, so whatever
    begins with one is reasoning, also where the form allows it as text. A frame of the answer may
    stand before it.
    """
    frame, frames = ("frame? ", _any_of(thought.frames)) if thought.frames else ("", "")
    rules = [_rule("answer", form), *([f"frame: /{frames}/"] if frames else [])]
    if thought.is_past:
        return "\n".join((f"start: {frame}answer", *rules))
    begins = "" if thought.is_open else "opened "
    opens, closes = (_any_of(tags) for tags in (thought.opens, thought.closes))
    return "\n".join(
        (
            f"start: {'thought' if thought.is_open else 'thought?'} {frame}answer",
            f"thought: {begins}THOUGHT",
            f"opened[lazy]: /{opens}/",
            rf"THOUGHT: INNER /({closes})\n{{0,{MOST_BREAKS}}}/",
            f"INNER: /(?s:.*)/ & ~/(?s:.*)({closes})(?s:.*)/",
            *rules,
        )
    )


def _any_of(texts: Collection[str]) -> str:
    """Return a regular expression of some texts."""
    return "|".join(map(_literally, texts))


def _json(spec: StructuredOutputs) -> str:
    options = JSON_OPTIONS
    if spec.disable_any_whitespace:
        options = {**JSON_OPTIONS, "whitespace_flexible": False, "whitespace_pattern": None}
    elif spec.whitespace_pattern is not None:
        options = {**JSON_OPTIONS, "whitespace_pattern": spec.whitespace_pattern}
    return _with_options(json.loads(spec.text), options)


def _with_options(schema: Any, options: Mapping[str, Any] = JSON_OPTIONS) -> str:
    """Return the text of a checked schema as it is compiled."""
    strict = tightened(schema)
    let_any_of(strict)
    if isinstance(strict, bool):
        strict = {"allOf": [strict]}
    return json.dumps({**strict, "x-guidance": options}, ensure_ascii=False)


def _regex(text: str) -> str:
    """Return a regular expression as it stands in a grammar."""
    return f"/{regex_to_lark(text, '')}/"


def _literally(text: str) -> str:
    """Return a regular expression of one text."""
    return "".join(
        char if char.isascii() and char.isalnum() else f"\\u{{{ord(char):x}}}" for char in text
    )


def _lark(text: str, param: str, names: TokenNames, *, is_whole: bool = False) -> str:
    """Return a checked grammar in Lark's syntax; that of llama.cpp (GBNF) is translated.

    Args:
        text: the grammar.
        param: the field of a request that errors name.
        names: of the model's tokens.
        is_whole: nothing follows its texts, and nothing else may come instead.

    Raises:
        RequestError: it asks for what would be ignored.
    """
    if is_gbnf(text):
        if (number := text.count("::=")) > MOST_RULES:
            raise RequestError(
                f"the grammar has {number} rules in GBNF, at most {MOST_RULES} are supported; "
                "write it in Lark's syntax",
                param,
            )
        _refuse_options(text, param)
        try:
            text = lark_of(text, names, is_whole=is_whole)
        except TooLargeError as error:
            raise RequestError(f"the grammar {error}", param) from error
        except RecursionError:
            told = "has groups in groups in GBNF, too deep to be read; make rules of some of them"
            raise RequestError(f"the grammar {told}", param) from None
        except Exception as error:  # the library raises bare Exception
            raise RequestError(f"the grammar is not valid GBNF: {error}", param) from error
    plain = _ATOM.sub('""', text)  # texts may speak of anything, as descriptions do
    _refuse_options(plain, param)
    if _TEMPERATURE.search(plain):
        raise RequestError(
            "the grammar sets a temperature, which is not supported there; remove it and set the "
            "request's temperature",
            param,
        )
    return _with_checked_schemas(text, param)


def is_gbnf(text: str) -> bool:
    """Whether a grammar is one of llama.cpp's."""
    return "::=" in text and not _IN_LARK.search(text)


def _refuse_options(grammar: str, param: str) -> None:
    if _OPTIONS.search(grammar):
        raise RequestError("the grammar has %llguidance options; remove them", param)


def _with_texts(grammar: str, texts: Collection[str]) -> str:
    """Return a grammar that spells `<name>` as a text where it names a token that is one."""

    def spelled(found: re.Match[str]) -> str:
        return json.dumps(found[0], ensure_ascii=False) if found[0] in texts else found[0]

    return _ATOM.sub(spelled, grammar) if texts else grammar


def _with_checked_schemas(text: str, param: str) -> str:
    """Return a grammar whose JSON schemas are checked, and compiled as others are.

    Raises:
        RequestError: one is no JSON, or would not be enforced.
    """
    parts: list[str] = []
    done = 0
    at = 0
    while found := _ATOM_OR_SCHEMA.search(text, at):
        at = found.end()
        if found["schema"] is None:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError) as error:
            raise RequestError(f"the grammar has %json without a schema: {error}", param) from error
        parts += [text[done : found.end()], _with_options(prepared(schema, param).schema)]
        at = done = end
    return "".join([*parts, text[done:]])
