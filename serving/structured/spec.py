"""What a request asks of the form of its output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from onnxport.errors import RequestError
from onnxport.serving.channels import Channels
from onnxport.serving.structured import structural
from onnxport.serving.structured.prepared import prepared, tell
from onnxport.serving.text import HALF, is_whole
from onnxport.serving.thoughts import Thought

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
# What requests may say.
TOLD = (
    *KINDS,
    "whitespace_pattern",
    "disable_any_whitespace",
    "disable_additional_properties",
)
MAX_CHARS = 1 << 18  # of a schema, regex, grammar, or all choices: what one request may compile
MAX_CHOICES = 10_000
MAX_WHITESPACE = 1024  # characters of its pattern
NAMES: Mapping[Kind, str] = {
    "json": "the JSON schema",
    "regex": "the regex",
    "choice": "the list of choices",
    "grammar": "the grammar",
    "structural_tag": "the structural tag",
}
ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """The form that the output of a request has to have; exactly one kind, by vLLM's names.

    Attributes:
        json: a JSON schema, as a mapping or as JSON text; kept as text, in the order of its keys,
            as it is enforced.
        regex: a regular expression that the whole output matches, in the syntax of Rust's `regex`.
        choice: texts, of which the output is one.
        grammar: a context-free grammar, in Lark's syntax as llguidance knows it, or GBNF.
        json_object: any JSON object.
        structural_tag: free text with tags whose content has a form, in either of vLLM's dialects
            (`structural.py`), as a mapping or as JSON text; kept as text, as it is enforced.
        whitespace_pattern: regular expression of the whitespace between the parts of JSON; None:
            a space, or up to two ends of lines and an indent.
        disable_any_whitespace: write JSON without any whitespace.
        disable_additional_properties: objects that list properties, and say nothing of others, have
            no others; a schema of which parts cannot be closed is refused.
        strict: of a JSON schema, as OpenAI has it. None: a keyword that cannot be enforced is
            refused. False: it is left out, and the log names it. True: it is refused, and objects
            as above have no other properties where that can be.
        param: the field of a request that asked for it, which errors name; None: these fields.
        thought: the reasoning that may come before, of which nothing is asked; None: none may.
        calls: the form of calls of tools, which the output may have instead; None: it may not.
        has_channels: whether the form is that of messages, each with its channel, and not of an
            answer's text.

    Raises:
        RequestError: not exactly one kind is given, or one has not the right form; names it.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: Mapping[str, Any] | str | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = field(default=False, compare=False)  # as `json` says then
    strict: bool | None = field(default=None, compare=False)  # the same
    param: str | None = field(default=None, compare=False)
    thought: Thought | Channels | None = None
    calls: StructuredOutputs | None = None
    has_channels: bool = False

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(given) or 'nothing'}; give exactly one of "
                f"{', '.join(KINDS)}",
                self.param or "structured_outputs",
            )
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            self._check_type(name, bool, "true or false")
        if self.strict is not None:
            self._check_type("strict", bool, "true or false")
        self._check_json_alone()
        for name in ("regex", "grammar", "whitespace_pattern"):
            if getattr(self, name) is not None:
                self._check_type(name, str, "a text")
                if not getattr(self, name).strip() and name != "whitespace_pattern":
                    raise RequestError(
                        f"the {name} is empty; write it, or leave it out", self._at(name)
                    )
        if self.json is not None:
            object.__setattr__(self, "json", self._schema_text())
        if self.choice is not None:
            object.__setattr__(self, "choice", self._choices())
        if self.structural_tag is not None:
            object.__setattr__(self, "structural_tag", self._tag_text())
            if self.calls is not None:
                raise RequestError(
                    "a structural tag has free text, which would hide calls of tools; leave "
                    "structural_tag or the tools out, or set tool_choice to none",
                    self.where,
                )
        self._check_whitespace()
        if not is_whole(self.text):
            raise RequestError(f"{NAMES[self.kind]} {HALF}", self.where)
        if len(self.text) > MAX_CHARS:
            raise RequestError(
                f"{NAMES[self.kind]} of {len(self.text)} characters cannot be compiled, at most "
                f"{MAX_CHARS} are; make it smaller",
                self.where,
            )

    @property
    def kind(self) -> Kind:
        """Which kind is given; an object is a schema too."""
        if self.json is not None or self.json_object:
            return "json"
        if self.regex is not None:
            return "regex"
        if self.structural_tag is not None:
            return "structural_tag"
        return "grammar" if self.grammar is not None else "choice"

    @property
    def text(self) -> str:
        """The schema, the regex, the grammar, or the choices as a list in JSON."""
        if self.json_object:
            return ANY_OBJECT
        if self.choice is not None:
            return json.dumps(self.choice)
        told = (self.json, self.regex, self.grammar, self.structural_tag)
        text = next((each for each in told if each is not None), "")
        assert isinstance(text, str)
        return text

    @property
    def num_chars(self) -> int:
        """How long what has to be compiled is."""
        return len(self.text) + (0 if self.calls is None else self.calls.num_chars)

    @property
    def where(self) -> str:
        """The field of a request that errors name."""
        return self._at("json_object" if self.json_object else self.kind)

    def _at(self, name: str) -> str:
        return self.param or f"structured_outputs.{name}"

    def _check_type(self, name: str, kind: type, what: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, kind):
            raise RequestError(f"{name} is {repr(value)[:80]}; it must be {what}", self._at(name))

    def _check_json_alone(self) -> None:
        """Refuse a word about schemas where there is no JSON."""
        for name in ("disable_additional_properties", "strict"):
            if getattr(self, name) and self.kind != "json":
                raise RequestError(
                    f"{name} is for json and json_object, and this is {NAMES[self.kind]}; leave it "
                    "out",
                    self._at(name),
                )

    def _check_whitespace(self) -> None:
        """Refuse a word about whitespace where there is no JSON, or two words."""
        if len(self.whitespace_pattern or "") > MAX_WHITESPACE:
            raise RequestError(
                f"whitespace_pattern has more than {MAX_WHITESPACE} characters; shorten it",
                self._at("whitespace_pattern"),
            )
        both = self.whitespace_pattern is not None and self.disable_any_whitespace
        told = self.whitespace_pattern is not None or self.disable_any_whitespace
        if both or (told and self.kind != "json"):
            raise RequestError(
                "whitespace_pattern and disable_any_whitespace are for json and json_object, and "
                "only one of the two; remove what does not fit",
                self._at(
                    "disable_any_whitespace"
                    if self.whitespace_pattern is None
                    else "whitespace_pattern"
                ),
            )

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any], param: str | None = None) -> StructuredOutputs:
        """Return what a mapping with the names of the fields says.

        Args:
            given: members that are None count as left out.
            param: see the attribute.

        Raises:
            RequestError: a name is not known, or as the constructor.
        """
        if unknown := [name for name in given if name not in TOLD]:
            raise RequestError(
                f"structured_outputs has {unknown[0]!r}, which is not supported; it takes "
                f"{', '.join(TOLD)}",
                param or f"structured_outputs.{unknown[0]}",
            )
        told = {name: value for name, value in given.items() if value is not None}
        return cls(**told, param=param)

    def _schema_text(self) -> str:
        """Return the checked JSON schema as text.

        Raises:
            RequestError: it is no JSON, or a schema that is not supported.
        """
        given: Any = self.json
        if not isinstance(given, str | bool):
            self._check_type("json", Mapping, "a JSON schema, or its text")
        schema, text = self._as_json(given, "json", "the schema")
        if len(text) > MAX_CHARS:  # it is refused anyway
            return text
        closed = self.disable_additional_properties
        ready = prepared(schema, self._at("json"), strict=self.strict, is_closed=closed)
        tell(self._at("json"), ready.left_out)
        return self._enforced(text, ready.schema, "json")

    def _tag_text(self) -> str:
        """Return the checked structural tag as text.

        Raises:
            RequestError: it is no JSON, or has what is not supported.
        """
        given: Any = self.structural_tag
        if not isinstance(given, str):
            self._check_type("structural_tag", Mapping, "a structural tag, or its text")
        tag, text = self._as_json(given, "structural_tag", NAMES["structural_tag"])
        if len(text) > MAX_CHARS:  # it is refused anyway
            return text
        read = structural.read(tag, self._at("structural_tag"))
        return self._enforced(text, read, "structural_tag")

    def _enforced(self, given: str, value: Any, kind: Kind) -> str:
        """Return what is enforced as text, which may be longer than what was given.

        Raises:
            RequestError: it alone is too long.
        """
        text = compact(value)
        if len(text) > MAX_CHARS:
            raise RequestError(
                f"{NAMES[kind]} of {len(given)} characters has {len(text)} as it is enforced, with "
                "what it leaves open told or closed, and cannot be compiled, at most "
                f"{MAX_CHARS} are; make it smaller",
                self._at(kind),
            )
        return text

    def _as_json(self, given: Any, name: str, what: str) -> tuple[Any, str]:
        """Return what a field says as JSON is read, and its text.

        Raises:
            RequestError: it is no JSON.
        """
        try:
            value = json.loads(given) if isinstance(given, str) else given
            return value, compact(value, allow_nan=False)
        except RecursionError as error:
            raise RequestError(f"{what} is nested too deep; flatten it", self._at(name)) from error
        except (ValueError, TypeError) as error:
            raise RequestError(
                f"{what} is not valid JSON: {error}; correct it", self._at(name)
            ) from error

    def _choices(self) -> tuple[str, ...]:
        """Return the checked choices.

        Raises:
            RequestError: there are none, too many, or one is no text, empty, or not whole.
        """
        given: Any = self.choice
        right = isinstance(given, list | tuple) and all(
            isinstance(one, str) and one for one in given
        )
        if not right or not given or len(given) > MAX_CHOICES:
            what = f"of {len(given)} texts" if right else repr(given)[:80]
            raise RequestError(
                f"choice is {what}; give 1 to {MAX_CHOICES} texts, none of them empty",
                self._at("choice"),
            )
        if not all(map(is_whole, given)):
            raise RequestError(f"{NAMES['choice']} {HALF}", self._at("choice"))
        return tuple(given)


def compact(value: Any, *, allow_nan: bool = True) -> str:
    """Return a value as JSON without white space.

    Args:
        value: as JSON is read.
        allow_nan: whether a number may be none of JSON's.

    Raises:
        ValueError, TypeError, RecursionError: it is no value of JSON.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=allow_nan, separators=(",", ":"))
